"""One rank's look at its own operations: what it can check alone, and the evidence that it brings to the proof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rma_mm.errors import ScheduleError
from rma_mm.geometry.span import Region
from rma_mm.schedule.ops import (
    Accumulate,
    Await,
    Barrier,
    Broadcast,
    Copy,
    Finish,
    Multiply,
    Op,
    Post,
    Reduce,
    Ref,
    Scale,
    Schedule,
    Shift,
    Slot,
    expand,
    held,
)
from rma_mm.schedule.passes import kind_of
from rma_mm.schedule.verify.alone import check_alone, check_whole, fail
from rma_mm.schedule.verify.coverage import covers, covers_union
from rma_mm.schedule.verify.fingerprint import PRIME, fingerprint, total
from rma_mm.schedule.verify.messages import balance
from rma_mm.schedule.verify.proof import NAMES, Epochs, Evidence
from rma_mm.schedule.verify.shared_slots import SharedSlots


def evidence(schedule: Schedule, rank: int) -> Evidence:
    """What `rank` brings, once it has checked all that it can alone. Raises ScheduleError naming the operation."""
    witness = _Witness(schedule, rank)
    ops = expand(schedule, rank)
    for op in ops:
        witness.look(op)
    return witness.evidence(ops)


@dataclass
class _Scratch:
    """A slot of the rank, and what has become of it."""

    filled: list[Region] = field(default_factory=list)
    sent: int = 0
    """Fingerprint of what was sent of it."""
    is_sent: bool = False


class _Witness:
    """One rank's operations, looked at in order."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.epoch = 0
        self.epochs = {name: Epochs() for name in NAMES}
        self.added = dict.fromkeys(NAMES, 0)
        self.opened: dict[str, list[Region]] = defaultdict(list)
        self.finished: list[Region] = []
        self.taken: list[Region] = []
        """Parts of C that others computed."""
        self.frames: dict[str, Slot] = {}
        self.slots: dict[Slot, _Scratch] = defaultdict(_Scratch)
        self.known: set[tuple[Slot, Region]] = set()
        self.share = schedule.share if schedule.shape else None
        self.shared = SharedSlots(rank)

    def look(self, op: Op) -> None:
        """Check one operation."""
        check_alone(self.schedule, self.rank, op)
        if isinstance(op, Barrier):
            self.epoch += 1
        elif isinstance(op, Multiply):
            self.multiply(op)
        elif isinstance(op, Copy):
            self.take(op, op.src, op.dst)
        elif isinstance(op, Broadcast):
            self.broadcast(op)
        elif isinstance(op, Shift):
            self.shift(op)
        elif isinstance(op, Accumulate | Reduce):
            pairs = [(op.src, op.dst)] if isinstance(op, Accumulate) else zip(op.srcs, op.dsts, strict=True)
            for src, dst in pairs:
                self.add(op, src, dst)
        elif isinstance(op, Scale):
            self.open(op, op.c)
        elif isinstance(op, Finish):
            self.finish(op)
        elif isinstance(op, Post):
            self.shared.post(op)
        elif isinstance(op, Await):
            self.shared.learn(op)

    # -- one operation ----------------------------------------------------------------------------

    def multiply(self, op: Multiply) -> None:
        (m, k), (k2, n) = op.a.region, op.b.region
        if k != k2 or op.c.region != Region((m, n)) or op.c.rank != self.rank:
            fail(self.rank, op, "the regions of a, b and c do not fit together")
        for ref in (op.a, op.b):
            self.read(op, ref)
        if op.first:
            self.open(op, op.c)
        elif isinstance(op.c.buffer, Slot):
            self.add_up(op, op.c)
        else:
            self.require_open(op)
            self.epochs["C"].note(self.epoch, "written")
        self.added["C"] += fingerprint(Region((m, n, k)))

    def read(self, op: Op, ref: Ref) -> None:
        """Something is read where it lies."""
        check_whole(self.schedule, self.rank, op, ref)
        if isinstance(ref.buffer, str):
            if ref.buffer in NAMES:
                is_own = ref.rank == self.rank
                self.epochs[ref.buffer].note(self.epoch, first="first_used")
                self.epochs[ref.buffer].note(self.epoch, first="" if is_own else "first_taken")
            return
        if ref.buffer.group:
            self.shared.read(op, ref.buffer)
        else:
            self.require_filled(op, ref)

    def require_filled(self, op: Op, ref: Ref) -> None:
        """A slot still holds what is to be read of it, or sent."""
        assert isinstance(ref.buffer, Slot)
        is_there = self.frames.get(ref.buffer.frame) == ref.buffer
        is_known = (ref.buffer, ref.region) in self.known
        if not is_there or not (is_known or covers_union(self.slots[ref.buffer].filled, ref.region)):
            fail(self.rank, op, f"{ref} is read, added to or sent before it is filled")
        self.known.add((ref.buffer, ref.region))

    def take(self, op: Op, src: Ref, dst: Ref) -> None:
        """A region comes to this rank."""
        if src.region != dst.region or (isinstance(dst.buffer, str) and dst.rank != self.rank):
            fail(self.rank, op, "a copy moves one region to the rank that runs it")
        if isinstance(op, Copy):
            self.read(op, src)
        else:
            check_whole(self.schedule, self.rank, op, src)
        if src.buffer == "C" and self.share and not src.region.issubset(self.computed(src.rank)):
            fail(self.rank, op, "the source is not finished")
        if isinstance(dst.buffer, Slot) and dst.buffer.group:
            self.shared.fill(op, dst)
        elif isinstance(dst.buffer, Slot):
            self.fill(dst)
        elif dst.buffer == "C":  # of no one else's concern: others take what this rank finished
            self.taken.append(dst.region)
        else:
            assert isinstance(dst.buffer, str)
            self.open(op, dst)
            self.epochs[dst.buffer].note(self.epoch, "added")  # like what is added, there after the next barrier

    def broadcast(self, op: Broadcast) -> None:
        for part in op.parts:
            if part.rank == self.rank:
                check_whole(self.schedule, self.rank, op, part)
                if part.buffer == "C" and not covers(self.finished, part.region):
                    fail(self.rank, op, "the source is not finished")
        by_owner = {(part.rank, part.region): part for part in op.parts}
        for source, dst in op.arriving(self.rank):
            self.take(op, by_owner[source, dst.region], dst)

    def shift(self, op: Shift) -> None:
        if not isinstance(op.dst.buffer, Slot) or op.dst.rank != self.rank or op.src.rank != self.rank:
            fail(self.rank, op, "a shift goes from the rank's own memory into a slot of its own")
        if kind_of(op.src) == "C":
            self.send(op, op.src)
        else:
            self.read(op, op.src)
        self.fill(op.dst)

    def add(self, op: Op, src: Ref, dst: Ref) -> None:
        """A region is added to a home, or to a slot of a rank that sums."""
        if src.region != dst.region or src.rank != self.rank:
            fail(self.rank, op, "what is added is one region of the rank that runs it")
        if isinstance(src.buffer, Slot):
            self.send(op, src)
        if isinstance(dst.buffer, Slot):
            if dst.rank == self.rank:
                self.fill(dst)
            return
        home = self.computed(dst.rank) if dst.buffer == "C" else self.schedule.home(dst.buffer, dst.rank)
        if not dst.region.issubset(home):
            fail(self.rank, op, "the target is not opened")
        self.epochs[dst.buffer].note(self.epoch, "added", "written", first="first_added")
        if dst.buffer != "C":
            self.added[dst.buffer] += fingerprint(dst.region)

    def fill(self, dst: Ref) -> None:
        """A part of a slot is written."""
        assert isinstance(dst.buffer, Slot)
        self.frames[dst.buffer.frame] = dst.buffer
        self.slots[dst.buffer].filled.append(dst.region)

    def send(self, op: Op, src: Ref) -> None:
        """A part of a sum leaves its slot."""
        assert isinstance(src.buffer, Slot)
        self.require_filled(op, src)
        slot = self.slots[src.buffer]
        slot.sent, slot.is_sent = (slot.sent + fingerprint(src.region)) % PRIME, True

    def add_up(self, op: Op, c: Ref) -> None:
        """A product is added to a sum in scratch."""
        assert isinstance(c.buffer, Slot)
        self.require_filled(op, c)
        if self.slots[c.buffer].is_sent:
            fail(self.rank, op, f"{c} is added to after it was sent")

    def open(self, op: Op, c: Ref) -> None:
        """A region is set."""
        if isinstance(c.buffer, Slot):
            self.fill(c)
            return
        self.opened[c.buffer].append(c.region)
        self.epochs[c.buffer].note(self.epoch, "opened", "written")

    def require_open(self, op: Multiply | Finish) -> None:
        if op.c.region not in self.opened["C"] and not covers(self.opened["C"], op.c.region):
            fail(self.rank, op, "C is added to, or finished, before it is opened")
        if any(part & op.c.region for part in self.finished):
            fail(self.rank, op, "C is added to, or finished, after it was finished")

    def finish(self, op: Finish) -> None:
        self.require_open(op)
        self.finished.append(op.c.region)
        self.epochs["C"].note(self.epoch, "written", first="first_used")

    # -- the end ----------------------------------------------------------------------------------

    def computed(self, rank: int) -> Region:
        """What a rank opens and finishes of C."""
        if self.share is None:
            return self.schedule.home("C", rank)
        return held(self.share, self.schedule.homes["C"].shape, self.schedule.mesh, rank)

    def evidence(self, ops: Sequence[Op]) -> Evidence:
        """What this rank brings. Raises ScheduleError where its homes or sums end otherwise than they should."""
        self.check_homes()
        for slot, scratch in self.slots.items():
            if slot.name[0] == "C" and scratch.sent != fingerprint(slot.region):
                raise ScheduleError(f"rank {self.rank}: not all of the sum {slot} is sent, once")
        numbers = [*(self.added[name] for name in NAMES), self.shared.missing()]
        halves = [half for number in numbers for half in divmod(number % PRIME, 2**32)]
        epochs = [value for name in NAMES for value in vars(self.epochs[name]).values()]
        return Evidence((*halves, balance(ops, self.rank)), (*epochs, self.epoch, -self.epoch))

    def check_homes(self) -> None:
        """Each element of this rank's homes is set once, and of C finished once or taken from who did."""
        opened = self.finished if self.share is None else [self.computed(self.rank)]
        checked = [
            ("opened", "C", self.opened["C"], opened),
            ("finished", "C", self.finished, opened),
            ("written", "C", [*self.finished, *self.taken], [self.schedule.home("C", self.rank)]),
        ]
        for name in NAMES[:2]:
            if name in self.schedule.homes:
                checked.append(("filled", name, self.opened[name], [self.schedule.home(name, self.rank)]))
        for what, name, regions, wanted in checked:
            if total(regions) != total(wanted):
                raise ScheduleError(
                    f"rank {self.rank}: of its {name}, {regions} was {what}, and not {wanted}, each once"
                )

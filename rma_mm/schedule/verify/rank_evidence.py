"""One rank's look at its own operations: what it can check alone, and the evidence that it brings to the proof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field

from rma_mm.classes import dataclass
from rma_mm.errors import ScheduleError
from rma_mm.geometry.span import Region
from rma_mm.schedule import ops
from rma_mm.schedule.dispatch import Dispatch
from rma_mm.schedule.mirror_ops import Clear, Mirror
from rma_mm.schedule.ops import Op, Ref, Slot
from rma_mm.schedule.schedule import Schedule, expand, home_region
from rma_mm.schedule.verify.coverage import covers, covers_union, products_of
from rma_mm.schedule.verify.fingerprint import PRIME, fingerprint, total
from rma_mm.schedule.verify.local_rules import check_alone, check_mirror, check_product, check_whole, fail
from rma_mm.schedule.verify.messages import balance
from rma_mm.schedule.verify.proof import MIRRORED, NAMES, PASSED_ON, Epochs, Evidence
from rma_mm.schedule.verify.shared_slots import SharedSlots


def evidence(schedule: Schedule, rank: int) -> Evidence:
    """Return the evidence of `rank`, after all checks that it can do alone.

    Raises ScheduleError naming the operation.
    """
    witness = _RankEvidence(schedule, rank)
    program = expand(schedule, rank)
    for op in program:
        witness.look(op)
    return witness.evidence(program)


@dataclass
class _Scratch:
    """A slot of the rank, with its state."""

    filled: list[Region] = field(default_factory=list)
    sent: int = 0  # fingerprint of what was sent of it
    is_sent: bool = False


class _RankEvidence:
    """One rank's operations, looked at in order."""

    handlers = Dispatch[None]()

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.epoch = 0
        self.epochs = {name: Epochs() for name in NAMES}
        self.added = dict.fromkeys(NAMES, 0)
        self.opened: dict[str, list[Region]] = defaultdict(list)
        self.finished: list[Region] = []
        self.taken: list[Region] = []  # parts of C that others computed
        self.brought: dict[tuple[int, str], list[Region]] = {}
        """(rank, home) → parts of its home that it brings from where they were given, summed or computed."""
        self.frames: dict[str, Slot] = {}
        self.slots: dict[Slot, _Scratch] = defaultdict(_Scratch)
        self.known: set[tuple[Slot, Region]] = set()
        self.output_layout = schedule.output_layout if schedule.shape else None
        self.shared_slots = SharedSlots(rank)

    def look(self, op: Op) -> None:
        check_alone(self.schedule, self.rank, op)
        self.handlers[type(op)](self, op)

    # -- one operation ----------------------------------------------------------------------------

    @handlers.on(ops.Barrier)
    def barrier(self, _: ops.Barrier) -> None:
        self.epoch += 1

    @handlers.on(ops.Post)
    def post(self, op: ops.Post) -> None:
        self.shared_slots.post(op)

    @handlers.on(ops.Await)
    def await_(self, op: ops.Await) -> None:
        self.shared_slots.learn(op)

    @handlers.on(ops.Copy)
    def copy(self, op: ops.Copy) -> None:
        self.take(op, op.src, op.dst)

    @handlers.on(ops.Accumulate)
    def accumulate(self, op: ops.Accumulate) -> None:
        self.add(op, op.src, op.dst)

    @handlers.on(ops.Reduce)
    def reduce(self, op: ops.Reduce) -> None:
        for src, dst in zip(op.srcs, op.dsts, strict=True):
            self.add(op, src, dst)

    @handlers.on(ops.Scale)
    def scale(self, op: ops.Scale) -> None:
        self.open(op, op.c)

    @handlers.on(ops.Multiply)
    def multiply(self, op: ops.Multiply) -> None:
        self.added["C"] += fingerprint(check_product(self.schedule, self.rank, op))
        if op.half:
            self.epochs[MIRRORED].note(self.epoch, "added")
        for ref in (op.a, op.b):
            self.read(op, ref)
        if op.first:
            self.open(op, op.c)
        elif isinstance(op.c.buffer, Slot):
            self.add_up(op, op.c)
        else:
            self.require_open(op)
            self.epochs["C"].note(self.epoch, "written")

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
            self.shared_slots.read(op, ref.buffer)
        else:
            self.require_filled(op, ref)

    def require_filled(self, op: Op, ref: Ref) -> None:
        """Check that a slot still holds the data to be read or sent."""
        assert isinstance(ref.buffer, Slot)
        is_there = self.frames.get(ref.buffer.frame) == ref.buffer
        is_known = (ref.buffer, ref.region) in self.known
        if not is_there or not (is_known or covers_union(self.slots[ref.buffer].filled, ref.region)):
            fail(self.rank, op, "not-filled", f"{ref} is read, added to or sent before it is filled")
        self.known.add((ref.buffer, ref.region))

    def take(self, op: Op, src: Ref, dst: Ref) -> None:
        """A region comes to this rank."""
        if src.region != dst.region or (isinstance(dst.buffer, str) and dst.rank != self.rank):
            fail(self.rank, op, "misfit", "a copy moves one region to the rank that runs it")
        is_final = self.is_final(src)
        is_passed_on = src.buffer == dst.buffer and not is_final
        if is_passed_on:
            self.pass_on(op, src)
        elif isinstance(dst.buffer, str):
            self.epochs[PASSED_ON[dst.buffer]].note(self.epoch, "added")
        if isinstance(op, ops.Copy) and not is_passed_on:
            self.read(op, src)
        else:
            check_whole(self.schedule, self.rank, op, src)
        if src.buffer == "C":  # before anything is cleared of it; what goes to replicas, when all of it is there
            self.epochs[MIRRORED].note(self.epoch, *(["opened"] if isinstance(dst.buffer, Slot) else []),
                                       first="" if isinstance(dst.buffer, Slot) else "first_taken")
        if src.buffer == "C" and not (is_passed_on or is_final):
            fail(self.rank, op, "not-final", "the source is not finished")
        if isinstance(dst.buffer, Slot) and dst.buffer.group:
            self.shared_slots.fill(op, dst)
        elif isinstance(dst.buffer, Slot):
            self.fill(dst)
        elif dst.buffer == "C":
            self.taken.append(dst.region)
        else:
            assert isinstance(dst.buffer, str)
            self.open(op, dst)
            self.epochs[dst.buffer].note(self.epoch, "added")  # like what is added, there after the next barrier

    def pass_on(self, op: Op, src: Ref) -> None:
        """A region comes from a rank that has brought it itself, from elsewhere."""
        assert isinstance(src.buffer, str)
        key = src.rank, src.buffer
        if key not in self.brought:
            made = (op for op in expand(self.schedule, src.rank) if isinstance(op, ops.Copy | ops.Broadcast))
            moves = ((move.src, move.dst) for op in made for move in op.moves(src.rank))
            self.brought[key] = [
                to.region for at, to in moves if at and to and to.buffer == src.buffer
                if at.buffer != src.buffer or self.is_final(at)
            ]
        if not covers(self.brought[key], src.region):
            fail(self.rank, op, "not-final", "the source is not finished, nor brought there from where it is")
        self.epochs[PASSED_ON[src.buffer]].note(self.epoch, first="first_used")

    @handlers.on(ops.Broadcast)
    def broadcast(self, op: ops.Broadcast) -> None:
        for part in op.parts:
            if part.rank == self.rank:
                check_whole(self.schedule, self.rank, op, part)
                if part.buffer == "C" and not covers([*self.finished, *self.taken], part.region):
                    fail(self.rank, op, "not-final", "the source is not finished")
                if isinstance(part.buffer, Slot):
                    self.read(op, part)
        for move in op.moves(self.rank):
            if move.src and move.dst and isinstance(move.src.buffer, Slot) and isinstance(move.dst.buffer, Slot):
                self.fill(move.dst)  # who sends it shows that it holds it
            elif move.src and move.dst:
                self.take(op, move.src, move.dst)

    @handlers.on(ops.Shift)
    def shift(self, op: ops.Shift) -> None:
        if not isinstance(op.dst.buffer, Slot) or op.dst.rank != self.rank or op.src.rank != self.rank:
            fail(self.rank, op, "misfit", "a shift goes from the rank's own memory into a slot of its own")
        if op.src.operand == "C":
            self.send(op, op.src)
        else:
            self.read(op, op.src)
        self.fill(op.dst)

    def add(self, op: Op, src: Ref, dst: Ref) -> None:
        """A region is added to a home, or to a slot of a rank that sums."""
        if src.region != dst.region or src.rank != self.rank:
            fail(self.rank, op, "misfit", "what is added is one region of the rank that runs it")
        if isinstance(src.buffer, Slot):
            self.send(op, src)
        if isinstance(dst.buffer, Slot):
            if dst.rank == self.rank:
                self.fill(dst)
            return
        home = self.computed(dst.rank) if dst.buffer == "C" else self.schedule.home(dst.buffer, dst.rank)
        if not dst.region.issubset(home):
            fail(self.rank, op, "not-opened", "the target is not opened")
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
            fail(self.rank, op, "written-late", f"{c} is added to after it was sent")

    def open(self, op: Op, c: Ref) -> None:
        if isinstance(c.buffer, Slot):
            self.fill(c)
            return
        self.opened[c.buffer].append(c.region)
        self.epochs[c.buffer].note(self.epoch, "opened", "written")

    def require_open(self, op: ops.Multiply | ops.Finish) -> None:
        if op.c.region not in self.opened["C"] and not covers(self.opened["C"], op.c.region):
            fail(self.rank, op, "not-opened", "C is added to, or finished, before it is opened")
        if any(part & op.c.region for part in self.finished):
            fail(self.rank, op, "written-late", "C is added to, or finished, after it was finished")

    @handlers.on(ops.Finish)
    def finish(self, op: ops.Finish) -> None:
        self.require_open(op)
        self.finished.append(op.c.region)
        self.epochs["C"].note(self.epoch, "written", first="first_used")

    @handlers.on(Mirror)
    def mirror(self, op: Mirror) -> None:
        """Record that a part of C gets its products by mirroring. Sources and mirrored parts cover C, each once."""
        check_mirror(self.schedule, self.rank, op)
        self.read(op, op.src)
        self.epochs[MIRRORED].note(self.epoch, "written")
        self.added[MIRRORED] += fingerprint(op.c.region)
        if op.is_diagonal:
            self.epochs[MIRRORED].note(self.epoch, first="first_used")
            return
        self.added[MIRRORED] += fingerprint(op.src.region)
        self.added["C"] += fingerprint(products_of(self.schedule, op.c.region))
        self.opened["C"].append(op.c.region)
        self.finished.append(op.c.region)

    @handlers.on(Clear)
    def clear(self, op: Clear) -> None:
        """Clear the part above the diagonal; others have mirrored it already."""
        if self.schedule.symmetry is None or op.c.rank != self.rank or not covers(self.finished, op.c.region):
            fail(self.rank, op, "not-final", "zeros go to a finished C that is known to be symmetric")
        self.epochs[MIRRORED].note(self.epoch, "written", first="first_added")

    # -- the end ----------------------------------------------------------------------------------

    def computed(self, rank: int) -> Region:
        """Return the part of C that a rank opens and finishes."""
        if self.output_layout is None:
            return self.schedule.home("C", rank)
        return home_region(self.output_layout, self.schedule.homes["C"].shape, self.schedule.mesh, rank)

    def is_final(self, src: Ref) -> bool:
        """True if it is a part of C that the rank that holds it finishes."""
        is_computed = src.buffer == "C" and self.output_layout is not None
        return is_computed and src.region.issubset(self.computed(src.rank))

    def evidence(self, program: Sequence[Op]) -> Evidence:
        """Return the evidence of this rank.

        Raises ScheduleError if its homes or sums end otherwise than they should.
        """
        self.check_homes()
        for slot, scratch in self.slots.items():
            if slot.name[0] == "C" and scratch.sent != fingerprint(slot.region):
                raise ScheduleError("not-once", f"rank {self.rank}: not all of the sum {slot} is sent, once")
        numbers = [*(self.added[name] for name in NAMES), self.shared_slots.missing()]
        halves = [half for number in numbers for half in divmod(number % PRIME, 2**32)]
        epochs = [value for name in NAMES for value in vars(self.epochs[name]).values()]
        return Evidence((*halves, balance(program, self.rank)), (*epochs, self.epoch, -self.epoch))

    def check_homes(self) -> None:
        """Each element of this rank's homes is set once, and of C finished once or taken from who did."""
        opened = self.finished if self.output_layout is None else [self.computed(self.rank)]
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
                    "not-once", f"rank {self.rank}: of its {name}, {regions} was {what}, and not {wanted}, each once"
                )

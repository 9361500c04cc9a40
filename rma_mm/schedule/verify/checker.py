"""Check a whole schedule before anything runs: no data, no MPI. Pure, and at the cost of all ranks' steps.

What holds afterwards: every point of (m, n, k) is multiplied once and reaches C once; every reference is within
its buffer; every slot is filled before it is read; ranks meet at the same barriers; no two conflicting accesses
share an epoch; every region of C is opened once and finished once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from keyword import iskeyword
from math import prod
from typing import NoReturn

from rma_mm.errors import ScheduleError
from rma_mm.geometry.span import Region
from rma_mm.schedule.ops import (
    STAGE,
    Accumulate,
    Await,
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
    epochs_of,
    expand,
    foreign,
    outgoing,
)
from rma_mm.schedule.passes import frame_sizes, kind_of, refs_of
from rma_mm.schedule.verify.alone import check_alone, check_whole, fail
from rma_mm.schedule.verify.coverage import coverage, covers, covers_union
from rma_mm.schedule.verify.messages import Letters
from rma_mm.schedule.verify.slot_state import SlotState
from rma_mm.schedule.verify.vector_clocks import Order


@dataclass
class Report:
    """What a verified schedule needs."""

    scratch: list[int]
    """Elements of scratch memory, by rank."""
    steps: list[int]
    """Operations, by rank (a pool's tasks dealt out in turn)."""
    words: list[int]
    """Elements of other ranks' memory that each rank reads or adds to (likewise)."""


@dataclass(frozen=True)
class _Access:
    """One operation's touch of a home matrix within an epoch."""

    region: Region
    kind: str
    rank: int
    op: Op

    @property
    def is_pending(self) -> bool:
        """Whether it lands at the next barrier only."""
        return self.kind == "write" and isinstance(self.op, Copy)


def verify(schedule: Schedule) -> Report:
    """Check every invariant of `schedule`; raises ScheduleError naming the rank and the operation."""
    programs = [expand(schedule, rank) for rank in schedule.mesh.ranks]
    checker = _Checker(schedule)
    epochs = [epochs_of(ops) for ops in programs]
    counts = {len(one) for one in epochs}
    if len(counts) > 1:
        raise ScheduleError(f"barriers do not match: the ranks meet at {[len(one) - 1 for one in epochs]} of them")
    for epoch in zip_longest(*epochs):
        checker.begin_epoch()
        checker.run(epoch)
        checker.end_epoch()
    checker.end()
    scratch = [sum(frame_sizes(ops, rank).values()) for rank, ops in enumerate(programs)]
    words = [sum(count for op in ops for _, count, _ in foreign(op, rank)) for rank, ops in enumerate(programs)]
    return Report(scratch, [len(ops) for ops in programs], words)


def clipped(products: Sequence[Region], face: Region) -> list[Region]:
    """What products (m, n, k) contribute to a box of C."""
    return [box for m, n, k in products if (box := Region((m & face[0], n & face[1], k)))]


class _Checker:
    """State of the check: what slots hold, what of C is open, and what this epoch touched."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.order = Order(schedule.mesh.size)
        self.scratch = SlotState(self.fail, self.order)
        self.opened: dict[tuple[int, str], list[Region]] = defaultdict(list)
        self.ready: dict[tuple[int, str], list[Region]] = defaultdict(list)
        self.finished: dict[int, list[Region]] = defaultdict(list)
        self.products: list[Region] = []
        self.added: dict[str, list[Region]] = defaultdict(list)
        self.accesses: dict[tuple[int, str], list[_Access]] = {}
        self.opening: list[tuple[tuple[int, str], Region]] = []
        self.letters = Letters()

    def run(self, epoch: Sequence[list[Op]]) -> None:
        """Check the operations of an epoch, each rank's in order and as far as what it waits for has been sent."""
        left = [deque(ops) for ops in epoch]
        while any(left):
            moved = False
            for rank, ops in enumerate(left):
                while ops and self.arrived(rank, ops[0]):
                    self.check(rank, ops.popleft())
                    moved = True
            if not moved:
                rank = next(rank for rank, ops in enumerate(left) if ops)
                self.fail(rank, left[rank][0], "it waits for ever for what another rank does not send")

    def fail(self, rank: int, op: Op, why: str) -> NoReturn:
        fail(rank, op, why)

    # -- epochs -----------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        self.accesses = defaultdict(list)
        self.opening = []
        self.letters.epoch += 1
        self.order.meet()

    def end_epoch(self) -> None:
        for (owner, buffer), accesses in self.accesses.items():
            self.check_conflicts(owner, buffer, list(dict.fromkeys(accesses)))
        for key, region in self.opening:
            self.ready[key].append(region)

    def check_conflicts(self, owner: int, buffer: str, accesses: list[_Access]) -> None:
        if all(access.kind == "read" for access in accesses):
            return
        for one, two in combinations(accesses, 2):
            kinds = {one.kind, two.kind}
            harmless = len(kinds) == 1 and kinds <= {"read", "add"}
            ordered = one.rank == two.rank and "add" not in kinds and not (one.is_pending or two.is_pending)
            if not harmless and not ordered and one.region & two.region:
                raise ScheduleError(
                    f"conflict in one epoch on {buffer} of rank {owner}: "
                    f"rank {one.rank} «{one.op}» and rank {two.rank} «{two.op}»; a barrier is missing between them"
                )

    def touch(self, rank: int, op: Op, ref: Ref, kind: str) -> None:
        if isinstance(ref.buffer, str):
            self.accesses[ref.rank, ref.buffer].append(_Access(ref.region, kind, rank, op))

    # -- one operation ----------------------------------------------------------------------------

    def check(self, rank: int, op: Op) -> None:
        check_alone(self.schedule, rank, op)
        name = type(op).__name__.lower()
        check = getattr(self, name + "_" * iskeyword(name))
        check(rank, op)

    def copy(self, rank: int, op: Copy) -> None:
        is_own = op.dst.rank == rank or isinstance(op.dst.buffer, Slot)
        if op.src.region != op.dst.region or not is_own:
            self.fail(rank, op, "a copy moves one region to the rank that runs it")
        if isinstance(op.src.buffer, Slot):
            self.fail(rank, op, "a copy comes from a home")
        check_whole(self.schedule, rank, op, op.src)
        self.touch(rank, op, op.src, "read")
        self.touch(rank, op, op.dst, "write")
        if isinstance(op.dst.buffer, Slot):
            self.scratch.fill(rank, op, op.dst)
        else:
            self.fill_home(rank, op, op.dst, op.src.rank)

    def post(self, rank: int, op: Post) -> None:
        self.scratch.land(rank, op)

    def await_(self, rank: int, op: Await) -> None:
        self.order.learn(rank, op)

    def fill_home(self, rank: int, op: Op, dst: Ref, owner: int) -> None:
        """A part of a home is on its way: of C what its owner finished, of A+ and B+ what the plan brings."""
        if dst.buffer == "C":
            if self.schedule.shape and not covers(self.finished[owner], dst.region):
                self.fail(rank, op, "the source is not finished")
            self.finished[rank].append(dst.region)
        self.open(rank, op, dst)

    def multiply(self, rank: int, op: Multiply) -> None:
        (m, k), (k2, n) = op.a.region, op.b.region
        if k != k2 or op.c.region != Region((m, n)) or op.c.rank != rank:
            self.fail(rank, op, "the regions of a, b and c do not fit together")
        for ref in (op.a, op.b):
            self.touch(rank, op, ref, "read")
            check_whole(self.schedule, rank, op, ref)
            if isinstance(ref.buffer, Slot):
                self.scratch.read(rank, op, ref)
        self.touch(rank, op, op.c, "write")
        box = Region((m, n, k))
        if isinstance(op.c.buffer, str):
            if op.first:
                self.open(rank, op, op.c)
            elif not covers(self.opened[rank, op.c.buffer], op.c.region):
                self.fail(rank, op, "c is added to before it is opened")
            self.unfinished(rank, op, op.c)
            self.products.append(box)
            return
        filled = self.scratch.occupant(op.c)
        held = filled.summed
        if op.first == any(op.c.region & part for part in held) or not (op.first or covers_union(held, op.c.region)):
            self.fail(rank, op, "a slot of C is overwritten by its first product and added to by the others")
        filled.products.append(box)

    # -- what groups do ---------------------------------------------------------------------------

    def arrived(self, rank: int, op: Op) -> bool:
        """Whether what `op` reads and others send has been sent by now; its products are then those of the sender."""
        if isinstance(op, Await):
            return self.order.is_posted(op)
        for ref in refs_of(op):
            filled = self.scratch.slots.get((ref.rank, ref.buffer.frame)) if isinstance(ref.buffer, Slot) else None
            if not filled or isinstance(op, Broadcast | Copy):
                continue
            for route, region in list(filled.awaited):
                products = self.letters.find(route, region)
                if products is None:
                    return False
                filled.products += products
                filled.awaited.remove((route, region))
        return True

    def send(self, rank: int, op: Op) -> None:
        """Note what goes out and what is awaited."""
        for _, ref in outgoing(op, rank):
            self.touch(rank, op, ref, "read")
            check_whole(self.schedule, rank, op, ref)
        self.letters.send(rank, op, lambda ref: self.scratch.contents(rank, op, ref))

    def broadcast(self, rank: int, op: Broadcast) -> None:
        owners = {part.rank for part in op.parts}
        if rank not in op.group or not owners <= set(op.group) or op.step < 0:
            self.fail(rank, op, "a broadcast is among the ranks of its group")
        self.send(rank, op)
        for source, ref in op.arriving(rank):
            self.touch(rank, op, ref, "write")
            if isinstance(ref.buffer, Slot):
                self.scratch.fill(rank, op, ref).awaited.append(((source, rank, kind_of(ref)), ref.region))
            else:
                self.fill_home(rank, op, ref, source)

    def shift(self, rank: int, op: Shift) -> None:
        self.send(rank, op)
        if not isinstance(op.dst.buffer, Slot) or op.dst.rank != rank or op.src.rank != rank:
            self.fail(rank, op, "a shift goes from the rank's own memory into a slot of its own")
        filled = self.scratch.fill(rank, op, op.dst)
        filled.awaited.append(((op.source, rank, kind_of(op.dst)), op.dst.region))
        if kind_of(op.dst) == "C":
            filled.zeroed.append(op.dst.region)

    def reduce(self, rank: int, op: Reduce) -> None:
        self.send(rank, op)
        for src, dst in zip(op.srcs, op.dsts, strict=True):
            if src.region != dst.region or not isinstance(src.buffer, Slot):
                self.fail(rank, op, "a reduction sums parts of slots")
            if isinstance(dst.buffer, str):
                self.add(rank, op, src, dst)
            elif dst.rank == rank:
                filled = self.scratch.occupant(dst)
                filled.products = clipped(self.scratch.contents(rank, op, src), dst.region)
                filled.zeroed.append(dst.region)
                filled.awaited = [((q, rank, kind_of(dst)), dst.region) for q in op.group if q != rank]

    def accumulate(self, rank: int, op: Accumulate) -> None:
        if op.src.region != op.dst.region or op.src.rank != rank:
            self.fail(rank, op, "an accumulate moves one region from the rank that runs it")
        self.add(rank, op, op.src, op.dst)

    def add(self, rank: int, op: Op, src: Ref, dst: Ref) -> None:
        """`src` is added to the home `dst`."""
        self.touch(rank, op, src, "read")
        self.touch(rank, op, dst, "add")
        assert isinstance(dst.buffer, str)
        if not covers(self.ready[dst.rank, dst.buffer], dst.region):
            self.fail(rank, op, "the target is not opened, or no barrier is in between")
        self.unfinished(rank, op, dst)
        if isinstance(src.buffer, str):
            self.added[dst.buffer].append(dst.region)
            return
        self.products += clipped(self.scratch.contents(rank, op, src), src.region)

    def unfinished(self, rank: int, op: Op, ref: Ref) -> None:
        """What is added to C comes before its Finish."""
        if ref.buffer == "C" and any(part & ref.region for part in self.finished[ref.rank]):
            self.fail(rank, op, f"{ref} is added to after it was finished, or without a barrier in between")

    def scale(self, rank: int, op: Scale) -> None:
        self.touch(rank, op, op.c, "write")
        if isinstance(op.c.buffer, Slot):
            self.scratch.occupant(op.c).zeroed.append(op.c.region)
        else:
            self.open(rank, op, op.c)

    def finish(self, rank: int, op: Finish) -> None:
        self.touch(rank, op, op.c, "write")
        if not covers(self.opened[rank, "C"], op.c.region):
            self.fail(rank, op, "C is finished before it is opened")
        if any(part & op.c.region for part in self.finished[rank]):
            self.fail(rank, op, "C is finished twice")
        self.finished[rank].append(op.c.region)

    def open(self, rank: int, op: Op, ref: Ref) -> None:
        key = (rank, str(ref.buffer))
        if any(part & ref.region for part in self.opened[key]):
            self.fail(rank, op, f"{ref} is opened twice")
        self.opened[key].append(ref.region)
        self.opening.append((key, ref.region))

    # -- the end ----------------------------------------------------------------------------------

    def end(self) -> None:
        for rank in self.schedule.mesh.ranks:
            home = self.schedule.home("C", rank)
            for what, regions in (("opened", self.opened[rank, "C"]), ("finished", self.finished[rank])):
                if home and not covers(regions, home):
                    raise ScheduleError(f"rank {rank}: of its C {home} only {regions} was {what}")
        self.letters.check()
        self.check_added()
        if self.schedule.shape:
            counts = coverage(self.products, self.schedule.shape)
            if not (counts == 1).all():
                what = "never" if (counts == 0).any() else "more than once"
                raise ScheduleError(f"some points of the iteration space {self.schedule.shape} are multiplied {what}")

    def check_added(self) -> None:
        """What the plan adds is filled: sums with each summand once, stages on every rank."""
        for name in [name for name in self.schedule.homes if name.endswith(STAGE)]:
            given = self.schedule.homes[name.removesuffix(STAGE)].layout
            wanted = prod(given.mesh(self.schedule.mesh).axis_size(axis) for axis in given.partial)
            for rank in self.schedule.mesh.ranks:
                if not covers(self.opened[rank, name], self.schedule.home(name, rank)):
                    raise ScheduleError(f"rank {rank}: of its {name} only {self.opened[rank, name]} was filled")
            if given.partial and not (coverage(self.added[name], self.schedule.homes[name].shape) == wanted).all():
                raise ScheduleError(f"not every element of {name} received each of its {wanted} summands once")

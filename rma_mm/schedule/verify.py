"""Check a whole schedule before anything runs: no data, no MPI. Pure, and at the cost of all ranks' steps.

What holds afterwards: every point of (m, n, k) is multiplied once and reaches C once; every reference is within
its buffer; every slot is filled before it is read; ranks meet at the same barriers; no two conflicting accesses
share an epoch; every region of C is opened once and finished once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from math import prod
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import ScheduleError
from ..geometry.span import Region
from .ops import STAGE, Accumulate, Barrier, Claim, Copy, Finish, Multiply, Op, Ref, Scale, Schedule, Slot
from .passes import frame_sizes, refs_of


@dataclass
class Report:
    """What a verified schedule needs."""

    scratch: list[int]
    """Elements of scratch memory, by rank."""
    steps: list[int]
    """Operations, by rank (a pool's tasks dealt out in turn)."""


@dataclass
class _Filled:
    """What a slot holds for the time being."""

    slot: Slot
    parts: list[Region] = field(default_factory=list)
    products: list[Region] = field(default_factory=list)
    zeroed: list[Region] = field(default_factory=list)


@dataclass(frozen=True)
class _Access:
    """One operation's touch of a home matrix within an epoch."""

    region: Region
    kind: str
    rank: int
    op: Op


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
        for rank, ops in enumerate(epoch):
            for op in ops:
                checker.check(rank, op)
        checker.end_epoch()
    checker.end()
    scratch = [sum(frame_sizes(ops).values()) for ops in programs]
    return Report(scratch, [len(ops) for ops in programs])


def own_volume(schedule: Schedule, rank: int) -> int:
    """Points that `rank` multiplies (its share of a pool's tasks dealt out in turn), its references checked.

    What one rank can check alone before a first execution; summed over ranks it must be m · n · k.
    """
    checker = _Checker(schedule)
    volume = 0
    for op in expand(schedule, rank):
        checker.check_bounds(rank, op)
        if isinstance(op, Multiply):
            volume += op.c.region.size * len(op.a.region[1])
    return volume


def expand(schedule: Schedule, rank: int, claims: Iterable[int] | None = None) -> list[Op]:
    """The rank's operations with its Claim replaced by the tasks it runs: `claims`, or every size-th."""
    ops: list[Op] = []
    for op in schedule.program(rank):
        if isinstance(op, Claim) and schedule.pool:
            mine = range(rank, schedule.pool.tasks, schedule.mesh.size) if claims is None else claims
            ops += [inner for task in mine for inner in schedule.pool.program(task, rank)]
        else:
            ops.append(op)
    return ops


def epochs_of(ops: list[Op]) -> list[list[Op]]:
    """The operations between barriers."""
    epochs: list[list[Op]] = [[]]
    for op in ops:
        if isinstance(op, Barrier):
            epochs.append([])
        else:
            epochs[-1].append(op)
    return epochs


class _Checker:
    """State of the check: what slots hold, what of C is open, and what this epoch touched."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.slots: dict[tuple[int, str], _Filled] = {}
        self.opened: dict[tuple[int, str], list[Region]] = defaultdict(list)
        self.ready: dict[tuple[int, str], list[Region]] = defaultdict(list)
        self.finished: dict[int, list[Region]] = defaultdict(list)
        self.products: list[Region] = []
        self.added: dict[str, list[Region]] = defaultdict(list)
        self.accesses: dict[tuple[int, str], list[_Access]] = {}
        self.opening: list[tuple[tuple[int, str], Region]] = []

    def fail(self, rank: int, op: Op, why: str) -> NoReturn:
        raise ScheduleError(f"rank {rank}, {type(op).__name__} «{op}»: {why}")

    # -- epochs -----------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        self.accesses = defaultdict(list)
        self.opening = []

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
            ordered = one.rank == two.rank and "add" not in kinds
            if not harmless and not ordered and one.region & two.region:
                raise ScheduleError(
                    f"conflict in one epoch on {buffer} of rank {owner}: "
                    f"rank {one.rank} «{one.op}» and rank {two.rank} «{two.op}»; a barrier is missing between them"
                )

    def touch(self, rank: int, op: Op, ref: Ref, kind: str) -> None:
        if isinstance(ref.buffer, str):
            self.accesses[ref.rank, ref.buffer].append(_Access(ref.region, kind, rank, op))

    # -- one operation ----------------------------------------------------------------------------

    def check_bounds(self, rank: int, op: Op) -> None:
        """Every reference names a rank of the mesh, stays within its buffer, and scratch is the rank's own."""
        for ref in refs_of(op):
            if not 0 <= ref.rank < self.schedule.mesh.size:
                self.fail(rank, op, f"no rank {ref.rank}")
            if not ref.region.issubset(self.schedule.holds(ref)):
                self.fail(rank, op, f"{ref} is out of bounds: the buffer holds {self.schedule.holds(ref)}")
            if isinstance(ref.buffer, Slot) and ref.rank != rank:
                self.fail(rank, op, f"{ref} is another rank's scratch")

    def check(self, rank: int, op: Op) -> None:
        self.check_bounds(rank, op)
        check = getattr(self, type(op).__name__.lower())
        check(rank, op)

    def copy(self, rank: int, op: Copy) -> None:
        if op.src.region != op.dst.region or op.dst.rank != rank:
            self.fail(rank, op, "a copy moves one region to the rank that runs it")
        if isinstance(op.src.buffer, Slot):
            self.fail(rank, op, "a copy comes from a home")
        self.whole_matrix(rank, op, op.src)
        self.touch(rank, op, op.src, "read")
        self.touch(rank, op, op.dst, "write")
        if isinstance(op.dst.buffer, Slot):
            filled = self.occupant(rank, op.dst.buffer)
            if any(part & op.dst.region for part in filled.parts):
                self.fail(rank, op, "that part of the slot is filled already")
            filled.parts.append(op.dst.region)
            return
        if self.schedule.shape and not covers(self.finished[op.src.rank], op.src.region):
            self.fail(rank, op, "the source is not finished")
        self.open(rank, op, op.dst)
        self.finished[rank].append(op.dst.region)

    def multiply(self, rank: int, op: Multiply) -> None:
        (m, k), (k2, n) = op.a.region, op.b.region
        if k != k2 or op.c.region != Region((m, n)) or op.c.rank != rank:
            self.fail(rank, op, "the regions of a, b and c do not fit together")
        for ref in (op.a, op.b):
            self.touch(rank, op, ref, "read")
            self.whole_matrix(rank, op, ref)
            if isinstance(ref.buffer, Slot):
                filled = self.slots.get((rank, ref.buffer.frame))
                if not filled or filled.slot != ref.buffer or not covers(filled.parts, ref.region):
                    self.fail(rank, op, f"{ref} is read before it is filled")
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
        filled = self.occupant(rank, op.c.buffer)
        held = [*filled.zeroed, *(Region(product[:2]) for product in filled.products)]
        if op.first == any(op.c.region & part for part in held) or not (op.first or covers_union(held, op.c.region)):
            self.fail(rank, op, "a slot of C is overwritten by its first product and added to by the others")
        filled.products.append(box)

    def accumulate(self, rank: int, op: Accumulate) -> None:
        if op.src.region != op.dst.region or op.src.rank != rank:
            self.fail(rank, op, "an accumulate moves one region from the rank that runs it")
        self.touch(rank, op, op.src, "read")
        self.touch(rank, op, op.dst, "add")
        assert isinstance(op.dst.buffer, str)
        if not covers(self.ready[op.dst.rank, op.dst.buffer], op.dst.region):
            self.fail(rank, op, "the target is not opened, or no barrier is in between")
        self.unfinished(rank, op, op.dst)
        if isinstance(op.src.buffer, str):
            self.added[op.dst.buffer].append(op.dst.region)
            return
        filled = self.slots.get((rank, op.src.buffer.frame))
        if not filled or filled.slot != op.src.buffer:
            self.fail(rank, op, "the source slot holds nothing")
        for m, n, k in filled.products:
            if box := Region((m & op.src.region[0], n & op.src.region[1], k)):
                self.products.append(box)

    def unfinished(self, rank: int, op: Op, ref: Ref) -> None:
        """What is added to C comes before its Finish."""
        if ref.buffer == "C" and any(part & ref.region for part in self.finished[ref.rank]):
            self.fail(rank, op, f"{ref} is added to after it was finished, or without a barrier in between")

    def whole_matrix(self, rank: int, op: Op, ref: Ref) -> None:
        """One summand of a partial matrix is not the matrix; only C's may be read, by ranks of the same summand."""
        if isinstance(ref.buffer, Slot):
            return
        layout, mesh = self.schedule.homes[ref.buffer].layout, self.schedule.mesh
        mine, theirs = layout.coords(mesh, rank) or {}, layout.coords(mesh, ref.rank) or {}
        for axis in layout.partial:
            if ref.buffer != "C" or mine.get(axis) != theirs.get(axis):
                self.fail(rank, op, f"{ref} is one summand of a partial matrix")

    def scale(self, rank: int, op: Scale) -> None:
        self.touch(rank, op, op.c, "write")
        if isinstance(op.c.buffer, Slot):
            self.occupant(rank, op.c.buffer).zeroed.append(op.c.region)
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

    def occupant(self, rank: int, slot: Slot) -> _Filled:
        filled = self.slots.get((rank, slot.frame))
        if not filled or filled.slot != slot:
            filled = self.slots[rank, slot.frame] = _Filled(slot)
        return filled

    # -- the end ----------------------------------------------------------------------------------

    def end(self) -> None:
        for rank in self.schedule.mesh.ranks:
            home = self.schedule.home("C", rank)
            for what, regions in (("opened", self.opened[rank, "C"]), ("finished", self.finished[rank])):
                if home and not covers(regions, home):
                    raise ScheduleError(f"rank {rank}: of its C {home} only {regions} was {what}")
        for name in [name for name in self.schedule.homes if name.endswith(STAGE)]:
            given = self.schedule.homes[name.removesuffix(STAGE)].layout
            wanted = prod(given.mesh(self.schedule.mesh).axis_size(axis) for axis in given.partial)
            if not (coverage(self.added[name], self.schedule.homes[name].shape) == wanted).all():
                raise ScheduleError(f"not every element of {name} received each of its {wanted} summands once")
        if self.schedule.shape:
            counts = coverage(self.products, self.schedule.shape)
            if not (counts == 1).all():
                what = "never" if (counts == 0).any() else "more than once"
                raise ScheduleError(f"some points of the iteration space {self.schedule.shape} are multiplied {what}")


def covers(parts: list[Region], region: Region) -> bool:
    """Whether disjoint `parts` contain all of `region`."""
    return sum((part & region).size for part in parts) == region.size


def covers_union(parts: list[Region], region: Region) -> bool:
    """Whether `parts`, which may overlap, contain all of `region`."""
    rest = [region]
    for part in dict.fromkeys(parts):
        left = []
        for rows, cols in rest:
            inner = rows & part[0]
            left += [Region((rows - part[0], cols)), Region((inner, cols - part[1]))]
        rest = [box for box in left if box]
    return not rest


def coverage(boxes: list[Region], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """How often each atom (points that no box tells apart) of a space of `shape` is covered."""
    if 0 in shape:
        return np.ones((0,) * len(shape), np.int64)
    labels, sizes = [], []
    for dim, extent in enumerate(shape):
        spans = list(dict.fromkeys(box[dim] for box in boxes))
        member = np.zeros((len(spans) + 1, extent), bool)
        for n, span in enumerate(spans):
            member[n, span.indices] = True
        patterns = np.unique(member, axis=1)
        sizes.append(patterns.shape[1])
        labels.append({span: np.flatnonzero(patterns[n]) for n, span in enumerate(spans)})
    counts = np.zeros(sizes, np.int64)
    for box in boxes:
        counts[np.ix_(*(labels[dim][span] for dim, span in enumerate(box)))] += 1
    return counts

"""Check a whole schedule before anything runs: no data, no MPI. Pure, and at the cost of all ranks' steps.

What holds afterwards: every point of (m, n, k) is multiplied once and reaches C once; every reference is within
its buffer; every slot is filled before it is read; ranks meet at the same barriers; no two conflicting accesses
share an epoch; every region of C is opened once and finished once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, zip_longest
from math import prod

from rma_mm.classes import dataclass
from rma_mm.errors import ScheduleError
from rma_mm.geometry.span import Region
from rma_mm.schedule import ops
from rma_mm.schedule.dispatch import Dispatch
from rma_mm.schedule.mirror_ops import Clear, Mirror
from rma_mm.schedule.ops import Op, Ref, Slot, foreign
from rma_mm.schedule.passes import frame_sizes
from rma_mm.schedule.schedule import STAGE, Schedule, epochs_of, expand
from rma_mm.schedule.verify.coverage import coverage, covers, covers_union, products_of
from rma_mm.schedule.verify.local_rules import check_alone, check_mirror, check_product, check_whole, fail
from rma_mm.schedule.verify.messages import MessageLog
from rma_mm.schedule.verify.slot_state import SlotState
from rma_mm.schedule.verify.vector_clocks import VectorClocks


@dataclass
class Report:
    scratch: list[int]  # elements of scratch memory, by rank
    steps: list[int]  # operations, by rank (a pool's tasks dealt out in turn)
    words: list[int]  # elements of other ranks' memory that each rank reads or adds to (likewise)


@dataclass(frozen=True)
class _Access:
    """One operation's touch of a home matrix within an epoch."""

    region: Region
    kind: str
    rank: int
    op: Op

    @property
    def is_pending(self) -> bool:
        return self.kind == "write" and isinstance(self.op, ops.Copy)


def verify(schedule: Schedule) -> Report:
    """Check every invariant of `schedule`; raises ScheduleError naming the rank and the operation."""
    programs = [expand(schedule, rank) for rank in schedule.mesh.ranks]
    checker = _Checker(schedule)
    epochs = [epochs_of(program) for program in programs]
    counts = {len(one) for one in epochs}
    if len(counts) > 1:
        met = [len(one) - 1 for one in epochs]
        raise ScheduleError("barriers", f"barriers do not match: the ranks meet at {met} of them")
    for epoch in zip_longest(*epochs):
        checker.begin_epoch()
        checker.run(epoch)
        checker.end_epoch()
    checker.end()
    scratch = [sum(frame_sizes(program, rank).values()) for rank, program in enumerate(programs)]
    words = [sum(count for op in program for _, count, _ in foreign(op, rank)) for rank, program in enumerate(programs)]
    return Report(scratch, [len(program) for program in programs], words)


def clipped(products: Sequence[Region], face: Region) -> list[Region]:
    return [box for m, n, k in products if (box := Region((m & face[0], n & face[1], k)))]


class _Checker:
    """State of the check: contents of slots, open parts of C, and accesses of this epoch."""

    handlers = Dispatch[None]()

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.order = VectorClocks(schedule.mesh.size)
        self.scratch = SlotState(self.order)
        self.opened: dict[tuple[int, str], list[Region]] = defaultdict(list)
        self.ready: dict[tuple[int, str], list[Region]] = defaultdict(list)
        self.finished: dict[int, list[Region]] = defaultdict(list)
        self.products: list[Region] = []
        self.added: dict[str, list[Region]] = defaultdict(list)
        self.accesses: dict[tuple[int, str], list[_Access]] = {}
        self.opening: list[tuple[tuple[int, str], Region]] = []
        self.mirrored: list[Region] = []  # parts of C that are mirrored, and those that they mirror
        self.is_halved = False  # true if of a square on the diagonal half was multiplied
        self.letters = MessageLog()

    def run(self, epoch: Sequence[list[Op]]) -> None:
        """Check an epoch's operations, each rank's in order, as far as the data it waits for has been sent."""
        left = [deque(program) for program in epoch]
        while any(left):
            moved = False
            for rank, program in enumerate(left):
                while program and self.arrived(rank, program[0]):
                    self.check(rank, program.popleft())
                    moved = True
            if not moved:
                rank = next(rank for rank, program in enumerate(left) if program)
                fail(rank, left[rank][0], "deadlock", "it waits for ever for what another rank does not send")

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
                    "race", f"conflict in one epoch on {buffer} of rank {owner}: "
                    f"rank {one.rank} «{one.op}» and rank {two.rank} «{two.op}»; a barrier is missing between them"
                )

    def touch(self, rank: int, op: Op, ref: Ref, kind: str) -> None:
        if isinstance(ref.buffer, str):
            self.accesses[ref.rank, ref.buffer].append(_Access(ref.region, kind, rank, op))

    # -- one operation ----------------------------------------------------------------------------

    def check(self, rank: int, op: Op) -> None:
        check_alone(self.schedule, rank, op)
        self.handlers[type(op)](self, op, rank)

    @handlers.on(ops.Copy)
    def copy(self, op: ops.Copy, rank: int) -> None:
        is_own = op.dst.rank == rank or isinstance(op.dst.buffer, Slot)
        if op.src.region != op.dst.region or not is_own:
            fail(rank, op, "misfit", "a copy moves one region to the rank that runs it")
        if isinstance(op.src.buffer, Slot):
            fail(rank, op, "misfit", "a copy comes from a home")
        check_whole(self.schedule, rank, op, op.src)
        self.touch(rank, op, op.src, "read")
        self.touch(rank, op, op.dst, "write")
        if op.src.buffer == "C":
            self.final(rank, op, op.src)
        if isinstance(op.dst.buffer, Slot):
            self.scratch.fill(rank, op, op.dst)
        else:
            self.fill_home(rank, op, op.dst)

    @handlers.on(ops.Post)
    def post(self, op: ops.Post, rank: int) -> None:
        self.scratch.land(rank, op)

    @handlers.on(ops.Await)
    def await_(self, op: ops.Await, rank: int) -> None:
        self.order.learn(rank, op)

    def fill_home(self, rank: int, op: Op, dst: Ref) -> None:
        """Record that a part of a home is in transit: of C from its owner, of A+ and B+ from the plan."""
        if dst.buffer == "C":
            self.finished[rank].append(dst.region)
        self.open(rank, op, dst)

    def final(self, rank: int, op: Op, src: Ref) -> None:
        """Check that a part of C is finished before it is read."""
        if not covers(self.finished[src.rank], src.region):
            fail(rank, op, "not-final", "the source is not finished")

    @handlers.on(Mirror)
    def mirror(self, op: Mirror, rank: int) -> None:
        """Check a mirror: its products are those of its finished source."""
        check_mirror(self.schedule, rank, op)
        self.touch(rank, op, op.c, "write")
        if isinstance(op.src.buffer, Slot):
            self.scratch.read(rank, op, op.src)
        else:
            self.touch(rank, op, op.src, "read")
            self.final(rank, op, op.src)
        self.mirrored += [op.c.region] if op.is_diagonal else [op.c.region, op.src.region]
        if not op.is_diagonal:
            self.open(rank, op, op.c)
            self.finished[rank].append(op.c.region)
            self.products.append(products_of(self.schedule, op.c.region))

    @handlers.on(Clear)
    def clear(self, op: Clear, rank: int) -> None:
        self.touch(rank, op, op.c, "write")
        self.final(rank, op, op.c)

    @handlers.on(ops.Multiply)
    def multiply(self, op: ops.Multiply, rank: int) -> None:
        box = check_product(self.schedule, rank, op)
        self.is_halved |= op.half
        for ref in (op.a, op.b):
            self.touch(rank, op, ref, "read")
            check_whole(self.schedule, rank, op, ref)
            if isinstance(ref.buffer, Slot):
                self.scratch.read(rank, op, ref)
        self.touch(rank, op, op.c, "write")
        if isinstance(op.c.buffer, str):
            if op.first:
                self.open(rank, op, op.c)
            elif not covers(self.opened[rank, op.c.buffer], op.c.region):
                fail(rank, op, "not-opened", "c is added to before it is opened")
            self.unfinished(rank, op, op.c)
            self.products.append(box)
            return
        filled = self.scratch.occupant(op.c)
        held = filled.partial_sums
        if op.first == any(op.c.region & part for part in held) or not (op.first or covers_union(held, op.c.region)):
            why = "a slot of C is overwritten by its first product and added to by the others"
            fail(rank, op, "opened-twice" if op.first else "not-opened", why)
        filled.products.append(box)

    # -- what groups do ---------------------------------------------------------------------------

    def arrived(self, rank: int, op: Op) -> bool:
        """True if the data that others send to `op` has been sent; its products are then the sender's."""
        if isinstance(op, ops.Await):
            return self.order.is_posted(op)
        for ref in op.refs:
            filled = self.scratch.slots.get((ref.rank, ref.buffer.frame)) if isinstance(ref.buffer, Slot) else None
            if not filled or (isinstance(op, ops.Broadcast | ops.Copy) and ref == op.dst):
                continue
            for route, region in list(filled.awaited):
                products = self.letters.find(route, region)
                if products is None:
                    return False
                filled.products += products
                filled.awaited.remove((route, region))
        return True

    def send(self, rank: int, op: ops.GroupOp) -> None:
        for move in op.moves(rank):
            if move.source == rank and move.src:
                self.touch(rank, op, move.src, "read")
                check_whole(self.schedule, rank, op, move.src)
        self.letters.send(rank, op, lambda ref: self.scratch.contents(rank, op, ref))

    @handlers.on(ops.Broadcast)
    def broadcast(self, op: ops.Broadcast, rank: int) -> None:
        owners = {part.rank for part in op.parts}
        if rank not in op.group or not owners <= set(op.group) or op.step < 0:
            fail(rank, op, "misfit", "a broadcast is among the ranks of its group")
        self.send(rank, op)
        for source, src, dst in [(move.source, move.src, move.dst) for move in op.moves(rank) if move.src and move.dst]:
            self.touch(rank, op, src, "read")  # it may copy it by itself
            self.touch(rank, op, dst, "write")
            if isinstance(dst.buffer, Slot):
                self.scratch.fill(rank, op, dst).awaited.append(((source, rank, dst.operand), dst.region))
                continue
            if dst.buffer == "C":
                self.final(rank, op, replace(dst, rank=source))
            self.fill_home(rank, op, dst)

    @handlers.on(ops.Shift)
    def shift(self, op: ops.Shift, rank: int) -> None:
        self.send(rank, op)
        if not isinstance(op.dst.buffer, Slot) or op.dst.rank != rank or op.src.rank != rank:
            fail(rank, op, "misfit", "a shift goes from the rank's own memory into a slot of its own")
        filled = self.scratch.fill(rank, op, op.dst)
        filled.awaited.append(((op.source, rank, op.dst.operand), op.dst.region))
        if op.dst.operand == "C":
            filled.zeroed.append(op.dst.region)

    @handlers.on(ops.Reduce)
    def reduce(self, op: ops.Reduce, rank: int) -> None:
        self.send(rank, op)
        for src, dst in zip(op.srcs, op.dsts, strict=True):
            if src.region != dst.region or not isinstance(src.buffer, Slot):
                fail(rank, op, "misfit", "a reduction sums parts of slots")
            if isinstance(dst.buffer, str):
                self.add(rank, op, src, dst)
            elif dst.rank == rank:
                filled = self.scratch.occupant(dst)
                filled.products = clipped(self.scratch.contents(rank, op, src), dst.region)
                filled.zeroed.append(dst.region)
                filled.awaited = [((q, rank, dst.operand), dst.region) for q in op.group if q != rank]

    @handlers.on(ops.Accumulate)
    def accumulate(self, op: ops.Accumulate, rank: int) -> None:
        if op.src.region != op.dst.region or op.src.rank != rank:
            fail(rank, op, "misfit", "an accumulate moves one region from the rank that runs it")
        self.add(rank, op, op.src, op.dst)

    def add(self, rank: int, op: Op, src: Ref, dst: Ref) -> None:
        """`src` is added to the home `dst`."""
        self.touch(rank, op, src, "read")
        self.touch(rank, op, dst, "add")
        assert isinstance(dst.buffer, str)
        if not covers(self.ready[dst.rank, dst.buffer], dst.region):
            fail(rank, op, "not-opened", "the target is not opened, or no barrier is in between")
        self.unfinished(rank, op, dst)
        if isinstance(src.buffer, str):
            self.added[dst.buffer].append(dst.region)
            return
        self.products += clipped(self.scratch.contents(rank, op, src), src.region)

    def unfinished(self, rank: int, op: Op, ref: Ref) -> None:
        """Check that a contribution to C comes before its Finish."""
        if ref.buffer == "C" and any(part & ref.region for part in self.finished[ref.rank]):
            why = f"{ref} is added to after it was finished, or without a barrier in between"
            fail(rank, op, "written-late", why)

    @handlers.on(ops.Scale)
    def scale(self, op: ops.Scale, rank: int) -> None:
        self.touch(rank, op, op.c, "write")
        if isinstance(op.c.buffer, Slot):
            self.scratch.occupant(op.c).zeroed.append(op.c.region)
        else:
            self.open(rank, op, op.c)

    @handlers.on(ops.Finish)
    def finish(self, op: ops.Finish, rank: int) -> None:
        self.touch(rank, op, op.c, "write")
        if not covers(self.opened[rank, "C"], op.c.region):
            fail(rank, op, "not-opened", "C is finished before it is opened")
        if any(part & op.c.region for part in self.finished[rank]):
            fail(rank, op, "written-late", "C is finished twice")
        self.finished[rank].append(op.c.region)

    def open(self, rank: int, op: Op, ref: Ref) -> None:
        key = (rank, str(ref.buffer))
        if any(part & ref.region for part in self.opened[key]):
            fail(rank, op, "opened-twice", f"{ref} is opened twice")
        self.opened[key].append(ref.region)
        self.opening.append((key, ref.region))

    # -- the end ----------------------------------------------------------------------------------

    def end(self) -> None:
        for rank in self.schedule.mesh.ranks:
            home = self.schedule.home("C", rank)
            for what, regions in (("opened", self.opened[rank, "C"]), ("finished", self.finished[rank])):
                if home and not covers(regions, home):
                    raise ScheduleError("not-once", f"rank {rank}: of its C {home} only {regions} was {what}")
        self.letters.check()
        self.check_added()
        mirrored = coverage(self.mirrored, self.schedule.homes["C"].shape)
        if (self.mirrored or self.is_halved) and not (mirrored == 1).all():
            raise ScheduleError("not-once", "not every element of C is mirrored, or mirrors another, once")
        if self.schedule.shape:
            counts = coverage(self.products, self.schedule.shape)
            if not (counts == 1).all():
                what = "never" if (counts == 0).any() else "more than once"
                raise ScheduleError(
                    "not-once", f"some points of the iteration space {self.schedule.shape} are multiplied {what}"
                )

    def check_added(self) -> None:
        """Check that the plan's own matrices are filled: sums with each summand once, staged copies on every rank."""
        for name in [name for name in self.schedule.homes if name.endswith(STAGE)]:
            given = self.schedule.homes[name.removesuffix(STAGE)].layout
            wanted = prod(given.mesh(self.schedule.mesh).axis_size(axis) for axis in given.partial)
            for rank in self.schedule.mesh.ranks:
                if not covers(self.opened[rank, name], self.schedule.home(name, rank)):
                    opened = self.opened[rank, name]
                    raise ScheduleError("not-once", f"rank {rank}: of its {name} only {opened} was filled")
            if given.partial and not (coverage(self.added[name], self.schedule.homes[name].shape) == wanted).all():
                why = f"not every element of {name} received each of its {wanted} summands once"
                raise ScheduleError("not-once", why)

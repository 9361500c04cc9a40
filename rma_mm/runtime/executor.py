"""Runs one rank's operations over windows and kernels. It knows no algorithm's name.

Preparing turns each operation into a call on real memory: views resolved, transfers and local products bound.
Running makes the calls in order, and creates nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..geometry.span import Region
from ..kernels import bind
from ..kernels.elementwise import cast, scale
from ..schedule.ops import Accumulate, Barrier, Claim, Copy, Finish, Multiply, Op, Ref, Scale, Schedule, Slot
from ..windows import Counters, Transfer, Window
from ..windows.waiting import barrier
from .arena import Block
from .mesh import Mesh

Action = Callable[[], None]
Progress = Callable[[float, float], None]


@dataclass
class Scalars:
    """What a schedule leaves open about the arithmetic."""

    alpha: Any = 1
    beta: Any = 0
    conj_a: bool = False
    conj_b: bool = False
    kernel: str = "auto"


@dataclass
class Tickets:
    """The shared counter of a pool. It is never reset: each run starts where the last one ended."""

    block: Block
    """An int64 on rank 0."""
    first: int = 0
    """The ticket of task 0 in the next run."""

    def next_task(self) -> int:
        """The number of the next task; beyond the last where none is left."""
        return self.block.window.fetch_add(0, self.block.offset, 1) - self.first


@dataclass
class Memory:
    """The memory behind the names of a schedule, and scratch."""

    homes: dict[str, Block]
    """A, B, what the plan added, and C where other ranks read it."""
    result: NDArray[Any]
    """This rank's own local array of C."""
    shadow: Block | None = None
    """Where C is summed, if not in its own type."""
    transposed: frozenset[str] = frozenset()
    """Homes whose blocks hold the transposed matrix."""
    frames: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Scratch memory by frame, flat."""
    tickets: Tickets | None = None
    """For a schedule with a pool."""


class Executable:
    """One rank's program on given memory, ready to run any number of times."""

    def __init__(self, schedule: Schedule, mesh: Mesh, memory: Memory, scalars: Scalars) -> None:
        self.schedule, self.mesh, self.memory, self.scalars = schedule, mesh, memory, scalars
        self.rank = mesh.rank
        blocks = [*memory.homes.values(), *([memory.shadow] if memory.shadow else [])]
        if memory.tickets:
            blocks.append(memory.tickets.block)
        self.windows: list[Window] = list(dict.fromkeys(block.window for block in blocks))
        self.viewed = Counters()
        """Words that Multiplies read in place, of one run."""
        self.transfers: list[Transfer] = []
        self.done_work = 0.0
        self.total_work = 0.0
        self.progress: Progress | None = None
        self.claims: list[int] = []
        """Tasks that this rank ran last."""
        self.tasks: dict[int, list[Action]] = {}
        self.task_views: dict[int, Counters] = {}
        self.cast_so_far: dict[str, int] = {}
        self.actions: list[Action] = []
        if mesh.is_member:
            self.actions = self.bind_all(schedule.program(self.rank), self.viewed)
            self.bind_tasks()

    def run(self, progress: Progress | None = None) -> None:
        """Run the program once. Collective over the ranks of the grid; the caller meets before and after."""
        self.progress, self.done_work, self.claims = progress, 0.0, []
        self.sync()
        for action in self.actions:
            action()
        self.settle()
        self.count_views(self.viewed)

    def sync(self) -> None:
        """Make local stores and the windows' transfers see each other."""
        for window in self.windows:
            window.sync()

    def settle(self) -> None:
        """Complete what this rank started at its targets, and make its stores seen."""
        for window in self.windows:
            window.flush()
            window.sync()

    def traffic(self) -> tuple[int, int, int]:
        """Words within and between nodes, and messages, that this rank ever caused through these windows."""
        counted = [window.counters for window in self.windows]
        return (
            sum(each.words_intra for each in counted),
            sum(each.words_inter for each in counted),
            sum(each.messages for each in counted),
        )

    def close(self) -> None:
        """Free what preparing made. Local."""
        for transfer in self.transfers:
            transfer.close()
        self.actions.clear()  # they refer back to this object, and would wait for the garbage collector
        self.tasks.clear()

    # -- preparing --------------------------------------------------------------------------------

    def bind_all(self, ops: list[Op], viewed: Counters) -> list[Action]:
        """The calls of a list of operations, with waits where something under way is needed."""
        actions: list[Action] = []
        under_way: dict[str, list[Transfer]] = defaultdict(list)
        fused = self.fused_scales(ops)
        for op in ops:
            if isinstance(op, Barrier):
                actions += self._waits(under_way, list(under_way))
                actions.append(self.meet)
                continue
            if isinstance(op, Copy):  # a slot may take several copies at once; what it held before is awaited
                actions += self._waits(under_way, [f"read {name}" for name in slots([op.dst])])
                actions.append(
                    self._begin(self.transfer(op.src, op.dst, add=False), under_way, f"fill {name_of(op.dst)}")
                )
                continue
            if isinstance(op, Accumulate):
                actions += self._waits(under_way, [f"fill {name}" for name in slots([op.src])])
                actions += self.accumulate(op, under_way)
                continue
            if isinstance(op, Multiply):
                wanted = [f"fill {name}" for name in slots([op.a, op.b])] + [f"read {name}" for name in slots([op.c])]
                actions += self._waits(under_way, wanted)
                actions.append(self.multiply(op, viewed, id(op) in fused))
            elif isinstance(op, Scale):
                actions += self._waits(under_way, [f"read {name}" for name in slots([op.c])])
                if id(op) not in fused:
                    actions.append(self.scale(op))
            elif isinstance(op, Finish):
                actions += self.finish(op)
            elif isinstance(op, Claim):
                actions.append(self.claim)
        return actions + self._waits(under_way, list(under_way))

    def bind_tasks(self) -> None:
        """Bind every task of a pool: any of them may fall to this rank. Its expected work is an equal share."""
        pool = self.schedule.pool
        if pool is None:
            return
        for task in range(pool.tasks):
            self.task_views[task] = Counters()
            self.tasks[task] = self.bind_all(pool.program(task, self.rank), self.task_views[task])
        self.total_work /= self.schedule.mesh.size

    def _begin(self, transfer: Transfer, under_way: dict[str, list[Transfer]], key: str) -> Action:
        self.transfers.append(transfer)
        under_way[key].append(transfer)
        return transfer.start

    def _waits(self, under_way: dict[str, list[Transfer]], keys: Iterable[str]) -> list[Action]:
        return [transfer.wait for key in keys for transfer in under_way.pop(key, ())]

    def array(self, ref: Ref, summing: bool = False) -> NDArray[Any]:
        """The memory behind `ref`, whose positions are dense there; `summing` means C's accumulator."""
        where = self.schedule.holds(ref).locate(ref.region)
        return self.whole(ref, summing)[tuple(span.as_slice() for span in where)]

    def whole(self, ref: Ref, summing: bool) -> NDArray[Any]:
        """The dense array that stores what `ref` names a part of."""
        rows, cols = self.schedule.holds(ref).shape
        if isinstance(ref.buffer, Slot):
            return self.memory.frames[ref.buffer.frame][: rows * cols].reshape(rows, cols)
        block, flipped = self.block(ref.buffer, summing)
        if block is None or (ref.buffer == "C" and ref.rank == self.rank and block is not self.memory.shadow):
            return self.memory.result
        stored = block.view(ref.rank, (cols, rows) if flipped else (rows, cols))
        assert stored is not None, f"{ref} is out of reach"
        return stored.T if flipped else stored

    def block(self, buffer: str, summing: bool) -> tuple[Block | None, bool]:
        """The block of a home, and whether it holds the transposed matrix."""
        if buffer == "C" and summing and self.memory.shadow is not None:
            return self.memory.shadow, False
        return self.memory.homes.get(buffer), buffer in self.memory.transposed

    def transfer(self, remote: Ref, local: Ref, add: bool) -> Transfer:
        """A get (or accumulate) between a home and memory of this rank, in the home's own orientation."""
        assert isinstance(remote.buffer, str)
        where, here = self.schedule.holds(remote).locate(remote.region), self.schedule.holds(local).locate(local.region)
        origin = self.whole(local, summing=False)
        block, flipped = self.block(remote.buffer, summing=add)
        assert block is not None
        if flipped:
            where, here, origin = where.T, here.T, origin.T
        move = block.window.accumulate if add else block.window.get
        return move(remote.rank, block.patch(remote.rank, where), origin, *here)

    def accumulate(self, op: Accumulate, under_way: dict[str, list[Transfer]]) -> list[Action]:
        """An add of local memory to a home; memory of another type than the home's is cast into a copy first."""
        key = f"read {name_of(op.src)}"
        assert isinstance(op.dst.buffer, str)
        block, _ = self.block(op.dst.buffer, summing=True)
        assert block is not None
        if isinstance(op.src.buffer, Slot) or self.whole(op.src, False).dtype == block.dtype:
            return [self._begin(self.transfer(op.dst, op.src, add=True), under_way, key)]
        where = self.schedule.holds(op.src).locate(op.src.region)
        source, copied = self.whole(op.src, False), self.cast_area(op.src, block.dtype)
        target = block.patch(op.dst.rank, self.schedule.holds(op.dst).locate(op.dst.region))
        added = block.window.accumulate(op.dst.rank, target, copied, *Region.whole(copied.shape))
        return [lambda: cast(source[where.selector()], copied), self._begin(added, under_way, key)]

    def cast_area(self, ref: Ref, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Scratch for a part of a home in another type; disjoint for the parts of one home, shared by all bindings."""
        key = f"cast {ref.buffer}"
        area = self.memory.frames.get(key)
        if area is None:
            area = self.memory.frames[key] = np.empty(self.schedule.holds(ref).size, dtype)
        begin = self.cast_so_far.get(key, 0)
        self.cast_so_far[key] = begin + ref.region.size
        return area[begin : begin + ref.region.size].reshape(ref.region.shape)

    def multiply(self, op: Multiply, viewed: Counters, scaled: bool) -> Action:
        """A bound local product; with a progress callback attached where it is asked for."""
        a, b, c = self.array(op.a), self.array(op.b), self.array(op.c, summing=True)
        nodes = self.mesh.node_of
        for ref, array in ((op.a, a), (op.b, b)):
            if ref.rank != self.rank:
                viewed.add(array.size, 0, same_node=nodes[ref.rank] == nodes[self.rank])
        beta = 0 if op.first else self.scalars.beta if scaled else 1
        s = self.scalars
        product = bind(a, b, c, s.alpha, beta, s.conj_a, s.conj_b, s.kernel)
        work = float(a.shape[0]) * a.shape[1] * b.shape[1]
        self.total_work += work

        def multiply() -> None:
            product()
            if self.progress:
                self.done_work += work
                self.progress(min(self.done_work, self.total_work), self.total_work)

        return multiply

    def fused_scales(self, ops: list[Op]) -> set[int]:
        """Scales by beta that the next Multiply does on the way, and those Multiplies (by identity)."""
        fused: set[int] = set()
        if self.memory.shadow is not None:
            return fused
        for n, op in enumerate(ops):
            if isinstance(op, Scale) and op.keep:
                following = next((x for x in ops[n + 1 :] if not isinstance(x, Copy)), None)
                if isinstance(following, Multiply) and following.c == op.c:
                    fused |= {id(op), id(following)}
        return fused

    def scale(self, op: Scale) -> Action:
        """Open a region: zero, or beta times what C holds."""
        c = self.array(op.c, summing=True)
        beta = self.scalars.beta if op.keep else 0
        if self.memory.shadow is None or not op.keep:
            return lambda: scale(c, beta)
        old = self.result_part(op.c.region)

        def load() -> None:
            cast(old, c)
            scale(c, beta)

        return load

    def finish(self, op: Finish) -> list[Action]:
        """Close a region: round C's accumulator into C, where they are not the same."""
        if self.memory.shadow is None:
            return []
        c, result = self.array(op.c, summing=True), self.result_part(op.c.region)
        return [lambda: cast(c, result)]

    def result_part(self, region: Region) -> NDArray[Any]:
        """The part of this rank's C, in its final type, that holds `region`."""
        where = self.schedule.home("C", self.rank).locate(region)
        return self.memory.result[tuple(span.as_slice() for span in where)]

    # -- running ----------------------------------------------------------------------------------

    def meet(self) -> None:
        """A barrier of the schedule: everything before it is visible after it."""
        self.settle()
        barrier(self.mesh.active)
        self.sync()

    def claim(self) -> None:
        """Run tasks until none is left; every rank gets one ticket too many."""
        pool, tickets = self.schedule.pool, self.memory.tickets
        assert pool is not None and tickets is not None
        while (task := tickets.next_task()) < pool.tasks:
            self.claims.append(task)
            for action in self.tasks[task]:
                action()
            self.count_views(self.task_views[task])
        tickets.first += pool.tasks + self.schedule.mesh.size

    def count_views(self, viewed: Counters) -> None:
        """Add words read in place to the traffic of the first window."""
        counters = self.windows[0].counters
        counters.words_intra += viewed.words_intra
        counters.words_inter += viewed.words_inter


def name_of(ref: Ref) -> str:
    """The frame, or the home, that `ref` is a part of."""
    return ref.buffer.frame if isinstance(ref.buffer, Slot) else f"home {ref.buffer}"


def slots(refs: list[Ref]) -> list[str]:
    """The frames among the buffers of `refs`."""
    return [ref.buffer.frame for ref in refs if isinstance(ref.buffer, Slot)]

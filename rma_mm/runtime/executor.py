"""Runs one rank's operations over windows and kernels. It knows no algorithm's name.

Preparing turns each operation into a call on real memory: views resolved, transfers and local products bound.
Running makes the calls in order, and creates nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..geometry.span import Region
from ..kernels import bind
from ..kernels.elementwise import cast, scale
from ..schedule.ops import (
    Accumulate,
    Barrier,
    Broadcast,
    Claim,
    Copy,
    Finish,
    Multiply,
    Op,
    Reduce,
    Ref,
    Scale,
    Schedule,
    Shift,
    Slot,
)
from ..windows import Counters, Transfer, Window
from ..windows.channel import Channel
from ..windows.waiting import barrier
from .mesh import Mesh
from .places import Memory, Places, name_of, slots
from .together import bind_group

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
        self.channels: list[Channel] = []
        self.sums: dict[tuple[int, ...], int] = defaultdict(int)
        """Reductions bound so far, by group: all its members count alike."""
        self.transfers: list[Transfer] = []
        self.done_work = 0.0
        self.total_work = 0.0
        self.progress: Progress | None = None
        self.claims: list[int] = []
        """Tasks that this rank ran last."""
        self.tasks: dict[int, list[Action]] = {}
        self.task_views: dict[int, Counters] = {}
        self.places = Places(schedule, memory, mesh.rank)
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
        counted = [window.counters for window in self.windows] + [channel.counters for channel in self.channels]
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
            if isinstance(op, Broadcast | Shift | Reduce):
                for bound in bind_group(op, self.places, self.channel, self.sums):
                    actions += self._waits(under_way, bound.after)
                    actions.append(self._begin(bound.transfer, under_way, *bound.during))
                continue
            if isinstance(op, Multiply):
                wanted = [f"fill {name}" for name in slots([op.a, op.b, op.c])]
                wanted += [f"read {name}" for name in slots([op.c])]
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

    def _begin(self, transfer: Transfer, under_way: dict[str, list[Transfer]], *keys: str) -> Action:
        self.transfers.append(transfer)
        for key in keys:
            under_way[key].append(transfer)
        return transfer.start

    def _waits(self, under_way: dict[str, list[Transfer]], keys: Iterable[str]) -> list[Action]:
        return [transfer.wait for key in keys for transfer in under_way.pop(key, ())]

    def transfer(self, remote: Ref, local: Ref, add: bool) -> Transfer:
        """A get (or accumulate) between a home and memory of this rank, in the home's own orientation."""
        assert isinstance(remote.buffer, str)
        where, here = self.schedule.holds(remote).locate(remote.region), self.schedule.holds(local).locate(local.region)
        origin = self.places.whole(local, summing=False)
        block, flipped = self.places.block(remote.buffer, summing=add)
        assert block is not None
        if flipped:
            where, here, origin = where.T, here.T, origin.T
        move = block.window.accumulate if add else block.window.get
        return move(remote.rank, block.patch(remote.rank, where), origin, *here)

    def accumulate(self, op: Accumulate, under_way: dict[str, list[Transfer]]) -> list[Action]:
        """An add of local memory to a home; memory of another type than the home's is cast into a copy first."""
        key = f"read {name_of(op.src)}"
        assert isinstance(op.dst.buffer, str)
        block, _ = self.places.block(op.dst.buffer, summing=True)
        assert block is not None
        if isinstance(op.src.buffer, Slot) or self.places.whole(op.src, False).dtype == block.dtype:
            return [self._begin(self.transfer(op.dst, op.src, add=True), under_way, key)]
        where = self.schedule.holds(op.src).locate(op.src.region)
        source, copied = self.places.whole(op.src, False), self.places.cast_area(op.src, block.dtype)
        target = block.patch(op.dst.rank, self.schedule.holds(op.dst).locate(op.dst.region))
        added = block.window.accumulate(op.dst.rank, target, copied, *Region.whole(copied.shape))
        return [lambda: cast(source[where.selector()], copied), self._begin(added, under_way, key)]

    def channel(self, group: tuple[int, ...]) -> Channel:
        """The channel of some ranks, which the plan has made."""
        found = self.mesh.channel(group)
        if found not in self.channels:
            self.channels.append(found)
        return found

    def multiply(self, op: Multiply, viewed: Counters, scaled: bool) -> Action:
        """A bound local product; with a progress callback attached where it is asked for."""
        a, b, c = self.places.array(op.a), self.places.array(op.b), self.places.array(op.c, summing=True)
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
        c = self.places.array(op.c, summing=True)
        beta = self.scalars.beta if op.keep else 0
        if self.memory.shadow is None or not op.keep:
            return lambda: scale(c, beta)
        old = self.places.result_part(op.c.region)

        def load() -> None:
            cast(old, c)
            scale(c, beta)

        return load

    def finish(self, op: Finish) -> list[Action]:
        """Close a region: round C's accumulator into C, where they are not the same."""
        if self.memory.shadow is None:
            return []
        c, result = self.places.array(op.c, summing=True), self.places.result_part(op.c.region)
        return [lambda: cast(c, result)]

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

"""The actions of a chain in order, overlapped where their data allow it.

Each matrix is written once in an execution, which all ranks begin and end together. So within it ranks have to meet
only before one reads what another made, without this one taking part. Transfers of what is there from the beginning
start some actions early, and those that bring a result to its place end when it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from rma_mm.runtime.chains.actions import Action, Here, Place
from rma_mm.runtime.execution.executor import under_way
from rma_mm.runtime.execution.footprint import all_ops
from rma_mm.runtime.ranks.agreement import digest
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.watching.transfers import timed
from rma_mm.schedule.ops import Broadcast, Shift
from rma_mm.schedule.passes import leading, reached, sources
from rma_mm.schedule.schedule import Schedule
from rma_mm.windows.hosts.liveness import BARRIER, END
from rma_mm.windows.waiting import barrier

AHEAD = 3
"""Actions by which transfers start early: a helper thread looks after them every 5 ms, in which a step may pass."""
GroupStart = tuple[tuple[int, ...], int]  # something that ranks of a group start together: these, and what it is


class RankTransfers(NamedTuple):
    """Facts about a rank's operations of an action that other ranks must know."""

    reached: set[str]  # homes of others that are read, or added to, without these taking part
    prefetched: set[str]  # the operands of which parts are brought at its beginning
    collectives: Counter[GroupStart]  # what of that groups move


class ActionTiming(NamedTuple):
    meets: bool  # true if all ranks meet before it
    begins: list[int]  # the numbers of those that begin then: it, unless it has begun, and some that follow


class Overlapped:
    """The actions of a chain, to be run many times."""

    def __init__(self, mesh: Mesh, actions: Sequence[Action], inputs: Collection[Place], is_checked: bool) -> None:
        """Collective. inputs: places that are there from the beginning. is_checked: whether each result is checked."""
        self.mesh, self.actions, self.inputs = mesh, actions, inputs
        self.is_checked = is_checked or mesh.checks is not None
        self.schedules: list[Schedule | None] = []  # those by which `keeps_barriers` and `moments` were found
        self.keeps_barriers: list[bool] = []  # by action
        self.moments: list[ActionTiming] = []
        self.brings: list[bool] = []  # by action: whether it brings operands at its beginning
        self._look()

    def run(self, here: Here) -> None:
        """Do all. Collective; ranks have just agreed. What one rank cannot do all raise."""
        self._look()
        if not self.is_checked:
            self._run(range(len(self.actions)), here)
            return
        for n, action in enumerate(self.actions):
            with action.checked(here):
                self._run([n], here)

    @property
    def seconds(self) -> float:
        """Predicted seconds of an execution, in which some actions move data while others multiply."""
        now = wire = 0.0
        there, ready = dict[int, float](), dict[Place, float]()
        for n, (action, moment) in enumerate(zip(self.actions, self.moments, strict=True)):
            cost = action.cost
            now = max(now, *(ready.get(place, 0.0) for place in action.reads))
            if moment.meets:
                now = max(now, *ready.values(), 0.0) + cost.meeting
            for m in moment.begins:
                if m != n:
                    there[m] = wire = max(wire, now) + self.actions[m].cost.moving
            now += cost.multiplying
            if n in there:
                now = max(now, there[n])
            elif self.brings[n]:
                now += cost.moving
            else:
                ready[action.result] = wire = max(wire, now) + cost.moving
        return max(now, wire) + max((action.cost.meeting for action in self.actions), default=0.0)

    def _run(self, numbers: Iterable[int], here: Here) -> None:
        """Do some, from one meeting of all ranks to another."""
        pending: list[Action] = []
        with under_way(self.mesh, (self, here)):
            for n in numbers:
                action, moment = self.actions[n], self.moments[n]
                for each in [each for each in pending if moment.meets or each.result in action.reads]:
                    each.finish(here)
                    pending.remove(each)
                if moment.meets:
                    self._meet(here, BARRIER)
                for m in moment.begins:
                    self.actions[m].begin(here, self.keeps_barriers[m])
                action.work(here)
                pending.append(action)
            for each in pending:
                each.finish(here)
            self._meet(here, END)

    def _meet(self, here: Here, why: int) -> None:
        """Make every rank's stores visible to all ranks."""
        windows = {matrix.block.window for matrix in here.values()}
        for window in windows:
            window.sync()
        timed(self.mesh.metrics.tally, partial(barrier, self.mesh.comm), why)()
        for window in windows:
            window.sync()

    # -- what begins when -------------------------------------------------------------------------

    def _look(self) -> None:
        """Find where ranks must meet and which transfers may begin early, if plans have changed."""
        schedules = [action.schedule for action in self.actions]
        if schedules == self.schedules:
            return
        self.schedules = schedules
        own = [rank_moves(each, self.mesh) for each in schedules]
        moved = [joined(ranks) for ranks in zip(*self.mesh.comm.allgather(own), strict=True)]
        self.keeps_barriers = [self.is_checked or bool(each.reached - {"A", "B"}) for each in moved]
        self.brings = [bool(each.prefetched) for each in moved]
        numbers = range(len(self.actions))
        alone = (ActionTiming(False, [n]) for n in numbers)
        self.moments = list(alone if self.is_checked else action_timings(self.actions, self.inputs, moved))


def rank_moves(schedule: Schedule | None, mesh: Mesh) -> RankTransfers:
    ops = [] if schedule is None else all_ops(schedule, mesh)
    first, together = list(chain(*leading(ops)[0])), Counter[GroupStart]()
    for op in first:
        if isinstance(op, Broadcast):
            together[op.group, digest(*map(str, op.parts))] += 1
        elif isinstance(op, Shift):  # round a ring
            together[tuple(mesh.grid.ranks), digest(op.dst.operand)] += 1
    prefetched = {source.operand for op in first for source in sources(op)}
    return RankTransfers(reached(ops, mesh.rank, mesh.node_of), prefetched, together)


def joined(ranks: Sequence[RankTransfers]) -> RankTransfers:
    """Join the transfers of all ranks, keeping only those that every rank of a group would start early."""
    alike = all(
        ranks[rank].collectives[key] == count
        for each in ranks
        for key, count in each.collectives.items()
        for rank in key[0]
    )
    reached, brought = ({name for names in found for name in names} for found in list(zip(*ranks, strict=True))[:2])
    return RankTransfers(reached, brought if alike else set(), Counter())


def action_timings(
    actions: Sequence[Action], inputs: Collection[Place], moved: Sequence[RankTransfers]
) -> Iterator[ActionTiming]:
    known, news, begun = set(inputs), set[Place](), set[int]()

    def named(n: int, names: set[str]) -> set[Place]:
        return {place for name, place in zip("AB", actions[n].reads, strict=False) if name in names}

    for n, action in enumerate(actions):
        meets = bool(named(n, moved[n].reached) & news)
        if meets:
            known |= news
            news.clear()
        following = range(n + 1, min(n + 1 + AHEAD, len(actions)))
        early = [m for m in following if moved[m].prefetched and known >= named(m, moved[m].prefetched)]
        begins = [n, *early] if moved[n].prefetched else [*early, n]  # some ranks of a group may begin more of n
        yield ActionTiming(meets, [m for m in begins if m not in begun])
        begun.update(begins)
        news.add(action.result)

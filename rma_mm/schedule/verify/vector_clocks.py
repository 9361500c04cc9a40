"""Order of events across ranks: vector clocks, advanced by posts and awaits, made equal by barriers.

After Fidge and Mattern (1988): each rank's clock holds how far it knows every rank to have come.
"""

from __future__ import annotations

from collections import defaultdict

from rma_mm.schedule.ops import Await

ClockValue = tuple[int, int]  # (rank, its time)


class VectorClocks:
    """The clocks of all ranks, as far as their operations have been looked at."""

    def __init__(self, size: int) -> None:
        self.clocks = [[0] * size for _ in range(size)]
        self.posts: dict[tuple[int, str], list[list[int]]] = defaultdict(list)

    def now(self, rank: int) -> ClockValue:
        self.clocks[rank][rank] += 1
        return rank, self.clocks[rank][rank]

    def post(self, rank: int, event: str) -> ClockValue:
        """Record a post; ranks that await it learn what this rank knows."""
        moment = self.now(rank)
        self.posts[rank, event].append(list(self.clocks[rank]))
        return moment

    def is_posted(self, op: Await) -> bool:
        return all(len(self.posts[q, op.event]) >= op.count for q in op.group)

    def learn(self, rank: int, op: Await) -> None:
        """Let `rank` learn from the posts it awaited."""
        for q in op.group:
            known = self.posts[q, op.event][op.count - 1]
            self.clocks[rank] = [max(pair) for pair in zip(self.clocks[rank], known, strict=True)]

    def meet(self) -> None:
        """Record a barrier: earlier events become known to all ranks."""
        common = [max(times) for times in zip(*self.clocks, strict=True)]
        self.clocks = [list(common) for _ in self.clocks]

    def is_before(self, moment: ClockValue, rank: int) -> bool:
        there, time = moment
        return self.clocks[rank][there] >= time

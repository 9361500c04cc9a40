"""Scratch that ranks of a node fill and read together, and the count of what each of them has posted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.runtime.execution.footprint import all_ops
from rma_mm.runtime.execution.operands import Operands, frame_dtype
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.lowering.node_fetch import EVENTS
from rma_mm.schedule.ops import Await, Ref, Slot
from rma_mm.schedule.passes import frames_used
from rma_mm.schedule.schedule import Schedule
from rma_mm.windows import Transfer


class NodeScratch:
    """Scratch memory that a plan shares within each node; it returns to the arena when it is dropped.

    Collective to make; the memory goes back to the arena when it is dropped.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule, operands: Operands) -> None:
        self.mesh = mesh
        ops = all_ops(schedule, mesh)
        slots = [ref.buffer for op in ops for ref in op.refs if isinstance(ref.buffer, Slot)]
        grouped = {slot.frame for slot in slots if slot.group}
        sizes = {key: size for key, size in sorted(frames_used(ops).items()) if key[1] in grouped}
        mine = {x: sum(n for (holder, f), n in sizes.items() if holder == mesh.rank and f[0] == x) for x in "AB"}
        told = mesh.comm.allgather(mine)
        self.frames: dict[tuple[int, str], NDArray[Any]] = {}
        """(holder, frame) → its memory, flat; empty if shared memory turned out too small."""
        self.blocks: list[Block] = []
        for x in "AB":
            if any(each[x] for each in told):
                block = mesh.arena.allocate([(1, each[x]) for each in told], frame_dtype(operands, schedule, x))
                self.blocks.append(block)
                self._cut(block, {key: n for key, n in sizes.items() if key[1][0] == x}, [each[x] for each in told])
        self.counts: dict[int, NDArray[np.int64]] = {}
        """Rank of this node → how often it has posted each event, since the plan was made; nothing beyond the grid."""
        self.begun = np.empty(0, np.int64)  # this rank's counts when the run began; the same for all who share
        if self.blocks:
            self._count()

    def _cut(self, block: Block, sizes: dict[tuple[int, str], int], totals: Sequence[int]) -> None:
        """Give each frame its part of its holder's memory, in the order of names."""
        begin: dict[int, int] = {}
        for (holder, frame), size in sizes.items():
            start = begin.get(holder, 0)
            begin[holder] = start + size
            memory = block.view(holder, (1, totals[holder]))
            if memory is not None:
                self.frames[holder, frame] = memory[0, start : start + size]

    def _count(self) -> None:
        shapes = [(1, len(EVENTS) * (rank < self.mesh.grid.size)) for rank in range(self.mesh.size)]
        block = self.mesh.arena.allocate(shapes, np.dtype(np.int64))
        block.local[...] = 0
        self.blocks.append(block)
        self.window = block.window
        views = {rank: block.view(rank, shape) for rank, shape in enumerate(shapes)}
        self.counts = {rank: view[0] for rank, view in views.items() if view is not None}
        self.begun = self.counts[self.mesh.rank].copy()

    def memory(self, ref: Ref) -> NDArray[Any]:
        assert isinstance(ref.buffer, Slot)
        return self.frames[ref.rank, ref.buffer.frame][: ref.buffer.region.size]

    def begin(self) -> None:
        self.begun[:] = self.counts[self.mesh.rank]

    def post(self, event: str) -> None:
        """Count up; stores before it are visible to whoever sees the count."""
        self.window.sync()
        self.counts[self.mesh.rank][EVENTS.index(event)] += 1

    def is_due(self, op: Await) -> Callable[[], bool]:
        """True if the event that `op` awaits has been posted."""
        at = EVENTS.index(op.event)
        counts = [self.counts[rank] for rank in op.group]

        def is_due() -> bool:
            wanted = self.begun[at] + op.count
            due = all(count[at] >= wanted for count in counts)
            if due:
                self.window.sync()
            return due

        return is_due


class Fetch:
    """A rank's piece of a shared slice: begun when the frame is free, and posted when it has landed."""

    def __init__(self, shared: NodeScratch, gates: Sequence[Callable[[], bool]]) -> None:
        self.scratch, self.gates = shared, gates
        self.transfers: list[Transfer] = []
        self.event = ""
        self.number = 0  # number of earlier posts of the event in a run

    def start(self) -> None:
        self.scratch.mesh.progress.when(lambda: all(gate() for gate in self.gates), self._begin)

    def _begin(self) -> None:
        for transfer in self.transfers:
            transfer.start()
        self.scratch.mesh.progress.when(self._is_over, lambda: self.scratch.post(self.event))

    def _is_over(self) -> bool:
        at = EVENTS.index(self.event)
        posted = self.scratch.counts[self.scratch.mesh.rank][at] - self.scratch.begun[at]
        return bool(posted == self.number) and all(transfer.done() for transfer in self.transfers)

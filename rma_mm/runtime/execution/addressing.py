"""Memory behind the references of a schedule, on one rank."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.span import Region
from rma_mm.runtime.execution.node_slots import NodeScratch
from rma_mm.runtime.ranks.arena import Block
from rma_mm.schedule.ops import Ref, Slot
from rma_mm.schedule.schedule import STAGE, Schedule

COPIED = "cast "  # before the name of a home: scratch for parts of it in another type, or as they lie elsewhere
Box = tuple[NDArray[Any], Region]  # positions of a 2-D array


@dataclass
class Tickets:
    """The shared counter of a pool. It is never reset: each run starts where the last one ended."""

    block: Block  # an int64 on rank 0
    first: int = 0  # the ticket of task 0 in the next run

    def next_task(self) -> int:
        return self.block.window.fetch_add(0, self.block.offset, 1) - self.first


@dataclass
class Memory:
    """The memory behind the names of a schedule, and scratch."""

    homes: dict[str, Block]  # A, B, what the plan added, and C where other ranks read it
    result: NDArray[Any]  # this rank's own local array of C
    shadow: Block | None = None  # memory in which C is summed, if not in its own type
    transposed: frozenset[str] = frozenset()  # homes whose blocks hold the transposed matrix
    frames: dict[str, NDArray[Any]] = field(default_factory=dict)  # scratch memory by frame, flat
    tickets: Tickets | None = None  # for a schedule with a pool
    node_scratch: NodeScratch | None = None  # where ranks of a node fetch slices together


class Places:
    """Names of a schedule → arrays of one rank."""

    def __init__(self, schedule: Schedule, memory: Memory, rank: int) -> None:
        self.schedule, self.memory, self.rank = schedule, memory, rank
        self.copied_so_far: dict[str, int] = {}

    def array(self, ref: Ref, summing: bool = False) -> NDArray[Any]:
        """Return the memory behind `ref`, whose positions are dense there; `summing` means C's accumulator."""
        where = self.schedule.holds(ref).locate(ref.region)
        return self.whole(ref, summing)[tuple(span.as_slice() for span in where)]

    def whole(self, ref: Ref, summing: bool) -> NDArray[Any]:
        """Return the dense array that contains `ref`."""
        rows, cols = self.schedule.holds(ref).shape
        if isinstance(ref.buffer, Slot):  # as its home is stored, so that both are contiguous in the same direction
            frame = self.frame(ref)
            return frame.reshape(rows, cols) if self.is_upright(ref) else frame.reshape(cols, rows).T
        block, flipped = self.block(ref.buffer, summing)
        if block is None or (ref.buffer == "C" and ref.rank == self.rank and block is not self.memory.shadow):
            return self.memory.result
        stored = block.view(ref.rank, (cols, rows) if flipped else (rows, cols))
        assert stored is not None, f"{ref} is out of reach"
        return stored.T if flipped else stored

    def frame(self, ref: Ref) -> NDArray[Any]:
        """Return the memory of a slot, flat."""
        assert isinstance(ref.buffer, Slot)
        if ref.buffer.group:
            assert self.memory.node_scratch is not None
            return self.memory.node_scratch.memory(ref)
        return self.memory.frames[ref.buffer.frame][: ref.buffer.region.size]

    def box(self, ref: Ref) -> Box:
        return self.whole(ref, summing=False), self.schedule.holds(ref).locate(ref.region)

    def is_upright(self, ref: Ref) -> bool:
        """True if an operand is stored row by row, the order in which groups move it on all ranks."""
        x = ref.operand
        return x == "C" or (x + STAGE if x + STAGE in self.schedule.homes else x) not in self.memory.transposed

    def block(self, buffer: str, summing: bool) -> tuple[Block | None, bool]:
        """Return the block of a home, and whether it holds the transposed matrix."""
        if buffer == "C" and summing and self.memory.shadow is not None:
            return self.memory.shadow, False
        return self.memory.homes.get(buffer), buffer in self.memory.transposed

    def home(self, ref: Ref, summing: bool = False) -> Block:
        assert isinstance(ref.buffer, str)
        block, _ = self.block(ref.buffer, summing)
        assert block is not None
        return block

    def loads(self, home: Ref) -> bool:
        """True if ranks of a node load each other's parts of a home; the same for all of them."""
        return FLAVOURS[self.home(home).window.flavour].loads_on_node

    def copied_area(self, ref: Ref, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Scratch for a part of a home: disjoint for the parts of one home, shared by all bindings."""
        key = f"{COPIED}{ref.buffer}"
        area = self.memory.frames.get(key)
        if area is None:
            area = self.memory.frames[key] = np.empty(self.schedule.holds(ref).size, dtype)
        begin = self.copied_so_far.get(key, 0)
        self.copied_so_far[key] = begin + ref.region.size
        return area[begin : begin + ref.region.size].reshape(ref.region.shape)

    def result_part(self, region: Region) -> NDArray[Any]:
        """Return the part of this rank's C, in its final type, that holds `region`."""
        where = self.schedule.home("C", self.rank).locate(region)
        return self.memory.result[tuple(span.as_slice() for span in where)]


def slots(refs: list[Ref]) -> list[str]:
    return [ref.buffer.frame for ref in refs if isinstance(ref.buffer, Slot)]

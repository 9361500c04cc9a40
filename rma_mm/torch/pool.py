"""Memory of results that is used again: by results of the same kind, once no tensor shows it on any rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import field
from itertools import accumulate
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.stored import Shape
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows.waiting import reduced

SLOTS = 16  # results of one kind that are kept; more are made anew each time


class ShownTile(np.ndarray[Any, Any]):
    """A matrix's tile as a tensor shows it: while that tensor's memory is in use, the matrix lives."""

    matrix: DistMatrix


@dataclass(eq=False)
class ResultSlot:
    """A matrix whose memory is reused."""

    matrix: DistMatrix | None  # None if it was given away, to whoever asked which matrix a tensor lies in
    shown: weakref.ref[ShownTile] | None = None

    @property
    def is_free(self) -> bool:
        return self.matrix is not None and (self.shown is None or self.shown() is None)


@dataclass(eq=False)
class ResultPool:
    """Results of one shape, element type and placement. All ranks have as many slots; which are free may differ."""

    mesh: Mesh
    shape: Shape
    dtype: np.dtype[Any]
    layout: Layout
    slots: list[ResultSlot] = field(default_factory=list)

    def take(self, slot: int) -> ResultSlot:
        """Return the slot of this number, which is free on all ranks, or a new one. Collective where it is new."""
        if slot < len(self.slots):
            return self.slots[slot]
        made = ResultSlot(DistMatrix.allocated(self.mesh, self.shape, self.dtype, self.layout))
        if len(self.slots) < SLOTS:
            self.slots.append(made)
        return made


def free_slots(pools: list[ResultPool]) -> tuple[int, ...]:
    return tuple(_chosen(pools, lambda pool, slot: pools[pool].slots[slot].is_free))


def _chosen(pools: list[ResultPool], is_free: Callable[[int, int], bool]) -> Iterator[int]:
    """Yield the first free slot of each, or the number of a new one; another each time that a pool is named again."""
    last: dict[int, int] = {}
    for number, pool in enumerate(pools):
        begin, end = last.get(id(pool), -1) + 1, len(pool.slots)
        last[id(pool)] = n = next((n for n in range(begin, end) if is_free(number, n)), max(begin, end))
        yield n


def taken(pools: list[ResultPool], free: tuple[int, ...] | None) -> list[ResultSlot]:
    """Return a slot of each. free: their numbers, where all ranks have found the same ones free. Collective.

    Where they have not (None), those are taken that are free on all; nothing is asked of other ranks else, except for
    what is new.
    """
    if free is None:
        votes = np.array([slot.is_free for pool in pools for slot in pool.slots], np.uint8)
        if votes.size:
            reduced(pools[0].mesh.comm, votes, "MIN")
        begins = list(accumulate((len(pool.slots) for pool in pools), initial=0))
        free = tuple(_chosen(pools, lambda pool, slot: bool(votes[begins[pool] + slot])))
    return [pool.take(slot) for pool, slot in zip(pools, free, strict=True)]

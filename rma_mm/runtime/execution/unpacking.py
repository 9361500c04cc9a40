"""Copies that arrive as they lie at their owner, and are put into place here.

MPI takes up to five times as long to scatter them on the way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rma_mm.geometry.span import Region
from rma_mm.runtime.execution.addressing import Box
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.ops import Copy
from rma_mm.schedule.schedule import Schedule
from rma_mm.windows import Transfer
from rma_mm.windows.base import Array


class Unpacked:
    """A get into `landing` (see `windows.Transfer`), which goes to its place, in the type there, when it is over."""

    def __init__(self, inner: Transfer, landing: Array, place: Box) -> None:
        self.inner, self.landing, (self.array, self.positions) = inner, landing, place
        self.start, self.done, self.close = inner.start, inner.done, inner.close

    def wait(self) -> None:
        self.inner.wait()
        with np.errstate(all="ignore"):  # a sum of 16-bit floats is rounded here, once
            self.array[self.positions.selector()] = self.landing


def is_packed(schedule: Schedule, op: Copy, in_reach: bool, is_cast: bool) -> bool:
    """True if a copy must land in a buffer first: it is converted, or would be scattered in transit.

    Of a redistribution alone: what a product copies goes into scratch of its own, or is counted as going to its place.
    in_reach: whether the window that it comes from lets this rank load it.
    """
    if schedule.shape is not None:
        return False
    return is_cast or not (in_reach or is_strip(schedule.holds(op.dst), op.dst.region))


def landing_size(mesh: Mesh, schedule: Schedule, in_reach: Callable[[Copy], bool], is_cast: bool) -> int:
    """Return elements of this rank that land apart."""
    ops = schedule.program(mesh.rank) if mesh.is_member else []
    copies = [op for op in ops if isinstance(op, Copy)]
    return sum(op.dst.region.size for op in copies if is_packed(schedule, op, in_reach(op), is_cast))


def is_strip(home: Region, part: Region) -> bool:
    """True if a part of a dense, row-major array lies in one stretch."""
    rows, cols = home.locate(part)
    return rows.is_contiguous and cols.is_contiguous and (len(rows) == 1 or len(cols) == len(home[1]))

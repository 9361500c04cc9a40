"""Copies that arrive as they lie at their owner, and are put into place here.

MPI takes up to five times as long to scatter them on the way.
"""

from __future__ import annotations

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
        """Return when it is in its place."""
        self.inner.wait()
        with np.errstate(all="ignore"):  # a sum of 16-bit floats is rounded here, once
            self.array[self.positions.selector()] = self.landing


def is_packed(mesh: Mesh, schedule: Schedule, op: Copy, is_cast: bool) -> bool:
    """Whether a copy is to land apart: where it is cast, or MPI would have to scatter it.

    Of a redistribution alone: what a product copies goes into scratch of its own, or is counted as going to its place.
    """
    if schedule.shape is not None:
        return False
    owner = op.src.rank
    is_near = mesh.flavour.loads_on_node and mesh.node_of[owner] == mesh.node_of[mesh.rank]
    return is_cast or not (owner == mesh.rank or is_near or is_strip(schedule.holds(op.dst), op.dst.region))


def landing_size(mesh: Mesh, schedule: Schedule, is_cast: bool) -> int:
    """Elements of this rank that land apart."""
    ops = schedule.program(mesh.rank) if mesh.is_member else []
    return sum(op.dst.region.size for op in ops if isinstance(op, Copy) and is_packed(mesh, schedule, op, is_cast))


def is_strip(home: Region, part: Region) -> bool:
    """Whether a part of a dense, row-major array lies in one stretch."""
    rows, cols = home.locate(part)
    return rows.is_contiguous and cols.is_contiguous and (len(rows) == 1 or len(cols) == len(home[1]))

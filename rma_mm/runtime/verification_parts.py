"""What the checks of a product see of a matrix: this rank's share of it, each element on one rank only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region

Array = NDArray[Any]

BLOCK = 1 << 16
"""Elements converted at a time."""


class MeshView(Protocol):
    """What is needed of a mesh."""

    @property
    def comm(self) -> Any:
        """An mpi4py communicator over all ranks; of it, allgather, bcast, and Allreduce as it sums by default."""

    rank: int
    """This rank."""
    shape: MeshShape
    """The grid."""


class MatrixView(Protocol):
    """What is needed of a distributed matrix."""

    shape: tuple[int, int]
    """Rows and columns."""
    dtype: np.dtype[Any]
    """Element type."""
    layout: Layout
    """Its placement."""

    @property
    def mesh(self) -> MeshView:
        """Where it is placed."""

    @property
    def region(self) -> Region:
        """The global indices that this rank holds."""

    @property
    def tile(self) -> Array:
        """Their elements, of shape `region.shape`."""

    def redistribute(self, layout: Layout) -> MatrixView:
        """The same matrix placed by `layout`. Collective."""


class Part:
    """The elements of a matrix that this rank answers for; over all ranks they sum up to the matrix.

    Replicas but the first answer for none; every rank with a summand of a partial sum answers for it.
    """

    def __init__(self, matrix: MatrixView, working: np.dtype[Any], conjugate: bool = False) -> None:
        self.shape = matrix.shape
        self.working = working
        self.conjugate = conjugate and matrix.dtype.kind == "c"
        self.is_partial = bool(matrix.layout.partial)
        self.zero_nonfinite = False
        """Whether `blocks` puts 0 in place of NaN and infinities."""
        if answers(matrix):
            self.rows, self.cols = (span.indices for span in matrix.region)
            self.tile = matrix.tile
        else:
            self.rows = self.cols = np.empty(0, np.int64)
            self.tile = np.empty((0, 0), matrix.dtype)

    def blocks(self) -> Iterator[tuple[NDArray[np.int64], Array]]:
        """(global rows, their elements in this rank's columns), a few rows at a time."""
        if not self.tile.size:
            return
        step = max(1, BLOCK // self.tile.shape[1])
        for top in range(0, self.tile.shape[0], step):
            yield self.rows[top : top + step], self._converted(self.tile[top : top + step])

    def some_rows(self, wanted: NDArray[np.int64]) -> Array:
        """(len(wanted), columns of the matrix): the rows `wanted` as far as this rank answers for them, else 0."""
        out = np.zeros((len(wanted), self.shape[1]), self.working)
        at = np.searchsorted(self.rows, wanted)
        held = np.flatnonzero(at < len(self.rows))
        held = held[self.rows[at[held]] == wanted[held]]
        if held.size and self.cols.size:
            out[np.ix_(held, self.cols)] = self._converted(self.tile[at[held]])
        return out

    def _converted(self, block: Array) -> Array:
        if self.working == np.uint64 and block.dtype.kind == "i":
            return block.astype(np.int64).view(np.uint64)  # two's complement: exact modulo 2^64
        made: Array = block.astype(self.working)
        if self.conjugate:
            np.conjugate(made, out=made)
        if self.zero_nonfinite:
            made[~np.isfinite(made)] = 0
        return made


def whole(matrix: MatrixView, product: np.dtype[Any]) -> MatrixView:
    """The matrix without summands where those wrap around (or are joined by or) before they are cast. Collective.

    Other sums, and integers as wide as the product's, can be formed in any wider type.
    """
    layout, wraps = matrix.layout, matrix.dtype.kind in "iub" and matrix.dtype != product
    return matrix.redistribute(layout.single(matrix.mesh.shape)) if layout.partial and wraps else matrix


def answers(matrix: MatrixView) -> bool:
    """Whether this rank answers for the elements that it holds."""
    mesh = matrix.mesh.shape
    coords = matrix.layout.coords(mesh, matrix.mesh.rank)
    return coords is not None and not any(coords[axis] for axis in matrix.layout.replicated_axes(mesh))


def summed(comm: Any, *arrays: Array) -> list[Array]:
    """Each array summed over all ranks. Collective; every rank gets the same bits as rank 0 where it matters."""
    totals = []
    for array in arrays:
        total = np.empty_like(array)
        comm.Allreduce(np.ascontiguousarray(array), total)
        totals.append(total)
    return totals

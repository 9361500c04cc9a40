"""A matrix as the checks see it: this rank's share, each element on one rank only."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region

Array = NDArray[Any]

BLOCK = 1 << 16  # elements converted at a time
DEEP_BLOCK = 1 << 20  # the same where many rows at once are asked for


class MeshView(Protocol):
    """The properties of a mesh that checks need."""

    @property
    def comm(self) -> Any:
        """An mpi4py communicator over all ranks; of it, allgather, bcast, and Allreduce as it sums by default.

        For semirings also Allreduce by other operations, and Alltoall and Allgather of bytes.
        """

    rank: int  # this rank
    grid: MeshShape  # the grid


class MatrixView(Protocol):
    """The properties of a distributed matrix that checks need."""

    shape: tuple[int, int]  # rows and columns
    dtype: np.dtype[Any]  # element type
    layout: Layout  # its placement

    @property
    def mesh(self) -> MeshView:
        """Return the mesh of the matrix."""

    @property
    def region(self) -> Region:
        """The global indices that this rank holds."""

    @property
    def tile(self) -> Array:
        """The elements that this rank holds, in the shape of `region`."""


class Transposable(MatrixView, Protocol):
    """A matrix that can be looked at transposed."""

    @property
    def T(self) -> MatrixView:
        """The transposed matrix, on the same elements."""


class Movable(MatrixView, Protocol):
    """A matrix that may consist of partial sums; one in a file holds each element once."""

    def redistribute(self, layout: Layout) -> MatrixView:
        """Return the same matrix placed by `layout`. Collective."""


class Part:
    """The elements of a matrix that this rank answers for; over all ranks they sum up to the matrix.

    Replicas but the first answer for none; every rank with a summand of a partial sum answers for it.
    """

    def __init__(self, matrix: MatrixView, working: np.dtype[Any], conjugate: bool = False) -> None:
        self.shape = matrix.shape
        self.working = working
        self.conjugate = conjugate and matrix.dtype.kind == "c"
        self.is_partial = bool(matrix.layout.partial)
        self.nonfinite = False  # true if NaN or infinities were found in it
        self.zero_nonfinite = False  # true if 0 is read instead of them
        self.down: Array | None = None  # (rows of the matrix,): what each is multiplied by where it is read
        self.across: Array | None = None  # (columns of the matrix,): the same for columns
        if answers(matrix):
            self.rows, self.cols = (span.indices for span in matrix.region)
            self.tile = matrix.tile
        else:
            self.rows = self.cols = np.empty(0, np.int64)
            self.tile = np.empty((0, 0), matrix.dtype)

    @property
    def T(self) -> Part:
        """The same of the transposed matrix; without scales."""
        turned = copy(self)
        turned.shape = self.shape[::-1]
        turned.rows, turned.cols, turned.tile = self.cols, self.rows, self.tile.T
        return turned

    def as_type(self, working: np.dtype[Any]) -> Part:
        """The same, read as another type; without scales, and with 0 instead of NaN and infinities that were found."""
        other = copy(self)
        other.working, other.down, other.across = working, None, None
        other.zero_nonfinite = self.nonfinite
        return other

    def within(self, first: int, last: int) -> Part:
        """Return some columns of the matrix only."""
        some = copy(self)
        lo, hi = np.searchsorted(self.cols, (first, last))
        some.cols, some.tile = self.cols[lo:hi], self.tile[:, lo:hi]
        return some

    def blocks(self, least: int = 1) -> Iterator[tuple[NDArray[np.int64], Array]]:
        """(global rows, their elements in this rank's columns), a few rows at a time; `least` but of long ones.

        Not to be written to: they may be the matrix itself.
        """
        if not self.tile.size:
            return
        width = self.tile.shape[1]
        step = max(1, BLOCK // width, min(least, DEEP_BLOCK // width))
        for top in range(0, self.tile.shape[0], step):
            at = self.rows[top : top + step]
            yield at, self._read(self.tile[top : top + step], at, self.cols)

    def some_rows(self, wanted: NDArray[np.int64]) -> Array:
        """(len(wanted), columns of the matrix): the rows `wanted` as far as this rank answers for them, else 0."""
        out = np.zeros((len(wanted), self.shape[1]), self.working)
        held, at = _positions(self.rows, wanted)
        if held.size and self.cols.size:
            out[np.ix_(held, self.cols)] = self._read(self.tile[at], wanted[held], self.cols)
        return out

    def some_cols(self, wanted: NDArray[np.int64]) -> Array:
        """(rows of the matrix, len(wanted)): the same for columns."""
        out = np.zeros((self.shape[0], len(wanted)), self.working)
        held, at = _positions(self.cols, wanted)
        if held.size and self.rows.size:
            out[np.ix_(self.rows, held)] = self._read(self.tile[:, at], self.rows, wanted[held])
        return out

    def _read(self, block: Array, rows: NDArray[np.int64], cols: NDArray[np.int64]) -> Array:
        """Return elements of these global rows and columns, maybe as views of the matrix."""
        made = self._converted(block)
        if self.down is not None:
            made = made * self.down[rows, None].astype(made.real.dtype, copy=False)
        if self.across is not None:
            made = made * self.across[cols].astype(made.real.dtype, copy=False)
        return made

    def _converted(self, block: Array) -> Array:
        if self.working == np.uint64 and block.dtype.kind == "i":
            return block.astype(np.int64).view(np.uint64)  # two's complement: exact modulo 2^64
        made: Array = block.astype(self.working, order="C", copy=False)
        if self.conjugate:
            made = np.conjugate(made)
        if self.zero_nonfinite:
            made = np.where(np.isfinite(made), made, made.dtype.type(0))
        return made


def _positions(held: NDArray[np.int64], wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which of `wanted` are among `held`, which ascends, and where there."""
    at = np.searchsorted(held, wanted)
    which = np.flatnonzero(at < len(held))
    which = which[held[at[which]] == wanted[which]]
    return which, at[which]


def whole(a: MatrixView, b: MatrixView, product: np.dtype[Any]) -> tuple[MatrixView, MatrixView]:
    """Two operands without summands where each cannot be multiplied by itself. Collective.

    Some wrap around (or are joined by or) before they are cast; and infinities, times a summand of 0, would be NaN.
    Other sums, and integers as wide as the product's, can be formed in any wider type.
    """
    is_odd = (a.layout.partial or b.layout.partial) and product.kind not in "iub" and not _are_finite(a, b)

    def summed_up(matrix: MatrixView) -> MatrixView:
        wraps = matrix.dtype.kind in "iub" and matrix.dtype != product
        if not (matrix.layout.partial and (wraps or is_odd)):
            return matrix
        return cast(Movable, matrix).redistribute(matrix.layout.single(matrix.mesh.grid))

    return summed_up(a), summed_up(b)


def _are_finite(*matrices: MatrixView) -> bool:
    """True if no element of these is NaN or infinite. Collective."""
    parts = [Part(x, np.dtype(np.complex128 if x.dtype.kind == "c" else np.float64)) for x in matrices]
    mine = all(np.isfinite(block).all() for part in parts for _, block in part.blocks())
    return all(matrices[0].mesh.comm.allgather(mine))


def run(indices: NDArray[np.int64]) -> Any:
    first, last = (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)
    return slice(first, last) if last - first == len(indices) else indices


def answers(matrix: MatrixView) -> bool:
    """True if this rank answers for the elements that it holds."""
    mesh = matrix.mesh.grid
    coords = matrix.layout.coords(mesh, matrix.mesh.rank)
    return coords is not None and not any(coords[axis] for axis in matrix.layout.replicated_axes(mesh))


def allreduce_sums(comm: Any, *arrays: Array) -> list[Array]:
    """Return each array summed over all ranks. Collective; every rank gets the same bits as rank 0 if it matters."""
    totals = []
    for array in arrays:
        total = np.empty_like(array)
        comm.Allreduce(np.ascontiguousarray(array), total)
        totals.append(total)
    return totals

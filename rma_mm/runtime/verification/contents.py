"""Two placements of one matrix compared element by element, by collectives alone; replicas too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import accumulator
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.verification.parts import MatrixView, Part, allreduce_sums, answers
from rma_mm.windows.checks.poison import differing, in_bytes

Array = NDArray[Any]
TABLE = 2**20  # elements that are compared at a time


@dataclass
class LocalMatrix:
    """A matrix as the checks see it, with this rank's part as `tile`."""

    mesh: Mesh
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: Layout
    tile: Array

    @property
    def region(self) -> Region:
        return self.layout.region(self.shape, self.mesh.grid, self.mesh.rank)


def differences(source: MatrixView, copy: MatrixView, name: str) -> Iterator[str]:
    """Yield the places where this rank's part of `copy` differs from `source`.

    Collective: iterate to its end. Compares bit by bit; what the summands of a partial source make is compared within
    rounding. Of a partial copy one summand is the matrix, and the others are zero.
    """
    mesh = source.mesh
    rows, cols = (span.indices for span in copy.region)
    coords = copy.layout.coords(mesh.grid, mesh.rank) or {}
    is_zero = any(coords.get(axis) for axis in copy.layout.partial)
    rows_of, differ = _by_sums(source, copy.dtype) if source.layout.partial else _by_bits(source)
    for lines in _lines(source.shape):
        whole = rows_of(lines)
        at = np.flatnonzero((rows >= lines[0]) & (rows <= lines[-1]))
        if not (at.size and cols.size):
            continue
        wanted = tuple(each[np.ix_(rows[at] - lines[0], cols)] * (not is_zero) for each in whole)
        wrong = differ(copy.tile[at], wanted)
        if wrong.any():
            i, j = np.argwhere(wrong)[0]
            yield (
                f"{name}[{rows[at[i]]}, {cols[j]}] on rank {mesh.rank} is {copy.tile[at[i], j]}, and not what its "
                f"owner holds ({wrong.sum()} of {wrong.size} elements of these rows)"
            )


Compare = tuple[Callable[[NDArray[np.int64]], tuple[Array, ...]], Callable[[Array, tuple[Array, ...]], Array]]
"""A pair: rows of a matrix, on every rank (collective), and the test of which elements differ from them."""


def _by_bits(source: MatrixView) -> Compare:
    """Return elements as bytes, each from the one rank that answers for it."""
    mine = answers(source)
    rows, cols = (span.indices for span in source.region) if mine else (np.empty(0, np.int64),) * 2

    def rows_of(lines: NDArray[np.int64]) -> tuple[Array, ...]:
        out = np.zeros((len(lines), source.shape[1], source.dtype.itemsize), np.uint8)
        at = np.flatnonzero((rows >= lines[0]) & (rows <= lines[-1]))
        if at.size and cols.size:
            out[np.ix_(rows[at] - lines[0], cols)] = in_bytes(source.tile[at])
        return (allreduce_sums(source.mesh.comm, out)[0],)

    def differ(part: Array, wanted: tuple[Array, ...]) -> Array:
        found: Array = (in_bytes(part) != wanted[0]).any(axis=-1)
        return found

    return rows_of, differ


def _by_sums(source: MatrixView, dtype: np.dtype[Any]) -> Compare:
    """Sums of summands, and of their magnitudes."""
    kinds = {"c": np.complex128, "i": np.uint64, "u": np.uint64}
    part = Part(source, np.dtype(kinds.get(dtype.kind, np.float64)))
    is_exact = part.working.kind == "u"
    parts = source.mesh.grid.size

    def rows_of(lines: NDArray[np.int64]) -> tuple[Array, ...]:
        mine = part.some_rows(lines)
        with np.errstate(all="ignore"):
            return tuple(allreduce_sums(source.mesh.comm, mine, np.abs(mine)))

    def differ(found: Array, wanted: tuple[Array, ...]) -> Array:
        total, size = wanted
        if is_exact or dtype.kind == "b":
            made = (total > 0 if dtype.kind == "b" else total).astype(dtype)
            return differing(found, made)
        from rma_mm.runtime.verification.floats import limits

        (unit, normal, largest), sums = limits(dtype), np.finfo(accumulator(dtype))
        with np.errstate(all="ignore"):
            allowed = (2 * parts * float(sums.eps) + 2 * unit) * size + 2 * float(sums.tiny) + normal * unit
            close = np.abs(found.astype(part.working) - total) <= allowed
        wrong: Array = ~(close | ~(size < largest / 4))
        return wrong

    return rows_of, differ


def _lines(shape: tuple[int, int]) -> Iterator[NDArray[np.int64]]:
    step = max(1, TABLE // max(1, shape[1]))
    for top in range(0, shape[0] if shape[1] else 0, step):
        yield np.arange(top, min(top + step, shape[0]))

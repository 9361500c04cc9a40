"""Rows of a product of integers or truth values computed again where an epilogue follows it, exactly.

What an activation has cut off cannot be undone. All rows of a small product, else one of each of 64 parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rma_mm.elements.dtypes import accumulator
from rma_mm.kernels.elementwise import cast
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.verification.bools import COUNTS, true_rows
from rma_mm.runtime.verification.parts import Array, MatrixView, Part, summed
from rma_mm.runtime.verification.rows import Indices, how_many, products, random_rows, row_chunks

SLOWER = 4
"""Times that a term takes here, compared with BLAS."""


@dataclass
class Closed:
    """A product with its epilogue."""

    a: MatrixView
    b: MatrixView
    c: MatrixView
    before: MatrixView | None
    alpha: Any
    beta: Any
    conj: tuple[bool, bool]
    epilogue: Epilogue
    product: np.dtype[Any]
    """The type of the product; C may be stored in another."""

    @property
    def summed(self) -> np.dtype[Any]:
        """The type in which C is summed."""
        return accumulator(self.product)

    def bias(self, rows: Indices) -> Array:
        """What is added to these rows, in the type in which C is summed; it broadcasts."""
        bias = self.epilogue.bias
        if bias is None:
            return np.zeros((1, 1), self.summed)
        held: Array = bias.astype(self.summed)
        return held[rows, None] if self.epilogue.per == "row" else held[None, :]

    def parts(self, working: np.dtype[Any]) -> tuple[Part, Part, Part | None]:
        """A, B and C0 to compute with."""
        old = None if self.before is None else Part(self.before, working)
        return Part(self.a, working, self.conj[0]), Part(self.b, working, self.conj[1]), old


def wrong_closed(p: Closed, seed: int) -> tuple[str, int]:
    """Where a row computed again is wrong (empty if none is), and the number of such rows. Collective."""
    m, n = p.c.shape
    rows = random_rows(m, how_many(m, n, p.a.shape[1], SLOWER), seed)
    for some in row_chunks(rows, max(n, p.a.shape[1])):
        with np.errstate(all="ignore"):
            expected, actual, wrong = _compared(p, some)
        if wrong.any():
            row, col = np.argwhere(wrong)[0]
            where = f"C[{some[row]}, {col}] is {actual[row, col]}, computed again it is {expected[row, col]}"
            return where, len(rows)
    return "", len(rows)


def _compared(p: Closed, rows: Indices) -> tuple[Array, Array, Array]:
    """The rows as they should be and as they are, and where these differ. Collective."""
    sums = (_truths if p.summed.kind == "b" else _whole)(p, rows)
    sums = np.add(sums, p.bias(rows))
    if p.epilogue.activation == "relu":
        sums = np.maximum(sums, 0)
    expected = np.empty(sums.shape, p.c.dtype)
    cast(sums, expected)
    working = _wide(p.c.dtype)
    actual = summed(p.c.mesh.comm, Part(p.c, working).some_rows(rows))[0]
    return expected, actual, actual != _converted(expected, working)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A type that MPI adds up and that holds the elements of `dtype`."""
    return np.dtype({"c": np.complex128, "i": np.uint64, "u": np.uint64}.get(dtype.kind, np.float64))


def _converted(x: Array, working: np.dtype[Any]) -> Array:
    """`x` as `Part` converts a matrix: integers modulo 2^64."""
    return x.astype(np.int64).view(np.uint64) if x.dtype.kind == "i" else x.astype(working)


def _whole(p: Closed, rows: Indices) -> Array:
    """The rows of a product of integers, which wrap around."""
    comm = p.c.mesh.comm
    a, b, before = p.parts(np.dtype(np.uint64))
    total = np.zeros((len(rows), p.c.shape[1]), np.uint64)
    if p.alpha != 0:
        total += np.uint64(int(p.alpha) % 2**64) * products(comm, summed(comm, a.some_rows(rows))[0], b)
    if before is not None:
        total += np.uint64(int(p.beta) % 2**64) * summed(comm, before.some_rows(rows))[0]
    return total.astype(f"u{p.summed.itemsize}").view(p.summed)


def _truths(p: Closed, rows: Indices) -> Array:
    """The rows of a product of truth values."""
    a, b, before = p.parts(COUNTS)
    return true_rows(p.c.mesh.comm, a, b, before, p.alpha != 0, rows)

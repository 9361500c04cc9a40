"""Rows of a product of truth values, or of integers where an epilogue follows it, computed again exactly.

What an activation has cut off cannot be undone. All rows of a small product, else one of each of 64 parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import accumulator
from rma_mm.kernels.elementwise import cast
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.verification.bools import COUNTS, true_rows
from rma_mm.runtime.verification.parts import Array, MatrixView, Part, allreduce_sums
from rma_mm.runtime.verification.rows import SLOWER, Indices, differing, first_wrong, how_many, products, random_rows


@dataclass
class EpilogueProduct:
    a: MatrixView
    b: MatrixView
    c: MatrixView
    before: MatrixView | None
    alpha: Any
    beta: Any
    conj: tuple[bool, bool]
    epilogue: Epilogue
    product: np.dtype[Any]  # the type of the product; C may be stored in another

    @property
    def accum_dtype(self) -> np.dtype[Any]:
        return accumulator(self.product)

    def bias(self, rows: Indices) -> Array:
        """Return the bias of these rows, in the type in which C is summed; it broadcasts."""
        bias = self.epilogue.bias
        if bias is None:
            return np.zeros((1, 1), self.accum_dtype)
        held: Array = bias.astype(self.accum_dtype)
        return held[rows, None] if self.epilogue.per == "row" else held[None, :]

    def parts(self, working: np.dtype[Any]) -> tuple[Part, Part, Part | None]:
        old = None if self.before is None else Part(self.before, working)
        return Part(self.a, working, self.conj[0]), Part(self.b, working, self.conj[1]), old


def wrong_closed(p: EpilogueProduct, seed: int | None) -> tuple[str, int]:
    """Return the place of an error in a recomputed row (empty if there is none), and the number of rows checked.

    Collective.
    """
    m, n, k = *p.c.shape, p.a.shape[1]
    rows = np.arange(m) if seed is None else random_rows(m, how_many(m, n, k, SLOWER), seed)
    return first_wrong(rows, max(n, k), lambda some: _compared(p, some))[0], len(rows)


def _compared(p: EpilogueProduct, rows: Indices) -> tuple[str, float]:
    sums = (_truths if p.accum_dtype.kind == "b" else _whole)(p, rows)
    sums = np.add(sums, p.bias(rows))
    if p.epilogue.activation == "relu":
        sums = np.maximum(sums, 0)
    expected = np.empty(sums.shape, p.c.dtype)
    cast(sums, expected)
    working = _wide(p.c.dtype)
    actual = allreduce_sums(p.c.mesh.comm, Part(p.c, working).some_rows(rows))[0]
    if p.c.dtype.kind == "b":
        actual, working = actual > 0, p.c.dtype
    return differing([f"C[{row}, {{}}]" for row in rows], actual, expected, actual != _converted(expected, working))


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype({"b": "u2", "c": "c16", "i": "u8", "u": "u8"}.get(dtype.kind, "f8"))


def _converted(x: Array, working: np.dtype[Any]) -> Array:
    return x.astype(np.int64).view(np.uint64) if x.dtype.kind == "i" else x.astype(working)


def _whole(p: EpilogueProduct, rows: Indices) -> Array:
    """Return the rows of a product of integers, which wrap around."""
    comm = p.c.mesh.comm
    a, b, before = p.parts(np.dtype(np.uint64))
    total = np.zeros((len(rows), p.c.shape[1]), np.uint64)
    if p.alpha != 0:
        total += np.uint64(int(p.alpha) % 2**64) * products(comm, allreduce_sums(comm, a.some_rows(rows))[0], b)
    if before is not None:
        total += np.uint64(int(p.beta) % 2**64) * allreduce_sums(comm, before.some_rows(rows))[0]
    return total.astype(f"u{p.accum_dtype.itemsize}").view(p.accum_dtype)


def _truths(p: EpilogueProduct, rows: Indices) -> Array:
    a, b, before = p.parts(COUNTS)
    return true_rows(p.c.mesh.comm, a, b, before, p.alpha != 0, rows)

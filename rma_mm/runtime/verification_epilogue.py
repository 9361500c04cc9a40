"""Rows of a product computed again where an epilogue follows it: what an activation has cut off cannot be undone.

All columns of some random rows, in float64 (integers modulo 2^64), each held against the rounding that is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.dtypes import accumulator
from rma_mm.kernels.elementwise import cast
from rma_mm.kernels.epilogue import Epilogue
from rma_mm.runtime.verification_floats import Product, Rounding, rounding
from rma_mm.runtime.verification_parts import Array, MatrixView, Part, summed
from rma_mm.runtime.verification_rows import Indices, again, products, random_rows, row_chunks

GELU_SLOPE = 1.13
"""The largest slope of GELU, rounded up."""
GELU_UNITS = 8
"""Roundings that its formula may make, of its argument."""


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


def wrong_closed(p: Closed, seed: int) -> tuple[str, float | None, int]:
    """Where one of some random rows is wrong (empty if none is), the worst error, and the number of rows. Collective.

    The error is in units of what rounding allows.
    """
    rows = random_rows(p.c.shape[0], seed)
    worst: float | None = 0.0
    for some in row_chunks(rows, max(p.c.shape[1], p.a.shape[1])):
        with np.errstate(all="ignore"):
            expected, actual, ratio = (_exact if p.summed.kind in "iub" else _rounded)(p, some)
        if ratio.size and not ratio.max() <= 1:
            row, col = np.unravel_index(int(np.argmax(~(ratio <= 1))), ratio.shape)
            where = f"C[{some[row]}, {col}] is {actual[row, col]}, computed again it is {expected[row, col]}"
            return where, None, len(rows)
        worst = max(worst or 0.0, float(ratio.max(initial=0)))
    return "", worst, len(rows)


# -- integers and bool ----------------------------------------------------------------------------


def _exact(p: Closed, rows: Indices) -> tuple[Array, Array, Array]:
    """The rows as they should be and as they are, and 0 where they agree, else infinity. Collective."""
    sums = (_truths if p.summed.kind == "b" else _whole)(p, rows)
    sums = np.add(sums, p.bias(rows))
    if p.epilogue.activation == "relu":
        sums = np.maximum(sums, 0)
    expected = np.empty(sums.shape, p.c.dtype)
    cast(sums, expected)
    working = _wide(p.c.dtype)
    actual = summed(p.c.mesh.comm, Part(p.c, working).some_rows(rows))[0]
    same = actual == _converted(expected, working)
    return expected, actual, np.where(same, 0.0, np.inf)


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
    comm = p.c.mesh.comm
    a, b, before = p.parts(np.dtype(np.float64))
    count = np.zeros((len(rows), p.c.shape[1]))
    if p.alpha != 0:
        count += products(comm, (summed(comm, a.some_rows(rows))[0] > 0).astype(np.float64), b)
    if before is not None:
        count += summed(comm, before.some_rows(rows))[0]
    return count > 0


# -- floats ---------------------------------------------------------------------------------------


def _rounded(p: Closed, rows: Indices) -> tuple[Array, Array, Array]:
    """The rows as they should be and as they are, and by how much of the allowed rounding they differ. Collective."""
    comm, c = p.c.mesh.comm, p.c
    a, b, before = p.parts(np.dtype(np.complex128 if p.summed.kind == "c" else np.float64))
    alpha, beta = complex(p.alpha), complex(p.beta)
    r = rounding(p.summed, p.a.shape[1], alpha, 2 * c.mesh.shape.size)
    store = Part(c, _wide(c.dtype))
    exact, size = again(Product(comm, a, b, store, before, alpha, beta, r), rows)
    bias = p.bias(rows)
    exact = exact + bias
    size = size + np.abs(bias)
    lost = r.gamma * size + 1e-12 * size + r.tiny
    expected, lost = _activated(p.epilogue.activation, exact, lost, r)
    actual = summed(comm, store.some_rows(rows))[0]
    ratio = _ratio(expected, actual, lost, c.dtype)
    # where sums may have overflown on the way, anything goes
    ratio[size / min(1.0, abs(alpha) or 1.0) >= 0.4 * r.acc_largest] = 0
    if p.summed.kind == "c" or not (np.isfinite(alpha) and np.isfinite(beta)):
        # arithmetic with infinities differs between libraries: there only "not finite" is compared
        ratio[~np.isfinite(exact) & ~np.isfinite(actual)] = 0
    return expected, actual, ratio


def _activated(activation: str | None, x: Array, lost: Array, r: Rounding) -> tuple[Array, Array]:
    """The activation of `x`, which may be off by `lost`, and how far it may be off itself."""
    if activation == "relu":
        return np.maximum(x, 0), lost
    if activation == "gelu":
        wrong = GELU_SLOPE * lost + GELU_UNITS * 2 * r.acc * np.where(np.isfinite(x), np.abs(x), 0)
        return np.where(x == -np.inf, 0, x / 2 * _erfc(x / -math.sqrt(2))), wrong
    return x, lost


def _erfc(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The complementary error function, by the C library: kernels have a formula of their own."""
    return np.fromiter(map(math.erfc, x.flat), np.float64, x.size).reshape(x.shape)


def _ratio(expected: Array, actual: Array, lost: Array, dtype: np.dtype[Any]) -> Array:
    """The error over what is allowed once the values are rounded into `dtype`; infinity where a pattern differs."""
    r = rounding(dtype, 0, 1, 0)
    magnitude = np.abs(expected)
    allowed = lost + 2 * r.final * magnitude + r.tiny
    ratio: Array = np.abs(actual - expected) / allowed
    same = (np.isnan(expected) & np.isnan(actual)) | (expected == actual)
    may_overflow = magnitude * (1 + 4 * r.final) + lost >= r.largest
    overflown = ~np.isfinite(actual) if dtype.kind == "c" else actual == np.copysign(np.inf, expected)
    ratio[same | (may_overflow & overflown)] = 0
    ratio[np.isnan(ratio)] = np.inf
    return ratio

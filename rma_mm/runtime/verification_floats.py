"""Freivalds' check for floats: C·x against alpha·A·(B·x) + beta·C0·x, within the rounding that the product may make.

x holds random signs. The columns of C are cut into segments, each with vectors of its own, since the rounding errors
of a whole row would hide a wrong element among them. With |E| ≤ γ·|A||B| element by element, a row of C·x is off by

    at most γ·|A||B||x|                      for certain, and
    at most t·γ·‖A_i‖·‖B‖_F                  but for a chance of 2·exp(−t²/2), signs being random (Hoeffding, 1963);

the smaller holds. Rows that NaN or infinities touch are left to `verification_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.dtypes import BFLOAT16, accumulator
from rma_mm.runtime.verification_parts import Array, Part, summed

SEGMENT = 32
"""Columns of the narrowest segment."""
MOST_SEGMENTS = 16
VECTORS = 64
"""Columns of x in all, at the most; each segment has at least 4 and at most 20."""
MEMORY = 1 << 22
"""Elements of the largest table of vectors."""
SURE = 9.0
"""t above: a chance of 1e-17 a row."""


@dataclass(frozen=True)
class Rounding:
    """How far rounding may take a product of inner length `terms` from the exact one."""

    terms: int
    """Roundings on the way from an element of A to C, per product."""
    acc: float
    """Unit roundoff of the type in which C is summed."""
    final: float
    """Unit roundoff of C's type."""
    largest: float
    """Largest finite number of C's type."""
    acc_largest: float
    """Largest finite number of the type in which C is summed."""
    tiny: float
    """What underflow may lose in one element of C."""

    @property
    def gamma(self) -> float:
        """γ of Higham's error analysis."""
        lost = self.terms * self.acc
        return lost / (1 - min(lost, 0.9))


def rounding(dtype: np.dtype[Any], inner: int, alpha: complex, summands: int) -> Rounding:
    """The rounding of a product of `inner` terms into `dtype`, in any order of summation."""
    acc: Any = np.finfo(accumulator(dtype))
    terms = inner + summands + 8  # casts of both operands and alpha, beta·C0, and some room
    if dtype.kind == "c":
        terms = 2 * (2 * inner + summands + 8)  # √2·γ_2K, rounded up
    unit, tiny, largest = _limits(dtype)
    underflow = (inner + 2) * float(acc.smallest_normal) * max(1.0, abs(alpha)) + tiny * unit
    return Rounding(terms, float(acc.eps) / 2, unit, largest, float(acc.max), underflow)


def _limits(dtype: np.dtype[Any]) -> tuple[float, float, float]:
    """Unit roundoff, smallest normal and largest number of a float type."""
    library: Any = np
    if dtype == BFLOAT16:
        import ml_dtypes as library
    info = library.finfo(dtype)
    return float(info.eps) / 2, float(info.smallest_normal), float(info.max)


@dataclass
class Product:
    """The parts of one product and its scalars."""

    comm: Any
    a: Part
    b: Part
    c: Part
    before: Part | None
    """C0, where beta ≠ 0."""
    alpha: complex
    """0 means that A and B were not read."""
    beta: complex
    rounding: Rounding


@dataclass
class Touched:
    """Where NaN and infinities are."""

    rows: NDArray[np.bool_]
    """(m,): rows of A or C0 that hold one."""
    cols: NDArray[np.bool_]
    """(n,): columns of B that hold one."""
    overflown: NDArray[np.bool_]
    """(m,): other rows in which C alone does."""
    impossible: int
    """Elements of C that are not finite although nothing in their row and column is large enough for that."""
    norms: tuple[Array, Array]
    """(m,), (n,): Euclidean norms of the rows of A and the columns of B."""


def survey(p: Product) -> Touched:
    """Look for NaN and infinities, and measure the rows of A and columns of B. Collective."""
    m, n = p.c.shape
    bad_rows, bad_cols, rows, cols, old = (np.zeros(size) for size in (m, n, m, n, m))
    for part, bad, squares, axis in ((p.a, bad_rows, rows, 1), (p.b, bad_cols, cols, 0), (p.before, bad_rows, old, 1)):
        if part is None or (part is not p.before and p.alpha == 0):
            continue
        for at, block in part.blocks():
            finite = np.isfinite(block)
            if not finite.all():
                part.zero_nonfinite = True
                block[~finite] = 0
            index = at if axis else part.cols
            bad[index] += (~finite).sum(axis=axis)
            squares[index] += (np.abs(block) ** 2).sum(axis=axis)
    bad_rows, bad_cols, rows, cols, old = summed(p.comm, bad_rows, bad_cols, rows, cols, old)
    touched = Touched(bad_rows > 0, bad_cols > 0, np.zeros(m, bool), 0, (np.sqrt(rows), np.sqrt(cols)))
    _look_at_result(p, touched, np.sqrt(old))
    return touched


def _look_at_result(p: Product, touched: Touched, old: Array) -> None:
    """Find the elements of C that are not finite where no operand explains it. Collective."""
    counts, impossible = np.zeros(len(touched.rows)), np.zeros(1)
    left, right = touched.norms
    for at, block in p.c.blocks():
        odd = ~np.isfinite(block)
        if not odd.any():
            continue
        p.c.zero_nonfinite = True
        odd &= ~touched.rows[at, None] & ~touched.cols[None, p.c.cols]
        counts[at] += odd.sum(axis=1)
        # Cauchy-Schwarz: no element is larger, and no partial sum of it by more than rounding
        reach = max(1.0, abs(p.alpha)) * left[at, None] * right[None, p.c.cols] + (abs(p.beta) * old[at])[:, None]
        small = reach < 0.5 * min(p.rounding.largest, p.rounding.acc_largest)
        if not (p.a.is_partial or p.b.is_partial):
            impossible += (odd & small).sum()
    counts, impossible = summed(p.comm, counts, impossible)
    touched.overflown = counts > 0
    touched.impossible = int(impossible[0])


@dataclass
class Vectors:
    """Random signs, cut into segments of columns of C."""

    edges: NDArray[np.int64]
    """Where segments begin, and n."""
    signs: Array
    """(n, v)."""

    def pieces(self, cols: NDArray[np.int64]) -> list[tuple[int, slice]]:
        """(segment, positions of `cols` in it), the empty ones left out; `cols` ascend."""
        cuts = np.searchsorted(cols, self.edges)
        return [(s, slice(lo, hi)) for s, (lo, hi) in enumerate(pairwise(cuts)) if lo < hi]


def vectors(n: int, longest: int, skip: NDArray[np.bool_], seed: int) -> Vectors:
    """Signs for n columns, 0 where `skip`; `longest` bounds the length of what they are multiplied with."""
    most = max(2, MEMORY // max(1, longest))
    segments = max(1, min(MOST_SEGMENTS, -(-n // SEGMENT), most // 2))
    count = max(2, min(20, VECTORS // segments, most // segments))
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (n, count))
    signs[skip] = 0
    return Vectors(np.arange(segments + 1) * n // segments, signs)


def residual(p: Product, touched: Touched, seed: int) -> tuple[float, str]:
    """The largest error of a segment of a row over its bound, and where it is. Collective."""
    m, n = p.c.shape
    k = p.a.shape[1]
    x = vectors(n, m + k, touched.cols, seed)
    segments, count = len(x.edges) - 1, x.signs.shape[1]
    z, reach = np.zeros((k, segments, count), p.c.working), np.zeros((k, segments))
    if p.alpha != 0:
        _add_times(p.b, x, 1, z, reach, None)
        z, reach = summed(p.comm, z, reach)
    error, size = np.zeros((m, segments, count), p.c.working), np.zeros((m, segments))
    old_squares, results, squares = np.zeros((m, segments)), np.zeros((m, segments)), np.zeros((m, segments))
    _add_times(p.c, x, 1, error, results, squares)
    if p.before is not None:
        _add_times(p.before, x, -p.beta, error, size, old_squares)
    if p.alpha != 0:
        flat = z.reshape(k, segments * count)
        for at, block in p.a.blocks():
            error[at] -= (_scalar(p.alpha, block) * (block @ flat[p.a.cols])).reshape(len(at), segments, count)
            size[at] += abs(p.alpha) * (np.abs(block) @ reach[p.a.cols])
    error, size, old_squares, results, squares = summed(p.comm, error, size, old_squares, results, squares)
    bound = _bound(p, touched, x, size, old_squares, results, squares)
    return _worst(np.abs(error).max(axis=2, initial=0), bound, touched, x)


def _add_times(part: Part, x: Vectors, factor: complex, out: Array, sizes: Array, squares: Array | None) -> None:
    """Over each segment: out += factor·part·x, sizes += |factor|·|part||x|, squares += |factor·part|²."""
    for at, block in part.blocks():
        magnitude = np.abs(block) * abs(factor)
        for segment, piece in x.pieces(part.cols):
            signs = x.signs[part.cols[piece]]
            out[at, segment] += _scalar(factor, block) * (block[:, piece] @ signs)
            used = magnitude[:, piece] @ np.abs(signs[:, 0])
            sizes[at, segment] += used
            if squares is not None:
                squares[at, segment] += (magnitude[:, piece] ** 2) @ np.abs(signs[:, 0])


def _scalar(value: complex, block: Array) -> complex | float:
    """`value`, real for a real block."""
    return value if block.dtype.kind == "c" else value.real


def _bound(
    p: Product, touched: Touched, x: Vectors, size: Array, old_squares: Array, results: Array, squares: Array
) -> Array:
    """(m, segments): how far the checked sums may be off in a correct product."""
    left, right = touched.norms
    widths = np.diff(x.edges)
    whole = np.add.reduceat(np.append(np.where(touched.cols, 0, right) ** 2, 0), x.edges[:-1]) * (widths > 0)
    likely = abs(p.alpha) * left[:, None] * np.sqrt(whole) + np.sqrt(old_squares)
    if p.a.is_partial or p.b.is_partial:
        likely = np.full_like(likely, np.inf)  # the norms above are those of summands
    product = p.rounding.gamma * np.minimum(size, SURE * likely)
    stored = p.rounding.final * np.minimum(results, SURE * np.sqrt(squares))
    unit = float(np.finfo(np.float64).eps) * (2 if p.c.working.kind == "c" else 1)
    checking = unit * (p.a.shape[1] + widths.max(initial=0) + p.comm.size + 8) * (size + results)
    bound: Array = product + stored + checking + p.rounding.tiny * np.maximum(widths, 1)
    return bound


def _worst(error: Array, bound: Array, touched: Touched, x: Vectors) -> tuple[float, str]:
    """The largest error / bound among the rows that can be judged, and its place."""
    with np.errstate(all="ignore"):
        ratio = np.where(np.isfinite(error), error / bound, np.inf)
    # where the bound itself overflows float64, nothing can be said
    ratio[~np.isfinite(bound)] = 0
    ratio[touched.rows | touched.overflown] = 0
    if not ratio.size:
        return 0.0, ""
    row, segment = np.unravel_index(int(ratio.argmax()), ratio.shape)
    worst = float(ratio[row, segment])
    where = f"row {row}, columns {x.edges[segment]} to {x.edges[segment + 1] - 1}"
    return worst, f"{where}: off by {worst:.3g} times what rounding allows"

"""Which rows of a product of floats look wrong: C·x against alpha·A·(B·x) + beta·C0·x, after Freivalds.

Each column of x holds random signs for `WIDTH` neighbouring columns of C, 0 elsewhere: the rounding errors of a whole
row would hide one wrong element, those of `WIDTH` elements hide it up to about 9·√`WIDTH` times their size. Some more
vectors hold signs for all columns: what cancels among neighbours (two columns exchanged, say) does not cancel in these.

Nothing is judged here: `verification_rows` computes the most suspicious rows again and holds each of their elements
against what rounding does. Rows and columns are scaled by powers of two, so that no column drowns in the rounding
errors of its neighbours, and no square overflows or underflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.dtypes import BFLOAT16, accumulator
from rma_mm.runtime.verification_parts import Array, Part, summed

WIDTH = 16
"""Columns of C that a vector looks at together: the check costs about 1/`WIDTH` of the product, in float64."""
DENSE = 20
"""Vectors that look at all columns."""
SEGMENTS = 16
"""Parts of the columns whose squares are summed apart, to tell how large rounding errors are there."""
MEMORY = 1 << 22
"""Elements of the largest table of vectors; the columns are gone through in as many passes as that takes."""
BLOCK_TERMS = 512
"""Terms that a kernel sums in one go, at the most: BLAS libraries take 192 to 512."""
PANEL = 128
"""Terms after which C is added to, at the least, where k is cut among steps."""
UNBLOCKED = 1 << 20
"""m·n·k of a product that kernels do not cut along k."""


@dataclass(frozen=True)
class Rounding:
    """What rounding does to a product, summed in one type and stored in another."""

    terms: int
    """k, twice that for complex types."""
    depth: int
    """Terms that are summed one after the other, at the most."""
    panels: int
    """How often such a sum is added to C."""
    acc: float
    """Unit roundoff of the type in which C is summed."""
    final: float
    """Unit roundoff of the type in which C is stored; 0 where that is the same type."""
    largest: float
    """Largest finite number of C's type."""
    acc_largest: float
    """Largest finite number of the type in which C is summed."""
    tiny: float
    """What underflow may lose in one element of C."""

    def deviation(self, squares: Array, reach: Array, start: Array | float = 0.0) -> Array:
        """The standard deviation of the rounding error of sums, element by element.

        squares: Σ|a·b|² of its terms; reach: the largest partial sum seen; start: |beta·C0|, onto which they are added.

        An addition makes an error of variance u²/6 of its result's square, on the average over the mantissas. In a sum
        of `depth` terms of either sign the partial sums' squares grow like those of the terms, in one of equal signs
        like (t/depth)²; what is added up of such sums is as large as C may be.
        """
        within = self.depth * squares / 2
        among = (self.depth * self.depth / max(1, self.terms) + self.panels) * reach**2 / 3
        onto = (self.panels + (self.depth if self.depth > BLOCK_TERMS else 0)) * np.square(start)
        result: Array = self.acc * np.sqrt((within + among + onto) / 6)
        return result


def rounding(product: np.dtype[Any], stored: np.dtype[Any], sizes: tuple[int, int, int], ranks: int) -> Rounding:
    """The rounding of a product of type `product` and (m, n, k), stored as `stored`."""
    m, n, k = sizes
    summed_in = accumulator(product)
    acc: Any = np.finfo(summed_in)
    terms = 2 * k if product.kind == "c" else k
    unblocked = terms if min(m, n) < 2 * ranks else UNBLOCKED * ranks // (m * n)
    depth = max(1, min(terms, max(BLOCK_TERMS, unblocked)))
    unit, tiny, largest = limits(stored)
    underflow = (k + 2) * float(acc.smallest_normal) + tiny * unit
    final = unit if unit > float(acc.eps) / 2 else 0.0
    panels = min(terms, terms // PANEL + ranks) + 2
    return Rounding(terms, depth, panels, float(acc.eps) / 2, final, largest, float(acc.max), underflow)


def limits(dtype: np.dtype[Any]) -> tuple[float, float, float]:
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
    bias: Array
    """What is added to C, of a shape that broadcasts."""
    activation: str | None = None

    @property
    def parts(self) -> list[Part]:
        """Those that are read."""
        read = [self.a, self.b] if self.alpha != 0 else []
        return [*read, self.c, *([] if self.before is None else [self.before])]


@dataclass
class Touched:
    """What a first look at the operands finds."""

    rows: NDArray[np.bool_]
    """(m,): rows of A or C0 that hold NaN or an infinity."""
    cols: NDArray[np.bool_]
    """(n,): columns of B that hold one."""
    overflown: NDArray[np.bool_]
    """(m,): other rows in which C alone does."""
    impossible: int
    """Elements of C that are not finite although nothing in their row and column is large enough for that."""
    scales: tuple[Array, Array]
    """(m,), (n,): powers of two; no sum of terms in row i, column j is larger than their product."""


def survey(p: Product) -> Touched:
    """Look for NaN and infinities, and measure the rows of A and columns of B. Collective."""
    m, n = p.c.shape
    bad_rows, bad_cols, rows, cols, old = (np.zeros(size) for size in (m, n, m, n, m))
    for part in p.parts:
        if part is p.c:
            continue
        for at, block in part.blocks():
            bad = ~np.isfinite(block)
            if bad.any():
                part.zero_nonfinite = True
                block[bad] = 0
                if part is p.b:
                    bad_cols[part.cols] += bad.sum(axis=0)
                else:
                    bad_rows[at] += bad.sum(axis=1)
            size = np.abs(block)
            if part is p.b:
                cols[part.cols] = np.maximum(cols[part.cols], size.max(axis=0, initial=0))
            elif part is p.a:
                rows[at] += size.sum(axis=1)
            else:
                old[at] += size.max(axis=1, initial=0)
    bad_rows, bad_cols, rows, cols, old = summed(p.comm, bad_rows, bad_cols, rows, cols, old)
    touched = Touched(bad_rows > 0, bad_cols > 0, np.zeros(m, bool), 0, (_power(rows), _power(cols)))
    _look_at_result(p, touched, old)
    return touched


def _power(size: Array) -> Array:
    """A power of two no smaller; 1 for 0 and for what is too large."""
    exponents = np.clip(np.frexp(size)[1], -1000, 1000)
    made: Array = np.where((size > 0) & np.isfinite(size), np.ldexp(1.0, exponents), 1.0)
    return made


def _look_at_result(p: Product, touched: Touched, old: Array) -> None:
    """Find the elements of C that are not finite where no operand explains it. Collective."""
    counts, impossible = np.zeros(len(touched.rows)), np.zeros(1)
    down, across = touched.scales
    bias = np.broadcast_to(p.bias, p.c.shape)
    for at, block in p.c.blocks():
        odd = ~np.isfinite(block)
        if not odd.any():
            continue
        p.c.zero_nonfinite = True
        odd &= ~touched.rows[at, None] & ~touched.cols[None, p.c.cols]
        counts[at] += odd.sum(axis=1)
        reach = max(1.0, abs(p.alpha)) * down[at, None] * across[None, p.c.cols] + (abs(p.beta) * old[at])[:, None]
        reach = reach + np.abs(bias[np.ix_(at, p.c.cols)])
        small = reach < 0.5 * min(p.rounding.largest, p.rounding.acc_largest)
        if not (p.a.is_partial or p.b.is_partial):
            impossible += (odd & small).sum()
    counts, impossible = summed(p.comm, counts, impossible)
    touched.overflown = counts > 0
    touched.impossible = int(impossible[0])


def suspicion(p: Product, touched: Touched, seed: int) -> Array:
    """(m,): how far each row of C·x is from what it should be, in standard deviations as far as they are known.

    Powers of the scales must be in the parts. Rows that cannot be judged get 0. Collective.
    """
    m, n = p.c.shape
    found, everywhere = np.zeros(m), Sketch.empty(p, DENSE)
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], (n, DENSE + 1))
    signs[touched.cols] = 0
    most = max(1, MEMORY // max(1, m + p.a.shape[1])) * WIDTH
    for left in range(0, n, most):
        found = np.maximum(found, _pass(p, signs, (left, min(n, left + most)), everywhere))
    found = np.maximum(found, everywhere.scores(p, np.zeros(DENSE, np.int64)))
    found[touched.rows | touched.overflown] = 0
    return found


@dataclass
class Sketch:
    """C·x less what it should be, for some vectors x, and how large rounding errors make it."""

    error: Array
    """(m, vectors)."""
    squares: Array
    """(m, segments): Σ|a·b|² over the columns of each."""
    results: Array
    """(m, vectors): Σ|C|² over the columns of each."""

    @staticmethod
    def empty(p: Product, vectors: int, segments: int = 1) -> Sketch:
        """Zeros."""
        m = p.c.shape[0]
        return Sketch(np.zeros((m, vectors), p.c.working), np.zeros((m, segments)), np.zeros((m, vectors)))

    def scores(self, p: Product, segment_of: NDArray[np.int64]) -> Array:
        """(m,): the largest error of a row in standard deviations."""
        vectors_in = np.bincount(segment_of, minlength=self.squares.shape[1]) if self.squares.shape[1] > 1 else 1
        squares = abs(p.alpha) ** 2 * (self.squares / vectors_in)[:, segment_of]
        noise = p.rounding.deviation(squares, np.sqrt(squares + self.results)) ** 2
        noise += p.rounding.final**2 / 6 * self.results
        size = np.abs(self.error)
        with np.errstate(all="ignore"):
            ratio = np.where(size > 0, size / np.sqrt(noise), 0.0)
        ratio[~np.isfinite(ratio)] = np.inf
        worst: Array = ratio.max(axis=1, initial=0)
        return worst


def _pass(p: Product, signs: Array, span: tuple[int, int], everywhere: Sketch) -> Array:
    """(m,): scores by the narrow vectors of `span`; what it gives the dense ones goes to `everywhere`. Collective."""
    first, last = span
    vectors = -(-(last - first) // WIDTH)
    segment_of = np.arange(vectors) * SEGMENTS // max(vectors, SEGMENTS)
    segments = int(segment_of[-1]) + 1 if vectors else 1
    made = Sketch.empty(p, vectors + DENSE, segments)
    _add_times(p.c, signs, span, 1, made.error, made.results, None)
    if p.before is not None:
        _add_times(p.before, signs, span, -p.beta, made.error, None, None)
    if p.alpha != 0:
        z, weights = np.zeros((p.b.shape[0], vectors + DENSE), p.c.working), np.zeros((p.b.shape[0], segments))
        _add_times(p.b, signs, span, 1, z, None, (weights, segment_of))
        z, weights = summed(p.comm, z, weights)
        z, weights = scalar(p.alpha, made.error) * z[p.a.cols], weights[p.a.cols]
        for at, block in p.a.blocks():
            made.error[at] -= block @ z
            made.squares[at] += squared(block) @ weights
    made = Sketch(*summed(p.comm, made.error, made.squares, made.results))
    if p.bias.any():
        made.error -= _biased(p, signs, span)
    everywhere.error += made.error[:, vectors:]
    everywhere.squares += made.squares.sum(axis=1, keepdims=True)
    everywhere.results += made.results[:, :vectors].sum(axis=1, keepdims=True)
    narrow = Sketch(made.error[:, :vectors], made.squares, made.results[:, :vectors])
    return narrow.scores(p, segment_of)


def _add_times(
    part: Part,
    signs: Array,
    span: tuple[int, int],
    factor: complex,
    out: Array,
    results: Array | None,
    weights: tuple[Array, NDArray[np.int64]] | None,
) -> None:
    """Add factor·part·x for the vectors of `span`, to `results` |part|² of each, to `weights` the same of segments."""
    lo, hi = np.searchsorted(part.cols, span)
    cols = part.cols[lo:hi]
    if not len(cols):
        return
    vectors = out.shape[1] - DENSE
    which, starts = np.unique((cols - span[0]) // WIDTH, return_index=True)
    here = signs[cols]
    for at, block in part.blocks():
        piece = block[:, lo:hi]
        times = scalar(factor, out)
        out[np.ix_(at, which)] += times * np.add.reduceat(piece * here[:, DENSE], starts, axis=1)
        out[at, vectors:] += times * (piece @ here[:, :DENSE])
        if results is None and weights is None:
            continue
        squares = np.add.reduceat(squared(piece), starts, axis=1)
        if results is not None:
            results[np.ix_(at, which)] += squares
        if weights is not None:
            segments, first = np.unique(weights[1][which], return_index=True)
            weights[0][np.ix_(at, segments)] += np.add.reduceat(squares, first, axis=1)


def _biased(p: Product, signs: Array, span: tuple[int, int]) -> Array:
    """What a bias adds to the products with the vectors of `span`."""
    down, across = p.c.down, p.c.across
    assert down is not None and across is not None
    wide = np.zeros((p.c.shape[0], -(-(span[1] - span[0]) // WIDTH) + DENSE), p.c.working)
    cols = np.arange(*span)
    here = signs[cols]
    starts = np.arange(0, len(cols), WIDTH)
    if p.bias.shape[1] == 1:  # one value a row, or none
        row = across[cols, None] * here
        times = p.bias * down[:, None]
    else:
        row = (p.bias[0, cols] * across[cols])[:, None] * here
        times = down[:, None]
    wide += times * np.concatenate([np.add.reduceat(row[:, DENSE], starts), row[:, :DENSE].sum(axis=0)])
    return wide


def squared(x: Array) -> Array:
    """|x|², element by element."""
    made: Array = x.real * x.real
    if x.dtype.kind == "c":
        made += x.imag * x.imag
    return made


def scalar(value: complex, like: Array) -> complex | float:
    """`value`, real for a real array."""
    return value if like.dtype.kind == "c" else value.real

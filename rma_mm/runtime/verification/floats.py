"""A product of floats as its check sees it: what rounding does to it, and a first look at its operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16, accumulator
from rma_mm.runtime.verification.parts import Array, Part, allreduce_sums

SHORT = 512  # terms of a sum whose rounding errors are not much larger than those of a check in the same type
LARGE = 240  # exponents of doubles whose squares are no trouble
BLOCK_TERMS = 512  # terms that a kernel sums in one go, at the most: BLAS libraries take 192 to 512
PANEL = 128  # terms after which C is added to, at the least, where k is cut among steps
UNBLOCKED = 1 << 20  # m·n·k of a product that kernels do not cut along k


@dataclass(frozen=True)
class Rounding:
    """Rounding errors of a product that is summed in one type and stored in another."""

    terms: int  # k, twice that for complex types
    depth: int  # terms that are summed one after the other, at the most
    panels: int  # how often such a sum is added to C
    acc: float  # unit roundoff of the type in which C is summed
    final: float  # unit roundoff of the type in which C is stored; 0 if that is the same type
    largest: float  # largest finite number of C's type
    acc_largest: float  # largest finite number of the type in which C is summed
    tiny: float  # what underflow may lose in one element of C
    fast: int = 0  # how often Strassen's algorithm may have cut the product
    norms: tuple[float, float] = (0.0, 0.0)
    """Largest Σ|a·b|² and partial sum of any element of such a product, whose errors spread to other elements."""

    def deviation(self, squares: Array, reach: Array, start: Array | float = 0.0) -> Array:
        """Return the standard deviation of the rounding error of sums, element by element.

        squares: Σ|a·b|² of its terms; reach: the largest partial sum seen; start: |beta·C0|, onto which they are added.

        An addition makes an error of variance u²/6 of its result's square, on the average over the mantissas. In a sum
        of `depth` terms of either sign the partial sums' squares grow like those of the terms, in one of equal signs
        like (t/depth)²; what is added up of such sums is as large as C may be. Each time that Strassen's algorithm cuts
        a product, an element of C becomes the sum of up to 12 terms from products of halves, instead of 2.
        """
        within = self.depth * squares / 2
        among = (self.depth * self.depth / max(1, self.terms) + self.panels) * reach**2 / 3
        onto = (self.panels + (self.depth if self.depth > BLOCK_TERMS else 0)) * np.square(start)
        result: Array = self.acc * np.sqrt(6**self.fast * (within + among + onto) / 6)
        return result


def rounding(
    product: np.dtype[Any], stored: np.dtype[Any], sizes: tuple[int, int, int], ranks: int, fast: int = 0
) -> Rounding:
    """Return the rounding of a product of type `product` and (m, n, k), stored as `stored`."""
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
    return Rounding(terms, depth, panels, float(acc.eps) / 2, final, largest, float(acc.max), underflow, fast)


def limits(dtype: np.dtype[Any]) -> tuple[float, float, float]:
    """Unit roundoff, smallest normal and largest number of a float type."""
    library: Any = np
    if dtype == BFLOAT16:
        import ml_dtypes as library
    info = library.finfo(dtype)
    return float(info.eps) / 2, float(info.smallest_normal), float(info.max)


@dataclass
class FloatProduct:
    """The parts of one product and its scalars."""

    comm: Any
    a: Part
    b: Part
    c: Part
    before: Part | None  # c0, where beta ≠ 0
    alpha: complex  # 0 means that A and B were not read
    beta: complex
    rounding: Rounding
    bias: Array  # the bias, in a shape that broadcasts to C
    narrow: np.dtype[Any]  # the type in which suspicion is measured
    activation: str | None = None

    @property
    def parts(self) -> list[Part]:
        read = [self.a, self.b] if self.alpha != 0 else []
        return [*read, self.c, *([] if self.before is None else [self.before])]


@dataclass
class ScannedValues:
    """Results of a first scan of the operands."""

    rows: NDArray[np.bool_]  # (m,): rows of A or C0 that hold NaN or an infinity
    cols: NDArray[np.bool_]  # (n,): columns of B that hold one
    overflown: NDArray[np.bool_]  # (m,): other rows in which C alone does
    impossible: int
    """Elements of C that are not finite although nothing in their row and column is large enough for that."""
    scales: tuple[Array, Array]
    """(m,), (n,): powers of two; no sum of terms in row i, column j is larger than their product."""
    norms: Array  # (n,): those of B's columns, within their scales; 1 for columns of zeros


def scan_values(p: FloatProduct) -> ScannedValues:
    """Look for NaN and infinities, and measure the rows of A and columns of B. Collective."""
    m, n = p.c.shape
    extents = (m, n, m, n, m, n, m if p.rounding.fast else 0)
    bad_rows, bad_cols, rows, cols, old, squares, heights = (np.zeros(size) for size in extents)
    for part in p.parts:
        if part is p.c:
            continue
        for at, block in part.as_type(p.narrow).blocks():
            sizes, bad = _sizes(block, p, part)
            if bad is not None:
                part.nonfinite = True
                if part is p.b:
                    bad_cols[part.cols] += bad.sum(axis=0)
                else:
                    bad_rows[at] += bad.sum(axis=1)
            if part is p.b:
                cols[part.cols] = np.maximum(cols[part.cols], sizes)
                squares[part.cols] += squared(block).sum(axis=0)
            elif part is p.a:
                rows[at] += sizes
                if p.rounding.fast:
                    heights[at] += squared(block).sum(axis=1)
            else:
                old[at] += sizes
    bad_rows, bad_cols, rows, cols, old, squares, heights = allreduce_sums(
        p.comm, bad_rows, bad_cols, rows, cols, old, squares, heights
    )
    if p.rounding.fast:
        high, wide, most = (float(np.max(x[np.isfinite(x)], initial=0)) for x in (heights, squares, cols))
        p.rounding = replace(p.rounding, norms=(most**2 * high, (high * wide) ** 0.5))
    bits = int(np.finfo(p.narrow).maxexp) - 8
    scales = _power(rows, bits), _power(cols, bits)
    norms = np.clip(np.nan_to_num(np.sqrt(squares)), scales[1] / 4, scales[1] * max(1, p.b.shape[0]) ** 0.5)
    touched = ScannedValues(bad_rows > 0, bad_cols > 0, np.zeros(m, bool), 0, scales, norms)
    _look_at_result(p, touched, old)
    return touched


def _sizes(block: Array, p: FloatProduct, part: Part) -> tuple[Array, NDArray[np.bool_] | None]:
    """Return sums of |A| by rows, or the largest |B| by columns or |C0| by rows, and whether all are finite."""
    bad = None
    size = np.abs(block)
    for _ in range(2):
        if part is p.a:
            sizes = size.sum(axis=1)
        else:
            sizes = size.max(axis=0 if part is p.b else 1, initial=0)
        if np.isfinite(sizes).all():
            break
        bad = ~np.isfinite(block)
        size = np.where(bad, 0, size.astype(np.float64))
    return sizes, bad if bad is not None and bad.any() else None


def _power(size: Array, most: int) -> Array:
    """Return the next power of two, up to the exponent `most`; 1 for 0 and for larger numbers."""
    exponents = np.clip(np.frexp(size)[1], -most, most)
    made: Array = np.where((size > 0) & np.isfinite(size), np.ldexp(1.0, exponents), 1.0)
    return made


def inverse(scale: Array, most: int) -> Array | None:
    """Return factors for reading numbers; None if all are within 2^±most."""
    exponents = np.frexp(scale)[1]
    return 1 / scale if np.abs(exponents).max(initial=0) > most else None


def _look_at_result(p: FloatProduct, touched: ScannedValues, old: Array) -> None:
    """Find the elements of C that are not finite where no operand explains it. Collective."""
    counts, impossible = np.zeros(len(touched.rows)), np.zeros(1)
    down, across = touched.scales
    bias = np.broadcast_to(p.bias, p.c.shape)
    for at, block in p.c.as_type(p.narrow).blocks():
        odd = np.isfinite(block)
        if odd.all():
            continue
        odd = ~odd
        p.c.nonfinite = True
        odd &= ~touched.rows[at, None] & ~touched.cols[None, p.c.cols]
        counts[at] += odd.sum(axis=1)
        reach = max(1.0, abs(p.alpha)) * down[at, None] * across[None, p.c.cols] + (abs(p.beta) * old[at])[:, None]
        reach = reach + np.abs(bias[np.ix_(at, p.c.cols)])
        small = reach < 0.5 * min(p.rounding.largest, p.rounding.acc_largest)
        if not (p.a.is_partial or p.b.is_partial):
            impossible += (odd & small).sum()
    counts, impossible = allreduce_sums(p.comm, counts, impossible)
    touched.overflown = counts > 0
    touched.impossible = int(impossible[0])


def narrow_type(product: np.dtype[Any], stored: np.dtype[Any], k: int) -> np.dtype[Any]:
    """The type in which suspicion is measured: that of C's sums; a wider one where sums are short and round little."""
    summed_in = np.result_type(accumulator(product), accumulator(stored))
    return np.result_type(summed_in, np.float64) if k < SHORT else summed_in


def squared(x: Array) -> Array:
    made: Array = x.real * x.real
    if x.dtype.kind == "c":
        made += x.imag * x.imag
    return made


def scalar(value: complex, like: Array) -> complex | float:
    return value if like.dtype.kind == "c" else value.real

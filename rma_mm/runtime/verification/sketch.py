"""Find rows of a product of floats that look wrong: C·x against alpha·A·(B·x) + beta·C0·x, after Freivalds.

Each column of x holds random signs for `WIDTH` neighbouring columns of C, 0 elsewhere: the rounding errors of a whole
row would hide one wrong element, those of `WIDTH` elements hide it up to about 11·√`WIDTH` times their size. Some more
vectors hold signs for all columns: what cancels among neighbours (two columns exchanged, say) does not cancel in these.

Nothing is judged here: `rows` computes the most suspicious rows again and holds each of their elements
against what rounding does. All is done in the type in which C was summed, with panels of k added up in double: rounding
makes errors here as well, smaller than those in C. Columns are scaled by powers of two, so that none drowns in the
rounding errors of its neighbours; rows only where squares would overflow or underflow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.runtime.verification.floats import BLOCK_TERMS, FloatProduct, ScannedValues, inverse, scalar, squared
from rma_mm.runtime.verification.parts import Array, Part, allreduce_sums, run

WIDTH = 16
"""Columns of C that a vector looks at together: the check costs a little more than 1/`WIDTH` of the product."""
FOUND = 100
"""Standard deviations of its neighbours' rounding by which one element may be off and pass; beyond, one in 10^6 does.

As `bench.verification_odds` measures it at 2048³: 49 to 61 in float32, up to 99 in float16. An element whose neighbours
are much larger can be off by more of its own.
"""
DENSE = 16  # vectors that look at all columns
SEGMENTS = 8  # parts of the columns for which is told apart how large rounding errors are, at the most
GROUPS = 32
"""Groups in such a part, at the least: |C|² is taken from their sums with random signs, whose squares vary."""
MEMORY = 1 << 23
"""Elements of the largest table of vectors; the columns are gone through in as many passes as that takes."""
PANEL_TERMS = 256  # terms that are summed in the type of C
ROWS_AT_ONCE = 512  # rows of A that are multiplied together
ROWS_TOGETHER = 128  # rows that are summed together
SAFE = {np.dtype(np.float32): 30, np.dtype(np.float64): 240}  # exponents of rows that are read as they are


@dataclass
class RowSums:
    """A matrix times the vectors of some neighbours, and of all."""

    near: Array  # (rows, groups)
    wide: Array  # (rows, DENSE)

    def add(self, part: Part, x: Array, span: tuple[int, int], factor: complex = 1) -> None:
        """Add `factor` times the columns of `span` times x: (n, DENSE + 1), first those of all columns."""
        part = part.within(*span)
        if not len(part.cols):
            return
        which, starts = np.unique((part.cols - span[0]) // WIDTH, return_index=True)
        here, times = x[part.cols], scalar(factor, self.near)
        wide, near = np.ascontiguousarray(here[:, :DENSE]), here[:, DENSE].copy()
        for at, block in part.blocks(ROWS_TOGETHER):
            self.near[cells(at, which)] += times * grouped(block, near, starts)
            self.wide[run(at)] += times * (block @ wide)


def cells(rows: NDArray[np.int64], cols: NDArray[np.int64]) -> Any:
    found = run(rows), run(cols)
    return found if all(isinstance(x, slice) for x in found) else np.ix_(rows, cols)


def grouped(block: Array, signs: Array, starts: NDArray[np.int64], width: int = WIDTH) -> Array:
    """(rows, groups): sums of the columns, times `signs`, from each of `starts` to the next, `width` or fewer."""
    if (np.diff(starts) != width).any():
        made: Array = np.add.reduceat(block * signs, starts, axis=1)
        return made
    whole = block.shape[1] // width
    end = whole * width
    body = block[:, :end].reshape(len(block), whole, width)
    made = np.einsum("rgw,gw->rg", body, signs[:end].reshape(whole, width))
    return made if whole == len(starts) else np.column_stack([made, block[:, end:] @ signs[end:]])


def suspicion(p: FloatProduct, touched: ScannedValues, seed: int) -> Array:
    """Return (m,): the error of each row of C·x in standard deviations, as far as these are known.

    Rows that cannot be judged get 0. Collective.
    """
    m, n, k = *p.c.shape, p.a.shape[1]
    real = np.empty(0, p.narrow).real.dtype
    signs = np.random.default_rng(seed).integers(0, 2, (n, DENSE + 1), np.int8) * np.int8(2) - np.int8(1)
    x = (signs / touched.norms[:, None]).astype(real)
    x[touched.cols] = 0
    step = max(1, MEMORY // max(1, m + k)) * WIDTH
    look = ColumnSketch(p, x, inverse(touched.scales[0], SAFE[real]), n)
    found = np.zeros(m)
    for left in range(0, n, step):
        found = np.maximum(found, look.at((left, min(n, left + step))))
    found[touched.rows | touched.overflown] = 0
    return found


class ColumnSketch:
    """State of all passes over the columns. All methods are collective. All methods are collective."""

    def __init__(self, p: FloatProduct, x: Array, down: Array | None, n: int) -> None:
        self.p, self.x, self.down, self.n = p, x, down, n
        self.a, self.b, self.c = (part.as_type(p.narrow) for part in (p.a, p.b, p.c))
        self.before = None if p.before is None else p.before.as_type(p.narrow)
        for part in (self.a, self.c, self.before):
            if part is not None:
                part.down = down
        m, k = p.a.shape
        self.wide_z, self.wide_c = np.zeros((k, DENSE), p.narrow), np.zeros((m, DENSE), p.narrow)
        self.squares, self.results = np.zeros((m, 1)), np.zeros((m, 1))

    def at(self, span: tuple[int, int]) -> Array:
        """(m,): the largest error in standard deviations, of these columns' groups; at last of all columns, too."""
        p, is_last = self.p, span[1] == self.n
        m, groups = p.a.shape[0], -(-(span[1] - span[0]) // WIDTH)
        parts = min(SEGMENTS, max(1, groups // GROUPS))
        edges = np.arange(parts) * groups // parts
        made = RowSums(np.zeros((m, groups), p.narrow), self.wide_c)
        made.add(self.c, self.x, span)
        results = mean_squares(made.near, edges)
        if groups < GROUPS and span[0] == 0 and is_last:  # too few: those of all columns are as good
            known = np.concatenate([made.near, made.wide / np.sqrt(groups)], axis=1)
            results = mean_squares(known, edges)
        if self.before is not None:
            made.add(self.before, self.x, span, -p.beta)
        error = np.concatenate([made.near, made.wide] if is_last else [made.near], axis=1).astype(p.c.working)
        squares = np.zeros((m, len(edges)))
        if p.alpha != 0:
            self._subtract(span, error, squares, edges, is_last)
        error, squares, results = allreduce_sums(p.comm, error, squares, results)
        if p.bias.any():
            error -= self._biased(span, is_last)
        counts = np.diff(edges, append=groups)
        self.squares += (squares @ counts)[:, None]
        self.results += (results @ counts)[:, None]
        size = np.abs(error)
        found = scores(p, np.maximum.reduceat(size[:, :groups], edges, axis=1), squares, results, WIDTH)
        if is_last:
            worst = size[:, groups:].max(axis=1, keepdims=True)
            found = np.maximum(found, scores(p, worst, self.squares, self.results, self.n))
        return found

    def _subtract(
        self, span: tuple[int, int], error: Array, squares: Array, edges: NDArray[np.int64], is_last: bool
    ) -> None:
        """Take alpha·A·(B·x) off `error`; add its terms' mean squares between `edges` to `squares`."""
        p, groups = self.p, -(-(span[1] - span[0]) // WIDTH)
        made = RowSums(np.zeros((p.b.shape[0], groups), p.narrow), self.wide_z)
        made.add(self.b, self.x, span)
        z = allreduce_sums(p.comm, made.near)[0]
        weights = mean_squares(z, edges).astype(self.x.dtype)[run(self.a.cols)]
        if is_last:
            z = np.concatenate([z, *allreduce_sums(p.comm, made.wide)], axis=1)
        z, alpha = z[run(self.a.cols)], scalar(p.alpha, error)
        for at, block in self.a.blocks(ROWS_AT_ONCE):
            total, terms = np.zeros((len(at), z.shape[1]), error.dtype), np.zeros((len(at), len(edges)))
            for k in range(0, block.shape[1], PANEL_TERMS):
                panel = block[:, k : k + PANEL_TERMS]
                total += panel @ z[k : k + PANEL_TERMS]
                terms += squared(panel) @ weights[k : k + PANEL_TERMS]
            error[run(at)] -= alpha * total
            squares[run(at)] += terms

    def _biased(self, span: tuple[int, int], is_last: bool) -> Array:
        """Return the contribution of a bias to the products with the vectors."""
        bias, x = self.p.bias, self.x
        across = np.broadcast_to(bias[:1] if bias.shape[1] > 1 else 1.0, (1, self.n))  # one value a column, or none
        down = bias if bias.shape[1] == 1 else 1.0
        which = np.arange(*span)
        wide = [across @ x[:, :DENSE]] if is_last else []
        near = grouped(across[:, which], x[which, DENSE], np.arange(0, len(which), WIDTH))
        made: Array = down * np.concatenate([near, *wide], axis=1)
        return made if self.down is None else self.down[:, None] * made


def scores(p: FloatProduct, size: Array, squares: Array, results: Array, width: int) -> Array:
    """(m,): the largest of `size` in standard deviations of sums of `width` columns.

    squares: Σ|a·b|², results: |C|², summed up over the columns.
    """
    noise = p.rounding.deviation(squares, np.sqrt(squares + results)) ** 2 + p.rounding.final**2 / 6 * results
    noise += float(np.finfo(p.narrow).eps) ** 2 / 48 * min(width, BLOCK_TERMS) * (squares + results)
    with np.errstate(all="ignore"):
        ratio = np.where(size > 0, size / np.sqrt(noise), 0.0)
    ratio[~np.isfinite(ratio)] = np.inf
    worst: Array = ratio.max(axis=1, initial=0)
    return worst


def mean_squares(x: Array, edges: NDArray[np.int64]) -> Array:
    """(rows, segments): |x|² on the average over the columns from each of `edges` to the next, in double."""
    spans = zip(edges, [*edges[1:], x.shape[1]], strict=True)
    made = [squared(x[:, first:last]).sum(axis=1, dtype=np.float64) / (last - first) for first, last in spans]
    return np.stack(made, axis=1)

"""Some rows of a product of floats computed again in float64, each element compared with what rounding does.

The rows are the most suspicious ones, some that NaN, infinities or overflow touch, and some drawn at random; all rows
of a product that is small enough. Rounding errors of sums have a standard deviation (`Rounding.deviation`); `SURE` of
them are allowed, and what the last rounding, scalars and underflow may do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.runtime.verification.floats import FloatProduct, ScannedValues, scalar, squared
from rma_mm.runtime.verification.parts import Array, Part, allreduce_sums, run
from rma_mm.runtime.verification.sketch import suspicion

ROWS = 64  # rows computed again (all where there are fewer)
SHARE = 128
"""One of the given number of rows of floats, from `ROWS` / 4 to `ROWS` of them: a small part of the product, in another
type."""
TERMS = 1 << 28
"""Products of elements that may always be formed again: so small a product is computed again as a whole."""
SLOWER = 4  # times that a term takes where no BLAS does it
TABLE = 1 << 22  # elements of the rows that are looked at together
COLUMNS = 512  # columns of B that are looked at together, so that they stay in cache
DEPTH = 128
"""Terms that are summed by BLAS where rows are computed again; such sums are added up with their rounding errors."""
SURE = 8.0
"""Standard deviations that are allowed. Right products of the families of `bench.verification` stay below 6."""
DRIFT = 4.0
"""Tolerance if terms repeat and rounding errors do not cancel: a multiple of the error of such sums made here."""
SUSPECTS = 16  # elements that are summed so, at the most
GELU_SLOPE = 1.13  # the largest slope of GELU, rounded up
GELU_UNITS = 8  # roundings that its formula may make, of its argument

Indices = NDArray[np.int64]


def how_many(m: int, n: int, k: int, slower: int = 1) -> int:
    return min(m, max(ROWS, TERMS // (slower * max(1, n * k))))


def suspicious_rows(m: int, n: int, k: int) -> int:
    return min(m, 3 * max(ROWS // 4, min(ROWS, m // SHARE), TERMS // (4 * n * k)) // 4)


def random_rows(m: int, count: int, seed: int) -> Indices:
    """`count` of m rows, one from each of as many even parts, ascending; the same on every rank."""
    edges = np.arange(count + 1, dtype=np.int64) * m // max(1, count)
    rows: Indices = np.random.default_rng(seed).integers(edges[:-1], edges[1:]) if count else edges[:0]
    return rows


def first_wrong(rows: Indices, width: int, look: Callable[[Indices], tuple[str, float]]) -> tuple[str, float]:
    """Return the first place where one of these rows is wrong ("" if none is), and the largest error seen. Collective.

    look: the same of some rows, so few that tables of `width` columns stay small.
    """
    worst, step = 0.0, max(1, TABLE // max(1, width))
    for i in range(0, len(rows), step):
        where, error = look(rows[i : i + step])
        worst = max(worst, error)
        if where:
            return where, worst
    return "", worst


def differing(names: Sequence[str], actual: Array, exact: Array, wrong: Array) -> tuple[str, float]:
    """Compare rows that have no rounding errors, some elements of which are `wrong`, as `first_wrong` does.

    names: what the rows' elements are called, their column left open.
    """
    if not wrong.any():
        return "", 0.0
    row, col = np.argwhere(wrong)[0]
    return f"{names[row].format(col)} is {actual[row, col]}, computed again it is {exact[row, col]}", math.inf


def chosen_rows(p: FloatProduct, touched: ScannedValues, seed: int) -> Indices:
    """Return the rows to compute again, ascending; the same on every rank. Collective."""
    m, n, k = *p.c.shape, p.a.shape[1]
    count = how_many(m, n, k)
    if count == m:
        return np.arange(m)
    suspects = 0 if p.activation else suspicious_rows(m, n, k)
    picked = set(random_rows(m, -(-suspects // 3) or count, seed).tolist())
    rng = np.random.default_rng(seed)
    for kind in (touched.rows, touched.overflown):
        picked |= set(rng.permutation(np.flatnonzero(kind))[: ROWS // 2].tolist())
    if suspects:
        order = np.argsort(-suspicion(p, touched, seed), kind="stable")
        picked |= set(order[:suspects].tolist())
    chosen: Indices = p.comm.bcast(np.array(sorted(picked), np.int64), 0)
    return chosen


def products(comm: Any, a_rows: Array, b: Part) -> Array:
    """(r, n): rows of A, known everywhere, times B. Collective."""
    out = np.zeros((len(a_rows), b.shape[1]), a_rows.dtype)
    for at, block in b.blocks(DEPTH):
        out[:, b.cols] += a_rows[:, at] @ block
    return allreduce_sums(comm, out)[0]


# -- what rows should be --------------------------------------------------------------------------


@dataclass
class Rows:
    """Rows as they should be before an activation, with their rounding errors, (r, n) each."""

    indices: Indices  # which they are
    exact: Array  # their elements
    sigma: Array  # the standard deviation of the rounding errors of their sums
    certain: Array  # largest contribution of scalars, C0, bias and underflow to the error
    reach: Array  # no partial sum is larger, in whatever order


def recompute_rows(p: FloatProduct, rows: Indices) -> Rows:
    shape = len(rows), p.c.shape[1]
    total, squares, reach = np.zeros(shape, p.a.working), np.zeros(shape), np.zeros(shape)
    if p.alpha != 0:
        total, squares, reach = _sums(p, allreduce_sums(p.comm, p.a.some_rows(rows))[0])
    scale = _undone(p.a.down, rows)[:, None] * _undone(p.b.across, np.arange(shape[1]))
    made = scalar(p.alpha, total) * total * scale
    start = np.zeros(shape)
    if p.before is not None:
        old = allreduce_sums(p.comm, p.before.some_rows(rows))[0]
        made = made + scalar(p.beta, old) * old
        start = np.abs(np.where(np.isfinite(old), old, 0)) * abs(p.beta)
    r = p.rounding
    squares, reach = np.maximum(squares, r.norms[0] / scale**2), np.maximum(reach, r.norms[1] / scale)
    with_scale = abs(p.alpha) * scale
    sigma = with_scale * r.deviation(squares, reach, start / np.where(with_scale > 0, with_scale, 1))
    bias = np.broadcast_to(p.bias, p.c.shape)[rows]
    size = np.abs(np.where(np.isfinite(total), total, 0)) * with_scale + start
    certain = 2 * r.acc * (size + 2 * np.abs(bias)) + r.tiny * max(1.0, abs(p.alpha))
    most = with_scale * np.sqrt(p.a.shape[1] * squares) + start + np.abs(bias)
    if p.alpha == 0:
        sigma = np.zeros(shape)
    return Rows(rows, made + bias, sigma, certain, most / min(1.0, abs(p.alpha) or 1.0))


def _undone(scale: Array | None, at: Indices) -> Array:
    """Return the factors that undo the scaling of these rows or columns."""
    made: Array = np.ones(len(at)) if scale is None else 1 / scale[at]
    return made


def _sums(p: FloatProduct, a_rows: Array) -> tuple[Array, Array, Array]:
    """Return rows of A times B, the squares of the terms, and the largest partial sums; NaN stay in the first alone."""
    b = p.b
    needs_low = p.rounding.acc < 2.0**-40  # else sums in double are exact enough
    finite_rows = squared(np.where(np.isfinite(a_rows), a_rows, 0))
    high = np.zeros((len(a_rows), b.shape[1]), a_rows.dtype)
    low, squares, reach = np.zeros_like(high), np.zeros(high.shape), np.zeros(high.shape)
    out = high, low if needs_low else None, squares, reach
    for left in range(0, b.shape[1], COLUMNS):
        _add_sums(a_rows, finite_rows, b.within(left, left + COLUMNS), out)
    if b.is_partial:
        squares *= p.comm.size  # of a sum of so many
    low[~np.isfinite(low)] = 0
    high, low, squares, reach = allreduce_sums(p.comm, high, low, squares, reach)
    return high + low, squares, np.where(np.isfinite(reach), reach, 0)


def _add_sums(a_rows: Array, weights: Array, b: Part, out: tuple[Array, Array | None, Array, Array]) -> None:
    """Add rows of A, and their squares, times B. out: sums, what they lost (if wanted), squares, partial sums."""
    if not b.cols.size:
        return
    here = run(b.cols)
    high, low, squares, reach = (None if table is None else table[:, here] for table in out)
    assert high is not None and squares is not None and reach is not None
    for at, block in b.blocks(DEPTH):
        step = a_rows[:, run(at)] @ block
        if low is not None:
            then = high + step
            part = then - high
            low += (high - (then - part)) + (step - part)
            high[...] = then
        else:
            high += step
        np.fmax(reach, np.abs(high), out=reach)
        terms = squared(block)
        if b.nonfinite:
            terms[~np.isfinite(terms)] = 0
        squares += weights[:, run(at)] @ terms
    for table, made in zip(out, (high, low, squares, reach), strict=True):
        if table is not None and made is not None:
            table[:, here] = made


def wrong_floats(p: FloatProduct, rows: Indices) -> tuple[str, float | None]:
    """Return the place where a recomputed row differs in value or in its NaN and infinities (else ""), and the error.

    The error is the largest one over its tolerance, None if it is not a number. Collective.
    """
    where, worst = first_wrong(rows, max(p.c.shape[1], p.a.shape[1]), lambda some: _compare(p, recompute_rows(p, some)))
    return where, worst if math.isfinite(worst) or not where else None


def _compare(p: FloatProduct, made: Rows) -> tuple[str, float]:
    """Return the place where one of these rows is wrong (else ""), and the largest error over its tolerance.

    Collective.
    """
    actual = allreduce_sums(p.comm, p.c.some_rows(made.indices))[0]
    expected, ratio = _ratio(p, made, actual, 1.0)
    bad = np.argwhere(ratio > 1)
    if len(bad):
        expected, ratio = _ratio(p, made, actual, _drift(p, made, ratio))
    if not ratio.size:
        return "", 0.0
    row, col = np.unravel_index(int(ratio.argmax()), ratio.shape)
    worst = float(ratio[row, col])
    if worst <= 1:
        return "", worst
    times = f", {worst:.3g} times what rounding allows" if math.isfinite(worst) else ""
    at = f"C[{made.indices[row]}, {col}]"
    return f"{at} is {actual[row, col]}, computed again it is {expected[row, col]}{times}", worst


def _ratio(p: FloatProduct, made: Rows, actual: Array, times: float) -> tuple[Array, Array]:
    """Return the rows as they should be stored, and |C − them| over the tolerance: `times` the rounding error.

    0 for what is not finite where sums may have overflown on the way, infinity where a pattern differs.
    """
    r, exact = p.rounding, made.exact
    lost = times * SURE * made.sigma + made.certain
    expected, lost = _activated(p.activation, exact, lost, r.acc)
    magnitude = np.abs(expected)
    allowed = lost + r.final * (magnitude + lost)
    ratio: Array = np.abs(actual - expected) / np.where(allowed > 0, allowed, 1)
    ratio[(allowed == 0) & (actual != expected)] = np.inf
    ratio[expected == actual] = 0
    # complex arithmetic with infinities differs between libraries: there only "not finite" is compared
    simple = actual.dtype.kind != "c" and exact.dtype.kind != "c" and bool(np.isfinite([p.alpha, p.beta]).all())
    same = (np.isnan(expected) & np.isnan(actual)) | (expected == actual) if simple else ~np.isfinite(actual)
    overflown = actual == np.copysign(np.inf, expected) if simple else ~np.isfinite(actual)
    may_overflow = magnitude * (1 + 2 * max(r.final, r.acc)) + lost >= r.largest
    ratio[np.isnan(ratio)] = np.inf
    ratio[np.where(np.isfinite(expected), may_overflow & overflown, same)] = 0
    is_near = made.reach >= 0.4 * r.acc_largest  # a sum that overflows on the way never becomes finite again
    ratio[is_near & ~np.isfinite(actual)] = 0
    if p.activation:
        ratio[is_near & (actual == 0)] = 0  # what an activation makes of -inf
    ratio[is_near & np.isinf(expected) & (np.abs(actual) >= r.largest / 2)] = 0  # it is our own sum that overflew
    return expected, ratio


def _activated(activation: str | None, x: Array, lost: Array, unit: float) -> tuple[Array, Array]:
    """Return the activation of `x`, which may be off by `lost`, and how far it may be off itself."""
    if activation == "relu":
        return np.maximum(x, 0), lost
    if activation == "gelu":
        wrong = GELU_SLOPE * lost + GELU_UNITS * 2 * unit * np.where(np.isfinite(x), np.abs(x), 0)
        return np.where(x == -np.inf, 0, x / 2 * _erfc(x / -math.sqrt(2))), wrong
    return x, lost


def _erfc(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.fromiter(map(math.erfc, x.flat), np.float64, x.size).reshape(x.shape)


# -- errors that do not cancel --------------------------------------------------------------------


def _drift(p: FloatProduct, made: Rows, ratio: Array) -> float:
    """Return the factor by which rounding affects the worst elements of these rows more than usual, at least 1.

    Collective. Where terms repeat, as in products of constant matrices, the roundings of a sum have one sign for long.
    That is found by summing the elements' terms one after the other, in the type in which C was summed.
    """
    if p.alpha == 0 or not p.a.shape[1] or not np.isfinite(ratio).any():
        return 1.0
    worst = np.argsort(np.where(np.isfinite(ratio), -ratio, 0), axis=None)[:SUSPECTS]
    row, col = np.unravel_index(p.comm.bcast(worst, 0), ratio.shape)
    left, right = allreduce_sums(p.comm, p.a.some_rows(made.indices[row]), p.b.some_cols(col))
    scale = _undone(p.a.down, made.indices[row]) * _undone(p.b.across, col) * abs(p.alpha)
    depth = max(1, p.rounding.depth // 2 if left.dtype.kind == "c" else p.rounding.depth)
    depths = [max(1, depth * share // 24) for share in (24, 18, 12, 9, 8, 6, 4, 3)]  # libraries differ in it
    errors = [_errors(left * right.T, p.rounding.acc, depth) for depth in depths]
    if left.dtype.kind == "c":
        errors += [_errors_apart(left, right.T, p.rounding.acc, depth) for depth in depths]
    sigma = made.sigma[row, col]
    with np.errstate(all="ignore"):
        times = DRIFT * np.max(errors, axis=0) * scale / (SURE * sigma)
    return max(1.0, float(np.nanmax(np.where(sigma > 0, times, 0), initial=1.0)))


def _errors_apart(left: Array, right: Array, unit: float, depth: int) -> Array:
    """(r,): the same where a kernel sums the four real products of complex numbers apart, which may be far larger."""
    (a, b), (c, d) = ((x.real, x.imag) for x in (left, right))
    ac, bd, ad, bc = (_errors(x * y, unit, depth) for x, y in ((a, c), (b, d), (a, d), (b, c)))
    found: Array = np.hypot(ac + bd, ad + bc)
    return found


def _errors(terms: Array, unit: float, depth: int) -> Array:
    """Return (r,): the rounding errors of the sums of the rows of `terms`."""
    exact = np.array([_exact_sum(x) for x in terms])
    found: Array = np.abs(_blocked_sum(terms.astype(_summing_type(terms.dtype, unit)), depth) - exact)
    return found


def _summing_type(working: np.dtype[Any], unit: float) -> np.dtype[Any]:
    """Return the type with this unit roundoff, complex where `working` is."""
    if unit > 2.0**-40:
        return np.dtype(np.complex64 if working.kind == "c" else np.float32)
    return working


def _exact_sum(x: Array) -> complex | float:
    """Return the sum of a vector, rounded once; NaN if it has none."""
    if not np.isfinite(x).all():
        return math.nan
    return math.fsum(x.real) if x.dtype.kind != "c" else complex(math.fsum(x.real), math.fsum(x.imag))


def _blocked_sum(x: Array, depth: int) -> Array:
    """Return (r,): the sums of the rows of x, formed in parts of `depth`, then over the parts."""
    parts = [np.cumsum(x[:, i : i + depth], axis=1)[:, -1:] for i in range(0, x.shape[1], depth)]
    total: Array = np.cumsum(np.concatenate(parts, axis=1), axis=1)[:, -1]
    return total

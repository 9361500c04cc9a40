"""Some rows of a product computed again: for bool, and for rows that NaN, infinities or overflow touch.

`verification_epilogue` does so for products that an epilogue follows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.runtime.verification_floats import Product, Touched
from rma_mm.runtime.verification_parts import Array, Part, summed

ROWS = 64
"""Rows computed again, at the most (all where there are fewer)."""
TABLE = 1 << 22
"""Elements of the rows that are looked at together."""

Indices = NDArray[np.int64]


def chosen_rows(comm: Any, touched: Touched, seed: int) -> Indices:
    """The rows to compute again, ascending: of each kind of touched rows some, or of all where a column is touched."""
    rng = np.random.default_rng(seed)
    picked: set[int] = set()
    for kind in (touched.rows, touched.overflown):
        rows = np.flatnonzero(kind)
        picked |= set(rng.permutation(rows)[: ROWS // 2].tolist())
    if touched.cols.any():
        picked |= set(rng.permutation(len(touched.rows))[: ROWS - len(picked)].tolist())
    rows = np.array(sorted(picked), np.int64)
    chosen: Indices = comm.bcast(rows, 0)
    return chosen


def random_rows(m: int, seed: int) -> Indices:
    """`ROWS` of m rows, or all, ascending; the same on every rank."""
    rows: Indices = np.sort(np.random.default_rng(seed).permutation(m)[:ROWS]).astype(np.int64)
    return rows


def row_chunks(rows: Indices, width: int) -> list[Indices]:
    """`rows` in pieces whose tables of `width` columns stay small."""
    step = max(1, TABLE // max(1, width))
    return [rows[i : i + step] for i in range(0, len(rows), step)]


def products(comm: Any, a_rows: Array, b: Part) -> Array:
    """(r, n): rows of A, known everywhere, times B. Collective."""
    out = np.zeros((len(a_rows), b.shape[1]), a_rows.dtype)
    for at, block in b.blocks():
        out[:, b.cols] += a_rows[:, at] @ block
    return summed(comm, out)[0]


def wrong_floats(p: Product, touched: Touched, seed: int) -> str:
    """Where a row computed again differs, in value or in the pattern of NaN and infinities; else "". Collective."""
    rows = chosen_rows(p.comm, touched, seed)
    for part in (p.a, p.b, p.c, p.before):
        if part is not None:
            part.zero_nonfinite = False
    for some in row_chunks(rows, max(p.c.shape[1], p.a.shape[1])):
        with np.errstate(all="ignore"):
            exact, size = again(p, some)
            actual = summed(p.comm, p.c.some_rows(some))[0]
            wrong = _differs(p, exact, size, actual)
        if wrong.any():
            row, col = np.argwhere(wrong)[0]
            return f"C[{some[row]}, {col}] is {actual[row, col]}, computed again it is {exact[row, col]}"
    return ""


def again(p: Product, rows: Indices) -> tuple[Array, Array]:
    """(r, n) each: the rows as they should be, and the sums of the magnitudes of their finite terms. Collective."""
    exact = np.zeros((len(rows), p.c.shape[1]), p.a.working)
    size = np.zeros(exact.shape)
    if p.alpha != 0:
        mine = summed(p.comm, p.a.some_rows(rows))[0]
        exact += products(p.comm, mine, p.b) * _of(p.alpha, exact)
        magnitudes = np.abs(np.where(np.isfinite(mine), mine, 0))
        size += abs(p.alpha) * _magnitudes(p.comm, magnitudes, p.b)
    if p.before is not None:
        old = summed(p.comm, p.before.some_rows(rows))[0]
        exact += _of(p.beta, exact) * old
        size += abs(p.beta) * np.abs(np.where(np.isfinite(old), old, 0))
    return exact, size


def _of(value: complex, like: Array) -> complex | float:
    return value if like.dtype.kind == "c" else value.real


def _magnitudes(comm: Any, a_rows: Array, b: Part) -> Array:
    """(r, n): |rows of A| times |B|, what is not finite left out. Collective."""
    out = np.zeros((len(a_rows), b.shape[1]))
    for at, block in b.blocks():
        out[:, b.cols] += a_rows[:, at] @ np.abs(np.where(np.isfinite(block), block, 0))
    return summed(comm, out)[0]


def _differs(p: Product, exact: Array, size: Array, actual: Array) -> Array:
    """Which elements are wrong. Where sums may have overflown on the way, anything goes."""
    r = p.rounding
    lost = r.gamma * size + 1e-12 * size + r.tiny
    free = size / min(1.0, abs(p.alpha) or 1.0) >= 0.4 * r.acc_largest
    may_overflow = np.abs(exact) * (1 + 4 * r.final) + lost >= r.largest
    finite = np.isfinite(exact)
    close = np.abs(actual - exact) <= lost + 2 * r.final * np.abs(exact)
    # complex arithmetic with infinities differs between libraries: there only "not finite" is compared
    simple = exact.dtype.kind != "c" and bool(np.isfinite(p.alpha) and np.isfinite(p.beta))
    overflown = actual == np.copysign(np.inf, exact) if simple else ~np.isfinite(actual)
    same = (np.isnan(exact) & np.isnan(actual)) | (exact == actual) if simple else ~np.isfinite(actual)
    right = np.where(finite, close | (may_overflow & overflown), same)
    wrong: Array = ~(right | free)
    return wrong


def wrong_bools(comm: Any, a: Part, b: Part, c: Part, before: Part | None, reads: bool, seed: int) -> str:
    """Where one of `ROWS` random rows of a product of truth values is wrong; empty if none is. Collective.

    The parts work in float64; `reads` says whether alpha is 1.
    """
    for some in row_chunks(random_rows(c.shape[0], seed), max(c.shape[1], a.shape[1])):
        count = np.zeros((len(some), c.shape[1]))
        if reads:
            count += products(comm, (summed(comm, a.some_rows(some))[0] > 0).astype(np.float64), b)
        if before is not None:
            count += summed(comm, before.some_rows(some))[0]
        actual = summed(comm, c.some_rows(some))[0]
        wrong = (count > 0) != (actual > 0)
        if wrong.any():
            row, col = np.argwhere(wrong)[0]
            return f"C[{some[row]}, {col}] is {bool(actual[row, col])}, computed again it is {bool(count[row, col])}"
    return ""

"""Products of semirings whose sum is a least or greatest one.

No way is known to see whether C = A ⊗ B of min and + is right much sooner than by computing it again: a minimum has no
inverse, so that random sums tell nothing. Rows are computed again, all of a small product. Of the other rows a least
element can be known: min over i in S of C[i, j] is min over k of (min over i in S of A[i, k]) + B[k, j], since rounding
and ⊗ keep order. So are groups of rows checked, and of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import accumulator
from rma_mm.elements.semiring import Semiring
from rma_mm.kernels.order_keys import from_keys, has_keys, key_type, to_keys
from rma_mm.runtime.verification.parts import Array, MatrixView, Part, summed
from rma_mm.runtime.verification.rows import ROWS, Indices, how_many, random_rows, row_chunks

SLOWER = 4
"""Times that a term takes here, compared with BLAS."""


def wrong_semiring(
    a: MatrixView, b: MatrixView, c: MatrixView, before: MatrixView | None, semiring: Semiring, seed: int
) -> tuple[str, int]:
    """Where C = A ⊗ B (⊕ C0) is not what it should be ("" if nowhere seen), and how many rows were computed again.

    Exactly, but that zeros of either sign are equal, and so are all NaN. Collective.
    """
    comm, working = c.mesh.comm, accumulator(c.dtype)
    left, right, made = (Part(x, working) for x in (a, b, c))
    old = None if before is None else Part(before, working)
    m, n, k = *c.shape, a.shape[1]
    rows = random_rows(m, how_many(m, n, k, SLOWER), seed)
    where = ""
    for some in row_chunks(rows, max(n, k)):
        lines = [None if x is None else summed(comm, x.some_rows(some))[0] for x in (left, made, old)]
        where = where or _differing(comm, lines, right, semiring, c.dtype, [f"C[{i}, {{}}]" for i in some])
    if not where and len(rows) < m and keeps_order(comm, left, right, semiring):
        turned = right.T, left.T, made.T, None if old is None else old.T
        for given, what in (((left, right, made, old), "row"), (turned, "column")):
            where = where or _wrong_group(comm, given, semiring, c.dtype, seed, what)
    return where, len(rows)


def keeps_order(comm: Any, a: Part, b: Part, semiring: Semiring) -> bool:
    """Whether ⊗ keeps the order of these operands: integers must not wrap around, nor infinities cancel. Collective."""
    if semiring.multiply is not np.add:
        return True
    found = np.zeros(4)
    for i, part in enumerate((a, b)):
        for _, block in part.blocks():
            finite = block[np.isfinite(block)].astype(np.float64)
            found[i] = max(found[i], np.abs(finite).max(initial=0))
            found[2:] += (block == np.inf).any(), (block == -np.inf).any()
    found = summed(comm, found)[0]
    if a.working.kind in "iu":
        return bool(found[0] + found[1] < np.iinfo(a.working).max)
    return not (found[2] and found[3])


def _wrong_group(
    comm: Any, parts: Sequence[Any], semiring: Semiring, dtype: np.dtype[Any], seed: int, what: str
) -> str:
    """Where the least elements of a group of rows are wrong; empty if nowhere. `parts`: A, B, C, C0. Collective."""
    a, b, c, before = parts
    group_of = np.random.default_rng(seed).permutation(c.shape[0]) % ROWS
    lines = [None if x is None else _grouped(comm, x, group_of, semiring) for x in (a, c, before)]
    least = f"the {'least' if semiring.reduction == 'MIN' else 'greatest'} element of a group of {what}s, at {{}},"
    return _differing(comm, lines, b, semiring, dtype, [least] * ROWS)


def _grouped(comm: Any, part: Part, group_of: Indices, semiring: Semiring) -> Array:
    """(ROWS, columns): the ⊕ of each group of rows. Collective."""
    out = np.full((ROWS, part.shape[1]), semiring.identity(part.working))
    mine = np.full((ROWS, len(part.cols)), semiring.identity(part.working))
    for at, block in part.blocks():
        for i, line in zip(group_of[at], block, strict=True):
            semiring.add(mine[i], line, out=mine[i])
    out[:, part.cols] = mine
    return _reduced(comm, out, semiring)


def _differing(
    comm: Any, lines: list[Any], b: Part, semiring: Semiring, dtype: np.dtype[Any], names: list[str]
) -> str:
    """Where rows of C differ from rows of A times B; `lines`: those of A, C and C0. Collective."""
    a_rows, actual, old = lines
    exact = _again(comm, a_rows, b, semiring)
    if old is not None:
        semiring.add(exact, old, out=exact)
    exact = exact.astype(dtype).astype(actual.dtype)  # rounded once
    wrong = (actual != exact) & ~((actual != actual) & (exact != exact))
    if not wrong.any():
        return ""
    row, col = np.argwhere(wrong)[0]
    return f"{names[row].format(col)} is {actual[row, col]}, computed again it is {exact[row, col]}"


def _again(comm: Any, a_rows: Array, b: Part, semiring: Semiring) -> Array:
    """(r, n): rows of A, known everywhere, times B. Collective."""
    nothing = semiring.identity(a_rows.dtype)
    mine = np.full((len(a_rows), len(b.cols)), nothing)
    term = np.empty_like(mine)
    for at, block in b.blocks():
        for k, line in zip(at, block, strict=True):
            semiring.multiply(a_rows[:, k, None], line, out=term)
            semiring.add(mine, term, out=mine)
    out = np.full((len(a_rows), b.shape[1]), nothing)
    out[:, b.cols] = mine
    return _reduced(comm, out, semiring)


def _reduced(comm: Any, x: Array, semiring: Semiring) -> Array:
    """The ⊕ of all ranks' arrays, made of x. Collective."""
    from mpi4py import MPI

    keys = has_keys(x.dtype)
    if keys:
        to_keys(x, semiring.reduction)
    whole = x.view(key_type(x.dtype)) if keys else x
    total: NDArray[Any] = np.empty_like(whole)
    comm.Allreduce(whole, total, MPI.MIN if semiring.reduction == "MIN" else MPI.MAX)
    made = total.view(x.dtype)
    if keys:
        from_keys(made, semiring.reduction)
    return made

"""Products of semirings, by their own ⊕ and ⊗.

No way is known to see whether C = A ⊗ B of min and + is right much sooner than by computing it again: a minimum has no
inverse, so that random sums tell nothing. Rows are computed again, all of a small product. Of the others the ⊕ of a
group S can be known where ⊗ distributes over ⊕: that over i in S of C[i, j] is ⊕ over k of (⊕ over i in S of A[i, k])
⊗ B[k, j]; of floats too, where ⊕ picks the least or the greatest, since rounding keeps order. So are groups of rows
checked, and of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import accumulator
from rma_mm.elements.reduction import Reduction
from rma_mm.elements.semiring import Distributes, Semiring
from rma_mm.kernels.order_keys import from_keys, has_keys, key_type, to_keys
from rma_mm.runtime.verification.parts import Array, MatrixView, Part, allreduce_sums
from rma_mm.runtime.verification.rows import ROWS, SLOWER, Indices, differing, first_wrong, how_many, random_rows


def wrong_semiring(
    a: MatrixView, b: MatrixView, c: MatrixView, before: MatrixView | None, semiring: Semiring, seed: int
) -> tuple[str, int]:
    """Return the place where C = A ⊗ B (⊕ C0) is wrong ("" if none is seen), and the number of rows computed again.

    Exactly, but that zeros of either sign are equal, and so are all NaN. Collective.
    """
    comm, working = c.mesh.comm, accumulator(c.dtype)
    left, right, made = (Part(x, working) for x in (a, b, c))
    old = None if before is None else Part(before, working)
    m, n, k = *c.shape, a.shape[1]
    rows = random_rows(m, how_many(m, n, k, SLOWER), seed)

    def look(some: Indices) -> tuple[str, float]:
        lines = [None if x is None else _known(comm, x.some_rows(some)) for x in (left, made, old)]
        return _compared(comm, lines, right, semiring, c.dtype, [f"C[{row}, {{}}]" for row in some])

    where, _ = first_wrong(rows, max(n, k), look)
    if not where and len(rows) < m and distributes(comm, left, right, semiring):
        turned = right.T, left.T, made.T, None if old is None else old.T
        for given, what in (((left, right, made, old), "row"), (turned, "column")):
            where = where or _wrong_group(comm, given, semiring, c.dtype, seed, what)
    return where, len(rows)


def distributes(comm: Any, a: Part, b: Part, semiring: Semiring) -> bool:
    """True if ⊗ distributes over ⊕ on these operands. Collective."""
    if semiring.distributes is not Distributes.UNLESS_SUMS_WRAP:
        return semiring.distributes is Distributes.ALWAYS
    found = np.zeros(4)
    for i, part in enumerate((a, b)):
        for _, block in part.blocks():
            finite = block[np.isfinite(block)].astype(np.float64)
            found[i] = max(found[i], np.abs(finite).max(initial=0))
            found[2:] += (block == np.inf).any(), (block == -np.inf).any()
    found = allreduce_sums(comm, found)[0]
    if a.working.kind in "iu":
        return bool(found[0] + found[1] < np.iinfo(a.working).max)
    return not (found[2] and found[3])


def _wrong_group(
    comm: Any, parts: Sequence[Any], semiring: Semiring, dtype: np.dtype[Any], seed: int, what: str
) -> str:
    """Return the place where the ⊕ of a group of rows is wrong; empty if none is. `parts`: A, B, C, C0. Collective."""
    a, b, c, before = parts
    group_of = np.random.default_rng(seed).permutation(c.shape[0]) % ROWS
    lines = [None if x is None else _grouped(comm, x, group_of, semiring) for x in (a, c, before)]
    total = ("the sum", "the greatest element", "the least element")[semiring.reduction.order]
    return _compared(comm, lines, b, semiring, dtype, [f"{total} of a group of {what}s, at {{}},"] * ROWS)[0]


def _grouped(comm: Any, part: Part, group_of: Indices, semiring: Semiring) -> Array:
    """(ROWS, columns): the ⊕ of each group of rows. Collective."""
    out = np.full((ROWS, part.shape[1]), semiring.identity(part.working))
    mine = np.full((ROWS, len(part.cols)), semiring.identity(part.working))
    for at, block in part.blocks():
        for i, line in zip(group_of[at], block, strict=True):
            semiring.add(mine[i], line, out=mine[i])
    out[:, part.cols] = mine
    return _reduced(comm, out, semiring)


def _compared(
    comm: Any, lines: list[Any], b: Part, semiring: Semiring, dtype: np.dtype[Any], names: list[str]
) -> tuple[str, float]:
    """Return rows of C and rows of A times B, as `first_wrong` asks; `lines`: those of A, C and C0. Collective."""
    a_rows, actual, old = lines
    exact = _recompute_rows(comm, a_rows, b, semiring)
    if old is not None:
        semiring.add(exact, old, out=exact)
    exact = exact.astype(dtype).astype(actual.dtype)  # rounded once
    return differing(names, actual, exact, (actual != exact) & ~((actual != actual) & (exact != exact)))


def _recompute_rows(comm: Any, a_rows: Array, b: Part, semiring: Semiring) -> Array:
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


def _known(comm: Any, x: Array) -> Array:
    """Return an array of which every element is 0 but on one rank, known everywhere. Collective."""
    if x.dtype.kind != "b":
        return allreduce_sums(comm, x)[0]
    return allreduce_sums(comm, x.view(np.uint8))[0].view(np.bool_)  # MPI has no sum of truth values


def _reduced(comm: Any, x: Array, semiring: Semiring) -> Array:
    """Return the ⊕ of all ranks' arrays, made of x. Collective."""
    reduction = semiring.reduction
    if not (reduction.order and has_keys(x.dtype)):
        return _met(comm, x, reduction)
    to_keys(x, reduction)
    made = _met(comm, x.view(key_type(x.dtype)), reduction).view(x.dtype)
    from_keys(made, reduction)
    return made


def _met(comm: Any, x: Array, reduction: Reduction) -> Array:
    """Reduce by MPI if it can; else each rank reduces a share of all ranks' elements. Collective."""
    from mpi4py import MPI

    total: NDArray[Any] = np.empty_like(x)
    if x.dtype in reduction.types:
        comm.Allreduce(x, total, getattr(MPI, reduction.mpi))
        return total
    share = -(-x.size // comm.size)
    mine = np.resize(x, (comm.size, share))
    came, made = np.empty_like(mine), np.empty_like(mine)
    comm.Alltoall(mine.view(np.uint8), came.view(np.uint8))
    comm.Allgather(reduction.add.reduce(came, axis=0).view(np.uint8), made.view(np.uint8))
    total[...] = made.reshape(-1)[: x.size].reshape(x.shape)
    return total

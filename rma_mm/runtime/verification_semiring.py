"""Some rows of a product of another semiring computed again: least and greatest sums have no check like Freivalds'."""

from __future__ import annotations

from typing import Any

import numpy as np

from rma_mm.kernels.dtypes import accumulator
from rma_mm.kernels.ordered import from_keys, has_keys, key_type, to_keys
from rma_mm.kernels.semiring import Semiring
from rma_mm.runtime.verification_parts import Array, MatrixView, Part, summed
from rma_mm.runtime.verification_rows import random_rows, row_chunks


def wrong_rows(
    a: MatrixView, b: MatrixView, c: MatrixView, before: MatrixView | None, semiring: Semiring, seed: int
) -> tuple[str, int]:
    """Where one of `ROWS` random rows of C = A ⊗ B (⊕ C0) is not what it should be ("" if none is), and how many.

    Exactly, but that zeros of either sign are equal, and so are all NaN. Collective.
    """
    comm, working = c.mesh.comm, accumulator(c.dtype)
    left, right, made = (Part(x, working) for x in (a, b, c))
    old = None if before is None else Part(before, working)
    rows = random_rows(c.shape[0], seed)
    for some in row_chunks(rows, max(c.shape[1], a.shape[1])):
        exact = _again(comm, summed(comm, left.some_rows(some))[0], right, semiring)
        if old is not None:
            semiring.add(exact, summed(comm, old.some_rows(some))[0], out=exact)
        exact = exact.astype(c.dtype).astype(working)  # rounded once
        actual = summed(comm, made.some_rows(some))[0]
        wrong = (actual != exact) & ~((actual != actual) & (exact != exact))
        if wrong.any():
            row, col = np.argwhere(wrong)[0]
            return f"C[{some[row]}, {col}] is {actual[row, col]}, computed again it is {exact[row, col]}", len(rows)
    return "", len(rows)


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
    _reduce(comm, out, semiring)
    return out


def _reduce(comm: Any, x: Array, semiring: Semiring) -> None:
    """The ⊕ of all ranks' arrays, in place. Collective."""
    from mpi4py import MPI

    keys = has_keys(x.dtype)
    if keys:
        to_keys(x, semiring.reduction)
    op = MPI.MIN if semiring.reduction == "MIN" else MPI.MAX
    comm.Allreduce(MPI.IN_PLACE, x.view(key_type(x.dtype)) if keys else x, op)
    if keys:
        from_keys(x, semiring.reduction)

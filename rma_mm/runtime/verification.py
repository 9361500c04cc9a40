"""Is C = alpha · op(A) @ op(B) + beta · C0? Checked on the distributed matrices in O(n²), without gathering any.

Floats: Freivalds' check against the rounding that is allowed. Integers: Freivalds' check, exact modulo 2^w. Bool:
some rows computed again, as for semirings other than + and ×, and where an epilogue follows the product. Replicas of C
must be equal.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from rma_mm.kernels.elementwise import scalar
from rma_mm.kernels.epilogue import Epilogue
from rma_mm.kernels.semiring import PLUS_TIMES, Semiring
from rma_mm.runtime.verification_epilogue import Closed, wrong_closed
from rma_mm.runtime.verification_floats import Product, residual, rounding, survey
from rma_mm.runtime.verification_parts import Array, MatrixView, Part, summed, whole
from rma_mm.runtime.verification_rows import wrong_bools, wrong_floats
from rma_mm.runtime.verification_semiring import wrong_rows

VECTORS = 20
"""Random vectors for integers: a wrong C passes with a chance of at most 2^-20."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check."""

    ok: bool
    """Whether C is right."""
    residual: float | None
    """Floats: the largest error in units of what rounding allows. Exact types: 0. None where there is no figure."""
    reason: str = ""
    """Where and how C is wrong."""
    rows: int | None = None
    """How many rows were looked at, where not all were."""


def verify(
    a: MatrixView,
    b: MatrixView,
    c: MatrixView,
    *,
    alpha: Any = 1,
    beta: Any = 0,
    before: MatrixView | None = None,
    conj_a: bool = False,
    conj_b: bool = False,
    seed: int = 0,
    semiring: Semiring = PLUS_TIMES,
    epilogue: Epilogue | None = None,
    product: np.dtype[Any] | None = None,
) -> Verdict:
    """Check C = alpha · op(A) @ op(B) + beta · C0; op conjugates. Collective; all ranks get the same verdict.

    a: (m, k), b: (k, n), c: (m, n), transposed already. before: C0, needed where beta ≠ 0, untouched since.
    epilogue: what followed the product, which was of element type `product`. Raises DtypeError for scalars that the
    type of the sums does not hold.
    """
    product = product or c.dtype
    alpha, beta = (scalar(x, product, name).item() for name, x in (("alpha", alpha), ("beta", beta)))
    a, b = whole(a, product), whole(b, product)
    if beta == 0:
        before = None
    elif before is None:
        raise ValueError("before: beta is not 0, so the check needs C as it was before the product")
    comm = c.mesh.comm
    with np.errstate(all="ignore"):
        if not semiring.is_arithmetic:
            reason, rows = wrong_rows(a, b, c, before, semiring, seed)
            verdict = Verdict(not reason, None if reason else 0.0, reason, rows)
        elif epilogue is not None:
            closed = Closed(a, b, c, before, alpha, beta, (conj_a, conj_b), epilogue, product)
            reason, worst, rows = wrong_closed(closed, seed)
            verdict = Verdict(not reason, worst, reason, rows)
        elif c.dtype.kind in "iu":
            verdict = _integers(a, b, c, before, alpha, beta, seed)
        elif c.dtype.kind == "b":
            parts = [Part(x, np.dtype(np.float64)) for x in (a, b, c)]
            old = None if before is None else Part(before, np.dtype(np.float64))
            reason = wrong_bools(comm, parts[0], parts[1], parts[2], old, alpha, seed)
            verdict = Verdict(not reason, None if reason else 0.0, reason)
        else:
            verdict = _floats(a, b, c, before, complex(alpha), complex(beta), (conj_a, conj_b), seed)
    if verdict.ok and not _replicas_agree(c):
        verdict = Verdict(False, None, "replicas of C differ")
    shared: Verdict = comm.bcast(verdict, 0)
    return shared


def _floats(
    a: MatrixView,
    b: MatrixView,
    c: MatrixView,
    before: MatrixView | None,
    alpha: complex,
    beta: complex,
    conj: tuple[bool, bool],
    seed: int,
) -> Verdict:
    """The check for real and complex types. Collective."""
    working = np.dtype(np.complex128 if c.dtype.kind == "c" else np.float64)
    parts = Part(a, working, conj[0]), Part(b, working, conj[1]), Part(c, working)
    old = None if before is None else Part(before, working)
    product = Product(
        c.mesh.comm, *parts, old, alpha, beta, rounding(c.dtype, a.shape[1], alpha, 2 * c.mesh.shape.size)
    )
    touched = survey(product)
    if touched.impossible:
        return Verdict(False, None, f"{touched.impossible} elements of C are not finite, and no operand explains it")
    if not np.isfinite(alpha) or not np.isfinite(beta):
        touched.rows[:] = True
    worst, where = residual(product, touched, seed)
    if not worst <= 1:
        return Verdict(False, worst if np.isfinite(worst) else None, where)
    reason = wrong_floats(product, touched, seed)
    return Verdict(not reason, None if reason else worst, reason)


def _integers(
    a: MatrixView, b: MatrixView, c: MatrixView, before: MatrixView | None, alpha: int, beta: int, seed: int
) -> Verdict:
    """The check for integers: random vectors over all 2^64 words, results modulo 2^w. Collective."""
    working = np.dtype(np.uint64)
    x = np.random.default_rng(seed).integers(0, 2**64, (c.shape[1], VECTORS), np.uint64)
    error = _times(Part(c, working), x)
    if before is not None:
        error -= np.uint64(beta % 2**64) * _times(Part(before, working), x)
    if alpha != 0:
        z = summed(c.mesh.comm, _times(Part(b, working), x))[0]
        error -= np.uint64(alpha % 2**64) * _times(Part(a, working), z)
    total = summed(c.mesh.comm, error)[0] & np.uint64(2 ** (8 * c.dtype.itemsize) - 1)
    wrong = np.flatnonzero(total.any(axis=1))
    if not wrong.size:
        return Verdict(True, 0.0)
    return Verdict(False, None, f"{wrong.size} rows of C are wrong, the first is row {wrong[0]}")


def _times(part: Part, x: Array) -> Array:
    """(rows, v): what this rank answers for, times x (columns, v), modulo 2^64."""
    out = np.zeros((part.shape[0], x.shape[1]), x.dtype)
    mine = np.asfortranarray(x[part.cols])  # NumPy's product of integers walks the columns
    for at, block in part.blocks():
        out[at] += block @ mine
    return out


def _replicas_agree(c: MatrixView) -> bool:
    """Whether all replicas of C hold the same bits. Collective."""
    mesh, grid = c.mesh, c.layout.mesh(c.mesh.shape)
    free = c.layout.replicated_axes(grid)
    if all(grid.axis_size(axis) == 1 for axis in free) or set(free) & set(c.layout.skew_axes):
        return True
    mine: tuple[int, int] | None = None
    if mesh.rank < grid.size:
        first = grid.rank(grid.coords(mesh.rank) | dict.fromkeys(free, 0))
        mine = first, zlib.crc32(np.ascontiguousarray(c.tile).tobytes())
    found: dict[int, set[int]] = {}
    for entry in mesh.comm.allgather(mine):
        if entry is not None:
            found.setdefault(entry[0], set()).add(entry[1])
    return all(len(sums) == 1 for sums in found.values())

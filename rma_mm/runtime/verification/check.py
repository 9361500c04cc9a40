"""Is C = alpha · op(A) @ op(B) + beta · C0? Checked on the distributed matrices, without gathering any.

Floats: the rows that look wrong by Freivalds' check are computed again, and each of their elements is compared with
what rounding does. Integers: Freivalds' check, exact modulo 2^w. Bool: all is computed again. Other semirings, and what
an activation follows: all of a small product, rows of a large one. Replicas of C must be equal.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.elements.semiring import PLUS_TIMES, Distributes, Semiring
from rma_mm.kernels.elementwise import scalar
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.verification.contents import differences
from rma_mm.runtime.verification.epilogue import EpilogueProduct, wrong_closed
from rma_mm.runtime.verification.floats import LARGE, FloatProduct, inverse, narrow_type, rounding, scan_values
from rma_mm.runtime.verification.parts import Array, MatrixView, Part, allreduce_sums, whole
from rma_mm.runtime.verification.rows import chosen_rows, how_many, wrong_floats
from rma_mm.runtime.verification.screen import PASSED, looks_right
from rma_mm.runtime.verification.semirings import wrong_semiring
from rma_mm.runtime.verification.sketch import FOUND

VECTORS = 20  # random vectors for integers: a wrong C passes with a chance of at most 2^-20
WHOLE = "every element computed again"
SOME = "{} of {} rows computed again, {}"
FINDS = "finds one wrong element that is off by {} standard deviations of its rounding error or more"
SUSPECTED = "all compared by random sums", FINDS.format(FOUND)
SCREENED = "every row compared by random sums", FINDS.format(PASSED)
ORDERED = "extreme elements of 64 groups of the other rows and columns compared", "one wrong element may go unseen"
GROUPED = "sums of 64 groups of the other rows and columns compared", "one wrong element may go unseen"
UNSEEN = "one in each part of the matrix, the other rows not compared", "one wrong element may go unseen"


@dataclass(frozen=True)
class Verdict:
    ok: bool  # true if C is right
    residual: float | None
    """Floats: the largest error found, in units of what rounding allows. Exact types: 0. None: no figure."""
    reason: str = ""  # where and how C is wrong
    rows: int | None = None  # number of rows that were computed again; None if none had to be
    how: str = ""  # what was compared, for people
    odds: str = ""  # the errors that this finds, for people; empty if it finds every one


def verify(
    a: MatrixView, b: MatrixView, c: MatrixView, *, alpha: Any = 1, beta: Any = 0, before: MatrixView | None = None,
    conj_a: bool = False, conj_b: bool = False, seed: int = 0, semiring: Semiring = PLUS_TIMES,
    epilogue: Epilogue | None = None, product: np.dtype[Any] | None = None, quick: bool = False, fast: int = 0,
) -> Verdict:
    """Check C = alpha · op(A) @ op(B) + beta · C0; op conjugates. Collective; all ranks get the same verdict.

    For the command and `RMA_MM_CHECK`, whose ranks have agreed on the arguments: it does not compare them once more.
    a: (m, k), b: (k, n), c: (m, n), transposed already. before: C0, needed where beta ≠ 0, untouched since.
    epilogue: what followed the product, which was of element type `product`. quick: whether no more is done to a large
    product of floats than `screen` does, unless that looks wrong. fast: as in `matmul`. Raises DtypeError for scalars
    that the type of the sums does not hold.
    """
    if 0 in c.shape:  # and k may be anything
        return Verdict(True, 0.0, how="there are no elements")
    product = product or c.dtype
    alpha, beta = (scalar(x, product, name).item() for name, x in (("alpha", alpha), ("beta", beta)))
    a, b = whole(a, b, product)
    if beta == 0:
        before = None
    elif before is None:
        raise ValueError("before: beta is not 0, so the check needs C as it was before the product")
    comm = c.mesh.comm
    closed = EpilogueProduct(a, b, c, before, alpha, beta, (conj_a, conj_b), epilogue or Epilogue(), product)
    with np.errstate(all="ignore"):
        if not semiring.is_arithmetic:
            verdict = _exact(*wrong_semiring(a, b, c, before, semiring, seed), c.shape[0], _others(semiring))
        elif closed.product.kind not in "iub":
            verdict = _floats(closed, seed, quick, fast)
        elif epilogue is None and c.dtype.kind in "iu":
            verdict = _integers(a, b, c, before, alpha, beta, seed)
        else:
            verdict = _exact(*wrong_closed(closed, None if epilogue is None else seed), c.shape[0], UNSEEN)
    if verdict.ok and not _replicas_agree(c):
        verdict = Verdict(False, None, "replicas of C differ")
    shared: Verdict = comm.bcast(verdict, 0)
    return shared


def _others(semiring: Semiring) -> tuple[str, str]:
    """Return how rows that are not computed again are checked."""
    if semiring.distributes is Distributes.NOT_KNOWN:
        return UNSEEN
    return ORDERED if semiring.reduction.order else GROUPED


def _exact(reason: str, rows: int, m: int, others: tuple[str, str]) -> Verdict:
    return Verdict(not reason, None if reason else 0.0, reason, rows, *_how(rows, m, others))


def _how(rows: int, m: int, others: tuple[str, str]) -> tuple[str, str]:
    return (WHOLE, "") if rows == m else (SOME.format(rows, m, others[0]), others[1])


def _floats(closed: EpilogueProduct, seed: int, quick: bool, fast: int) -> Verdict:
    """Return the check for real and complex types. Collective."""
    p = product_of(closed, fast)
    m, n, k = *p.c.shape, p.a.shape[1]
    if quick and not fast and how_many(m, n, k) < m and looks_right(p, seed):
        return Verdict(True, None, "", None, *SCREENED)
    touched = scan_values(p)
    if touched.impossible:
        return Verdict(False, None, f"{touched.impossible} elements of C are not finite, and no operand explains it")
    if not np.isfinite(p.alpha) or not np.isfinite(p.beta):
        touched.rows[:] = True
    p.a.down, p.b.across = (inverse(scale, LARGE) for scale in touched.scales)
    rows = chosen_rows(p, touched, seed)
    reason, worst = wrong_floats(p, rows)
    others = SUSPECTED if p.activation is None else UNSEEN
    return Verdict(not reason, worst, reason, len(rows), *_how(len(rows), p.c.shape[0], others))


def product_of(closed: EpilogueProduct, fast: int) -> FloatProduct:
    """Return the parts of a product of floats to compute with."""
    c, kept = closed.c, closed.epilogue
    working = np.dtype(np.complex128 if closed.product.kind == "c" else np.float64)
    a, b, _ = closed.parts(working)
    stored = np.dtype(np.complex128 if c.dtype.kind == "c" else np.float64)
    before = None if closed.before is None else Part(closed.before, stored)
    bias = closed.bias(np.arange(c.shape[0])).astype(stored)
    sizes = *c.shape, closed.a.shape[1]
    return FloatProduct(
        c.mesh.comm, a, b, Part(c, stored), before, complex(closed.alpha), complex(closed.beta),
        rounding(closed.product, c.dtype, sizes, c.mesh.grid.size, fast), bias,
        narrow_type(closed.product, c.dtype, sizes[2]), kept.activation,
    )


def _integers(
    a: MatrixView, b: MatrixView, c: MatrixView, before: MatrixView | None, alpha: int, beta: int, seed: int
) -> Verdict:
    """Return the check for integers: random vectors over all 2^64 words, results modulo 2^w. Collective."""
    working = np.dtype(np.uint64)
    x = np.random.default_rng(seed).integers(0, 2**64, (c.shape[1], VECTORS), np.uint64)
    error = _times(Part(c, working), x)
    if before is not None:
        error -= np.uint64(beta % 2**64) * _times(Part(before, working), x)
    if alpha != 0:
        z = allreduce_sums(c.mesh.comm, _times(Part(b, working), x))[0]
        error -= np.uint64(alpha % 2**64) * _times(Part(a, working), z)
    total = allreduce_sums(c.mesh.comm, error)[0] & np.uint64(2 ** (8 * c.dtype.itemsize) - 1)
    wrong = np.flatnonzero(total.any(axis=1))
    if not wrong.size:
        bits = 8 * c.dtype.itemsize
        return Verdict(True, 0.0, how=f"every row compared by {VECTORS} random sums modulo 2^{bits}")
    return Verdict(False, None, f"{wrong.size} rows of C are wrong, the first is row {wrong[0]}")


def _times(part: Part, x: Array) -> Array:
    """Return (rows, v): this rank's share times x (columns, v), modulo 2^64."""
    out = np.zeros((part.shape[0], x.shape[1]), x.dtype)
    mine = np.asfortranarray(x[part.cols])  # NumPy's product of integers walks the columns
    for at, block in part.blocks():
        out[at] += block @ mine
    return out


def _replicas_agree(c: MatrixView) -> bool:
    """True if all replicas of C hold the same bits. Collective."""
    mesh, grid = c.mesh, c.layout.mesh(c.mesh.grid)
    free = c.layout.replicated_axes(grid)
    if all(grid.axis_size(axis) == 1 for axis in free):
        return True
    if set(free) & set(c.layout.skew_axes):  # each replica is another part
        return not any(mesh.comm.allgather([*differences(c, c, "C")]))
    mine: tuple[int, int] | None = None
    if mesh.rank < grid.size:
        first = grid.rank(grid.coords(mesh.rank) | dict.fromkeys(free, 0))
        mine = first, zlib.crc32(np.ascontiguousarray(c.tile).tobytes())
    found: dict[int, set[int]] = {}
    for entry in mesh.comm.allgather(mine):
        if entry is not None:
            found.setdefault(entry[0], set()).add(entry[1])
    return all(len(sums) == 1 for sums in found.values())

"""Fast products: Strassen's algorithm, whose sums of submatrices are formed while these are packed.

After V. Strassen, "Gaussian elimination is not optimal" (1969): 7 products of halves instead of 8. Sums join packing,
and tiles go to several submatrices of C, as in J. Huang et al., "Strassen's algorithm reloaded" (SC 2016).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.epilogue.epilogue import run_all
from rma_mm.kernels.gemm.blocks import blocks_of
from rma_mm.kernels.gemm.cpu import host
from rma_mm.kernels.gemm.form import cuts, form_of, has_fast
from rma_mm.kernels.gemm.product import (
    Call,
    bind_numba,
    bound,
    bound_loops,
    by_rows,
    code,
    parts_of,
    storage,
)
from rma_mm.kernels.product import LocalOperands, Product
from rma_mm.kernels.threads import get_threads, run_concurrently

LEFT = (1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (-1, 0, 1, 0), (0, 1, 0, -1)
RIGHT = (1, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, -1), (-1, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1)
RESULT = (1, 0, 0, 1), (0, 0, 1, -1), (0, 1, 0, 1), (1, 0, 1, 0), (-1, 1, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0)
"""Factors of the quarters of A and B whose sums each product multiplies, and of those of C that it is added to.

The first is (A00 + A11) · (B00 + B11), and is added to C00 and C11.
"""


def bind_fast(levels: int, problem: LocalOperands) -> Product:
    """Return the product by generated code, which Strassen's algorithm cuts up to `levels` times if it is large enough.

    Products that it would give NaN or infinities, of which it makes more than belong there, are done as usual.
    """
    if not is_cut(levels, problem):
        return bind_numba(problem)
    calls = [_bound(levels, part) for part in parts_of(problem, get_threads())]
    return Product.by(f"fast{levels}", problem, *((run_concurrently, calls) if len(calls) > 1 else calls))


def is_cut(levels: int, problem: LocalOperands) -> bool:
    """True if a product, or a part of it, is done by fewer multiplications."""
    one_type = problem.a.dtype if problem.a.dtype == problem.b.dtype else None
    is_fit = problem.c.ndim == 2 and has_fast(problem.c.dtype, one_type)
    return is_fit and cuts(levels, parts_of(problem, get_threads())[0].sizes) > 0


def _bound(levels: int, p: LocalOperands) -> Call:
    """Return the call for a part of a product: submatrices of equal sizes, and what remains at the edges."""
    p = by_rows(p)
    levels, usual = cuts(levels, p.sizes), bound(p)
    if not levels:
        return usual
    m, n, k = (extent >> levels << levels for extent in p.sizes)
    whole = replace(p, a=p.a[:m, :k], b=p.b[:k, :n], c=p.c[:m, :n])
    steps = [_call(levels, whole)]
    if k < p.sizes[2]:
        one = p.c.dtype.type(1)
        steps.append(bound(replace(whole, a=p.a[:m, k:], b=p.b[k:, :n], beta=one)))
    if m < p.sizes[0]:
        steps.append(bound(replace(p, a=p.a[m:], c=p.c[m:])))
    if n < p.sizes[1]:
        steps.append(bound(replace(p, a=p.a[:m], b=p.b[:, n:], c=p.c[:m, n:])))
    return partial(run_all, steps) if p.c.dtype.kind in "iu" else partial(_checked, p, steps, usual)


def _checked(p: LocalOperands, steps: list[Call], usual: Call) -> None:
    """Do a product of floats, but as usual where NaN or infinities would spread to other rows and columns."""
    if p.beta != 0 and not (_is_finite(p.a) and _is_finite(p.b)):
        usual()
        return
    run_all(steps)
    if p.beta == 0 and not _is_finite(p.c):
        usual()


def _is_finite(x: NDArray[Any]) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.isfinite(x.sum()))


def _call(levels: int, p: LocalOperands) -> Call:
    form = replace(form_of(p.semiring, p.a.dtype, p.b.dtype, p.c.dtype, host(), False), terms=2**levels)
    loops = code(form, *(storage(x.dtype, False) for x in (p.a, p.b, p.c)))
    m, n, k = (extent >> levels for extent in p.sizes)
    blocks, made = blocks_of(form, m, n, k, host()), table(levels, *(_offsets(levels, x) for x in (p.a, p.b, p.c)))
    return bound_loops(form, loops, blocks, p.a, p.b, p.c, p.alpha, p.beta, p.conj_a, p.conj_b, made)


def _offsets(levels: int, x: NDArray[Any]) -> NDArray[np.int64]:
    """Return where the submatrices of a matrix begin, in bytes, row by row of them."""
    along = np.arange(2**levels)
    down, across = (along * (extent >> levels) * stride for extent, stride in zip(x.shape, x.strides, strict=True))
    starts: NDArray[np.int64] = np.add.outer(down, across).reshape(-1)
    return starts


def table(
    levels: int, of_a: NDArray[np.int64], of_b: NDArray[np.int64], of_c: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return what `loops.multiply` reads: the number of products, and of each its operands and its targets.

    An operand is where its first submatrix begins, and (distance from there, sign) of each other. Targets are their
    number, and (where it begins, sign, whether it was a target before) of each. of_a, of_b, of_c: where submatrices
    begin.
    """
    most, words, seen = 2**levels, [7**levels], set()
    for rows in zip(*(factors(levels, each) for each in (LEFT, RIGHT, RESULT)), strict=True):
        for each, begins in zip(rows[:2], (of_a, of_b), strict=True):
            first, *others = sorted(np.flatnonzero(each), key=each.__getitem__, reverse=True)
            words.append(begins[first])
            words += [x for at in others for x in (begins[at] - begins[first], each[at])]
            words += [0, 0] * (most - 1 - len(others))
        places = np.flatnonzero(rows[2])
        words.append(len(places))
        for at in places:
            words += [of_c[at], rows[2][at], at in seen]
            seen.add(at)
        words += [0, 0, 0] * (most - len(places))
    return np.array(words, np.int64)


def factors(levels: int, of_one: tuple[tuple[int, ...], ...]) -> list[NDArray[np.int64]]:
    """Return the factors of submatrices when halves are halved again: of each product one for each submatrix."""
    base = np.array(of_one).reshape(-1, 2, 2)
    made = base
    for _ in range(levels - 1):
        made = np.stack([np.kron(outer, inner) for outer in made for inner in base])
    return list(made.reshape(len(made), -1))

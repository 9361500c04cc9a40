"""The kernel that is always there: numpy.matmul on blocks, and NumPy's ufuncs for other semirings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import accumulator
from rma_mm.elements.semiring import Semiring
from rma_mm.kernels.blocked import Blocking, Blocks, bind_blocked, shaped
from rma_mm.kernels.product import LocalOperands, Product

TERMS = 1 << 17  # terms A[i, k] ⊗ B[k, j] that are formed at once: they stay in the second-level cache
TILE = TERMS // 8  # elements of c that they belong to: so many k at least are summed up for one reading of c
MARGIN = 256 << 10  # bytes for small objects, and for the buffers in which NumPy sums


def plan_numpy(a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], conj_a: bool, conj_b: bool) -> Blocking:
    """Return how operands of these types are cut; numpy.matmul takes any strides, but one type and no conjugate."""
    working = accumulator(c)
    return Blocking(working, a != working or conj_a, b != working or conj_b, accumulate=True, spare=True)


def bind_numpy(problem: LocalOperands) -> Product:
    types = problem.a.dtype, problem.b.dtype, problem.c.dtype
    return bind_blocked("numpy", problem, plan_numpy(*types, problem.conj_a, problem.conj_b), _step)


def _step(blocks: Blocks, scalars: tuple[Any, Any], conj: tuple[bool, bool], spare: NDArray[Any]) -> None:
    """Set c = a @ b + beta · c with beta 0 or 1; bool is or-and, since NumPy adds bools by or."""
    a, b, c = blocks
    target = c if scalars[1] == 0 else shaped(spare, c.shape)
    np.matmul(a, b, out=target)
    if target is not c:
        np.add(c, target, out=c)


def terms_bytes(m: int, n: int, k: int, a_dtype: np.dtype[Any], b_dtype: np.dtype[Any], c_dtype: np.dtype[Any]) -> int:
    """Return bytes of the temporary memory of `bind_terms`."""
    rows, columns, depth = _cut(m, n, k)
    working = accumulator(c_dtype)
    panels = rows * depth * (a_dtype != working) + depth * columns * (b_dtype != working)
    return (rows * columns * (depth + (c_dtype != working)) + panels) * working.itemsize + MARGIN


def bind_terms(problem: LocalOperands) -> Product:
    return Product.by("numpy", problem, _sum_terms, problem)


def _cut(m: int, n: int, k: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile of c, and how many k are formed at once."""
    columns = min(n, TILE)
    rows = min(m, TILE // columns)
    return rows, columns, min(k, TERMS // (rows * columns))


def _sum_terms(problem: LocalOperands) -> None:
    m, n, k = problem.sizes
    rows, columns, depth = _cut(m, n, k)
    terms = np.empty((depth, rows * columns), accumulator(problem.c.dtype))
    with np.errstate(all="ignore"):  # wrap-around, infinities and NaN are results here, not surprises
        for top in range(0, m, rows):
            for left in range(0, n, columns):
                _sum_tile(problem, (slice(top, top + rows), slice(left, left + columns)), terms)


def _sum_tile(problem: LocalOperands, at: tuple[slice, slice], terms: NDArray[Any]) -> None:
    """One tile of c over the whole of k: summed in the type of `terms`, and rounded once."""
    semiring, c = problem.semiring, problem.c[at]
    total = c.astype(terms.dtype, copy=False)
    if problem.beta == 0:
        total.fill(semiring.identity(terms.dtype))
    for start in range(0, problem.a.shape[1], len(terms)):
        some = slice(start, start + len(terms))
        _add_terms(semiring, problem.a[at[0], some].T, problem.b[some, at[1]], total, terms)
    if total is not c:
        np.copyto(c, total, casting="unsafe")


def _add_terms(semiring: Semiring, a: NDArray[Any], b: NDArray[Any], total: NDArray[Any], terms: NDArray[Any]) -> None:
    """Add the products of some k to `total` (m, n): a is (k, m), b is (k, n), and `terms` is scratch for them."""
    left, right = (x.astype(terms.dtype, copy=False) for x in (a, b))
    made = terms[: len(a), : total.size].reshape(-1, *total.shape)
    semiring.multiply(left[:, :, None], right[:, None, :], out=made)
    semiring.add(made[0], total, out=made[0])
    semiring.add.reduce(made, axis=0, out=total)

"""Local products: c = alpha · op(a) @ op(b) + beta · c on arrays of one process.

`matmul` multiplies, `bind` prepares a product once, to be called many times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.elements.dtypes import accumulator, result_dtype
from rma_mm.elements.semiring import PLUS_TIMES, Semiring, find_semiring
from rma_mm.errors import DtypeError, OptionError, ShapeError
from rma_mm.kernels.binders import BINDERS, bound
from rma_mm.kernels.blas import plan_blas
from rma_mm.kernels.choice.choice import choose_kernel
from rma_mm.kernels.elementwise import cast, scale
from rma_mm.kernels.epilogue.epilogue import (
    Epilogue,
    EpilogueTile,
    blocks,
    check_epilogue,
    compiles,
    element_type,
    run_all,
)
from rma_mm.kernels.gemm.form import FAST
from rma_mm.kernels.numpy_gemm import plan_numpy, terms_bytes
from rma_mm.kernels.product import Binder, LocalOperands, Product, check_apart, checked
from rma_mm.kernels.symmetric import bind_syrk, triangle


def bind(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], alpha: Any = 1, beta: Any = 0, conj_a: bool = False,
    conj_b: bool = False, kernel: str = "auto", semiring: Semiring = PLUS_TIMES, tile: EpilogueTile | None = None,
    half: bool = False,
) -> Product:
    """Prepare c = alpha · op(a) @ op(b) + beta · c; calling the result does it, without holding the GIL.

    a: (m, k), b: (k, n), c: (m, n), any strides; a and b are cast to the type of c, and op conjugates a complex
    operand if asked. beta = 0 never reads c, alpha = 0 reads neither a nor b (BLAS's rules). The arrays must not
    overlap c. `.kernel` of the result says which kernel was taken. `semiring` says what is done instead of + and ×;
    alpha is then 1, and beta 0 or 1. `closing` is done to c in the end. half: of a square c that is known to become
    symmetric, or Hermitian, just what lies on and below the diagonal is wanted; what is then above is of no use.

    Raises: ShapeError; DtypeError for types without a rule, a scalar that c cannot hold, or a kernel that does not
    multiply this type; OptionError for what a semiring does not have; AlgorithmError for an unknown kernel; ValueError
    for a read-only c.
    """
    problem = checked(a, b, c, alpha, beta, conj_a, conj_b, semiring)
    m, n, k = problem.sizes
    name = choose_kernel(kernel, c.dtype, m, n, k, semiring, a.dtype if a.dtype == b.dtype else None)
    if half:
        return _halved(problem, name, kernel == name, tile)
    if tile is not None:
        return _closed(problem, name, kernel == name, tile)
    return bound_or_scaled(problem, name, sure=kernel == name)


def matmul(
    a: NDArray[Any], b: NDArray[Any], out: NDArray[Any] | None = None, *, alpha: Any = 1, beta: Any = 0,
    compute_dtype: DTypeLike | None = None, kernel: str = "auto", semiring: str = PLUS_TIMES.name,
    epilogue: Epilogue | None = None,
) -> NDArray[Any]:
    """cast(activation(alpha · a @ b + beta · out + bias)) of arrays of this process alone; no MPI. Not collective.

    a: (m, k), b: (k, n), any strides and supported types. out: (m, n), of the type that the result has; needed for
    beta ≠ 0. The other options are those of `rma_mm.matmul`. Raises as `bind`, `result_dtype` and `Epilogue.check` do;
    OptionError for beta without `out`, DtypeError for an `out` of another type, LayoutError for one that overlaps.
    """
    a, b = np.asarray(a), np.asarray(b)
    if not a.ndim == b.ndim == 2:
        raise ShapeError(f"a {a.shape} @ b {b.shape}: both must be matrices, (m, k) and (k, n)")
    check_epilogue(epilogue)
    if epilogue is not None and semiring != PLUS_TIMES.name:
        raise OptionError(f"epilogue: got one with semiring {semiring!r}; it belongs to {PLUS_TIMES.name}")
    product = result_dtype(a.dtype, b.dtype, None if compute_dtype is None else element_type(compute_dtype))
    shape = a.shape[0], b.shape[1]
    stored = product if epilogue is None else epilogue.check(shape, product)
    if out is None and beta != 0:
        raise OptionError(f"beta: got {beta}; beta other than 0 adds to out, so pass out")
    if out is not None and (not isinstance(out, np.ndarray) or out.dtype != stored):
        got = out.dtype.name if isinstance(out, np.ndarray) else type(out).__name__
        raise DtypeError(f"out: got {got}; the result is {stored.name}: pass an array of that type, or none")
    out = np.empty(shape, stored) if out is None else out
    check_apart(a, b, out)
    working = product if epilogue is None else accumulator(product)
    total = out if stored == working else np.empty(out.shape, working)
    if total is not out and beta != 0:
        cast(out, total)
    tile = None if epilogue is None else _closing(epilogue, out, working, kernel)
    bind(a, b, total, alpha, beta, kernel=kernel, semiring=find_semiring(semiring), tile=tile)()
    return out


def _closing(epilogue: Epilogue, out: NDArray[Any], summed: np.dtype[Any], kernel: str) -> EpilogueTile:
    bias = None if epilogue.bias is None else epilogue.bias.astype(summed)
    return EpilogueTile(out, bias, epilogue.per, epilogue.activation, compiles(kernel, out.shape))


def bound_or_scaled(
    problem: LocalOperands, name: str, sure: bool, by: tuple[dict[str, Binder], dict[str, Binder]] = BINDERS
) -> Product:
    """Return the product, or only the scaling of c if nothing is multiplied. The rest is as of `bound`."""
    m, n, k = problem.sizes
    c, semiring = problem.c, problem.semiring
    if m and n and k and problem.alpha != 0:
        return bound(problem, name, sure, by)
    nothing = semiring.identity(c.dtype)
    only_scale = (c.fill, nothing) if problem.beta == 0 else (scale, c, problem.beta)
    return Product.by(name, problem, *only_scale)


def _closed(problem: LocalOperands, name: str, sure: bool, tile: EpilogueTile) -> Product:
    """Return the product in blocks of c, each of them closed while it is in the cache."""
    steps: list[Callable[[], None]] = []
    for rows, cols in blocks(problem.c):
        c = problem.c[rows, cols]
        block = replace(problem, a=problem.a[rows], b=problem.b[:, cols], c=c)
        product = bound_or_scaled(block, name, sure)
        steps += [product, tile.part(rows, cols).bound(c)]
    return Product.by(product.kernel if steps else name, problem, run_all, steps)


def _halved(problem: LocalOperands, name: str, sure: bool, tile: EpilogueTile | None) -> Product:
    """Return the product on and below the diagonal, in one call of BLAS or by blocks; and all of c closed."""
    whole = bind_syrk(problem) if name == "blas" else None
    products = [whole] if whole else [bound_or_scaled(part, name, sure) for part in triangle(problem)]
    closings = [] if tile is None else [tile.part(*at).bound(problem.c[at]) for at in blocks(problem.c)]
    return Product.by(products[0].kernel if products else name, problem, run_all, [*products, *closings])


def scratch_bytes(
    m: int, n: int, k: int, a_dtype: np.dtype[Any], b_dtype: np.dtype[Any], c_dtype: np.dtype[Any],
    kernel: str = "auto", conj: bool = True, semiring: Semiring = PLUS_TIMES,
) -> int:
    """Upper bound of the temporary memory of one bound product with unit strides, in bytes.

    All products of a thread share it: take the largest, not the sum. 0 if BLAS takes the operands as they are;
    `conj` says whether an operand may be conjugated, which only BLAS does without a copy.
    """
    if not (m and n and k):
        return 0
    name = choose_kernel(kernel, c_dtype, m, n, k, semiring, a_dtype if a_dtype == b_dtype else None)
    if name == "blas":
        blocking = plan_blas(a_dtype, b_dtype, c_dtype)
        return 0 if blocking is None else blocking.scratch_bytes(m, n, k)
    if name in ("numba", *FAST):
        from rma_mm.kernels.gemm.product import scratch_of

        return scratch_of(semiring, m, n, k, a_dtype, b_dtype, c_dtype, levels=FAST.get(name, 0))
    if not semiring.is_arithmetic:
        return terms_bytes(m, n, k, a_dtype, b_dtype, c_dtype)
    return plan_numpy(a_dtype, b_dtype, c_dtype, conj, conj).scratch_bytes(m, n, k)

"""Local products of batches: c[…] = alpha · op(a[…]) @ op(b[…]) + beta · c[…], prepared once and done in few calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BLAS_TYPES
from rma_mm.elements.semiring import PLUS_TIMES, Semiring
from rma_mm.kernels import local
from rma_mm.kernels.binders import bind_numba
from rma_mm.kernels.choice.choice import choose_kernel
from rma_mm.kernels.epilogue.epilogue import run_all
from rma_mm.kernels.local import bind, bound_or_scaled
from rma_mm.kernels.numpy_gemm import bind_numpy, bind_terms, plan_numpy
from rma_mm.kernels.product import Binder, LocalOperands, Product, check_apart, checked
from rma_mm.kernels.threads import get_threads, run_concurrently, using_threads

Array = NDArray[Any]
Call = Callable[[], None]
Types = tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]]
SMALL = 1 << 24  # multiply-adds of one product up to which threads share the batch rather than each product
WORTH = 1 << 20  # multiply-adds from which a thread of its own pays


def bind_batch(
    a: Array, b: Array, c: Array, alpha: Any = 1, beta: Any = 0, conj_a: bool = False, conj_b: bool = False,
    kernel: str = "auto", semiring: Semiring = PLUS_TIMES,
) -> Call:
    """Prepare the products of a batch; calling the result does them, without holding the GIL.

    a: (…, m, k), b: (…, k, n), whose leading dimensions broadcast to those of c: (…, m, n). Any strides. The rest is as
    of `bind`, which says what is raised. Where b is one matrix, all are one product of (… · m, k) if a and c lie so.
    """
    batch = c.shape[:-2]
    a, b = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    check_apart(a, b, c)
    if not prod(batch):
        return partial(run_all, [])
    options = (alpha, beta, conj_a, conj_b, kernel, semiring)
    if not batch:
        return bind(a, b, c, *options)
    if all(step == 0 or extent == 1 for step, extent in zip(b.strides, batch, strict=False)):
        flat_a, flat_c = _flat(a), _flat(c)
        if flat_a is not None and flat_c is not None:
            return bind(flat_a, b[(0,) * len(batch)], flat_c, *options)
    a, b, c = _longest_last(_joined([a, b, c]))
    rows, one_type = prod(c.shape[:-1]), a.dtype if a.dtype == b.dtype else None
    name = choose_kernel(kernel, c.dtype, rows, c.shape[-1], a.shape[-1], semiring, one_type)
    steps: list[Call] = []
    for at in np.ndindex(c.shape[:-3]):
        problem = checked(a[at], b[at], c[at], alpha, beta, conj_a, conj_b, semiring, dims=3)
        steps.append(bound_or_scaled(problem, name, kernel == name, BATCHED))
    return steps[0] if len(steps) == 1 else partial(run_all, steps)


def scratch_bytes(
    count: int, m: int, n: int, k: int, types: Types, alpha: Any, beta: Any, conj: bool, kernel: str, semiring: Semiring
) -> int:
    """Upper bound of the temporary memory of `count` products that `bind_batch` binds, with unit strides, in bytes.

    types: of a, b and c. conj: whether one of them may be conjugated.
    """
    if not (count and m and n and k):
        return 0
    flat = local.scratch_bytes(count * m, n, k, *types, kernel, conj, semiring)
    if kernel == "numba":
        from rma_mm.kernels.gemm.product import scratch_of

        return max(flat, scratch_of(semiring, m, n, k, *types, count))
    if not semiring.is_arithmetic:
        return max(flat, local.scratch_bytes(m, n, k, *types, kernel, conj, semiring))
    threads = get_threads()
    each = plan_numpy(*types, conj, conj).scratch_bytes(m, n, k, -(-count // threads))
    return flat if _is_direct(*types, alpha, beta, conj) else max(flat, each * threads)


def _flat(x: Array) -> Array | None:
    """Return `x` as one matrix of all its matrices' rows, or None if its memory does not allow that."""
    dims = [(extent, step) for extent, step in zip(x.shape[:-1], x.strides[:-1], strict=True) if extent != 1]
    lies_so = all(step == below * inner for (_, step), (inner, below) in pairwise(dims))
    if not lies_so:
        return None
    step = dims[-1][1] if dims else x.strides[-2]
    return np.lib.stride_tricks.as_strided(x, (prod(x.shape[:-1]), x.shape[-1]), (step, x.strides[-1]))


def _joined(arrays: list[Array]) -> list[Array]:
    """Return the same with neighbouring dimensions of the batch as one, wherever all arrays lie so."""
    dim = 0
    while dim < arrays[0].ndim - 3:
        inner = arrays[0].shape[dim + 1]
        if all(x.strides[dim] == inner * x.strides[dim + 1] or 1 in x.shape[dim : dim + 2] for x in arrays):
            arrays = [_without(x, dim) for x in arrays]
        else:
            dim += 1
    return arrays


def _without(x: Array, dim: int) -> Array:
    """Two dimensions as one, which they lie as."""
    outer, inner = x.shape[dim : dim + 2]
    step = x.strides[dim] if inner == 1 else x.strides[dim + 1]
    shape, strides = (*x.shape[:dim], outer * inner), (*x.strides[:dim], step)
    return np.lib.stride_tricks.as_strided(x, (*shape, *x.shape[dim + 2 :]), (*strides, *x.strides[dim + 2 :]))


def _longest_last(arrays: list[Array]) -> list[Array]:
    """Return the same with the longest dimension of the batch in front of the matrices."""
    longest = int(np.argmax(arrays[0].shape[:-2]))
    return [np.moveaxis(x, longest, -3) for x in arrays]


def _bind_matmul(problem: LocalOperands) -> Product:
    """The products by numpy.matmul, whose loop over a batch is compiled; threads share the batch where they can."""
    p, one = problem, prod(problem.sizes)
    is_blas = p.c.dtype in BLAS_TYPES
    threads = min(get_threads(), p.count, one * p.count // WORTH) if one <= SMALL or not is_blas else 1
    if threads < 2:
        return _matmul(p)
    parts = (p.some(slice(p.count * n // threads, p.count * (n + 1) // threads)) for n in range(threads))
    return Product.by("numpy", p, _shared, [_matmul(part) for part in parts])


def _matmul(problem: LocalOperands) -> Product:
    """Return the products by one call of numpy.matmul where that does all, by blocks of some of them elsewhere."""
    p = problem
    if _is_direct(p.a.dtype, p.b.dtype, p.c.dtype, p.alpha, p.beta, p.conj_a or p.conj_b):
        return Product.by("numpy", p, _call, p.a, p.b, p.c)
    return bind_numpy(p)


def _is_direct(a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], alpha: Any, beta: Any, conj: bool) -> bool:
    is_own = a == b == c and (c in BLAS_TYPES or c.kind in "biu")
    return bool(is_own and alpha == 1 and beta == 0 and not conj)


def _call(a: Array, b: Array, c: Array) -> None:
    with np.errstate(all="ignore"):
        np.matmul(a, b, out=c)


def _shared(calls: list[Call]) -> None:
    """Each call by a thread of its own, which multiplies by itself."""
    with using_threads(1):
        run_concurrently(calls)


def _one_by_one(problem: LocalOperands) -> Product:
    p = problem
    return Product.by("numpy", p, run_all, [
        bind_terms(replace(p, a=p.a[n], b=p.b[n], c=p.c[n])) for n in range(p.count)
    ])


BATCHED: tuple[dict[str, Binder], dict[str, Binder]] = (
    {"blas": _bind_matmul, "numba": bind_numba, "numpy": _bind_matmul},
    {"numba": bind_numba, "numpy": _one_by_one},
)
"""The ways to do products of a batch, by name: by + and ×, for which NumPy calls its own BLAS, and by others."""

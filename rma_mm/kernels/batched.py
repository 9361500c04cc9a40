"""Local products of batches: c[…] = alpha · op(a[…]) @ op(b[…]) + beta · c[…], prepared once and done in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BLAS_TYPES
from rma_mm.elements.semiring import PLUS_TIMES, Semiring
from rma_mm.kernels.epilogue.epilogue import in_turn
from rma_mm.kernels.local import bind
from rma_mm.kernels.product import check_apart
from rma_mm.kernels.threads import get_threads, together, using_threads

Array = NDArray[Any]
Call = Callable[[], None]
SMALL = 1 << 24
"""Multiply-adds of one product up to which threads share the batch rather than each product."""
WORTH = 1 << 20
"""Multiply-adds from which a thread of its own pays."""


def bind_batch(
    a: Array, b: Array, c: Array, alpha: Any = 1, beta: Any = 0, conj_a: bool = False, conj_b: bool = False,
    kernel: str = "auto", semiring: Semiring = PLUS_TIMES,
) -> Call:  # fmt: skip
    """Prepare the products of a batch; calling the result does them, without holding the GIL.

    a: (…, m, k), b: (…, k, n), whose leading dimensions broadcast to those of c: (…, m, n). Any strides. The rest is as
    of `bind`, which says what is raised. Where b is one matrix, all are one product of (… · m, k) if a and c lie so.
    """
    batch = c.shape[:-2]
    a, b = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    check_apart(a, b, c)
    if not prod(batch):
        return partial(in_turn, [])
    options = (alpha, beta, conj_a, conj_b, kernel, semiring)
    if not batch or all(step == 0 or extent == 1 for step, extent in zip(b.strides, batch, strict=False)):
        flat_a, flat_c = _flat(a), _flat(c)
        if flat_a is not None and flat_c is not None:
            return bind(flat_a, b[(0,) * len(batch)], flat_c, *options)
    is_plain = a.dtype == b.dtype == c.dtype and c.dtype in BLAS_TYPES and semiring.is_arithmetic
    if not is_plain or kernel == "numba" or 0 in (*c.shape, a.shape[-1]):
        steps = [bind(a[at], b[at], c[at], *options) for at in np.ndindex(*batch)]
        return partial(in_turn, steps)
    at = (0,) * len(batch)
    bind(a[at], b[at], c[at], *options)  # which raises what there is to be raised
    return _by_numpy(a, b, c, alpha, beta, conj_a and c.dtype.kind == "c", conj_b and c.dtype.kind == "c")


def _flat(x: Array) -> Array | None:
    """`x` as a matrix whose rows are those of its matrices one behind the other; None where it does not lie so."""
    dims = [(extent, step) for extent, step in zip(x.shape[:-1], x.strides[:-1], strict=True) if extent != 1]
    lies_so = all(step == below * inner for (_, step), (inner, below) in pairwise(dims))
    if not lies_so:
        return None
    step = dims[-1][1] if dims else x.strides[-2]
    return np.lib.stride_tricks.as_strided(x, (prod(x.shape[:-1]), x.shape[-1]), (step, x.strides[-1]))


def _by_numpy(a: Array, b: Array, c: Array, alpha: Any, beta: Any, conj_a: bool, conj_b: bool) -> Call:
    """The products by numpy.matmul, whose loop over a batch is compiled; threads share the batch where they can."""
    one = c.shape[-2] * c.shape[-1] * a.shape[-1]
    batch = c.shape[:-2]
    dim = int(np.argmax(batch))
    threads = min(get_threads(), batch[dim], one * prod(batch) // WORTH) if one <= SMALL else 1
    make = partial(_call, alpha=alpha, beta=beta, conj_a=conj_a, conj_b=conj_b)
    if threads < 2:
        return make(a, b, c)
    calls = []
    for n in range(threads):
        part = (*(slice(None),) * dim, slice(batch[dim] * n // threads, batch[dim] * (n + 1) // threads))
        calls.append(make(a[part], b[part], c[part]))
    return partial(_shared, calls)


def _shared(calls: list[Call]) -> None:
    """Each call by a thread of its own, which multiplies by itself."""
    with using_threads(1):
        together(calls)


def _call(a: Array, b: Array, c: Array, alpha: Any, beta: Any, conj_a: bool, conj_b: bool) -> Call:
    is_direct = not conj_a and not conj_b and alpha == 1 and beta == 0

    def multiply() -> None:
        with np.errstate(all="ignore"):
            if is_direct:
                np.matmul(a, b, out=c)
                return
            made = np.matmul(np.conj(a) if conj_a else a, np.conj(b) if conj_b else b)
            if alpha != 1:
                np.multiply(made, c.dtype.type(alpha), out=made)
            if beta != 0:
                np.add(made, np.multiply(c, c.dtype.type(beta)), out=made)
            np.copyto(c, made)

    return multiply

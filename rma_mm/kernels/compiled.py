"""A matrix product compiled by Numba, for the types that no BLAS multiplies.

Panels are contiguous and of one type, so the compiler sees six functions in all. The innermost loop adds eight
rows of b to one row of c: eight multiply-adds for one load and one store of c, which vectorises for every type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import AlgorithmError
from rma_mm.kernels.blocked import Blocking, Blocks, bind_blocked
from rma_mm.kernels.dtypes import accumulator
from rma_mm.kernels.product import Operands, Product

_COLUMNS = 512  # eight rows of b this wide stay in the first-level cache


def add_product(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> None:
    """Add a @ b to c, for row-major a: (m, k), b: (k, n), c: (m, n) of one type. Written for a compiler."""
    m, k = a.shape
    n = b.shape[1]
    whole = k - k % 8
    for left in range(0, n, _COLUMNS):
        right = min(n, left + _COLUMNS)
        for p in range(0, whole, 8):
            b0, b1, b2, b3 = b[p, left:right], b[p + 1, left:right], b[p + 2, left:right], b[p + 3, left:right]
            b4, b5, b6, b7 = b[p + 4, left:right], b[p + 5, left:right], b[p + 6, left:right], b[p + 7, left:right]
            for i in range(m):
                row = c[i, left:right]
                a0, a1, a2, a3 = a[i, p], a[i, p + 1], a[i, p + 2], a[i, p + 3]
                a4, a5, a6, a7 = a[i, p + 4], a[i, p + 5], a[i, p + 6], a[i, p + 7]
                for j in range(right - left):
                    low = a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j]
                    high = a4 * b4[j] + a5 * b5[j] + a6 * b6[j] + a7 * b7[j]
                    row[j] += low + high
        for p in range(whole, k):
            b0 = b[p, left:right]
            for i in range(m):
                row, a0 = c[i, left:right], a[i, p]
                for j in range(right - left):
                    row[j] += a0 * b0[j]


@cache
def _compiler() -> Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]:
    try:
        import numba
    except ImportError as error:
        raise AlgorithmError(f"kernel 'numba' needs Numba, which cannot be imported ({error}); use 'numpy'") from None

    # no on-disk cache: ranks that compile at once would race for its files
    dispatcher: Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None] = numba.njit(
        nogil=True, error_model="numpy", fastmath={"contract"}
    )(add_product)
    return dispatcher


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which the compiled loops sum a result of type `dtype`.

    Integers are summed signed and at least 32 bits wide, which is exact modulo 2^bits; bool counts, and
    a count that is not zero is true.
    """
    if dtype.kind in "biu":
        return np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)
    return accumulator(dtype)


def plan_numba(c: np.dtype[Any]) -> Blocking:
    """How a product with a result of type `c` is cut: every block is copied."""
    return Blocking(working_dtype(c), pack_a=True, pack_b=True, accumulate=True, spare=True)


def bind_numba(problem: Operands) -> Product:
    """The product by compiled loops, for every supported type; compiles here, not in the first call.

    Raises: AlgorithmError without Numba.
    """
    blocking = plan_numba(problem.c.dtype)
    one = np.zeros((1, 1), blocking.working)
    _compiler()(one, one, one.copy())
    return bind_blocked("numba", problem, blocking, _step)


def _step(blocks: Blocks, scalars: tuple[Any, Any], conj: tuple[bool, bool], spare: NDArray[Any]) -> None:
    """Set c = a @ b + beta · c with beta 0 or 1."""
    a, b, c = blocks
    if scalars[1] == 0:
        c.fill(0)
    _compiler()(a, b, c)

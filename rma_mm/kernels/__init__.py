"""Local products: c = alpha · op(a) @ op(b) + beta · c on arrays of one process.

`bind` prepares a product once, to be called many times. `KERNELS` holds the ways to do it: "blas" for the four
BLAS types and what is cast into them, "numba" and "numpy" for every supported type.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import AlgorithmError
from rma_mm.kernels.blas import bind_blas, check_type, fits, library, plan_blas
from rma_mm.kernels.compiled import bind_numba, plan_numba
from rma_mm.kernels.elementwise import scale
from rma_mm.kernels.plain import bind_numpy, plan_numpy
from rma_mm.kernels.product import Binder, Operands, Product, checked

__all__ = ["COMPILE_FROM", "KERNELS", "Product", "bind", "choose_kernel", "scratch_bytes"]

KERNELS: dict[str, Binder] = {"blas": bind_blas, "numba": bind_numba, "numpy": bind_numpy}
"""The ways to do a local product, by name."""

COMPILE_FROM = 2**27
"""m·n·k from which compiling (most of a second) is won back where no BLAS fits."""


def choose_kernel(kernel: str, dtype: np.dtype[Any], m: int, n: int, k: int) -> str:
    """The kernel that serves a product of result type `dtype` when `kernel`, or "auto", was asked for.

    A product that is done in pieces is judged by its whole size. Raises: AlgorithmError for a name that is unknown
    or cannot be served here, DtypeError for a kernel that does not multiply this type.
    """
    if kernel not in ("auto", *KERNELS):
        raise AlgorithmError(f"kernel {kernel!r} is unknown; use one of {', '.join(['auto', *KERNELS])}")
    compiles = find_spec("numba") is not None
    if kernel == "numba" and not compiles:
        raise AlgorithmError("kernel 'numba' needs Numba, which is not installed: pip install numba, or use 'numpy'")
    if kernel == "blas":
        check_type(dtype)
    if kernel == "blas" or (kernel == "auto" and fits(dtype)):
        return "blas" if library() is not None else "numpy"
    if kernel == "auto":
        return "numba" if compiles and m * n * k >= COMPILE_FROM else "numpy"
    return kernel


def bind(
    a: NDArray[Any],
    b: NDArray[Any],
    c: NDArray[Any],
    alpha: Any = 1,
    beta: Any = 0,
    conj_a: bool = False,
    conj_b: bool = False,
    kernel: str = "auto",
) -> Product:
    """Prepare c = alpha · op(a) @ op(b) + beta · c; calling the result does it, without holding the GIL.

    a: (m, k), b: (k, n), c: (m, n), any strides; a and b are cast to the type of c, and op conjugates a complex
    operand if asked. beta = 0 never reads c, alpha = 0 reads neither a nor b (BLAS's rules). The arrays must not
    overlap c. `.kernel` of the result says which kernel was taken.

    Raises: ShapeError; DtypeError for types without a rule, a scalar that c cannot hold, or a kernel that does not
    multiply this type; AlgorithmError for an unknown kernel; ValueError for a read-only c.
    """
    problem = checked(a, b, c, alpha, beta, conj_a, conj_b)
    m, n, k = problem.sizes
    name = choose_kernel(kernel, c.dtype, m, n, k)
    if m and n and k and problem.alpha != 0:
        return _bound(problem, name, sure=kernel == name)
    only_scale = Product(scale, c, problem.beta)
    only_scale.kernel = name
    only_scale.keep = (problem,)
    return only_scale


def _bound(problem: Operands, name: str, sure: bool) -> Product:
    """The product by kernel `name`, or by numpy where Numba turns out broken and nobody insisted on it."""
    try:
        return KERNELS[name](problem)
    except AlgorithmError:
        if sure:
            raise
        return bind_numpy(problem)


def scratch_bytes(
    m: int,
    n: int,
    k: int,
    a_dtype: np.dtype[Any],
    b_dtype: np.dtype[Any],
    c_dtype: np.dtype[Any],
    kernel: str = "auto",
    conj: bool = True,
) -> int:
    """Upper bound of the temporary memory of one bound product with unit strides, in bytes.

    All products of a thread share it: take the largest, not the sum. 0 where BLAS takes the operands as they are;
    `conj` says whether an operand may be conjugated, which only BLAS does without a copy.
    """
    if not (m and n and k):
        return 0
    name = choose_kernel(kernel, c_dtype, m, n, k)
    if name == "blas":
        blocking = plan_blas(a_dtype, b_dtype, c_dtype)
        return 0 if blocking is None else blocking.scratch_bytes(m, n, k)
    if name == "numba":
        return plan_numba(c_dtype).scratch_bytes(m, n, k)
    return plan_numpy(a_dtype, b_dtype, c_dtype, conj, conj).scratch_bytes(m, n, k)

"""Choose the kernel of a local product: BLAS for the types that it has, generated code for the others.

Where both multiply a type, large products are done by the one that was measured to be faster on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any

import numpy as np

from rma_mm.elements.dtypes import is_half
from rma_mm.elements.semiring import PLUS_TIMES, Semiring
from rma_mm.errors import AlgorithmError, nearest
from rma_mm.kernels.blas import check_type, fits, library
from rma_mm.kernels.cache import cache_folder
from rma_mm.kernels.choice.rates import FEW_ROWS, THIN, measured, rates, shape_class
from rma_mm.kernels.compiling import is_installed, works
from rma_mm.kernels.gemm.form import FAST, cuts, emitted, has_fast, no_code

NAMES = ("blas", "numba", "numpy", *FAST)  # the kernels there are

COMPILE_FROM = 2**27  # m·n·k from which code is worth being compiled where no BLAS fits, or where BLAS packs much
COMPARE_FROM = 2**32  # m·n·k from which it is elsewhere
COMPARE_THIN_FROM = 2**30  # the same for small k, where generated code, which does not read c, is ahead by more
PAYS_FROM = 2**42
"""m·n·k of all that will be multiplied from which a comparison, of about 4 s, pays: it may save some per cent."""
PAYS_PACKED_FROM = 2**39  # the same where BLAS packs much: it may save half
PAYS_CODE_FROM = 2**30  # the same of compiling, of about 3 s, where no BLAS fits: it may save nine tenths
AHEAD = 1.02  # how much faster generated code must be: BLAS needs no scratch
_work_ahead: ContextVar[float] = ContextVar("work_ahead", default=inf)


def choose_kernel(
    kernel: str, dtype: np.dtype[Any], m: int, n: int, k: int, semiring: Semiring = PLUS_TIMES,
    operands: np.dtype[Any] | None = None,
) -> str:
    """Return the kernel that serves a product that is summed in `dtype` when `kernel`, or "auto", was asked for.

    A product that is done in pieces is judged by its whole size. operands: the type of both, where they have one.
    Raises: AlgorithmError for a name that is unknown or cannot be served here, DtypeError for a kernel that does not
    multiply this type.
    """
    if kernel not in ("auto", *NAMES):
        known = ", ".join(("auto", *(name for name in NAMES if name not in FAST)))
        raise AlgorithmError(f"kernel {kernel!r} is unknown; {nearest(kernel, NAMES)}use one of {known}")
    if kernel in ("numba", *FAST) and not is_installed():
        what, instead = (f"fast={FAST[kernel]}", "0") if kernel in FAST else ("kernel 'numba'", "'numpy'")
        raise AlgorithmError(f"{what} needs Numba, which is not installed: pip install numba, or use {instead}")
    if kernel in FAST:
        return kernel if has_fast(dtype, operands) and cuts(FAST[kernel], (m, n, k)) else "numba"
    if kernel == "blas":
        _check_semiring(semiring)
        check_type(dtype)
    has_code = emitted(semiring, dtype) is not None
    if kernel == "numba" and not has_code:
        raise AlgorithmError(no_code(semiring, dtype))
    pays = m * n * k >= COMPILE_FROM and work_ahead() >= PAYS_CODE_FROM
    worth = kernel == "numba" or (kernel == "auto" and pays)
    if kernel == "blas" or (kernel == "auto" and semiring.is_arithmetic and fits(dtype)):
        if library() is None:
            return "numpy"
        return _faster(dtype if operands is None else operands, m, n, k) if kernel == "auto" else "blas"
    return "numba" if worth and has_code and works() else "numpy"


@contextmanager
def working_once(work: float) -> Iterator[None]:
    """Measure meanwhile only what saves more than it takes, where all that will be multiplied is known.

    work: its multiply-adds.
    """
    before = _work_ahead.set(work)
    try:
        yield
    finally:
        _work_ahead.reset(before)


def work_ahead() -> float:
    """Return the multiply-adds of all that will be multiplied, as `working_once` was told; else infinity."""
    return _work_ahead.get()


def priced(kernel: str) -> str:
    """Return the kernel by whose measured speed products of `kernel` are priced."""
    return "numba" if kernel in FAST else kernel


def _faster(dtype: np.dtype[Any], m: int, n: int, k: int) -> str:
    """Return BLAS or generated code: of products that are compared, the faster one on this machine.

    That is measured if it is not known, and pays; but for what BLAS does well only where it can be kept, and no machine
    is named.
    """
    if not _is_compared(dtype, m, n, k):
        return "blas"
    name, found = shape_class(m, n, k), rates(dtype) or {}
    if (name not in found and not _may_measure(dtype, m, n, k)) or not works():
        return "blas"
    by_kernel = (found if name in found else measured(dtype, [name]))[name]
    return "numba" if by_kernel["numba"] > AHEAD * by_kernel["blas"] else "blas"


def _may_measure(dtype: np.dtype[Any], m: int, n: int, k: int) -> bool:
    packs_much = _packs_much(dtype, m, n, k)
    if work_ahead() < (PAYS_PACKED_FROM if packs_much else PAYS_FROM):
        return False
    return packs_much or (cache_folder() is not None and not os.environ.get("RMA_MM_MACHINE"))


def _is_compared(dtype: np.dtype[Any], m: int, n: int, k: int) -> bool:
    """True if the kernel of a product of this type and size is the faster one of two."""
    if _packs_much(dtype, m, n, k):
        return m * n * k >= COMPILE_FROM
    is_thin = shape_class(m, n, k) == THIN and dtype.kind == "f"
    return m * n * k >= (COMPARE_THIN_FROM if is_thin else COMPARE_FROM)


def _packs_much(dtype: np.dtype[Any], m: int, n: int, k: int) -> bool:
    """True if BLAS must convert the operands of a product, or packs a long one for a few rows."""
    return is_half(dtype) or (shape_class(m, n, k) == FEW_ROWS and dtype.kind == "f")


def _check_semiring(semiring: Semiring) -> None:
    """Refuse a semiring that BLAS cannot compute."""
    if not semiring.is_arithmetic:
        raise AlgorithmError(
            f"kernel 'blas' multiplies by + and ×, and not by {semiring.name}; use auto, numba or numpy"
        )


def reason(kernel: str, dtype: np.dtype[Any], m: int, n: int, k: int, semiring: Semiring = PLUS_TIMES) -> str:
    """Return why `kernel` was chosen for operands of type `dtype`; empty where no measurement decided."""
    consulted = semiring.is_arithmetic and kernel != "numpy" and _is_compared(dtype, m, n, k)
    found = (rates(dtype) or {}).get(shape_class(m, n, k)) if consulted else None
    if found is None:
        return ""
    figures = ", ".join(f"{other} {rate:.0f}" for other, rate in found.items())
    return f"{figures} GF/s on products of this kind here"

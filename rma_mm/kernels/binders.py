"""The ways to do a local product, each by its name."""

from __future__ import annotations

from functools import partial

from rma_mm.errors import AlgorithmError
from rma_mm.kernels.blas import bind_blas
from rma_mm.kernels.gemm.form import FAST
from rma_mm.kernels.numpy_gemm import bind_numpy, bind_terms
from rma_mm.kernels.product import Binder, LocalOperands, Product


def bind_numba(problem: LocalOperands, levels: int = 0) -> Product:
    """Return the product by generated code. Raises: AlgorithmError if Numba cannot be imported.

    levels: how often Strassen's algorithm may cut it.
    """
    from rma_mm.kernels.gemm.fast import bind_fast

    try:
        return bind_fast(levels, problem)
    except ImportError as error:
        raise AlgorithmError(f"kernel 'numba' needs Numba, which cannot be imported ({error}); use 'numpy'") from None


KERNELS: dict[str, Binder] = {"blas": bind_blas, "numba": bind_numba, "numpy": bind_numpy}
"""The ways to do a local product, by name."""

FAST_KERNELS: dict[str, Binder] = {name: partial(bind_numba, levels=levels) for name, levels in FAST.items()}
"""The ways to do one by fewer multiplications, by name."""

SEMIRING_KERNELS: dict[str, Binder] = {"numba": bind_numba, "numpy": bind_terms}
"""The ways to do one by other operations than + and ×, by name."""

BINDERS = (KERNELS | FAST_KERNELS, SEMIRING_KERNELS)


def bound(
    problem: LocalOperands, name: str, sure: bool, by: tuple[dict[str, Binder], dict[str, Binder]] = BINDERS
) -> Product:
    """Return the product by kernel `name`; if Numba turns out broken and was not requested, use numpy."""
    binders = by[0] if problem.semiring.is_arithmetic else by[1]
    try:
        return binders[name](problem)
    except AlgorithmError:
        if sure:
            raise
        return binders["numpy"](problem)

"""A matrix as other libraries want one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import OptionError

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


def linear_operator(matrix: Any) -> LinearOperator:
    """Return a DistMatrix as `DistMatrix.aslinearoperator` says. Raises OptionError if SciPy is not installed."""
    try:
        from scipy.sparse.linalg import LinearOperator
    except ImportError:
        raise OptionError("aslinearoperator: SciPy is not installed: pip install scipy") from None

    def times(x: NDArray[Any]) -> NDArray[Any]:
        return _product(matrix, x)

    def adjoint(x: NDArray[Any]) -> NDArray[Any]:
        return _product(matrix.T, np.conj(x)).conj()

    calls = {"matvec": times, "matmat": times, "rmatvec": adjoint, "rmatmat": adjoint}
    return LinearOperator(matrix.shape, dtype=matrix.dtype, **calls)


def _product(matrix: Any, x: NDArray[Any]) -> NDArray[Any]:
    """Return the product with x, a vector or several, on every rank. Collective."""
    columns = x if x.ndim == 2 else x[:, None]
    whole: NDArray[Any] = (matrix @ columns).to_numpy()
    return whole if x.ndim == 2 else whole.ravel()

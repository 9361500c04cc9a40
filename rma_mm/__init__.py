"""Distributed dense matrix multiplication by one-sided RMA.

    import rma_mm
    mesh = rma_mm.Mesh((2, 2))
    C = rma_mm.matmul(A, B, mesh)

Public names are loaded when first used, so that the planning floors work without MPI.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "ChainPlan": ".runtime.chain",
    "DistMatrix": ".runtime.matrix",
    "Epilogue": ".kernels.epilogue",
    "Mesh": ".runtime.mesh",
    "Plan": ".runtime.plan",
    "list_algorithms": ".algorithms",
    "load": ".runtime.transport",
    "matmul": ".runtime.product",
    "plan": ".runtime.product",
    "plan_chain": ".runtime.chain",
}

if TYPE_CHECKING:
    from .algorithms import list_algorithms
    from .kernels.epilogue import Epilogue
    from .runtime.chain import ChainPlan, plan_chain
    from .runtime.matrix import DistMatrix
    from .runtime.mesh import Mesh
    from .runtime.plan import Plan
    from .runtime.product import matmul, plan
    from .runtime.transport import load

__all__ = [
    "ChainPlan",
    "DistMatrix",
    "Epilogue",
    "Mesh",
    "Plan",
    "__version__",
    "list_algorithms",
    "load",
    "matmul",
    "plan",
    "plan_chain",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rma_mm' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_PUBLIC[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

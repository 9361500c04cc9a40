"""Distributed dense matrix multiplication by one-sided RMA.

    import rma_mm
    mesh = rma_mm.Mesh((2, 2))
    C = rma_mm.matmul(A, B, mesh)

Public names are loaded when first used, so that the planning floors work without MPI.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].partition(".")[0] == __name__ and not sys.flags.safe_path:
    del sys.path[0]  # `python -m rma_mm.run` in a folder of data must not import what lies there, as json.py

__version__ = "0.2.0"

_MODULES = ("errors", "layouts")
_PUBLIC = {
    "ChainPlan": ".runtime.chains.chain",
    "DistArray": ".runtime.matrices.array",
    "DistMatrix": ".runtime.matrices.matrix",
    "Epilogue": ".kernels.epilogue.epilogue",
    "Mesh": ".runtime.ranks.mesh",
    "Plan": ".runtime.products.plan",
    "closure": ".runtime.graphs.closure",
    "default_mesh": ".runtime.ranks.mesh",
    "einsum": ".runtime.einsum.einsum",
    "eye": ".runtime.matrices.creation",
    "list_algorithms": ".algorithms",
    "load": ".runtime.matrices.array",
    "matmul": ".runtime.products.matmul",
    "ones": ".runtime.matrices.creation",
    "open": ".runtime.files.opened",
    "plan": ".runtime.products.matmul",
    "plan_chain": ".runtime.chains.chain",
    "pretend": ".runtime.pretended.pretend",
    "random": ".runtime.matrices.creation",
    "register": ".algorithms",
    "trace": ".runtime.reports.traced",
    "verify": ".runtime.products.verifying",
    "zeros": ".runtime.matrices.creation",
}

if TYPE_CHECKING:
    from rma_mm import errors, layouts
    from rma_mm.algorithms import list_algorithms, register
    from rma_mm.kernels.epilogue.epilogue import Epilogue
    from rma_mm.runtime.chains.chain import ChainPlan, plan_chain
    from rma_mm.runtime.einsum.einsum import einsum
    from rma_mm.runtime.files.opened import open  # noqa: A004
    from rma_mm.runtime.graphs.closure import closure
    from rma_mm.runtime.matrices.array import DistArray, load
    from rma_mm.runtime.matrices.creation import eye, ones, random, zeros
    from rma_mm.runtime.matrices.matrix import DistMatrix
    from rma_mm.runtime.pretended.pretend import pretend
    from rma_mm.runtime.products.matmul import matmul, plan
    from rma_mm.runtime.products.plan import Plan
    from rma_mm.runtime.products.verifying import verify
    from rma_mm.runtime.ranks.mesh import Mesh, default_mesh
    from rma_mm.runtime.reports.traced import trace

__all__ = [
    "ChainPlan",
    "DistArray",
    "DistMatrix",
    "Epilogue",
    "Mesh",
    "Plan",
    "__version__",
    "closure",
    "default_mesh",
    "einsum",
    "errors",
    "eye",
    "layouts",
    "list_algorithms",
    "load",
    "matmul",
    "ones",
    "open",
    "plan",
    "plan_chain",
    "pretend",
    "random",
    "register",
    "trace",
    "verify",
    "zeros",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _PUBLIC:
        from rma_mm.errors import nearest

        if not name.startswith("_"):
            from rma_mm.runtime.ranks.uncaught import install

            install()  # each rank has the error, long before the first mesh
        raise AttributeError(
            f"module 'rma_mm' has no attribute {name!r}; {nearest(name, __all__)}it has {', '.join(__all__)}"
        )
    from rma_mm.launch import hush_interruptions, interruptions_held

    hush_interruptions()
    with interruptions_held():
        value = getattr(import_module(_PUBLIC[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

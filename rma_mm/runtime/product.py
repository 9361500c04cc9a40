"""One product in one call, on plans that are kept."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ..errors import LayoutError, MeshError, OptionError
from ..geometry.layout import Layout
from .agreement import agreed
from .footprint import Operand
from .matrix import DistMatrix, allocated, placed
from .mesh import Mesh
from .plan import Plan
from .planning import describe, make_plan

PLANS = 64
"""Plans that `matmul` keeps for a mesh."""


def matmul(
    A: DistMatrix | NDArray[Any],
    B: DistMatrix | NDArray[Any],
    mesh: Mesh | None = None,
    out: DistMatrix | None = None,
    *,
    layout: str | Layout | None = None,
    **options: Any,
) -> DistMatrix:
    """C = alpha · op(A) @ op(B) + beta · C. Collective over the mesh's communicator.

    A: (m, k) and B: (k, n), each a DistMatrix or a NumPy array equal on every rank; (k, m) and (n, k) if transposed.
    out: where C goes (needed for beta ≠ 0); else a new matrix, placed by `layout` or as the plan chooses. options:
    alpha, beta, transpose_a, transpose_b, conjugate_a, conjugate_b, algorithm, memory_limit (bytes), compute_dtype,
    deterministic, kernel, as in `make_plan`, which says what is raised. Plans are kept and used again.
    """
    mesh = mesh or next((x.mesh for x in (A, B) if isinstance(x, DistMatrix)), None)
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh: got {mesh!r}; pass a Mesh, or operands that live on one")
    facts = {"A": describe(A), "B": describe(B), "out": describe(out), "layout": layout, **options}
    with agreed(mesh.comm, "matmul", **facts):
        if out is None and options.get("beta", 0) != 0:
            raise OptionError(f"beta: got {options['beta']}; beta other than 0 adds to C, so pass out")
        if out is not None and layout is not None and placed(layout, out.shape, mesh) != out.layout:
            raise LayoutError(f"layout: got {layout}; out is placed as {out.layout}; leave one of them out")
    place = out.layout if out is not None else layout
    plan = _cached(mesh, A, B, place, options)
    fresh = [
        x if isinstance(x, DistMatrix) else DistMatrix.from_numpy(x, mesh, plan.layouts[name])
        for name, x in (("A", A), ("B", B))
    ]
    if out is None:
        out = allocated(mesh, plan.c_shape, plan.c_dtype, plan.layouts["C"])
    return plan.execute(fresh[0], fresh[1], out)


def _cached(mesh: Mesh, A: Any, B: Any, layout: str | Layout | None, options: dict[str, Any]) -> Plan:
    """A plan for such operands: kept from an earlier call, or made. All ranks keep and forget alike. Collective."""
    operands = [
        Operand(x.shape, x.dtype, *((x.layout, x.in_place) if isinstance(x, DistMatrix) else ())) for x in (A, B)
    ]
    key = (*operands, layout, *sorted((name, repr(value)) for name, value in options.items()))
    plans = mesh.plans
    if key not in plans:
        if len(plans) >= PLANS:
            plans.popitem(last=False)[1].close()
        plans[key] = make_plan(operands[0], operands[1], mesh, layout=layout, **options)
    plans.move_to_end(key)
    return plans[key]


plan = make_plan
"""The public name of `make_plan`."""

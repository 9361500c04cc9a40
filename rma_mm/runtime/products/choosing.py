"""Settling a product: the question to the planner, and the best of its answers that fits the memory."""

from __future__ import annotations

from rma_mm.errors import AlgorithmError
from rma_mm.kernels.threads import using_threads
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.policy.planner.candidates import Request, choose
from rma_mm.runtime.execution.operands import Operands
from rma_mm.runtime.products.memory import MemoryTrial, fit_memory, memory_trials
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.products.prices import cost_model_of, is_brief, priced_by
from rma_mm.runtime.ranks.mesh import Mesh


def choose_plan(mesh: Mesh, operands: Operands, kind: str = "") -> PlanChoice:
    """Return the best on the memory that the mesh has now; of candidates of one `kind` only, if given. Collective.

    Alike on all ranks, which have agreed on everything that it rests on. Raises AlgorithmError if none can serve,
    MemoryLimitError if none fits.
    """
    trials = memory_trials_of(mesh, operands, kind)
    with using_threads(mesh.threads):  # of which each has scratch
        return fit_memory(trials, operands.options.memory_limit)


def memory_trials_of(mesh: Mesh, operands: Operands, kind: str = "") -> list[MemoryTrial]:
    """Return the candidates of a product as memory trials. As `settle`."""
    request = request_of(mesh, operands, cost_model_of(mesh, operands))
    found = choose(request, priced_by(mesh.comm, request))
    able = [each for each in found if kind in ("", each.kind)]
    if not able:
        raise AlgorithmError(f"no {kind} plan is possible")
    with using_threads(mesh.threads):
        return memory_trials(mesh, operands, request, found, able)


def request_of(mesh: Mesh, operands: Operands, cost_model: CostModel) -> Request:
    """Return the question to the planner, in terms of op(A), op(B) and C."""
    o = operands.options
    a, b = operands.a.layout, operands.b.layout
    layouts = (a.T if a and o.transpose_a else a, b.T if b and o.transpose_b else b, operands.c.layout)
    flavour = mesh.granted(mesh.flavour)
    windows = [flavour, mesh.granted(flavour.for_arrays)]  # C may be the caller's own
    ours = flavour.loads_on_node
    in_place = copyable = ""
    for x, operand in (("A", operands.a), ("B", operands.b)):
        if operand.chunks:
            continue
        is_made_here = operand.in_place is None or (operand.layout is not None and operand.layout.partial)
        if ours if is_made_here else operand.in_place:
            in_place += x
        elif ours and len(set(mesh.grid.node_of_rank)) < mesh.grid.size:
            copyable += x
    itemsize = max(operands.dtype(x).itemsize for x in "ABC")
    memory = None if o.memory_limit is None else o.memory_limit // itemsize
    return Request(
        operands.shape, mesh.grid, layouts, memory, keeps_c=bool(o.beta != 0), in_place=in_place,
        fetches_together=ours and (mesh.num_nodes > 1 or bool(operands.files)), algorithm=o.algorithm,
        deterministic=operands.needs_order, copyable=copyable, cost_model=cost_model, pushes=operands.may_push(windows),
        prefer=o.prefer or mesh.prefer, symmetry=o.symmetric, files=operands.files, is_brief=is_brief(),
    )

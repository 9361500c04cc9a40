"""What a plan says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rma_mm.kernels.choice.choice import reason
from rma_mm.policy.planner.tables import explain, words_line, written
from rma_mm.schedule.verify.checker import verify

if TYPE_CHECKING:
    from rma_mm.runtime.products.plan import Plan


def summary(plan: Plan) -> str:
    """What is multiplied, how, and in how much memory."""
    m, n, k = plan.schedule.shape or (0, 0, 0)
    how = f"{plan.given.semiring.note}in {plan.c_dtype} on a mesh of {plan.mesh.shape}"
    lines = [
        f"C[{m}, {n}] = A[{m}, {k}] @ B[{k}, {n}] {how}",
        *([f"epilogue    {plan.epilogue}"] if plan.epilogue else []),
        f"algorithm   {plan.algorithm}: {plan.chosen.row.summary} ({plan.why})",
        *(f"{name}           {plan.layouts[name]}" for name in "ABC"),
        f"kernel      {plan.kernel}{_why_kernel(plan)}",
        f"panels      {plan.tuning.width} wide, fetched {plan.tuning.depth} ahead",
        f"peak memory {plan.peak_bytes} bytes on the fullest rank",
    ]
    return "\n".join(lines)


def explanation(plan: Plan) -> str:
    """The decision as a table; the whole schedule is verified on the way."""
    report = verify(plan.schedule)
    itemsize = max(x.dtype.itemsize for x in plan.operands.values())
    limit = plan.options.memory_limit
    shapes = {name: x.shape for name, x in plan.operands.items()}
    lines = [
        summary(plan),
        f"verified    {sum(report.steps)} operations of all ranks: every point multiplied once",
        words_line(report.words, plan.given.shape, None if limit is None else limit // itemsize),
        "",
        written(plan.layouts, plan.mesh.shape, shapes),
        "",
        explain(plan.found, plan.chosen, plan.options.algorithm),
    ]
    return "\n".join(lines)


def _why_kernel(plan: Plan) -> str:
    """What was measured of the local kernels, where anything was."""
    given = plan.given
    dtype = given.operand_dtype or given.summed
    why = reason(plan.kernel, dtype, *given.shape, given.semiring) if plan.options.kernel == "auto" else "it was named"
    return f" ({why})" if why else ""

"""What a plan says of itself."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from rma_mm.geometry.layout import Layout
from rma_mm.kernels.choice.choice import reason
from rma_mm.policy.planner.candidates import Candidate
from rma_mm.policy.planner.decision import Decision
from rma_mm.policy.planner.tables import explain, words_line, written
from rma_mm.runtime.execution.footprint import Operand, Operands, ProductOptions
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.lowering.lower import Tuning
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.verify.checker import verify


class Told(Protocol):
    """What is told of a plan."""

    mesh: Mesh
    given: Operands
    options: ProductOptions
    operands: dict[str, Operand]
    found: list[Candidate]
    chosen: Candidate
    schedule: Schedule
    tuning: Tuning
    peak_bytes: int
    layouts: dict[str, Layout]

    @property
    def algorithm(self) -> str:
        """Name of the row."""

    @property
    def why(self) -> str:
        """Why it was chosen."""

    @property
    def c_dtype(self) -> np.dtype[Any]:
        """Element type of the result."""

    @property
    def kernel(self) -> str:
        """The local kernel."""

    @property
    def epilogue(self) -> str | None:
        """What becomes of each element of C, in words."""

    @property
    def decision(self) -> Decision:
        """What was considered, and why it lost."""


def summary(plan: Told) -> str:
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


def explanation(plan: Told, every: bool) -> str:
    """The decision as a table, of `every` candidate a wide one; the whole schedule is verified on the way."""
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
        explain(plan.found, plan.chosen, plan.options.algorithm) if every else str(plan.decision),
    ]
    return "\n".join(lines)


def _why_kernel(plan: Told) -> str:
    """What was measured of the local kernels, where anything was."""
    given = plan.given
    dtype = given.operand_dtype or given.summed
    why = reason(plan.kernel, dtype, *given.shape, given.semiring) if plan.options.kernel == "auto" else "it was named"
    return f" ({why})" if why else ""

"""A product settled: all that a plan is made of, and what it says of itself, before anything is made."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from rma_mm.classes import dataclass
from rma_mm.errors import count_of
from rma_mm.flavours import Flavour
from rma_mm.geometry.layout import Layout
from rma_mm.kernels.choice.choice import reason
from rma_mm.policy.model.lower_bounds import least_read
from rma_mm.policy.planner.candidates import Candidate, Request, adds_in_any_order
from rma_mm.policy.planner.decision import Decision
from rma_mm.policy.planner.tables import explain, files_line, how_fast, seconds_text, words_line, written
from rma_mm.runtime.execution.operands import Operand, Operands
from rma_mm.runtime.products.prices import is_known
from rma_mm.schedule.algorithm import PlacedProblem
from rma_mm.schedule.lowering.lower import Tuning
from rma_mm.schedule.ops import Copy
from rma_mm.schedule.schedule import STAGE, Schedule, expand
from rma_mm.schedule.verify.checker import verify


@dataclass(frozen=True, eq=False)
class PlanChoice:
    """The candidate, schedule and tuning chosen for a product, with the request and all other candidates."""

    spec: Operands
    request: Request
    candidates: list[Candidate]  # every candidate, best first
    chosen: Candidate
    problem: PlacedProblem  # the problem that the chosen algorithm is lowered for
    schedule: Schedule
    tuning: Tuning
    peak_bytes: int  # what the fullest rank holds while the product runs
    is_ordered: bool  # true if no rank adds to another's memory, where sums come in any order
    flavour: Flavour  # of the windows that the mesh had
    instead: str = ""  # why it took over from another plan; empty if it did not

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Placements of A, B and C, each in its own orientation."""
        a, b, c = self.problem.layouts
        options = self.spec.options
        return {"A": a.T if options.transpose_a else a, "B": b.T if options.transpose_b else b, "C": c}

    @cached_property
    def operands(self) -> dict[str, Operand]:
        each = zip("ABC", (self.spec.a, self.spec.b, self.spec.c), strict=True)
        return {name: replace(x, layout=self.layouts[name]) for name, x in each}

    @property
    def placed(self) -> Operands:
        """Return the operands with the placements of A, B and C filled in."""
        each = self.operands
        return replace(self.spec, a=each["A"], b=each["B"], c=each["C"])

    @property
    def predicted_seconds(self) -> float | None:
        return self.chosen.seconds if is_known(self.request.cost_model, self.spec) else None

    def is_like(self, other: PlanChoice) -> bool:
        """True if another one is the same except for prices."""
        mine, theirs = ((x.chosen.algorithm.name, x.problem.layouts, x.problem.copied, x.tuning) for x in (self, other))
        return mine == theirs

    @property
    def fetches_together(self) -> bool:
        return self.request.fetches_together and not self.chosen.algorithm.grouped

    @cached_property
    def bytes_read(self) -> int:
        """Bytes that all ranks together read from files."""
        schedule, given = self.schedule, self.spec
        ops = (op for rank in schedule.mesh.ranks for op in expand(schedule, rank) if isinstance(op, Copy))
        return sum(
            op.src.region.size * given.dtype(op.src.operand).itemsize for op in ops if schedule.is_in_file(op.src)
        )

    @property
    def least_read(self) -> float:
        """Lower bound of the bytes read, for the memory of all nodes' ranks."""
        names, limit = "".join(x for x, _ in self.spec.files), self.spec.options.memory_limit
        itemsize = max(self.spec.dtype(x).itemsize for x in names)
        memory = None if limit is None else limit * self.schedule.mesh.size / itemsize
        return least_read(self.spec.shape, names, memory) * itemsize

    def reads_in_place(self, name: str) -> bool:
        return name in self.request.in_place and name + STAGE not in self.schedule.homes

    @property
    def reproducible(self) -> bool:
        """True if the same operands give the same bits again."""
        free = adds_in_any_order(self.schedule.mesh, self.problem.layouts)
        return self.spec.semiring.in_any_order or (self.is_ordered and not free)

    # -- in words ---------------------------------------------------------------------------------

    @property
    def why(self) -> str:
        if self.instead:
            return self.instead
        if self.spec.options.algorithm != "auto":
            return "it was named"
        first = self.candidates[0]
        known = "" if self.predicted_seconds is None else f", predicted {seconds_text(self.predicted_seconds)}"
        if self.chosen is not first:
            return f"the fastest that fits the memory limit{known}"
        typically = "" if self.request.cost_model.machine.measured else " on a typical machine"
        priced = f" of {count_of(len(self.candidates), 'candidate')}" if self.request.is_brief else ""
        return f"{how_fast(first, self.candidates)}{priced}{typically}{known}"

    @property
    def epilogue(self) -> str | None:
        asked = self.spec.options.epilogue
        return None if asked is None else asked.words(self.spec.c.dtype, self.spec.accum_dtype)

    @property
    def decision(self) -> Decision:
        """Return the candidates, their predicted time and traffic, and why each lost."""
        asked = self.spec.options.algorithm
        return Decision.of(self.spec.shape, self.schedule.mesh.dims, self.candidates, self.chosen, asked)

    def __str__(self) -> str:
        m, n, k = self.spec.shape
        how = f"{self.spec.semiring.note}in {self.spec.c.dtype} on a mesh of {self.schedule.mesh}"
        lines = [
            f"C[{m}, {n}] = A[{m}, {k}] @ B[{k}, {n}] {how}",
            *([f"epilogue    {self.epilogue}"] if self.epilogue else []),
            f"algorithm   {self.chosen.algorithm.name}: {self.chosen.algorithm.summary} ({self.why})",
            *(f"{name}           {'stays in its file' if x.chunks else x.layout}" for name, x in self.operands.items()),
            f"kernel      {self.spec.kernel}{self._why_kernel()}",
            f"panels      {self.tuning.width} wide, fetched {self.tuning.depth} ahead",
            f"peak memory {self.peak_bytes} bytes on the fullest rank",
        ]
        return "\n".join(lines)

    def explain(self, every: bool) -> str:
        """The decision as a table, of `every` candidate a wide one; the whole schedule is verified on the way."""
        report = verify(self.schedule)
        itemsize = max(x.dtype.itemsize for x in self.operands.values())
        limit = self.spec.options.memory_limit
        shapes = {name: x.shape for name, x in self.operands.items()}
        lines = [
            str(self),
            *self._about_machine(),
            *self.chosen.algorithm.notes,
            f"verified    {sum(report.steps)} operations of all ranks: every point multiplied once",
            words_line(report.words, self.spec.shape, None if limit is None else limit // itemsize),
            *([files_line(self.bytes_read, self.least_read)] if self.spec.files else []),
            "",
            written(self.layouts, self.schedule.mesh, shapes),
            "",
            explain(self.candidates, self.chosen, self.spec.options.algorithm) if every else str(self.decision),
        ]
        return "\n".join(lines)

    def _about_machine(self) -> list[str]:
        """Return a warning where prices rest on figures that were measured while others were at work."""
        machine = self.request.cost_model.machine
        if not machine.measured:
            return ["machine     a typical one: this one was not measured, so that its seconds may be others"]
        if not machine.is_scattered:
            return []
        differed = f"its rounds differed by {machine.scatter:.0%}"
        return [f"machine     measured while others were at work, {differed}; run python -m rma_mm.calibrate"]

    def _why_kernel(self) -> str:
        """Return the reason for the kernel, as far as it was measured."""
        given = self.spec
        dtype = given.operand_dtype or given.accum_dtype
        is_named = given.options.kernel != "auto"
        why = "it was named" if is_named else reason(given.kernel, dtype, *given.shape, given.semiring)
        return f" ({why})" if why else ""

"""Scratch memory shared out among the products of a chain by need: each chooses from its memory-time frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import cast

from rma_mm.classes import dataclass
from rma_mm.errors import MemoryLimitError
from rma_mm.kernels.threads import using_threads
from rma_mm.runtime.execution.footprint import peak_bytes
from rma_mm.runtime.execution.operands import Operands
from rma_mm.runtime.products.choosing import memory_trials_of
from rma_mm.runtime.products.make_plan import plan_of, planned
from rma_mm.runtime.products.memory import MemoryTrial, fit_memory
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows.waiting import largest

STEP = 0.75  # largest ratio between the scratch memory of one candidate and the next larger one


@dataclass
class Frontier:
    """The ways to do a product on its placements that none beats in both seconds and bytes, fastest first."""

    mesh: Mesh
    name: str
    operands: Operands  # where they are to lie
    own: int  # bytes of this rank's parts of A, B and C
    choices: list[PlanChoice] = field(default_factory=list)
    at: int = 0  # which of them is taken
    lacks: str = ""  # why there is none that takes less than the last; empty if that is not known

    @property
    def taken(self) -> PlanChoice:
        return self.choices[self.at]

    def extra(self, choice: PlanChoice) -> int:
        return max(0, peak_bytes(self.mesh, choice.schedule, choice.spec) - self.own)

    def look(self) -> bool:
        """Find the next, which takes less memory than the last; whether there is one. Collective."""
        if self.at + 1 < len(self.choices):
            return True
        if self.lacks:
            return False
        limit = self.operands.options.memory_limit
        if self.choices:
            (peak, own) = self.choices[-1].peak_bytes, *largest(self.mesh.comm, [self.own])
            limit = min(peak - 1, own + int(STEP * (peak - own)))
        try:
            self.choices.append(self.choose(limit))
        except MemoryLimitError as error:  # the same on every rank
            self.lacks = str(error)
            if self.choices and 0 < error.need < self.choices[-1].peak_bytes:
                self.choices.append(self.choose(error.need))
        return self.at + 1 < len(self.choices) or not self.lacks

    @cached_property
    def trials(self) -> list[MemoryTrial]:
        """The ways that there are. Collective when first asked for."""
        return memory_trials_of(self.mesh, self.operands)

    def choose(self, limit: int | None) -> PlanChoice:
        """Return the fastest way within a limit. Collective. Raises MemoryLimitError."""
        with using_threads(self.mesh.threads):
            return fit_memory(self.trials, limit)

    def plan(self) -> Plan:
        """Return the plan of the chosen candidate, or of the fastest. Collective."""
        o, options = self.operands, self.operands.options
        if self.choices:
            options = replace(options, memory_limit=self.taken.peak_bytes)  # what it switches to takes no more
            plan = plan_of(self.mesh, replace(self.taken, spec=replace(self.taken.spec, options=options)))
            if not plan.prepared.is_outdated:
                return plan
            plan.close()
        return cast(Plan, planned(o.a, o.b, self.mesh, o.c.layout, options))  # no step multiplies batches


def divide_memory(mesh: Mesh, frontiers: Sequence[Frontier], taken: int, limit: int) -> None:
    """Choose a candidate of each frontier so that all fit the limit with the least loss of time. Collective.

    taken: bytes that this rank holds of everything else. Raises MemoryLimitError if nothing fits.
    """
    for each in frontiers:
        if not each.look():
            raise _too_little(limit, each.name, each.lacks)
    while True:
        (most,) = largest(mesh.comm, [taken + sum(each.extra(each.taken) for each in frontiers)])
        if most <= limit:
            return
        steps = [each for each in frontiers if each.look()]
        if not steps:
            last = max(frontiers, key=lambda each: each.taken.peak_bytes)
            raise _too_little(limit, last.name, f"the leanest plans of all steps need {most}, {most - limit} more")
        saved = largest(mesh.comm, [each.extra(each.taken) for each in steps])
        left = largest(mesh.comm, [each.extra(each.choices[each.at + 1]) for each in steps])
        costs = [each.choices[each.at + 1].chosen.seconds - each.taken.chosen.seconds for each in steps]
        rates = [cost / max(1, a - b) for cost, a, b in zip(costs, saved, left, strict=True)]
        steps[min(range(len(steps)), key=rates.__getitem__)].at += 1


def _too_little(limit: int, name: str, why: str) -> MemoryLimitError:
    return MemoryLimitError(
        f"memory_limit: got {limit} bytes a rank for the chain; too little of it is left for '{name}': {why}"
    )


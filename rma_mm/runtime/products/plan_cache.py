"""The plans that `matmul` keeps of a mesh's products."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from rma_mm.runtime.products.batched.plan import BatchPlan
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.mesh import Mesh

AnyPlan = Plan | BatchPlan
Steps = tuple[int, ...]
"""By how many steps the share of each rank is shrunk; none where a product does not rest on that."""
PLANS = 16
"""Plans that `matmul` keeps for a mesh, with their scratch memory."""


class PlanCache:
    """Plans by what was asked for. All ranks keep and forget alike."""

    def __init__(self) -> None:
        self.plans: OrderedDict[tuple[object, Steps], AnyPlan] = OrderedDict()
        """By what was asked for, and the shares of slow ranks. Oldest use first."""
        self._steps: dict[object, Steps] = {}
        """The shares by which each product was done last."""

    @classmethod
    def of(cls, mesh: Mesh) -> PlanCache:
        """That of `mesh`, which closes it."""
        found = mesh.kept.setdefault(cls, cls())
        assert isinstance(found, cls)
        return found

    def plan(self, asked: object, steps: Steps, make: Callable[[Any], AnyPlan]) -> tuple[AnyPlan, bool]:
        """The plan for what is asked, with shares as in `Relief.steps`; and whether another did this product last.

        make: returns the plan that it is passed, which did it last, where none is better; else a new one.
        """
        key, last = (asked, steps), self._steps.get(asked, steps)
        is_other = last != steps
        if key not in self.plans:
            if len(self.plans) >= PLANS:
                self._forget()
            before = self.plans.get((asked, last))
            self.plans[key] = made = make(before)
            if made is before:
                del self.plans[asked, last]
                is_other = False
        self.plans.move_to_end(key)
        self._steps[asked] = steps
        return self.plans[key], is_other

    def _forget(self) -> None:
        """Drop the plan that was used longest ago."""
        key, plan = self.plans.popitem(last=False)
        if self._steps.get(key[0]) == key[1]:
            del self._steps[key[0]]
        plan.close()

    def close(self) -> None:
        """Forget all."""
        self.plans.clear()
        self._steps.clear()

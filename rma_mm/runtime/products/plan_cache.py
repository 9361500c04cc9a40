"""The plans that `matmul` keeps of a mesh's products, and what is known of products that are repeated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from rma_mm.policy.planner.adaptation import Watch
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.mesh import Mesh

PLANS = 16
"""Plans that `matmul` keeps for a mesh, with their scratch memory."""


class PlanCache:
    """Plans by what was asked for. All ranks keep and forget alike."""

    def __init__(self) -> None:
        self.plans: OrderedDict[object, Plan] = OrderedDict()
        """Oldest use first."""
        self.set_aside: dict[object, Plan] = {}
        """Plans of products that are done by another for the time being."""
        self.watches: dict[object, Watch] = {}
        """What is known of products that are repeated."""

    @classmethod
    def of(cls, mesh: Mesh) -> PlanCache:
        """That of `mesh`, which closes it."""
        found = mesh.kept.setdefault(cls, cls())
        assert isinstance(found, cls)
        return found

    def plan(self, key: object, make: Callable[[], Plan]) -> Plan:
        """The plan under `key`, made where there is none."""
        if key not in self.plans:
            if len(self.plans) >= PLANS:
                self._forget()
            self.plans[key] = make()
        self.plans.move_to_end(key)
        return self.plans[key]

    def _forget(self) -> None:
        """Drop the plan that was used longest ago, with what is known of its product."""
        key, plan = self.plans.popitem(last=False)
        plan.close()
        self.watches.pop(key, None)
        if key in self.set_aside:
            self.set_aside.pop(key).close()

    def close(self) -> None:
        """Forget all."""
        self.plans.clear()
        self.set_aside.clear()
        self.watches.clear()

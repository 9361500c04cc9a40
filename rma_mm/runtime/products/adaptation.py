"""Products that are repeated: what they take is held against what was predicted, and late one-sided plans are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rma_mm.geometry.layout import Layout
from rma_mm.policy.planner.adaptation import LATE, Watch
from rma_mm.runtime.calibration import remember_correction
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.products.plan_cache import Key, PlanCache
from rma_mm.runtime.ranks.mesh import Mesh

Make = Callable[[str, Layout], Plan]
"""(algorithm, placement of C) → a plan for the same product. Collective."""


def steered(cache: PlanCache, mesh: Mesh, key: Key, make: Make) -> Plan:
    """The plan that does the product under `key` next: mostly the one that did the last. Collective where it changes.

    All ranks decide alike, by what the slowest of them took. A change is reported in the mesh's `fallbacks`.
    """
    plan = cache.plans[key]
    if plan.predicted_seconds is None:
        return plan
    watch = cache.watches.setdefault(key, Watch(plan.algorithm, plan.settled.chosen.kind, plan.predicted_seconds))
    if plan.watch.last_seconds and not plan.watch.was_slow:  # a slow rank is not the fault of transfers
        watch.note(plan.watch.last_seconds)
    if watch.is_new:
        _learn(mesh, plan, watch)
    if watch.should_change() and (better := _two_sided(plan)):
        cache.set_aside[key] = plan
        following = make(better, plan.layouts["C"])
    elif watch.should_return() and key in cache.set_aside:
        following = cache.set_aside.pop(key)
        plan.close()
    else:
        return plan
    chosen = following.settled.chosen
    mesh.metrics.changed_plan(watch.change(chosen.row.name, chosen.kind, chosen.seconds))
    cache.plans[key] = following
    return following


def _two_sided(plan: Plan) -> str | None:
    """The fastest candidate that moves operands by groups, and leaves C where it is."""
    here = plan.settled.chosen.layouts and plan.settled.chosen.layouts[2]
    others = (c for c in plan.settled.found if c.kind == "two-sided" and c.layouts and c.layouts[2] == here)
    return next((c.row.name for c in others), None)


def late_note(plan: Plan, seconds: Sequence[float]) -> str:
    """What is to be said of a plan that was chosen and took these seconds: nothing, unless it is one-sided and late."""
    predicted, better = plan.predicted_seconds, _two_sided(plan)
    if predicted is None or plan.settled.chosen.kind != "one-sided" or better is None:
        return ""
    ratio = min(seconds) / predicted
    return f"{plan.algorithm}: took {ratio:.2f} times the seconds predicted; try {better}" if ratio > LATE else ""


def _learn(mesh: Mesh, plan: Plan, watch: Watch) -> None:
    """Correct the calibration by what was observed."""
    kind = plan.settled.chosen.kind
    before = plan.settled.chosen.correction
    corrected = watch.correction(before)
    if corrected is not None:
        remember_correction(mesh.comm, mesh.node_of, threads=mesh.threads, corrections={kind: corrected})

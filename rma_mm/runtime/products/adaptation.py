"""Products that are repeated: late one-sided plans are left, and plans in force follow ranks that become slow.

All ranks decide alike: by what the slowest of them took, and by the shares that slow ranks are left with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rma_mm.errors import AlgorithmError, MemoryLimitError
from rma_mm.policy.planner.adaptation import LATE, Watch
from rma_mm.policy.planner.candidates import Candidate
from rma_mm.runtime.calibration import remember_correction
from rma_mm.runtime.products.choosing import choose_plan
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.ranks.agreement import agree
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.metrics import ProductWatch

WORTH = 1.1  # factor over the best time beyond which a plan is replaced when ranks have become slow
AT_STAKE = 0.5  # seconds that another plan would have saved, from which it is advised


class Adaptation:
    """When a plan that "auto" chose is left for another on the same placements, and for which.

    One with deterministic=True is kept: another gives other bits.
    """

    def __init__(self, mesh: Mesh, choice: PlanChoice) -> None:
        self.mesh = mesh
        seconds = choice.predicted_seconds
        self._watch: Watch | None = None  # None if nothing is to change
        options = choice.spec.options
        if options.algorithm == "auto" and not options.deterministic and seconds is not None:
            self._watch = _watch(choice.chosen)
        # which product was looked at, and whether it is time to act since then
        self._last_vote, self._is_due = 0, False
        self._steps = self._first_steps = mesh.metrics.relief.steps
        self._usual = self._set_aside = choice
        """The choice with the shares of the first execution; and the one that was left because it was late."""

    def is_due(self, watch: ProductWatch) -> bool:
        """True if it is time to look for another; the same on all ranks. Local."""
        follows = self._steps != self.mesh.metrics.relief.steps
        return self._watch is not None and (follows or self._looked(watch, self._watch))

    def next(self, now: PlanChoice, watch: ProductWatch) -> PlanChoice | None:
        """Return the choice that replaces `now`; None as a rule. Called once a product; collective where it changes.

        watch: of the products that were done so. A change is reported in the mesh's `fallbacks`.
        """
        if self._watch is None or not self.is_due(watch):
            return None
        agree(self.mesh.comm, "execute", {"adapt": True})  # others may be in other calls
        self._is_due = False
        follows = self._steps != self.mesh.metrics.relief.steps
        return self._following(now) if follows else self._judged(now, self._watch)

    def _looked(self, product: ProductWatch, watch: Watch) -> bool:
        """Look at one more product; whether it is time to act."""
        if self._last_vote != product.exchanges:  # else an execution failed, at which others may not have looked
            self._last_vote, self._is_due = product.exchanges, False
            if product.last_seconds and not product.was_slow:  # a slow rank is not the fault of transfers
                watch.note(product.last_seconds)
                self._is_due = watch.is_new or watch.should_change() or watch.should_return()
        return self._is_due

    def _judged(self, now: PlanChoice, watch: Watch) -> PlanChoice | None:
        """Learn from the observed times, and switch plans if that is better. Collective."""
        if watch.is_new:
            self._learn(now, watch)
        if watch.should_change():
            self._set_aside = now
            return self._late(self._other(now, "two-sided"), watch)
        return self._late(self._set_aside, watch) if watch.should_return() else None

    def _late(self, other: PlanChoice | None, watch: Watch) -> PlanChoice | None:
        """Switch to `other` because the current plan is late; if there is none, keep the plan for good."""
        if other is None:
            self._watch = None
            return None
        chosen = other.chosen
        text = watch.change(chosen.algorithm.name, chosen.kind, chosen.seconds, chosen.cost.multiplying)
        self.mesh.metrics.changed_plan(text)
        return replace(other, instead=text)

    def _following(self, now: PlanChoice) -> PlanChoice | None:
        """Switch to the best plan for the remaining shares of slow ranks. Collective."""
        if self._steps == self._first_steps:
            self._usual = now
        self._steps = self.mesh.metrics.relief.steps
        other = self._usual if self._steps == self._first_steps else self._better(now)
        if other is None or other.is_like(now):
            return None
        assert self._watch is not None
        self._watch = _watch(other.chosen, self._watch.changes)
        self.mesh.metrics.changed_plan()
        return other

    def _better(self, now: PlanChoice) -> PlanChoice | None:
        """Return a choice that is enough faster than `now`, with the present shares, to be worth the change.

        Collective.
        """
        other = self._other(now)
        if other is None:
            return None
        name = now.chosen.algorithm.name
        seconds = min((each.seconds for each in other.candidates if each.algorithm.name == name), default=0.0)
        text = f"{name} takes longer as ranks have become slow"
        return replace(other, instead=text) if seconds > WORTH * other.chosen.seconds else None

    def _other(self, now: PlanChoice, kind: str = "") -> PlanChoice | None:
        """Return the best on the placements of `now`, of one `kind` if given; None if there is none. Collective."""
        try:
            other = choose_plan(self.mesh, now.placed, kind)
        except (AlgorithmError, MemoryLimitError):
            return None
        new = [x for x in "AB" if other.reads_in_place(x) and not now.reads_in_place(x)]
        return None if any(other.operands[x].in_place is None for x in new) else other  # may come from anywhere

    def _learn(self, now: PlanChoice, watch: Watch) -> None:
        """Correct the calibration by the observed times. Collective."""
        mesh, corrections = self.mesh, watch.correction(now.request.cost_model.machine.corrections)
        if corrections:
            remember_correction(mesh.comm, mesh.node_of, threads=mesh.threads, corrections=corrections)


def _watch(chosen: Candidate, changes: int = 0) -> Watch:
    watch = Watch(chosen.algorithm.name, chosen.kind, chosen.seconds, chosen.cost.multiplying)
    watch.changes = changes
    return watch


def late_note(choice: PlanChoice, seconds: Sequence[float]) -> str:
    """Return advice for a one-sided plan that was chosen and late: another that moves by groups; nothing as a rule.

    It is one that was priced for this request, and by its price would have saved `AT_STAKE` seconds.
    """
    predicted, chosen, took = choice.predicted_seconds, choice.chosen, min(seconds)
    if predicted is None or chosen.kind != "one-sided" or took <= LATE * predicted:
        return ""
    here, is_half = chosen.layouts and chosen.layouts[2], choice.request.symmetry is not None
    others = (c for c in choice.candidates if c.kind == "two-sided" and c.layouts and c.layouts[2] == here)
    better = next((c for c in others if not c.rejected and c.algorithm.half == is_half), None)
    if better is None or took - better.seconds < AT_STAKE:
        return ""
    return (
        f"{chosen.algorithm.name}: took {took / predicted:.2f} times the seconds predicted; try {better.algorithm.name}"
    )

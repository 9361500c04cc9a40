"""Fit the figures of a calibration, each measured by itself, to whole products: one factor for each kind of figure.

In a product ranks that share processors and caches are in each other's way as no single measurement shows. Each kind
of figure is multiplied by the factor with which predictions come closest to what products of many shapes took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from statistics import fmean

from rma_mm.classes import dataclass
from rma_mm.policy.model.cost_model import CostModel, estimate
from rma_mm.policy.model.machine import COLLECTIVES, COPY, LINKS, PACKED, SUMS, Cost, Kernel, Machine
from rma_mm.policy.model.traffic import Workload

MOST = 3.0  # factors lie between 1 / MOST and MOST
STEPS = (1.6, 1.25, 1.1, 1.03)  # by how much factors are changed in search of better ones
FAR, DOUBT = 0.6, 0.02
"""Logarithm of a deviation beyond which it counts no more, and the weight of a factor's own logarithm."""

Factors = dict[str, float]  # kind of figures → what they are multiplied by


@dataclass(frozen=True)
class TimedProduct:
    workload: Workload
    cost_model: CostModel
    seconds: float

    def off(self, machine: Machine) -> float:
        return abs(log(estimate(self.workload, replace(self.cost_model, machine=machine)).seconds / self.seconds))


def kind_of(link: str, movement: str) -> str:
    """Return the kind of a link's figures."""
    if movement == COPY:
        return "copies"
    movement = movement.removesuffix(PACKED)
    what = "sums" if movement in SUMS else "groups" if movement in COLLECTIVES else "one-sided"
    return f"{what}, {link}"


def kinds(machine: Machine) -> list[str]:
    found = (kind_of(link, movement) for link in LINKS for movement in machine.costs[link])
    return ["products", "meetings", *dict.fromkeys(found)]


def scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """Return the machine with every figure multiplied by its kind's factor."""
    costs = {
        link: {name: _times(cost, factors.get(kind_of(link, name), 1.0)) for name, cost in found.items()}
        for link, found in machine.costs.items()
    }
    share = factors.get("products", 1.0)
    kernels = {
        name: Kernel(*(share * figure for figure in (k.call, k.point, k.a, k.b, k.c, k.aliased)))
        for name, k in machine.kernels.items()
    }
    return replace(
        machine, costs=costs, kernels=kernels, meeting=machine.meeting * factors.get("meetings", 1.0),
        piece=machine.piece * factors.get("copies", 1.0),
    )


def _times(cost: Cost, factor: float) -> Cost:
    return replace(cost, alpha=cost.alpha * factor, beta=cost.beta * factor)


def fit_corrections(machine: Machine, timed: Sequence[TimedProduct]) -> Factors:
    """The factors with which predictions are least off, by changing one after the other; 1 if nothing says more."""

    def off(factors: Factors) -> float:
        changed = scaled(machine, factors)
        return fmean(min(FAR, trial.off(changed)) for trial in timed)

    def loss(factors: Factors) -> float:
        return off(factors) + DOUBT * sum(abs(log(factor)) for factor in factors.values())

    best = dict.fromkeys(kinds(machine), 1.0)
    if not timed:
        return best
    least = loss(best)
    heard = [kind for kind in best if off({**best, kind: STEPS[0]}) != least]  # the others are in no product
    for step in STEPS:
        is_better = True
        while is_better:
            is_better = False
            for kind, change in ((kind, change) for kind in heard for change in (step, 1 / step)):
                other = {**best, kind: best[kind] * change}
                if 1 / MOST <= other[kind] <= MOST and (found := loss(other)) < least:
                    best, least, is_better = other, found, True
    return best

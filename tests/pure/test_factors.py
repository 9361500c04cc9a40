"""Factors by which a calibration's figures are put right: found again in seconds that were made by them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.cost_model import CostModel, estimate
from rma_mm.policy.model.fit import MOST, TimedProduct, fit_corrections, kind_of, kinds, scaled
from rma_mm.policy.model.machine import COPY, Machine, described
from rma_mm.policy.model.volumes import workload_of
from rma_mm.policy.planner.candidates import Request, candidates, placed_problem
from tests.thorough import usually

HERE = described("here", cores=2, gflops=90, memory_rate=9e9, latency=2e-5, bandwidth=1e9, node_latency=5e-6)
SHAPES = ((640, 640, 640), (1000, 900, 800), (2200, 260, 480), (280, 360, 5000), (1700, 1300, 90))
NAMES = ("stationary_c", "stationary_a", "summa_c", "row_parallel", "gemm_scatter:pull", "cosma")


@cache
def trials() -> tuple[TimedProduct, ...]:
    """Products whose seconds are what this machine predicts."""
    made = []
    for shape in SHAPES:
        for name in NAMES:
            request = Request(shape, MeshShape((2, 2)), algorithm=name)
            found = candidates(request)[0]
            assert found.layouts is not None
            walk = workload_of(found.algorithm, placed_problem(request, found.layouts), found.width)
            made.append(TimedProduct(walk, CostModel(HERE), estimate(walk, CostModel(HERE)).seconds))
    return tuple(made)


def measured(machine: Machine) -> list[TimedProduct]:
    """The same products, timed on another machine."""
    return [replace(each, seconds=estimate(each.workload, CostModel(machine)).seconds) for each in trials()]


@pytest.mark.parametrize(
    "true",
    usually(1, [
        {"products": 1.1, "one-sided, node": 0.5, "groups, node": 1.5, "sums, node": 2.0, "meetings": 2.5},
        {"products": 1.3},
        {"products": 0.8, "groups, node": 2.0},
    ]),
    ids=str,
)
def test_factors_are_found_again(true: dict[str, float]) -> None:
    timed = measured(scaled(HERE, true))
    found = fit_corrections(HERE, timed)
    assert found["products"] == pytest.approx(true["products"], rel=0.1)
    changed = scaled(HERE, found)
    assert max(each.off(changed) for each in timed) < 0.15
    assert fmean(each.off(changed) for each in timed) < 0.4 * fmean(each.off(HERE) for each in timed)


def test_what_nothing_speaks_for_stays_as_it_is() -> None:
    assert set(fit_corrections(HERE, []).values()) == {1.0}
    assert set(fit_corrections(HERE, trials()).values()) == {1.0}
    found = fit_corrections(HERE, measured(scaled(HERE, {"products": 1.5})))
    assert [found[kind] for kind in ("groups, between", "one-sided, between")] == [1.0, 1.0]


def test_one_product_that_was_disturbed_decides_nothing() -> None:
    timed = measured(HERE)
    timed[3] = replace(timed[3], seconds=50 * timed[3].seconds)
    assert fit_corrections(HERE, timed)["products"] == pytest.approx(1.0, abs=0.05)


def test_factors_stay_within_reason() -> None:
    found = fit_corrections(HERE, [replace(each, seconds=1e3 * each.seconds) for each in trials()])
    assert max(found.values()) <= MOST


def test_scaled_figures() -> None:
    found = scaled(HERE, {"products": 2.0, "groups, node": 3.0, "copies": 5.0, "meetings": 7.0})
    assert found.kernel("float32").seconds(10, 20, 30) == pytest.approx(2 * HERE.kernel("float32").seconds(10, 20, 30))
    assert found.cost("node", "shift").beta == pytest.approx(3 * HERE.cost("node", "shift").beta)
    assert found.cost("own", COPY).alpha == pytest.approx(5 * HERE.cost("own", COPY).alpha)
    assert found.cost("node", "get") == HERE.cost("node", "get")
    assert found.cost("between", "shift") == HERE.cost("between", "shift")
    assert found.meeting == pytest.approx(7 * HERE.meeting)
    assert scaled(HERE, {}) == HERE


def test_kinds() -> None:
    assert kinds(HERE)[:3] == ["products", "meetings", "copies"]
    assert {kind_of("node", "shift"), kind_of("between", "shared.get busy")} <= set(kinds(HERE))

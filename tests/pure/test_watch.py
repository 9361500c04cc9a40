"""When a repeated product changes its plan: once to groups, once back, and never again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.policy.model.cost_model import CostBreakdown
from rma_mm.policy.model.machine import MULTIPLIES
from rma_mm.policy.planner.adaptation import LATE, LIMITS, LOOKS, MULTIPLY_LIMITS, WORTH, Watch
from tests.strategies import pure


def seen(watch: Watch, seconds: float, times: int = LOOKS + 1) -> Watch:
    for _ in range(times):
        watch.note(seconds)
    return watch


def test_nothing_is_said_of_a_few_executions() -> None:
    watch = seen(Watch("stationary_c", "one-sided", 1.0, 0.0), 5.0, LOOKS)
    assert watch.measured is None
    assert not watch.should_change()
    assert not watch.should_return()
    assert watch.correction({}) == {}


def test_the_first_execution_does_not_count() -> None:
    watch = Watch("stationary_c", "one-sided", 1.0, 0.0)
    watch.note(100.0)
    assert seen(watch, 1.0, LOOKS).measured == 1.0
    assert not watch.should_change()


@pytest.mark.parametrize(
    ("kind", "ratio", "changes"),
    [
        ("one-sided", LATE * 1.01, True),
        ("one-sided", LATE * 0.99, False),
        ("two-sided", 9.0, False),
        ("in place", 9.0, False),
    ],
)
def test_a_late_one_sided_plan_is_left(kind: str, ratio: float, changes: bool) -> None:
    watch = seen(Watch("stationary_c", kind, 2.0, 0.0), 2.0 * ratio)
    assert watch.should_change() == changes


def test_there_and_back_and_never_again() -> None:
    watch = seen(Watch("stationary_c", "one-sided", 1.0, 0.0), 1.5)
    assert watch.change("summa_c", "two-sided", 1.2, 0.0) == (
        "stationary_c: took 1.50 times the seconds predicted; summa_c does the next products"
    )
    assert not watch.should_return()  # nothing was seen of it yet
    assert seen(watch, 1.6).should_return()
    assert not watch.should_change()
    watch.change("stationary_c", "one-sided", 1.0, 0.0)
    seen(watch, 9.0)
    assert not watch.should_change()
    assert not watch.should_return()


def test_what_is_faster_stays() -> None:
    watch = seen(Watch("stationary_c", "one-sided", 1.0, 0.0), 1.5)
    watch.change("summa_c", "two-sided", 0.5, 0.0)
    assert not seen(watch, 1.4).should_return()  # later than predicted, but faster than before


@pure(50)
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60), st.floats(1e-6, 1e3))
def test_it_cannot_flap(seconds: list[float], predicted: float) -> None:
    watch = Watch("a", "one-sided", predicted, 0.0)
    for each in seconds:
        watch.note(each)
        if watch.should_change():
            watch.change("b", "two-sided", predicted, 0.0)
        elif watch.should_return():
            watch.change("a", "one-sided", predicted, 0.0)
    assert watch.changes <= 2


@pure(50)
@given(st.floats(1e-3, 1e3), st.floats(0.5, 2.0), st.floats(0.0, 1.0))
def test_corrections_go_the_right_way_and_not_too_far(ratio: float, before: float, multiplying: float) -> None:
    watch = seen(Watch("a", "two-sided", 1.0, multiplying), ratio)
    factors = {"two-sided": before, MULTIPLIES: before**0.3}
    found = watch.correction(factors)
    assert found or 1 - WORTH <= ratio <= 1 + WORTH
    for what, after in found.items():
        least, most = MULTIPLY_LIMITS if what == MULTIPLIES else LIMITS
        assert least <= after <= most
        assert (after >= factors[what]) == (ratio > 1) or after in (factors[what], least, most)


def test_corrections_are_of_what_was_predicted_wrong() -> None:
    """Of transfers if they take most of the time, hardly of them if multiplies do; half of the difference at most."""
    moves = seen(Watch("a", "one-sided", 1.0, 0.0), 1.21).correction({"two-sided": 1.5})
    assert moves == {"one-sided": pytest.approx(1 + 0.1 * 0.09 / 0.13), MULTIPLIES: 1.0}
    multiplies = seen(Watch("a", "one-sided", 1.0, 0.95), 1.21).correction({})
    assert multiplies["one-sided"] < multiplies[MULTIPLIES] < 1.1
    alike = seen(Watch("a", "one-sided", 1.0, 0.5), 1.21).correction({"one-sided": 1.5, MULTIPLIES: 1.1})
    assert alike["one-sided"] / 1.5 - 1 == pytest.approx(9 * (alike[MULTIPLIES] / 1.1 - 1))


def test_corrections_find_transfers_that_take_longer() -> None:
    """From products of which multiplies take one share or another."""
    factors = {"two-sided": 1.0, MULTIPLIES: 1.0}
    for share in [0.1, 0.5, 0.8, 0.3] * 5:
        multiplying = share * factors[MULTIPLIES]
        watch = Watch("a", "two-sided", multiplying + (1 - share) * factors["two-sided"], multiplying)
        factors |= seen(watch, share + (1 - share) * 1.6).correction(factors)
    assert factors["two-sided"] == pytest.approx(1.6, rel=WORTH)
    assert factors[MULTIPLIES] == pytest.approx(1.0, abs=WORTH)
    cost = CostBreakdown(multiplying=0.5, moving=0.4, meeting=0.1)
    assert cost.corrected(1.2).seconds == pytest.approx(1.1)
    assert CostBreakdown(multiplying=0.5).corrected(1.2).seconds == 0.5

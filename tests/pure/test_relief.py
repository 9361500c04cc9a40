"""Shares that follow slow ranks: series of products as quiet, noisy and slowed ranks would show them."""

from __future__ import annotations

import numpy as np
import pytest

from rma_mm.runtime.watching.relief import MOST, REST, STEP, Relief
from rma_mm.runtime.watching.slowness import Slowness
from tests.pure.test_slowness import SEEDS, SLOWED, drawn

FASTER = 100
"""The product from which on a rank is slow no more."""


def followed(paces: np.ndarray) -> np.ndarray:
    """The steps of each rank's share when a product begins; paces: of each product and rank.

    Ranks tell what they took when the next product begins, and each keeps the shares of all.
    """
    size = paces.shape[1]
    ranks, reliefs = [Slowness() for _ in range(size)], [Relief(size) for _ in range(size)]
    found = []
    for each in paces:
        found.append(reliefs[0].steps)
        is_due = max([relief.is_due(rank.is_slow) for relief, rank in zip(reliefs, ranks, strict=True)])
        least = min(rank.relative(own) for rank, own in zip(ranks, each, strict=True))
        for rank, own in zip(ranks, each, strict=True):
            rank.note(own, least)
        told = [(rank.pace, rank.is_slow) for rank in ranks]
        for relief in reliefs if is_due else []:
            relief.follow(told)
        assert {relief.steps for relief in reliefs} == {reliefs[0].steps}
    return np.array(found)


def seconds(paces: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """What products take, over what they would if every rank had its share by its pace."""
    speeds = STEP ** steps.astype(float)
    shares = speeds / speeds.sum(axis=1, keepdims=True)
    return (shares * paces).max(axis=1) * (1 / paces).sum(axis=1)


@pytest.mark.parametrize(("kind", "products"), [("quiet", 1000), ("uniform", 300), ("normal", 300)])
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_shares_stay_where_nobody_is_slow(kind: str, products: int, ranks: int) -> None:
    assert not any(followed(drawn(kind, products, ranks, seed)).any() for seed in range(SEEDS))


@pytest.mark.parametrize("kind", ["quiet", "uniform"])
@pytest.mark.parametrize(("ranks", "slow"), [(2, 1), (3, 1), (3, 2), (16, 2)])
@pytest.mark.parametrize("times", [1.9, 2.0, 2.1])
def test_shares_follow_and_come_back(kind: str, ranks: int, slow: int, times: float) -> None:
    """Within 1.15 of the ideal within 30 products of being named, and back within 40."""
    for seed in range(SEEDS):
        paces = drawn(kind, 160, ranks, seed)
        slowed = np.ones_like(paces)
        slowed[SLOWED:FASTER, :slow] = times
        steps = followed(paces * slowed)
        assert not steps[: SLOWED + 5].any() and steps[SLOWED + 10, :slow].any()
        assert seconds(slowed, steps)[SLOWED + 40 : FASTER].max() < 1.15
        assert not steps[FASTER + 40 :].any()
        assert not steps[:, slow:].any()


def test_shares_change_step_by_step_and_do_not_flap() -> None:
    """One step at most in ten products; a pace between two shares changes nothing after it is followed."""
    for times in np.arange(1.5, 6, 0.1):
        paces = drawn("quiet", 300, 3, 0)
        paces[SLOWED:, 0] *= times
        steps = followed(paces)[:, 0]
        changes = np.flatnonzero(np.diff(steps))
        assert (np.abs(np.diff(steps)) <= 1).all() and (np.diff(changes) >= REST).all()
        assert (np.diff(steps) >= 0).all() and len(changes) == steps[-1] <= MOST
        assert 0.85 <= times * STEP ** steps[-1] <= 1.15 + 0.05


def test_shares_stay_where_all_slow_down_or_paces_are_unknown() -> None:
    paces = drawn("uniform", 200, 3, 0)
    paces[100:] *= 2
    assert not followed(paces).any()
    relief = Relief(3)
    relief.follow([(0.0, True), (0.0, False), (0.0, False)])
    assert relief.steps == (0, 0, 0) and relief.factors == ()
    relief.follow([(2.0, True), (0.0, False), (1.0, False)])
    assert relief.steps == (1, 0, 0) and relief.factors == (STEP, 1.0, 1.0)
    relief.follow([(2.0, False), (2.0, False), (2.0, False)])
    assert relief.steps == (0, 0, 0)


def test_a_kind_that_is_new_to_a_slow_rank_is_known_by_its_pace() -> None:
    """Else it would pass for as fast as ever in products that it begins while it is slow."""
    slowness = Slowness()
    for pace in [100.0] * 30 + [200.0] * 10:
        slowness.note(pace, 1.0)
    assert slowness.is_slow and slowness.pace == 2
    slowness.seen = type(slowness.seen)()
    for _ in range(20):
        slowness.note(60.0, 1.0)
    assert slowness.relative(60.0) == 2 == slowness.pace

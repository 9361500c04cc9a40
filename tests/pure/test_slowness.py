"""Who has become slow: series of products as quiet, noisy and slowed ranks would show them."""

from __future__ import annotations

import numpy as np
import pytest

from rma_mm.runtime.watching.slowness import LASTING, LONG, RUN, SEEN, Recent, SlowLink, Slowness

SLOWED = 30
"""The product from which on a rank is slow."""
PACE = 1e6
SEEDS = 10


def flags(paces: np.ndarray, seconds: float = LASTING) -> np.ndarray:
    """Which ranks are slow after each product, of so many seconds; paces: of each product and rank."""
    ranks = [Slowness() for _ in range(paces.shape[1])]
    found = []
    for each in paces:
        least = min(rank.relative(own) for rank, own in zip(ranks, each, strict=True))
        for rank, own in zip(ranks, each, strict=True):
            rank.note(own, least, seconds)
        found.append([rank.is_slow for rank in ranks])
    return np.array(found)


def drawn(kind: str, products: int, ranks: int, seed: int) -> np.ndarray:
    """Paces of ranks that are not slow."""
    random = np.random.default_rng(seed)
    shape = products, ranks
    if kind == "quiet":  # 2 %, and now and then the system takes a core for a while
        return PACE * (1 + 0.02 * random.standard_normal(shape)) * np.where(random.random(shape) < 0.02, 7, 1)
    if kind == "uniform":
        return PACE * random.uniform(0.85, 1.15, shape)
    return PACE * np.maximum(0.3, 1 + 0.15 * random.standard_normal(shape))


@pytest.mark.parametrize(("kind", "products"), [("quiet", 1000), ("uniform", 300), ("normal", 300)])
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_nobody_is_named_without_cause(kind: str, products: int, ranks: int) -> None:
    assert not any(flags(drawn(kind, products, ranks, seed)).any() for seed in range(SEEDS))


@pytest.mark.parametrize("kind", ["quiet", "uniform"])
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_a_rank_slowed_twofold_is_named_and_recovers(kind: str, ranks: int) -> None:
    """Within 10 products each, the one in which ranks tell included; and beside an always slower one."""
    for seed in range(SEEDS):
        paces = drawn(kind, 130, ranks, seed)
        paces[:, -1] *= 1 + seed % 2 * 2
        paces[SLOWED:90, 0] *= 2
        found = flags(paces)
        first, last = found[:, 0].argmax(), 130 - found[::-1, 0].argmax()
        assert SLOWED <= first < SLOWED + 10 - 1 and 90 <= last < 100 and found[first:last, 0].all()
        assert not found[:, 1:].any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_nobody_is_named_on_a_machine_with_other_programs(ranks: int) -> None:
    """From product 100 on they take a core away for every second product, now of one rank and now of another."""
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        paces = drawn("uniform", 1000, ranks, seed)
        paces[100:] *= np.where(random.random((900, ranks)) < 0.5, 2.2, 1)
        assert not flags(paces, seconds=0.005).any()


def test_ranks_that_slow_down_together_are_not_named() -> None:
    for ranks in (2, 3, 16):
        paces = drawn("uniform", 200, ranks, 0)
        paces[100:] *= 2
        assert not flags(paces).any()


def test_the_limit_is_mean_and_two_deviations_of_twenty() -> None:
    slowness = Slowness()
    for n in range(SEEN):
        assert slowness.relative(100) == 0
        slowness.note(100 + 50 * (n % 2), 1)
    assert slowness.seen.mean == 125 and slowness.seen.limit == 175
    for _ in range(RUN):
        assert not slowness.is_slow
        slowness.note(176, 1)
    assert slowness.is_slow and slowness.factor == 176 / 125


def test_products_of_all_kinds_make_a_rank_slow_together() -> None:
    """Each held against its own kind; those of a kind that is new say nothing."""
    slowness, kinds = Slowness(), {"large": Recent(), "small": Recent(), "new": Recent()}
    usual = [("large", 100.0), ("small", 3.0)] * SEEN
    for kind, pace in [*usual, *[("large", 200.0), ("new", 50.0), ("small", 6.0)] * (RUN // 2)]:
        assert not slowness.is_slow
        slowness.seen = kinds[kind]
        slowness.note(pace, 1.0)
    assert slowness.is_slow


def test_a_link_is_slow_after_twenty_products_below_half() -> None:
    link = SlowLink()
    for _ in range(LONG - 1):
        link.note(0.49)
    link.note(0.51)
    assert not link.is_slow
    for _ in range(1000):
        link.note(0.8)
    assert not link.is_slow
    for n in range(LONG):
        assert link.is_slow == (n == LONG)
        link.note(0.3)
    assert link.is_slow


def test_what_is_over_soon_makes_no_rank_slow():
    """The system takes a core away for 0.1 s, which many short products fall into; for good it is named."""
    slowness = Slowness()
    for _ in range(40):
        slowness.note(100.0, 1.0, 0.001)
    for _ in range(100):
        slowness.note(200.0, 1.0, 0.001)
        assert not slowness.is_slow
    for _ in range(100):
        slowness.note(100.0, 1.0, 0.001)
    for _ in range(301):
        slowness.note(200.0, 1.0, 0.001)
    assert slowness.is_slow

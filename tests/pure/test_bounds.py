"""Lower bounds on words: no plan goes below them, and some meet them."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS
from rma_mm.algorithms.search.cosma_grids import best_grid, words
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.lower_bounds import least_words, touched
from rma_mm.schedule.algorithm import Problem
from tests.strategies import pure

GRIDS = st.tuples(*[st.integers(1, 4)] * 3)
TILES = st.tuples(*[st.integers(1, 40).map(lambda n: 12 * n)] * 3)


@pure(200)
@given(GRIDS, TILES)
def test_no_grid_goes_below_the_bound(grid: tuple[int, int, int], tile: tuple[int, int, int]) -> None:
    m, n, k = (ranks * extent for ranks, extent in zip(grid, tile, strict=True))
    assert words(grid, (m, n, k)) >= least_words((m, n, k), prod(grid)) - 1e-6


@pytest.mark.parametrize(
    ("shape", "ranks", "grid"),
    [
        ((4096, 4096, 4096), 64, (4, 4, 4)),  # a cube
        ((64, 64, 65536), 16, (1, 1, 16)),  # k alone is shared out (algorithms.md §3 (b))
        ((8192, 64, 64), 8, (8, 1, 1)),
        ((4096, 4096, 64), 16, (4, 4, 1)),
    ],
)
def test_cosma_meets_the_bound(shape: tuple[int, int, int], ranks: int, grid: tuple[int, int, int]) -> None:
    assert best_grid(shape, ranks) == grid
    assert words(grid, shape) == pytest.approx(least_words(shape, ranks), rel=1e-9)


def test_little_memory_raises_the_bound() -> None:
    shape = (1024, 1024, 1024)
    assert touched(shape, 8, 1024) == pytest.approx(2 * 1024**3 / 8 / 32 + 1024)
    assert touched(shape, 8, 10**9) == touched(shape, 8) == pytest.approx(3 * 512**2)
    assert touched((0, 5, 5), 4) == 0


def test_little_memory_takes_another_grid() -> None:
    algorithm = ALGORITHMS["cosma"]
    assert algorithm.specialize is not None
    cube = (4096, 4096, 4096)
    assert best_grid(cube, 64) == (4, 4, 4)
    assert best_grid(cube, 64, 1_000_000) == (8, 8, 1)  # no room for summands of C
    refused = algorithm.specialize(Problem(cube, MeshShape((64,)), memory=1000))
    assert isinstance(refused, str)
    assert "elements a rank" in refused

"""The grids that COSMA chooses among, and what each costs the busiest rank.

Source: G. Kwasniewski et al. (COSMA, SC 2019); see `cosma`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

Grid = tuple[int, int, int]
"""Ranks along m, n and k."""

WORTH = 64
"""Multiply-adds in the time of one word: what an idle rank is weighed with until machines are measured."""

def cost(grid: Grid, shape: tuple[int, int, int]) -> int:
    """What the busiest rank does: multiply-adds, and words that it receives and sends, each as `WORTH` of them."""
    return points(grid, shape) + WORTH * words(grid, shape)


def points(grid: Grid, shape: tuple[int, int, int]) -> int:
    """Multiply-adds of the busiest rank."""
    m, n, k = (-(-extent // ranks) for extent, ranks in zip(shape, grid, strict=True))
    return m * n * k


def words(grid: Grid, shape: tuple[int, int, int]) -> int:
    """Words of A and B that a rank receives, and of C that it sends (algorithms.md §3, row 13)."""
    m, n, k = (-(-extent // ranks) for extent, ranks in zip(shape, grid, strict=True))
    pm, pn, pk = grid
    return m * k * (pn - 1) // pn + k * n * (pm - 1) // pm + m * n * (pk - 1) // pk


def held(grid: Grid, shape: tuple[int, int, int]) -> int:
    """Elements that a rank holds: its shares, and C's summand."""
    m, n, k = (-(-extent // ranks) for extent, ranks in zip(shape, grid, strict=True))
    pm, pn, pk = grid
    return m * k // pn + k * n // pm + m * n // pk + (m * n if pk > 1 else 0)


def grids_within(size: int) -> Iterator[Grid]:
    """All grids of at most `size` ranks."""
    for pm in range(1, size + 1):
        for pn in range(1, size // pm + 1):
            for pk in range(1, size // (pm * pn) + 1):
                yield pm, pn, pk


@lru_cache(maxsize=256)
def best_grid(
    shape: tuple[int, int, int], size: int, memory: int | None = None, may_idle: bool = True
) -> Grid | str:
    """The cheapest grid whose memory fits (or why none does); of equals the one with the fewest ranks.

    memory: elements of A, B and C that a rank may hold. may_idle: whether ranks may be left out.
    """
    used = [g for g in grids_within(size) if may_idle or g[0] * g[1] * g[2] == size]
    grids = [g for g in used if all(p <= max(1, n) for p, n in zip(g, shape, strict=True))] or used
    fitting = [grid for grid in grids if memory is None or held(grid, shape) <= memory]
    if not fitting:
        least = min(held(grid, shape) for grid in grids)
        return f"needs {least} elements a rank on its leanest grid, and {memory} may be held"
    return min(fitting, key=lambda grid: (cost(grid, shape), grid[0] * grid[1] * grid[2], grid))

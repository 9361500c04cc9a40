"""The grids that COSMA chooses among, and what each costs the busiest rank.

Source: G. Kwasniewski et al. (COSMA, SC 2019); see `cosma`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.mesh import grids

Grid = tuple[int, int, int]  # ranks along m, n and k
Ranks = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # of many grids: ranks along m, n and k
Floats = NDArray[np.float64]
EVERY = 1024  # ranks along a dimension up to which every number is tried

WORTH = 64  # multiply-adds in the time of one word: what an idle rank is weighed with until machines are measured


def cost(grid: Grid, shape: tuple[int, int, int]) -> int:
    return points(grid, shape) + WORTH * words(grid, shape)


def points(grid: Grid, shape: tuple[int, int, int]) -> int:
    m, n, k = (-(-extent // ranks) for extent, ranks in zip(shape, grid, strict=True))
    return m * n * k


def words(grid: Grid, shape: tuple[int, int, int]) -> int:
    """Return words of A and B that a rank receives, and of C that it sends (algorithms.md §3, row 13)."""
    m, n, k = (-(-extent // ranks) for extent, ranks in zip(shape, grid, strict=True))
    pm, pn, pk = grid
    return m * k * (pn - 1) // pn + k * n * (pm - 1) // pm + m * n * (pk - 1) // pk


def elements_held(grid: Grid, shape: tuple[int, int, int]) -> int:
    """Return elements that a rank holds: its shares, and C's summand."""
    m, n, k = (-(-extent // ranks) for extent, ranks in zip(shape, grid, strict=True))
    pm, pn, pk = grid
    return m * k // pn + k * n // pm + m * n // pk + (m * n if pk > 1 else 0)


def _tried(extent: int, size: int) -> NDArray[np.int64]:
    """Numbers of ranks along a dimension that are tried: all up to `EVERY`, then the fewest for each size of tiles."""
    most = min(size, max(1, extent))
    tiles = np.arange(1, extent // EVERY + 2)
    fewest = -(-extent // tiles)
    return np.union1d(np.arange(1, min(most, EVERY) + 1), fewest[(fewest >= 1) & (fewest <= most)])


def _at_least(grid: Ranks, shape: tuple[int, int, int]) -> tuple[Floats, Floats]:
    """Return lower bounds of `cost` and `elements_held`: linear in 1/pk, except for a step behind pk = 1."""
    pm, pn, pk = grid
    m, n, k = np.ceil(shape[0] / pm), np.ceil(shape[1] / pn), shape[2] / pk
    received = m * k * (1 - 1 / pn) + k * n * (1 - 1 / pm) - (pn > 1) - (pm > 1)
    sent = m * n * (1 - 1 / pk) - (pk > 1)
    summand = m * n * (pk > 1)
    return m * n * k + WORTH * (received + sent), m * k / pn + k * n / pm + m * n / pk + summand - 3


def _within(shape: tuple[int, int, int], size: int, memory: float, by: Callable[..., int] = cost) -> Iterator[Grid]:
    """Grids of at most `size` ranks whose memory fits, among them those of least cost (or memory) with fewest ranks.

    Pairs pm, pn whose grids must be worse than the best until then are left out.
    """
    counts = [_tried(extent, size) for extent in shape]
    pm, pn = (each.reshape(-1) for each in np.meshgrid(counts[0], counts[1], indexing="ij"))
    pm, pn = pm[pm * pn <= size], pn[pm * pn <= size]
    most = np.minimum(size // (pm * pn), max(1, shape[2]))
    ends = [_at_least((pm, pn, pk), shape) for pk in (np.ones_like(most), np.minimum(2, most), most)]
    least = np.min([bounds[by is elements_held] for bounds in ends], axis=0)
    may_fit = np.min([needed for _, needed in ends], axis=0) <= memory
    pm, pn, most, least = pm[may_fit], pn[may_fit], most[may_fit], least[may_fit]
    best = inf
    while len(least):
        first = int(least.argmin())
        pk = counts[2][counts[2] <= most[first]]
        bounds = _at_least((pm[first], pn[first], pk), shape)
        for count in pk[(bounds[by is elements_held] <= best) & (bounds[1] <= memory)].tolist():
            grid = int(pm[first]), int(pn[first]), count
            if elements_held(grid, shape) <= memory:
                best = min(best, by(grid, shape))
                yield grid
        least[first] = inf
        keep = least <= min(best, sys.float_info.max)
        pm, pn, most, least = pm[keep], pn[keep], most[keep], least[keep]


@lru_cache(maxsize=256)
def best_grid(shape: tuple[int, int, int], size: int, memory: int | None = None, may_idle: bool = True) -> Grid | str:
    """Return the cheapest grid whose memory fits (or why none does); of equals the one with the fewest ranks.

    memory: elements of A, B and C that a rank may hold. may_idle: whether ranks may be left out.
    """
    limit = inf if memory is None else memory
    used = [(pm, pn, pk) for pm, pn, pk in grids(size, 3)]
    used = [grid for grid in used if all(p <= max(1, n) for p, n in zip(grid, shape, strict=True))] or used
    fitting = [
        grid for grid in (_within(shape, size, limit) if may_idle else used) if elements_held(grid, shape) <= limit
    ]
    if fitting:
        return min(fitting, key=lambda grid: (cost(grid, shape), grid[0] * grid[1] * grid[2], grid))
    least = min(
        elements_held(grid, shape) for grid in (_within(shape, size, inf, by=elements_held) if may_idle else used)
    )
    return f"needs {least} elements a rank on its leanest grid, and {memory} may be held"

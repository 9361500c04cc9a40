"""COSMA's choice: the grid pm × pn × pk over at most all ranks that moves least for this shape and memory.

Source: G. Kwasniewski, M. Kabić, M. Besta, J. VandeVondele, R. Solcà and T. Hoefler, "Red-blue pebbling revisited:
near optimal parallel matrix-matrix multiplication" (SC 2019). Ranks may stay idle where a better grid has fewer. The
form `:pm,pn,pk` names the grid. Operands that are placed already are pulled from where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ..geometry.mesh import AXIS_NAMES, MeshShape
from ..schedule.row import DIMS, Row, Setting
from .survey import place, surveyed, whole_numbers

Grid = tuple[int, int, int]

WORTH = 64
"""Multiply-adds in the time of one word: what an idle rank is weighed with until machines are measured."""

_WORK = "m→i, n→j, k→l"
_ON_GRID = surveyed(
    "cosma", "Kwasniewski et al. 2019", "the grid that moves least for the shape; ranks may stay idle",
    axes=3, a="m→i, k→(l,j)", b="k→l, n→(j,i)", c="m→i, n→(j,l)", work=_WORK, over="k", order="plain",
    result="reduce", grouped="ABC",
)  # fmt: skip


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


def best_grid(setting: Setting) -> Grid | str:
    """The cheapest grid whose memory fits; of equals the one with the fewest ranks."""
    return _best(setting.shape, setting.mesh.size, setting.memory, setting.may_idle)


@lru_cache(maxsize=256)
def _best(shape: tuple[int, int, int], size: int, memory: int | None, may_idle: bool) -> Grid | str:
    used = [g for g in grids_within(size) if may_idle or g[0] * g[1] * g[2] == size]
    grids = [g for g in used if all(p <= max(1, n) for p, n in zip(g, shape, strict=True))] or used
    fitting = [grid for grid in grids if memory is None or held(grid, shape) <= memory]
    if not fitting:
        least = min(held(grid, shape) for grid in grids)
        return f"needs {least} elements a rank on its leanest grid, and {memory} may be held"
    return min(fitting, key=lambda grid: (cost(grid, shape), grid[0] * grid[1] * grid[2], grid))


def on_grid(grid: Grid, setting: Setting) -> Row:
    """The row on a grid of its own; what is placed already stays where it is."""
    shape = MeshShape(grid, AXIS_NAMES)
    native = _ON_GRID.placements(shape) if _ON_GRID.placements else ""
    assert not isinstance(native, str)
    a, b, c = (
        None if given or layout is None else replace(layout, grid=shape)
        for layout, given in zip(native, setting.layouts, strict=True)
    )
    work = replace(place(_WORK, DIMS, shape, 3), grid=shape)
    return replace(_ON_GRID, placements=lambda _: (a, b, c), work=lambda _: work, fit=None, form=None)


def _fit(setting: Setting) -> Row | str:
    grid = best_grid(setting)
    return grid if isinstance(grid, str) else on_grid(grid, setting)


def _form(text: str) -> Row | str:
    sizes = whole_numbers(text, 3)
    if text == "pull":
        return COSMA.pulled
    if sizes is None:
        return "cosma takes a grid, as cosma:2,2,1, or cosma:pull"
    grid = (sizes[0], sizes[1], sizes[2])

    def fit(setting: Setting) -> Row | str:
        needed = grid[0] * grid[1] * grid[2]
        if needed > setting.mesh.size:
            best = ",".join(map(str, best_grid(replace(setting, memory=None))))
            return f"the grid {grid} needs {needed} ranks, and there are {setting.mesh.size}; cosma:{best} would fit"
        return replace(on_grid(grid, setting), name=f"cosma:{text}")

    return replace(COSMA, name=f"cosma:{text}", fit=fit, form=None)


COSMA = replace(_ON_GRID, placements=None, fit=_fit, form=_form)

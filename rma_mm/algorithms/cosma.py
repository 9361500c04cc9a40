"""COSMA's choice: the grid pm × pn × pk over at most all ranks that moves least for this shape and memory.

Source: G. Kwasniewski, M. Kabić, M. Besta, J. VandeVondele, R. Solcà and T. Hoefler, "Red-blue pebbling revisited:
near optimal parallel matrix-matrix multiplication" (SC 2019). Ranks may stay idle where a better grid has fewer. The
form `:pm,pn,pk` names the grid. Operands that are placed already are pulled from where they are.
"""

from __future__ import annotations

from dataclasses import replace

from rma_mm.algorithms.from_table import algorithm_from_table, place, whole_numbers
from rma_mm.algorithms.search.cosma_grids import Grid, best_grid
from rma_mm.geometry.mesh import AXIS_NAMES, MeshShape
from rma_mm.schedule.algorithm import DIMS, Algorithm, Problem

_WORK = "m→i, n→j, k→l"
_ON_GRID = algorithm_from_table(
    "cosma", "Kwasniewski et al. 2019", "the grid that moves least for the shape; ranks may stay idle",
    axes=3, a="m→i, k→(l,j)", b="k→l, n→(j,i)", c="m→i, n→(j,l)", work=_WORK, over="k", order="plain",
    result="reduce", grouped="ABC",
)


def on_grid(grid: Grid, problem: Problem) -> Algorithm:
    """Return the algorithm on a grid of its own; operands that are placed already stay where they are."""
    shape = MeshShape(grid, AXIS_NAMES[:3])
    native = _ON_GRID.placements(shape) if _ON_GRID.placements else ""
    assert not isinstance(native, str)
    a, b, c = (layout and replace(layout, grid=shape) for layout in native)
    wanted = problem.unless_given((a, b, c))
    work = replace(place(_WORK, DIMS, shape, 3), grid=shape)
    return replace(_ON_GRID, placements=lambda _: wanted, work=lambda _: work, specialize=None, form=None)


def _fit(problem: Problem) -> Algorithm | str:
    grid = best_grid(problem.shape, problem.mesh.size, problem.memory, problem.is_named)
    return grid if isinstance(grid, str) else on_grid(grid, problem)


def _form(text: str) -> Algorithm | str:
    sizes = whole_numbers(text, 3)
    if text == "pull":
        return COSMA.pulled
    if sizes is None:
        return "cosma takes a grid, as cosma:2,2,1, or cosma:pull"
    grid = (sizes[0], sizes[1], sizes[2])

    def fit(problem: Problem) -> Algorithm | str:
        needed = grid[0] * grid[1] * grid[2]
        if needed > problem.mesh.size:
            best = ",".join(map(str, best_grid(problem.shape, problem.mesh.size)))
            return f"the grid {grid} needs {needed} ranks, and there are {problem.mesh.size}; cosma:{best} would fit"
        return replace(on_grid(grid, problem), name=f"cosma:{text}")

    return replace(COSMA, name=f"cosma:{text}", specialize=fit, form=None)


COSMA = replace(_ON_GRID, placements=None, specialize=_fit, form=_form)

"""Slices by speed: faster ranks take more rows of A and C, columns of B and C, or larger blocks of C.

Source: A. Kalinov and A. Lastovetsky (2001), as `rma_mm.geometry.shares` has it. The planner cuts the open placements
of every algorithm so where ranks differ; this one cuts over all ranks in order, and is there by name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rma_mm.algorithms.stationary import STATIONARY_C
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import AXIS_NAMES, MeshShape, grids
from rma_mm.geometry.shares import cuts_by_speed, slices
from rma_mm.schedule.algorithm import Algorithm, Problem, Wanted, stationary


def _fit(by_columns: bool, problem: Problem) -> Algorithm:
    """Rows, or columns, by weight; of an A, or B, that is placed already, the work stays with its parts."""
    placed, c, mesh = problem.layouts[by_columns], problem.layouts[2], problem.mesh
    layout = placed or _cut(by_columns, problem)
    is_cut_so = not (layout.splits[not by_columns] or layout.pins or layout.partial or layout.replicated_axes(mesh))
    is_here = is_cut_so and c in (None, layout)
    own, sums = None if placed else layout, layout if is_here else None
    wanted: Wanted = (None, own, sums) if by_columns else (own, None, sums)
    algorithm = COLUMNS if by_columns else ROWS
    return replace(algorithm, placements=lambda _: wanted, result="here" if is_here else "accumulate", specialize=None)


def _cut(by_columns: bool, problem: Problem) -> Layout:
    """Return a dimension cut by speed over all ranks in order."""
    mesh = problem.mesh
    grid = mesh if len(mesh.dims) == 1 else MeshShape((mesh.size,), AXIS_NAMES[:1])
    edges = slices(problem.shape[by_columns], problem.speeds or (1.0,) * mesh.size)
    cut: Split = (Level(grid.names, "bounds", tuple(map(float, edges))),)
    return Layout(((), cut) if by_columns else (cut, ()), grid=None if grid is mesh else grid)


ROWS = Algorithm(
    name="weighted",
    source="Kalinov and Lastovetsky 2001",
    summary="rows of A and C in proportion to the speeds of the ranks; B is pulled, C pushed where it lies elsewhere",
    work=stationary("A"),
    over="k",
    result="accumulate",
    specialize=partial(_fit, False),
)
COLUMNS = replace(
    ROWS,
    name="weighted:columns",
    summary="columns of B and C in proportion to the speeds of ranks; A is pulled, C pushed where it lies elsewhere",
    work=stationary("B"),
    specialize=partial(_fit, True),
)


def _fit_blocks(problem: Problem) -> Algorithm:
    """Blocks of C by speed, on the grid on which ranks pull least; of a C that is placed already, the parts it has."""
    m, n, _ = problem.shape
    mesh, c = problem.mesh, problem.layouts[2]
    rows, columns = min(grids(mesh.size, 2), key=lambda grid: grid[1] * m + grid[0] * n)
    grid = mesh if mesh.dims == (rows, columns) else MeshShape((rows, columns), AXIS_NAMES[:2])
    even = tuple((Level((axis,)),) for axis in grid.names)
    cut = cuts_by_speed(even, (m, n), grid, problem.speeds or (1.0,) * mesh.size)
    layout = None if c else Layout(cut, grid=None if grid is mesh else grid)
    return replace(BLOCKS, placements=lambda _: (None, None, layout), specialize=None)


BLOCKS = replace(
    STATIONARY_C,
    name="weighted:2d",
    source="Kalinov and Lastovetsky 2001; Beaumont, Boudet, Rastello and Robert 2001",
    summary="C in columns of ranks, as wide as those are fast together, cut by the speeds of each; A and B are pulled",
    specialize=_fit_blocks,
)


def _form(text: str) -> Algorithm | str:
    forms = {"rows": ROWS, "columns": COLUMNS, "2d": BLOCKS}
    return forms.get(text, "weighted has the forms :rows (as it is), :columns and :2d")


WEIGHTED = replace(ROWS, form=_form)

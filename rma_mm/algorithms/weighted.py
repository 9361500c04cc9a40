"""Slices by speed: faster ranks take more rows of A and C, or columns of B and C; the other operand is pulled.

Source: A. Kalinov and A. Lastovetsky (2001), as `rma_mm.geometry.shares` has it. The planner cuts the open placements
of every row so where ranks differ; this one cuts over all ranks in order, and is there by name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rma_mm.geometry.layout import Layout, Level, Split
from rma_mm.geometry.mesh import AXIS_NAMES, MeshShape
from rma_mm.geometry.shares import slices
from rma_mm.schedule.row import Row, Setting, Wanted, stationary


def _fit(by_columns: bool, setting: Setting) -> Row:
    """Rows, or columns, by weight; of an A, or B, that is placed already, the work stays with its parts."""
    placed, c, mesh = setting.layouts[by_columns], setting.layouts[2], setting.mesh
    layout = placed or _cut(by_columns, setting)
    is_cut_so = not (layout.splits[not by_columns] or layout.pins or layout.partial or layout.replicated_axes(mesh))
    is_here = is_cut_so and c in (None, layout)
    own, sums = None if placed else layout, layout if is_here else None
    wanted: Wanted = (None, own, sums) if by_columns else (own, None, sums)
    row = COLUMNS if by_columns else ROWS
    return replace(row, placements=lambda _: wanted, result="here" if is_here else "accumulate", fit=None)


def _cut(by_columns: bool, setting: Setting) -> Layout:
    """A dimension cut by speed over all ranks in order."""
    mesh = setting.mesh
    grid = mesh if len(mesh.shape) == 1 else MeshShape((mesh.size,), AXIS_NAMES[:1])
    edges = slices(setting.shape[by_columns], setting.speeds or (1.0,) * mesh.size)
    cut: Split = (Level(grid.names, "bounds", tuple(map(float, edges))),)
    return Layout(((), cut) if by_columns else (cut, ()), grid=None if grid is mesh else grid)


ROWS = Row(
    name="weighted",
    source="Kalinov and Lastovetsky 2001",
    summary="rows of A and C in proportion to the speeds of the ranks; B is pulled, C pushed where it lies elsewhere",
    work=stationary("A"),
    over="k",
    result="accumulate",
    fit=partial(_fit, False),
)
COLUMNS = replace(
    ROWS,
    name="weighted:columns",
    summary="columns of B and C in proportion to the speeds of ranks; A is pulled, C pushed where it lies elsewhere",
    work=stationary("B"),
    fit=partial(_fit, True),
)


def _form(text: str) -> Row | str:
    forms = {"rows": ROWS, "columns": COLUMNS}
    return forms.get(text, "weighted has the forms :rows (as it is) and :columns")


WEIGHTED = replace(ROWS, form=_form)

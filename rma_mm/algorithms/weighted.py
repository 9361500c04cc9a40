"""Slices by speed: faster ranks take more rows of A and C; B is pulled from wherever it is.

Source: A. Kalinov and A. Lastovetsky (2001), as `rma_mm.geometry.shares` has it. The planner cuts the open placements
of every row so where ranks differ; this one cuts rows over all ranks, and is there by name.
"""

from __future__ import annotations

from dataclasses import replace

from rma_mm.geometry.layout import Layout, Level
from rma_mm.geometry.mesh import AXIS_NAMES, MeshShape
from rma_mm.geometry.shares import slices
from rma_mm.schedule.row import Row, Setting, stationary


def _fit(setting: Setting) -> Row:
    """Rows by weight over all ranks in order; of an A that is placed already, the work stays with its rows."""
    (a, _, c), mesh = setting.layouts, setting.mesh
    if a is None:
        grid = mesh if len(mesh.shape) == 1 else MeshShape((mesh.size,), AXIS_NAMES[:1])
        edges = slices(setting.shape[0], setting.speeds or (1.0,) * mesh.size)
        rows = (Level(grid.names, "bounds", tuple(map(float, edges))),)
        a = Layout((rows, ()), grid=None if grid is mesh else grid)
    by_rows = not (a.splits[1] or a.pins or a.partial or a.replicated_axes(mesh))
    is_here = by_rows and c in (None, a)
    wanted = (None if setting.layouts[0] else a, None, a if is_here else None)
    return replace(WEIGHTED, placements=lambda _: wanted, result="here" if is_here else "accumulate", fit=None)


WEIGHTED = Row(
    name="weighted",
    source="Kalinov and Lastovetsky 2001",
    summary="rows of A and C in proportion to the speeds of the ranks; B is pulled, C pushed where it lies elsewhere",
    work=stationary("A"),
    over="k",
    result="accumulate",
    fit=_fit,
)

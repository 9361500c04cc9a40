"""Slices by speed: faster ranks take more rows of A and C; B is pulled from wherever it is.

Source: A. Kalinov and A. Lastovetsky, "Heterogeneous distribution of computations solving linear algebra problems on
networks of heterogeneous computers" (2001); floor, cap and tolerance as in published runtimes (algorithms.md §6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from rma_mm.geometry.layout import Layout, Level
from rma_mm.geometry.mesh import AXIS_NAMES, MeshShape
from rma_mm.schedule.row import Row, Setting, stationary

FLOOR = 512
"""Rows that every rank takes at least, where there are enough."""
CAP = 2.0
"""A rank takes at most this many even shares."""
TOLERANCE = 0.2
"""Speeds that spread less than this share of their mean count as equal."""


def slices(extent: int, speeds: Sequence[float], floor: int = FLOOR, cap: float = CAP) -> list[int]:
    """Where the slices of 0…extent − 1 begin and end: in proportion to speeds, none below `floor` or above `cap`.

    Even where speeds hardly differ, or where the floor leaves no choice.
    """
    count = len(speeds)
    even = [n * extent // count for n in range(count + 1)]
    if extent <= floor * count or max(speeds) - min(speeds) < TOLERANCE * fmean(speeds):
        return even
    top = max(cap * extent / count, floor)
    fixed: dict[int, float] = {}
    while True:
        free = [n for n in range(count) if n not in fixed]
        left = extent - sum(fixed.values())
        total = sum(speeds[n] for n in free)
        shares = {n: left * speeds[n] / total for n in free} if total else dict.fromkeys(free, left / max(1, len(free)))
        beyond = {n: min(max(share, floor), top) for n, share in shares.items() if not floor <= share <= top}
        if not beyond:
            break
        below = {n: share for n, share in beyond.items() if share == floor}
        fixed |= below or beyond
    shares |= fixed
    edges = [round(sum(shares[n] for n in range(upto))) for upto in range(count + 1)]
    return [*edges[:-1], extent]


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
    by_speed=True,
)

"""Shares of a dimension in proportion to the speeds of those who take them.

Source: A. Kalinov and A. Lastovetsky, "Heterogeneous distribution of computations solving linear algebra problems on
networks of heterogeneous computers" (2001), and in two dimensions O. Beaumont, V. Boudet, F. Rastello and Y. Robert,
"Matrix multiplication on heterogeneous platforms" (2001); floor, cap and tolerance as in published runtimes
(algorithms.md §6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import fsum
from numbers import Real

import numpy as np

from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape

FLOOR = 512  # indices that every rank takes at least, where there are enough
CAP = 8.0  # A rank takes at most this many even shares
LEAST, MOST = 1e-30, 1e30  # speeds, in any unit, of which sums and quotients are finite
TOLERANCE = 0.2  # speeds that spread less than this share of their mean count as equal


def speeds_problem(given: object, ranks: int | None = None, each: str = "rank") -> str:
    """Return the fault of speeds that a user gives, one for `each`; empty if there is none."""
    figures = list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes | dict) else []
    if ranks is not None and len(figures) != ranks:
        return f"there is one for each rank of the grid, {ranks}"
    is_right = bool(figures) and all(map(_is_speed, figures))
    return "" if is_right else f"they are numbers from 1e-30 to 1e30, one for each {each}"


def _is_speed(x: object) -> bool:
    return not isinstance(x, bool) and isinstance(x, Real) and LEAST <= x <= MOST  # type: ignore[operator]


def relative(speeds: Sequence[float]) -> tuple[float, ...]:
    """Speeds over their mean; empty if they count as equal."""
    mean = fsum(speeds) / max(1, len(speeds))
    if not speeds or max(speeds) - min(speeds) < TOLERANCE * mean:
        return ()
    return tuple(speed / mean for speed in speeds)


def slices(extent: int, speeds: Sequence[float], floor: int = FLOOR, cap: float = CAP) -> list[int]:
    """Return the bounds of slices of 0…extent − 1 in proportion to speeds, none below `floor` or above `cap`.

    Even where speeds hardly differ, or where the floor leaves no choice.
    """
    count = len(speeds)
    if extent <= floor * count or not relative(speeds):
        return [n * extent // count for n in range(count + 1)]
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
    edges = [round(edge) for edge in accumulate((shares[n] for n in range(count)), initial=0)]
    return [*edges[:-1], extent]


@lru_cache(maxsize=16)
def cuts_by_speed(
    splits: tuple[Split, ...], extents: tuple[int, ...], grid: MeshShape, speeds: tuple[float, ...], floor: int = FLOOR,
    by_column: bool = True,
) -> tuple[Split, ...]:
    """Even cuts, made in proportion to the speeds of the ranks that have each part; others stay.

    by_column: where two dimensions are cut, the parts of the second are columns of ranks, as wide as their ranks are
    fast together, and each of them cuts the first by the speeds of its own; else each is cut alike everywhere.
    """
    found, each = list(splits), np.array(speeds[: grid.size]).reshape(grid.dims)
    is_even = [all(level.kind == "even" and not level.skew for level in split) for split in splits]
    axes = {dim: sum((level.axes for level in splits[dim]), ()) for dim in range(len(splits)) if is_even[dim]}
    dims = [dim for dim in axes if axes[dim]]
    for dim in dims:
        extent = extents[dim]
        columns = axes[dims[1]] if by_column and len(dims) == 2 and dim == dims[0] else ()
        at = [grid.names.index(axis) for axis in (*columns, *axes[dim])]
        others = tuple(axis for axis in range(len(grid.names)) if axis not in at)
        summed = each.sum(axis=others).transpose(np.argsort(np.argsort(at)))
        rows = summed.reshape(grid.index(columns, dict.fromkeys(columns, 0))[1], -1)
        least = min(floor, int(extent / CAP / rows.shape[1]))
        lists = [slices(extent, row, floor=least) for row in rows.tolist()]
        if any(edges != slices(extent, [1.0] * rows.shape[1]) for edges in lists):
            lists, skew = (lists, columns) if any(edges != lists[0] for edges in lists) else (lists[:1], ())
            args = tuple(float(edge) for edges in lists for edge in edges)
            found[dim] = (Level(axes[dim], "bounds", args, skew),)
    return tuple(found)

"""Meshes and placements, drawn from a `random.Random`: cuts of all kinds, replicas, pins, summands, skews, grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from random import Random

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape, grids

KINDS = ("even", "even", "cyclic", "weights", "bounds")
"""How a dimension may be cut; `bounds` only first."""
ROLES = ("rows", "cols", "rows", "cols", "rows", "cols", "replicated", "replicated", "pinned", "sum")
"""What a mesh axis may be to a matrix; cutting it comes up most."""
GRID_NAMES = ("p", "q", "r")
"""Axes of a grid that is not the mesh's."""

Shape = tuple[int, int]


def draw_mesh(rng: Random, ranks: int, axes: Sequence[int] = (1, 2, 2, 2, 3)) -> tuple[int, ...]:
    """The shape of a mesh on one to three axes; one in eight leaves ranks over."""
    size = rng.randint(1, ranks) if rng.random() < 0.125 else ranks
    return rng.choice(list(grids(size, rng.choice(axes))))


def draw_layout(rng: Random, mesh: MeshShape, shape: Shape, roles: Sequence[str] = ROLES) -> Layout:
    """A placement of a matrix of `shape`; one in twelve on a grid of its own."""
    if rng.random() < 1 / 12:
        grid = draw_mesh(rng, mesh.size)
        inner = MeshShape(grid, GRID_NAMES[: len(grid)])
        return replace(_on(rng, inner, shape, roles), grid=inner)
    return _on(rng, mesh, shape, roles)


def _on(rng: Random, mesh: MeshShape, shape: Shape, roles: Sequence[str]) -> Layout:
    names = rng.sample(mesh.names, len(mesh.names))
    role = {axis: rng.choice(roles) for axis in names}
    splits = [
        _split(rng, mesh, [axis for axis in names if role[axis] == what], extent)
        for what, extent in zip(("rows", "cols"), shape, strict=True)
    ]
    dim = rng.randrange(2)
    cutting = {axis for level in splits[dim] for axis in level.axes}
    others = [axis for axis in names if axis not in cutting]
    if splits[dim] and others and rng.random() < 0.1:
        skew = tuple(rng.sample(others, rng.randint(1, len(others))))
        splits[dim] = (replace(splits[dim][0], skew=skew), *splits[dim][1:])
    pins = tuple((axis, rng.randrange(mesh.axis_size(axis))) for axis in names if role[axis] == "pinned")
    return Layout((splits[0], splits[1]), pins, tuple(axis for axis in names if role[axis] == "sum"))


def _split(rng: Random, mesh: MeshShape, axes: list[str], extent: int) -> Split:
    """A dimension cut over `axes`, one after the other or several taken together."""
    groups: list[tuple[str, ...]] = []
    for axis in axes:
        if groups and rng.random() < 0.3:
            groups[-1] += (axis,)
        else:
            groups.append((axis,))
    return tuple(_level(rng, mesh, Level(group), extent, is_first=not n) for n, group in enumerate(groups))


def _level(rng: Random, mesh: MeshShape, level: Level, extent: int, *, is_first: bool) -> Level:
    """The same cut, of another kind."""
    kind = rng.choice(KINDS if is_first else KINDS[:-1])
    count = prod(mesh.axis_size(axis) for axis in level.axes)
    args: tuple[float, ...] = ()
    if kind == "cyclic":
        args = (rng.randint(1, 5), rng.randint(0, 7), rng.randrange(count))[: rng.randint(1, 3)]
    elif kind == "weights":
        shares = [rng.randint(0, 3) for _ in range(count)]
        args = tuple(shares) if any(shares) else (1,) * count
    elif kind == "bounds":
        args = (0, *sorted(rng.randint(0, extent) for _ in range(count - 1)), extent)
    return replace(level, kind=kind, args=args)


def recut(rng: Random, layout: Layout, mesh: MeshShape, shape: Shape) -> Layout:
    """A placement over the same axes, cut elsewhere: what an algorithm that needs these axes takes as well."""
    inner = layout.mesh(mesh)
    splits = [
        tuple(_level(rng, inner, level, extent, is_first=not n) for n, level in enumerate(split))
        for split, extent in zip(layout.splits, shape, strict=True)
    ]
    return replace(layout, splits=(splits[0], splits[1]))

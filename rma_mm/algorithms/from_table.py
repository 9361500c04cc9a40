"""Algorithms written in the words of a table: `m→i, k→(l,j)` for a placement, i, j, l for the mesh's axes.

    m→i, k→j           rows over the first axis of the mesh, columns over the second
    k→l, n→(j,i)       columns over j, and inside each part over i; an axis that is not named replicates
    m→i, k→j:skew(i)   circular windows of k that start where i says (Cannon)
    m→i, k→l, j=0      only ranks at coordinate 0 of j hold anything

An algorithm for one axis runs on any mesh: its ranks are taken in order, as one ring.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Split
from rma_mm.geometry.mesh import AXIS_NAMES, MeshShape, divisors
from rma_mm.geometry.notation import parse_layout
from rma_mm.schedule.algorithm import (
    DIMS,
    OPERAND_DIMS,
    Algorithm,
    PlacedProblem,
    Problem,
    Wanted,
    WorkMap,
    is_placed_as,
)

_ENTRY = re.compile(r"([mnk])→(\((?:[^()]|\([^()]*\))*\)|[^,()]+(?:\([^)]*\))?)|(\w=\w+)")
_FACES = {"A": "mk", "B": "kn", "C": "mn"}


def algorithm_from_table(
    name: str, source: str, summary: str, *, axes: int, a: str | None, b: str | None, c: str, work: str,
    over: Literal["m", "n", "k"],
    also_accepts: Mapping[str, str] | None = None, staged_to: Mapping[str, str] | None = None, **more: Any,
) -> Algorithm:
    """Return an algorithm for meshes of `axes` axes from the placements of A, B and C and the work map.

    also: further placements that it takes, by operand; it needs no other. brought: placements that A or B is brought
    to before the product. A `None` placement is any. The rest goes to `Algorithm`.
    """

    def placements(mesh: MeshShape) -> Wanted | str:
        if axes not in (1, len(mesh.dims)):
            return f"needs a mesh of {('one axis', 'two axes', 'three axes')[axes - 1]}, {_as_in(mesh, axes)}"
        placed = [None if text is None else place(text, _FACES[x], mesh, axes) for x, text in (("A", a), ("B", b))]
        return placed[0], placed[1], place(c, _FACES["C"], mesh, axes)

    def others(mesh: MeshShape) -> dict[str, Layout]:
        return {x: place(text, _FACES[x], mesh, axes) for x, text in (also_accepts or {}).items()}

    def stage(problem: PlacedProblem) -> dict[str, Layout]:
        def outline(layout: Layout) -> tuple[object, ...]:
            return layout.outline(problem.mesh)

        texts = {x: text for x, text in (("A", a), ("B", b)) if x in turned and text is not None}
        upright = {x: place(text, _FACES[x], problem.mesh, axes) for x, text in texts.items()}
        found = {x: layout for x, layout in upright.items() if outline(problem.layout(x)) == outline(layout.transposed)}
        return found | {x: place(text, _FACES[x], problem.mesh, axes) for x, text in (staged_to or {}).items()}

    turned = more.get("accepts_transposed", "") if more.get("order") != "plain" else ""
    algorithm = Algorithm(
        name, source, summary, placed_work(work, axes), over, placements=placements,
        also_accepts=others if also_accepts else None, staged_to=stage if staged_to or turned else None, **more,
    )
    return replace(algorithm, form=one_sided(algorithm)) if algorithm.grouped else algorithm


def one_sided(algorithm: Algorithm) -> Callable[[str], Algorithm | str]:
    return lambda form: (
        algorithm.pulled if form == "pull" else f"{algorithm.name} has the form {algorithm.name}:pull (one-sided)"
    )


def best_placed(algorithms: Sequence[Algorithm], problem: Problem) -> Algorithm:
    """Return the algorithm that accepts most of the given placements; of equals the first."""

    def taken(algorithm: Algorithm) -> int:
        wanted = algorithm.placements(problem.mesh) if algorithm.placements else ""
        if isinstance(wanted, str):
            return 0
        return sum(
            given is not None and layout is not None and is_placed_as(given, layout, problem.extent(x), problem.mesh)
            for x, given, layout in zip("ABC", problem.layouts, wanted, strict=True)
        )

    return max(algorithms, key=taken)


def whole_numbers(text: str, count: int) -> list[int] | None:
    """`count` whole numbers of at least 1, separated by commas; None if the text is anything else."""
    words = text.split(",")
    if len(words) != count or not all(word.isdecimal() and int(word) > 0 for word in words):
        return None
    return [int(word) for word in words]


@lru_cache(maxsize=4096)
def place(text: str, dims: str, mesh: MeshShape, axes: int) -> Layout:
    """Return the placement that `text` describes, of a matrix (or space) whose dimensions are `dims`, on a mesh."""
    cuts: dict[str, str] = {}
    pins = []
    for dim, cut, pin in _ENTRY.findall(text):
        if pin:
            pins.append(pin)
        else:
            cuts[dim] = cut
    words = ", ".join([*(cuts.get(dim, "*") for dim in dims), *pins])
    if axes == 1 and len(mesh.dims) > 1:
        long = [name for name, size in zip(mesh.names, mesh.dims, strict=True) if size > 1]
        if len(long) == 1:  # the same ranks in the same order, and people write this axis
            return parse_layout(re.sub(rf"\b{AXIS_NAMES[0]}\b", long[0], words), mesh, len(dims))
        grid = MeshShape((mesh.size,), AXIS_NAMES[:1])
        return replace(parse_layout(words, grid, len(dims)), grid=grid)
    named = dict(zip(AXIS_NAMES, mesh.names, strict=False))
    return parse_layout(re.sub(rf"\b[{''.join(AXIS_NAMES)}]\b", lambda found: named[found[0]], words), mesh, len(dims))


def placed_work(text: str, axes: int) -> WorkMap:
    """The work map that `text` describes. Where an operand is cut over the same axes, the work is cut as it is."""

    def work(problem: PlacedProblem) -> Layout:
        plan = place(text, DIMS, problem.mesh, axes)
        return replace(plan, splits=tuple(_as_placed(problem, plan, dim) for dim in range(3)))

    return work


def _as_placed(problem: PlacedProblem, plan: Layout, dim: int) -> Split:
    """Return the cut of a dimension by C, A or B over the axes that `plan` names, with its blocks or weights."""
    split = plan.splits[dim]
    axes = [level.axes for level in split]
    for x in "CAB":
        layout = problem.layout(x)
        if dim in OPERAND_DIMS[x] and layout.mesh(problem.mesh) == plan.mesh(problem.mesh):
            found = layout.splits[OPERAND_DIMS[x].index(dim)]
            if [level.axes for level in found] == axes and not any(level.skew for level in found):
                return found
    return split


def _as_in(mesh: MeshShape, axes: int) -> str:
    """Return a mesh of the given number of axes for the ranks at hand."""
    fits: list[int] = []
    for left in range(axes, 0, -1):
        rest = mesh.size // prod(fits)
        fits.append(max(n for n in divisors(rest) if n**left <= rest) if left > 1 else rest)
    return f"as {tuple(fits)}; this one is {mesh.dims}"

"""Hypothesis strategies shared by pure and MPI tests: meshes, placements, problems, rows. No MPI, all picklable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import hypothesis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import DrawFn, SearchStrategy

from rma_mm.algorithms import ALGORITHMS
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Span
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.policy.model.machine import TYPICAL
from rma_mm.policy.planner.candidates import Request, placements_taken
from rma_mm.schedule.algorithm import Algorithm, Layouts, PlacedProblem
from rma_mm.schedule.lowering.lower import Tuning

NIGHT = os.environ.get("RMA_MM_TEST_KEPT")
"""The folder in which a night keeps what it has found; unset, every test draws the same each time."""
DATABASE = DirectoryBasedExampleDatabase(NIGHT) if NIGHT else None
hypothesis.settings.register_profile(
    "pure",
    derandomize=NIGHT is None,
    database=DATABASE,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

EXTENTS = (0, 1, 2, 3, 5, 6, 7, 8, 12, 13, 17)
"""Lengths of m, n and k: nothing, one, primes, and some that divide."""
KINDS = ("even", "cyclic", "weights", "bounds")
ROLES = ("rows", "cols", "rows", "cols", "replicated", "pinned", "sum")
"""What a mesh axis may be to a matrix; cutting it comes up most."""


SHARE = float(os.environ.get("RMA_MM_TEST_SHARE", "0.2"))
"""Of the examples that tests ask for, so many are drawn: the suite has three minutes. A night draws all."""


def pure(max_examples: int) -> hypothesis.settings:
    """The settings of a deterministic test without MPI."""
    return hypothesis.settings(hypothesis.settings.get_profile("pure"), max_examples=share(max_examples))


def share(max_examples: int) -> int:
    """How many are drawn where a test asks for so many."""
    return max(2, round(SHARE * max_examples))


# -- meshes ---------------------------------------------------------------------------------------


@st.composite
def meshes(draw: DrawFn, max_ranks: int = 64, axes: Sequence[int] = (1, 2, 3, 4)) -> MeshShape:
    """Meshes of at most `max_ranks` ranks on one to four axes, their ranks on nodes in any way."""
    shape: list[int] = []
    limit = max_ranks if draw(st.integers(0, 3)) == 0 else min(max_ranks, 8)  # small ones mostly
    for _ in range(draw(st.sampled_from(axes))):
        shape.append(draw(st.integers(1, max(1, limit // prod(shape)))))
    shape = draw(st.permutations(shape))
    return MeshShape(tuple(shape), node_of_rank=draw(node_maps(prod(shape))))


@st.composite
def node_maps(draw: DrawFn, size: int) -> tuple[int, ...]:
    """The node of each of `size` ranks: in runs, dealt out round robin, or in no order at all."""
    count = draw(st.integers(1, min(size, 4)))
    how = draw(st.sampled_from(("runs", "dealt", "any")))
    if how == "any":
        return tuple(draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size)))
    return tuple(rank * count // size if how == "runs" else rank % count for rank in range(size))


# -- placements -----------------------------------------------------------------------------------


@st.composite
def layouts(
    draw: DrawFn,
    mesh: MeshShape,
    extents: tuple[int, ...],
    roles: Sequence[str] = ROLES,
    kinds: Sequence[str] = KINDS,
    skew: bool = True,
) -> Layout:
    """Placements of a matrix of shape `extents` that pass `Layout.check`.

    With roles=("rows", "cols") each element is held once; kinds=("even",) and skew=False then make equal shares.
    """
    role = {axis: draw(st.sampled_from(roles)) for axis in draw(st.permutations(mesh.names))}
    axes = [[axis for axis in role if role[axis] == what] for what in ("rows", "cols")]
    splits = [draw(_splits(mesh, mine, extent, kinds)) for mine, extent in zip(axes, extents, strict=True)]
    if skew:
        dim = draw(st.sampled_from((0, 1)))
        others = [axis for axis in mesh.names if axis not in axes[dim]]
        if splits[dim] and others:
            splits[dim] = draw(_skewed(mesh, splits[dim], others))
    pins = tuple((axis, draw(st.integers(0, mesh.axis_size(axis) - 1))) for axis in role if role[axis] == "pinned")
    layout = Layout(tuple(splits), pins, tuple(axis for axis in role if role[axis] == "sum"))
    layout.check(extents, mesh)
    return layout


@st.composite
def by_column(draw: DrawFn, mesh: MeshShape, extents: tuple[int, int]) -> Layout:
    """Blocks on a mesh of two axes: columns of any width, each cut into rows of its own; or that transposed."""
    rows, columns = extents
    (i, j), (heights, widths) = mesh.names, mesh.dims
    lists = draw(st.lists(_arguments("bounds", heights, rows), min_size=widths, max_size=widths))
    cut = Level((i,), "bounds", tuple(edge for edges in lists for edge in edges), (j,))
    layout = Layout(((cut,), (Level((j,), "bounds", draw(_arguments("bounds", widths, columns))),)))
    layout.check(extents, mesh)
    return layout


@st.composite
def _splits(draw: DrawFn, mesh: MeshShape, axes: list[str], extent: int, kinds: Sequence[str]) -> Split:
    """A dimension cut over `axes`, one after the other or several taken together."""
    groups: list[tuple[str, ...]] = []
    for axis in axes:
        if groups and draw(st.integers(0, 2)) == 0:
            groups[-1] += (axis,)
        else:
            groups.append((axis,))
    return draw(_levels(mesh, groups, extent, kinds))


@st.composite
def _levels(
    draw: DrawFn, mesh: MeshShape, groups: Sequence[tuple[str, ...]], extent: int, kinds: Sequence[str]
) -> Split:
    """A dimension cut over groups of axes, one group after the other."""
    levels = []
    for n, group in enumerate(groups):
        kind = draw(st.sampled_from([kind for kind in kinds if kind != "bounds" or n == 0]))
        count = prod(mesh.axis_size(axis) for axis in group)
        levels.append(Level(group, kind, draw(_arguments(kind, count, extent))))
    return tuple(levels)


def _arguments(kind: str, count: int, extent: int) -> SearchStrategy[tuple[float, ...]]:
    """What a cut of `extent` indices into `count` parts needs."""
    if kind == "cyclic":
        most = st.tuples(st.integers(1, 5), st.integers(0, 7), st.integers(0, count - 1))
        return st.tuples(most, st.integers(1, 3)).map(lambda drawn: drawn[0][: drawn[1]])
    if kind == "weights":
        return st.lists(st.integers(0, 3), min_size=count, max_size=count).map(
            lambda shares: tuple(shares) if any(shares) else (1,) * count
        )
    if kind == "bounds":
        inner = st.lists(st.integers(0, extent), min_size=count - 1, max_size=count - 1)
        return inner.map(lambda edges: (0, *sorted(edges), extent))
    return st.just(())


@st.composite
def _skewed(draw: DrawFn, mesh: MeshShape, split: Split, others: list[str]) -> Split:
    """`split` with one of its levels shifted by axes that do not cut the dimension, mostly not; or bounds for each."""
    if draw(st.integers(0, 3)):
        return split
    chosen = draw(st.integers(0, len(split) - 1))
    skew = tuple(draw(st.lists(st.sampled_from(others), min_size=1, unique=True)))
    shifted = replace(split[chosen], skew=skew)
    if shifted.kind == "bounds" and draw(st.integers(0, 2)):
        count = prod(mesh.axis_size(axis) for axis in skew)
        drawn = _arguments("bounds", len(shifted.args) - 1, int(shifted.args[-1]))
        lists = draw(st.lists(drawn, min_size=count, max_size=count))
        shifted = replace(shifted, args=tuple(edge for edges in lists for edge in edges))
    return (*split[:chosen], shifted, *split[chosen + 1 :])


# -- products -------------------------------------------------------------------------------------

rows: SearchStrategy[Algorithm] = st.sampled_from(list(ALGORITHMS.values()))
"""The rows of the registry."""

tunings: SearchStrategy[Tuning] = st.builds(Tuning, width=st.sampled_from((1, 3, 8, 1024)), depth=st.integers(0, 3))
"""Panel widths and prefetch depths."""


def axes_of(algorithm: Algorithm) -> list[int]:
    """How many axes the meshes may have that `row` can use."""
    if algorithm.placements is None:
        return [1, 2, 3, 4]
    return [count for count in (1, 2, 3, 4) if not isinstance(algorithm.placements(MeshShape((1,) * count)), str)]


def some_mesh(algorithm: Algorithm) -> MeshShape:
    """A mesh of four ranks that `row` can use."""
    return MeshShape({1: (4,), 2: (2, 2), 3: (2, 1, 2), 4: (2, 1, 2, 1)}[axes_of(algorithm)[-1]])


@st.composite
def problems(
    draw: DrawFn,
    algorithm: Algorithm | None = None,
    max_ranks: int = 64,
    extents: Sequence[int] = EXTENTS,
    recut: bool = True,
) -> tuple[Algorithm | None, PlacedProblem]:
    """Products that `row` can serve, and the row fitted to them: on placements that it takes, or on any.

    The row is None where any may serve. recut: whether placements that it takes are also cut elsewhere.
    """
    m, n, k = (draw(st.sampled_from(extents)) for _ in range(3))
    mesh = draw(meshes(max_ranks, axes=axes_of(algorithm) if algorithm else (1, 2, 3, 4)))
    algorithm, placed = draw(placements(algorithm, (m, n, k), mesh, recut))
    in_place = draw(st.sampled_from(("", "A", "B", "AB")))
    return algorithm, PlacedProblem(
        (m, n, k), mesh, placed, draw(st.booleans()), in_place, fetches_together=draw(st.booleans())
    )


@st.composite
def placements(
    draw: DrawFn, algorithm: Algorithm | None, shape: tuple[int, int, int], mesh: MeshShape, recut: bool = True
) -> tuple[Algorithm | None, Layouts]:
    """Placements of A, B and C that `row` can serve, and the row fitted to them."""
    m, n, k = shape
    free = [layouts(mesh, (m, k)), layouts(mesh, (k, n)), layouts(mesh, (m, n))]
    if algorithm and algorithm.specialize:
        whole = [layouts(mesh, e, roles=ROLES[:-1]) for e in ((m, k), (k, n))]  # one that chooses takes no summands
        given = tuple(draw(st.none() | each) for each in (*whole, free[2]))
        uneven = replace(TYPICAL, speeds=tuple(draw(st.floats(0.5, 4)) for _ in mesh.ranks))
        fitted = algorithm.specialize(Request(shape, mesh, given, cost_model=CostModel(uneven)))
        assert isinstance(fitted, Algorithm), fitted
        taken = placements_taken(fitted, Request(shape, mesh, given))
        return fitted, draw(_recut(taken, shape, mesh, given) if recut else st.sampled_from(taken))
    if algorithm and algorithm.placements:
        taken = placements_taken(algorithm, Request(shape, mesh))
        return algorithm, draw(_recut(taken, shape, mesh) if recut else st.sampled_from(taken))
    a, b, c = map(draw, free)
    return algorithm, (a, b, c)


@st.composite
def _recut(
    draw: DrawFn,
    taken: Sequence[Layouts],
    shape: tuple[int, int, int],
    mesh: MeshShape,
    given: Sequence[Layout | None] = (None, None, None),
) -> Layouts:
    """Placements that a row takes, each cut over the same axes but mostly elsewhere; a C that is everywhere stays so.

    given: those that are not open.
    """
    a, b, c = draw(st.sampled_from(taken))
    whole = [layouts for layouts in taken if not layouts[2].split_axes and not layouts[2].pins]
    if whole and given[2] is None and draw(st.integers(0, 2)) == 0:
        c = whole[0][2]
    m, n, k = shape
    placed = []
    for layout, fixed, extents in zip((a, b, c), given, ((m, k), (k, n), (m, n)), strict=True):
        splits = [
            draw(_levels(layout.mesh(mesh), [level.axes for level in split], extent, KINDS))
            for split, extent in zip(layout.splits, extents, strict=True)
        ]
        skewed = [
            tuple(replace(new, skew=old.skew) for new, old in zip(split, olds, strict=True))
            for split, olds in zip(splits, layout.splits, strict=True)
        ]
        is_kept = fixed is not None or draw(st.integers(0, 2)) == 0
        placed.append(layout if is_kept else replace(layout, splits=tuple(skewed)))
    a, b, c = placed
    return a, b, c


@dataclass(frozen=True)
class Case:
    """A product with everything that a test needs to run it."""

    row: Algorithm
    problem: PlacedProblem
    tuning: Tuning
    alpha: int
    beta: int
    """Not 0 where the problem keeps C."""
    transposed: str
    """Those of A and B that are stored transposed."""
    seed: int


@st.composite
def cases(
    draw: DrawFn, algorithm: Algorithm | None = None, max_ranks: int = 64, extents: Sequence[int] = EXTENTS
) -> Case:
    """Products of `row`, or of any."""
    fitted, problem = draw(problems(algorithm or draw(rows), max_ranks, extents))
    assert fitted is not None
    beta = draw(st.sampled_from((1, -2, 3))) if problem.keeps_c else 0
    scalars = draw(st.sampled_from((1, -1, 2, 0))), beta
    return Case(fitted, problem, draw(tunings), *scalars, draw(st.sampled_from(("", "A", "B", "AB"))), draw(seeds))


seeds: SearchStrategy[int] = st.integers(0, 2**16)
"""Seeds of matrices and interleavings."""


def spans(extent: int = 40) -> SearchStrategy[Span]:
    """Sets of indices within 0…extent − 1, of no run or of several."""
    run = st.tuples(st.integers(0, extent), st.integers(0, extent))
    return st.lists(run, max_size=6).map(Span)

"""What every row moves, counted by the interpreter, against closed forms; and rows that are not what their name says.

Published figures that differ from these are named where they do, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import pytest

from rma_mm.algorithms import ALGORITHMS, find_algorithm
from rma_mm.geometry.mesh import MeshShape, grids
from rma_mm.policy.planner.candidates import Request, candidates, placements_taken, single_layouts
from rma_mm.schedule.algorithm import Algorithm, Layouts, PlacedProblem
from rma_mm.schedule.interpret import Outcome, interpret
from rma_mm.schedule.lowering.decisions import LoweringDecisions
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.ops import foreign
from rma_mm.schedule.schedule import Schedule
from tests.closed_forms import FORMS, MESHES, TURNED, Extents, Form, Grid, even_shape, skewing
from tests.pure.test_schedules import limits, run
from tests.reference import Matrix, kept, nothing
from tests.strategies import Case
from tests.thorough import covering, nightly, thorough, usually


def meshes_of(label: str) -> Sequence[Grid]:
    """The meshes on which a form is counted."""
    form = FORMS[label]
    return MESHES[form.axes][:: 2 if form in TURNED else 1]


def is_grouped(form: Form) -> bool:
    """Whether it moves by groups, and has a one-sided form beside."""
    algorithm = find_algorithm(form.name)
    return bool(algorithm.form and algorithm.grouped)


def zeros(problem: PlacedProblem) -> dict[str, list[Matrix]]:
    """Local arrays of A, B and C."""
    return {
        x: [np.nan_to_num(tile) for tile in nothing(problem.layout(x), problem.mesh, problem.extent(x))] for x in "ABC"
    }


def counted(name: str, problem: PlacedProblem) -> tuple[Outcome, list[int]]:
    """What a product moves, and the messages of each rank."""
    schedule = kept(lower(find_algorithm(name), problem))
    return interpret(schedule, zeros(problem)), messages(schedule)


def messages(schedule: Schedule) -> list[int]:
    """Messages of each rank, from its operations."""
    return [
        sum(counts for op in schedule.program(rank) for _, _, counts in foreign(op, rank))
        for rank in schedule.mesh.ranks
    ]


# -- the counts -----------------------------------------------------------------------------------

DOORS = ("one by one", "in place", "nodes")
"""How operands are read: by messages; in place where they lie, which is no message; between ranks that are nodes."""


def check_counts(form: Form, grid: Grid, door: str, factors: Extents = (2, 3, 4)) -> None:
    """Words and messages of a form are the closed form, whichever way they go. Without NARROW panels have one owner."""
    shape, in_place = even_shape(grid, *factors), "" if door == "one by one" else "AB"
    nodes = tuple(range(MeshShape(grid).size)) if door == "nodes" else ()
    with limits({"NARROW": 1} if door == "in place" and form.viewed_of else {}):
        outcome, each = counted(form.name, form.problem(MeshShape(grid, node_of_rank=nodes), shape, in_place))
    assert outcome.words == form.words(grid, shape)
    if door == "nodes":
        assert outcome.words_between_nodes == sum(outcome.words)
    if not form.label.startswith("pblas:1, ") or factors == (2, 3, 4):
        # of fewer indices its panels are not put together, and come by a message each
        assert each == form.messages(grid, shape, in_place if door == "in place" else "")
        assert outcome.messages == sum(each)


@pytest.mark.parametrize("turn", usually(1, range(len(DOORS) + 1), rest=nightly))
@pytest.mark.parametrize("label", FORMS)
def test_words_and_messages(label: str, turn: int) -> None:
    """On each mesh one way; by turns, so that each is taken on some. Of the meshes all at night."""
    for number, grid in enumerate(meshes_of(label)[:: 1 if turn else 2]):
        check_counts(FORMS[label], grid, DOORS[(number + turn) % len(DOORS)])


@nightly
@pytest.mark.parametrize("label", FORMS)
def test_words_and_messages_of_few_indices(label: str) -> None:
    for grid in meshes_of(label):
        check_counts(FORMS[label], grid, DOORS[0], (1, 2, 1))


@thorough
@pytest.mark.parametrize("label", FORMS)
def test_words_between_two_nodes(label: str) -> None:
    """Where ranks are does not change what they move; only pulls and pushes tell nodes apart."""
    for grid in meshes_of(label):
        check_halves(FORMS[label], grid)


def check_halves(form: Form, grid: Grid) -> None:
    """With half of the ranks on each of two nodes."""
    shape, size = even_shape(grid), MeshShape(grid).size
    halves = tuple(2 * rank // size for rank in range(size))
    outcome, _ = counted(form.name, form.problem(MeshShape(grid, node_of_rank=halves), shape, "AB"))
    assert outcome.words == form.words(grid, shape)
    assert 0 <= outcome.words_between_nodes <= sum(outcome.words)
    assert sum(form.messages(grid, shape, "AB")) <= outcome.messages <= sum(form.messages(grid, shape))


# -- what else is said about them -----------------------------------------------------------------


def pulled(form: Form, grid: Grid) -> tuple[list[int], bool]:
    """The words of a form's one-sided form, and whether the other one brings A or B elsewhere first."""
    shape = even_shape(grid)
    problem = form.problem(MeshShape(grid), shape)
    staged = LoweringDecisions.of(find_algorithm(form.name), problem).staged
    return counted(f"{form.name}:pull", problem)[0].words, bool(staged)


@pytest.mark.parametrize("label", [label for label, form in FORMS.items() if is_grouped(form)])
def test_pulls_move_the_same_words(label: str) -> None:
    """Nothing is moved less by going through groups, and more only where an operand is brought elsewhere first."""
    form = FORMS[label]
    for grid in meshes_of(label)[::2]:
        words, is_staged = pulled(form, grid)
        if is_staged:
            assert sum(words) <= sum(form.words(grid, even_shape(grid)))
        else:
            assert words == form.words(grid, even_shape(grid))


@pytest.mark.parametrize("grid", MESHES[2], ids=str)
def test_cannon_moves_what_summa_moves(grid: Grid) -> None:
    """Once skewed: from the same blocks the same words, whether they are shifted, broadcast or pulled."""
    labels = ("cannon, placed skewed", "summa_c", "pumma", "srumma")
    first, *others = (FORMS[label].words(grid, even_shape(grid)) for label in labels)
    assert others == [first] * 3


@pytest.mark.parametrize("grid", MESHES[2], ids=str)
def test_skewing_costs_one_block_unless_the_window_keeps_part_of_it(grid: Grid) -> None:
    """algorithms.md §3: a/(RC) on ranks i ≠ 0 and b/(RC) on ranks j ≠ 0.

    A's window of K/C indices moves by iK/R, and keeps what both cover where R > C (B's where C > R). Then it is less:
    on 3 × 2 rank (1, 0) needs K/3…5K/6 of A and has 0…K/2. By hops between neighbours it is min(i, R − i) times that.
    """
    r, c = grid
    for seat in FORMS["cannon, placed plain"].seats(grid, even_shape(grid)):
        published = ((seat.i > 0) * seat.a + (seat.j > 0) * seat.b) // (r * c)
        hops = (min(seat.i, r - seat.i) * seat.a + min(seat.j, c - seat.j) * seat.b) // (r * c)
        assert skewing(seat) <= published
        assert skewing(seat) <= hops
        if r == c:
            assert skewing(seat) == published


@pytest.mark.parametrize("grid", MESHES[3], ids=str)
def test_totals_of_25d(grid: Grid) -> None:
    """algorithms.md §3: of A (C + D − 2)·a by broadcasts and (C − 1/D)·a by pulls, of B the same with R."""
    r, c, d = grid
    m, n, k = shape = even_shape(grid)
    a, b, sums = m * k, k * n, (d - 1) * m * n
    assert sum(FORMS["solomonik_25d"].words(grid, shape)) == (c + d - 2) * a + (r + d - 2) * b + sums
    assert d * sum(FORMS["solomonik_25d:pull"].words(grid, shape)) == (c * d - 1) * a + (r * d - 1) * b + d * sums


@pytest.mark.parametrize(("p", "d"), [(2, 1), (2, 2), (4, 2), (4, 4), (6, 2), (6, 3)])
def test_25d_moves_what_its_original_cannon_form_moves(p: int, d: int) -> None:
    """There layer l starts at block i + j + l·p/D of all of k, so that no layer owns one range: other words, as many.

    Each rank multiplies p/D of the p blocks of its row; which rank finds its own among them is all that changes.
    """
    steps = p // d
    starts = [(j, i + j + layer * steps) for i in range(p) for j in range(p) for layer in range(d)]
    blocks = sum((start + t) % p != j for j, start in starts for t in range(steps))
    shape = even_shape((p, p, d))
    moved = sum(FORMS["solomonik_25d"].words((p, p, d), shape))
    m, n, k = shape
    first_copies_and_sums = (d - 1) * (m * k + k * n + m * n)
    assert moved - first_copies_and_sums == blocks * (m * k + k * n) // p**2


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("label", ["agarwal_3d", "nus_3d"])
def test_gathers_on_a_cube(label: str, p: int) -> None:
    """3(n²/P^(2/3) − n²/P) words on P = p³ ranks. A survey gives n²/P, which is one block and not the gathered ones."""
    n = 2 * p**3
    assert FORMS[label].words((p, p, p), (n, n, n)) == [3 * (n**2 // p**2 - n**2 // p**3)] * p**3


@pytest.mark.parametrize("grid", MESHES[3], ids=str)
def test_b_of_tesseract_costs_as_much_from_one_layer_as_from_all(grid: Grid) -> None:
    """With B on every layer nothing of it is counted; bringing it there costs (D − 1) · b, either way."""
    shape = even_shape(grid)
    shared, pinned, copied = (
        sum(FORMS[f"tesseract{more}"].words(grid, shape)) for more in ("", ", B l=0", ", B on every layer")
    )
    assert shared == pinned == copied + (grid[2] - 1) * shape[1] * shape[2]


@pytest.mark.parametrize("grid", MESHES[2], ids=str)
def test_totals_of_a_stationary_a(grid: Grid) -> None:
    """(R − 1)·b of B where it is placed k→j, n→i, as an all-gather has it; blocks k→i, n→j are (1 − 1/C)·b dearer.

    A rank then holds of the K_j × N that it needs K_i ∩ K_j of N/C columns, which are b/C over all ranks and not b.
    """
    r, c = grid
    m, n, k = shape = even_shape(grid)
    b, sums = k * n, (c - 1) * m * n
    assert sum(FORMS["summa_a"].words(grid, shape)) == (r - 1) * b + sums
    assert sum(FORMS["summa_a, B k→i, n→j"].words(grid, shape)) == (r - 1) * b + b - b // c + sums


# -- no row is another by mistake -----------------------------------------------------------------

NAMES = [
    *ALGORITHMS,
    *(f"{name}:pull" for name, algorithm in ALGORITHMS.items() if algorithm.grouped and not algorithm.specialize),
]
SHAPE = (24, 24, 48)

SAME: dict[int, list[set[str]]] = {
    # row 21 on rows of A, B and C is row 1 with B in equal shares: pull all of B, multiply the own rows; and row 22
    # has even slices where speeds are equal
    1: [{"stationary_c", "data_parallel:pull", "weighted"}],
    # row 20 is row 21 on 2-D blocks; rows 9 and 12 are too once they pull, for then their own order goes with the
    # groups
    2: [{"stationary_c", "srumma", "summa_c:pull", "pumma:pull"}],
    3: [],
}
"""Axes of a mesh → rows of algorithms.md §2 that are the same by definition on it."""
SEARCHED = {(4, 4): [{"cannon", "t10_rotate"}]}
"""Mesh → rows of which one is the best that the other's search finds: rings of A and B on a square are Cannon's."""


def settled(name: str, mesh: MeshShape) -> tuple[Algorithm, Layouts] | None:
    """A row and the placements that it asks for, or blocks where any will do; None where it cannot use the mesh."""
    algorithm, request = find_algorithm(name), Request(SHAPE, mesh, algorithm=name)
    if algorithm.specialize:
        best = candidates(request)[0]
        return (best.algorithm, best.layouts) if best.layouts else None
    if algorithm.placements is None:
        blocks = next(single_layouts(mesh))
        return algorithm, (blocks, blocks, blocks)
    return None if isinstance(algorithm.placements(mesh), str) else (algorithm, placements_taken(algorithm, request)[0])


def programs(name: str, mesh: MeshShape) -> str:
    """The operations of all ranks; nothing where the row cannot use the mesh."""
    found = settled(name, mesh)
    return "\n".join(listed(lower(found[0], PlacedProblem(SHAPE, mesh, found[1], in_place="")))) if found else ""


def listed(schedule: Schedule) -> Iterator[str]:
    """Every operation and its step; of a pool, its tasks as rank 0 runs them."""
    for rank in schedule.mesh.ranks:
        yield from (f"{rank} {op.step} {op}" for op in schedule.program(rank))
    if schedule.pool:
        for task in range(schedule.pool.tasks):
            yield from (f"task {op.step} {op}" for op in schedule.pool.program(task, 0))


@pytest.mark.parametrize("grid", usually(3, [(4,), (3, 2), (2, 2, 2), (6,), (2, 3), (4, 4), (2, 3, 2)], False), ids=str)
def test_no_two_rows_have_one_schedule(grid: Grid) -> None:
    """But for those that are one by definition on such a mesh, and these do. NARROW would fuse panels into one."""
    mesh = MeshShape(grid)
    with limits({"NARROW": 1}):
        found = sorted((text, name) for name in NAMES if (text := programs(name, mesh)))
    same = [{name for _, name in mine} for _, mine in groupby(found, key=lambda pair: pair[0])]
    expected = [*SAME[len(grid)], *SEARCHED.get(grid, [])]
    assert sorted(map(sorted, (names for names in same if len(names) > 1))) == sorted(map(sorted, expected))


# -- every row on every number of ranks -----------------------------------------------------------

COUNTS = (1, 2, 3, 6, 8)
UNEVEN = (7, 9, 10)


def usable(name: str, count: int) -> list[tuple[MeshShape, Algorithm, Layouts]]:
    """The meshes of `count` ranks on which the planner can take a row, and how: the row, and its placements."""
    requests = [Request(UNEVEN, MeshShape(grid), algorithm=name) for axes in (1, 2, 3) for grid in grids(count, axes)]
    best = [(request.mesh, candidates(request)[0]) for request in requests]
    return [(mesh, found.algorithm, found.layouts) for mesh, found in best if found.layouts]


@pytest.mark.parametrize("count", usually(1, sorted(COUNTS, key=lambda count: abs(count - 6)), rest=nightly))
@pytest.mark.parametrize("name", covering(ALGORITHMS))
def test_every_row_runs_on_so_many_ranks(name: str, count: int) -> None:
    meshes = usable(name, count)
    assert meshes
    for mesh, algorithm, layouts in meshes:
        run(Case(algorithm, PlacedProblem(UNEVEN, mesh, layouts, in_place=""), Tuning(), 1, 0, "", count))


@pytest.mark.parametrize("name", ["cannon", "pumma", "summa_c", "summa_a", "summa_b"])
def test_rows_of_two_axes_use_every_mesh_of_two_axes(name: str) -> None:
    for count in COUNTS:
        assert {mesh.dims for mesh, _, _ in usable(name, count)} == set(grids(count, 2))

"""Every schedule against NumPy: rows of the registry and redistribution, on virtual ranks in random interleavings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS, find_algorithm
from rma_mm.dsl.scheduling import product
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.policy.model.cost_model import TYPICALLY, CostBreakdown, CostModel, estimate
from rma_mm.policy.model.machine import TYPICAL
from rma_mm.policy.model.traffic import traffic
from rma_mm.policy.model.volumes import workload_of
from rma_mm.policy.planner.candidates import Request, candidates, placed_problem, placements_taken
from rma_mm.schedule.algorithm import Algorithm, PlacedProblem
from rma_mm.schedule.interpret import Outcome, interpret
from rma_mm.schedule.lowering import decisions, node_crossing
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.lowering.node_crossing import LEAST
from rma_mm.schedule.lowering.redistribute import redistribution
from rma_mm.schedule.ops import Accumulate, Barrier, Copy, Multiply, Op
from rma_mm.schedule.passes import leading, sources
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.verify.checker import verify
from tests.reference import Matrix, collect, distribute, expected, kept, nothing, prove, whole_numbers
from tests.strategies import ROLES, Case, by_column, cases, layouts, meshes, problems, pure, seeds
from tests.thorough import covering

LIMITS = st.fixed_dictionaries(
    {}, optional={"NARROW": st.sampled_from((1, 2, 4)), "LONGEST": st.just(40), "LEAST": st.just(0)}
)
"""Limits of `rma_mm.schedule.lowering.decisions`, as they are or so small that tiny matrices are cut like large
ones; and that of `node_crossing`, or none, so that they cross nodes as large ones do."""


@contextmanager
def limits(changed: dict[str, int]) -> Iterator[None]:
    """The lowering with other limits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setattr(node_crossing if name == "LEAST" else decisions, name, value)
        yield


def stored(x: Matrix, layout: Layout, mesh: MeshShape, rng: np.random.Generator, transposed: bool) -> list[Matrix]:
    """Local arrays of op(X), placed by `layout`; where `transposed`, they are views of X's, placed by `layout.T`."""
    if not transposed:
        return distribute(x, layout, mesh, rng)
    return [tile.T for tile in distribute(x, layout.T, mesh, rng)]


class Run:
    """A case on random matrices, run once."""

    def __init__(self, case: Case, schedule: Schedule) -> None:
        self.case, self.schedule = case, schedule
        problem, rng = case.problem, np.random.default_rng(case.seed)
        self.a, self.b = (
            whole_numbers(rng, problem.extent(x)[::-1] if x in case.transposed else problem.extent(x)) for x in "AB"
        )
        self.c = whole_numbers(rng, problem.extent("C"))
        self.rng = rng

    def homes(self) -> dict[str, list[Matrix]]:
        """Fresh local arrays; a C that must not be read holds NaN."""
        problem, mesh = self.case.problem, self.case.problem.mesh
        place = problem.layout("C")
        kept = problem.keeps_c
        return {
            "A": stored(self.a, problem.layout("A"), mesh, self.rng, "A" in self.case.transposed),
            "B": stored(self.b, problem.layout("B"), mesh, self.rng, "B" in self.case.transposed),
            "C": distribute(self.c, place, mesh, self.rng) if kept else nothing(place, mesh, self.c.shape),
        }

    def interpret(self, seed: int, claims: dict[int, list[int]] | None = None) -> Outcome:
        """Run the schedule; the result must be NumPy's."""
        case, mesh = self.case, self.case.problem.mesh
        outcome = interpret(self.schedule, self.homes(), case.alpha, case.beta, seed, claims)
        got = collect(outcome.tiles, case.problem.layout("C"), mesh, self.c.shape)
        wanted = expected(self.a, self.b, self.c, case.alpha, case.beta, case.transposed)
        assert np.array_equal(got, wanted)
        return outcome


def run(case: Case, seed: int = 0) -> Outcome:
    """Lower, verify and interpret a case."""
    return Run(case, proved(case.row, case.problem, case.tuning)).interpret(seed)


def proved(algorithm: Algorithm, problem: PlacedProblem, tuning: Tuning) -> Schedule:
    """Lower and verify."""
    schedule = kept(lower(algorithm, problem, tuning))
    verify(schedule)
    prove(schedule)
    return schedule


# -- the product ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_multiplies_as_numpy(name: str) -> None:
    @pure(25)
    @given(cases(ALGORITHMS[name]), LIMITS)
    def check(case: Case, changed: dict[str, int]) -> None:
        with limits(changed):
            run(case, case.seed)

    check()


def test_meshes_of_four_axes() -> None:
    """What the planner finds for sixteen ranks, and words that name every axis, whatever they are called."""
    mesh, shape = MeshShape((2, 2, 2, 2)), (9, 10, 11)
    found = [each for each in candidates(Request(shape, mesh)) if not each.rejected]
    assert {"stationary_c", "queue", "t10_rotate", "gather_gemm"} <= {each.algorithm.name for each in found}
    for each in found:
        assert each.layouts
        run(Case(each.algorithm, PlacedProblem(shape, mesh, each.layouts), Tuning(), 1, 0, "", 0))
    loops = product(A="xy->xy*x", B="xy->*yx*", C="xy->xy00").distribute(m="i", n="j", k=("l", "p"))
    algorithm = loops.communicate("A", "B", at="k").communicate("C", at="end").algorithm("deep")
    renamed = MeshShape((2, 2, 2, 2), ("a", "b", "c", "d"), node_of_rank=[rank // 5 for rank in range(16)])
    for each in (mesh, renamed):
        run(
            Case(
                algorithm, PlacedProblem(shape, each, placements_taken(algorithm, Request(shape, each))[0]), Tuning(),
                1, 0, "", 0,
            )
        )


@pure(30)
@given(cases(), seeds)
def test_another_interleaving_moves_the_same_words(case: Case, seed: int) -> None:
    schedule = lower(case.row, case.problem, case.tuning)
    runner = Run(case, schedule)
    first = runner.interpret(case.seed)
    again = runner.interpret(seed, first.claims if case.row.order == "ticket" else None)
    assert (again.words, again.words_between_nodes, again.messages) == (
        first.words,
        first.words_between_nodes,
        first.messages,
    )


@pure(60)
@given(cases(), seeds)
def test_what_brings_a_and_b_may_come_first(case: Case, seed: int) -> None:
    """Before every barrier, and before C is opened."""
    schedule = lower(case.row, case.problem, case.tuning)

    def program(rank: int) -> list[Op]:
        ops = schedule.program(rank)
        lead, rest = leading(ops)
        first = [op for each in lead for op in each]
        assert all(source.buffer in ("A", "B") for op in first for source in sources(op))
        barriers = [sum(isinstance(x, Barrier) for x in ops[: ops.index(op)]) for op in first]
        assert barriers == [passed for passed, each in enumerate(lead) for _ in each]
        return [*first, *rest]

    changed = replace(schedule, program=program)
    verify(changed)
    Run(case, changed).interpret(seed)


@pure(25)
@given(cases(ALGORITHMS["queue"], max_ranks=8), seeds)
def test_replayed_tickets_move_the_same_words(case: Case, seed: int) -> None:
    with limits({"NARROW": 2}):
        runner = Run(case, lower(case.row, case.problem, case.tuning))
        first = runner.interpret(case.seed)
        again = runner.interpret(seed, first.claims)
    tasks = sorted(task for mine in first.claims.values() for task in mine)
    assert runner.schedule.pool
    assert tasks == list(range(runner.schedule.pool.tasks))
    assert (again.claims, again.words, again.messages) == (first.claims, first.words, first.messages)


# -- redistribution -------------------------------------------------------------------------------


@st.composite
def moves(draw: st.DrawFn) -> tuple[MeshShape, tuple[int, int], Layout, Layout]:
    """A matrix on a mesh, and two placements of it."""
    mesh = draw(meshes())
    shape = draw(st.tuples(st.integers(0, 13), st.integers(0, 13)))
    return mesh, shape, draw(layouts(mesh, shape)), draw(layouts(mesh, shape))


@pure(100)
@given(moves(), seeds, st.booleans())
def test_redistribution_between_any_two_placements(
    move: tuple[MeshShape, tuple[int, int], Layout, Layout], seed: int, is_readable: bool
) -> None:
    mesh, shape, source, target = move
    rng = np.random.default_rng(seed)
    x = whole_numbers(rng, shape)
    with patch.object(node_crossing, "LEAST", 0):
        schedule = redistribution(mesh, shape, source, target, is_readable)
    verify(schedule)
    prove(schedule)
    homes = {"A": distribute(x, source, mesh, rng), "C": nothing(target, mesh, shape)}
    outcome = interpret(schedule, homes, seed=seed)
    assert np.array_equal(collect(outcome.tiles, target, mesh, shape), x)


@pure(30)
@given(moves())
def test_redistribution_to_where_it_is_moves_nothing(
    move: tuple[MeshShape, tuple[int, int], Layout, Layout],
) -> None:
    mesh, shape, source, _ = move
    if not source.partial:
        homes = {"A": distribute(np.zeros(shape), source, mesh, np.random.default_rng(0))}
        homes["C"] = nothing(source, mesh, shape)
        assert sum(interpret(redistribution(mesh, shape, source, source), homes).words) == 0


# -- words ----------------------------------------------------------------------------------------


def words(algorithm: Algorithm, problem: PlacedProblem, tuning: Tuning | None = None) -> Outcome:
    """What interpreting a product of zeros moves."""
    homes = {x: nothing(problem.layout(x), problem.mesh, problem.extent(x)) for x in "ABC"}
    for x in "AB":
        homes[x] = [np.zeros_like(tile) for tile in homes[x]]
    return interpret(lower(algorithm, problem, tuning), homes)


def blocks(mesh: MeshShape) -> tuple[Layout, Layout, Layout]:
    """A, B and C in two-dimensional blocks."""
    place = parse_layout(", ".join(mesh.names), mesh)
    return place, place, place


def assert_price_is_exact(algorithm: Algorithm, problem: PlacedProblem) -> None:
    outcome, price = words(algorithm, problem), traffic(workload_of(algorithm, problem))
    # in a ring words come from a neighbour and not from their owner
    if not (algorithm.grouped and algorithm.order == "rotated"):
        assert price.between == pytest.approx(outcome.words_between_nodes)
    if not problem.fetches_together:  # what is shared is read in place by all but the rank that holds the frame
        assert price.words == price.between + price.within + price.in_place == pytest.approx(sum(outcome.words))


@pytest.mark.parametrize(
    "name", covering(name for name, algorithm in ALGORITHMS.items() if algorithm.order != "ticket")
)
def test_the_planner_prices_the_words_that_move(name: str) -> None:
    """Exact on any placements of up to 16 ranks, on larger meshes only some ranks are priced.

    Not for the queue, whose boxes fall to any rank. Not where a box is cut along m or n, to read tiles in place (which
    takes NARROW indices a piece) or for the owners of C: then what is read in place is read again by each piece, and
    counts each time. So on placements that are cut in other ways than the work nothing is read in place here.
    """

    @pure(50)
    @given(problems(ALGORITHMS[name], max_ranks=12, extents=range(31), recut=False), st.sampled_from((0, LEAST)))
    def check(drawn: tuple[Algorithm, PlacedProblem], least: int) -> None:
        with limits({"LEAST": least}):
            assert_price_is_exact(*drawn)

    @pure(50)
    @given(problems(ALGORITHMS[name], max_ranks=12, extents=range(31)), st.sampled_from((0, LEAST)))
    def check_recut(drawn: tuple[Algorithm, PlacedProblem], least: int) -> None:
        with limits({"LEAST": least}):
            assert_price_is_exact(drawn[0], replace(drawn[1], in_place=""))

    check()
    check_recut()


@pytest.mark.parametrize("name", ["stationary_c", "stationary_a", "stationary_b", "queue"])
def test_columns_of_ranks_that_cut_their_rows_each_in_another_way(name: str) -> None:
    """Right, and priced to the word, whichever of A, B and C are placed so, or B transposed so."""

    @pure(60)
    @given(meshes(12, axes=(2,)), st.tuples(*(st.integers(1, 20) for _ in "mnk")), LIMITS, seeds, st.data())
    def check(mesh: MeshShape, shape: tuple[int, int, int], changed: dict[str, int], seed: int, data: Any) -> None:
        m, n, k = shape
        a, b, c = (data.draw(by_column(mesh, extents) | layouts(mesh, extents)) for extents in ((m, k), (n, k), (m, n)))
        problem = PlacedProblem(shape, mesh, (a, b.T, c), in_place="")
        if name != "queue":
            assert_price_is_exact(ALGORITHMS[name], problem)
        with limits(changed):
            run(Case(ALGORITHMS[name], problem, Tuning(), 1, 0, "", seed), seed)

    check()


@pytest.mark.parametrize("name", ["row_parallel:pull", "johnson_3d:pull"])
def test_sums_over_a_long_k_are_pushed_once(name: str) -> None:
    """However many panels it takes."""
    mesh, algorithm = MeshShape((2, 1, 2)), find_algorithm(name)
    request = Request((4, 4, 5000), mesh, in_place="", algorithm=name)
    assert_price_is_exact(algorithm, placed_problem(request, placements_taken(algorithm, request)[0]))


def placed(mesh: MeshShape, *texts: str) -> tuple[Layout, Layout, Layout]:
    a, b, c = (parse_layout(text, mesh) for text in texts)
    return a, b, c


def test_price_where_tiles_are_read_again_in_place() -> None:
    """Cut along m, A's tiles are read where they lie, and B's once for each of them."""
    mesh = MeshShape((3,))
    problem = PlacedProblem((6, 6, 6), mesh, placed(mesh, "i, None", "None, None, i=1", "None, None, i=0"))
    with limits({"NARROW": 1}):
        outcome, workload = words(ALGORITHMS["stationary_c"], problem), workload_of(ALGORITHMS["stationary_c"], problem)
    assert outcome.words == [24 + 3 * 36, 0, 0]
    assert traffic(workload).in_place == 24 + 3 * 36


def test_price_of_idle_ranks() -> None:
    mesh = MeshShape((2,))
    assert_price_is_exact(ALGORITHMS["stationary_c"], PlacedProblem((1, 1, 1), mesh, placed(mesh, "i", "i", "i")))


def test_price_of_pushes_into_a_partial_c() -> None:
    mesh = MeshShape((2,))
    problem = PlacedProblem((2, 2, 2), mesh, placed(mesh, "i", "*, *", "*, *, i=sum"))
    assert_price_is_exact(ALGORITHMS["stationary_a"], problem)


def test_price_of_replicated_summands() -> None:
    mesh = MeshShape((2, 2))
    problem = PlacedProblem((4, 4, 4), mesh, placed(mesh, "*, *, j=sum", "i, j", "i, j"))
    assert_price_is_exact(ALGORITHMS["stationary_c"], problem)


# -- order in time --------------------------------------------------------------------------------


def readings(schedule: Schedule, rank: int, operand: str) -> list[tuple[int, set[int]]]:
    """(step, ranks whose `operand` it reads), in the order in which `rank` takes its steps."""
    found = []
    for step, ops in groupby(schedule.program(rank), key=lambda op: op.step):
        refs = [ref for op in ops for ref in _sources(op) if ref.buffer == operand]
        if refs:
            found.append((step, {ref.rank for ref in refs}))
    return found


def _sources(op: Any) -> tuple[Any, ...]:
    """Where an operation reads A and B."""
    if isinstance(op, Copy):
        return (op.src,)
    return (op.a, op.b) if isinstance(op, Multiply) else ()


def owners_at_once(schedule: Schedule, operand: str) -> Iterator[list[int]]:
    """The ranks whose `operand` the others read at a time, by turns."""
    walks = [readings(schedule, rank, operand) for rank in schedule.mesh.ranks]
    for turn in zip(*walks, strict=True):
        yield [owner for _, mine in turn for owner in mine]


@pytest.mark.parametrize("in_place", ["", "AB"])
@pytest.mark.parametrize("grid", [(2, 2), (3, 3), (4, 4), (2, 4), (4, 2), (6, 3), (1, 5)], ids=str)
def test_rotated_readers_never_meet(grid: tuple[int, int], in_place: str) -> None:
    """With steps of one length, a multiple of R and of C, no two ranks read the same owner's tile at once."""
    r, c = grid
    mesh, steps = MeshShape(grid), max(grid)
    with limits({"NARROW": 1}):
        problem = PlacedProblem((2 * r, 2 * c, 4 * steps), mesh, blocks(mesh), in_place=in_place)
        schedule = lower(ALGORITHMS["srumma"], problem, Tuning(depth=0))
        starts = [readings(schedule, rank, "A")[0][0] for rank in mesh.ranks]
        assert starts == [4 * ((i * steps // r + j * steps // c) % steps) for i in range(r) for j in range(c)]
        for operand in "AB":
            for owners in owners_at_once(schedule, operand):
                assert len(set(owners)) == mesh.size


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", ["stationary_a", "stationary_b", "gemm_scatter:pull"])
def test_ranks_multiply_their_own_part_of_c_last(name: str, ranks: int) -> None:
    """So that what they push to other nodes leaves behind a multiply, as it is priced."""
    mesh, algorithm = MeshShape((ranks,), node_of_rank=tuple(range(ranks))), find_algorithm(name)
    across = algorithm.over == "n"
    layouts = placed(mesh, "*, i", "i, *", "*, i" if across else "i, *")
    problem = PlacedProblem((2048 * ranks, 2048 * ranks, 4096 * ranks), mesh, layouts, in_place="")
    schedule = lower(algorithm, problem, Tuning())
    for rank in mesh.ranks:
        pushed = [op.dst.rank for op in schedule.program(rank) if isinstance(op, Accumulate)]
        assert len(pushed) >= ranks
        assert [owner == rank for owner in pushed] == sorted(owner == rank for owner in pushed)
    early = replace(algorithm, end_at_owner=False, specialize=None)
    late, soon = (estimate(workload_of(each, problem), TYPICALLY).moving for each in (early, algorithm))
    assert soon < late
    problem = replace(problem, layouts=placed(mesh, "*, i", "i, *", "i, *" if across else "*, i"))  # part of each
    late, soon = (estimate(workload_of(each, problem), TYPICALLY).moving for each in (early, algorithm))
    assert soon == late


def test_sums_go_at_half_the_pace_behind_multiplies() -> None:
    """All go behind long multiplies, and not behind those that are little longer than the wire takes."""
    mesh, m = MeshShape((2,), node_of_rank=(0, 1)), 8192
    between = {name: replace(cost, beta=40 * cost.beta) for name, cost in TYPICAL.costs["between"].items()}
    model = CostModel(replace(TYPICAL, costs={**TYPICAL.costs, "between": between}))
    wire = model.machine.cost("between", "accumulate").beta * 4 * m * m / 2

    def found(k: int) -> CostBreakdown:
        problem = PlacedProblem((m, m, k), mesh, placed(mesh, "*, i", "i, *", "i, *"), in_place="")
        return estimate(workload_of(find_algorithm("stationary_b"), problem), model)

    short = next(each for k in range(128, 8192, 128) if (each := found(k)).multiplying > 1.2 * wire)
    assert short.multiplying < 1.4 * wire
    assert short.moving - found(16384).moving > 0.3 * wire


def test_rotated_readers_never_meet_where_panels_are_cut() -> None:
    """Six panels of two on 2 × 3: rank 0 owns A and B of the first four indices, takes them as one, and has five."""
    mesh = MeshShape((2, 3))
    with limits({"NARROW": 1}):
        schedule = lower(
            ALGORITHMS["srumma"], PlacedProblem((4, 6, 12), mesh, blocks(mesh), in_place=""), Tuning(width=2, depth=0)
        )
        assert {len(readings(schedule, rank, "A")) for rank in mesh.ranks} == {6}
        for operand in "AB":
            for owners in owners_at_once(schedule, operand):
                assert len(set(owners)) == mesh.size


@pure(12)
@given(meshes(8, axes=(1, 2, 2, 3)), st.tuples(*[st.sampled_from((1, 7, 30, 60))] * 3), LIMITS, st.data())
def test_whatever_the_planner_may_choose_is_proved(
    mesh: MeshShape, shape: tuple[int, int, int], changed: dict[str, int], data: st.DataObject
) -> None:
    """Where some of the placements are given."""
    m, n, k = shape
    whole = [st.none() | layouts(mesh, each, ROLES[:-1], skew=False) for each in ((m, k), (k, n), (m, n))]
    request = Request(shape, mesh, tuple(data.draw(each) for each in whole), fetches_together=data.draw(st.booleans()))
    tuning = Tuning(data.draw(st.sampled_from((4, 16, 1024))), data.draw(st.sampled_from((0, 1, 2, 3))))
    with limits(changed):
        for each in candidates(request):
            if not each.rejected and each.layouts is not None:
                proved(each.algorithm, placed_problem(request, each.layouts, each.copied), tuning)


# -- found by the properties above -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "dims", "nodes", "given"),
    [
        ("cosma", (63, 15, 4), (2, 2), "0011", ("i, j", "", "")),  # mates call the slots of their panels by other names
        ("cosma", (54, 58, 15), (3, 2), "001122", ("", "*, j", "")),  # one of two mates has B in place, not in panels
        ("summa_a", (34, 24, 28), (1, 6), "001122", ("i, j", "*, (j, i)", "*, i")),  # sums of a node that are held back
        ("summa_c", (40, 13, 19), (1, 4), "0011", ("(i, j), *", "(i, j), *", "i, j")),  # a group brings A and B
    ],
)
def test_ranks_of_a_node_make_the_calls_of_their_groups_in_one_order(
    name: str, shape: tuple[int, int, int], dims: tuple[int, ...], nodes: str, given: tuple[str, str, str]
) -> None:
    mesh = MeshShape(dims, node_of_rank=[int(node) for node in nodes])
    a, b, c = (parse_layout(text, mesh) if text else None for text in given)
    request = Request(shape, mesh, (a, b, c))
    with limits({"LEAST": 0}):
        (found,) = (each for each in candidates(request) if each.algorithm.name == name)
        assert found.layouts
        proved(found.algorithm, placed_problem(request, found.layouts), Tuning(4))


def test_redistribution_into_summands_verifies() -> None:
    mesh = MeshShape((2,))
    verify(redistribution(mesh, (1, 1), parse_layout("i", mesh), parse_layout("*, *, i=sum", mesh)))


def test_queue_on_rows_that_are_cut_differently_at_each_step() -> None:
    """Skewed rows of A change owners elsewhere in each panel of k, so that no first Multiply opens all of the slot."""
    mesh = MeshShape((2, 2))
    problem = PlacedProblem((9, 8, 4), mesh, placed(mesh, "i:skew(j), j", "i, j", "*, *, i=0, j=0"))
    with limits({"NARROW": 1}):
        run(Case(ALGORITHMS["queue"], problem, Tuning(100, 0), 1, 0, "", 0))


@pytest.mark.parametrize(("a", "viewed"), [("i, j:cyclic(64)", {"A"}), ("i, j", {"A", "B"}), ("i, j:cyclic(8)", {"A"})])
def test_the_queue_is_priced_by_what_its_tasks_read_in_place(a: str, viewed: set[str]) -> None:
    """What a panel of k has of B lies apart where A is dealt out in wide blocks, and of A where these are narrow."""
    mesh = MeshShape((2, 2))
    problem = PlacedProblem((256, 256, 4096), mesh, placed(mesh, a, "(i, j), *", "i, j"))
    pool = lower(ALGORITHMS["queue"], problem).pool
    assert pool
    multiplies = [op for task in range(pool.tasks) for op in pool.program(task, 0) if isinstance(op, Multiply)]
    assert {ref.operand for op in multiplies for ref in (op.a, op.b) if ref.buffer in ("A", "B")} == viewed
    *_, walk = workload_of(ALGORITHMS["queue"], problem).phases
    assert {moved.x for moved in walk.moved if moved.how == "view" and moved.node.any()} == viewed


@pytest.mark.parametrize("transposed", [False, True])
def test_scattered_owners_do_not_scatter_the_c_that_is_multiplied_into(transposed: bool) -> None:
    """The walk goes along rows, or columns, of C, which an operand's owners have dealt out in wide parts."""
    mesh = MeshShape((3,), node_of_rank=(0, 1, 2))
    dealt, whole = parse_layout("i:cyclic(1)", mesh), parse_layout("*, i", mesh)
    placed = (dealt, whole, whole) if not transposed else (whole.T, dealt.T, whole.T)
    algorithm = find_algorithm("gather_gemm:pull")
    taken = algorithm.specialize(Request((400, 400, 5), mesh, placed)) if algorithm.specialize else algorithm
    assert isinstance(taken, Algorithm)
    verify(lower(taken, PlacedProblem((400, 400, 5), mesh, placed)))

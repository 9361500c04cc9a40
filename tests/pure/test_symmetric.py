"""Products known to be symmetric: half of them multiplied, the rest mirrored, as their schedules say and prove it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import stationary
from rma_mm.algorithms.stationary import SYRK, TRIANGLES
from rma_mm.errors import AlgorithmError, ScheduleError
from rma_mm.geometry.layout import everywhere
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Region
from rma_mm.policy.model.cost_model import CostModel, estimate
from rma_mm.policy.model.machine import TYPICAL
from rma_mm.policy.model.traffic import traffic
from rma_mm.policy.model.volumes import workload_of
from rma_mm.policy.planner.candidates import Request, candidates, choose, placed_problem
from rma_mm.policy.simulator.simulate import simulate
from rma_mm.schedule.algorithm import Algorithm, Files, PlacedProblem
from rma_mm.schedule.interpret import interpret
from rma_mm.schedule.lowering.difference_cover import difference_cover, pairs
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.mirror_ops import Clear, Mirror, multiply_adds
from rma_mm.schedule.ops import Barrier, Copy, Finish, Multiply, Op, Ref, Slot
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.symmetry import Symmetry
from rma_mm.schedule.verify.checker import verify
from tests.pure.test_schedules import LIMITS, limits
from tests.reference import collect, distribute, kept, nothing, prove, whole_numbers
from tests.strategies import ROLES, layouts, meshes, pure, seeds

WHOLE = [role for role in ROLES if role != "sum"]
SUMMANDS = replace(stationary.SUMMANDS, half=True)
HALVES = pytest.mark.parametrize("algorithm", [SYRK, TRIANGLES, SUMMANDS], ids=lambda row: row.name)


@dataclass(frozen=True)
class Gram:
    """alpha · A @ Aᵀ + beta · C."""

    problem: PlacedProblem
    tuning: Tuning
    beta: int
    seed: int


@st.composite
def grams(draw: st.DrawFn, is_own: bool) -> Gram:
    """is_own: B lies as A does, which is read for both."""
    mesh = draw(meshes(max_ranks=12 if is_own else 8))
    m, k = draw(st.integers(0, 13)), draw(st.integers(0, 7))
    a = draw(layouts(mesh, (m, k)))
    files: Files = ()
    if is_own and draw(st.booleans()):
        rows, cols = draw(st.sampled_from(((1, 1), (3, 1), (2, 4), (20, 3))))
        a, files = everywhere(), (("A", (rows, cols)), ("B", (cols, rows)))
    b = a.T if is_own else draw(layouts(mesh, (k, m)))
    c = draw(layouts(mesh, (m, m), roles=WHOLE))
    beta = draw(st.sampled_from((0, 0, 3)))
    known = Symmetry(fill=draw(st.sampled_from(("both", "lower"))), is_own=is_own)
    in_place = draw(st.sampled_from(("", "A", "AB")))
    problem = PlacedProblem(
        (m, m, k), mesh, (a, b, c), beta != 0, in_place, draw(st.booleans()), symmetry=known, files=files
    )
    return Gram(problem, Tuning(draw(st.sampled_from((2, 1024))), draw(st.integers(0, 2))), beta, draw(seeds))


@HALVES
def test_half_is_multiplied_and_all_is_there(algorithm: Algorithm) -> None:
    """Where A is given twice, or A and B are any two: what a rank does not multiply it mirrors."""

    @pure(150)
    @given(grams(algorithm is not SYRK), LIMITS)
    def check(gram: Gram, changed: dict[str, int]) -> None:
        with limits(changed):
            assert_right(algorithm, gram)

    check()


def assert_right(algorithm: Algorithm, gram: Gram) -> None:
    problem = gram.problem
    mesh, (m, _, k), place = problem.mesh, problem.shape, problem.layout("C")
    schedule = kept(lower(algorithm, problem, gram.tuning))
    verify(schedule)
    prove(schedule)
    found = traffic(workload_of(algorithm, problem))
    rng = np.random.default_rng(gram.seed)
    a, c = whole_numbers(rng, (m, k)), whole_numbers(rng, (m, m))
    homes = {
        "A": distribute(a, problem.layout("A"), mesh, rng), "B": distribute(a.T, problem.layout("B"), mesh, rng),
        "C": distribute(c, place, mesh, rng) if gram.beta else nothing(place, mesh, (m, m)),
    }
    outcome = interpret(schedule, homes, 2, gram.beta, gram.seed)
    lower_half = np.tril(2 * a @ a.T + (gram.beta * c if gram.beta else 0))
    both = problem.symmetry is not None and problem.symmetry.fill == "both"
    wanted = lower_half + np.tril(lower_half, -1).T if both else lower_half
    assert np.array_equal(collect(outcome.tiles, place, mesh, (m, m)), wanted)
    told = simulate(schedule, TYPICAL)
    assert [sum(each) for each in zip(told.within, told.between, strict=True)] == outcome.words
    if not problem.in_place and not problem.fetches_together:
        assert found.between + found.within == pytest.approx(sum(outcome.words))
    assert sum(sum(_points(schedule, rank)) for rank in mesh.ranks) == k * m * (m + 1) / 2


def _points(schedule: Schedule, rank: int) -> list[int]:
    return [multiply_adds(op) for op in schedule.program(rank) if isinstance(op, Multiply)]


def syrk(count: int, layout: str = "i", shape: tuple[int, int] = (24, 10), fill: str = "both") -> PlacedProblem:
    """A product on rows of A and C, of which every word is copied."""
    mesh, (m, k) = MeshShape((count,)), shape
    a, c = parse_layout("i", mesh, 2), parse_layout(layout, mesh, 2)
    known = Symmetry(fill=fill, is_own=True)  # type: ignore[arg-type]
    return PlacedProblem((m, m, k), mesh, (a, a.T, c), in_place="", symmetry=known)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8, 12])
def test_words_on_rows_are_those_of_the_closed_form(count: int) -> None:
    """Every pair of ranks: one fetches the other's rows of A, or, where they share, one all and one half of them.

    The mirror image of a block goes to the other, once. So A costs mk(P − 1)/2, and mk/4 more where P is even; C costs
    m²(P − 1)/2P. A general product on these placements costs mk(P − 1).
    """
    m, k = shape = (24 * count, 10)
    problem = syrk(count, shape=shape)
    with limits({"NARROW": 1}):
        words = sum(interpret(lower(SYRK, problem), _zeros(problem)).words)
        found = traffic(workload_of(SYRK, problem))
    closed = m * k * (count - 1) / 2 + m * k / 4 * (count % 2 == 0) + m * m * (count - 1) / (2 * count)
    assert words == pytest.approx(closed)
    assert found.between + found.within == pytest.approx(closed)


@pytest.mark.parametrize("count", [*range(1, 14), 20])
def test_words_in_triangle_blocks_are_those_of_the_closed_form(count: int) -> None:
    """A rank reads |D| blocks of mk/P words, its own among them, each once: A costs mk(|D| − 1), D being the design.

    Where two ranks share a block, which nothing else asks for, one of them takes half: mk/4 less. On P = c(c + 1) ranks
    the paper's have c of c² blocks, which costs mk·c; no way costs less than mk(√P − 1). What a rank makes of others'
    rows of C it pushes; the mirror image then costs m²(P − 1)/2P.
    """
    m, k = shape = (24 * count, 10)
    problem, met = syrk(count, shape=shape), pairs(count)
    schedule = lower(TRIANGLES, problem)
    words = sum(interpret(schedule, _zeros(problem)).words)
    found = traffic(workload_of(TRIANGLES, problem))
    assert found.between + found.within == pytest.approx(words)
    ops = [op for rank in range(count) for op in schedule.program(rank) if isinstance(op, Copy)]
    of_a = sum(op.src.region.size for op in ops if op.src.buffer == "A" and op.src.rank != op.dst.rank)
    asked = {0, *(each for one, other in met if 2 * ((other - one) % count) != count for each in (one, other))}
    is_shared = any(each not in asked for pair in met for each in pair)
    assert of_a == m * k * (len(difference_cover(count)) - 1) - m * k / 4 * is_shared
    assert m * k * (count**0.5 - 1) <= of_a <= m * k * {6: 2, 12: 3, 20: 1.25 * 4}.get(count, count)
    pushed = sum(
        0.5 if 2 * (lower - upper) == count else 1
        for rank in range(count)
        for upper, lower in [sorted((rank + each) % count for each in pair) for pair in met]
        if lower != rank
    )
    assert words - of_a == pytest.approx(m * m * (pushed / count**2 + (count - 1) / (2 * count)))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_words_in_summands_are_those_of_the_closed_form(count: int) -> None:
    """No word of A moves, as ranks share out its columns. Each pushes what others have of C below the diagonal,
    and their squares of m/P rows on it: (P − 1)(m²/2 + m²/2P) in all. The mirror image costs m²(P − 1)/2P.
    """
    mesh, (m, k) = MeshShape((count,)), (24 * count, 40)
    a, c = parse_layout("*,i", mesh), parse_layout("i", mesh, 2)
    problem = PlacedProblem((m, m, k), mesh, (a, a.T, c), in_place="", symmetry=Symmetry(is_own=True))
    words = sum(interpret(lower(SUMMANDS, problem), _zeros(problem)).words)
    found = traffic(workload_of(SUMMANDS, problem))
    pushed = (count - 1) * (m * m / 2 + m * m / (2 * count))
    assert found.between + found.within == pytest.approx(words)
    assert words == pytest.approx(pushed + m * m * (count - 1) / (2 * count))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("together", [1, 7, 30])
def test_a_file_is_read_once(count: int, together: int) -> None:
    """And no two ranks read of what it keeps together."""
    mesh, (m, k) = MeshShape((count,)), (6, 100)
    files: Files = (("A", (2, together)), ("B", (together, 2)))
    layouts = everywhere(), everywhere(), parse_layout("i", mesh, 2)
    problem = PlacedProblem(
        (m, m, k), mesh, layouts, fetches_together=True, symmetry=Symmetry(is_own=True), files=files
    )
    schedule = lower(SUMMANDS, problem, Tuning(10 // together * together or together))
    ops = [op for rank in mesh.ranks for op in schedule.program(rank) if isinstance(op, Copy)]
    read = [op.src.region for op in ops if schedule.is_in_file(op.src)]
    assert sum(region.size for region in read) == m * k
    pieces = [piece for region in read for piece in range(region[1].start // together, -(-region[1].stop // together))]
    assert sorted(pieces) == list(range(-(-k // together)))


FEWEST = (1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 6, 5)
"""Residues modulo 1, 2, 3, … that have all differences."""


def test_designs_are_small() -> None:
    """And complete: each two blocks meet on one rank, or opposite ones on two."""
    assert tuple(len(difference_cover(count)) for count in range(1, 22)) == FEWEST
    for count in (*range(1, 40), 64, 100, 1000):
        cover = difference_cover(count)
        assert len(set(cover)) == len(cover) <= 1.5 * count**0.5 + 1 and cover[0] == 0
        assert {(one - other) % count for one in cover for other in cover} == set(range(count))
        assert [(other - one) % count for one, other in pairs(count)] == list(range(1, count // 2 + 1))
        assert {each for pair in pairs(count) for each in pair} <= set(cover)


def _zeros(problem: PlacedProblem) -> dict[str, list[np.ndarray]]:
    mesh = problem.mesh
    return {
        x: [np.zeros(problem.layout(x).region(problem.extent(x), mesh, rank).shape) for rank in mesh.ranks]
        for x in "ABC"
    }


@HALVES
@pytest.mark.parametrize("shape", [(240, 3), (60, 500)])
@pytest.mark.parametrize(
    ("grid", "layout"),
    [((1,), "i"), ((2,), "i"), ((3,), "i"), ((4,), "i"), ((6,), "i"), ((5,), "*,i"), ((2, 2), "i,j"), ((2, 3), "i,j")],
)
def test_ranks_multiply_alike(grid: tuple[int, ...], layout: str, shape: tuple[int, int], algorithm: Algorithm) -> None:
    """No rank does more than its part of half, be the products as they are cut with BLAS in mind."""
    mesh, (m, k) = MeshShape(grid), shape
    c = parse_layout(layout, mesh, 2)
    a = parse_layout("i", mesh, 2)
    problem = PlacedProblem((m, m, k), mesh, (a, a.T, c), symmetry=Symmetry(is_own=True))
    schedule = lower(algorithm, problem)
    work = [_points(schedule, rank) for rank in mesh.ranks]
    assert sum(map(sum, work)) == k * m * (m + 1) / 2
    share = ceil(k / mesh.size) / k if algorithm is SUMMANDS else 1.05 / mesh.size  # of k, whole indices
    assert max(map(sum, work)) <= share * k * m * (m + 1) / 2


# -- faults ---------------------------------------------------------------------------------------


def without(kind: type[Op]) -> Callable[[list[Op], int], list[Op]]:
    """The operations without the last of a kind on rank 1."""

    def change(ops: list[Op], rank: int) -> list[Op]:
        at = max((n for n, op in enumerate(ops) if isinstance(op, kind)), default=0)
        return [op for n, op in enumerate(ops) if n != at or rank != 1]

    return change


def twice(ops: list[Op], rank: int) -> list[Op]:
    """What is mirrored first is mirrored again."""
    at = next((n for n, op in enumerate(ops) if isinstance(op, Mirror) and not op.is_diagonal), None)
    return ops if at is None or rank else [*ops[:at], ops[at], *ops[at:]]


def in_a_circle(ops: list[Op], rank: int) -> list[Op]:
    """Rank 0 mirrors a block that rank 1 mirrors of it, and neither multiplies it."""
    if rank:
        return ops
    left = [op for op in ops if not (isinstance(op, Multiply | Finish) and op.c.region[1].start == 8)]
    assert len(left) == len(ops) - 2
    box = Region.box((0, 8), (8, 16))
    slot = Ref(0, Slot("F", box.T, "F"), box.T)
    return [*left, Copy(Ref(1, "C", box.T), slot, 99), Mirror(slot, Ref(0, "C", box), False, 99)]


def unequal(ops: list[Op], rank: int) -> list[Op]:
    """Half is said of what is no square on the diagonal."""
    return [replace(op, half=True) if isinstance(op, Multiply) else op for op in ops]


def conjugated(ops: list[Op], rank: int) -> list[Op]:
    """C is mirrored in another way than is known of it."""
    return [replace(op, conjugates=True) if isinstance(op, Mirror) else op for op in ops]


def together(ops: list[Op], rank: int) -> list[Op]:
    """No rank waits for others before it mirrors."""
    return [op for op in ops if not isinstance(op, Barrier)]


def never(ops: list[Op], rank: int) -> list[Op]:
    """Nothing is mirrored."""
    return [op for op in ops if not isinstance(op, Mirror)]


FAULTS = [without(Mirror), without(Multiply), twice, unequal, conjugated, together, without(Barrier), never]


@pytest.mark.parametrize(
    ("algorithm", "fault"),
    [(SYRK, in_a_circle), *((algorithm, fault) for algorithm in (SYRK, TRIANGLES) for fault in FAULTS)],
)
def test_no_fault_passes(algorithm: Algorithm, fault: Callable[[list[Op], int], list[Op]]) -> None:
    with limits({"NARROW": 2}):
        right = kept(lower(algorithm, syrk(3)))
        wrong = replace(right, program=lambda rank: fault(right.program(rank), rank))
        prove(right)
        for show in (verify, prove):
            with pytest.raises(ScheduleError):
                show(wrong)


@pytest.mark.parametrize("known", [None, Symmetry()])
def test_a_is_both_factors_only_where_b_is_known_to_be_its_transpose(known: Symmetry | None) -> None:
    right = kept(lower(TRIANGLES, syrk(2)))
    for show in (verify, prove):
        with pytest.raises(ScheduleError, match="not known"):
            show(replace(right, symmetry=known))


@HALVES
def test_half_a_square_is_found_where_nothing_is_mirrored(algorithm: Algorithm) -> None:
    """As of a rank alone, which has no other box."""
    right = kept(lower(algorithm, syrk(1)))
    for show in (verify, prove):
        with pytest.raises(ScheduleError, match="mirrored"):
            show(replace(right, program=lambda rank: never(right.program(rank), rank)))


def test_what_is_not_known_to_be_symmetric_is_not_mirrored() -> None:
    right = kept(lower(SYRK, syrk(2)))
    for show in (verify, prove):
        with pytest.raises(ScheduleError, match="not known to be symmetric"):
            show(replace(right, symmetry=None))


def test_zeros_come_when_others_have_taken_what_they_mirror() -> None:
    right = kept(lower(SYRK, syrk(3, fill="lower")))

    def early(rank: int) -> list[Op]:
        *ops, barrier, clear = right.program(rank)
        assert isinstance(barrier, Barrier) and isinstance(clear, Clear)
        return [*ops, clear, barrier]

    for show in (verify, prove):
        with pytest.raises(ScheduleError):
            show(replace(right, program=early))


def test_copies_of_c_into_slots_wait_until_it_is_finished() -> None:
    right = kept(lower(SYRK, syrk(2)))

    def early(rank: int) -> list[Op]:
        ops = right.program(rank)
        copies = [op for op in ops if isinstance(op, Copy) and op.src.buffer == "C"]
        return [*copies, *(op for op in ops if op not in copies)]

    with pytest.raises(ScheduleError):
        verify(replace(right, program=early))


# -- the planner ----------------------------------------------------------------------------------


def test_the_planner_prices_it_beside_the_others() -> None:
    mesh = MeshShape((2,))
    rows = parse_layout("i", mesh, 2)
    known = Symmetry(is_own=True)
    request = Request((4096, 4096, 4096), mesh, (rows, rows.T, rows), symmetry=known)
    best, *rest = choose(request)
    general = next(each for each in rest if each.algorithm.name == "stationary_c")
    assert best.algorithm.name == SYRK.name and best.seconds < 0.65 * general.seconds
    assert SYRK.name not in [each.algorithm.name for each in candidates(replace(request, symmetry=None))]
    for fill, keeps_c in (("lower", False), ("both", True)):
        for is_own, able in ((True, [SUMMANDS.name, SYRK.name, TRIANGLES.name]), (False, [SYRK.name])):
            lower_only = replace(request, symmetry=Symmetry(fill=fill, is_own=is_own), keeps_c=keeps_c)
            assert sorted(each.algorithm.name for each in choose(lower_only) if not each.rejected) == able


@pytest.mark.parametrize(("extent", "fastest"), [(256, "stationary_c"), (512, "stationary_c"), (1024, SYRK.name)])
def test_a_small_half_is_not_worth_calls_that_are_not_compiled(extent: int, fastest: str) -> None:
    """As measured on 4 ranks: half the work took 4.7, 1.8 and 0.7 times as long as all of it by a compiled call."""
    cost_model, known = CostModel(TYPICAL), Symmetry(is_own=True)
    request = Request((extent,) * 3, MeshShape((2, 2)), cost_model=cost_model, symmetry=known)
    first, *others = candidates(request)
    assert first.algorithm.name == fastest
    assert (min(each.seconds for each in others if not each.rejected) < first.seconds) == (extent < 1024)


@pytest.mark.parametrize(
    ("algorithm", "c", "known", "words"),
    [
        (SYRK, "i", None, "symmetric=True"),
        *((algorithm, "*,*,i=sum", Symmetry(is_own=True), "partial sums") for algorithm in (SYRK, TRIANGLES)),
        *((TRIANGLES, "i", known, "one matrix and its transpose") for known in (None, Symmetry())),
        (TRIANGLES, "P('i:cyclic(1)', None)", Symmetry(is_own=True), "dealt out"),
    ],
)
def test_what_it_does_not_take(algorithm: Algorithm, c: str, known: Symmetry | None, words: str) -> None:
    mesh = MeshShape((2,))
    layout = parse_layout(c, mesh, 2)
    request = Request((8, 8, 8), mesh, (None, None, layout), symmetry=known, algorithm=algorithm.name)
    with pytest.raises(AlgorithmError, match=words):
        choose(request)


def over_hosts(count: int, shape: tuple[int, int]) -> Request:
    """Rows of A and C, each rank on a node of its own."""
    mesh, (m, k) = MeshShape((count,), node_of_rank=tuple(range(count))), shape
    rows = parse_layout("i", mesh, 2)
    return Request((m, m, k), mesh, (rows, rows.T, rows), in_place="", symmetry=Symmetry(is_own=True))


@pytest.mark.parametrize(("count", "algorithm"), [(2, SYRK), (7, TRIANGLES), (12, TRIANGLES)])
def test_triangle_blocks_are_chosen_where_they_move_less(count: int, algorithm: Algorithm) -> None:
    """Between several nodes; not of two, nor on one, where memory is read where it lies."""
    request = over_hosts(count, (4096, 8192))
    assert choose(request)[0].algorithm.name == algorithm.name
    together = replace(request, mesh=MeshShape((count,)), in_place="AB")
    assert choose(together)[0].algorithm.name == SYRK.name


@HALVES
@pytest.mark.parametrize(("count", "m", "k"), [(6, 3000, 3000), (7, 1400, 5000), (12, 2400, 2400)])
def test_prices_are_near_the_simulated_time(algorithm: Algorithm, count: int, m: int, k: int) -> None:
    request = replace(over_hosts(count, (m, k)), algorithm=algorithm.name)
    best = choose(request)[0]
    assert best.layouts is not None
    problem = placed_problem(request, best.layouts)
    seconds = simulate(lower(best.algorithm, problem, Tuning(width=best.width)), request.cost_model.machine).seconds
    assert 0.75 < estimate(workload_of(best.algorithm, problem, best.width), request.cost_model).seconds / seconds < 1.3

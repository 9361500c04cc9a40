"""Products known to be symmetric: half of them multiplied, the rest mirrored, as their schedules say and prove it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms.stationary import SYRK
from rma_mm.errors import AlgorithmError, ScheduleError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Region
from rma_mm.policy.model.machine import TYPICAL
from rma_mm.policy.model.traffic import traffic
from rma_mm.policy.model.volumes import account
from rma_mm.policy.planner.candidates import Request, candidates, choose
from rma_mm.policy.simulator.simulate import simulate
from rma_mm.schedule.interpret import interpret
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.mirror_ops import Clear, Mirror, multiply_adds
from rma_mm.schedule.ops import Barrier, Copy, Finish, Multiply, Op, Ref, Slot
from rma_mm.schedule.row import Problem
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.symmetry import Symmetry
from rma_mm.schedule.verify.checker import verify
from tests.pure.test_schedules import LIMITS, limits
from tests.reference import collect, distribute, kept, nothing, prove, whole_numbers
from tests.strategies import ROLES, layouts, meshes, pure, seeds

WHOLE = [role for role in ROLES if role != "sum"]


@dataclass(frozen=True)
class Gram:
    """alpha · A @ Aᵀ + beta · C."""

    problem: Problem
    tuning: Tuning
    beta: int
    seed: int


@st.composite
def grams(draw: st.DrawFn) -> Gram:
    mesh = draw(meshes(max_ranks=8))
    m, k = draw(st.integers(0, 13)), draw(st.integers(0, 7))
    a, b = (draw(layouts(mesh, extents)) for extents in ((m, k), (k, m)))
    c = draw(layouts(mesh, (m, m), roles=WHOLE))
    beta = draw(st.sampled_from((0, 0, 3)))
    known = Symmetry(fill=draw(st.sampled_from(("both", "lower"))))
    in_place = draw(st.sampled_from(("", "A", "AB")))
    problem = Problem((m, m, k), mesh, (a, b, c), beta != 0, in_place, draw(st.booleans()), symmetry=known)
    return Gram(problem, Tuning(draw(st.sampled_from((2, 1024))), draw(st.integers(0, 2))), beta, draw(seeds))


@pure(150)
@given(grams(), LIMITS)
def test_half_is_multiplied_and_all_is_there(gram: Gram, changed: dict[str, int]) -> None:
    """Where A is given twice, or A and B are any two: what a rank does not multiply it mirrors."""
    problem = gram.problem
    mesh, (m, _, k), place = problem.mesh, problem.shape, problem.layout("C")
    with limits(changed):
        schedule = kept(lower(SYRK, problem, gram.tuning))
        verify(schedule)
        prove(schedule)
        found = traffic(account(SYRK, problem))
    rng = np.random.default_rng(gram.seed)
    a, c = whole_numbers(rng, (m, k)), whole_numbers(rng, (m, m))
    homes = {
        "A": distribute(a, problem.layout("A"), mesh, rng), "B": distribute(a.T, problem.layout("B"), mesh, rng),
        "C": distribute(c, place, mesh, rng) if gram.beta else nothing(place, mesh, (m, m)),
    }  # fmt: skip
    outcome = interpret(schedule, homes, 2, gram.beta, gram.seed)
    lower_half = np.tril(2 * a @ a.T + (gram.beta * c if gram.beta else 0))
    both = problem.symmetry == Symmetry()
    wanted = lower_half + np.tril(lower_half, -1).T if both else lower_half
    assert np.array_equal(collect(outcome.tiles, place, mesh, (m, m)), wanted)
    told = simulate(schedule, TYPICAL)
    assert [sum(each) for each in zip(told.within, told.between, strict=True)] == outcome.words
    if not problem.in_place and not problem.shares:
        assert found.between + found.within == pytest.approx(sum(outcome.words))
    assert sum(sum(_points(schedule, rank)) for rank in mesh.ranks) == k * m * (m + 1) / 2


def _points(schedule: Schedule, rank: int) -> list[int]:
    return [multiply_adds(op) for op in schedule.program(rank) if isinstance(op, Multiply)]


def syrk(count: int, layout: str = "i", shape: tuple[int, int] = (24, 10), fill: str = "both") -> Problem:
    """A product on rows of A and C, of which every word is copied."""
    mesh, (m, k) = MeshShape((count,)), shape
    a, c = parse_layout("i", mesh, 2), parse_layout(layout, mesh, 2)
    return Problem((m, m, k), mesh, (a, a.T, c), in_place="", symmetry=Symmetry(fill=fill))  # type: ignore[arg-type]


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
        found = traffic(account(SYRK, problem))
    closed = m * k * (count - 1) / 2 + m * k / 4 * (count % 2 == 0) + m * m * (count - 1) / (2 * count)
    assert words == pytest.approx(closed)
    assert found.between + found.within == pytest.approx(closed)


def _zeros(problem: Problem) -> dict[str, list[np.ndarray]]:
    mesh = problem.mesh
    return {
        x: [np.zeros(problem.layout(x).region(problem.extent(x), mesh, rank).shape) for rank in mesh.ranks]
        for x in "ABC"
    }


@pytest.mark.parametrize("shape", [(240, 3), (60, 500)])
@pytest.mark.parametrize(
    ("grid", "layout"),
    [((1,), "i"), ((2,), "i"), ((3,), "i"), ((4,), "i"), ((6,), "i"), ((5,), "*,i"), ((2, 2), "i,j"), ((2, 3), "i,j")],
)
def test_ranks_multiply_alike(grid: tuple[int, ...], layout: str, shape: tuple[int, int]) -> None:
    """No rank does more than its part of half, be the products as they are cut with BLAS in mind."""
    mesh, (m, k) = MeshShape(grid), shape
    c = parse_layout(layout, mesh, 2)
    a = parse_layout("i", mesh, 2)
    problem = Problem((m, m, k), mesh, (a, a.T, c), symmetry=Symmetry())
    schedule = lower(SYRK, problem)
    work = [_points(schedule, rank) for rank in mesh.ranks]
    assert sum(map(sum, work)) == k * m * (m + 1) / 2
    assert max(map(sum, work)) <= 1.05 * k * m * (m + 1) / 2 / mesh.size


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


@pytest.mark.parametrize(
    "fault", [without(Mirror), without(Multiply), twice, in_a_circle, unequal, conjugated, together, without(Barrier)]
)
def test_no_fault_passes(fault: Callable[[list[Op], int], list[Op]]) -> None:
    with limits({"NARROW": 2}):
        right = kept(lower(SYRK, syrk(3)))
        wrong = replace(right, program=lambda rank: fault(right.program(rank), rank))
        prove(right)
        for show in (verify, prove):
            with pytest.raises(ScheduleError):
                show(wrong)


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
    request = Request((4096, 4096, 4096), mesh, (rows, rows.T, rows), symmetry=Symmetry())
    best, *others = choose(request)
    general = next(each for each in others if each.row.name == "stationary_c")
    assert best.row.name == SYRK.name and best.seconds < 0.65 * general.seconds
    assert SYRK.name not in [each.row.name for each in candidates(replace(request, symmetry=None))]
    for lower_only in (replace(request, symmetry=Symmetry(fill="lower")), replace(request, keeps_c=True)):
        able = [each.row.name for each in choose(lower_only) if not each.rejected]
        assert able == [SYRK.name]


@pytest.mark.parametrize(("c", "known", "words"), [("i", None, "symmetric=True"), ("i=sum", Symmetry(), "summands")])
def test_what_it_does_not_take(c: str, known: Symmetry | None, words: str) -> None:
    mesh = MeshShape((2,))
    layout = parse_layout(c if "=" not in c else "*,*,i=sum", mesh, 2)
    request = Request((8, 8, 8), mesh, (None, None, layout), symmetry=known, algorithm=SYRK.name)
    with pytest.raises(AlgorithmError, match=words):
        choose(request)

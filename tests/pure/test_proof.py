"""What ranks prove together before they run: no fault that spoils a result passes, be it planted in any operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS
from rma_mm.errors import ScheduleError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Region, Span
from rma_mm.schedule.algorithm import Algorithm, PlacedProblem
from rma_mm.schedule.lowering.decisions import LoweringDecisions, placed_for
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.ops import Accumulate, Copy, Finish, Multiply, Op, Ref, Scale
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.verify.checker import verify
from rma_mm.schedule.verify.fingerprint import PRIME, fingerprint
from tests.pure.test_schedules import LIMITS, Run, limits
from tests.reference import kept, prove
from tests.strategies import Case, cases, pure, spans


@pure(60)
@given(spans(), spans(), spans())
def test_fingerprints_add_up(rows: Span, cols: Span, others: Span) -> None:
    whole, part = Region((rows, cols)), Region((rows & others, cols))
    rest = Region((rows - others, cols))
    assert (fingerprint(part) + fingerprint(rest)) % PRIME == fingerprint(whole)
    assert (fingerprint(part) == fingerprint(whole)) == (not rest)


# -- faults ---------------------------------------------------------------------------------------


def shorter(region: Region) -> Region:
    """A region without its last row, where it has two."""
    rows, cols = region
    return Region((rows.take(Span.range(0, max(1, len(rows) - 1))), cols))


def shrunk(op: Op) -> Op:
    """The operation on a row less."""
    if isinstance(op, Copy | Accumulate):
        return replace(op, src=replace(op.src, region=shorter(op.src.region)),
                       dst=replace(op.dst, region=shorter(op.dst.region)))
    if isinstance(op, Multiply):
        return replace(op, a=replace(op.a, region=shorter(op.a.region)), c=replace(op.c, region=shorter(op.c.region)))
    return replace(op, c=replace(op.c, region=shorter(op.c.region))) if isinstance(op, Scale | Finish) else op


def elsewhere(op: Op, size: int) -> Op:
    """The operation on the next rank's home."""
    for name in ("src", "a", "dst"):
        ref = getattr(op, name, None)
        if isinstance(ref, Ref) and isinstance(ref.buffer, str):
            return replace(op, **{name: replace(ref, rank=(ref.rank + 1) % size)})
    return op


FAULTS: dict[str, Callable[[list[Op], int, int], list[Op]]] = {
    "left out": lambda ops, n, size: [*ops[:n], *ops[n + 1 :]],
    "done twice": lambda ops, n, size: [*ops[: n + 1], *ops[n:]],
    "done before the one before": lambda ops, n, size: [*ops[: n - 1], ops[n], ops[n - 1], *ops[n + 1 :]] if n else ops,
    "a row short": lambda ops, n, size: [*ops[:n], shrunk(ops[n]), *ops[n + 1 :]],
    "with another rank": lambda ops, n, size: [*ops[:n], elsewhere(ops[n], size), *ops[n + 1 :]],
}


def is_right(case: Case, schedule: Schedule) -> bool:
    """Whether a few interleavings give NumPy's result in every replica."""
    try:
        for seed in range(3):
            Run(case, schedule).interpret(seed)
    except Exception:
        return False
    return True


@pure(250)
@given(cases(max_ranks=6, extents=(1, 2, 3, 5, 6, 7)), LIMITS, st.sampled_from(list(FAULTS)), st.randoms())
def test_no_fault_that_spoils_the_result_passes(case: Case, changed: dict[str, int], fault: str, random) -> None:
    with limits(changed):
        schedule = kept(lower(case.row, case.problem, case.tuning))
        at = random.randrange(schedule.mesh.size)
        ops = schedule.program(at)
        assume(ops and not schedule.pool)
        faulty_ops = FAULTS[fault](ops, random.randrange(len(ops)), schedule.mesh.size)
        faulty = replace(schedule, program=lambda rank: faulty_ops if rank == at else schedule.program(rank))
        if faulty_ops != ops and not is_right(case, faulty):
            for check in (prove, verify):
                with pytest.raises((ScheduleError, KeyError, ValueError)):
                    check(faulty)


# -- C wanted in other copies than the work is cut ------------------------------------------------


def cut_as_a_is(algorithm: Algorithm, problem: PlacedProblem, width: int) -> LoweringDecisions:
    """The fault that was here: a C that is everywhere is computed in even parts, while the work is cut as A is."""
    needed = algorithm.placements(problem.mesh)
    computed = replace(problem, computed=needed[2])
    read, staged = placed_for(algorithm, computed.reduced)
    return LoweringDecisions(algorithm, computed, read, staged, algorithm.work(read), width)


@pytest.mark.parametrize("name", ["summa_c", "pumma", "summa_c:pull", "mixed_2d"])
def test_a_c_that_is_wanted_everywhere_is_computed_where_the_work_is(name: str, monkeypatch) -> None:
    mesh = MeshShape((2, 2))
    a, b, c = (parse_layout(text, mesh) for text in ("P('i:bounds(0,2,7)', 'j')", "P('i', 'j')", "P(None, None)"))
    base, _, form = name.partition(":")
    algorithm = ALGORITHMS[base]
    algorithm = algorithm.form(form) if form else algorithm
    case = Case(algorithm, PlacedProblem((7, 5, 12), mesh, (a, b, c)), Tuning(), 1, 0, "", 0)
    for is_planted in (False, True):
        if is_planted:
            monkeypatch.setattr(LoweringDecisions, "of", cut_as_a_is)
        schedule = lower(case.row, case.problem)
        assert is_right(case, schedule) != is_planted
        for check in (prove, verify):
            if is_planted:
                with pytest.raises(ScheduleError):
                    check(schedule)
            else:
                check(schedule)

"""T10's plans: what is chosen beside all there are, and what is told of it."""

from __future__ import annotations

from math import prod

import pytest

from rma_mm.algorithms.search.t10_points import Point, points
from rma_mm.algorithms.t10 import T10_ROTATE, row_of
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.machine import TYPICAL
from rma_mm.policy.model.volumes import workload_of
from rma_mm.policy.planner.candidates import Request, placed_problem, placements_taken
from rma_mm.policy.simulator.simulate import simulate
from rma_mm.schedule.algorithm import Algorithm
from rma_mm.schedule.lowering.lower import lower
from rma_mm.schedule.ops import Copy, Multiply
from tests.thorough import nightly, thorough, usually

SHAPES = ((1024, 1024, 1024), (4096, 256, 1024), (256, 256, 16384), (100, 2000, 3000))
CASES = [
    *((size, nodes, shape) for size in (4, 6, 8) for nodes in (1, 2, size) for shape in SHAPES),
    *((size, nodes, shape) for size in (12, 16) for nodes in (1, 2, size) for shape in SHAPES[::3]),
    (24, 2, SHAPES[0]), (32, 2, SHAPES[0]), (48, 2, SHAPES[0]), (64, 2, SHAPES[0]), (64, 64, SHAPES[0]),
]


def request_for(size: int, nodes: int, shape: tuple[int, int, int], memory: int | None = None) -> Request:
    mesh = MeshShape((size,), node_of_rank=tuple(rank * nodes // size for rank in range(size)))
    return Request(shape, mesh, memory=memory, algorithm="t10_rotate")


def chosen(request: Request) -> Algorithm:
    assert T10_ROTATE.specialize
    algorithm = T10_ROTATE.specialize(request)
    assert isinstance(algorithm, Algorithm)
    return algorithm


@pytest.mark.parametrize(("size", "nodes", "shape"), usually(12, CASES, rest=nightly))
def test_the_choice_is_as_fast_as_the_best_of_all(size: int, nodes: int, shape: tuple[int, int, int]) -> None:
    """By what is predicted, of all plans at all paces that are tried: within 5 %."""
    request = request_for(size, nodes, shape)
    every = [paced for point in points(size) for paced in (point, *point.paced(shape))]
    best = min(request.seconds(row_of(point, request)) for point in every)
    assert request.seconds(chosen(request)) <= 1.05 * best


SIMULATED = [
    *((size, nodes, SHAPES[0]) for size, nodes in ((6, 2), (8, 1), (8, 2), (8, 8))),
    (4, 2, SHAPES[2]), (6, 6, SHAPES[2]), (8, 4, SHAPES[3]), (12, 1, SHAPES[3]),
]


@nightly
@pytest.mark.parametrize(("size", "nodes", "shape"), [(4, 1, SHAPES[0]), (4, 4, SHAPES[3]), *usually(0, SIMULATED)])
def test_the_choice_is_as_fast_as_the_best_of_all_simulated(size: int, nodes: int, shape: tuple[int, int, int]) -> None:
    """Operation by operation: within 5 %."""
    request = request_for(size, nodes, shape)
    best = min(simulated(row_of(point, request), request) for point in points(size))
    assert simulated(chosen(request), request) <= 1.05 * best


@thorough
@pytest.mark.parametrize(("size", "nodes"), [(64, 2)])
def test_on_many_ranks_it_is_as_fast_as_those_that_are_predicted_alike(size: int, nodes: int) -> None:
    """Within 5 % of the best of all plans whose prediction is at most 12 % above its own: the others take too long."""
    request = request_for(size, nodes, SHAPES[0])
    algorithm = chosen(request)
    every = [row_of(point, request) for point in points(size)]
    near = [each for each in every if request.seconds(each) <= 1.12 * request.seconds(algorithm)]
    assert simulated(algorithm, request) <= 1.05 * min(simulated(each, request) for each in near)


def simulated(algorithm: Algorithm, request: Request) -> float:
    """Seconds of a row on its placements."""
    layouts = placements_taken(algorithm, request)[0]
    return simulate(lower(algorithm, placed_problem(request, layouts)), TYPICAL).seconds


@pytest.mark.parametrize("size", [6, 8])
def test_products_are_counted_as_ranks_make_them(size: int) -> None:
    """Also where groups sum C up, of which a rank has one sum for each owner, and where windows are narrow."""
    request = request_for(size, 1, (240, 240, 240))
    for point in points(size):
        algorithm = row_of(point, request)
        problem = placed_problem(request, placements_taken(algorithm, request)[0])
        schedule = lower(algorithm, problem)
        walk = next(phase.work for phase in workload_of(algorithm, problem).phases if phase.work)
        priced = [float(prod(cuts[rank] for cuts in walk.pieces)) for rank in range(size)]
        made = [sum(isinstance(op, Multiply) for op in schedule.program(rank)) for rank in range(size)]
        assert max(made) - 1 <= max(priced) <= max(made) + 2, point
        if min(point.rings[:2]) == 1:  # two windows that do not end together count on average
            assert priced == made, point


def test_what_a_rank_has_for_itself_is_read_where_it_lies() -> None:
    """B's part of k is one rank's own, and wider than a panel: no copy of what goes round its end."""
    request = request_for(8, 4, SHAPES[3])
    algorithm = row_of(Point((1, 4, 2), (4, 1, 1)), request)
    schedule = lower(algorithm, placed_problem(request, placements_taken(algorithm, request)[0]))
    assert not any(isinstance(op, Copy) for rank in range(8) for op in schedule.program(rank))


def test_a_plan_fits_the_memory() -> None:
    """Copies are given up for rings where memory is short, and said to be missing where none fits."""
    shape = (1200, 1200, 1200)
    leanest = min(point.elements_held(shape) for point in points(6))
    for memory in (leanest, leanest * 3 // 2):
        plan = chosen(request_for(6, 1, shape, memory)).notes[0].split()[-1]
        assert next(point for point in points(6) if plan.startswith(str(point))).elements_held(shape) <= memory
    assert T10_ROTATE.specialize
    assert f"needs {leanest} elements a rank" in str(T10_ROTATE.specialize(request_for(6, 1, shape, leanest - 1)))


def test_the_factors_of_the_worked_case() -> None:
    """algorithms.md §4: C[2,3] += A[2,6] · B[6,3] on 6 ranks, F_op (2, 3, 1), A in three parts of k and B in two."""
    point, shape = Point((2, 3, 1), (3, 2, 1)), (2, 3, 6)
    assert point.factors(shape) == {
        "A": ((2, 1), (1, 3), (0, 2)),
        "B": ((1, 3), (2, 1), (2, 0)),
        "C": ((2, 3), (1, 1), (0, 0)),
    }
    assert Point((1, 2, 4), (1, 1, 4)).factors((8, 16, 32))["C"] == ((1, 2), (1, 4), (0, 2))
    assert all(prod(each.ranks) == 12 for each in points(12))
    notes = row_of(point, request_for(6, 1, shape)).notes
    assert notes[0] == "T10's plan  2,3,1/3,2,1"
    assert notes[1] == "A           f_s (2, 1), f_t (1, 3), rp (0, 2)"

"""What holds of every row's schedules in simulated time, on machines whose figures are drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.machine import COLLECTIVES, COPY, FLAVOURS, ONE_SIDED, Cost, Kernel, Machine
from rma_mm.policy.simulator.simulate import Simulated, simulate
from rma_mm.schedule.algorithm import PlacedProblem
from rma_mm.schedule.interpret import interpret
from rma_mm.schedule.lowering.lower import lower
from rma_mm.schedule.ops import Accumulate, Barrier, Broadcast, Copy, Multiply, Op, Reduce, Scale, foreign
from rma_mm.schedule.passes import frame_sizes
from rma_mm.schedule.schedule import Schedule, expand
from tests.pure.test_schedules import LIMITS, limits
from tests.reference import Matrix, kept, nothing
from tests.strategies import Case, cases, pure
from tests.thorough import covering


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines whose movements all have other figures."""
    figures = st.builds(Cost, st.floats(0, 1e-5), st.floats(1e-10, 1e-8))
    moves = [*(f"{flavour}.{name}" for flavour in FLAVOURS for name in ONE_SIDED), *COLLECTIVES]
    moves += [f"{move} busy" for move in moves if "." in move]
    links = {"node": {move: draw(figures) for move in moves}}
    shared = st.builds(Cost, st.floats(0, 1e-5), st.floats(1e-10, 1e-8), st.sampled_from((0.0, 0.5, 1.0)))
    packed = [f"{move} packed" for move in moves if not move.endswith(" busy")]
    links["between"] = {move: draw(shared) for move in (*moves, *packed)}
    kernel = Kernel(*(draw(st.floats(1e-9, 1e-6)) for _ in range(5)))
    return Machine(
        "drawn", {"own": {COPY: draw(figures)}, **links}, {"float32 blas": kernel}, cores=draw(st.integers(1, 4)),
        nodes_per_host=draw(st.integers(1, 2)), operation=draw(st.floats(0, 1e-6)), meeting=draw(st.floats(0, 1e-5)),
        piece=draw(st.sampled_from((0, 1e-8))), packed=draw(st.sampled_from((0, 1e-7))),
    )


def lowered(case: Case) -> Schedule:
    return kept(lower(case.row, case.problem, case.tuning))


def zeros(problem: PlacedProblem) -> dict[str, list[Matrix]]:
    """Local arrays of A, B and C."""
    return {
        x: [np.nan_to_num(tile) for tile in nothing(problem.layout(x), problem.mesh, problem.extent(x))] for x in "ABC"
    }


def programs_of(schedule: Schedule, outcome: Simulated) -> list[list[Op]]:
    """What each rank did."""
    return [expand(schedule, rank, outcome.claims[rank]) for rank in schedule.mesh.ranks]


def counted(schedule: Schedule, rank: int, ops: list[Op]) -> tuple[int, int, int]:
    """Words within nodes, words between them, and messages of a rank's operations."""
    nodes = schedule.mesh.node_of_rank
    moved = [(nodes[other] == nodes[rank], words, counts) for op in ops for other, words, counts in foreign(op, rank)]
    within = sum(words for is_within, words, _ in moved if is_within)
    return within, sum(words for _, words, _ in moved) - within, sum(counts for *_, counts in moved)


@pytest.mark.parametrize("name", covering(ALGORITHMS))
def test_counts_are_those_of_the_interpreter(name: str) -> None:
    @pure(12)
    @given(cases(ALGORITHMS[name], max_ranks=16), machines(), LIMITS)
    def check(case: Case, on: Machine, changed: dict[str, int]) -> None:
        with limits(changed):
            schedule = lowered(case)
            outcome = simulate(schedule, on)
            claims = dict(enumerate(map(list, outcome.claims)))
            meant = interpret(schedule, zeros(case.problem), claims=claims if schedule.pool else None)
            assert [sum(pair) for pair in zip(outcome.between, outcome.within, strict=True)] == meant.words
            assert (sum(outcome.between), sum(outcome.messages)) == (meant.words_between_nodes, meant.messages)
            if schedule.pool:
                assert sorted(sum(outcome.claims, ())) == list(range(schedule.pool.tasks))
            for rank, ops in enumerate(programs_of(schedule, outcome)):
                assert (outcome.within[rank], outcome.between[rank], outcome.messages[rank]) == counted(
                    schedule, rank, ops
                )
                held = sum(schedule.home(x, rank).size for x in schedule.homes)
                assert outcome.peak[rank] == held + sum(frame_sizes(ops, rank).values())

    check()


def seconds_of(op: Multiply, on: Machine) -> float:
    (m, k), n = op.a.region.shape, op.b.region.shape[1]
    return on.kernel("float32").seconds(m, n, k)


def alone(op: Op, on: Machine) -> float:
    """What an operation takes of a rank that is alone."""
    own = on.cost("own", COPY)
    if isinstance(op, Multiply):
        return on.operation + seconds_of(op, on)
    if isinstance(op, Scale | Copy | Accumulate):
        ref = op.c if isinstance(op, Scale) else op.src
        return on.operation + own.seconds(4 * ref.region.size)
    return on.operation + (on.meet(1) if isinstance(op, Barrier) else 0)


@pytest.mark.parametrize("name", covering(ALGORITHMS))
def test_a_rank_alone_takes_the_sum_of_its_operations(name: str) -> None:
    @pure(6)
    @given(cases(ALGORITHMS[name], max_ranks=1), machines())
    def check(case: Case, on: Machine) -> None:
        schedule, on = lowered(case), replace(on, piece=0, packed=0)
        outcome = simulate(schedule, on)
        ops = expand(schedule, 0, outcome.claims[0])
        tickets = len(outcome.claims[0]) + 1 if schedule.pool else 0
        claims = on.operation * (tickets > 0) + tickets * on.cost("own", "fetch_add").seconds(8)
        assert outcome.seconds == pytest.approx(2 * on.meet(1) + sum(alone(op, on) for op in ops) + claims)

    check()


def least(schedule: Schedule, outcome: Simulated, on: Machine) -> float:
    """No product is faster than its ranks and hosts multiply, and than wires carry what is received or pushed.

    A broadcast may come from any member, so that it does not count where it leaves.
    """
    nodes = schedule.mesh.node_of_rank
    hosts, inward, outward = (dict.fromkeys(range(max(nodes) + 1), 0.0) for _ in range(3))
    longest = 0.0
    for rank, ops in enumerate(programs_of(schedule, outcome)):
        alone = sum(seconds_of(op, on) for op in ops if isinstance(op, Multiply)) + on.operation * len(ops)
        longest = max(longest, alone)
        hosts[nodes[rank] // on.nodes_per_host] += alone
        for op in ops:
            for other, words, is_moved in foreign(op, rank):
                if is_moved and nodes[other] != nodes[rank]:
                    source, sink = (rank, other) if isinstance(op, Accumulate | Reduce) else (other, rank)
                    outward[nodes[source]] += words * (not isinstance(op, Broadcast))
                    inward[nodes[sink]] += words
    beta = min(cost.beta for cost in on.costs["between"].values())
    carried = 4 * beta * max(*inward.values(), *outward.values())
    return 2 * on.meet(len(nodes)) + max(longest, max(hosts.values()) / on.slots, carried)


@pytest.mark.parametrize("name", covering(ALGORITHMS))
def test_never_faster_than_processors_and_wires(name: str) -> None:
    @pure(12)
    @given(cases(ALGORITHMS[name], max_ranks=16), machines(), LIMITS)
    def check(case: Case, on: Machine, changed: dict[str, int]) -> None:
        with limits(changed):
            schedule = lowered(case)
            outcome = simulate(schedule, on)
            assert outcome == simulate(schedule, on)
            assert outcome.seconds >= least(schedule, outcome, on) * (1 - 1e-9)
            assert outcome.seconds == pytest.approx(max(outcome.ranks) + on.meet(schedule.mesh.size))
            assert all(0 <= mine <= end for mine, end in zip(outcome.multiplying, outcome.ranks, strict=True))

    check()


def scaled(on: Machine, alpha: float, beta: float, rest: float) -> Machine:
    """The machine with figures so many times as large."""
    costs = {
        link: {move: replace(cost, alpha=alpha * cost.alpha, beta=beta * cost.beta) for move, cost in moves.items()}
        for link, moves in on.costs.items()
    }
    kernel = on.kernels["float32 blas"]
    slower = Kernel(*(rest * figure for figure in (kernel.call, kernel.point, kernel.a, kernel.b, kernel.c)))
    return replace(
        on, costs=costs, kernels={"float32 blas": slower}, operation=rest * on.operation, meeting=rest * on.meeting,
        piece=rest * on.piece, packed=rest * on.packed,
    )


@pure(40)
@given(cases(max_ranks=12), machines())
def test_half_as_fast_in_everything_takes_twice_as_long(case: Case, on: Machine) -> None:
    """To the last bit: all figures are doubled exactly."""
    schedule = lowered(case)
    fast, slow = simulate(schedule, on), simulate(schedule, scaled(on, 2, 2, 2))
    assert slow.seconds == 2 * fast.seconds
    assert slow.ranks == tuple(2 * end for end in fast.ranks)


SETTLED = [algorithm for algorithm in ALGORITHMS.values() if algorithm.order != "ticket"]
"""Rows that settle beforehand which rank does what."""
ANOMALY = 0.95
"""What is delayed may let pass on a shared processor, or wire, what the others wait for: then all end a little earlier.
Of 2000 cases seven did, the most by 1.5 %."""


@pure(40)
@given(st.sampled_from(SETTLED).flatmap(lambda algorithm: cases(algorithm, max_ranks=12)), machines())
def test_slower_links_do_not_make_it_faster(case: Case, on: Machine) -> None:
    schedule = lowered(case)
    assert simulate(schedule, scaled(on, 1, 2, 1)).seconds >= simulate(schedule, on).seconds * ANOMALY


@pure(40)
@given(
    st.sampled_from([algorithm for algorithm in SETTLED if not algorithm.grouped]).flatmap(
        lambda algorithm: cases(algorithm, max_ranks=12)
    ),
    machines(),
    st.sampled_from(((2, 1, 1), (1, 2, 1), (1, 1, 2))),
)
def test_what_shares_nothing_is_never_faster_with_slower_parts(
    case: Case, on: Machine, factors: tuple[float, float, float]
) -> None:
    """A processor for each rank of one node, and no target that is slower while it multiplies."""
    idle = {link: {move: c for move, c in moves.items() if "busy" not in move} for link, moves in on.costs.items()}
    on = replace(on, costs=idle, cores=12)
    problem = replace(case.problem, mesh=MeshShape(case.problem.mesh.dims))
    schedule = kept(lower(case.row, problem, case.tuning))
    assert simulate(schedule, scaled(on, *factors)).seconds >= simulate(schedule, on).seconds * (1 - 1e-9)

"""Shares by speed: slices, what the planner does where ranks differ, its prices, and how speeds are settled."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import find_algorithm
from rma_mm.errors import AlgorithmError, MachineError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.shares import CAP, FLOOR, relative, slices, speeds_problem
from rma_mm.policy.model.cost_model import CostModel, estimate
from rma_mm.policy.model.machine import TYPICAL, Cost, Machine
from rma_mm.policy.model.machine_file import HETEROGENEOUS, from_toml
from rma_mm.policy.model.volumes import workload_of
from rma_mm.policy.planner.candidates import Candidate, Request, candidates, default_mesh, placed_problem
from rma_mm.policy.planner.sweep import SweepProblem, prices
from rma_mm.policy.simulator.simulate import simulate
from rma_mm.runtime.calibration.speeds import steady_speeds
from rma_mm.schedule.lowering.decisions import LoweringDecisions
from rma_mm.schedule.lowering.lower import Tuning, lower
from tests.reference import prove
from tests.strategies import meshes, pure
from tests.thorough import thorough, usually

SPEEDS = st.lists(st.floats(0.1, 20), min_size=1, max_size=9)
PLENTY = replace(TYPICAL, cores=64)
"""A machine on which no two ranks share processors."""
EXPOSED = replace(
    PLENTY, costs={x: {y: replace(z, hidden=0.0) for y, z in moves.items()} for x, moves in PLENTY.costs.items()}
)
"""The same where nothing goes on behind a multiply."""


def uneven(shape: tuple[int, int, int], mesh: MeshShape, speeds: tuple[float, ...], **more: object) -> Request:
    return Request(shape, mesh, cost_model=CostModel(replace(PLENTY, speeds=relative(speeds))), **more)  # type: ignore[arg-type]


def slowest(candidate: Candidate, request: Request) -> float:
    """When the last rank has multiplied its box, over when all would have if loads were as speeds are."""
    assert candidate.layouts is not None
    mesh, found = request.mesh, placed_problem(request, candidate.layouts)
    work = LoweringDecisions.of(candidate.algorithm, found).work
    speeds = request.speeds or (1.0,) * mesh.size
    times = [work.region(request.shape, mesh, rank).size / speeds[rank] for rank in mesh.ranks]
    return max(times) * mesh.size / (request.shape[0] * request.shape[1] * request.shape[2])


# -- slices ---------------------------------------------------------------------------------------


@given(st.integers(0, 20000), SPEEDS, st.integers(0, 600))
def test_slices_follow_speeds_between_floor_and_cap(extent: int, speeds: list[float], floor: int) -> None:
    edges = slices(extent, speeds, floor)
    count = len(speeds)
    assert (edges[0], edges[-1], len(edges)) == (0, extent, count + 1)
    lengths = [b - a for a, b in pairwise(edges)]
    if extent <= floor * count or not relative(speeds):
        assert max(lengths) - min(lengths) <= 1
        return
    assert min(lengths) >= floor - 1
    assert max(lengths) <= max(CAP * extent / count, floor) + 1
    free = [n for n in range(count) if floor + 1 < lengths[n] < CAP * extent / count - 1]
    shares = [lengths[n] / speeds[n] for n in free]
    for n, share in zip(free, shares, strict=True):  # a rounded edge on either side
        assert abs(share - shares[0]) <= 1 / speeds[n] + 1 / speeds[free[0]]


def test_equal_speeds_have_equal_slices() -> None:
    assert slices(1000, [1, 1.1, 0.95]) == [0, 333, 666, 1000]
    assert slices(4 * FLOOR, [9, 1, 1, 1]) == [0, FLOOR, 2 * FLOOR, 3 * FLOOR, 4 * FLOOR]


def test_a_hundred_thousand_ranks_have_slices() -> None:
    """In a moment: what is summed for one edge is not summed again for the next."""
    edges = slices(3 * 10**7, [2.0, 1.0] * 50_000, floor=1)
    assert edges[:3] == [0, 400, 600]
    assert edges[-2:] == [3 * 10**7 - 200, 3 * 10**7]


@pytest.mark.parametrize(
    "given", [(), (1, 2), (1, 2, 0), (1, 2, -1), (1, 2, float("nan")), (1, 2, float("inf")), (1, 2, 10**400),
              (1, 2, 1e-300), "421", 4, None, (1, 2, "3"), (1, 2, True), {1: 1, 2: 2, 3: 3}],
)
def test_speeds_that_are_none(given: object) -> None:
    assert "for each rank" in speeds_problem(given, 3)
    assert not speeds_problem((1, np.float32(2), 0.5), 3)


# -- the planner ----------------------------------------------------------------------------------


SHAPES = ((200, 8192, 2048), (3000, 2999, 64), (2048, 2048, 2048), (8192, 200, 2048))


@pytest.mark.parametrize("shape", usually(2, SHAPES, several=False))
@pytest.mark.parametrize(
    ("grid", "speeds"),
    [((3,), (2, 1, 1)), ((4,), (4, 1, 1, 1)), ((2, 2), (4, 1, 1, 1)), ((2, 2), (4, 4, 1, 1)), ((1, 3), (4, 2, 1)),
     ((6,), (1, 1, 1, 1, 1, 3)), ((3, 2), (3, 1, 3, 1, 3, 1))],
)
def test_loads_are_as_speeds_are(grid: tuple[int, ...], speeds: tuple[float, ...], shape: tuple[int, int, int]) -> None:
    """Within 5 % of the ideal, and an even cut takes as much more as the slowest rank is slower than the mean."""
    request = uneven(shape, MeshShape(grid), speeds)
    best = candidates(request)[0]
    assert best.algorithm.order == "ticket" or slowest(best, request) <= 1.05
    flat = Request(shape, MeshShape(grid), cost_model=CostModel(PLENTY))
    even = next(c for c in candidates(flat) if c.algorithm.order != "ticket" and not c.rejected)
    assert slowest(even, request) >= 1.3
    assert even.layouts is not None
    by_speed = estimate(workload_of(even.algorithm, placed_problem(request, even.layouts)), request.cost_model)
    assert by_speed.multiplying > 1.25 * even.cost.multiplying
    assert best.cost.multiplying < by_speed.multiplying


def test_what_is_placed_stays() -> None:
    mesh = MeshShape((3,))
    placed = parse_layout("i, *", mesh)
    request = uneven((2048, 2048, 2048), mesh, (2, 1, 1), layouts=(placed, None, None))
    for candidate in candidates(request):
        assert candidate.rejected or (candidate.layouts is not None and candidate.layouts[0] == placed)


def test_speeds_that_hardly_differ_change_nothing() -> None:
    mesh, shape = MeshShape((2, 2)), (2048, 2048, 2048)
    flat = candidates(Request(shape, mesh, cost_model=CostModel(PLENTY)))
    near = candidates(uneven(shape, mesh, (1, 1.1, 1.05, 0.95)))
    assert [(c.algorithm.name, c.layouts, c.seconds) for c in flat] == [
        (c.algorithm.name, c.layouts, c.seconds) for c in near
    ]


def test_a_grid_is_chosen_by_speed() -> None:
    """Cut alike everywhere, one fast rank in six is best used where one dimension is cut over all of them."""
    for speeds, grid in (((), (3, 2)), ((5, 1, 1, 1, 1, 1), (6, 1))):
        cost_model = CostModel(replace(PLENTY, speeds=speeds))
        assert default_mesh(6, (4096, 4096, 512), algorithm="summa_c", cost_model=cost_model) == grid


@pure(30)
@given(meshes(), st.data())
def test_every_candidate_is_a_right_schedule(mesh: MeshShape, data: st.DataObject) -> None:
    """Whatever the speeds: verified, and every element of C written once, by the proof of all ranks."""
    speeds = tuple(data.draw(st.floats(0.2, 5)) for _ in mesh.ranks)
    shape = data.draw(st.tuples(*(st.integers(1, 400) for _ in range(3))))
    request = uneven(shape, mesh, speeds)
    fit = [c for c in candidates(request) if not c.rejected]
    chosen = data.draw(st.sampled_from(fit[:12]))
    assert chosen.layouts is not None
    for layout, extents in zip(chosen.layouts, [(shape[0], shape[2]), (shape[2], shape[1]), shape[:2]], strict=True):
        layout.check(extents, mesh)
    prove(lower(chosen.algorithm, placed_problem(request, chosen.layouts, chosen.copied), Tuning(width=chosen.width)))


@pytest.mark.parametrize("name", ["stationary_c", "summa_c", "srumma", "column_parallel"])
@pytest.mark.parametrize("cut", ["even", "by speed"])
def test_prices_are_near_the_simulated_time(name: str, cut: str) -> None:
    mesh, shape = MeshShape((2, 2)), (2048, 2048, 1024)
    request = uneven(shape, mesh, (4, 2, 1, 1), algorithm=name)
    best = candidates(request)[0]
    layouts = best.layouts
    if cut == "even":
        layouts = candidates(Request(shape, mesh, algorithm=name, cost_model=CostModel(PLENTY)))[0].layouts
    assert layouts is not None
    problem = placed_problem(request, layouts)
    schedule = lower(best.algorithm, problem, Tuning(width=best.width))
    seconds = simulate(schedule, request.cost_model.machine).seconds
    assert 0.8 < estimate(workload_of(best.algorithm, problem, best.width), request.cost_model).seconds / seconds < 1.25


# -- how they are known ---------------------------------------------------------------------------


def test_two_rounds_must_agree() -> None:
    first, like, other = (2.0, 1.0, 1.0), (1.9, 1.05, 0.95), (1.0, 2.0, 1.0)
    assert steady_speeds([first, other]) is None
    assert steady_speeds([first, other, (1.5, 1.5, 1.0)]) is None
    found = steady_speeds([first, other, like])
    assert found == pytest.approx((1.481, 0.778, 0.741), abs=1e-3)
    assert steady_speeds([(1.0, 1.05), (1.05, 1.0)]) == ()


def test_a_machine_keeps_them() -> None:
    machine = replace(TYPICAL, speeds=(1.5, 0.75, 0.75))
    assert Machine.from_json(machine.as_json()) == machine
    assert machine.speeds_of(3) == (1.5, 0.75, 0.75)
    assert machine.speeds_of(4) == () == TYPICAL.speeds_of(3)
    for wrong in ([1, 0], [1, "2"], "12", 3, [float("nan")]):
        with pytest.raises(MachineError, match="speeds"):
            Machine.from_json(TYPICAL.as_json() | {"speeds": wrong})


# -- machines whose nodes differ ------------------------------------------------------------------


TWO_KINDS = MeshShape((8, 8), node_of_rank=tuple(rank // 4 for rank in range(64)))


def het(**changes: object) -> Machine:
    """The heterogeneous example, with entries changed."""
    return from_toml(tomllib.loads(HETEROGENEOUS) | changes).machine


@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (20000, 2000, 2000), (2000, 20000, 4000)])
def test_on_two_kinds_of_nodes_the_best_even_plan_is_far_slower(shape: tuple[int, int, int]) -> None:
    """Eight nodes of 300 and eight of 125 GF/s a rank, on two fabrics: 1.3 times and more, simulated too."""
    request = Request(shape, TWO_KINDS, fetches_together=True, cost_model=CostModel(het()))
    best = candidates(request)[0]
    flat = candidates(replace(request, cost_model=CostModel(replace(het(), speeds=()))))
    priced = [
        (
            estimate(
                workload_of(c.algorithm, placed_problem(request, c.layouts, c.copied), c.width), request.cost_model
            ).seconds,
            n,
        )
        for n, c in enumerate(flat)
        if c.layouts is not None and not c.rejected
    ]
    assert min(priced)[0] > 1.3 * best.seconds
    if shape[0] == shape[1]:
        assert simulated(flat[min(priced)[1]], request) > 1.3 * simulated(best, request)


def simulated(candidate: Candidate, request: Request) -> float:
    assert candidate.layouts is not None
    problem = placed_problem(request, candidate.layouts, candidate.copied)
    schedule = lower(candidate.algorithm, problem, Tuning(width=candidate.width))
    return simulate(schedule, request.cost_model.machine).seconds


def test_what_crosses_a_slow_wire_takes_longer() -> None:
    mesh = MeshShape((4,), node_of_rank=(0, 1, 2, 3))
    layouts = [parse_layout(text, mesh) for text in ("i, *", "i, *", "i, *")]
    request = Request((512, 512, 512), mesh, tuple(layouts), algorithm="stationary_c")  # type: ignore[arg-type]
    bills = {}
    for slow in (1.0, 0.1):
        found = replace(request, cost_model=CostModel(replace(EXPOSED, wires=(1.0, 1.0, slow, 1.0))))
        best = candidates(found)[0]
        bills[slow] = best.cost.moving, simulated(best, found)
    assert all(late > 3 * usual for late, usual in zip(bills[0.1][:1], bills[1.0][:1], strict=True))
    assert bills[0.1][1] > 1.5 * bills[1.0][1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nodes": 20}, "nodes is 20; the groups have 16 together"),
        ({"group": [{"nodes": 16, "gflops": 0}]}, "group 1.gflops is 0"),
        ({"group": [{"nodes": 8}, {"gflops": 9}]}, "group 2.nodes is missing"),
        ({"group": [{"nodes": 16, "speed": 2}]}, "group 1.speed is not known"),
        ({"group": [{"nodes": 16}]}, "group_link.bandwidth joins 1 groups; it takes two at least"),
        ({"group_link": {"latency": 0}}, "group_link.bandwidth is missing"),
        ({"group_link": {"bandwidth": -1}}, "group_link.bandwidth is -1"),
        ({"group_link": {"bandwidth": 1e9, "speed": 2}}, "group_link.speed is not known"),
        ({"group": [{"nodes": 8, "memory": 2**30}, {"nodes": 8}]}, "group 2.memory is missing"),
        ({"group": [{"nodes": 8, "latency": -1}, {"nodes": 8}]}, "group 1.latency is -1"),
        ({"group": 3}, "group is 3; they are tables, each begun by"),
        ({"group": [3]}, "they are tables"),
    ],
)
def test_groups_that_do_not_fit(changes: dict[str, object], told: str) -> None:
    with pytest.raises(MachineError, match=re.escape(told)):
        het(**changes)


FOUR = {"nodes": 4, "ranks_per_node": 2, "cores": 2, "group": [{"nodes": 2}] * 2}


def priced(name: str, grid: tuple[int, ...], extent: int, machine: Machine) -> tuple[float, float]:
    """Seconds of a square product on four nodes, by price and simulated."""
    mesh = MeshShape(grid, node_of_rank=tuple(rank // 2 for rank in range(8)))
    request = Request((extent,) * 3, mesh, algorithm=name, cost_model=CostModel(machine))
    best = candidates(request)[0]
    return best.seconds, simulated(best, request)


@pytest.mark.parametrize(
    ("name", "grid"),
    [("stationary_c", (8,)), ("stationary_a", (2, 4)), ("summa_c", (2, 4)), ("summa_a", (4, 2)),
     ("data_parallel", (8,)), ("cannon:pull", (4, 2)), ("weighted", (8,))],
)
def test_what_goes_group_link_takes_what_joins_them(name: str, grid: tuple[int, ...]) -> None:
    """In prices and simulated alike: their bandwidth, and latencies of groups and of what joins them."""
    free, narrow = het(**FOUR, group_link={}), het(**FOUR, group_link={"bandwidth": 1e9})
    (usual, least), (price, seconds) = priced(name, grid, 1024, free), priced(name, grid, 1024, narrow)
    assert 0.7 < price / seconds < 1.25
    assert price / usual > max(1.1, 0.75 * seconds / least)
    far = het(**FOUR, group_link={"bandwidth": 1e12, "latency": 200e-6})
    slow = het(**FOUR | {"group": [{"nodes": 2, "latency": 203e-6}, {"nodes": 2}]}, group_link={})
    usual, least = priced(name, grid, 64, free)
    for machine in (far, slow):
        price, seconds = priced(name, grid, 64, machine)
        assert min(price - usual, seconds - least) >= 150e-6


def test_groups_are_kept_and_have_memory_of_their_own() -> None:
    machine = het()
    assert Machine.from_json(machine.as_json()) == machine
    assert (machine.memory, set(machine.rooms), set(machine.groups)) == (64 * 2**30, {1.0, 0.5}, {0, 1})
    assert sorted({*machine.delays}) == pytest.approx([0, 1e-6])
    assert machine.joint == Cost(2e-6, 1 / 40e9)
    for name, wrong in {"delays": [-1], "groups": 5, "joint": [1], "rooms": 0}.items():
        with pytest.raises(MachineError, match=name):
            Machine.from_json(machine.as_json() | {name: wrong})
    question = SweepProblem((8192,) * 3, 64, CostModel(machine), 4, (64,), "stationary_c", memory=20 * 10**6)
    (fits,) = prices(replace(question, cost_model=CostModel(replace(machine, rooms=()))))
    assert not fits.why_not
    (tight,) = prices(question)
    assert tight.why_not == "needs 11.56 MiB a rank, and 9.537 MiB may be held"
    small = from_toml(tomllib.loads(HETEROGENEOUS)).of(None, 2)
    assert small.machine.speeds == machine.speeds[::2]
    assert small.machine.wires == machine.wires


def test_one_group_is_all_nodes() -> None:
    machine = het(group=[{"nodes": 16, "gflops": 250}], group_link={})
    assert set(machine.speeds) == {2.0}
    assert machine.speeds_of(64) == ()
    plain = het(group=[], group_link={})
    fast, usual = (Request((4096,) * 3, TWO_KINDS, cost_model=CostModel(each)) for each in (machine, plain))
    assert candidates(fast)[0].cost.multiplying < 0.6 * candidates(usual)[0].cost.multiplying


@thorough
def test_efficiency_is_of_all_speeds_together() -> None:
    question = SweepProblem((8192,) * 3, 64, CostModel(het()), 4)
    assert 0.5 < max(price.efficiency for price in prices(question) if not price.why_not) <= 1.0


# -- by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(3,), (3, 1), (1, 3)])
def test_rows_and_columns_by_name(grid: tuple[int, ...]) -> None:
    mesh, shape = MeshShape(grid), (2048, 4096, 64)
    for form, at, extent in (("rows", 0, 2048), ("columns", 1, 4096)):
        best = candidates(uneven(shape, mesh, (2, 1, 1), algorithm=f"weighted:{form}"))[0]
        assert best.layouts is not None
        for layout in (best.layouts[at], best.layouts[2]):
            (cut,) = layout.splits[at]
            assert cut.args == (0, extent / 2, 3 * extent / 4, extent)
            assert not layout.splits[1 - at]
        prove(lower(best.algorithm, placed_problem(uneven(shape, mesh, ()), best.layouts)))
    given = (None, parse_layout("*, *", mesh), None)
    elsewhere = uneven(shape, mesh, (2, 1, 1), algorithm="weighted:columns", layouts=given)
    best = candidates(elsewhere)[0]
    assert best.algorithm.result == "accumulate"
    assert best.layouts is not None
    prove(lower(best.algorithm, placed_problem(elsewhere, best.layouts)))
    with pytest.raises(AlgorithmError, match=r"forms :rows .*, :columns and :2d"):
        find_algorithm("weighted:3d")


@pytest.mark.parametrize(
    ("grid", "speeds", "columns"),
    [((4,), (4, 1, 1, 2), (5, 3)), ((2, 2), (4, 1, 1, 1), (5, 2)), ((3, 2), (5, 1, 2, 1, 1, 3), (8, 5)),
     ((1, 3), (4, 2, 1), (7,)), ((2, 2), (1, 1, 1, 1), (1, 1)), ((4, 4), (8, *(1,) * 15), (11, 4, 4, 4))],
)
def test_blocks_by_name(grid: tuple[int, ...], speeds: tuple[float, ...], columns: tuple[int, ...]) -> None:
    """Columns as wide as their ranks are fast together, cut by the speeds of each; a C that is placed stays."""
    mesh, shape = MeshShape(grid), (3000, 2000, 1024)
    request = uneven(shape, mesh, speeds, algorithm="weighted:2d")
    best = candidates(request)[0]
    assert best.layouts is not None
    assert slowest(best, request) <= 1.01
    cuts = slices(2000, columns, floor=1)
    found = {best.layouts[2].region(shape[:2], mesh, rank)[1].runs for rank in mesh.ranks}
    assert sorted(found) == [((a, b),) for a, b in pairwise(cuts)]
    schedule = lower(best.algorithm, placed_problem(request, best.layouts), Tuning(width=best.width))
    prove(schedule)
    assert 0.8 < best.seconds / simulate(schedule, request.cost_model.machine).seconds < 1.25
    c = parse_layout("*, " + ", ".join(f"{axis}=0" for axis in mesh.names), mesh)
    placed = candidates(replace(request, layouts=(None, None, c)))[0]
    assert placed.layouts is not None
    assert placed.layouts[2] == c


def test_open_blocks_are_cut_by_column() -> None:
    """A fast rank on a grid of two axes is loaded as it is fast, which cuts that are alike everywhere cannot."""
    mesh, shape = MeshShape((2, 2)), (2048, 2048, 2048)
    request = uneven(shape, mesh, (4, 1, 1, 1), algorithm="stationary_c")
    assert slowest(candidates(request)[0], request) <= 1.01
    grouped = replace(request, algorithm="summa_c")  # whose groups want the same slices
    assert slowest(candidates(grouped)[0], grouped) > 1.3

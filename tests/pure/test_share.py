"""What ranks of a node fetch and push together: words between nodes, and faults that `verify` finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from rma_mm.algorithms import find_algorithm
from rma_mm.errors import ScheduleError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.schedule.algorithm import PlacedProblem
from rma_mm.schedule.interpret import Outcome, interpret
from rma_mm.schedule.lowering.decisions import LoweringDecisions
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.lowering.node_fetch import node_fetches
from rma_mm.schedule.ops import Accumulate, Await, Barrier, Broadcast, Copy, Multiply, Op, Post, Reduce, Shift, Slot
from rma_mm.schedule.passes import frame_sizes
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.verify.checker import verify
from tests.pure.test_schedules import LIMITS, limits, run
from tests.pure.test_verify import doubled, dropped, found, nth, planted
from tests.reference import nothing, prove
from tests.strategies import Case, cases, pure

FETCHING = ("4x1", "1x4", "2x2")
"""Meshes over two nodes of two ranks on which both ranks of a node want the same slices."""


def problem(grid: str, shares: bool, shape: tuple[int, int, int] = (16, 16, 16)) -> PlacedProblem:
    """Blocks on a mesh whose halves are nodes; on 2 × 2, node-mates want the same part of A and have all of B."""
    sizes = tuple(map(int, grid.split("x")))
    mesh = MeshShape(sizes, node_of_rank=(0, 0, 1, 1))
    a = parse_layout("j, i" if grid == "2x2" else "i, j", mesh)
    b, c = parse_layout("i, j", mesh), parse_layout("i, j", mesh)
    if grid == "2x2":
        b = parse_layout("*, j", mesh)
    return PlacedProblem(shape, mesh, (a, b, c), fetches_together=shares)


def moved(name: str, given: PlacedProblem, tuning: Tuning | None = None) -> Outcome:
    """What a product of zeros moves, after its schedule was verified."""
    schedule = lower(find_algorithm(name), given, tuning)
    verify(schedule)
    homes = {x: nothing(given.layout(x), given.mesh, given.extent(x)) for x in "ABC"}
    return interpret(schedule, homes | {x: [np.zeros_like(tile) for tile in homes[x]] for x in "AB"})


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("grid", FETCHING)
def test_fetching_together_halves_the_words_between_nodes(grid: str, depth: int) -> None:
    with limits({"NARROW": 1}):
        tuning = Tuning(width=2, depth=depth)
        alone, together = (
            moved("stationary_c", problem(grid, shares), tuning).words_between_nodes for shares in (False, True)
        )
    assert together * 2 == alone > 0


@pytest.mark.parametrize("name", ["stationary_a", "stationary_b", "row_parallel:pull"])
def test_summing_on_the_node_halves_the_words_between_nodes(name: str) -> None:
    """Each rank holds a quarter of k: what the four push to C on the other node is summed in pairs."""
    mesh = MeshShape((4,), node_of_rank=(0, 0, 1, 1))
    places = tuple(parse_layout(text, mesh) for text in ("*, i", "i, *", "i, *"))
    alone, together = (
        moved(name, PlacedProblem((8, 6, 16), mesh, places, fetches_together=shares)).words_between_nodes
        for shares in (False, True)
    )
    assert together * 2 == alone == 2 * 8 * 6


GROUPS = {
    "data_parallel": ("i, *", "i, *", "i, *"),
    "column_parallel": ("i, *", "*, i", "*, i"),
    "row_parallel": ("*, i", "i, *", "i, *"),
    "stationary_c": ("i, *", "*, *", "*, *"),
    "summa_c": ("i, j", "i, j", "i, j"),
    "summa_b": ("i, j", "i, j", "i, j"),
    "pumma": ("i, j", "i, j", "i, j"),
}
"""Algorithms by which the ranks of a line all get, or sum, one matrix, and placements for them."""


def grouped(name: str, nodes: tuple[int, ...] = (0, 0, 1, 1)) -> PlacedProblem:
    """Three indices a rank along m, n and k."""
    is_line = "j" not in GROUPS[name][0]
    mesh = MeshShape((len(nodes),) if is_line else (1, len(nodes)), node_of_rank=nodes)
    a, b, c = (parse_layout(text, mesh) for text in GROUPS[name])
    return PlacedProblem((3 * len(nodes),) * 3, mesh, (a, b, c))


@pytest.mark.parametrize("name", GROUPS)
def test_what_a_group_moves_crosses_once_for_each_node(name: str) -> None:
    for_each = moved(name, grouped(name)).words_between_nodes  # a matrix so small is not worth a meeting
    with limits({"LEAST": 0}):
        once = moved(name, grouped(name)).words_between_nodes
    assert 2 * once == for_each == 2 * 12 * 12


@pytest.mark.parametrize("nodes", [(0, 0, 0, 1), (0, 1, 0, 1, 0), (0, 1, 1, 2, 2, 2)])
def test_it_does_so_where_nodes_have_different_numbers_of_its_ranks(nodes: tuple[int, ...]) -> None:
    for name in GROUPS:
        with limits({"LEAST": 0}):
            found = moved(name, grouped(name, nodes)).words_between_nodes
        assert found == (len(set(nodes)) - 1) * (3 * len(nodes)) ** 2, name


@pytest.mark.parametrize("nodes", [(0, 1, 2, 3), (0, 0, 0, 0)])
def test_groups_that_do_not_cross_or_of_a_rank_of_each_node_act_in_one_step(nodes: tuple[int, ...]) -> None:
    for name in ("data_parallel", "row_parallel"):
        given = grouped(name, nodes)
        with limits({"LEAST": 0}):
            decided = LoweringDecisions.of(find_algorithm(name), given)
            assert not decided.crosses_once("C") and not decided.staged
            moved(name, given)


def test_frames_are_taken_in_turn() -> None:
    """Memory for `depth` slices and the one in use, however many there are, dealt out over the node."""
    with limits({"NARROW": 1}):
        schedule = lower(find_algorithm("stationary_c"), problem("4x1", True, (4, 4, 64)), Tuning(width=2, depth=1))
        sizes = [frame_sizes(schedule.program(rank), rank) for rank in range(2)]
    assert [list(each) for each in sizes] == [["B~0"], ["B~1"]]
    assert [sum(each.values()) for each in sizes] == [8, 8]


@pure(80)
@given(cases(max_ranks=12), LIMITS)
def test_sharing_never_moves_more_between_nodes(case: Case, changed: dict[str, int]) -> None:
    with limits(changed):
        alone, together = (
            run(replace(case, problem=replace(case.problem, fetches_together=shares)), case.seed).words_between_nodes
            for shares in (False, True)
        )
    assert case.row.order == "ticket" or together <= alone


@pytest.mark.parametrize("width", [1024, 256])
def test_slices_are_asked_for_as_early_however_wide_they_are(width: int) -> None:
    schedule = lower(find_algorithm("stationary_c"), problem("4x1", True, (4, 4, 8192)), Tuning.of(width))
    ops = schedule.program(0)
    multiplied, ahead = 0, []
    for op in ops:
        if isinstance(op, Multiply):
            multiplied += len(op.a.region[1])
        elif isinstance(op, Copy):
            ahead.append(op.src.region[0].start - multiplied)
    assert min(ahead) >= 2048, ahead


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_rings_ask_for_what_neighbours_have_as_early_and_for_the_rest_when_it_has_come_to_them(depth: int) -> None:
    ops = lower(find_algorithm("pumma"), problem("4x1", True), Tuning(width=2, depth=depth)).program(0)
    steps = list(dict.fromkeys(op.step for op in ops if isinstance(op, Multiply)))
    rings = [op for op in ops if isinstance(op, Shift)]
    assert [isinstance(op.src.buffer, str) for op in rings] == [n < len(rings) // 3 for n in range(len(rings))]
    for op in rings:
        begun = {each.step for each in ops[: ops.index(op)] if isinstance(each, Multiply)}
        turn = rings.index(op) - (depth if isinstance(op.src.buffer, str) else 1)
        assert len(begun) == (steps.index(rings[turn].step) if turn >= 0 else 0)


# -- faults ---------------------------------------------------------------------------------------


def fetching(depth: int = 1) -> Schedule:
    with limits({"NARROW": 1}):
        given = problem("4x1", True, (4, 4, 32))
        schedule = lower(find_algorithm("stationary_c"), given, Tuning(width=2, depth=depth))
        programs = {rank: schedule.program(rank) for rank in given.mesh.ranks}
    return replace(schedule, program=programs.__getitem__)


def summing() -> Schedule:
    mesh = MeshShape((4,), node_of_rank=(0, 0, 1, 1))
    places = tuple(parse_layout(text, mesh) for text in ("*, i", "i, *", "i, *"))
    return lower(find_algorithm("stationary_a"), PlacedProblem((8, 6, 16), mesh, places, fetches_together=True))


def where(schedule: Schedule, wanted: Callable[[Op], bool], change: Callable[[Op], list[Op]]) -> Schedule:
    """Every operation of rank 0 that is wanted, changed."""
    return planted(schedule, lambda ops: [new for op in ops for new in (change(op) if wanted(op) else [op])])


def is_await(op: Op, event: str) -> bool:
    return isinstance(op, Await) and op.event == event


def test_the_schedules_are_good() -> None:
    verify(fetching())
    verify(summing())
    assert any(isinstance(op, Reduce) for op in summing().program(0))
    assert sum(isinstance(op, Post) for op in fetching().program(0)) == 16  # here and used, of eight slices


def test_a_slice_that_is_not_awaited() -> None:
    found(where(fetching(), lambda op: is_await(op, "B here"), dropped), "not-filled", "rank 0", "read before")


def test_a_slice_that_is_awaited_too_early() -> None:
    late = where(fetching(), lambda op: is_await(op, "B here"), lambda op: [replace(op, count=max(1, op.count - 1))])
    found(late, "race", "rank 0", "read before")


def test_a_frame_that_is_filled_while_another_reads_it() -> None:
    found(where(fetching(), lambda op: is_await(op, "B used"), dropped), "race", "rank 0", "Await is missing")


def test_an_event_that_is_posted_before_the_slice_is_used() -> None:
    def early(ops: list[Op]) -> list[Op]:
        posts = [op for op in ops if isinstance(op, Post) and op.event == "B used"]
        return [*posts, *(op for op in ops if op not in posts)]

    found(planted(fetching(), early, rank=1), "race", "rank 0", "Await is missing")


def test_an_event_that_is_never_posted() -> None:
    found(
        where(fetching(), lambda op: isinstance(op, Post) and op.event == "B here", dropped),
        "deadlock",
        "waits for ever",
    )


def test_a_piece_that_is_not_fetched() -> None:
    own = lambda op: isinstance(op, Copy) and isinstance(op.dst.buffer, Slot) and bool(op.dst.buffer.group)  # noqa: E731
    found(where(fetching(), own, dropped), "not-filled", "read before it is filled")


def test_a_piece_that_is_fetched_twice() -> None:
    found(planted(fetching(), nth(Copy, doubled)), "filled-twice", "filled already")


def test_a_slot_of_a_rank_that_does_not_share_it() -> None:
    def alone(op: Op) -> list[Op]:
        assert isinstance(op, Multiply)
        assert isinstance(op.b.buffer, Slot)
        return [replace(op, b=replace(op.b, buffer=replace(op.b.buffer, group=(1, 2))))]

    shared = lambda op: isinstance(op, Multiply) and isinstance(op.b.buffer, Slot) and op.b.rank == 1  # noqa: E731
    found(where(fetching(), shared, alone), "not-own", "rank 0", "another rank's scratch")


@pytest.mark.parametrize("name", ["data_parallel", "stationary_c"])
def test_what_a_mate_brings_is_taken_when_it_is_there(name: str) -> None:
    """Not without the meeting before it, and not what the mate takes from others in turn."""
    with limits({"LEAST": 0}):
        schedule = lower(find_algorithm(name), grouped(name))
        programs = {rank: schedule.program(rank) for rank in range(4)}

    def early(ops: list[Op]) -> list[Op]:
        """Without the meeting before what is passed on."""
        passed = next(n for n, op in enumerate(ops) if isinstance(op, Copy | Broadcast) and op.step == 1)
        meeting = max(n for n, op in enumerate(ops[:passed]) if isinstance(op, Barrier))
        return [*ops[:meeting], *ops[meeting + 1 :]]

    def idle(ops: list[Op]) -> list[Op]:
        """Without what is to be passed on."""
        return [op for op in ops if not (isinstance(op, Copy | Broadcast) and op.step == 0)]

    unmet = {rank: early(ops) for rank, ops in programs.items()}
    lacking = programs | {1: idle(programs[1])}
    for check in (verify, prove):
        check(replace(schedule, program=programs.__getitem__))
        for wrong in (unmet, lacking):
            with pytest.raises(ScheduleError) as error:
                check(replace(schedule, program=wrong.__getitem__))
            assert error.value.code in ("race", "not-final", "unmatched", "not-once"), error.value


def is_passed_on(op: Op) -> bool:
    return isinstance(op, Broadcast) and any(isinstance(part.buffer, Slot) for part in op.parts)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 1, 1, 1, 2)])
def test_a_panel_that_is_passed_on_before_it_is_there(nodes: tuple[int, ...], depth: int) -> None:
    """Or that does not come, or is not passed on."""
    with limits({"LEAST": 0}):
        schedule = lower(find_algorithm("summa_c"), grouped("summa_c", nodes), Tuning(depth=depth))
        programs = {rank: schedule.program(rank) for rank in schedule.mesh.ranks}

    ops = programs[2]
    at = next(n for n, op in enumerate(ops) if is_passed_on(op))
    comes = next(n for n, op in enumerate(ops[:at]) if isinstance(op, Broadcast) and op.dst)
    early = [*ops[:comes], ops[at], *ops[comes:at], *ops[at + 1 :]]
    lacking, kept = ([*ops[:n], *ops[n + 1 :]] for n in (comes, at))
    for check in (verify, prove):
        check(schedule)
        left = "deadlock" if check is verify else "unmatched"
        for wrong, code in ((early, "not-filled"), (lacking, "not-filled"), (kept, left)):
            with pytest.raises(ScheduleError) as error:
                check(replace(schedule, program=(programs | {2: wrong}).__getitem__))
            assert error.value.code == code, error.value


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_panel_crosses_a_step_before_it_is_passed_on(depth: int) -> None:
    """While another one is multiplied, if panels are asked for two ahead."""
    with limits({"LEAST": 0}):
        ops = lower(find_algorithm("summa_c"), grouped("summa_c"), Tuning(depth=depth)).program(2)
    steps = list(dict.fromkeys(op.step for op in ops if isinstance(op, Multiply)))
    for op in ops:
        if is_passed_on(op):
            before = [each for each in ops[: ops.index(op)] if isinstance(each, Multiply)]
            assert len({each.step for each in before}) == max(0, steps.index(op.step) - depth + 1)


def test_a_sum_of_a_node_that_does_not_cross() -> None:
    with limits({"LEAST": 0}):
        schedule = lower(find_algorithm("row_parallel"), grouped("row_parallel"))
        programs = {rank: schedule.program(rank) for rank in range(4)}
    assert [sum(isinstance(op, Reduce) for op in ops) for ops in programs.values()] == [2] * 4
    for n in range(2):
        wrong = {rank: nth(Reduce, dropped, n)(ops) if rank == 0 else ops for rank, ops in programs.items()}
        for check in (verify, prove):
            with pytest.raises(ScheduleError):
                check(replace(schedule, program=wrong.__getitem__))


def test_a_sum_that_a_rank_does_not_push() -> None:
    found(planted(summing(), nth(Accumulate, dropped)), "not-once", "multiplied never")


def test_a_sum_that_a_rank_does_not_join() -> None:
    with pytest.raises(ScheduleError):
        verify(planted(summing(), nth(Reduce, dropped)))


def test_ranks_that_await_differently_do_not_balance() -> None:
    schedule = fetching()
    prove(schedule)
    skipped = where(schedule, lambda op: is_await(op, "B here"), dropped)
    with pytest.raises(ScheduleError):
        prove(skipped)


def test_ranks_that_would_wait_for_each_other_share_one_operand_only() -> None:
    """Rank 0 comes to a slice of A first and rank 1 to one of B: fetching both together, neither would go on."""
    given = problem("2x2", True, (4, 4, 4))
    decisions = LoweringDecisions.of(find_algorithm("stationary_c"), given)
    with limits({"NARROW": 1}):
        walk = lower(find_algorithm("stationary_c"), replace(given, fetches_together=False), Tuning(2, 0)).program

    def member(rank: int) -> list[Op]:
        copies = [op for op in walk(0) if isinstance(op, Copy)]
        slots = {x: Slot(f"{x}slot", copies[0].src.region) for x in "AB"}
        fills: list[Op] = []
        for x in "AB" if rank == 0 else "BA":
            src = replace(copies[0].src, rank=2, buffer=x)
            fills.append(Copy(src, replace(src, rank=rank, buffer=slots[x]), 0))
            ref = replace(src, rank=rank, buffer=slots[x])
            fills.append(Multiply(ref, ref, replace(src, rank=rank, buffer="C"), True, 0))
        return fills

    assert {x for _, x in node_fetches(member, (0, 1), decisions)} == {"B"}

"""Faults planted into good schedules: `verify` finds each one, and says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS
from rma_mm.errors import Fault, ScheduleError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Region
from rma_mm.schedule.algorithm import PlacedProblem
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.lowering.node_crossing import can_share
from rma_mm.schedule.lowering.redistribute import redistribution
from rma_mm.schedule.ops import (
    Accumulate,
    Barrier,
    Broadcast,
    Claim,
    Copy,
    Finish,
    Multiply,
    Op,
    Reduce,
    Ref,
    Scale,
    Shift,
    Slot,
)
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.verify.checker import verify
from rma_mm.schedule.verify.coverage import covers_union
from tests.pure.test_schedules import limits
from tests.reference import prove
from tests.strategies import Case, cases, pure

MESH = MeshShape((2, 2))
Change = Callable[[list[Op]], list[Op]]


def product(name: str, a: str = "i, j", b: str = "i, j", c: str = "i, j", mesh: MeshShape = MESH) -> Schedule:
    """A 4 × 6 by 6 × 8 product that copies everything."""
    places = parse_layout(a, mesh), parse_layout(b, mesh), parse_layout(c, mesh)
    return lower(ALGORITHMS[name], PlacedProblem((4, 8, 6), mesh, places, in_place=""), Tuning(2, 1))


def planted(schedule: Schedule, change: Change, rank: int | None = 0) -> Schedule:
    """`schedule` with the operations of `rank` (None: of every rank) changed."""

    def program(number: int) -> list[Op]:
        ops = schedule.program(number)
        return change(ops) if rank in (None, number) else ops

    return replace(schedule, program=program)


def nth(kind: type, change: Callable[[Op], list[Op]], n: int = 0) -> Change:
    """Replace the n-th operation of a kind."""

    def changed(ops: list[Op]) -> list[Op]:
        at = [number for number, op in enumerate(ops) if isinstance(op, kind)][n]
        return [*ops[:at], *change(ops[at]), *ops[at + 1 :]]

    return changed


def found(schedule: Schedule, code: Fault, *words: str) -> None:
    """The fault is found under its code, and the message holds these words."""
    with pytest.raises(ScheduleError) as error:
        verify(schedule)
    assert error.value.code == code
    for word in words:
        assert word in str(error.value), str(error.value)


def dropped(_: Op) -> list[Op]:
    return []


def doubled(op: Op) -> list[Op]:
    return [op, op]


def moved_by_one(region: Region) -> Region:
    """The region one row further down."""
    return Region((type(region[0])((a + 1, b + 1) for a, b in region[0].runs), *region[1:]))


def test_the_schedules_that_faults_are_planted_into_are_good() -> None:
    for name in ("stationary_c", "stationary_a", "stationary_b", "queue"):
        verify(product(name))
    verify(product("stationary_c", c="i, None"))


# -- products -------------------------------------------------------------------------------------


def test_dropped_product() -> None:
    found(planted(product("stationary_c"), nth(Multiply, dropped, -1)), "not-once", "(4, 8, 6)", "multiplied never")


def test_dropped_first_product() -> None:
    found(
        planted(product("stationary_c"), nth(Multiply, dropped)),
        "not-opened",
        "rank 0",
        "Multiply",
        "before it is opened",
    )


def test_doubled_product() -> None:
    found(
        planted(product("stationary_c"), nth(Multiply, doubled, -1)),
        "not-once",
        "(4, 8, 6)",
        "multiplied more than once",
    )


def test_doubled_accumulate() -> None:
    found(planted(product("stationary_a"), nth(Accumulate, doubled)), "not-once", "multiplied more than once")


def test_dropped_accumulate() -> None:
    found(planted(product("stationary_a"), nth(Accumulate, dropped)), "not-once", "multiplied never")


def test_product_of_regions_that_do_not_fit() -> None:
    def crooked(op: Op) -> list[Op]:
        assert isinstance(op, Multiply)
        return [replace(op, b=replace(op.b, region=moved_by_one(op.b.region)))]

    found(planted(product("stationary_c"), nth(Multiply, crooked)), "misfit", "rank 0", "Multiply")


# -- references -----------------------------------------------------------------------------------


def test_region_out_of_bounds() -> None:
    def beyond(op: Op) -> list[Op]:
        assert isinstance(op, Copy)
        src = replace(op.src, region=Region.box((100, 101), (0, 1)))
        return [replace(op, src=src)]

    found(
        planted(product("stationary_c"), nth(Copy, beyond)),
        "out-of-bounds",
        "rank 0",
        "Copy",
        "out of bounds",
        "100:101",
    )


def test_region_of_another_rank() -> None:
    def elsewhere(op: Op) -> list[Op]:
        assert isinstance(op, Copy)
        return [replace(op, src=replace(op.src, rank=(op.src.rank + 1) % 4))]

    found(planted(product("stationary_c"), nth(Copy, elsewhere)), "out-of-bounds", "rank 0", "out of bounds")


def test_no_such_rank() -> None:
    def nowhere(op: Op) -> list[Op]:
        assert isinstance(op, Copy)
        return [replace(op, src=replace(op.src, rank=4))]

    found(planted(product("stationary_c"), nth(Copy, nowhere)), "no-rank", "rank 0", "Copy", "no rank 4")


def test_scratch_of_another_rank() -> None:
    def theirs(op: Op) -> list[Op]:
        assert isinstance(op, Copy)
        return [replace(op, src=Ref(3, Slot("A9", op.src.region, "A9"), op.src.region))]

    found(planted(product("stationary_c"), nth(Copy, theirs)), "not-own", "another rank's scratch")


def test_copy_of_the_wrong_region() -> None:
    def wrong(op: Op) -> list[Op]:
        assert isinstance(op, Copy)
        rows, cols = op.src.region
        return [replace(op, src=replace(op.src, region=Region((rows.pieces(1)[0], cols))))]

    found(planted(product("stationary_c"), nth(Copy, wrong)), "misfit", "rank 0", "Copy", "one region")


def test_copy_of_half_of_what_is_read() -> None:
    def half(op: Op) -> list[Op]:
        assert isinstance(op, Copy)
        part = Region((op.src.region[0].pieces(1)[0], op.src.region[1]))
        return [Copy(replace(op.src, region=part), replace(op.dst, region=part), op.step)]

    found(
        planted(product("stationary_c"), nth(Copy, half)),
        "not-filled",
        "rank 0",
        "Multiply",
        "read before it is filled",
    )


def test_slot_read_before_it_is_filled() -> None:
    def late(ops: list[Op]) -> list[Op]:
        at = next(n for n, op in enumerate(ops) if isinstance(op, Copy))
        return [*ops[:at], *ops[at + 1 :], ops[at]]

    found(planted(product("stationary_c"), late), "not-filled", "rank 0", "Multiply", "read before it is filled")


def test_slot_filled_twice() -> None:
    found(planted(product("stationary_c"), nth(Copy, doubled)), "filled-twice", "rank 0", "Copy", "filled already")


def test_slot_that_was_overwritten() -> None:
    def crowded(ops: list[Op]) -> list[Op]:
        frame = next(op.dst.buffer.frame for op in ops if isinstance(op, Copy) and isinstance(op.dst.buffer, Slot))

        def one(ref: Ref) -> Ref:
            slot = ref.buffer
            return replace(ref, buffer=replace(slot, frame=frame)) if isinstance(slot, Slot) else ref

        moved: list[Op] = []
        for op in ops:
            if isinstance(op, Copy):
                op = replace(op, dst=one(op.dst))
            elif isinstance(op, Multiply):
                op = replace(op, a=one(op.a), b=one(op.b))
            moved.append(op)
        return moved

    found(planted(product("stationary_c"), crowded), "not-filled", "read before it is filled")


def test_scratch_of_c_overwritten_by_a_later_product() -> None:
    def again(op: Op) -> list[Op]:
        assert isinstance(op, Multiply)
        return [op, replace(op, first=True)]

    found(
        planted(product("stationary_a"), nth(Multiply, again)),
        "opened-twice",
        "Multiply",
        "overwritten by its first product",
    )


# -- C, barriers, epochs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(0, "not-opened", ["Accumulate", "not opened"]), (1, "written-late", ["finished", "C"])],
)
def test_missing_barrier(number: int, code: Fault, words: list[str]) -> None:
    found(planted(product("stationary_a"), nth(Barrier, dropped, number), rank=None), code, *words, "barrier")


def test_missing_barrier_before_replicas_are_gathered() -> None:
    schedule = product("stationary_c", c="i, None")
    found(planted(schedule, nth(Barrier, dropped), rank=None), "not-final", "not finished")


def test_barrier_counts_that_differ() -> None:
    schedule = product("stationary_a")
    found(planted(schedule, nth(Barrier, dropped), rank=2), "barriers", "barriers do not match", "[2, 2, 1, 2]")
    found(planted(schedule, nth(Barrier, doubled), rank=1), "barriers", "barriers do not match", "[2, 3, 2, 2]")


def test_c_finished_twice() -> None:
    found(planted(product("stationary_c"), nth(Finish, doubled)), "written-late", "rank 0", "Finish", "finished twice")


def test_c_never_finished() -> None:
    found(planted(product("stationary_c"), nth(Finish, dropped), rank=3), "not-once", "rank 3", "was finished")


def test_c_never_opened() -> None:
    schedule = product("stationary_a")
    found(planted(schedule, nth(Scale, dropped)), "not-opened", "not opened")
    opening = lambda ops: [op for op in ops if isinstance(op, Finish)]  # noqa: E731
    found(
        planted(replace(schedule, shape=(4, 8, 0)), opening, rank=None),
        "not-opened",
        "rank 0",
        "Finish",
        "before it is opened",
    )
    found(planted(schedule, lambda _: [], rank=None), "not-once", "rank 0", "was opened")


def test_c_opened_twice() -> None:
    found(planted(product("stationary_a"), nth(Scale, doubled)), "opened-twice", "rank 0", "Scale", "opened twice")


def test_accumulate_before_open() -> None:
    def early(ops: list[Op]) -> list[Op]:
        opening = next(op for op in ops if isinstance(op, Scale))
        ops = [op for op in ops if op is not opening]
        at = max(n for n, op in enumerate(ops) if isinstance(op, Accumulate))
        return [*ops[: at + 1], opening, *ops[at + 1 :]]

    found(planted(product("stationary_a"), early), "not-opened", "Accumulate", "not opened")


def test_local_write_beside_a_remote_accumulate() -> None:
    """Rank 0 multiplies into its C at home while others add to it."""
    schedule = product("stationary_a", "i, None", "None, None", "i:cyclic(1), None", MeshShape((2,)))

    def local(ops: list[Op]) -> list[Op]:
        at = next(n for n, op in enumerate(ops) if isinstance(op, Multiply))
        a, b = (Ref(0, x, schedule.home(x, 0)) for x in "AB")
        a = replace(a, region=Region((schedule.home("C", 0)[0] & a.region[0], a.region[1])))
        home = Multiply(a, b, Ref(0, "C", Region((a.region[0], b.region[1]))), False, 0)
        return [*ops[:at], home, *ops[at:]]

    verify(schedule)
    found(planted(schedule, local), "race", "conflict in one epoch on C of rank 0", "barrier is missing")


def test_finish_while_others_add() -> None:
    def hasty(ops: list[Op]) -> list[Op]:
        return [*ops[:-2], ops[-1], ops[-2]]

    found(planted(product("stationary_a"), hasty), "written-late", "C@0", "without a barrier in between")


# -- partial operands -----------------------------------------------------------------------------


def test_summand_left_out_or_added_twice() -> None:
    mesh = MeshShape((2, 2))
    move = redistribution(mesh, (4, 4), parse_layout("i, None, j=sum", mesh), parse_layout("i, j", mesh))
    verify(move)
    for change in (dropped, doubled):
        found(planted(move, nth(Accumulate, change)), "not-once", "A+", "each of its 2 summands once")


# -- what ranks of a node bring to it together ----------------------------------------------------


def replication() -> Schedule:
    """The schedule by which all of two nodes of two ranks get a matrix, half of which a node lacks."""
    mesh = MeshShape((2, 2), node_of_rank=(0, 0, 1, 1))
    return redistribution(mesh, (128, 128), parse_layout("i, j", mesh), parse_layout("*, *", mesh), is_readable=True)


def test_only_replicas_of_a_node_are_shared() -> None:
    """Not what one rank collects, what ranks of one node hold once, small matrices, and what lies on one node."""
    nodes = MeshShape((2, 2), node_of_rank=(0, 0, 1, 1))
    source = parse_layout("i, j", nodes)
    for target, mesh, size, expected in (
        ("*, *", nodes, 128, True), ("i, *", nodes, 128, True),
        ("*, j", nodes, 128, False), ("i, j", nodes, 128, False), ("*, *, i=0, j=0", nodes, 128, False),
        ("*, *", nodes, 127, False), ("*, *", MeshShape((2, 2)), 128, False),
    ):
        assert can_share(mesh, (size, size), source, parse_layout(target, mesh)) == expected, (target, mesh, size)


def turned(ops: list[Op]) -> list[Op]:
    """What stands behind the meeting, the meeting, and what stood before it."""
    at = next(n for n, op in enumerate(ops) if isinstance(op, Barrier))
    return [*ops[at + 1 :], ops[at], *ops[:at]]


def test_pieces_of_others_are_taken_when_they_are_there() -> None:
    verify(replication())
    prove(replication())
    for change in (nth(Barrier, dropped), turned):
        for check in (verify, prove):
            with pytest.raises(ScheduleError) as error:
                check(planted(replication(), change, None))
            assert error.value.code in ("race", "not-final")


def test_a_piece_is_not_taken_from_who_takes_it_in_turn() -> None:
    """Each of two ranks takes the same piece from the other, after the meeting."""

    def circular(op: Op) -> list[Op]:
        assert isinstance(op, Copy)
        mate = 1 - op.dst.rank
        return [replace(op, src=replace(op.dst, rank=mate), step=1)]

    def behind(ops: list[Op]) -> list[Op]:
        return [*ops[1:], *circular(ops[0])]

    for check in (verify, prove):
        with pytest.raises(ScheduleError) as error:
            check(planted(replication(), behind))
        assert error.value.code == "not-final"


# -- faults that verify does not find yet ---------------------------------------------------------


def test_the_only_summand_left_out() -> None:
    """_Checker.end goes through the matrices that some Accumulate adds to; with none left, A+ is not among them."""
    mesh = MeshShape((1,))
    schedule = product("stationary_c", "None, None, i=sum", "None, None", "None, None", mesh)
    found(planted(schedule, nth(Accumulate, dropped)), "not-once", "A+")


def test_product_after_finish() -> None:
    """The executor casts at Finish, so that what comes later is lost in float16, and in any other dtype is luck."""
    found(planted(product("stationary_c"), lambda ops: [*ops[:-2], ops[-1], ops[-2]]), "written-late", "finished")


def test_accumulate_after_finish() -> None:
    def early(ops: list[Op]) -> list[Op]:
        return [ops[0], ops[-1], *ops[1:-1]]

    found(planted(product("stationary_a"), early, rank=None), "written-late", "finished")


def test_summand_read_as_the_matrix() -> None:
    mesh = MeshShape((2,))
    schedule = product("stationary_c", "None, None, i=sum", "None, None", "None, None, i=0", mesh)

    def raw(op: Op) -> list[Op]:
        assert isinstance(op, Copy) and isinstance(op.dst.buffer, Slot)
        return [replace(op, src=replace(op.src, buffer="A"))]

    found(planted(schedule, nth(Copy, raw)), "summand", "A")


def test_overlapping_parts_do_not_cover_a_gap() -> None:
    assert not covers_union([Region.box((0, 2), (0, 1)), Region.box((1, 3), (0, 1))], Region.box((0, 4), (0, 1)))


# -- any operation --------------------------------------------------------------------------------

KINDS = (Copy, Multiply, Accumulate, Scale, Finish, Claim)


@pure(60)
@given(cases(max_ranks=12), st.fixed_dictionaries({}, optional={"NARROW": st.just(1)}), st.data())
def test_no_operation_is_redundant(case: Case, changed: dict[str, int], data: st.DataObject) -> None:
    """Leaving out any one operation, of a rank's own or of a task of the queue, is found."""
    with limits(changed):
        schedule = lower(case.row, case.problem, case.tuning)
        places = _places(schedule)
        assume(places)
        rank, task, at = data.draw(st.sampled_from(places))
        cut = _without(schedule, rank, task, at)
        verify(schedule)
        with pytest.raises(ScheduleError):
            verify(cut)


def _places(schedule: Schedule) -> list[tuple[int, int | None, int]]:
    """(rank, task or None, position) of every operation but barriers."""
    found = []
    for rank in schedule.mesh.ranks:
        tasks: list[int | None] = [None]
        if schedule.pool:
            tasks += range(rank, schedule.pool.tasks, schedule.mesh.size)
        for task in tasks:
            ops = schedule.program(rank) if task is None else schedule.pool.program(task, rank)  # type: ignore[union-attr]
            kinds = set(KINDS) - ({Claim} if task is None and len(tasks) == 1 else set())  # it finds no task left
            if not any(isinstance(op, Multiply) for op in ops):
                kinds -= {Accumulate, Scale}  # without a share of k it adds zeros, which may be left out
            found += [(rank, task, n) for n, op in enumerate(ops) if type(op) in kinds]
    return found


def _without(schedule: Schedule, rank: int, task: int | None, at: int) -> Schedule:
    """`schedule` without one operation."""
    pool = schedule.pool
    if task is None or pool is None:
        return planted(schedule, lambda ops: ops[:at] + ops[at + 1 :], rank)

    def program(number: int, runner: int) -> list[Op]:
        ops = pool.program(number, runner)
        return ops[:at] + ops[at + 1 :] if number == task else ops

    return replace(schedule, pool=replace(pool, program=program))


ALONE = [algorithm for algorithm in ALGORITHMS.values() if not algorithm.grouped]
"""Rows that move nothing by groups."""


@pure(60)
@given(st.sampled_from(ALONE).flatmap(lambda algorithm: cases(algorithm, max_ranks=12)), st.data())
def test_no_barrier_is_redundant(case: Case, data: st.DataObject) -> None:
    """Leaving out any one barrier on all ranks is found, where there are products and no partial operand.

    With partial operands the barrier that ends one stage stands next to the one that ends the opening of the next:
    one of the two would do. Groups wait for each other, so they could do without some.
    """
    schedule = lower(case.row, case.problem, case.tuning)
    barriers = sum(isinstance(op, Barrier) for op in schedule.program(0))
    assume(barriers and all(case.problem.shape) and not any(case.problem.layout(x).partial for x in "AB"))
    n = data.draw(st.integers(0, barriers - 1))
    with pytest.raises(ScheduleError):
        verify(planted(schedule, nth(Barrier, dropped, n), rank=None))


# -- groups ---------------------------------------------------------------------------------------

TOGETHER = [algorithm for algorithm in ALGORITHMS.values() if algorithm.grouped and not algorithm.specialize]
"""Rows that move operands by groups."""


@pure(60)
@given(st.sampled_from(TOGETHER).flatmap(lambda algorithm: cases(algorithm, max_ranks=12)), st.data())
def test_a_group_call_that_one_rank_leaves_out_is_found(case: Case, data: st.DataObject) -> None:
    """By the check of all ranks together, and by what each brings of its own."""
    schedule = lower(case.row, case.problem, case.tuning)
    calls = [
        (rank, n)
        for rank in schedule.mesh.ranks
        for n, op in enumerate(schedule.program(rank))
        if isinstance(op, Broadcast | Shift | Reduce)
    ]
    assume(calls)
    rank, dropped_at = data.draw(st.sampled_from(calls))

    def program(asked: int) -> list[Op]:
        return [op for n, op in enumerate(schedule.program(asked)) if (asked, n) != (rank, dropped_at)]

    faulty = replace(schedule, program=program)
    with pytest.raises(ScheduleError):
        verify(faulty)
    prove(schedule)
    with pytest.raises(ScheduleError):
        prove(faulty)

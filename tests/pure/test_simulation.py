"""Simulated time where a few operations share a machine, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rma_mm.errors import ScheduleError
from rma_mm.geometry.layout import everywhere
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region
from rma_mm.policy.model.machine import COLLECTIVES, COPY, FLAVOURS, ONE_SIDED, Cost, Kernel, Machine
from rma_mm.policy.simulator.simulate import Simulated, simulate
from rma_mm.schedule.ops import (
    Accumulate,
    Await,
    Barrier,
    Broadcast,
    Claim,
    Copy,
    Finish,
    Multiply,
    Op,
    Post,
    Reduce,
    Ref,
    Scale,
    Shift,
    Slot,
)
from rma_mm.schedule.schedule import Home, Pool, Schedule

# -- schedules by hand: a word is a byte and takes a second, and so does a multiply-add --------------

SECOND = Cost(0, 1)
"""A second a byte, and no latency."""
MOVES = (*(f"shared.{movement}" for movement in ONE_SIDED), *COLLECTIVES)


def machine(
    own: Cost = SECOND, node: Cost = SECOND, between: Cost = SECOND, cores: int = 64,
    operation: float = 0, meeting: float = 0, hidden: float = 1, nodes_per_host: int = 1, piece: float = 0,
    **special: Cost,
) -> Machine:
    """A machine of few figures. special: movements (with _ for . and blanks) whose cost on both links is another."""
    named = {_movement(key): cost for key, cost in special.items()}
    costs = {
        "own": {COPY: own},
        "node": dict.fromkeys(MOVES, node) | named,
        "between": {
            name: replace(cost, hidden=hidden) for name, cost in (dict.fromkeys(MOVES, between) | named).items()
        },
    }
    kernels = {"float32 blas": Kernel(0, 1)}
    return Machine(
        "by hand", costs, kernels, cores, nodes_per_host=nodes_per_host, operation=operation, meeting=meeting,
        piece=piece, packed=piece,
    )


def _movement(key: str) -> str:
    """`created_get_busy` → `created.get busy`; movements of groups are their own names."""
    flavour, _, movement = key.partition("_")
    return f"{flavour}.{movement.replace('_', ' ')}" if flavour in FLAVOURS else key


def schedule(programs: Sequence[Sequence[Op]], nodes: Sequence[int] = (), pool: Pool | None = None) -> Schedule:
    """Ranks with these operations; A, B and C are of one row, and everybody holds all of them."""
    mesh = MeshShape((len(programs),), node_of_rank=tuple(nodes))
    homes = {x: Home((1, 100), everywhere()) for x in "ABC"}
    return Schedule(mesh, homes, lambda rank: list(programs[rank]), (1, 1, 1), pool)


SENT = {"A": "allocated"}  # windows whose memory node-mates do not load


def run(
    programs: Sequence[Sequence[Op]], on: Machine, nodes: Sequence[int] = (), **more: Any
) -> Simulated:
    return simulate(schedule(programs, nodes), on, itemsize=1, **more)


def home(rank: int, x: str, words: int) -> Ref:
    return Ref(rank, x, Region.box((0, 1), (0, words)))


def slot(rank: int, name: str, words: int) -> Ref:
    region = Region.box((0, 1), (0, words))
    return Ref(rank, Slot(name, region, name), region)


def multiply(rank: int, seconds: int, a: Ref | None = None, c: Ref | None = None) -> Multiply:
    """A product of so many seconds that reads `a` and writes `c`."""
    b = Ref(rank, "B", Region.box((0, seconds), (0, 1)))
    a = replace(a or home(rank, "A", 1), region=Region.box((0, 1), (0, seconds)))
    return Multiply(a, b, replace(c or home(rank, "C", 1), region=Region.box((0, 1), (0, 1))), True, 0)


def get(rank: int, owner: int, words: int, name: str = "A0") -> Copy:
    return Copy(home(owner, "A", words), slot(rank, name, words), 0)


def add(rank: int, owner: int, words: int, name: str = "C0") -> Accumulate:
    return Accumulate(slot(rank, name, words), home(owner, "C", words), 0)


# -- processors -----------------------------------------------------------------------------------


def test_one_rank_takes_the_sum_of_its_parts() -> None:
    ops: list[Op] = [
        Scale(home(0, "C", 2), True, 0), get(0, 0, 5), multiply(0, 7, slot(0, "A0", 7)), add(0, 0, 3), Barrier(0),
        Finish(home(0, "C", 2), 0),
    ]
    outcome = run([ops], machine(own=Cost(100, 10), operation=1000, meeting=10_000))
    assert outcome.ranks == ((100 + 20) + (100 + 50) + 7 + (100 + 30) + 6 * 1000 + 2 * 10_000,)
    assert outcome.seconds == outcome.ranks[0] + 10_000
    assert outcome.multiplying == (7,)
    assert outcome.peak == (300 + 7 + 3,)
    assert (outcome.between, outcome.within, outcome.messages) == ((0,), (0,), (0,))


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 4), (2, 4), (3, 6), (4, 8)])
def test_ranks_share_two_slots(ranks: int, seconds: float) -> None:
    outcome = run([[multiply(rank, 4)] for rank in range(ranks)], machine(cores=2))
    assert outcome.seconds == pytest.approx(seconds)
    assert outcome.multiplying == pytest.approx((seconds,) * ranks)


def test_shares_grow_when_others_end() -> None:
    """Three of 1, 2 and 3 seconds on two slots: all at 2/3 until the first ends, then each at full speed."""
    outcome = run([[multiply(rank, rank + 1)] for rank in range(3)], machine(cores=2))
    assert outcome.ranks == pytest.approx((1.5, 2.5, 3.5))


def test_shares_shrink_when_others_begin() -> None:
    """Alone for 3 seconds, then 2 of them share the slot for twice 4, and the last second is one's own again."""
    begins_late = [get(1, 0, 3), multiply(1, 4, slot(1, "A0", 4))]
    outcome = run([[multiply(0, 8)], begins_late], machine(cores=1), nodes=(0, 1), )
    assert outcome.ranks == (8, 7), "a host each"
    outcome = run([[multiply(0, 8)], begins_late], machine(cores=1, nodes_per_host=2), nodes=(0, 1))
    assert outcome.ranks == (12, 11)


def test_all_meet_in_the_time_of_their_number() -> None:
    outcome = run([[], [multiply(1, 5), Barrier(0)], [Barrier(0)], [Barrier(0)]][1:], machine(meeting=1))
    assert outcome.seconds == pytest.approx(3 * np.log2(3) + 5)
    assert run([[]] * 8, machine(meeting=1)).seconds == 6


# -- transfers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "moved", "seconds"),
    [(1, 3, 8), (0, 3, 8 + 3), (0.5, 3, 8 + 1.5), (1, 6, 6 + 4), (0, 6, 4 + 6 + 4), (0.5, 6, 6 + 2 + 4)],
)
def test_a_transfer_hides_behind_a_multiply(hidden: float, moved: int, seconds: float) -> None:
    """Two multiplies of 4 seconds, the second of which reads what is fetched; shorter and longer than the first."""
    ops = [get(0, 1, moved), multiply(0, 4), multiply(0, 4, slot(0, "A0", 4))]
    assert run([ops, []], machine(hidden=hidden), nodes=(0, 1)).seconds == pytest.approx(seconds)


def test_what_is_not_hidden_is_lost_once() -> None:
    """Six seconds of a wire beside three multiplies of four: none goes on behind the first, two less behind each."""
    ops = [get(0, 1, 6), *[multiply(0, 4)] * 3]
    outcome = run([ops, []], machine(hidden=0), nodes=(0, 1))
    assert outcome.ranks[0] == outcome.multiplying[0] == 12 + 6


def test_copies_within_a_node_take_the_processor() -> None:
    ops = [get(0, 1, 3), multiply(0, 4), multiply(0, 4, slot(0, "A0", 4))]
    assert run([ops, []], machine()).seconds == 11
    assert run([ops, [multiply(1, 7)]], machine(cores=1)).ranks == (18, 14)


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [
        ((0, 0, 1, 1), 2 + 10),  # both into one node, out of one
        ((0, 0, 1, 2), 2 + 10),  # into one
        ((0, 1, 2, 2), 2 + 10),  # out of one
        ((0, 1, 2, 3), 2 + 5),
    ],
)
def test_ranks_of_a_node_share_its_wire(nodes: tuple[int, ...], seconds: float) -> None:
    programs = [[get(0, 2, 5)], [get(1, 3, 5)], [], []]
    assert run(programs, machine(between=Cost(2, 1)), nodes).seconds == seconds


@pytest.mark.parametrize(("other", "seconds"), [(1, 3), (2, 6)])
def test_what_comes_from_one_rank_comes_in_turn(other: int, seconds: int) -> None:
    """While what comes from two shares the wire, so that the first of 3 words each is there after 6 seconds."""
    program = [get(0, 1, 3), get(0, other, 3, "A1"), multiply(0, 9, slot(0, "A0", 9))]
    assert run([program, [], []], machine(), range(3)).ranks[0] == seconds + 9


def test_a_wire_carries_both_ways_at_once() -> None:
    assert run([[get(0, 1, 5)], [get(1, 0, 5)]], machine(), (0, 1)).seconds == 5
    assert run([[get(0, 1, 5)], [add(1, 0, 5)]], machine(), (0, 1)).seconds == 10, "both into the first"
    assert run([[get(0, 1, 5)], [add(1, 2, 5)], []], machine(), (0, 1, 2)).seconds == 10, "both out of the second"


@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)], ids=["within", "between"])
def test_a_busy_target_costs_more_where_its_figures_say_so(nodes: tuple[int, int]) -> None:
    on = machine(shared_get=Cost(1, 1), shared_get_busy=Cost(20, 1), created_get_busy=Cost(30, 1))
    ops, busy, idle = [multiply(0, 1), get(0, 1, 2)], [multiply(1, 9)], [get(1, 1, 9)]
    assert run([ops, idle], on, nodes).ranks[0] == 1 + 3
    assert run([ops, busy], on, nodes).ranks[0] == 1 + 22
    assert run([ops, busy], on, nodes, flavours={"A": "created", "B": "shared"}).ranks[0] == 1 + 32
    assert run([[multiply(0, 10), *ops], busy], on, nodes).ranks[0] == 11 + 3, "no more by then"


def test_c_is_summed_in_its_own_type() -> None:
    programs = [[get(0, 1, 2)], [add(1, 0, 3)]]
    assert run(programs, machine(), summed=10).ranks == (2, 30)


def test_each_piece_of_memory_costs_something() -> None:
    """Three rows of a matrix of six columns, in slots of as many columns or of more."""
    mesh = MeshShape((2,), node_of_rank=(0, 1))
    homes = {x: Home((3, 6), everywhere()) for x in "ABC"}

    def seconds(op: Callable[[Ref, Ref], Op], last: int, width: int) -> float:
        part = Region.box((0, 3), (0, last))
        held = Slot("A0", Region.box((0, 3), (0, width)), "A0")
        programs = [[], [op(Ref(0, "A", part), Ref(1, held, part))]]
        return simulate(Schedule(mesh, homes, lambda rank: list(programs[rank])), on, itemsize=1).ranks[1]

    def copy(home: Ref, slot: Ref) -> Op:
        return Copy(home, slot, 0)

    on = machine(between=Cost(0, 0), piece=1)
    assert seconds(copy, 6, 6) == 0, "it lies together on both sides"
    assert seconds(copy, 4, 4) == seconds(copy, 6, 7) == seconds(copy, 4, 7) == 3
    assert seconds(lambda home, slot: Accumulate(slot, replace(home, buffer="C"), 0), 4, 4) == 3


# -- waits, where the executor has them -----------------------------------------------------------


def test_a_slot_is_filled_when_its_last_reader_is_done() -> None:
    """A push under way holds back the next product into its slot, and no other one."""
    pushed = add(0, 1, 10)
    for name, seconds in (("C0", 10 + 4), ("C1", 10)):
        ops = [pushed, multiply(0, 4, c=slot(0, name, 1))]
        assert run([ops, []], machine(), (0, 1)).ranks[0] == seconds
    for name, seconds in (("C0", 10 + 3), ("C1", 10)):  # a copy into it as well; both share nothing
        assert run([[pushed, get(0, 1, 3, name)], []], machine(), (0, 1)).ranks[0] == seconds


def test_a_barrier_waits_for_all_that_is_under_way() -> None:
    ops = [get(0, 1, 10), Barrier(0), multiply(0, 4)]
    assert run([ops, [Barrier(0), multiply(1, 1)]], machine(), (0, 1)).ranks == (14, 11)
    assert run([ops[:1], []], machine(), (0, 1)).seconds == 10, "and so does the end"


def reduce(rank: int, src: Ref, dst: Ref, *group: int) -> Reduce:
    return Reduce((replace(src, rank=rank),), (dst,), group, 0)


@pytest.mark.parametrize(("name", "seconds"), [("A0", 10 + 3), ("A2", 10)])
@pytest.mark.parametrize("movement", ["get", "broadcast", "reduce"])
def test_nothing_comes_to_where_something_is_sent_from(movement: str, name: str, seconds: int) -> None:
    """Ten words leave A0 round a ring of three, where all else is one word."""
    room = slot(0, name, 3)
    third: dict[str, list[list[Op]]] = {
        "get": [[get(0, 3, 3, name)], []],
        "broadcast": [[Broadcast((home(3, "A", 3),), dst, (0, 3), 0)] for dst in (room, None)],
        "reduce": [[reduce(rank, slot(0, "C0", 3), room, 0, 3)] for rank in (0, 3)],
    }
    all_of_it = (0, 1, 2)
    ring = [
        Shift(slot(0, "A0", 10), slot(0, "A1", 1), 1, 2, all_of_it, 0),
        Shift(slot(1, "A0", 1), slot(1, "A1", 10), 2, 0, all_of_it, 0),
        Shift(slot(2, "A0", 1), slot(2, "A1", 1), 0, 1, all_of_it, 0),
    ]
    programs = [[ring[0], *third[movement][0]], [ring[1]], [ring[2]], third[movement][1]]
    assert run(programs, machine(), range(4)).ranks[0] == seconds


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sum_is_formed_of_what_has_come(rank: int) -> None:
    src, dst = slot(0, "C0", 3), home(0, "C", 3)
    programs: list[list[Op]] = [[reduce(q, src, dst, 0, 1)] for q in (0, 1)]
    programs[rank].insert(0, get(rank, 2, 10, "C0"))
    assert run([*programs, []], machine(), range(3)).ranks[0] == 10 + 3


@pytest.mark.parametrize(
    ("rank", "following", "seconds"),
    [
        (0, multiply(0, 4, c=slot(0, "C0", 1)), 3 + 4),  # writes over the owner's own summand
        (0, multiply(0, 4, c=slot(0, "C1", 1)), 4),
        (0, add(0, 2, 5, "C9"), 3 + 5),  # pushes the sum
        (0, add(0, 2, 5, "C0"), 5),
        (1, multiply(1, 4, c=slot(1, "C0", 1)), 3 + 4),  # writes over a summand that is sent
        (1, multiply(1, 4, c=slot(1, "C1", 1)), 4),
    ],
)
def test_a_sum_is_used_when_it_is_complete(rank: int, following: Op, seconds: int) -> None:
    programs: list[list[Op]] = [[reduce(q, slot(0, "C0", 3), slot(0, "C9", 3), 0, 1)] for q in (0, 1)]
    programs[rank].append(following)
    assert run([*programs, []], machine(), range(3)).ranks[rank] == seconds


def test_gets_overlap_and_a_product_waits_for_its_own() -> None:
    ops = [get(0, 1, 4, "A0"), get(0, 2, 10, "A1"), multiply(0, 1, slot(0, "A0", 1))]
    assert run([ops, [], []], machine(), (0, 1, 2)).ranks[0] == 14, "one wire into the node"
    ops.append(multiply(0, 1, slot(0, "A1", 1)))
    outcome = run([ops, [], []], machine(), (0, 1, 2))
    assert outcome.ranks[0] == 15
    assert outcome.multiplying[0] == 2


# -- together -------------------------------------------------------------------------------------


def broadcast(rank: int, owner: int, ranks: int, words: int) -> Broadcast:
    dst = None if rank == owner else slot(rank, "A0", words)
    return Broadcast((home(owner, "A", words),), dst, tuple(range(ranks)), 0)


@pytest.mark.parametrize("late", [0, 1])
def test_data_moves_when_both_have_come(late: int) -> None:
    programs: list[list[Op]] = [[broadcast(rank, 0, 2, 3)] for rank in range(2)]
    programs[late].insert(0, multiply(late, 10))
    for nodes in ((0, 0), (0, 1)):
        assert run(programs, machine(), nodes, flavours=SENT).ranks == (13, 13)


def test_ranks_of_a_node_copy_what_their_group_moves() -> None:
    """Out of the owner's memory, while the owner multiplies, if the window lets them."""
    programs: list[list[Op]] = [[multiply(0, 10), broadcast(0, 0, 2, 3)], [broadcast(1, 0, 2, 3)]]
    assert run(programs, machine(node=Cost(1, 1))).ranks == (10, 4)
    assert run(programs, machine(node=Cost(1, 1)), flavours=SENT).ranks == (14, 14)
    ring = [Shift(home(q, "A", 2), slot(q, "A0", 2), 1 - q, 1 - q, (0, 1), 0, home(1 - q, "A", 2)) for q in range(2)]
    assert run([[ring[0]], [multiply(1, 10), ring[1]]], machine(node=Cost(1, 1))).ranks == (3, 13)


def test_a_small_group_is_sent_to_directly() -> None:
    programs = [[broadcast(rank, 1, 4, 5)] for rank in range(4)]
    assert run(programs, machine(between=Cost(1, 1)), range(4)).seconds == 1 + 3 * 5, "out of one node"
    assert run(programs, machine(node=Cost(1, 1)), flavours=SENT).ranks == (6, 18, 12, 18)


def test_a_large_group_broadcasts_in_rounds() -> None:
    programs = [[broadcast(rank, 2, 5, 4)] for rank in range(5)]
    assert run(programs, machine(between=Cost(1, 1)), range(5)).ranks == (3 * 5,) * 5
    assert run(programs, machine(node=Cost(1, 1)), flavours=SENT).ranks == (3 * 5,) * 5
    assert run(programs, machine(node=Cost(1, 1), cores=1), flavours=SENT).seconds == 5 * 3 * 5


def test_all_gather() -> None:
    parts = tuple(home(rank, "A", 2) for rank in range(3))
    programs = [[Broadcast(parts, slot(rank, "A0", 6), (0, 1, 2), 0)] for rank in range(3)]
    outcome = run(programs, machine(between=Cost(1, 1)), range(3))
    assert outcome.seconds == 1 + 2 * 2
    assert outcome.between == (4, 4, 4)
    assert outcome.messages == (2, 2, 2)


def test_a_ring_goes_on_as_each_has_what_it_sends() -> None:
    """The second shift sends what the first has brought."""

    def program(rank: int) -> list[Op]:
        before, following = (rank - 1) % 3, (rank + 1) % 3
        mine = [home(rank, "A", 2), slot(rank, "A0", 2), slot(rank, "A1", 2)]
        return [Shift(mine[n], mine[n + 1], before, following, (0, 1, 2), n) for n in range(2)]

    programs = [program(rank) for rank in range(3)]
    assert run(programs, machine(shift=Cost(1, 1)), range(3)).ranks == (6, 6, 6)
    programs[0].insert(0, multiply(0, 10))
    assert run(programs, machine(shift=Cost(1, 1)), range(3)).ranks == (16, 16, 16)


@pytest.mark.parametrize(("nodes", "seconds"), [((0, 1, 2, 3), (24, 8, 16, 24)), ((0, 0, 0, 0), (24, 8, 16, 24))])
def test_an_owner_takes_sums_from_one_member_after_the_other(nodes: tuple[int, ...], seconds: tuple[int, ...]) -> None:
    dst = home(0, "C", 5)
    programs = [[Reduce((slot(rank, "C0", 5),), (dst,), (0, 1, 2, 3), 0)] for rank in range(4)]
    assert run(programs, machine(reduce=Cost(3, 1)), nodes).ranks == seconds
    programs[1].insert(0, multiply(1, 10))
    assert run(programs, machine(reduce=Cost(3, 1)), nodes).ranks[3] == 10 + seconds[3], "and the others wait for it"


# -- node-mates, and tickets ----------------------------------------------------------------------


def test_ranks_await_what_is_posted() -> None:
    programs: list[list[Op]] = [
        [multiply(0, 3), Post("A used", None, 0), multiply(0, 3), Post("A used", None, 0)],
        [Await("A used", (0, 1), 0, 0), multiply(1, 1), Await("A used", (0,), 2, 0), multiply(1, 1)],
    ]
    assert run(programs, machine()).ranks == (6, 7)
    programs[1].append(Post("A used", None, 0))
    programs.append([Await("A used", (0, 1), 1, 0), multiply(2, 1)])
    assert run(programs, machine()).ranks == (6, 7, 8), "each of them"


def test_what_mates_fetch_together_is_read_when_all_pieces_have_landed() -> None:
    """A fetch that is held back begins by itself, beside the multiply of its rank."""
    region = Region.box((0, 1), (0, 8))
    shared = Ref(0, Slot("A~0", region, "A~0", (0, 1)), region)

    def program(rank: int, gate: list[Op]) -> list[Op]:
        piece = Region.box((0, 1), (4 * rank, 4 * rank + 4))
        fetched = Copy(Ref(2, "A", piece), replace(shared, region=piece), 0)
        here = Await("A here", (0, 1), 1, 0)
        return [*gate, fetched, Post("A here", shared.buffer, 0), multiply(rank, 5), here, multiply(rank, 1, shared)]

    programs = [program(0, []), [Post("A used", None, 0), *program(1, [])], []]
    assert run(programs, machine(), (0, 0, 1)).ranks[:2] == (9, 9)
    held = Await("A used", (1,), 1, 0)
    programs = [program(0, [held]), [multiply(1, 3), Post("A used", None, 0), *program(1, [])], []]
    assert run(programs, machine(), (0, 0, 1)).ranks[:2] == (12, 12), "8 words from when the frame is free"


def shared(n: int, words: int) -> Ref:
    """A slot that ranks 0 and 1 share."""
    region = Region.box((0, 1), (0, words))
    return Ref(0, Slot(f"A~{n}", region, f"A~{n}", (0, 1)), region)


def test_pieces_are_posted_in_turn() -> None:
    """The second has landed after 4 seconds, as both share the wire, and the first after 12."""
    fetches: list[Op] = []
    for n, (owner, words) in enumerate(((2, 10), (3, 2))):
        fetches += [Copy(home(owner, "A", words), shared(n, words), 0), Post("A here", shared(n, words).buffer, 0)]
    programs = [fetches, [Await("A here", (0,), 1, 0), multiply(1, 1, shared(0, 1))], [], []]
    assert run(programs, machine(), (0, 0, 1, 2)).ranks[1] == 12 + 1


def test_a_fetch_within_a_node_does_not_wait_for_a_multiply() -> None:
    fetched = Copy(home(1, "A", 4), shared(0, 4), 0)
    here = Await("A here", (0,), 1, 0)
    mine = [fetched, Post("A here", shared(0, 4).buffer, 0), multiply(0, 5), here, multiply(0, 1, shared(0, 1))]
    assert run([mine, []], machine()).ranks[0] == 4 + 5 + 1, "at once it takes its rank's own time"
    mine.insert(0, Await("A used", (1,), 1, 0))
    assert run([mine, [multiply(1, 2), Post("A used", None, 0)]], machine()).ranks[0] == 2 + 4 + 1


def queue(tasks: int, first: Sequence[Op]) -> Schedule:
    """Tasks of 4 seconds for two ranks, the second of which does something else first."""
    programs: list[list[Op]] = [[Claim(0)], [*first, Claim(0)]]
    return schedule(programs, (0, 0), Pool(tasks, lambda task, rank: [multiply(rank, 4)]))


def test_tickets_go_to_whose_turn_comes_first() -> None:
    on = machine(node=Cost(1, 0), own=Cost(0.5, 0))
    outcome = simulate(queue(6, []), on, itemsize=1)
    assert outcome.claims == ((0, 2, 4), (1, 3, 5))
    assert outcome.ranks == (4 * 0.5 + 12, 4 * 1 + 12), "one ticket too many for each"
    assert simulate(queue(6, [multiply(1, 12)]), on, itemsize=1).claims == ((0, 1, 2, 4), (3, 5))


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([[multiply(0, 1), Await("A used", (1,), 1, 0), multiply(0, 2)], []], r"rank 0 .*:= A@0\[0:1, 0:2\]"),
        ([[], [broadcast(1, 0, 2, 3), multiply(1, 1, slot(1, "A0", 1))]], r"rank 1 .*:= \[A0\]@1"),
        ([[], [Barrier(0)]], "rank 1 .* barrier"),
    ],
    ids=["post", "letter", "barrier"],
)
def test_ranks_that_wait_for_ever_are_named(programs: list[list[Op]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        run(programs, machine(), flavours=SENT)

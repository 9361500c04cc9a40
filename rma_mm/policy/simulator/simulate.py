"""What a schedule takes on a described machine: all its operations on all its ranks, in simulated time.

Ranks run their operations in order and wait for each other where the executor does. `machine` says what each of them
costs; here it is decided what goes on at once:

- A rank is one processor, which does one thing after the other: its operations, and its part of what groups move within
  its node, as soon as both sides have come to it. All ranks of a host share its slots.
- What moves between nodes takes the wire out of one node and the wire into another, each shared by all that it carries.
  Where a share of it is not hidden, it and a multiply hold up each other by that share of its seconds.
- A larger group broadcasts down a tree, in rounds: within a node its members are taken up by all of them; between
  nodes they wait for them, and then each takes the wire into its node once, and the owner that out of its own in each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from keyword import iskeyword

from rma_mm.policy.model.machine import COPY, Machine
from rma_mm.policy.simulator.events import Signal
from rma_mm.policy.simulator.ranks import Flow, Letter, Noted, Rank, Together, World, movement_of, rounds
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
    Schedule,
    Shift,
    Slot,
    incoming,
    outgoing,
)
from rma_mm.schedule.passes import kind_of

TICKET = 8
"""Bytes of a ticket of a pool."""

Waits = Generator[Signal | float, None, None]
"""What a rank waits for, one after the other: a signal, or seconds of its processor."""
Key = tuple[str, str]
"""What goes on with which memory: ("fill" or "read", frame or home)."""


@dataclass(frozen=True)
class Simulated:
    """What simulating a schedule gave. Figures of ranks are in their order."""

    seconds: float
    """From when the ranks begin to meet until all have met in the end."""
    ranks: tuple[float, ...]
    """When each rank has done its operations, before it meets the others in the end."""
    multiplying: tuple[float, ...]
    """Seconds that each was inside a multiply, sharing its host and held up by transfers."""
    between: tuple[int, ...]
    """Words of other nodes that each received, or added to."""
    within: tuple[int, ...]
    """Words of other ranks of its node that each received, added to, or multiplied where they lie."""
    messages: tuple[int, ...]
    peak: tuple[int, ...]
    """Elements that each held: its parts of matrices, and scratch; of a pool, for the tasks that fell to it."""
    claims: tuple[tuple[int, ...], ...]
    """Tasks of the schedule's pool that each ran, in order."""
    noted: tuple[Noted, ...] = ()
    """What each did when, where that was asked for."""


def simulate(
    schedule: Schedule,
    machine: Machine,
    itemsize: int = 4,
    dtype: str = "float32",
    kernel: str = "blas",
    flavours: Mapping[str, str] | None = None,
    summed: int | None = None,
    is_noted: bool = False,
) -> Simulated:
    """Run `schedule` on `machine` in simulated time; the same arguments give the same result.

    itemsize: bytes of an element. summed: those of C's, where it is summed in another type. dtype, kernel: which of the
    machine's local products. flavours: A, B, C → the windows that it is read and added to through; the default where
    none is named. is_noted: whether to note what ranks do when. Raises ScheduleError where a rank waits for ever.
    """
    bytes_of = {"A": itemsize, "B": itemsize, "C": summed or itemsize}
    world = World(schedule, machine, machine.kernel(dtype, kernel), bytes_of, flavours or {}, is_noted)
    for rank in world.ranks:
        rank.processor.run(_life(rank))
    world.run()
    ranks = world.ranks
    return Simulated(
        world.end, tuple(rank.ended for rank in ranks), tuple(rank.multiplying for rank in ranks),
        tuple(rank.between for rank in ranks), tuple(rank.within for rank in ranks),
        tuple(rank.messages for rank in ranks), tuple(rank.peak for rank in ranks),
        tuple(tuple(rank.claims) for rank in ranks), tuple(world.noted or ()),
    )  # fmt: skip


def _life(rank: Rank) -> Waits:
    """All that a rank does."""
    world = rank.world
    yield world.meet("begin")
    rank.note("wait")
    yield from _Program(rank, world.schedule.program(rank.number)).run()
    rank.ended, rank.is_meeting, rank.op = world.clock.now, True, None
    yield world.meet("end")
    world.end, rank.is_done = world.clock.now, True


@dataclass
class _Fetch:
    """A rank's piece of a slice that ranks of its node fetch together."""

    gates: list[Await]
    """What it is held back by."""
    copies: list[Copy] = field(default_factory=list)
    transfers: list[Signal] = field(default_factory=list)


class _Program:
    """One list of operations of a rank, while they run: what is under way, and waits in between.

    Every operation has a method of its name, which gives what the rank then waits for.
    """

    def __init__(self, rank: Rank, ops: Sequence[Op]) -> None:
        self.rank, self.world, self.ops = rank, rank.world, ops
        self.under_way: dict[Key, list[Signal]] = defaultdict(list)
        self.gates: list[Await] = []
        """What was awaited last, and has held nothing back yet."""
        self.fetches: dict[str, _Fetch] = {}
        self.fetched: Counter[str] = Counter()
        rank.holds(ops)

    def run(self) -> Waits:
        """All of it, up to when nothing is under way."""
        operation = self.world.machine.operation
        for op in self.ops:
            self.rank.op = op
            self.rank.count(op)
            yield operation + self.gathering(op)
            self.rank.note("start")
            name = type(op).__name__.lower()
            yield from getattr(self, name + "_" * iskeyword(name))(op)
            self.rank.note(name)
        yield from self.wait(self.under_way)

    def gathering(self, op: Op) -> float:
        """Seconds for the pieces of memory that an operation moves; where MPI packs them, on either side."""
        machine, pieces = self.world.machine, self.pieces(op)
        packed = not isinstance(op, Copy | Accumulate)
        if isinstance(op, Copy | Accumulate):
            other = op.src.rank if isinstance(op, Copy) else op.dst.rank
            link = self.world.link(self.rank.number, other)
            packed = link == "between" or (link == "node" and self.world.flavour(kind_of(op.dst)).packed_by_mpi)
        return pieces * (machine.packed if packed else machine.piece)

    def pieces(self, op: Op) -> int:
        """Into how many pieces of memory falls what an operation gets, adds, or receives."""
        count, rank = self.world.stretches, self.rank.number
        if isinstance(op, Copy | Accumulate):
            return max(count(op.src), count(op.dst))
        if isinstance(op, Broadcast):
            theirs = (part for part in op.parts if part.rank != rank)
            pairs = zip(theirs, op.arriving(rank), strict=True) if op.dst else ()
            return sum(max(count(part), count(place)) for part, (_, place) in pairs)
        if isinstance(op, Shift):
            return count(op.dst)
        return sum(count(dst) for dst in op.dsts if dst.rank == rank) if isinstance(op, Reduce) else 0

    def wait(self, keys: Iterable[Key]) -> Waits:
        """What is under way under these names must be over first, and what was awaited last."""
        yield from self.due(self.gates)
        self.gates = []
        for key in list(keys):
            yield from self.under_way.pop(key, ())
        self.rank.note("wait")

    def due(self, gates: Sequence[Await]) -> list[Signal]:
        """What Awaits wait for."""
        return [self.world.posted(q, op.event, op.count) for op in gates for q in op.group if op.count]

    def begin(self, transfer: Signal | None, *keys: Key) -> None:
        """A transfer is under way under these names, unless it is over."""
        if transfer is not None:
            for key in keys:
                self.under_way[key].append(transfer)

    # -- one-sided --------------------------------------------------------------------------------

    def one_sided(
        self, movement: str, owner: int, x: str, nbytes: int
    ) -> Generator[Signal | float, None, Signal | None]:
        """A transfer between this rank and an owner: what it is under way with, or None where it is over."""
        rank, world, target = self.rank, self.world, self.world.ranks[owner]
        link = world.link(rank.number, owner)
        cost = world.cost(link, movement, world.flavour(x).name, link != "own" and target.is_multiplying)
        if link != "between":
            yield cost.seconds(nbytes)
            return None
        source, sink = (rank, target) if movement == "accumulate" else (target, rank)
        wires = world.outward[source.node], world.inward[sink.node]
        return Flow(rank, cost.alpha, cost.beta * nbytes, wires, movement, x).over

    def get(self, op: Copy) -> Generator[Signal | float, None, Signal | None]:
        """Start a Copy."""
        return (yield from self.one_sided("get", op.src.rank, kind_of(op.src), self.world.nbytes(op.src)))

    def copy(self, op: Copy) -> Waits:
        """A slot may take several at once; what it held before is awaited."""
        if isinstance(op.dst.buffer, Slot) and op.dst.buffer.group:
            self.fetch(op.dst.buffer).copies.append(op)
            return
        yield from self.wait(_slots("read", op.dst))
        self.begin((yield from self.get(op)), _key("fill", op.dst))

    def accumulate(self, op: Accumulate) -> Waits:
        """What fills the summand is awaited; what overwrites it will await this."""
        yield from self.wait(_slots("fill", op.src))
        added = yield from self.one_sided("accumulate", op.dst.rank, kind_of(op.dst), self.world.nbytes(op.dst))
        self.begin(added, _key("read", op.src))

    def claim(self, _: Claim) -> Waits:
        """Run tasks until none is left; every rank gets one ticket too many."""
        pool, world, rank = self.world.schedule.pool, self.world, self.rank
        assert pool is not None
        while True:
            drawn = yield from self.one_sided("fetch_add", 0, "", TICKET)
            if drawn is not None:
                yield drawn
            task = world.tickets
            world.tickets += 1
            if task >= pool.tasks:
                return
            rank.claims.append(task)
            yield from _Program(rank, pool.program(task, rank.number)).run()

    # -- what ranks of a node fetch together ------------------------------------------------------

    def fetch(self, slot: Slot) -> _Fetch:
        """The fetch of a slice, held back by what was awaited just before it."""
        if slot.name not in self.fetches:
            self.fetches[slot.name] = _Fetch(self.gates)
            self.gates = []
        return self.fetches[slot.name]

    def await_(self, op: Await) -> Iterable[Signal]:
        """Wait, unless it is a fetch that comes next: that begins by itself when it may."""
        self.gates.append(op)
        return ()

    def post(self, op: Post) -> Waits:
        """Count up: now, or when this rank's piece of a slice has landed."""
        if op.filled is None:
            self.rank.post(op.event)
            return
        fetch, number = self.fetch(op.filled), self.fetched[op.event]
        self.fetched[op.event] += 1
        landing = self.landing(fetch, op.event, number)
        if all(signal.is_over for signal in self.due(fetch.gates)):
            yield from self.fetching(fetch)
            self.rank.helper.run(landing)
        else:
            self.rank.helper.run(chain(self.fetching(fetch), landing))

    def fetching(self, fetch: _Fetch) -> Waits:
        """Start a fetch when it may."""
        yield from self.due(fetch.gates)
        for op in fetch.copies:
            transfer = yield from self.get(op)
            fetch.transfers += [] if transfer is None else [transfer]

    def landing(self, fetch: _Fetch, event: str, number: int) -> Waits:
        """Post that it has landed, after those before it."""
        yield from fetch.transfers
        if number:
            yield self.world.posted(self.rank.number, event, number)
        self.rank.post(event)

    # -- together ---------------------------------------------------------------------------------

    def sent(self, to: int, op: Together, part: Ref) -> Letter:
        """A letter to another rank."""
        return self.world.letter(self.rank.number, to, op, part, is_sent=True)

    def wanted(self, source: int, op: Together, part: Ref) -> Letter:
        """A letter from another rank."""
        return self.world.letter(source, self.rank.number, op, part, is_sent=False)

    def broadcast(self, op: Broadcast) -> Waits:
        """What the slot held before is awaited."""
        filled = [op.dst] if op.dst else []
        yield from self.wait(_slots("read", *filled))
        keys = [_key("fill", ref) for ref in filled] or [("send", "")]
        out = [(self.sent(to, op, part).come(), part) for to, part in outgoing(op, self.rank.number)]
        for source, place in incoming(op, self.rank.number):
            self.begin(self.wanted(source, op, place).come().over, *keys)
        if rounds(op) == 1:
            for letter, _ in out:
                self.begin(letter.over, *keys)
        elif out:
            self.begin(self.spread(op), *keys)

    def spread(self, op: Broadcast) -> Signal:
        """The owner's own part of a broadcast in rounds."""
        rank, world, times = self.rank, self.world, rounds(op)
        nbytes = sum(map(world.nbytes, op.parts))
        is_inside = all(world.nodes[q] == rank.node for q in op.group)
        cost = world.cost("node" if is_inside else "between", movement_of(op))
        if not is_inside:
            wires, x = (world.outward[rank.node],), kind_of(op.parts[0])
            return Flow(rank, times * cost.alpha, times * cost.beta * nbytes, wires, movement_of(op), x).over
        over = Signal(world.clock)
        rank.processor.add(times * cost.seconds(nbytes), over.end)
        return over

    def shift(self, op: Shift) -> Waits:
        """What is sent must have come, and what its place held must have been sent."""
        yield from self.wait([_key("fill", op.src), *_slots("read", op.dst)])
        self.begin(self.sent(op.to, op, op.src).come().over, *_slots("read", op.src))
        self.begin(self.wanted(op.source, op, op.dst).come().over, _key("fill", op.dst))

    def reduce(self, op: Reduce) -> Waits:
        """Each part goes to its owner, who takes it from one member after the other."""
        for src, dst in zip(op.srcs, op.dsts, strict=True):
            is_mine = dst.rank == self.rank.number
            filled = _slots("fill", dst) if is_mine else []
            yield from self.wait([_key("fill", src), *(_slots("read", dst) if is_mine else [])])
            if not is_mine:
                self.begin(self.sent(dst.rank, op, dst).come().over, _key("read", src))
                continue
            summed = Signal(self.world.clock)
            at = op.group.index(self.rank.number)
            letters = [self.wanted(q, op, dst) for q in (*op.group[at + 1 :], *op.group[:at])]
            self.rank.processor.run(_in_turn(letters, summed))
            self.begin(summed, _key("read", src), *filled)

    # -- alone, and all ----------------------------------------------------------------------------

    def multiply(self, op: Multiply) -> Waits:
        """What fills its operands, and what still reads its result, is awaited."""
        yield from self.wait([*_slots("fill", op.a, op.b, op.c), *_slots("read", op.c)])
        rank, clock = self.rank, self.world.clock
        (m, k), n = op.a.region.shape, op.b.region.shape[1]
        seconds = self.world.kernel.seconds(m, n, k, self.world.stride(op.c))
        begun, rank.is_multiplying = clock.now, True
        yield seconds + rank.held_up(seconds)
        rank.is_multiplying = False
        rank.multiplying += clock.now - begun

    def scale(self, op: Scale) -> Waits:
        """Read and written once."""
        yield from self.wait(_slots("read", op.c))
        yield self.world.cost("own", COPY).seconds(self.world.nbytes(op.c))

    def finish(self, _: Finish) -> Iterable[Signal]:
        """Nothing to do where sums have the type of the result."""
        return ()

    def barrier(self, _: Barrier) -> Waits:
        """All that is under way, and all ranks."""
        yield from self.wait(self.under_way)
        self.rank.is_meeting = True
        yield self.world.meet("barrier")
        self.rank.is_meeting = False


def _in_turn(letters: Sequence[Letter], over: Signal) -> Waits:
    """Take one letter after the other."""
    for letter in letters:
        yield letter.come().over
    over.end()


def _key(what: str, ref: Ref) -> Key:
    """The frame, or the home, that `ref` is a part of."""
    return what, ref.buffer.frame if isinstance(ref.buffer, Slot) else f"home {ref.buffer}"


def _slots(what: str, *refs: Ref) -> list[Key]:
    """The frames among the buffers of `refs`."""
    return [(what, ref.buffer.frame) for ref in refs if isinstance(ref.buffer, Slot)]


__all__ = ["Simulated", "simulate"]

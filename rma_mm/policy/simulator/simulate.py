"""Simulate a schedule on a described machine: all operations of all ranks, in simulated time.

Ranks run their operations in order and wait for each other where the executor does. `machine` says what each of them
costs; here it is decided what goes on at once:

- A rank is one processor, which does one thing after the other: its operations, and its part of what groups move within
  its node, as soon as both sides have come to it. All ranks of a host share its slots.
- What moves between nodes takes the wire out of one node and the wire into another, each shared by all that it carries.
  It and a multiply hold up each other by the share of its seconds that is not hidden. From one rank to another, one
  transfer comes behind the other.
- A larger group broadcasts down a tree, in rounds: within a node its members are taken up by all of them; between
  nodes they wait for them, and then each takes the wire into its node once, and the owner that out of its own in each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import chain, islice

from rma_mm.classes import dataclass
from rma_mm.policy.model.machine import COPY, Machine
from rma_mm.policy.simulator.events import Signal
from rma_mm.policy.simulator.ranks import Flow, Message, Noted, Rank, World, rounds
from rma_mm.schedule import ops
from rma_mm.schedule.dispatch import Dispatch
from rma_mm.schedule.mirror_ops import Clear, Mirror, multiply_adds
from rma_mm.schedule.ops import Op, Ref, Slot
from rma_mm.schedule.schedule import Schedule

TICKET = 8  # bytes of a ticket of a pool

Waits = Generator[Signal | float, None, None]
"""The waits of a rank, one after the other: signals, or seconds of its processor."""
Key = tuple[str, str]  # memory in use and its use: ("fill" or "read", frame or home)


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation; figures of ranks are in rank order. Figures of ranks are in their order."""

    seconds: float  # from when the ranks begin to meet until all have met in the end
    ranks: tuple[float, ...]  # when each rank has done its operations, before it meets the others in the end
    multiplying: tuple[float, ...]
    """Seconds that each was inside a multiply, sharing its host and held up by transfers."""
    between: tuple[int, ...]  # words of other nodes that each received, or added to
    within: tuple[int, ...]
    """Words of other ranks of its node that each received, added to, or multiplied where they lie."""
    messages: tuple[int, ...]
    peak: tuple[int, ...]
    """Elements that each held: its parts of matrices, and scratch; of a pool, for the tasks that fell to it."""
    claims: tuple[tuple[int, ...], ...]  # tasks of the schedule's pool that each ran, in order
    noted: tuple[Noted, ...] = ()  # what each did when, where that was asked for


def simulate(
    schedule: Schedule, machine: Machine, itemsize: int = 4, dtype: str = "float32", kernel: str = "blas",
    flavours: Mapping[str, str] | None = None, summed: int | None = None, is_noted: bool = False,
) -> Simulated:
    """Run `schedule` on `machine` in simulated time; the same arguments give the same result.

    itemsize: bytes of an element. summed: those of C's, where it is summed in another type. dtype, kernel: which of the
    machine's local products. flavours: A, B, C → the windows that it is read and added to through; the default where
    none is named. is_noted: whether to note what ranks do when. Raises ScheduleError if a rank waits forever.
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
    )


def _life(rank: Rank) -> Waits:
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

    gates: list[ops.Await]  # what it is held back by
    copies: list[ops.Copy] = field(default_factory=list)
    transfers: list[Signal] = field(default_factory=list)


class _Program:
    """One running list of operations of a rank: transfers in progress, and its waits.

    Every type of operation has a method, which gives what the rank then waits for.
    """

    handlers = Dispatch[Iterable[Signal | float]]()

    def __init__(self, rank: Rank, program: Sequence[Op]) -> None:
        self.rank, self.world = rank, rank.world
        self.ops = [(each, op.kind) for op in program for each in self.world.done_as(op, rank.number)]
        self.under_way: dict[Key, list[Signal]] = defaultdict(list)
        self.gates: list[ops.Await] = []  # awaited events that have not delayed anything yet
        self.fetches: dict[str, _Fetch] = {}
        self.fetched: Counter[str] = Counter()
        rank.holds(program)

    def run(self) -> Waits:
        """All of it, up to when nothing is under way."""
        operation = self.world.machine.operation
        for op, kind in self.ops:
            self.rank.op = op
            self.rank.count(op)
            yield operation + self.gathering(op)
            self.rank.note("start")
            yield from self.handlers[type(op)](self, op)
            self.rank.note(kind)
        yield from self.wait(self.under_way)

    def gathering(self, op: Op) -> float:
        """Return seconds for the pieces of memory that an operation moves; where MPI packs them, on either side."""
        machine, packed = self.world.machine, True
        if not machine.packed and not machine.piece:
            return 0.0
        if isinstance(op, ops.OneSidedOp):
            link = self.world.link(self.rank.number, op.remote.rank)
            packed = link == "between" or (link == "node" and self.world.flavour(op.dst.operand).packed_by_mpi)
        return self.pieces(op) * (machine.packed if packed else machine.piece)

    def pieces(self, op: Op) -> int:
        """Return the number of memory pieces that an operation gets, adds or receives."""
        count, rank = self.world.stretches, self.rank.number
        if isinstance(op, ops.Reduce):
            return sum(count(dst) for dst in op.dsts if dst.rank == rank)
        return sum(max(count(ref) for ref in (move.src, move.dst) if ref) for move in op.moves(rank) if move.dst)

    def wait(self, keys: Iterable[Key]) -> Waits:
        """Wait for the transfers under these names, and for the events awaited last."""
        yield from self.due(self.gates)
        self.gates = []
        for key in list(keys):
            yield from self.under_way.pop(key, ())
        self.rank.note("wait")

    def due(self, gates: Sequence[ops.Await]) -> list[Signal]:
        return [self.world.posted(q, op.event, op.count) for op in gates for q in op.group if op.count]

    def begin(self, transfer: Signal | None, *keys: Key) -> None:
        """A transfer is under way under these names, unless it is over."""
        if transfer is not None:
            for key in keys:
                self.under_way[key].append(transfer)

    # -- one-sided --------------------------------------------------------------------------------

    def one_sided(
        self, movement: str, owner: int, x: str, nbytes: int, packed: bool = False
    ) -> Generator[Signal | float, None, Signal | None]:
        """A transfer between this rank and an owner: what it is under way with, or None if it is over."""
        rank, world, target = self.rank, self.world, self.world.ranks[owner]
        link = world.link(rank.number, owner)
        busy, packed = link != "own" and target.is_multiplying, packed and link == "between"
        cost = world.cost(link, movement, world.flavour(x).name, busy, packed)
        if link != "between":
            yield cost.seconds(nbytes)
            return None
        source, sink = (rank, target) if movement == "accumulate" else (target, rank)
        seconds, latency = cost.beta * nbytes, cost.alpha + world.delay(source, sink)
        wires, line = world.wires(source, sink, seconds, nbytes), (source.number, sink.number)
        return Flow(rank, latency, seconds, wires, movement, x, cost.hidden, line).over

    def start(self, op: ops.OneSidedOp) -> Generator[Signal | float, None, Signal | None]:
        remote, packed = op.remote, self.world.stretches(op.remote) > 1
        return (yield from self.one_sided(op.kind, remote.rank, remote.operand, self.world.nbytes(remote), packed))

    @handlers.on(ops.Copy)
    def copy(self, op: ops.Copy) -> Waits:
        """A slot may take several at once; what it held before is awaited."""
        if isinstance(op.dst.buffer, Slot) and op.dst.buffer.group:
            self.fetch(op.dst.buffer).copies.append(op)
            return
        yield from self.wait(_slots("read", op.dst))
        self.begin((yield from self.start(op)), ("fill", op.dst.place))

    @handlers.on(ops.Accumulate)
    def accumulate(self, op: ops.Accumulate) -> Waits:
        """Wait for the data of the summand; later writes to it wait for this operation."""
        yield from self.wait(_slots("fill", op.src))
        self.begin((yield from self.start(op)), ("read", op.src.place))

    @handlers.on(ops.Claim)
    def claim(self, _: ops.Claim) -> Waits:
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
        """Return the fetch of a slice, which waits for the event awaited just before it."""
        if slot.name not in self.fetches:
            self.fetches[slot.name] = _Fetch(self.gates)
            self.gates = []
        return self.fetches[slot.name]

    @handlers.on(ops.Await)
    def await_(self, op: ops.Await) -> Iterable[Signal]:
        """Wait, unless it is a fetch that comes next: that begins by itself when it may."""
        self.gates.append(op)
        return ()

    @handlers.on(ops.Post)
    def post(self, op: ops.Post) -> Waits:
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
        yield from self.due(fetch.gates)
        for op in fetch.copies:
            transfer = yield from self.start(op)
            fetch.transfers += [] if transfer is None else [transfer]

    def landing(self, fetch: _Fetch, event: str, number: int) -> Waits:
        """Post that it has completed, after earlier ones."""
        yield from fetch.transfers
        if number:
            yield self.world.posted(self.rank.number, event, number)
        self.rank.post(event)

    # -- together ---------------------------------------------------------------------------------

    def letters(self, op: ops.GroupOp) -> tuple[list[Message], list[Message]]:
        """Return the messages that this rank sends to others, and those that it receives."""
        number = self.rank.number
        moves = [(move.source == number, self.world.letter(number, op, move)) for move in op.moves(number)]
        return [letter for is_out, letter in moves if is_out], [letter for is_out, letter in moves if not is_out]

    @handlers.on(ops.Broadcast)
    def broadcast(self, op: ops.Broadcast) -> Waits:
        """Wait for the earlier use of the slot, and for what is passed on from one, then broadcast."""
        filled = [op.dst] if op.dst else []
        passed = [part for part in op.parts if part.rank == self.rank.number]
        yield from self.wait([*_slots("read", *filled), *_slots("fill", *passed)])
        keys = [*(("fill", ref.place) for ref in filled), *_slots("read", *passed)] or [("send", "")]
        out, into = self.letters(op)
        for letter in [*out, *into]:
            letter.come()
        if out and rounds(op) > 1:
            self.begin(self.spread(op), *keys)
            out = []
        for letter in [*into, *out]:
            self.begin(letter.over, *keys)

    def spread(self, op: ops.Broadcast) -> Signal:
        """Return the owner's own part of a broadcast in rounds."""
        rank, world, times = self.rank, self.world, rounds(op)
        nbytes = sum(map(world.nbytes, op.parts))
        is_inside = all(world.nodes[q] == rank.node for q in op.group)
        cost = world.cost("node" if is_inside else "between", op.kind)
        if not is_inside:
            seconds, latency = times * cost.beta * nbytes, times * (cost.alpha + world.delays[rank.node])
            wires, x = [(world.outward[rank.node], seconds)], op.parts[0].operand
            return Flow(rank, latency, seconds, wires, op.kind, x, cost.hidden).over
        over = Signal(world.clock)
        rank.processor.add(times * cost.seconds(nbytes), over.end)
        return over

    @handlers.on(ops.Shift)
    def shift(self, op: ops.Shift) -> Waits:
        """Wait until the data to send has arrived and the earlier content of the slot has been sent, then shift."""
        yield from self.wait([("fill", op.src.place), *_slots("read", op.dst)])
        (out,), (into,) = self.letters(op)
        self.begin(out.come().over, *_slots("read", op.src))
        self.begin(into.come().over, ("fill", op.dst.place))

    @handlers.on(ops.Reduce)
    def reduce(self, op: ops.Reduce) -> Waits:
        """Each part goes to its owner, who takes it from one member after the other."""
        (out, into), at = map(iter, self.letters(op)), op.group.index(self.rank.number)
        for src, dst in zip(op.srcs, op.dsts, strict=True):
            is_mine = dst.rank == self.rank.number
            filled = _slots("fill", dst) if is_mine else []
            yield from self.wait([("fill", src.place), *(_slots("read", dst) if is_mine else [])])
            if not is_mine:
                self.begin(next(out).come().over, ("read", src.place))
                continue
            summed, each = Signal(self.world.clock), list(islice(into, len(op.group) - 1))
            self.rank.processor.run(_one_after_another([*each[at:], *each[:at]], summed))
            self.begin(summed, ("read", src.place), *filled)

    # -- alone, and all ----------------------------------------------------------------------------

    @handlers.on(ops.Multiply)
    def multiply(self, op: ops.Multiply) -> Waits:
        """Wait for the operands' data and for readers of the result, then multiply."""
        yield from self.wait([*_slots("fill", op.a, op.b, op.c), *_slots("read", op.c)])
        rank, clock = self.rank, self.world.clock
        (m, n), k = op.c.region.shape, op.a.region.shape[1]
        seconds = self.world.kernel.seconds(m, n, k, self.world.stride(op.c)) / rank.speed
        seconds *= multiply_adds(op) / max(1, m * n * k)
        begun, rank.is_multiplying = clock.now, True
        yield seconds + rank.held_up(seconds)
        rank.is_multiplying = False
        rank.multiplying += clock.now - begun

    @handlers.on(ops.Scale, Mirror, Clear)
    def scale(self, op: ops.LocalOp) -> Waits:
        filled = _slots("fill", op.src) if isinstance(op, Mirror) else []
        yield from self.wait([*filled, *_slots("read", op.c)])
        yield self.world.cost("own", COPY).seconds(self.world.nbytes(op.c))

    @handlers.on(ops.Finish)
    def finish(self, _: ops.Finish) -> Iterable[Signal]:
        return ()

    @handlers.on(ops.Barrier)
    def barrier(self, _: ops.Barrier) -> Waits:
        """Return all that is under way, and all ranks."""
        yield from self.wait(self.under_way)
        self.rank.is_meeting = True
        yield self.world.meet("barrier")
        self.rank.is_meeting = False


def _one_after_another(letters: Sequence[Message], over: Signal) -> Waits:
    for letter in letters:
        yield letter.come().over
    over.end()


def _slots(what: str, *refs: Ref) -> list[Key]:
    return [(what, ref.buffer.frame) for ref in refs if isinstance(ref.buffer, Slot)]


__all__ = ["Simulated", "simulate"]

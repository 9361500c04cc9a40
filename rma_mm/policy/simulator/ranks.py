"""The ranks of a schedule on a described machine, and what is between them, in simulated time."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from rma_mm.errors import ScheduleError
from rma_mm.flavours import DEFAULT, Flavour, find_flavour
from rma_mm.policy.model.machine import Kernel, Machine, by_group
from rma_mm.policy.model.traffic import FLAT
from rma_mm.policy.simulator.events import Clock, Countdown, Processor, Server, Signal
from rma_mm.schedule.ops import Broadcast, GroupOp, Op, Ref, TransferSpec, foreign
from rma_mm.schedule.passes import frame_sizes
from rma_mm.schedule.schedule import Schedule


class Noted(NamedTuple):
    """Something that a rank was at, in simulated time."""

    rank: int
    name: str
    kind: str  # multiply, wait, start, scale, barrier, post, claim; of transfers get, accumulate, broadcast, shift, …
    begin: float
    end: float
    is_beside: bool  # true if it went on beside what the rank itself did
    what: str  # the operation in words


Wires = Sequence[tuple[Server, float]]  # wires that a transfer takes, and for how many seconds each


class World:
    """The machine, all ranks of a schedule, and the links between them."""

    def __init__(
        self, schedule: Schedule, machine: Machine, kernel: Kernel, bytes_of: Mapping[str, int],
        flavours: Mapping[str, str], is_noted: bool = False,
    ) -> None:
        self.schedule, self.machine, self.kernel = schedule, machine, kernel
        self.bytes_of, self.cost = bytes_of, cache(machine.cost)
        self.flavours = {x: find_flavour(name) for x, name in flavours.items()}
        self.nodes, self.size = schedule.mesh.node_of_rank, schedule.mesh.size
        self.clock = clock = Clock()
        nodes = dict.fromkeys(self.nodes)
        hosts = {node // machine.nodes_per_host: Server(clock, machine.slots, machine.crowding) for node in nodes}
        paces = dict(enumerate(machine.wires))
        self.inward, self.outward = ({n: Server(clock, pace=paces.get(n, 1.0)) for n in nodes} for _ in range(2))
        self.groups = by_group(schedule.mesh, machine.groups).node_of_rank
        self.joints = {(group, way): Server(clock) for group in set(self.groups) for way in ("in", "out")}
        """Links that join each group of nodes to the others."""
        delays = dict(enumerate(machine.delays))
        self.delays = {node: delays.get(node, 0.0) for node in nodes}
        self.letters: dict[tuple[int, int, str], deque[Message]] = defaultdict(deque)
        """(from, to, operand) → what one of them has come to and the other has not, in order."""
        self.lines: dict[tuple[int, int], Signal] = {}  # (from, to) → what was begun last between two nodes' ranks
        self.signals: dict[tuple[int, str, int], Signal] = {}  # (rank, event, n) → its nth post
        self.meetings: dict[str, tuple[Signal, Countdown]] = {}  # where some ranks wait for all
        self.noted: list[Noted] | None = [] if is_noted else None  # what ranks did when, where that is wanted
        self.tickets = 0
        self.end = 0.0
        self.ranks = [Rank(self, n, hosts[self.nodes[n] // machine.nodes_per_host]) for n in schedule.mesh.ranks]
        for rank, speed in zip(self.ranks, machine.speeds, strict=False):
            rank.speed = speed

    def run(self) -> None:
        """Let time pass. Raises ScheduleError if a rank then still waits."""
        self.clock.run()
        waiting = [rank for rank in self.ranks if not rank.is_done]
        if waiting:
            first = min(waiting, key=lambda rank: (rank.is_meeting, rank.op is None))
            what = f"{first.op}, or what goes before it" if first.op else "others to end"
            why = f"rank {first.number} waits for ever at {what}; {len(waiting)} ranks do not end"
            raise ScheduleError("deadlock", why)

    def flavour(self, x: str) -> Flavour:
        return self.flavours.get(x, DEFAULT)

    def done_as(self, op: Op, rank: int) -> Sequence[Op]:
        """Return the Copies that a rank makes in place of a group operation, where it can; else `op`."""
        if not isinstance(op, GroupOp) or not op.may_copy(self.nodes):
            return [op]
        return op.copies(rank) if self.flavour(op.origins[0].operand).loads_on_node else [op]

    def nbytes(self, ref: Ref) -> int:
        return ref.region.size * self.bytes_of[ref.operand]

    def stride(self, ref: Ref) -> int:
        return len(self.schedule.holds(ref)[1]) * self.bytes_of[ref.operand]

    def stretches(self, ref: Ref) -> int:
        """Count the pieces of a box in the memory that stores it; 0 if there is one, or pieces cost nothing."""
        if not self.machine.piece and not self.machine.packed:
            return 0
        holds = self.schedule.holds(ref)
        rows, cols = holds.locate(ref.region)
        is_whole = len(cols) == len(holds[1])
        count = len(rows.runs) if is_whole else len(rows) * len(cols.runs)
        return count if count > 1 else 0

    def link(self, rank: int, other: int) -> str:
        if rank == other:
            return "own"
        return "node" if self.nodes[rank] == self.nodes[other] else "between"

    def wires(self, source: Rank, sink: Rank, seconds: float, nbytes: int, is_tree: bool = False) -> Wires:
        """Return the wires that a transfer between nodes takes, and for how long; in a tree, the receiver's side."""
        sides = [(self.inward[sink.node], seconds), (self.outward[source.node], seconds)]
        ends = self.groups[source.number], self.groups[sink.number]
        if ends[0] != ends[1]:
            crossing = self.machine.joint.beta * nbytes
            sides += [(self.joints[ends[1], "in"], crossing), (self.joints[ends[0], "out"], crossing)]
        return sides[::2] if is_tree else sides

    def delay(self, source: Rank, sink: Rank) -> float:
        """Return seconds more than usual until a transfer between nodes begins to arrive."""
        is_joint = self.groups[source.number] != self.groups[sink.number]
        return max(self.delays[source.node], self.delays[sink.node]) + self.machine.joint.alpha * is_joint

    def meet(self, where: str) -> Signal:
        """One more rank has come to where all meet: over when all have, and have met."""
        if where not in self.meetings:
            self.meetings[where] = Signal(self.clock), Countdown(self.size, partial(self._met, where))
        met, coming = self.meetings[where]
        coming.one()
        return met

    def _met(self, where: str) -> None:
        met, _ = self.meetings.pop(where)
        self.clock.after(self.machine.meet(self.size), met.end)

    def posted(self, rank: int, event: str, number: int) -> Signal:
        """Return the signal that is set when a rank posts an event for the `number`-th time, from 1."""
        key = rank, event, number
        if key not in self.signals:
            self.signals[key] = Signal(self.clock)
        return self.signals[key]

    def letter(self, rank: int, op: GroupOp, move: TransferSpec) -> Message:
        """Return the message between two ranks in a group operation; whichever comes first makes it."""
        waiting, is_sent = self.letters[move.source, move.to, move.ref.operand], move.source == rank
        if waiting and waiting[0].is_sent != is_sent:
            return waiting.popleft()
        waiting.append(Message(self, move, rounds(op), is_sent))
        return waiting[-1]


class Rank:
    """One rank: its processor, the operations in progress, and those done."""

    def __init__(self, world: World, number: int, host: Server) -> None:
        self.world, self.number, self.node = world, number, world.nodes[number]
        self.processor, self.helper = Processor(host), Processor(host)
        self.speed = 1.0  # speed of its multiplies, relative to the machine's kernels
        self.op: Op | None = None  # its current operation; None when it has finished
        self.is_multiplying = self.is_meeting = False
        self.flows: dict[Flow, None] = {}  # transfers between nodes that are its own, under way
        self.posts: Counter[str] = Counter()
        self.frames: dict[str, int] = {}
        self.claims: list[int] = []
        self.multiplying = self.ended = self.since = 0.0
        self.is_done = False
        self.between = self.within = self.messages = 0

    @property
    def peak(self) -> int:
        schedule = self.world.schedule
        homes = sum(schedule.in_memory(name, self.number) for name in schedule.homes)
        return homes + sum(self.frames.values())

    def holds(self, ops: Sequence[Op]) -> None:
        for frame, size in frame_sizes(list(ops), self.number).items():
            self.frames[frame] = max(size, self.frames.get(frame, 0))

    def count(self, op: Op) -> None:
        for other, words, is_message in foreign(op, self.number):
            if self.world.nodes[other] == self.node:
                self.within += words
            else:
                self.between += words
            self.messages += is_message

    def note(self, kind: str) -> None:
        """Record the rank's activity since the last record, if it took time."""
        begin, self.since = self.since, self.world.clock.now
        if self.world.noted is not None and self.since > begin:
            self.world.noted.append(Noted(self.number, kind, kind, begin, self.since, False, str(self.op or "")))

    def note_beside(self, movement: str, x: str, begin: float) -> None:
        """A transfer that is over now."""
        if self.world.noted is not None:
            name, op = f"{movement} {x}".rstrip(), str(self.op or "")
            self.world.noted.append(Noted(self.number, name, movement, begin, self.world.clock.now, True, op))

    def post(self, event: str) -> None:
        self.posts[event] += 1
        self.world.posted(self.number, event, self.posts[event]).end()

    def held_up(self, seconds: float) -> float:
        """Return the delay that a multiply of this length and the transfers under way cause each other."""
        open_flows = [flow for flow in self.flows if flow.unseen]
        left, lost = seconds, 0.0
        for flow in open_flows:
            seen = min(left, flow.unseen)
            flow.unseen -= seen
            left -= seen
            lost += (1 - flow.hidden) * seen
        for flow in open_flows:
            flow.late += lost
        return lost


class Flow:
    """A transfer between nodes: after its latency, the given number of seconds of each wire that it takes."""

    def __init__(
        self, rank: Rank, latency: float, seconds: float, wires: Wires, movement: str, x: str, hidden: float,
        line: tuple[int, int] | None = None,
    ) -> None:
        """Begin a transfer of `rank` that delays no other rank. hidden: the share that its multiply goes on beside.

        line: from which rank to which, if it waits for what went there before.
        """
        self.rank, self.wires, self.hidden = rank, wires, hidden
        self.movement, self.x, self.begin = movement, x, rank.world.clock.now
        self.over = Signal(rank.world.clock)
        self.unseen = seconds  # seconds that no multiply has gone on beside
        self.late = 0.0  # seconds by which multiplies have held it up
        rank.flows[self] = None
        self._ahead = None
        if line is not None:
            self._ahead, rank.world.lines[line] = rank.world.lines.get(line), self.over
        rank.world.clock.after(latency, self._move)

    def _move(self) -> None:
        if self._ahead is not None and not self._ahead.is_over:
            self._ahead.then(self._move)
            return
        parts = Countdown(len(self.wires), self._end)
        for wire, seconds in self.wires:
            wire.add(seconds, parts.one)

    def _end(self) -> None:
        if self.late:
            late, self.late = self.late, 0.0
            self.rank.world.clock.after(late, self._end)
            return
        del self.rank.flows[self]
        self.rank.note_beside(self.movement, self.x, self.begin)
        self.over.end()


class Message:
    """Data that one rank sends to another in a group operation; it moves once both have come to that operation."""

    def __init__(self, world: World, move: TransferSpec, rounds: int, is_sent: bool) -> None:
        self.source, self.target, self.world = world.ranks[move.source], world.ranks[move.to], world
        self.is_sent = is_sent  # true if it was the sender that came first
        self.over = Signal(world.clock)
        packed = world.stretches(move.ref) > 1
        self.cost = world.cost(world.link(move.source, move.to), move.kind, packed=packed)
        self.nbytes, self.rounds = world.nbytes(move.ref), rounds
        self.movement, self.x = move.kind, move.ref.operand
        self._sides = Countdown(2, self._move)

    def come(self) -> Message:
        self._sides.one()
        return self

    def _move(self) -> None:
        is_direct = self.rounds == 1
        if self.source.node != self.target.node:
            seconds, alpha = self.cost.beta * self.nbytes, self.cost.alpha + self.world.delay(self.source, self.target)
            latency = self.rounds * alpha + (self.rounds - 1) * seconds
            wires = self.world.wires(self.source, self.target, seconds, self.nbytes, not is_direct)
            line = (self.source.number, self.target.number) if is_direct else None
            flow = Flow(self.target, latency, seconds, wires, self.movement, self.x, self.cost.hidden, line)
            flow.over.then(self.over.end)
            return
        ranks = (self.source, self.target) if is_direct else (self.target,)
        parts = Countdown(len(ranks), partial(self._land, self.world.clock.now))
        for rank in ranks:
            rank.processor.add(self.rounds * self.cost.seconds(self.nbytes), parts.one)

    def _land(self, begin: float) -> None:
        self.target.note_beside(self.movement, self.x, begin)
        self.over.end()


def rounds(op: GroupOp) -> int:
    """Return the rounds of messages that a group's transfer takes; one where each member is sent to directly."""
    if not isinstance(op, Broadcast) or op.kind != "broadcast" or len(op.group) <= FLAT:
        return 1
    return (len(op.group) - 1).bit_length()


__all__ = ["Flow", "Message", "Noted", "Rank", "World", "rounds"]

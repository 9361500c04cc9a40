"""The definition of the operations: all ranks in one process, in a random interleaving.

Copies and Accumulates take effect at a random moment that their definition allows, and memory that must not be
read holds NaN, so that a schedule which only works by luck fails here. Small matrices of small integers in float64
are exact, whatever the order.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import ScheduleError
from rma_mm.geometry.span import Region
from rma_mm.schedule import ops
from rma_mm.schedule.arithmetic import Arithmetic, PlusTimes
from rma_mm.schedule.dispatch import Dispatch
from rma_mm.schedule.lowering.fused_finish import closing
from rma_mm.schedule.mirror_ops import Clear, Mirror, above
from rma_mm.schedule.ops import Op, Ref, Slot, foreign
from rma_mm.schedule.schedule import Schedule

Matrix = NDArray[np.float64]
Epilogue = Callable[[Matrix, Region], Matrix]


@dataclass
class Outcome:
    tiles: list[Matrix]  # C's local array, by rank
    words: list[int]  # elements of other ranks' memory that each rank read or added to
    words_between_nodes: int = 0  # of all words, those that crossed nodes
    messages: int = 0  # copies from, and Accumulates to, other ranks
    claims: dict[int, list[int]] = field(default_factory=dict)  # tasks that each rank ran, in order


def interpret(
    schedule: Schedule, homes: dict[str, list[Matrix]], alpha: float = 1.0, beta: float = 0.0, seed: int = 0,
    claims: dict[int, list[int]] | None = None, arithmetic: Arithmetic | None = None, epilogue: Epilogue | None = None,
) -> Outcome:
    """Run `schedule` on local arrays.

    homes: A, B (and C, whose arrays are overwritten) → one local array per rank. `claims` replays recorded tickets.
    arithmetic: what is done instead of + and ×; alpha is then 1, and beta 0 or 1. epilogue: what becomes of the values
    of a region of C when it is closed, be it by a Finish or, as the executor does it, by the last products into it.
    Raises ScheduleError if ranks would wait forever.
    """
    return _Machine(schedule, homes, alpha, beta, seed, claims, arithmetic or PlusTimes(), epilogue).run()


@dataclass(eq=False)
class _Message:
    """Data that one rank sends to another; it is read from the sender's memory at any moment before that is reused."""

    src: Ref
    values: Matrix | None = None


@dataclass(frozen=True)
class _Arrival:
    """Data under way to a rank."""

    route: tuple[int, int, str]  # (from, to, operand): letters of one route arrive in order
    number: int  # which letter of the route it is
    dst: Ref
    adds: bool


class _Rank:
    """One virtual rank: its remaining operations, scratch memory, and transfers in progress."""

    def __init__(self, number: int, program: list[Op]) -> None:
        self.number = number
        self.kept, self.ops = program, program[::-1]
        self.closed: set[int] = set()
        self.slots: dict[str, tuple[Slot, Matrix]] = {}
        self.pending: list[ops.OneSidedOp | _Arrival | ops.Post] = []
        self.posted: Counter[str] = Counter()
        self.sent: list[_Message] = []
        self.waiting = False


class _Machine:
    """All virtual ranks and their memory."""

    handlers = Dispatch[None]()

    def __init__(
        self, schedule: Schedule, homes: dict[str, list[Matrix]], alpha: float, beta: float, seed: int,
        claims: dict[int, list[int]] | None, arithmetic: Arithmetic, epilogue: Epilogue | None,
    ) -> None:
        self.schedule, self.homes, self.alpha, self.beta = schedule, dict(homes), alpha, beta
        self.arithmetic, self.epilogue = arithmetic, epilogue
        ranks = schedule.mesh.ranks
        for name in schedule.homes:
            if name not in self.homes:
                self.homes[name] = [np.full(schedule.home(name, rank).shape, np.nan) for rank in ranks]
        self.random = random.Random(seed)
        self.ranks = [_Rank(rank, schedule.program(rank)) for rank in ranks]
        for rank in self.ranks if epilogue else ():
            rank.closed = closing(rank.kept)
        self.letters: dict[tuple[int, int, str], list[_Message]] = defaultdict(list)
        self.awaited: dict[tuple[int, int, str], int] = defaultdict(int)
        self.tickets = 0
        self.replay = {rank: list(tasks) for rank, tasks in claims.items()} if claims is not None else None
        self.outcome = Outcome(self.homes["C"], [0] * len(ranks), claims={rank: [] for rank in ranks})

    def run(self) -> Outcome:
        while active := [n for n, rank in enumerate(self.ranks) if rank.ops and not rank.waiting]:
            rank = self.one_ready(active)
            if rank is None and self.post_more():
                continue
            if rank is None:
                raise ScheduleError("deadlock", f"ranks {active} wait forever for data that no rank sends")
            self.land_some()
            self.step(rank)
            if all(rank.waiting for rank in self.ranks):
                for rank in self.ranks:
                    rank.waiting = False
        if any(rank.waiting for rank in self.ranks):
            waiting = [rank.number for rank in self.ranks if rank.waiting]
            raise ScheduleError("deadlock", f"ranks {waiting} wait forever at a barrier")
        for rank in self.ranks:
            if not all(map(self.is_here, rank.pending)):
                raise ScheduleError("deadlock", f"{rank.pending} never arrives")
            self.land(rank, rank.pending)
        return self.outcome

    def one_ready(self, active: list[int]) -> _Rank | None:
        """Any of these ranks that can go on, each as likely; None if none can."""
        left = list(active)
        while left:
            at = self.random.randrange(len(left))
            if self.is_ready(rank := self.ranks[left[at]]):
                return rank
            left[at] = left[-1]
            left.pop()
        return None

    # -- transfers --------------------------------------------------------------------------------

    def land_some(self) -> None:
        rank = self.random.choice(self.ranks)
        if rank.pending and self.random.random() < 0.3:
            chosen = self.random.choice(rank.pending)
            self.land(rank, [chosen] if self.can_land(rank, chosen) else [])
        if rank.sent and self.random.random() < 0.3:
            self.post(self.random.choice(rank.sent))

    def land(self, rank: _Rank, transfers: Sequence[ops.OneSidedOp | _Arrival | ops.Post]) -> None:
        for op in list(transfers):
            rank.pending.remove(op)
            if isinstance(op, ops.Post):
                rank.posted[op.event] += 1
            else:
                letter = self.letters[op.route][op.number] if isinstance(op, _Arrival) else _Message(op.src)
                values = self.post(letter)
                self.write(op.dst, self.sum(self.read(op.dst), values) if op.adds else values)

    def post(self, letter: _Message) -> Matrix:
        """Return the values of a letter, read now if they were not before."""
        if letter.values is None:
            letter.values = self.read(letter.src)
        return letter.values

    def post_more(self) -> bool:
        """Let one event be posted that nothing but chance has held back; whether there is one."""
        for rank in self.ranks:
            for op in rank.pending:
                if isinstance(op, ops.Post):
                    self.land(rank, [each for each in rank.pending if _fills(each, op.filled)])
                    self.land(rank, [op])
                    return True
        return False

    def can_land(self, rank: _Rank, transfer: ops.OneSidedOp | _Arrival | ops.Post) -> bool:
        """True if a transfer can complete now: its sender has begun it, or the awaited operations are done."""
        if not isinstance(transfer, ops.Post):
            return self.is_here(transfer)
        before = rank.pending[: rank.pending.index(transfer)]
        posts = {op.event for op in before if isinstance(op, ops.Post)}
        return transfer.event not in posts and not any(_fills(op, transfer.filled) for op in before)

    def is_here(self, transfer: ops.OneSidedOp | _Arrival | ops.Post) -> bool:
        return not isinstance(transfer, _Arrival) or len(self.letters[transfer.route]) > transfer.number

    def is_ready(self, rank: _Rank) -> bool:
        """True if everything that the next operation of `rank` needs has been sent or posted."""
        op = rank.ops[-1]
        if isinstance(op, ops.Await):
            return all(self.ranks[q].posted[op.event] >= op.count for q in op.group)
        names = {slot.frame for slot in op.slots}
        concerned = [x for x in rank.pending if isinstance(op, ops.Barrier) or _frame(x) in names]
        return all(map(self.is_here, concerned))

    def complete(self, rank: _Rank, refs: tuple[Ref, ...]) -> None:
        """Complete the transfers to or from the scratch of `refs`, before it is reused."""
        names = {ref.buffer.frame for ref in refs if isinstance(ref.buffer, Slot)}
        self.land(rank, [op for op in rank.pending if _frame(op) in names])
        for letter in rank.sent:
            if isinstance(letter.src.buffer, Slot) and letter.src.buffer.frame in names:
                self.post(letter)

    # -- one operation ----------------------------------------------------------------------------

    def step(self, rank: _Rank) -> None:
        op, number, nodes = rank.ops.pop(), rank.number, self.schedule.mesh.node_of_rank
        for other, words, message in foreign(op, number):
            self.outcome.words[number] += words
            self.outcome.words_between_nodes += words * (nodes[other] != nodes[number])
            self.outcome.messages += message
        self.handlers[type(op)](self, op, rank)

    @handlers.on(ops.Scale)
    def scale(self, op: ops.Scale, rank: _Rank) -> None:
        self.complete(rank, op.refs)
        self.occupy(op.c)
        nothing = self.arithmetic.identity(np.dtype(np.float64))
        self.write(op.c, self.beta * self.read(op.c) if op.keep else np.full(op.c.region.shape, nothing))

    @handlers.on(ops.Finish)
    def finish(self, op: ops.Finish, rank: _Rank) -> None:
        if id(op) not in rank.closed:
            self.close(op.c)

    @handlers.on(ops.Barrier)
    def barrier(self, _: ops.Barrier, rank: _Rank) -> None:
        self.land(rank, rank.pending)
        for letter in rank.sent:
            self.post(letter)
        rank.sent.clear()
        rank.waiting = True

    @handlers.on(ops.Post)
    def count_up(self, op: ops.Post, rank: _Rank) -> None:
        rank.pending.append(op)

    @handlers.on(ops.Await)
    def go_on(self, _: ops.Await, rank: _Rank) -> None:
        """Do nothing: the scheduler runs an Await only when it is ready."""

    @handlers.on(ops.Multiply)
    def multiply(self, op: ops.Multiply, rank: _Rank) -> None:
        self.complete(rank, op.refs)
        b = self.read(op.b)
        product = self.product(self.read(op.a), b.T if op.b_is_transposed_a else b)
        if op.first:
            self.occupy(op.c)
        total = product if op.first else self.sum(self.read(op.c), product)
        self.write(op.c, np.where(above(op.c), np.nan, total) if op.half else total)
        if id(op) in rank.closed:
            self.close(op.c)

    @handlers.on(Mirror)
    def mirror(self, op: Mirror, rank: _Rank) -> None:
        self.complete(rank, op.refs)
        values = self.read(op.src)
        self.write(op.c, np.where(above(op.c), values.T, values) if op.is_diagonal else values.T)

    @handlers.on(Clear)
    def clear(self, op: Clear, rank: _Rank) -> None:
        self.write(op.c, np.where(above(op.c), 0, self.read(op.c)))

    def close(self, c: Ref) -> None:
        if self.epilogue:
            self.write(c, self.epilogue(self.read(c), c.region))

    def sum(self, one: Matrix, other: Matrix) -> Matrix:
        added: Matrix = self.arithmetic.add(one, other)
        return added

    def product(self, a: Matrix, b: Matrix) -> Matrix:
        add, multiply = self.arithmetic.add, self.arithmetic.multiply
        if isinstance(self.arithmetic, PlusTimes):
            return self.alpha * (a @ b)
        nothing = self.arithmetic.identity(np.dtype(np.float64))
        total: Matrix = add.reduce(multiply(a[:, :, None], b[None]), axis=1, initial=nothing)
        return total

    @handlers.on(ops.Copy, ops.Accumulate)
    def begin(self, op: ops.OneSidedOp, rank: _Rank) -> None:
        (self.land_copies if op.adds else self.make_room)(rank, op.local)
        rank.pending.append(op)

    def make_room(self, rank: _Rank, dst: Ref) -> None:
        """Give a slot to its new content, after the transfers of the old one are complete."""
        if isinstance(dst.buffer, Slot):
            if self.ranks[dst.rank].slots.get(dst.buffer.frame, (None, None))[0] != dst.buffer:
                self.complete(rank, (dst,))
            self.occupy(dst)

    @handlers.on(ops.Reduce)
    def reduce(self, op: ops.Reduce, rank: _Rank) -> None:
        self.complete(rank, op.srcs)
        for src, dst in zip(op.srcs, op.dsts, strict=True):
            if dst.rank == rank.number:
                self.make_room(rank, dst)
                held = self.read(src)
                self.write(dst, self.sum(self.read(dst), held) if isinstance(dst.buffer, str) else held)
        self.group_operation(op, rank)

    @handlers.on(ops.Broadcast, ops.Shift)
    def group_operation(self, op: ops.GroupOp, rank: _Rank) -> None:
        """Run this rank's part of a group operation: messages to others, and places for theirs."""
        for move in op.moves(rank.number):
            route = move.source, move.to, move.ref.operand
            if move.source == rank.number and move.src:
                self.land_copies(rank, move.src)
                rank.sent.append(_Message(move.src))
                self.letters[route].append(rank.sent[-1])
            else:
                self.make_room(rank, move.ref)
                rank.pending.append(_Arrival(route, self.awaited[route], move.ref, move.adds))
                self.awaited[route] += 1

    def land_copies(self, rank: _Rank, ref: Ref) -> None:
        filling = [op for op in rank.pending if isinstance(op, ops.Copy | _Arrival) and op.dst.buffer == ref.buffer]
        self.land(rank, [op for op in filling if isinstance(ref.buffer, Slot)])

    @handlers.on(ops.Claim)
    def claim(self, op: ops.Claim, rank: _Rank) -> None:
        pool, number = self.schedule.pool, rank.number
        assert pool is not None
        if self.replay is not None:
            task = self.replay[number].pop(0) if self.replay[number] else pool.tasks
        else:
            task, self.tickets = self.tickets, self.tickets + 1
        if task < pool.tasks:
            self.outcome.claims[number].append(task)
            rank.ops.append(op)
            rank.ops += pool.program(task, number)[::-1]

    # -- memory -----------------------------------------------------------------------------------

    def occupy(self, ref: Ref) -> None:
        """Give the slot its new content's shape; its old content is lost."""
        rank, slot = self.ranks[ref.rank], ref.buffer
        if isinstance(slot, Slot) and rank.slots.get(slot.frame, (None, None))[0] != slot:
            rank.slots[slot.frame] = (slot, np.full(slot.region.shape, np.nan))

    def memory(self, ref: Ref) -> Matrix:
        if isinstance(ref.buffer, str):
            return self.homes[ref.buffer][ref.rank]
        slot, array = self.ranks[ref.rank].slots[ref.buffer.frame]
        if slot != ref.buffer:
            raise ScheduleError("not-filled", f"{ref}: the slot holds {slot} by now")
        return array

    def read(self, ref: Ref) -> Matrix:
        where = self.schedule.holds(ref).locate(ref.region)
        return self.memory(ref)[where.selector()].copy()

    def write(self, ref: Ref, values: Matrix) -> None:
        where = self.schedule.holds(ref).locate(ref.region)
        self.memory(ref)[where.selector()] = values


def _fills(op: object, slot: Slot | None) -> bool:
    return isinstance(op, ops.Copy) and op.dst.buffer == slot


def _frame(transfer: ops.OneSidedOp | _Arrival | ops.Post) -> str | None:
    """Return the frame of scratch that a transfer fills, or sends."""
    if isinstance(transfer, ops.Post):
        return None
    buffer = (transfer.dst if isinstance(transfer, _Arrival) else transfer.local).buffer
    return buffer.frame if isinstance(buffer, Slot) else None

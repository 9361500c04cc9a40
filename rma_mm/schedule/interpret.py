"""The definition of the operations: all ranks in one process, in a random interleaving.

Copies and Accumulates take effect at a random moment that their definition allows, and memory that must not be
read holds NaN, so that a schedule which only works by luck fails here. Small matrices of small integers in float64
are exact, whatever the order.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import ScheduleError
from rma_mm.geometry.span import Region
from rma_mm.schedule.arithmetic import Arithmetic, PlusTimes
from rma_mm.schedule.lowering.fused_finish import closing
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
    foreign,
    incoming,
    outgoing,
)
from rma_mm.schedule.passes import kind_of, slots_of

Matrix = NDArray[np.float64]
Epilogue = Callable[[Matrix, Region], Matrix]


@dataclass
class Outcome:
    """What interpreting a schedule gave."""

    tiles: list[Matrix]
    """C's local array, by rank."""
    words: list[int]
    """Elements of other ranks' memory that each rank read or added to."""
    words_between_nodes: int = 0
    """Of all words, those that crossed nodes."""
    messages: int = 0
    """Copies from, and Accumulates to, other ranks."""
    claims: dict[int, list[int]] = field(default_factory=dict)
    """Tasks that each rank ran, in order."""


def interpret(
    schedule: Schedule,
    homes: dict[str, list[Matrix]],
    alpha: float = 1.0,
    beta: float = 0.0,
    seed: int = 0,
    claims: dict[int, list[int]] | None = None,
    arithmetic: Arithmetic | None = None,
    epilogue: Epilogue | None = None,
) -> Outcome:
    """Run `schedule` on local arrays.

    homes: A, B (and C, whose arrays are overwritten) → one local array per rank. `claims` replays recorded tickets.
    arithmetic: what is done in place of + and ×; alpha is then 1, and beta 0 or 1. epilogue: what becomes of the values
    of a region of C when it is closed, be it by a Finish or, as the executor does it, by the last products into it.
    Raises ScheduleError where ranks would wait for ever.
    """
    return _Machine(schedule, homes, alpha, beta, seed, claims, arithmetic or PlusTimes(), epilogue).run()


@dataclass(eq=False)
class _Letter:
    """What one rank sends to another; read from the sender's memory at any moment until that is used again."""

    src: Ref
    values: Matrix | None = None


@dataclass(frozen=True)
class _Arrival:
    """What is on its way to a rank."""

    route: tuple[int, int, str]
    """(from, to, operand): letters of one route arrive in order."""
    number: int
    """Which letter of the route it is."""
    dst: Ref
    adds: bool


class _Rank:
    """One virtual rank: what is left to do, scratch memory, and transfers under way."""

    def __init__(self, ops: list[Op]) -> None:
        self.kept, self.ops = ops, ops[::-1]
        self.closed: set[int] = set()
        self.slots: dict[str, tuple[Slot, Matrix]] = {}
        self.pending: list[Copy | Accumulate | _Arrival | Post] = []
        self.posted: Counter[str] = Counter()
        self.sent: list[_Letter] = []
        self.waiting = False


class _Machine:
    """All virtual ranks and their memory."""

    def __init__(
        self,
        schedule: Schedule,
        homes: dict[str, list[Matrix]],
        alpha: float,
        beta: float,
        seed: int,
        claims: dict[int, list[int]] | None,
        arithmetic: Arithmetic,
        epilogue: Epilogue | None,
    ) -> None:
        self.schedule, self.homes, self.alpha, self.beta = schedule, dict(homes), alpha, beta
        self.arithmetic, self.epilogue = arithmetic, epilogue
        ranks = schedule.mesh.ranks
        for name in schedule.homes:
            if name not in self.homes:
                self.homes[name] = [np.full(schedule.home(name, rank).shape, np.nan) for rank in ranks]
        self.random = random.Random(seed)
        self.ranks = [_Rank(schedule.program(rank)) for rank in ranks]
        for rank in self.ranks if epilogue else ():
            rank.closed = closing(rank.kept)
        self.letters: dict[tuple[int, int, str], list[_Letter]] = defaultdict(list)
        self.awaited: dict[tuple[int, int, str], int] = defaultdict(int)
        self.tickets = 0
        self.replay = {rank: list(tasks) for rank, tasks in claims.items()} if claims is not None else None
        self.outcome = Outcome(self.homes["C"], [0] * len(ranks), claims={rank: [] for rank in ranks})

    def run(self) -> Outcome:
        while active := [n for n, rank in enumerate(self.ranks) if rank.ops and not rank.waiting]:
            ready = [n for n in active if self.is_ready(self.ranks[n])]
            if not ready and self.post_more():
                continue
            if not ready:
                raise ScheduleError(f"ranks {active} wait for ever for what is never sent to them")
            number = self.random.choice(ready)
            self.land_some()
            self.step(number, self.ranks[number])
            if all(rank.waiting for rank in self.ranks):
                for rank in self.ranks:
                    rank.waiting = False
        if any(rank.waiting for rank in self.ranks):
            raise ScheduleError(
                f"ranks {[n for n, r in enumerate(self.ranks) if r.waiting]} wait at a barrier for ever"
            )
        for rank in self.ranks:
            if not all(map(self.is_here, rank.pending)):
                raise ScheduleError(f"{rank.pending} never arrives")
            self.land(rank, rank.pending)
        return self.outcome

    # -- transfers --------------------------------------------------------------------------------

    def land_some(self) -> None:
        rank = self.random.choice(self.ranks)
        if rank.pending and self.random.random() < 0.3:
            chosen = self.random.choice(rank.pending)
            self.land(rank, [chosen] if self.can_land(rank, chosen) else [])
        if rank.sent and self.random.random() < 0.3:
            self.post(self.random.choice(rank.sent))

    def land(self, rank: _Rank, transfers: Sequence[Copy | Accumulate | _Arrival | Post]) -> None:
        for op in list(transfers):
            rank.pending.remove(op)
            if isinstance(op, Post):
                rank.posted[op.event] += 1
            elif isinstance(op, _Arrival):
                values = self.post(self.letters[op.route][op.number])
                self.write(op.dst, self.sum(self.read(op.dst), values) if op.adds else values)
            elif isinstance(op, Copy):
                self.write(op.dst, self.read(op.src))
            else:
                self.write(op.dst, self.sum(self.read(op.dst), self.read(op.src)))

    def post(self, letter: _Letter) -> Matrix:
        """The values of a letter, read now if they were not before."""
        if letter.values is None:
            letter.values = self.read(letter.src)
        return letter.values

    def post_more(self) -> bool:
        """Let one event be posted that nothing but chance has held back; whether there is one."""
        for rank in self.ranks:
            for op in rank.pending:
                if isinstance(op, Post):
                    self.land(rank, [each for each in rank.pending if _fills(each, op.filled)])
                    self.land(rank, [op])
                    return True
        return False

    def can_land(self, rank: _Rank, transfer: Copy | Accumulate | _Arrival | Post) -> bool:
        """Whether a transfer can end by now: its sender has come to it; of a post, what it speaks of is over."""
        if not isinstance(transfer, Post):
            return self.is_here(transfer)
        before = rank.pending[: rank.pending.index(transfer)]
        posts = {op.event for op in before if isinstance(op, Post)}
        return transfer.event not in posts and not any(_fills(op, transfer.filled) for op in before)

    def is_here(self, transfer: Copy | Accumulate | _Arrival | Post) -> bool:
        """Whether the sender of what is on its way has come to it."""
        return not isinstance(transfer, _Arrival) or len(self.letters[transfer.route]) > transfer.number

    def is_ready(self, rank: _Rank) -> bool:
        """Whether what the next operation of `rank` needs has been sent, or posted."""
        op = rank.ops[-1]
        if isinstance(op, Await):
            return all(self.ranks[q].posted[op.event] >= op.count for q in op.group)
        names = {slot.frame for slot in slots_of(op)}
        concerned = [x for x in rank.pending if isinstance(op, Barrier) or _frame(x) in names]
        return all(map(self.is_here, concerned))

    def settle(self, rank: _Rank, refs: tuple[Ref, ...]) -> None:
        """Land what is under way to or from the scratch that `refs` name, before it is used again."""
        names = {ref.buffer.frame for ref in refs if isinstance(ref.buffer, Slot)}
        self.land(rank, [op for op in rank.pending if _frame(op) in names])
        for letter in rank.sent:
            if isinstance(letter.src.buffer, Slot) and letter.src.buffer.frame in names:
                self.post(letter)

    # -- one operation ----------------------------------------------------------------------------

    def step(self, number: int, rank: _Rank) -> None:
        op = rank.ops.pop()
        for other, words, message in foreign(op, number):
            nodes = self.schedule.mesh.nodes
            self.outcome.words[number] += words
            self.outcome.words_between_nodes += words * (nodes[other] != nodes[number])
            self.outcome.messages += message
        if isinstance(op, Copy | Accumulate):
            self.begin(rank, op)
        elif isinstance(op, Broadcast | Shift | Reduce):
            self.together(number, rank, op)
        elif isinstance(op, Multiply):
            self.multiply(rank, op)
        elif isinstance(op, Scale):
            self.settle(rank, (op.c,))
            self.occupy(op.c)
            nothing = self.arithmetic.identity(np.dtype(np.float64))
            self.write(op.c, self.beta * self.read(op.c) if op.keep else np.full(op.c.region.shape, nothing))
        elif isinstance(op, Barrier):
            self.land(rank, rank.pending)
            for letter in rank.sent:
                self.post(letter)
            rank.sent.clear()
            rank.waiting = True
        elif isinstance(op, Claim):
            self.claim(number, rank, op)
        elif isinstance(op, Post):
            rank.pending.append(op)
        else:
            assert isinstance(op, Finish | Await)
            if isinstance(op, Finish) and id(op) not in rank.closed:
                self.close(op.c)

    def multiply(self, rank: _Rank, op: Multiply) -> None:
        self.settle(rank, (op.a, op.b, op.c))
        product = self.product(self.read(op.a), self.read(op.b))
        if op.first:
            self.occupy(op.c)
        self.write(op.c, product if op.first else self.sum(self.read(op.c), product))
        if id(op) in rank.closed:
            self.close(op.c)

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

    def begin(self, rank: _Rank, op: Copy | Accumulate) -> None:
        if isinstance(op, Accumulate):
            self.settle_copies(rank, op.src)
        else:
            self.make_room(rank, op.dst)
        rank.pending.append(op)

    def make_room(self, rank: _Rank, dst: Ref) -> None:
        """Give a slot over to its new content, once what concerns the old one is done."""
        if isinstance(dst.buffer, Slot):
            if self.ranks[dst.rank].slots.get(dst.buffer.frame, (None, None))[0] != dst.buffer:
                self.settle(rank, (dst,))
            self.occupy(dst)

    def together(self, number: int, rank: _Rank, op: Broadcast | Shift | Reduce) -> None:
        """This rank's part of what a group does: letters to others, and room for theirs."""
        if isinstance(op, Reduce):
            self.settle(rank, op.srcs)
            for src, dst in zip(op.srcs, op.dsts, strict=True):
                if dst.rank == number:
                    self.make_room(rank, dst)
                    held = self.read(src)
                    self.write(dst, self.sum(self.read(dst), held) if isinstance(dst.buffer, str) else held)
        for to, src in outgoing(op, number):
            self.settle_copies(rank, src)
            letter = _Letter(src)
            rank.sent.append(letter)
            self.letters[number, to, kind_of(src)].append(letter)
        for source, dst in incoming(op, number):
            self.make_room(rank, dst)
            route = source, number, kind_of(dst)
            rank.pending.append(_Arrival(route, self.awaited[route], dst, isinstance(op, Reduce)))
            self.awaited[route] += 1

    def settle_copies(self, rank: _Rank, ref: Ref) -> None:
        filling = [op for op in rank.pending if isinstance(op, Copy | _Arrival) and op.dst.buffer == ref.buffer]
        self.land(rank, [op for op in filling if isinstance(ref.buffer, Slot)])

    def claim(self, number: int, rank: _Rank, op: Claim) -> None:
        pool = self.schedule.pool
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
        """Give the slot its new content's shape; what it held is gone."""
        rank, slot = self.ranks[ref.rank], ref.buffer
        if isinstance(slot, Slot) and rank.slots.get(slot.frame, (None, None))[0] != slot:
            rank.slots[slot.frame] = (slot, np.full(slot.region.shape, np.nan))

    def memory(self, ref: Ref) -> Matrix:
        if isinstance(ref.buffer, str):
            return self.homes[ref.buffer][ref.rank]
        slot, array = self.ranks[ref.rank].slots[ref.buffer.frame]
        if slot != ref.buffer:
            raise ScheduleError(f"{ref}: the slot holds {slot} by now")
        return array

    def read(self, ref: Ref) -> Matrix:
        where = self.schedule.holds(ref).locate(ref.region)
        return self.memory(ref)[where.selector()].copy()

    def write(self, ref: Ref, values: Matrix) -> None:
        where = self.schedule.holds(ref).locate(ref.region)
        self.memory(ref)[where.selector()] = values


def _fills(op: object, slot: Slot | None) -> bool:
    """Whether `op` is a Copy into `slot`."""
    return isinstance(op, Copy) and op.dst.buffer == slot


def _frame(transfer: Copy | Accumulate | _Arrival | Post) -> str | None:
    """The frame of scratch that a transfer fills, or sends."""
    if isinstance(transfer, Post):
        return None
    buffer = transfer.src.buffer if isinstance(transfer, Accumulate) else transfer.dst.buffer
    return buffer.frame if isinstance(buffer, Slot) else None

"""Log of the messages of group operations, to check that all of them match."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from rma_mm.errors import ScheduleError
from rma_mm.geometry.span import Region
from rma_mm.schedule.ops import Await, Barrier, Broadcast, GroupOp, Op, Post, Reduce, Ref, Shift

Route = tuple[int, int, str]  # (from, to, operand): what is sent on one route arrives in order


class MessageLog:
    """Everything sent and expected so far."""

    def __init__(self) -> None:
        self.sent: dict[Route, list[tuple[Region, list[Region]]]] = defaultdict(list)
        self.expected: dict[Route, list[Region]] = defaultdict(list)
        self.epoch = 0
        self.calls: dict[tuple[int, ...], dict[int, list[object]]] = defaultdict(lambda: defaultdict(list))

    def send(self, rank: int, op: GroupOp, contents: Callable[[Ref], list[Region]]) -> None:
        """Record the data that `rank` sends, with its products, and the data it expects."""
        if isinstance(op, Broadcast | Reduce):
            self.calls[op.group][rank].append((self.epoch, *_boxes(op)))
        for move in op.moves(rank):
            route = move.source, move.to, move.ref.operand
            if move.source == rank and move.src:
                self.sent[route].append((move.src.region, contents(move.src)))
            else:
                self.expected[route].append(move.ref.region)

    def find(self, route: Route, region: Region) -> list[Region] | None:
        """Return the products that came with `region`; None if it has not been sent yet."""
        found = [products for what, products in self.sent[route] if what == region]
        return found[-1] if found else None

    def check(self) -> None:
        """Raise ScheduleError unless all that was sent was expected, in that order, and groups made the same calls."""
        for route in {*self.sent, *self.expected}:
            source, to, x = route
            if [region for region, _ in self.sent[route]] != self.expected[route]:
                why = f"rank {to} expects of {x} what rank {source} does not send, or in another order"
                raise ScheduleError("unmatched", why)
        for group, calls in self.calls.items():
            if any(calls[rank] != calls[group[0]] for rank in group):
                raise ScheduleError("unmatched", f"the ranks {group} do not make the same calls in the same order")


def _boxes(op: Broadcast | Reduce) -> list[tuple[int, str, Region]]:
    """Return the boxes of an operation under the names that all members of a group use.

    What a slot is called, only its own rank knows.
    """
    refs = op.parts if isinstance(op, Broadcast) else op.dsts
    return [(ref.rank, ref.buffer if isinstance(ref.buffer, str) else f"[{ref.operand}]", ref.region) for ref in refs]


def balance(ops: Sequence[Op], rank: int) -> int:
    """Return a number modulo 2^64 whose sum over all ranks is 0 if (and, up to chance, only if) messages match.

    Each rank knows its own calls only, so this is how they can be compared in one sum.
    """
    counts: dict[object, int] = defaultdict(int)
    total = epoch = 0

    def entry(*what: object) -> int:
        counts[what[0]] += 1
        text = repr((epoch, counts[what[0]], *map(str, what)))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    for op in ops:
        epoch += isinstance(op, Barrier)
        if isinstance(op, Shift):
            x = op.dst.operand
            total += entry((rank, op.to, x), op.src.region)
            total -= entry((op.source, rank, x), op.dst.region)
        elif alike := _done_alike(op):
            group, *what = alike
            total += (1 - len(group) if rank == group[0] else 1) * entry(group, *what)
    return total % 2**64


def _done_alike(op: Op) -> tuple[Any, ...]:
    """Return (group, text) of work that all ranks of a group do alike, each once; empty if they do not."""
    if isinstance(op, Broadcast | Reduce):
        return (op.group, type(op).__name__, *_boxes(op))
    if isinstance(op, Await):
        return op.group, op.event, op.count
    if isinstance(op, Post) and op.filled:
        return op.filled.group, op.event, op.filled.name, op.filled.region
    return ()

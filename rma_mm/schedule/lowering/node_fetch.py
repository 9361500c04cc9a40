"""The pass by which ranks of one node fetch a slice from afar once, into memory that all of them read.

Afar is another node, or a file. Each rank fetches a piece of the slice; "here" is posted when a piece has landed,
"used" when a rank has multiplied with the slice, and the frames are taken in turn. Ranks share where they want the same
slices in the same order, which each of them finds out from all their operations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from rma_mm.geometry.span import Region, Span, even_part
from rma_mm.schedule.lowering.decisions import LoweringDecisions
from rma_mm.schedule.ops import Accumulate, Await, Copy, Multiply, Op, Post, Reduce, Ref, Slot

HERE, USED = "here", "used"
"""Suffixes of events: a rank's piece of a slice has arrived; a rank no longer needs the slice.

Behind an operand's name.
"""
EVENTS = tuple(f"{x} {what}" for x in "AB" for what in (HERE, USED))  # all events

Member = Callable[[int], list[Op]]
"""A rank → its operations in the order in which they are issued, with Copies into slots of its own."""


class NodeFetch(NamedTuple):
    """Fetching of an operand by some ranks of a node together."""

    group: tuple[int, ...]
    frames: int  # how many slices are held at a time


Sharings = dict[tuple[int, str], NodeFetch]
"""(rank, operand) → how it fetches that operand; absent where it does so alone."""


def node_fetches(member: Member, mates: Sequence[int], decisions: LoweringDecisions) -> Sharings:
    """Return how the ranks of one node (`mates`) fetch A and B.

    Where ranks come to slices of A and of B, and to sums of C, in different orders, they could wait for each other for
    ever: then one operand only is shared, whose slices all members of a group take in the same order, or none.
    """
    found: Sharings = {}
    for x in "AB":
        alike: dict[str, list[int]] = {}
        wanted = {q: _wanted(member(q), x, decisions, q) for q in mates}
        for q in mates:
            if wanted[q]:
                alike.setdefault(repr(_boxes(wanted[q])), []).append(q)
        for group in alike.values():
            if len(group) > 1:
                frames = max(_alive(member(q), list(wanted[q])) for q in group)
                found |= {(q, x): NodeFetch(tuple(group), frames) for q in group}
    for operands in ("AB", "B"):
        part = {key: how for key, how in found.items() if key[1] in operands}
        if _flows({q: all_shared(member(q), q, decisions, part) for q in mates}):
            return part
    return {}


def all_shared(ops: list[Op], rank: int, decisions: LoweringDecisions, found: Sharings) -> list[Op]:
    for x in "AB":
        if (rank, x) in found:
            ops = fetch_together(ops, rank, decisions, x, found[rank, x])
    return ops


def _flows(programs: Mapping[int, Sequence[Op]]) -> bool:
    """True if no rank waits forever for events or partial sums of others."""
    left = {q: deque(ops) for q, ops in programs.items()}
    groups = {(q, _event(op)): op.group for q, ops in programs.items() for op in ops if isinstance(op, Reduce)}

    def may_go(q: int, op: Op) -> bool:
        if isinstance(op, Accumulate) and isinstance(op.src.buffer, Slot):
            name = op.src.buffer.name
            return all(posted[p, name] for p in groups.get((q, name), ()))
        return not isinstance(op, Await) or all(posted[p, op.event] >= op.count for p in op.group)

    posted: Counter[tuple[int, str]] = Counter()
    moved = True
    while moved:
        moved = False
        for q, ops in left.items():
            while ops and may_go(q, ops[0]):
                op = ops.popleft()
                if isinstance(op, Post | Reduce):
                    posted[q, _event(op)] += 1
                moved = True
    return not any(left.values())


def _event(op: Post | Reduce) -> str:
    """Return the name under which it is counted: for a sum, that of the slot."""
    if isinstance(op, Post):
        return op.event
    buffer = op.dsts[0].buffer
    return buffer if isinstance(buffer, str) else buffer.name


def fetch_together(ops: list[Op], rank: int, decisions: LoweringDecisions, x: str, how: NodeFetch) -> list[Op]:
    """`ops` with the slices of `x` from afar fetched in pieces, into slots that the group shares."""
    group, frames = how
    wanted = _wanted(ops, x, decisions, rank)
    number = {slot: n for n, slot in enumerate(wanted)}
    slots = [Slot(f"{x}~{n}", slot.region, f"{x}~{n % frames}", group) for n, slot in enumerate(wanted)]
    places = [Ref(group[n % frames % len(group)], slot, slot.region) for n, slot in enumerate(slots)]
    last = list(accumulate(_last_uses(ops, list(wanted)), max))
    result: list[Op] = []
    begun = ended = 0
    for at, op in enumerate(ops):
        n = number.get(op.dst.buffer) if isinstance(op, Copy) and isinstance(op.dst.buffer, Slot) else None
        if isinstance(op, Copy) and n is not None:
            if op is wanted[op.dst.buffer][0] and n >= frames:  # type: ignore[index]
                result.append(Await(f"{x} {USED}", group, n - frames + 1, op.step))
            chunks = decisions.problem.chunks.get(x)
            turn = n + (x == "B") if chunks else 0  # each in turn reads one of few chunks
            at = (group.index(rank) + turn) % len(group)
            if piece := even_piece(op.dst.region, at, len(group), chunks or (1, 1)):
                result.append(Copy(replace(op.src, region=piece), replace(places[n], region=piece), op.step))
            if op is wanted[op.dst.buffer][-1]:  # type: ignore[index]
                result.append(Post(f"{x} {HERE}", slots[n], op.step))
            continue
        if isinstance(op, Multiply):
            op, newest = _reading(op, number, places)
            if newest >= begun:
                begun = newest + 1
                result.append(Await(f"{x} {HERE}", group, begun, op.step))
        result.append(op)
        while ended < len(last) and last[ended] <= at:
            ended += 1
            result.append(Post(f"{x} {USED}", None, op.step))
    return result


def _wanted(ops: Sequence[Op], x: str, decisions: LoweringDecisions, rank: int) -> dict[Slot, list[Copy]]:
    """Return the slots of `x` that take something from afar, in order, with all Copies into each."""
    found: dict[Slot, list[Copy]] = {}
    for op in ops:
        if isinstance(op, Copy) and isinstance(op.dst.buffer, Slot) and op.dst.operand == x:
            found.setdefault(op.dst.buffer, []).append(op)
    return {slot: ops for slot, ops in found.items() if any(decisions.is_far(rank, op.src) for op in ops)}


def _boxes(wanted: dict[Slot, list[Copy]]) -> list[tuple[Region, list[Region]]]:
    return [(slot.region, [op.dst.region for op in ops]) for slot, ops in wanted.items()]


def _alive(ops: Sequence[Op], slots: list[Slot]) -> int:
    """Return how many of the slots, reused in order, are filled or read at the same time."""
    begin: dict[Slot, int] = {}
    for at, op in enumerate(ops):
        if isinstance(op, Copy) and isinstance(op.dst.buffer, Slot):
            begin.setdefault(op.dst.buffer, at)
    last = list(accumulate(_last_uses(ops, slots), max))
    return max(n - sum(end < begin[slot] for end in last[:n]) + 1 for n, slot in enumerate(slots))


def _last_uses(ops: Sequence[Op], slots: list[Slot]) -> list[int]:
    """Return the last operation in `ops` that uses each slot."""
    last: dict[Slot, int] = {}
    for at, op in enumerate(ops):
        last.update(dict.fromkeys(op.slots, at))
    return [last[slot] for slot in slots]


def _reading(op: Multiply, number: dict[Slot, int], places: list[Ref]) -> tuple[Multiply, int]:
    """The product with shared slots instead of the rank's own, and the latest of them; −1 if it reads none."""
    newest = -1
    for side, ref in (("a", op.a), ("b", op.b)):
        n = number.get(ref.buffer) if isinstance(ref.buffer, Slot) else None
        if n is not None:
            op = replace(op, **{side: replace(places[n], region=ref.region)})  # type: ignore[arg-type]
            newest = max(newest, n)
    return op, newest


def even_piece(region: Region, index: int, count: int, chunks: tuple[int, int] = (1, 1)) -> Region:
    """One of `count` pieces of a box, cut along its longer side, or the one of more chunks, where none is cut."""
    longer = 0 if len(region[0]) // chunks[0] >= len(region[1]) // chunks[1] else 1
    span, chunk = region[longer], chunks[longer]
    if chunk == 1:
        piece = span.take(even_part(len(span), index, count))
    else:
        first, extent = span.start // chunk, -(-span.stop // chunk) - span.start // chunk
        begin, end = ((first + at * extent // count) * chunk for at in (index, index + 1))
        piece = span & Span.range(begin, end)
    return Region((piece, region[1]) if longer == 0 else (region[0], piece))

"""Rewrites of one rank's operations that change when and where, never what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from rma_mm.schedule.ops import Accumulate, Barrier, Broadcast, Copy, GroupOp, Op, Ref, Scale, Shift, Slot
from rma_mm.schedule.symmetry import FINISHED


def prefetch(ops: list[Op], depth: int) -> list[Op]:
    """Issue transfers of panels `depth` panels before the first operation that reads them (`Op.ahead`).

    `ops` must hold no Barrier; a panel is a run of operations with the same step. For what a group brings of an
    operand, only panels count of which it brings something: all members have these, and so agree on the order of calls.
    """
    keys = [(op.group, op.refs[0].operand) if isinstance(op, GroupOp) else None for op in ops]
    begins: dict[object, list[int]] = defaultdict(list)  # the panels that count for each key: all of them for None
    turns: dict[object, int] = {}  # (key, step) → which of these
    for op, key in zip(ops, keys, strict=True):
        for each in dict.fromkeys((None, key)):
            if (each, op.step) not in turns:
                turns[each, op.step] = len(begins[each])
                begins[each].append(turns[None, op.step])
    keyed = []
    panel = 0
    for op, key in zip(ops, keys, strict=True):
        panel = max(panel, turns[None, op.step])  # a sum that was held back belongs to a panel before this one
        ahead = op.ahead(depth)
        turn = turns[key, op.step] - (ahead or 0)
        begin = panel if ahead is None else begins[key][turn] if turn >= 0 else turn
        keyed.append(((begin, ahead is None, -panel), op))  # what is for later panels first
    return [op for _, op in sorted(keyed, key=lambda pair: pair[0])]


def leading(ops: Sequence[Op]) -> tuple[list[list[Op]], list[Op]]:
    """Split operations into those that may begin as soon as A and B are ready, and the rest, in order.

    The former by how many barriers stand before it. It may begin as soon as A and B are there: neither changes, so that
    no barrier before it is for it. But other ranks of a group may begin it behind them.
    """
    lead, rest = list[list[Op]]([[]]), list[Op]()
    for n, op in enumerate(ops):
        if op.ahead(1) is not None and all(_is_given(ref) for ref in sources(op)):
            lead[-1].append(op)
        elif isinstance(op, Scale | Barrier):
            rest.append(op)
            if isinstance(op, Barrier):
                lead.append([])
        else:
            return lead, [*rest, *ops[n:]]
    return lead, rest


def sources(op: Op) -> Sequence[Ref]:
    """Return the references read by an operation that brings parts of A and B."""
    if isinstance(op, Broadcast):
        return op.parts
    assert isinstance(op, Copy | Shift)
    is_shared = isinstance(op.dst.buffer, Slot) and op.dst.buffer.group
    return (op.src, op.dst) if is_shared else (op.src,)


def _is_given(ref: Ref) -> bool:
    return ref.buffer in ("A", "B")


def frames(ops: list[Op], linger: bool) -> list[Op]:
    """Give slots their frames of the scratch pool: slots that are never alive together share one.

    With `linger`, a slot that an Accumulate reads stays alive until the next slot of its kind is done, so that the
    push may still be under way while the next product is formed.
    """
    last: dict[Slot, int] = {}
    pushed: dict[Slot, None] = {}
    for n, op in enumerate(ops):
        for slot in op.slots:
            last[slot] = n
        if op.adds:
            pushed |= dict.fromkeys(op.slots)
    if linger:
        for slot, following in pairwise(pushed):
            last[slot] = max(last[slot], last[following])
    return _framed(ops, last)


def _framed(ops: list[Op], last: dict[Slot, int]) -> list[Op]:
    """Allocate frames by linear scan: a slot takes the free frame whose size fits best, else a new one."""
    free: dict[str, list[str]] = {"A": [], "B": [], "C": [], FINISHED: []}
    sizes: dict[str, int] = {}
    framed: dict[Slot, Slot] = {}
    result = []
    ending: dict[int, list[Slot]] = {}
    for slot, n in last.items():
        ending.setdefault(n, []).append(slot)
    for n, op in enumerate(ops):
        for slot in op.slots:
            if slot.group:  # its ranks have agreed on a frame
                framed[slot] = slot
            elif slot not in framed:
                kind, size = slot.name[0], slot.region.size
                pool = free[kind]
                frame = min(pool, key=lambda f: abs(sizes[f] - size), default=f"{kind}{len(sizes)}")
                if frame in pool:
                    pool.remove(frame)
                sizes[frame] = max(sizes.get(frame, 0), size)
                framed[slot] = replace(slot, frame=frame)
        result.append(op.on_slots(framed.__getitem__))
        for slot in (slot for slot in ending.get(n, ()) if not slot.group):
            free[slot.name[0]].append(framed[slot].frame)
    return result


def frame_sizes(ops: list[Op], rank: int) -> dict[str, int]:
    return {frame: size for (holder, frame), size in frames_used(ops).items() if holder == rank}


def frames_used(ops: list[Op]) -> dict[tuple[int, str], int]:
    """(rank that holds it, frame) → elements, of every frame that a rank's operations touch."""
    sizes: dict[tuple[int, str], int] = {}
    for op in ops:
        for ref in op.refs:
            if isinstance(ref.buffer, Slot):
                key = ref.rank, ref.buffer.frame
                sizes[key] = max(sizes.get(key, 0), ref.buffer.region.size)
    return sizes


def reached(ops: list[Op], rank: int, nodes: Sequence[int]) -> set[str]:
    """Return the homes to which a rank adds by itself, or of which it so reads parts that other ranks hold.

    And those but A and B that groups fill, or of which they bring parts: both are to be complete. `nodes`, of every
    rank, tell which groups may copy by themselves.
    """
    refs = [op.dst for op in ops if isinstance(op, Accumulate)]
    refs += [ref for op in ops if not isinstance(op, GroupOp) for ref in op.refs if ref.rank != rank]
    refs += [ref for op in ops if isinstance(op, Broadcast | Shift) for ref in op.refs if not _is_given(ref)]
    alone = (op for op in ops if isinstance(op, GroupOp) and op.may_copy(nodes))
    refs += [copy.src for op in alone for copy in op.copies(rank)]
    return {ref.buffer for ref in refs if isinstance(ref.buffer, str)}

"""Rewrites of one rank's operations that change when and where, never what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from rma_mm.schedule.ops import Accumulate, Broadcast, Copy, Finish, Multiply, Op, Reduce, Ref, Scale, Shift, Slot


def prefetch(ops: list[Op], depth: int) -> list[Op]:
    """Issue the Copies into slots `depth` panels before the first operation that reads them.

    `ops` must hold no Barrier; a panel is a run of operations with the same step. A Shift of A or B is issued one
    panel ahead, where what it sends has just come; one of C stands where its sum is ready.
    """
    keyed = []
    panel = 0
    for n, op in enumerate(ops):
        panel += n > 0 and op.step != ops[n - 1].step
        ahead = 0
        if isinstance(op, Copy | Broadcast):
            ahead = depth
        elif isinstance(op, Shift) and kind_of(op.dst) != "C":
            ahead = min(1, depth)
        moves = isinstance(op, Copy | Broadcast) or ahead
        keyed.append(((panel - ahead, 0 if moves else 1), op))
    return [op for _, op in sorted(keyed, key=lambda pair: pair[0])]


def frames(ops: list[Op], linger: bool) -> list[Op]:
    """Give slots their frames of the scratch pool: slots that are never alive together share one.

    With `linger`, a slot that an Accumulate reads stays alive until the next slot of its kind is done, so that the
    push may still be under way while the next product is formed.
    """
    last: dict[Slot, int] = {}
    pushed: dict[Slot, None] = {}
    for n, op in enumerate(ops):
        for slot in slots_of(op):
            last[slot] = n
        if isinstance(op, Accumulate | Reduce):
            pushed |= dict.fromkeys(slots_of(op))
    if linger:
        for slot, following in pairwise(pushed):
            last[slot] = max(last[slot], last[following])
    return _framed(ops, last)


def _framed(ops: list[Op], last: dict[Slot, int]) -> list[Op]:
    """Linear scan: a slot takes the free frame whose size fits it best, else a new one."""
    free: dict[str, list[str]] = {"A": [], "B": [], "C": []}
    sizes: dict[str, int] = {}
    framed: dict[Slot, Slot] = {}
    result = []
    ending: dict[int, list[Slot]] = {}
    for slot, n in last.items():
        ending.setdefault(n, []).append(slot)
    for n, op in enumerate(ops):
        for slot in slots_of(op):
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
        result.append(with_slots(op, framed.__getitem__))
        for slot in (slot for slot in ending.get(n, ()) if not slot.group):
            free[slot.name[0]].append(framed[slot].frame)
    return result


def refs_of(op: Op) -> tuple[Ref, ...]:
    """The references of an operation."""
    if isinstance(op, Copy | Accumulate | Shift):
        return (op.src, op.dst)
    if isinstance(op, Multiply):
        return (op.a, op.b, op.c)
    if isinstance(op, Broadcast):
        return (*op.parts, op.dst) if op.dst else op.parts
    if isinstance(op, Reduce):
        return (*op.srcs, *(dst for dst in op.dsts if _is_known(op, dst)))
    return (op.c,) if isinstance(op, Scale | Finish) else ()


def _is_known(op: Reduce, dst: Ref) -> bool:
    """Whether `dst` is a home, or a slot of the rank itself: of others' slots it knows no more than the name."""
    return isinstance(dst.buffer, str) or dst.rank == op.srcs[0].rank


def kind_of(ref: Ref) -> str:
    """The operand that `ref` is a part of: A, B or C."""
    return (ref.buffer.name if isinstance(ref.buffer, Slot) else ref.buffer)[0]


def slots_of(op: Op) -> list[Slot]:
    """The scratch slots that an operation touches."""
    return [ref.buffer for ref in refs_of(op) if isinstance(ref.buffer, Slot)]


def with_slots(op: Op, new: Callable[[Slot], Slot]) -> Op:
    """`op` on other slots."""

    def renamed(ref: Ref) -> Ref:
        return replace(ref, buffer=new(ref.buffer)) if isinstance(ref.buffer, Slot) else ref

    if isinstance(op, Copy | Accumulate | Shift):
        return replace(op, src=renamed(op.src), dst=renamed(op.dst))
    if isinstance(op, Broadcast):
        return replace(op, dst=renamed(op.dst)) if op.dst else op
    if isinstance(op, Reduce):
        dsts = tuple(renamed(dst) if _is_known(op, dst) else dst for dst in op.dsts)
        return replace(op, srcs=tuple(map(renamed, op.srcs)), dsts=dsts)
    if isinstance(op, Multiply):
        return replace(op, a=renamed(op.a), b=renamed(op.b), c=renamed(op.c))
    if isinstance(op, Scale | Finish):
        return replace(op, c=renamed(op.c))
    return op


def frame_sizes(ops: list[Op], rank: int) -> dict[str, int]:
    """Elements that each frame of the rank's scratch pool must hold."""
    return {frame: size for (holder, frame), size in frames_used(ops).items() if holder == rank}


def frames_used(ops: list[Op]) -> dict[tuple[int, str], int]:
    """(rank that holds it, frame) → elements, of every frame that a rank's operations touch."""
    sizes: dict[tuple[int, str], int] = {}
    for op in ops:
        for ref in refs_of(op):
            if isinstance(ref.buffer, Slot):
                key = ref.rank, ref.buffer.frame
                sizes[key] = max(sizes.get(key, 0), ref.buffer.region.size)
    return sizes

"""The pass by which what ranks of one node push to the same part of C is summed on the node before it crosses nodes.

Each rank sums a piece of all its mates' products, and pushes that piece to C's owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rma_mm.geometry.span import Region, even_part
from rma_mm.schedule.ops import Accumulate, Op, Reduce, Ref, Slot

Member = Callable[[int], list[Op]]  # A rank → its operations before any pass


def merging(member: Member, mates: Sequence[int], nodes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Rank of a node (`mates`) → the ranks that it sums with, itself included; absent where it pushes alone."""
    alike: dict[str, list[int]] = {}
    for q in mates:
        pushed = _pushed(member(q))
        crosses = any(nodes[op.dst.rank] != nodes[q] for ops in pushed.values() for op in ops)
        regions = [slot.region for slot in pushed]
        if crosses and len(set(regions)) == len(regions):
            alike.setdefault(repr(regions), []).append(q)
    return {q: tuple(group) for group in alike.values() if len(group) > 1 for q in group}


def merged(ops: list[Op], rank: int, group: tuple[int, ...]) -> list[Op]:
    """`ops` with the products of every slot summed by the group in pieces, and the rank's own piece pushed."""
    pushed = _pushed(ops)
    number = {slot: n for n, slot in enumerate(pushed)}
    result: list[Op] = []
    for op in ops:
        if not isinstance(op, Accumulate) or not isinstance(op.src.buffer, Slot):
            result.append(op)
            continue
        slot = op.src.buffer
        sums = _sums(slot.region, number[slot], group)
        if op is pushed[slot][0]:
            srcs = tuple(Ref(rank, slot, place.region) for place in sums)
            result.append(Reduce(srcs, tuple(sums), group, op.step))
        for place in sums:
            if place.rank == rank and (part := place.region & op.dst.region):
                result.append(Accumulate(replace(place, region=part), replace(op.dst, region=part), op.step))
    return result


def _sums(region: Region, number: int, group: tuple[int, ...]) -> list[Ref]:
    """Return references to the pieces of a region of C: contiguous rows on each rank of the group."""
    rows, cols = region
    pieces = [Region((rows.take(even_part(len(rows), n, len(group))), cols)) for n in range(len(group))]
    return [Ref(q, Slot(f"C~{number}", piece), piece) for q, piece in zip(group, pieces, strict=True) if piece]


def _pushed(ops: Sequence[Op]) -> dict[Slot, list[Accumulate]]:
    """Return the slots of C that are pushed, in order, with all pushes of each."""
    found: dict[Slot, list[Accumulate]] = {}
    for op in ops:
        if isinstance(op, Accumulate) and isinstance(op.src.buffer, Slot):
            found.setdefault(op.src.buffer, []).append(op)
    return found

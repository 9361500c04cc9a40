"""A rank's part of what a group moves, bound to memory and channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rma_mm.runtime.execution.accumulators import Sums
from rma_mm.runtime.execution.addressing import Places, name_of, slots
from rma_mm.schedule.ops import Broadcast, Reduce, Shift, Slot, incoming
from rma_mm.schedule.passes import kind_of
from rma_mm.windows import Transfer
from rma_mm.windows.channel import Channel

SUMS, TAGS = 100, 30_000
"""Tags of reductions: where they begin, and how many there are; MPI promises 32 767."""


@dataclass(frozen=True)
class Bound:
    """A transfer, and what it has to do with the transfers around it."""

    transfer: Transfer
    after: list[str]
    """What must be over before it starts: the filling, or the reading, of a place."""
    during: list[str]
    """What goes on until it is over."""


def bind_group(
    op: Broadcast | Shift | Reduce, places: Places, channel: Callable[[tuple[int, ...]], Channel],
    numbers: dict[tuple[int, ...], int], sums: Sums,
) -> Iterator[Bound]:
    """The transfers of one group operation on this rank; `numbers` counts the reductions of every group."""
    if isinstance(op, Broadcast):
        yield _broadcast(op, places, channel(op.group))
    elif isinstance(op, Shift):
        yield _shift(op, places, channel(tuple(places.schedule.mesh.ranks)))
    else:
        yield from _reduce(op, places, channel(op.group), numbers[op.group], sums)
        numbers[op.group] += len(op.dsts)


def _broadcast(op: Broadcast, places: Places, channel: Channel) -> Bound:
    upright = places.is_upright(op.parts[0])
    mine = next((places.box(part) for part in op.parts if part.rank == places.rank), None)
    theirs = {owner: places.box(place) for owner, place in incoming(op, places.rank)}
    if op.kind == "broadcast":
        owner = op.parts[0].rank
        transfer = channel.broadcast(owner, theirs[owner] if mine is None else mine, upright)
    else:
        transfer = channel.gather(mine, theirs, upright)
    filled = [op.dst] if op.dst else []
    during = [f"fill {name_of(ref)}" for ref in filled] or ["send"]
    return Bound(transfer, [f"read {name}" for name in slots(filled)], during)


def _shift(op: Shift, places: Places, channel: Channel) -> Bound:
    tag = "ABC".index(kind_of(op.dst)) + 1
    transfer = channel.shift(
        places.box(op.src), op.to, places.box(op.dst), op.source, places.is_upright(op.dst), tag
    )  # fmt: skip
    after = [f"fill {name_of(op.src)}", f"read {name_of(op.dst)}"]
    return Bound(transfer, after, [f"fill {name_of(op.dst)}", *(f"read {name}" for name in slots([op.src]))])


def _reduce(op: Reduce, places: Places, channel: Channel, first: int, sums: Sums) -> Iterator[Bound]:
    for n, (src, dst) in enumerate(zip(op.srcs, op.dsts, strict=True)):
        is_mine, is_slot = dst.rank == places.rank, isinstance(dst.buffer, Slot)
        result = places.array(dst, summing=True) if is_mine else None
        tag = SUMS + (first + n) % TAGS
        join = np.copyto if is_slot else sums.join(dst)
        transfer = channel.reduce(places.array(src), dst.rank, result, tag, sums.semiring.add, join)
        filled = [name_of(dst)] if is_mine and is_slot else []
        after = [f"fill {name_of(src)}", *(f"read {name}" for name in filled)]
        yield Bound(transfer, after, [f"read {name_of(src)}", *(f"fill {name}" for name in filled)])

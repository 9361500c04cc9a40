"""A rank's part of what a group moves, bound to memory and channels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.runtime.execution.accumulators import Accumulator
from rma_mm.runtime.execution.addressing import Places, slots
from rma_mm.schedule.ops import Broadcast, Reduce, Shift, Slot
from rma_mm.windows import Transfer
from rma_mm.windows.channel import Channel


@dataclass(frozen=True)
class Bound:
    """A transfer with its dependencies on other transfers."""

    transfer: Transfer
    after: list[str]  # names of the transfers that must complete before it starts
    during: list[str]  # what goes on until it is over


def bind_broadcast(op: Broadcast, places: Places, channel: Channel) -> Bound:
    upright = places.is_upright(op.parts[0])
    mine = [places.box(part) for part in op.parts if part.rank == places.rank]
    theirs = [(move.source, places.box(move.dst)) for move in op.moves(places.rank) if move.dst]
    if op.kind == "broadcast":
        transfer = channel.broadcast(op.parts[0].rank, mine or [box for _, box in theirs], upright)
    else:
        transfer = channel.gather(mine, theirs, upright)
    filled = [op.dst] if op.dst else []
    passed = slots([part for part in op.parts if part.rank == places.rank])
    during = [*(f"fill {ref.place}" for ref in filled), *(f"read {name}" for name in passed)] or ["send"]
    return Bound(transfer, [*(f"read {name}" for name in slots(filled)), *(f"fill {name}" for name in passed)], during)


def bind_shift(op: Shift, places: Places, channel: Channel) -> Bound:
    tag = "ABC".index(op.dst.operand) + 1
    transfer = channel.shift(
        places.box(op.src), op.to, places.box(op.dst), op.source, places.is_upright(op.dst), tag
    )
    after = [f"fill {op.src.place}", f"read {op.dst.place}"]
    return Bound(transfer, after, [f"fill {op.dst.place}", *(f"read {name}" for name in slots([op.src]))])


def bind_reduce(op: Reduce, places: Places, channel: Channel, sums: Accumulator) -> Iterator[Bound]:
    for src, dst in zip(op.srcs, op.dsts, strict=True):
        is_mine, is_slot = dst.rank == places.rank, isinstance(dst.buffer, Slot)
        result = places.array(dst, summing=True) if is_mine else None
        join = np.copyto if is_slot else sums.join(dst)
        transfer = channel.reduce(places.array(src), dst.rank, result, sums.semiring.add, join)
        filled = [dst.place] if is_mine and is_slot else []
        after = [f"fill {src.place}", *(f"read {name}" for name in filled)]
        yield Bound(transfer, after, [f"read {src.place}", *(f"fill {name}" for name in filled)])

"""What a group of ranks moves together: broadcasts, all-gathers, ring shifts and reductions, as prepared transfers.

Both sides take part, so no window is needed: a box of local memory goes out, or comes in, as it lies. The counters say
the same as those of windows: what is moved counts where it arrives, sums where they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from rma_mm.geometry.span import Region
from rma_mm.windows.base import Array, Counters, closed
from rma_mm.windows.copying import strided_elements
from rma_mm.windows.datatypes import ADDED_AS, MOVED_AS, Placed
from rma_mm.windows.waiting import wait_until

FLAT = 4
"""Ranks of a group up to which a broadcast is sent to each directly: libraries send it in halves through all of them,
and every hop waits until a rank that multiplies looks up."""
BROADCAST = 9
"""Tag of direct broadcasts; shifts have those of their operands."""

Box = tuple[Array, Region]
"""Positions of a 2-D array."""
Call = Callable[[], MPI.Request]


class Channel:
    """A communicator over some ranks of a mesh, or over all, for group operations."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], node_of: Sequence[int]) -> None:
        """`ranks` are the mesh's ranks of the members, in their order; `node_of` the node of every rank of the mesh."""
        self.comm, self.ranks, self.node_of = comm, tuple(ranks), node_of
        self.rank = self.ranks[comm.rank]
        self.counters = Counters()

    def count(self, other: int, words: int) -> None:
        """Count one message to or from the mesh's rank `other`."""
        self.counters.add(words, 1, same_node=self.node_of[other] == self.node_of[self.rank])

    def broadcast(self, owner: int, box: Box, upright: bool) -> GroupTransfer:
        """`box` of the owner to the boxes of all the others. `upright`: rows are sent one after the other."""
        transfer = GroupTransfer()
        spec, words = transfer.placed(box, upright)
        root, size = self.ranks.index(owner), len(self.ranks)
        if owner != self.rank:
            transfer.counts.append(partial(self.count, owner, words))
        if size > FLAT:
            transfer.calls.append(lambda: self.comm.Ibcast(spec, root))
        elif owner != self.rank:
            transfer.calls.append(lambda: self.comm.Irecv(spec, root, BROADCAST))
        else:
            others = [member for member in range(size) if member != root]
            transfer.calls += [partial(self.comm.Isend, spec, member, BROADCAST) for member in others]
        return transfer

    def gather(self, mine: Box | None, theirs: dict[int, Box], upright: bool) -> GroupTransfer:
        """`mine` to all the others, and from every rank of `theirs` what goes into its box there."""
        transfer = GroupTransfer()
        sent = [(mine if member != self.rank else None) for member in self.ranks]
        got = [theirs.get(member) for member in self.ranks]
        send, recv = (transfer.spread(boxes, upright) for boxes in (sent, got))
        for owner, (_, region) in theirs.items():
            transfer.counts.append(partial(self.count, owner, region.size))
        transfer.calls.append(lambda: self.comm.Ialltoallw(send, recv))
        return transfer

    def shift(self, mine: Box, to: int, theirs: Box, source: int, upright: bool, tag: int) -> GroupTransfer:
        """`mine` to one rank of the group, and from another what goes into the box `theirs`."""
        transfer = GroupTransfer()
        spec, _ = transfer.placed(mine, upright)
        room, words = transfer.placed(theirs, upright)
        target, origin = self.ranks.index(to), self.ranks.index(source)
        transfer.counts.append(partial(self.count, source, words))
        transfer.calls.append(lambda: self.comm.Irecv(room, origin, tag))
        transfer.calls.append(lambda: self.comm.Isend(spec, target, tag))
        return transfer

    def reduce(self, summand: Array, owner: int, result: Array | None) -> GroupTransfer:
        """The sum of all members' dense `summand` added to the owner's `result`; its own summand is overwritten."""
        transfer = GroupTransfer()
        element, op = ADDED_AS[summand.dtype]
        spec = [summand, summand.size, element]
        root = self.ranks.index(owner)
        if owner == self.rank:
            assert result is not None
            transfer.calls.append(lambda: self.comm.Ireduce(MPI.IN_PLACE, spec, op, root))
            transfer.finish.append(lambda: np.add(result, summand.reshape(result.shape), out=result))
        else:
            transfer.counts.append(partial(self.count, owner, summand.size))
            transfer.calls.append(lambda: self.comm.Ireduce(spec, None, op, root))
        return transfer


class GroupTransfer:
    """Prepared calls of a group; see `base.Transfer`. Every member starts its own, in the same order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.counts: list[Callable[[], None]] = []
        self.finish: list[Callable[[], object]] = []
        self._placed: list[Placed] = []
        self._kept: list[Array] = []
        self._pending: list[MPI.Request] = []
        self._unfinished = False
        self._is_closed = False

    def start(self) -> None:
        """See `base.Transfer`."""
        if self._is_closed:
            raise closed("transfer")
        self._pending = [call() for call in self.calls]
        self._unfinished = True
        for count in self.counts:
            count()

    def done(self) -> bool:
        """See `base.Transfer`."""
        if self._pending and MPI.Request.Testall(self._pending):
            self._pending = []
        if not self._pending and self._unfinished:
            self._unfinished = False
            for finish in self.finish:
                finish()
        return not self._pending

    def wait(self) -> None:
        """See `base.Transfer`."""
        if self._pending or self._unfinished:
            wait_until(self.done)

    def close(self) -> None:
        """See `base.Transfer`."""
        self._is_closed = True
        for placed in self._placed:
            placed.free()
        self._placed, self._kept = [], []

    # -- memory as MPI sees it --------------------------------------------------------------------

    def placed(self, box: Box, upright: bool) -> tuple[list[Any], int]:
        """(memory, count, datatype) of a box, and its words."""
        array, region = box
        if not region:
            return [np.empty(0, np.uint8), 0, MPI.BYTE], 0
        found = self._own(array, region, upright)
        size = region.size * array.itemsize
        return [MPI.buffer.fromaddress(array.ctypes.data + found.start, size), found.count, found.datatype], region.size

    def spread(self, boxes: Sequence[Box | None], upright: bool) -> list[Any]:
        """(memory, (counts, displacements), datatypes) of one box for each member; None where there is none."""
        counts, starts, types = [0] * len(boxes), [0] * len(boxes), [MPI.BYTE] * len(boxes)
        base: Array | None = None
        for n, box in enumerate(boxes):
            if box is not None and box[1]:
                found = self._own(*box, upright)
                base = box[0] if base is None else base
                starts[n] = found.start + box[0].ctypes.data - base.ctypes.data
                counts[n], types[n] = found.count, found.datatype
        memory = MPI.BOTTOM if base is None else MPI.buffer.fromaddress(base.ctypes.data, base.nbytes)
        return [memory, (counts, starts), types]

    def _own(self, array: Array, region: Region, upright: bool) -> Placed:
        """The datatype of a box, kept with its memory until `close`."""
        rows, cols = ((span, stride) for span, stride in zip(region, strided_elements(array), strict=True))
        outer, inner = (rows, cols) if upright else (cols, rows)
        found = Placed(MOVED_AS[array.itemsize], array.itemsize, outer, inner)
        self._placed.append(found)
        self._kept.append(array)
        return found

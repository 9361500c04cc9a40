"""Group transfers: broadcasts, all-gathers, ring shifts and reductions, as prepared transfers.

Both sides take part, so no window is needed: a box of local memory goes out, or comes in, as it lies. The counters say
the same as those of windows: what is moved counts where it arrives, sums where they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from rma_mm.geometry.span import Region
from rma_mm.windows.base import Array, Counters, closed
from rma_mm.windows.boxes.copying import strided_elements
from rma_mm.windows.boxes.datatypes import ADDED_AS, MOVED_AS, Placed
from rma_mm.windows.waiting import wait_until

FLAT = 4
"""Ranks of a group up to which a broadcast is sent to each directly: libraries send it in halves through all of them,
and every hop waits until a rank that multiplies looks up."""
PIECE = 2**20  # bytes of a reduction that are under way at a time from one rank
BROADCAST, GATHER = 9, 10  # tags of direct broadcasts and gathers; shifts have those of their operands
SUMS, TAGS = 100, 30_000  # tags of reductions: where they begin, and how many there are; MPI promises 32 767

Box = tuple[Array, Region]  # positions of a 2-D array
Call = Callable[[], MPI.Request]
Join = Callable[[Array, Array], object]
"""(result, total): what becomes of the total of a reduction, which may be overwritten."""


def added(result: Array, total: Array) -> None:
    np.add(result, total, out=result)


class Channel:
    """A communicator over some ranks of a mesh, or over all, for group operations."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], node_of: Sequence[int]) -> None:
        """`ranks` are the mesh's ranks of the members, in their order; `node_of` the node of every rank of the mesh."""
        self.comm, self.ranks, self.node_of = comm, tuple(ranks), node_of
        self.rank = self.ranks[comm.rank]
        self.counters = Counters()
        self._rooms: list[NDArray[np.uint8]] = []
        self._sums = 0  # reductions begun: every member begins the same ones in the same order

    def room(self) -> NDArray[np.uint8]:
        return self._rooms.pop() if self._rooms else np.empty(PIECE, np.uint8)

    def give_back(self, room: NDArray[np.uint8]) -> None:
        self._rooms.append(room)

    def tag_of_sum(self) -> int:
        """Return the tag of the reduction that begins now, of which others that are under way have none."""
        self._sums += 1
        return SUMS + self._sums % TAGS

    def count(self, other: int, words: int) -> None:
        self.counters.add(words, 1, same_node=self.node_of[other] == self.node_of[self.rank])

    def broadcast(self, owner: int, boxes: Sequence[Box], upright: bool) -> GroupTransfer:
        """`boxes` of the owner to those of all the others. `upright`: rows are sent one after the other."""
        if len(self.ranks) <= FLAT:
            mine, theirs = (boxes, ()) if owner == self.rank else ((), [(owner, box) for box in boxes])
            return self._directly(mine, theirs, upright, BROADCAST)
        transfer = GroupTransfer()
        for box in boxes:
            spec, words = transfer.placed(box, upright)
            if owner != self.rank:
                transfer.counts.append(partial(self.count, owner, words))
            transfer.calls.append(partial(self.comm.Ibcast, spec, self.ranks.index(owner)))
        return transfer

    def gather(self, mine: Iterable[Box], theirs: Iterable[tuple[int, Box]], upright: bool) -> GroupTransfer:
        """Send the boxes `mine` to all other members, and receive (owner, box) from each in the order it sends them.

        Sent to each directly: Open MPI 5.0 takes MPI_Ialltoallw with both buffers at one address, as where a rank's
        own part lies in the result, for MPI_IN_PLACE (it hangs, or moves nothing), and displacements of 31 bits only.
        """
        return self._directly(mine, theirs, upright, GATHER)

    def _directly(
        self, mine: Iterable[Box], theirs: Iterable[tuple[int, Box]], upright: bool, tag: int
    ) -> GroupTransfer:
        transfer = GroupTransfer()
        for owner, box in theirs:
            spec, words = transfer.placed(box, upright)
            transfer.counts.append(partial(self.count, owner, words))
            if words:
                transfer.calls.append(partial(self.comm.Irecv, spec, self.ranks.index(owner), tag))
        others = [member for member in range(len(self.ranks)) if self.ranks[member] != self.rank]
        for box in mine:
            spec, words = transfer.placed(box, upright)
            if words:
                transfer.calls += [partial(self.comm.Isend, spec, member, tag) for member in others]
        return transfer

    def shift(self, mine: Box, to: int, theirs: Box, source: int, upright: bool, tag: int) -> GroupTransfer:
        """Send `mine` to one member, and receive the box `theirs` from another."""
        transfer = GroupTransfer()
        spec, _ = transfer.placed(mine, upright)
        room, words = transfer.placed(theirs, upright)
        target, origin = self.ranks.index(to), self.ranks.index(source)
        transfer.counts.append(partial(self.count, source, words))
        transfer.calls.append(lambda: self.comm.Irecv(room, origin, tag))
        transfer.calls.append(lambda: self.comm.Isend(spec, target, tag))
        return transfer

    def reduce(
        self, summand: Array, owner: int, result: Array | None, add: np.ufunc = np.add, join: Join = added
    ) -> GroupTransfer:
        """Every member's dense `summand`, added up by `add`, the owner's first; the owner's `result` joins the sum.

        Sent to the owner directly and in pieces: libraries hold a second copy of the whole.
        """
        flat = np.asarray(summand.reshape(-1))
        pieces = [flat[start : start + PIECE // flat.itemsize] for start in range(0, flat.size, PIECE // flat.itemsize)]
        if owner != self.rank:
            return SummandTransfer(self, pieces, owner)
        assert result is not None
        return SumTransfer(self, pieces, summand, result, add, join)


class GroupTransfer:
    """Prepared calls of a group; see `base.Transfer`. Every member starts its own, in the same order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.counts: list[Callable[[], None]] = []
        self._placed: list[Placed] = []
        self._kept: list[Array] = []
        self._pending: list[MPI.Request] = []
        self._is_closed = False

    def start(self) -> None:
        if self._is_closed:
            raise closed("transfer")
        self._pending = [call() for call in self.calls]
        for count in self.counts:
            count()

    def done(self) -> bool:
        if self._pending and MPI.Request.Testall(self._pending):
            self._pending = []
        return not self._pending

    def wait(self) -> None:
        wait_until(self.done)

    def close(self) -> None:
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

    def _own(self, array: Array, region: Region, upright: bool) -> Placed:
        """Return the datatype of a box, kept with its memory until `close`."""
        rows, cols = ((span, stride) for span, stride in zip(region, strided_elements(array), strict=True))
        outer, inner = (rows, cols) if upright else (cols, rows)
        found = Placed(MOVED_AS[array.itemsize], array.itemsize, outer, inner)
        self._placed.append(found)
        self._kept.append(array)
        return found


class SummandTransfer(GroupTransfer):
    """A reduction as the other members see it: pieces go to the owner."""

    def __init__(self, channel: Channel, pieces: list[Array], owner: int) -> None:
        super().__init__()
        self._channel, self._root = channel, channel.ranks.index(owner)
        self._specs = [[piece, piece.size, ADDED_AS[piece.dtype]] for piece in pieces]
        self.counts.append(partial(channel.count, owner, sum(piece.size for piece in pieces)))

    def start(self) -> None:
        send, tag = self._channel.comm.Isend, self._channel.tag_of_sum()
        self.calls = [partial(send, spec, self._root, tag) for spec in self._specs]
        super().start()


class SumTransfer(GroupTransfer):
    """The owner's side of a reduction: pieces come from one member after the other, and are added as they come."""

    def __init__(
        self, channel: Channel, pieces: list[Array], summand: Array, result: Array, add: np.ufunc, join: Join
    ) -> None:
        super().__init__()
        self._channel, self._pieces, self._add, self._join = channel, pieces, add, join
        self._summand, self._result = summand, result
        self._steps: Iterator[MPI.Request] = iter(())
        self._request: MPI.Request | None = None

    def start(self) -> None:
        if self._is_closed:
            raise closed("transfer")
        self._steps = self._received(self._channel.tag_of_sum())
        self._request = next(self._steps, None)

    def done(self) -> bool:
        while self._request is not None and self._request.Test():
            self._request = next(self._steps, None)
        return self._request is None

    def _received(self, tag: int) -> Iterator[MPI.Request]:
        """Yield requests to wait for; add each received piece while the next one is in transit."""
        comm, dtype = self._channel.comm, self._summand.dtype
        members = [(comm.rank + n) % comm.size for n in range(1, comm.size)]  # so that owners do not queue up
        wanted = [(member, piece) for member in members for piece in self._pieces]
        rooms = [self._channel.room() for _ in range(2)]

        def ask(n: int) -> MPI.Request:
            member, piece = wanted[n]
            return comm.Irecv([rooms[n % 2][: piece.nbytes], piece.size, ADDED_AS[dtype]], member, tag)

        requests = [ask(n) for n in range(min(2, len(wanted)))]
        for n, (_, piece) in enumerate(wanted):
            yield requests[n % 2]
            self._add(piece, rooms[n % 2][: piece.nbytes].view(dtype), out=piece)
            if n + 2 < len(wanted):
                requests[n % 2] = ask(n + 2)
        for room in rooms:
            self._channel.give_back(room)
        self._join(self._result, self._summand.reshape(self._result.shape))

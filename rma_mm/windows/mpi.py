"""One-sided calls of the MPI flavours, in one passive-target epoch that lasts as long as the window."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from threading import RLock
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from rma_mm.errors import DtypeError, WindowError
from rma_mm.geometry.span import Span
from rma_mm.windows.base import (
    Array,
    NotBegunError,
    Patch,
    Transfer,
    check_addable,
    check_extent,
    closed,
)
from rma_mm.windows.boxes.copying import Box, axes, chunks, strided_elements
from rma_mm.windows.boxes.datatypes import ADDED_AS, MOVED_AS, Placed, operation, trusted
from rma_mm.windows.hosts.huge_pages import Remapped
from rma_mm.windows.hosts.mappings import Kept
from rma_mm.windows.ranks import node_map
from rma_mm.windows.reach import Reach
from rma_mm.windows.waiting import add_poller, barrier, wait, wait_until

CHUNK_BYTES = 2**30  # most bytes of one MPI call, so that counts stay below 2^31 in any element type
EMULATED_BYTES = 2**21  # most bytes of an accumulate to memory out of reach
PACKETS = 16  # tests of a transfer at each look: where MPI emulates it, a test moves a packet of about 16 KiB
GETS, LOOK = 2, 5e-3
"""Gets that are under way to one rank of another node, and the seconds for which more may keep the link busy.

Over TCP what a rank asks for comes behind what it was asked for before. With three gets of 2 MiB or more under way from
either side, one side 20 ms later than the other, MPICH moved one way after the other: 19 of them took 0.66 s at
1 Gbit/s, and 0.35 s one at a time; accumulates did so with two. While ranks multiply, one get at a time leaves gaps:
4096³ by rows on two hosts of two ranks took 0.84 s, with two 0.78 s.
"""
OUTSTANDING = 64  # most requests under way to one target: Open MPI over UCX aborts at 255


def window_info() -> MPI.Info:
    """Return the hints of the windows for MPI; the caller frees them.

    same_op is of accumulates to the same place that nothing keeps apart: other operations come after a flush and a
    barrier (tickets have a place of their own).
    """
    return MPI.Info.Create(
        {
            "alloc_shared_noncontig": "true",
            "same_disp_unit": "true",
            "accumulate_ops": "same_op",
            "accumulate_ordering": "none",
        }
    )


class Call(NamedTuple):
    """The arguments of one MPI call."""

    origin: list[Any]
    target: list[Any]
    words: int
    messages: int  # 1, or 0 for a further piece of what counts as one


class CallLine:
    """Calls to one rank that are under way, and transfers that have calls to make yet, first come, first served."""

    def __init__(self) -> None:
        self.under_way: deque[tuple[MPI.Request, int]] = deque()  # what may be, oldest first, with its words
        self.waiting: deque[MpiTransfer] = deque()
        self._begun, self._moved = 0.0, 0  # when there had been none the last time, and the words since then
        self._rate = 0.0  # words per second, the highest seen

    def has_room(self) -> bool:
        first, count = self.waiting[0], len(self.under_way)
        if count < (1 if first.op else GETS):
            return True
        words = first.held[0].words + sum(words for _, words in self.under_way)
        return count < OUTSTANDING and words <= self._rate * LOOK

    def note_begun(self, request: MPI.Request, words: int) -> None:
        if not self.under_way:
            self._begun, self._moved = perf_counter(), 0
        self.under_way.append((request, words))

    def note_over(self) -> None:
        """Forget the oldest call, which is over."""
        self._moved += self.under_way.popleft()[1]
        self._rate = max(self._rate, self._moved / max(1e-6, perf_counter() - self._begun))


class Exposed(NamedTuple):
    """Memory of all ranks, and the MPI windows over it."""

    window: MPI.Win  # spans all ranks in byte displacements, and serves every MPI call
    bases: dict[int, NDArray[np.uint8]]  # the memory within reach by rank, this rank's own included
    sizes: tuple[int, ...]  # bytes that each rank exposes
    others: tuple[MPI.Win, ...] = ()
    """Further windows over the same memory, synchronised and freed together with the first."""
    owner: MPI.Win | None = None  # the one whose freeing unmaps the memory; None if arrays keep it
    node: MPI.Comm = MPI.COMM_NULL
    """The communicator of `owner`, freed after it: MPICH 5.0.2 corrupts other windows if it is freed first."""
    remapped: Remapped | None = None
    """The further mapping of the owner's memory that `bases` show, closed after it."""


class MpiWindow(Reach):
    """A window over MPI; the flavours differ in where the memory comes from (`exposed`). See `base.Window`."""

    flavour = "mpi"

    def __init__(
        self, comm: MPI.Intracomm, memory: Any, *, node_of: tuple[int, ...] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Expose new memory of this size, or an array if the flavour accepts it. Collective over `comm`.

        `node_of` may be finer than the true nodes. Raises as `exposed` does.
        """
        nodes = node_map(comm) if node_of is None else node_of
        info = window_info()
        try:
            made = self.exposed(comm, memory, nodes, info)
        finally:
            info.Free()
        super().__init__(comm.rank, nodes, made.sizes, made.bases)
        self._comm, self._win, self._wins = comm, made.window, (made.window, *made.others)
        self._owner, self._node, self._remapped = made.owner, made.node, made.remapped
        self.chunk_bytes = min(chunk_bytes, CHUNK_BYTES)
        self._lines: defaultdict[int, CallLine] = defaultdict(CallLine)
        self._unflushed: set[int] = set()
        self.failures: dict[int, MPI.Exception] = {}
        """Errors, by identity of the request, that their transfers have not seen yet."""
        self.lock = RLock()
        self._tickets = np.empty(2, np.int64)
        for each in self._wins:
            each.Lock_all(MPI.MODE_NOCHECK)

    @classmethod
    def exposed(cls, comm: MPI.Intracomm, memory: Any, nodes: tuple[int, ...], info: MPI.Info) -> Exposed:
        """Return the memory of a flavour. Collective. Raises WindowError, on every rank, for what cannot be exposed."""
        raise NotImplementedError

    def get(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Transfer:
        self.check(rank, target, origin, rows, cols, lands=True)
        if rank in self._bases:
            return self.copy(rank, target, origin, rows, cols)
        if origin.itemsize not in MOVED_AS:
            raise DtypeError(f"{self.flavour}: items of dtype {origin.dtype} must have {list(MOVED_AS)} bytes")
        return MpiTransfer(self, rank, MOVED_AS[origin.itemsize], None, target, origin, rows, cols)

    def accumulate(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, op: str = "SUM") -> Transfer:
        """See `base.Window`. Always through MPI and one window, whoever the target is: only so is it atomic."""
        self.check(rank, target, origin, rows, cols)
        check_addable(self.flavour, origin.dtype, op)
        element = ADDED_AS[origin.dtype]
        return MpiTransfer(self, rank, element, operation(origin.dtype, op), target, origin, rows, cols)

    def fetch_add(self, rank: int, offset: int, value: int) -> int:
        self.require_open()
        check_extent(self.flavour, offset, offset + 8, self._sizes[rank])
        origin, result = ([part, 1, MPI.INT64_T] for part in (self._tickets[:1], self._tickets[1:]))
        with self.lock:
            # a request, and not Fetch_and_op with a flush: those spin inside MPI until a busy target answers
            self._tickets[0] = value
            failing: type[WindowError] = NotBegunError
            try:
                request = self._win.Rget_accumulate(origin, result, rank, (offset, 1, MPI.INT64_T), MPI.SUM)
                failing = WindowError
                wait(request)
            except MPI.Exception as error:
                raise failing(f"{self.flavour}: {error}") from error
            self.count(rank, words=0)
            return int(self._tickets[1])

    def peek(self, rank: int, starts: Sequence[int], out: NDArray[np.uint8]) -> None:
        self.require_open()
        for top in range(0, len(starts), OUTSTANDING):
            with self.lock:
                places = zip(out[top : top + OUTSTANDING], starts[top : top + OUTSTANDING], strict=True)
                asked = [self._win.Rget(line, rank, start) for line, start in places]
            for request in asked:
                wait(request)

    def flush(self) -> None:
        self.require_open()
        for rank in list(self._lines):
            wait_until(partial(self._has_begun_pushes, rank))
        with self.lock:
            try:
                for rank in self._unflushed:
                    line = self._lines[rank]
                    while line.under_way:  # waiting for the requests first keeps the spinning inside Flush short
                        wait(line.under_way[0][0])
                        line.note_over()
                    self._win.Flush(rank)
            except MPI.Exception as error:
                raise WindowError(f"{self.flavour}: {error}") from error
            self._unflushed.clear()

    def sync(self) -> None:
        self.require_open()
        for each in self._wins:
            each.Sync()

    def close(self, leave_memory: bool = False) -> None:
        """See `base.Window`. After MPI_Finalize it does nothing."""
        if self.is_closed:
            return
        if not MPI.Is_finalized():
            self._unflushed.update(self._lines)
            self.flush()
            if self._comm != MPI.COMM_NULL:
                barrier(self._comm)
            kept = Kept(self._bases.values() if leave_memory else ())
            is_freed = not leave_memory or self._comm.allreduce(self._owner is None or kept.is_whole, MPI.LAND)
            for each in self._wins:
                each.Unlock_all()
                if is_freed or each is not self._owner:
                    each.Free()
            kept.put_back()
            if self._node != MPI.COMM_NULL and is_freed:
                self._node.Free()
        if self._remapped is not None and not leave_memory:
            self._remapped.close()
        for rank in self._lines:
            _far_lines.pop((self, rank), None)
        self.forget_memory()

    # -- for transfers ----------------------------------------------------------------------------

    def begin(self, transfer: MpiTransfer, rank: int) -> None:
        """Make the calls of a transfer; to a rank of another node when it is their turn."""
        if self._node_of[rank] == self._node_of[self._rank]:
            while transfer.held:
                transfer.call()
            return
        if (self, rank) not in _far_lines:
            _far_lines[self, rank] = None
            add_poller(_advance_all)
        self._lines[rank].waiting.append(transfer)
        self.advance(rank)

    def advance(self, rank: int) -> None:
        """Make the calls to a rank of another node whose turn it is."""
        line = self._lines[rank]
        if not line.waiting:
            return
        with self.lock:
            self._forget_over(line)
            while line.waiting:
                if not line.waiting[0].held:
                    line.waiting.popleft()
                elif line.has_room():
                    line.waiting[0].call()
                else:
                    break

    def _has_begun_pushes(self, rank: int) -> bool:
        self.advance(rank)
        return all(each.op is None for each in self._lines[rank].waiting)

    def _forget_over(self, line: CallLine) -> None:
        while line.under_way and self._is_over(line.under_way[0][0]):
            line.note_over()

    def issue(self, rank: int, call: Call, op: MPI.Op | None) -> MPI.Request:
        """Make one MPI call, after the oldest one to the same target if too many are under way."""
        line = self._lines[rank]
        self._forget_over(line)
        while len(line.under_way) >= OUTSTANDING:
            wait_until(partial(self._is_over, line.under_way[0][0]))
            line.note_over()
        try:
            if op is None:
                request = self._win.Rget(call.origin, rank, call.target)
            else:
                request = self._win.Raccumulate(call.origin, rank, call.target, op)
                self._unflushed.add(rank)
        except MPI.Exception as error:
            raise NotBegunError(f"{self.flavour}: {error}") from error
        line.note_begun(request, call.words)
        return request

    def _is_over(self, request: MPI.Request) -> bool:
        """True if a request is complete; that it failed is for its transfer to hear."""
        try:
            return bool(request.Test())
        except MPI.Exception as error:
            self.failures[id(request)] = error
            return True


class MpiTransfer:
    """A prepared get (`op` is None) or accumulate: usually one MPI call, several above `chunk_bytes`."""

    def __init__(
        self, window: MpiWindow, rank: int, element: MPI.Datatype, op: MPI.Op | None, target: Patch, origin: Array,
        rows: Span, cols: Span,
    ) -> None:
        """The arguments are already checked; `element` is the MPI type of one item of `origin`."""
        self._window, self._rank, self.op = window, rank, op
        self._origin = origin
        self._placed: list[Placed] = []
        self._pending: list[MPI.Request] = []
        self.held: deque[Call] = deque()  # calls that wait for their turn
        self._failure: WindowError | None = None  # of the last of them that was made
        self._is_closed = False
        self._calls = [
            self._call(element, target.part(*there), here, is_first=n == 0)
            for piece in chunks(target, rows, cols, origin.itemsize, self._chunk_bytes())
            for n, (there, here) in enumerate(self._parted(*piece, target.strides))
        ]

    def _chunk_bytes(self) -> int:
        """Most bytes of a call: where MPI emulates an accumulate, its target buffers each call whole."""
        is_emulated = self.op is not None and not self._window.reaches(self._rank)
        return min(self._window.chunk_bytes, EMULATED_BYTES) if is_emulated else self._window.chunk_bytes

    def start(self) -> None:
        if self._is_closed:
            raise closed("transfer")
        window = self._window
        window.require_open()
        with window.lock:
            if not self.done():
                raise WindowError("transfer: started again before it was done; wait for it first")
            self._pending, self.held = [], deque(self._calls)
            window.begin(self, self._rank)
            self._raise()
            for call in self._calls:  # now, and not when it is their turn: whoever counts looks from start to start
                window.count(self._rank, call.words, call.messages)

    def call(self) -> None:
        """Make the next call; if it fails, none that follow, and note it."""
        try:
            self._pending.append(self._window.issue(self._rank, self.held.popleft(), self.op))
        except NotBegunError as error:
            has_begun = len(self.held) + 1 < len(self._calls)
            self._failure = WindowError(str(error)) if has_begun else error
            self.held.clear()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def done(self) -> bool:
        if not (self._pending or self.held or self._failure):
            return True
        with self._window.lock:
            if self.held:
                self._window.advance(self._rank)
            self._raise()
            pending, failures = self._pending, self._window.failures
            try:
                while pending and any(pending[-1].Test() for _ in range(PACKETS)):
                    request = pending.pop()
                    if failures and (failure := failures.pop(id(request), None)):
                        raise failure
            except MPI.Exception as error:
                raise WindowError(f"{self._window.flavour}: {error}") from error
            return not (pending or self.held)

    def wait(self) -> None:
        wait_until(self.done)

    def close(self) -> None:
        self._is_closed = True
        self.held.clear()
        for placed in self._placed:
            placed.free()
        self._placed = []

    def _parted(self, there: Box, here: Box, strides: tuple[int, int]) -> list[tuple[Box, Box]]:
        """Return a get in pieces that MPI may be trusted with (`datatypes.trusted`)."""
        if self.op is not None:
            return [(there, here)]
        slow, fast = axes(strides)
        far, near = (
            ((box[slow], step[slow]), (box[fast], step[fast]))
            for box, step in ((there, strides), (here, strided_elements(self._origin)))
        )
        parts = [pair if slow == 0 else pair[::-1] for pair in trusted(far, near, self._origin.itemsize)]
        return [
            ((there[0].take(rows), there[1].take(cols)), (here[0].take(rows), here[1].take(cols)))
            for rows, cols in parts
        ]

    def _call(self, element: MPI.Datatype, target: Patch, here: Box, is_first: bool) -> Call:
        """Both sides visit the elements along the target's closest axis first, so that they pair up."""
        itemsize = self._origin.itemsize
        slow, fast = axes(target.strides)
        there = (target.rows, target.cols)
        strides = strided_elements(self._origin)
        far = Placed(element, itemsize, (there[slow], target.strides[slow]), (there[fast], target.strides[fast]))
        near = Placed(element, itemsize, (here[slow], strides[slow]), (here[fast], strides[fast]))
        self._placed += [far, near]
        words = near.count * near.datatype.Get_size() // itemsize
        # MPI wants an address only, and mpi4py takes no strided array; self._origin keeps the memory alive
        memory = MPI.buffer.fromaddress(self._origin.ctypes.data + near.start, words * itemsize)
        return Call(
            [memory, near.count, near.datatype], [target.offset + far.start, far.count, far.datatype], words,
            int(is_first),
        )


_far_lines: dict[tuple[MpiWindow, int], None] = {}  # of all windows, to ranks of other nodes


def _advance_all() -> None:
    for window, rank in list(_far_lines):
        window.advance(rank)

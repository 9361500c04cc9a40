"""Windows over UCX: no transfer within a node waits for its owner, whose own arrays are read where they lie.

Completion, ordering and visibility:

- A get is done when its data have landed. An accumulate is done when it is complete at its target, and then visible to
  loads there and to gets of any rank: `flush` has only those to wait for that were not waited for yet.
- Nothing orders two transfers that are under way, not even to the same target; who needs an order waits in between.
- An accumulate takes a lock of its target (a word in memory of UCX, taken by an atomic swap), reads, adds in the
  types of NumPy, writes, flushes, and gives the lock back. So it is atomic against every other accumulate, of any
  operation and element type, and its target does nothing for it. UCX itself adds integers of 4 and 8 bytes only, and
  takes one call for each. Memory in reach is read and written in place, other by gets and puts.
- Tickets are atomics of UCX; in callers' arrays, where those would wait for the owner, they go under the lock.
- Within a node callers' arrays are read and written by cross memory attach (`attach`). Between nodes over TCP the
  target takes part, in a thread that sleeps until something comes: no transfer waits until a multiply, or a wait in
  MPI, is over.
- What fails raises WindowError, and names the other rank. Of a process that is gone UCX may say nothing: ranks watch
  each other's heartbeats, as with every window, and end the job.
"""

from __future__ import annotations

import ctypes as C
import os
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from rma_mm.elements.reduction import REDUCTIONS
from rma_mm.errors import AbsentError, MemoryLimitError, WindowError
from rma_mm.flavours import CREATED, UCX, UCX_ARRAYS
from rma_mm.geometry.span import Span
from rma_mm.windows import libucp
from rma_mm.windows.attach import Attached
from rma_mm.windows.base import Array, NotBegunError, Patch, Transfer, check_addable, check_extent, closed
from rma_mm.windows.boxes.copying import axes, chunks, paired_views, strided_elements
from rma_mm.windows.boxes.runs import Runs, runs_of
from rma_mm.windows.libucp import Done, Endpoint, Mapped, Steps, Ucp
from rma_mm.windows.ranks import exposed_sizes, node_map
from rma_mm.windows.reach import Pairs, Reach, array_problem, exposed_bytes, given_array, spanned_bytes
from rma_mm.windows.waiting import barrier, wait_until

NUMBERS = count()  # numbers of the windows of this process
PAGE = 4096  # bytes of a page
SECTION = 2**21  # most bytes that are added under one lock: others are to have their turn


class Peer(NamedTuple):
    """A rank, or this one, as a window reaches it."""

    endpoint: Endpoint
    key: Any
    base: int  # address of what it exposes, there
    lock_key: Any
    lock: int  # address of the lock under which it is added to, there


class UcxWindow(Reach):
    """Memory that UCX allocates, so that ranks of a node load it in place, and atomics work. See `base.Window`."""

    flavour = UCX.name

    def __init__(
        self, comm: MPI.Intracomm, memory: int | NDArray[Any], *, node_of: tuple[int, ...] | None = None,
        chunk_bytes: int = SECTION,
    ) -> None:
        """Collective over `comm`. Raises, on every rank, AbsentError, MemoryLimitError, WindowError."""
        self._comm = comm
        nodes = node_map(comm) if node_of is None else node_of
        sizes = exposed_sizes(comm, *self.wanted(memory))
        self.ucp: Ucp = agreed(comm, libucp.start, AbsentError)
        self.chunk_bytes = min(chunk_bytes, SECTION)
        self.under_way: set[UcxTransfer] = set()
        self._memory, own = agreed(comm, lambda: self.exposed(memory), MemoryLimitError)
        key = self._memory.key if self._memory is not None else b""
        facts = (self.ucp.address, key, own.ctypes.data, os.getpid(), self.ucp.locks.key, self.ucp.locks.address)
        self.facts_of_ranks: list[tuple[Any, ...]] = comm.allgather((*facts, next(NUMBERS)))
        self.lock_at = self.facts_of_ranks[0][-1] % libucp.LOCKS * libucp.LOCK
        self.peers: dict[int, Peer] = {}

        def found() -> dict[int, NDArray[np.uint8]]:
            self.peer((comm.rank + 1) % comm.size)  # where UCX reaches nobody it says so now
            return self.reached(comm.rank, nodes, sizes, own)

        bases = agreed(comm, found, AbsentError)
        super().__init__(comm.rank, nodes, sizes, bases)
        if len(set(nodes)) > 1:
            self.ucp.listen()

    @classmethod
    def absent(cls) -> str:
        """Return why such windows are unavailable here; empty if they are available."""
        try:
            libucp.start()
        except AbsentError as error:
            return str(error)
        return ""

    def wanted(self, memory: Any) -> tuple[int, str | None]:
        return memory, None

    def exposed(self, memory: Any) -> tuple[Mapped | None, NDArray[np.uint8]]:
        """New memory, and its bytes. Raises WindowError if there is too little."""
        if not memory:
            return None, np.empty(0, np.uint8)
        found = self.ucp.expose(None, memory)
        own = bytes_at(found.address, memory)
        own[::PAGE] = 0  # pages are only promised until touched: take them now, on this rank's side of the machine
        return found, own

    def reached(
        self, rank: int, nodes: tuple[int, ...], sizes: tuple[int, ...], own: NDArray[np.uint8]
    ) -> dict[int, NDArray[np.uint8]]:
        """Return the memory of the ranks of this node. Raises WindowError if UCX maps none of another's."""
        bases = {rank: own}
        for other, node in enumerate(nodes):
            if node == nodes[rank] and other != rank:
                bases[other] = self.mapped(other, sizes[other]) if sizes[other] else np.empty(0, np.uint8)
        return bases

    def mapped(self, rank: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the memory of a rank of this node, where this process sees it."""
        pointer, peer = C.c_void_p(), self.peer(rank)
        status = self.ucp.lib.ucp_rkey_ptr(peer.key, peer.base, C.byref(pointer))
        if status != libucp.OK or pointer.value is None:
            tls = os.environ.get("UCX_TLS", "")
            raise WindowError(
                f"UCX maps no memory of another process of the node ({libucp.message(status)}); "
                + (f"UCX_TLS is {tls}: add sm to it" if tls else "let them share it (docker run --ipc=host --pid=host)")
                + f", or use the window '{UCX_ARRAYS.name}'"
            )
        return bytes_at(pointer.value, nbytes)

    def peer(self, rank: int) -> Peer:
        """Return the way to a rank, made when it is first asked for. Raises WindowError."""
        found = self.peers.get(rank)
        if found is None:
            address, key, base, _, lock_key, lock, _ = self.facts_of_ranks[rank]
            endpoint = self.ucp.endpoint(address)
            keys = endpoint.key(key) if key else None, endpoint.lock_key(lock_key)
            found = self.peers[rank] = Peer(endpoint, keys[0], base, keys[1], lock + self.lock_at)
        return found

    def get(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Transfer:
        self.check(rank, target, origin, rows, cols, lands=True)
        if rank in self._bases:
            return self.copy(rank, target, origin, rows, cols)
        return UcxGet(self, rank, target, origin, rows, cols)

    def accumulate(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, op: str = "SUM") -> Transfer:
        self.check(rank, target, origin, rows, cols)
        check_addable(self.flavour, origin.dtype, op)
        return UcxAccumulate(self, rank, target, origin, rows, cols, op)

    def fetch_add(self, rank: int, offset: int, value: int) -> int:
        self.require_open()
        check_extent(self.flavour, offset, offset + 8, self._sizes[rank])
        transfer = UcxTicket(self, rank, offset, value)
        transfer.start()
        transfer.wait()
        return transfer.ticket

    def peek(self, rank: int, starts: Sequence[int], out: NDArray[np.uint8]) -> None:
        self.require_open()
        for start, line in zip(starts, out, strict=True):
            wait_until(self.mover(rank, line, start, one_run(line.size))(False))

    def flush(self) -> None:
        self.require_open()
        for transfer in [each for each in self.under_way if each.adds]:
            transfer.wait()

    def sync(self) -> None:
        """See `base.Window`. What is written is seen: locks of Python, through which all calls go, order memory."""
        self.require_open()
        with self.ucp.lock:
            pass

    def close(self, leave_memory: bool = False) -> None:
        """See `base.Window`. After MPI_Finalize it does nothing but forget."""
        if self.is_closed:
            return
        if not MPI.Is_finalized():
            for transfer in list(self.under_way):
                transfer.wait()
            if self._comm != MPI.COMM_NULL:
                barrier(self._comm)
            with self.ucp.lock:
                for peer in self.peers.values():
                    if peer.key is not None and not leave_memory:
                        self.ucp.lib.ucp_rkey_destroy(peer.key)
            if self._memory is not None and not leave_memory:
                self.ucp.hide(self._memory)
        self.peers = {}
        self.forget_memory()

    # -- for transfers ----------------------------------------------------------------------------

    def sure(self, rank: int, begin: Callable[..., Done], *arguments: Any) -> Done:
        """Begin a transfer with a rank, and return a test of its completion. Of what fails the rank is named."""
        what = f"{self.flavour}: transfer with rank {rank}"
        try:
            found = begin(*arguments)
        except WindowError as error:
            raise NotBegunError(f"{what}: {error}") from error

        def done() -> bool:
            try:
                return found()
            except WindowError as error:
                raise WindowError(f"{what}: {error}") from error

        return done

    def placed(self, rank: int, memory: Array, offset: int, runs: Runs) -> Runs:
        return Runs(runs.far + (self.facts_of_ranks[rank][2] + offset), runs.near + memory.ctypes.data, runs.sizes)

    def mover(self, rank: int, memory: Array, offset: int, runs: Runs) -> Callable[[bool], Done]:
        """Return a function that begins to get stretches from a rank into memory here, or, given True, to put."""
        peer, placed = self.peer(rank), self.placed(rank, memory, offset, runs)

        def move(is_put: bool) -> Done:
            return self.sure(rank, peer.endpoint.put if is_put else peer.endpoint.get, peer.key, placed)

        return move


class UcxArrayWindow(UcxWindow):
    """The caller's own arrays, read and added to where they lie. See `base.Window`."""

    flavour = UCX_ARRAYS.name

    def wanted(self, memory: Any) -> tuple[int, str | None]:
        return (memory, None) if isinstance(memory, int) else (spanned_bytes(memory), array_problem(memory))

    def exposed(self, memory: Any) -> tuple[Mapped | None, NDArray[np.uint8]]:
        own = exposed_bytes(given_array(memory))
        return self.ucp.expose(own.ctypes.data, own.size) if own.size else None, own

    def reached(
        self, rank: int, nodes: tuple[int, ...], sizes: tuple[int, ...], own: NDArray[np.uint8]
    ) -> dict[int, NDArray[np.uint8]]:
        """This rank's own. Raises WindowError if that of other ranks of the node cannot be read."""
        mates = [other for other, node in enumerate(nodes) if node == nodes[rank] and other != rank]
        self.pids = {other: self.facts_of_ranks[other][3] for other in mates}
        byte = np.zeros(1, np.uint8)
        for other in [other for other in mates if sizes[other]]:
            try:
                Attached(self.pids[other], self.placed(other, byte, 0, one_run(1))).move()
            except WindowError as error:
                raise WindowError(f"{error}; or use the window '{CREATED.name}'") from None
        return {rank: own}

    def mover(self, rank: int, memory: Array, offset: int, runs: Runs) -> Callable[[bool], Done]:
        if rank not in self.pids:
            return super().mover(rank, memory, offset, runs)
        ways = [Attached(self.pids[rank], self.placed(rank, memory, offset, runs), is_put) for is_put in (False, True)]

        def move(is_put: bool) -> Done:
            return self.sure(rank, ways[is_put].move)

        return move


class UcxTransfer:
    """A transfer that is begun, awaited and begun again. See `base.Transfer`."""

    adds = False  # true where it changes memory of another rank

    def __init__(self, window: UcxWindow, rank: int) -> None:
        self.window, self.rank = window, rank
        self.is_closed = False

    def start(self) -> None:
        if self.is_closed:
            raise closed("transfer")
        self.window.require_open()
        if not self.done():
            raise WindowError("transfer: started again before it was done; wait for it first")
        self.begin()

    def begin(self) -> None:
        raise NotImplementedError

    def is_over(self) -> bool:
        raise NotImplementedError

    def done(self) -> bool:
        if self not in self.window.under_way:
            return True
        try:
            is_over = self.is_over()
        except WindowError:
            self.window.under_way.discard(self)
            raise
        if is_over:
            self.window.under_way.discard(self)
        return is_over

    def wait(self) -> None:
        wait_until(self.done)

    def close(self) -> None:
        self.is_closed = True


class UcxGet(UcxTransfer):
    """A get: to its place where both sides have stretches in common, else by way of packed memory."""

    def __init__(self, window: UcxWindow, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> None:
        super().__init__(window, rank)
        self.words, self.pairs, memory, near = len(rows) * len(cols), Pairs(), origin, (rows, cols)
        fast = axes(target.strides)[1]
        if strided_elements(origin)[fast] != 1 and len(near[fast]) > 1:
            memory, near = packed(target, origin.dtype)
            self.pairs = paired_views(memory, near, origin, (rows, cols))
        self.landing = memory  # which is to live as long as its address is known here
        if self.words:
            runs = runs_of(target, near, strided_elements(memory), origin.itemsize)
            self.move = window.mover(rank, memory, target.offset, runs)

    def begin(self) -> None:
        if self.words:
            self.test = self.move(False)
            self.window.under_way.add(self)
            self.window.count(self.rank, self.words)
            self.done()

    def is_over(self) -> bool:
        if not self.test():
            return False
        for place, landed in self.pairs:
            np.copyto(place, landed)
        return True


class Locked(UcxTransfer):
    """A change of a target's memory under its lock, which one rank holds at a time."""

    adds = True

    def begin(self) -> None:
        self.failure: WindowError | None = None
        self.is_ended = self.has_begun = False
        self.window.under_way.add(self)
        endpoint = self.window.peer(self.rank).endpoint
        with self.window.ucp.lock:
            endpoint.line.append(self.steps())
            endpoint.advance()

    def is_over(self) -> bool:
        if not self.is_ended:
            with self.window.ucp.lock:
                self.window.ucp.advance()
        if self.is_ended and self.failure is not None:
            raise self.failure
        return self.is_ended

    def steps(self) -> Steps:
        """Yield the steps of the change; a failure ends them and is reported to the waiter."""
        try:
            yield from self.sections()
        except WindowError as error:
            self.failure = error if self.has_begun else NotBegunError(str(error))
        self.is_ended = True

    def sections(self) -> Steps:
        raise NotImplementedError

    def swapped(self, value: int) -> Generator[None, None, int]:
        """Swap a value into the target's lock, and return the old one."""
        peer, before = self.window.peer(self.rank), C.c_int64()
        yield from ended(self.window.sure(self.rank, peer.endpoint.swap, peer.lock, peer.lock_key, value, before))
        return before.value

    def alone(self, work: Steps) -> Steps:
        """Do something under the lock, which is given back also where that fails."""
        while (yield from self.swapped(1)):
            yield
        self.has_begun = True
        try:
            yield from work
        finally:
            yield from self.swapped(0)


def ended(done: Done) -> Steps:
    while not done():
        yield


class UcxAccumulate(Locked):
    def __init__(
        self, window: UcxWindow, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, op: str
    ) -> None:
        super().__init__(window, rank)
        self.add, prepare = REDUCTIONS[op].add, self.near if window.reaches(rank) else self.far
        self.parts = [
            prepare(target.part(*there), origin, here)
            for there, here in chunks(target, rows, cols, origin.itemsize, window.chunk_bytes)
        ]

    def sections(self) -> Steps:
        for number, (pairs, move) in enumerate(self.parts):
            yield from self.alone(self.added(pairs, move))
            self.window.count(self.rank, sum(mine.size for _, mine in pairs), int(number == 0))

    def near(self, target: Patch, origin: Array, here: tuple[Span, Span]) -> tuple[Pairs, None]:
        return [(theirs, mine) for mine, theirs in self.window.pairs(self.rank, target, origin, *here)], None

    def far(self, target: Patch, origin: Array, here: tuple[Span, Span]) -> tuple[Pairs, Callable[[bool], Done]]:
        """Return the same of memory that is got, and put back."""
        held, whole = packed(target, origin.dtype)
        runs = runs_of(target, whole, strided_elements(held), held.itemsize)
        return paired_views(origin, here, held, whole), self.window.mover(self.rank, held, target.offset, runs)

    def added(self, pairs: Pairs, move: Callable[[bool], Done] | None) -> Steps:
        """Add, between a get and a put where there is something to move."""
        if move is not None:
            yield from ended(move(False))
        with np.errstate(all="ignore"):
            for total, summand in pairs:
                self.add(total, summand, out=total)
        if move is not None:
            yield from ended(move(True))


class UcxTicket(Locked):
    ticket = 0

    def __init__(self, window: UcxWindow, rank: int, offset: int, value: int) -> None:
        super().__init__(window, rank)
        self.offset, self.value = offset, value

    def sections(self) -> Steps:
        yield from self.atomic() if self.window.flavour == UCX.name else self.alone(self.local_add())
        self.window.count(self.rank, 0)

    def atomic(self) -> Steps:
        peer, before = self.window.peer(self.rank), C.c_int64()
        begin, address = peer.endpoint.add, peer.base + self.offset
        done = self.window.sure(self.rank, begin, address, peer.key, self.value, before)
        self.has_begun = True
        yield from ended(done)
        self.ticket = before.value

    def local_add(self) -> Steps:
        held = np.zeros(1, np.int64)
        move = self.window.mover(self.rank, held, self.offset, one_run(8))
        yield from ended(move(False))
        self.ticket = int(held[0])
        held += self.value
        yield from ended(move(True))


def packed(box: Patch, dtype: np.dtype[Any]) -> tuple[Array, tuple[Span, Span]]:
    """Memory for a box alone, in its order, and all positions there."""
    made: Array = np.empty(box.shape, dtype, "C" if axes(box.strides)[1] == 1 else "F")
    return made, (Span.range(0, box.shape[0]), Span.range(0, box.shape[1]))


def one_run(nbytes: int) -> Runs:
    return Runs(*(np.array([each]) for each in (0, 0, nbytes)))


def agreed(comm: MPI.Intracomm, act: Callable[[], Any], kind: type[WindowError] | type[MemoryLimitError]) -> Any:
    """Return the result of `act`; if it fails on some rank, raise the same kind of error on every rank. Collective."""
    found, problem = None, ""
    try:
        found = act()
    except (WindowError, MemoryError) as error:
        problem = str(error)
    told = comm.allgather(problem)
    if any(told):
        rank, text = next((rank, text) for rank, text in enumerate(told) if text)
        raise kind(f"rank {rank}: {text}")
    return found


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((C.c_uint8 * nbytes).from_address(address))

"""The memory under distributed matrices: a few windows, cut into blocks that are used again.

MPI libraries bear a few thousand windows, and freeing one is collective while garbage collection is not. So a mesh
keeps few, large windows ("slabs"); every block lies at the same offset on every rank, and a block that was dropped
on all ranks is given out again at the next agreement, which the next allocation is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import AbsentError, MemoryLimitError, WindowError
from rma_mm.flavours import FLAVOURS, Flavour
from rma_mm.geometry.span import Region
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.windows import Checks, Patch, Window, open_window

if TYPE_CHECKING:
    from mpi4py import MPI

GRAIN = 256  # bytes to which offsets are rounded, so that tiles start on a cache line
SLAB = 2**22  # bytes of the smallest slab, per rank
UNEVEN = 2**20  # bytes from which on a block in uneven parts gets a window of its own
SPREAD = 1.25  # largest part over the mean part up to which memory is cut alike on every rank
MANY = 64  # slabs from which on new ones grow


@dataclass(frozen=True)
class Fallback:
    """Windows that are opened instead of others, from when these could not be had."""

    what: Flavour
    instead: Flavour
    why: str

    def __str__(self) -> str:
        return f"window: {self.instead.name} in place of {self.what.name}: {self.why}"


class Closable(Protocol):
    """An object that is closed with its mesh."""

    def close(self) -> None:
        """Release all memory and MPI objects."""


class Holder(Closable, Protocol):
    """An object that has bound memory of a mesh and must release it."""

    def forget(self, window: Window) -> None:
        """Drop operations bound to a window that will be freed."""


class Ranks(Protocol):
    """The properties of a mesh that memory needs."""

    rank: int
    node_of: tuple[int, ...]
    is_member: bool
    flavour: Flavour
    checks: Checks | None
    taken_over: dict[str, Fallback]
    fallbacks: list[str]
    prepared: weakref.WeakSet[Holder]

    @property
    def comm(self) -> MPI.Intracomm:
        """All ranks, those beyond the grid included."""

    def granted(self, flavour: Flavour) -> Flavour:
        """Return the flavour that windows of a flavour are opened as now."""

    def next_serial(self) -> int:
        """Return a number that is the same on every rank."""

    def require_progress(self, flavour: Flavour) -> None:
        """Have MPI called while this rank multiplies, if transfers of windows of a flavour wait for that."""


@dataclass(eq=False)
class Slab:
    """One window with its free parts: (start, stop) in bytes, the same on every rank."""

    window: Window
    size: int
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` free bytes, first fit; None if there are none."""
        for n, (start, stop) in enumerate(self.free):
            if stop - start >= nbytes:
                self.free[n : n + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Take back memory and join it with its free neighbours."""
        joined: list[tuple[int, int]] = []
        for a, b in sorted([*self.free, (start, start + nbytes)]):
            if joined and joined[-1][1] == a:
                joined[-1] = (joined[-1][0], b)
            else:
                joined.append((a, b))
        self.free = joined


class Handle:
    """Keeps a block from being used again: every array on the block's memory has it as its base.

    When the last of them is gone it marks the block as dropped. That must work at the end of the program too, where
    `weakref.finalize` calls nothing any more.
    """

    def __init__(self, array: NDArray[Any], dropped: set[int], serial: int) -> None:
        self.__array_interface__ = array.__array_interface__
        self._memory, self._dropped, self._serial = array, dropped, serial

    def __del__(self) -> None:
        self._dropped.add(self._serial)


@dataclass(eq=False)
class Block:
    """One local array on every rank of a mesh, and how to reach the others'."""

    window: Window
    offset: int  # bytes from the start of the window to the array, on every rank
    dtype: np.dtype[Any]
    strides: tuple[tuple[int, int], ...]  # (row, column) stride of each rank's array, in elements
    local: NDArray[Any]
    """This rank's array; it and every view of it keep the block alive. Empty once the mesh is closed."""
    rank: int
    serial: int
    most: int = 0  # bytes of the largest rank's array, if the arena allocated it

    @property
    def key(self) -> tuple[Window, int]:
        return self.window, self.offset

    def unheld(self) -> Block:
        """Return the same block without keeping it alive, for operations that are used only while its matrix lives."""
        itemsize = self.dtype.itemsize
        strides = tuple(stride // itemsize for stride in self.local.strides)
        raw = self.window.view(self.rank, self.offset, self.local.shape, strides, self.dtype)
        assert raw is not None
        return replace(self, local=raw)

    def view(self, rank: int, shape: tuple[int, ...]) -> NDArray[Any] | None:
        return self.window.view(rank, self.offset, shape, self.strides[rank], self.dtype)

    def patch(self, rank: int, positions: Region) -> Patch:
        return Patch(self.offset, self.strides[rank], *positions)


class Arena:
    def __init__(self, mesh: Ranks) -> None:
        self.mesh, self.comm = mesh, mesh.comm
        self.slabs: list[Slab] = []
        self.live: dict[int, tuple[Slab | Window, int, int]] = {}
        """serial → (slab, offset, bytes), or (a window of its own, 0, 0); the same on every rank."""
        self.dropped: set[int] = set()
        self.kept: set[int] = set()
        """Blocks that this rank keeps for results to come, although no array shows them."""
        self.blocks: weakref.WeakSet[Block] = weakref.WeakSet()  # what is named on this rank

    def allocate(self, shapes: list[tuple[int, int]], dtype: np.dtype[Any]) -> Block:
        """Return a block of row-major arrays; `shapes` by rank of the communicator. Collective."""
        self.collect()
        sizes = [rows * cols * dtype.itemsize for rows, cols in shapes]
        place: Slab | Window
        if is_uneven(sizes):
            window = place = self._alone(sizes[self.mesh.rank])
            offset = nbytes = 0
        else:
            nbytes = room(sizes)
            place, offset = self._place(nbytes)
            window = place.window
        serial = self.mesh.next_serial()
        self.live[serial] = (place, offset, nbytes)
        strides = tuple((max(1, cols), 1) for _, cols in shapes)
        shape = shapes[self.mesh.rank]
        raw = window.view(self.mesh.rank, offset, shape, strides[self.mesh.rank], dtype)
        assert raw is not None
        return self._block(window, offset, strides, raw, serial, max(sizes))

    def adopt(self, array: NDArray[Any], flavour: Flavour) -> Block:
        """Return a block on the caller's own array, exposed where it is, without a copy. Collective."""
        self.collect()
        window = self._opened(flavour, lambda _: array)
        serial = self.mesh.next_serial()
        self.live[serial] = (window, 0, 0)
        own = tuple(stride // array.itemsize for stride in array.strides)
        strides = tuple(self.mesh.comm.allgather((own[0], own[1])))
        return self._block(window, 0, strides, array, serial)

    def is_unused(self, block: Block) -> bool:
        """True if the memory is still there, and no array on this rank shows it."""
        return block.serial in self.dropped and block.serial in self.live

    def revived(self, block: Block) -> Block:
        """Return a block that is unused on all ranks, for a new matrix. Local; to be done on all ranks."""
        self.dropped.discard(block.serial)
        return self._block(block.window, block.offset, block.strides, block.local, block.serial, block.most)

    def reshaped(self, block: Block, shapes: list[tuple[int, int]]) -> Block:
        """Return the same memory as a block of other row-major arrays of as many elements; `shapes` by rank. Local."""
        strides = tuple((max(1, cols), 1) for _, cols in shapes)
        made = replace(block, strides=strides, local=block.local.reshape(shapes[self.mesh.rank]))
        self.blocks.add(made)
        return made

    def _block(
        self, window: Window, offset: int, strides: tuple[tuple[int, int], ...], raw: NDArray[Any], serial: int,
        most: int = 0,
    ) -> Block:
        """Return a block on `raw`, through a handle that marks it as dropped when the last array on it is gone."""
        handle = Handle(raw, self.dropped, serial)
        local = np.asarray(handle).view(raw.dtype)  # the interface has no name for bfloat16
        block = Block(window, offset, raw.dtype, strides, local, self.mesh.rank, serial, most)
        self.blocks.add(block)
        return block

    def _place(self, nbytes: int) -> tuple[Slab, int]:
        for slab in self.slabs:
            offset = slab.take(nbytes)
            if offset is not None:
                return slab, offset
        self._free_empty()  # too small for what is asked now: their memory goes back before more is taken
        size = max(nbytes, SLAB)
        if len(self.slabs) >= MANY:  # windows are scarcer than memory by now
            size = max(size, sum(slab.size for slab in self.slabs) // MANY)
        slab = self._open(size)
        self.slabs.append(slab)
        offset = slab.take(nbytes)
        assert offset is not None
        return slab, offset

    def _open(self, size: int) -> Slab:
        """Return a new window of `size` bytes on every rank of the grid; private memory where shared is too small."""
        size = -(-size // GRAIN) * GRAIN
        return Slab(self._alone(size if self.mesh.is_member else 0), size, [(0, size)])

    def _alone(self, mine: int) -> Window:
        """Return a window of `mine` bytes on this rank. Collective. Raises MemoryLimitError on every rank."""

        def memory(flavour: Flavour) -> int | NDArray[np.uint8]:
            granted = self._memory(mine)
            return granted if flavour.takes_arrays else mine  # it could be had

        return self._opened(self.mesh.flavour, memory)

    def _memory(self, mine: int) -> NDArray[np.uint8]:
        """Private memory, not touched. Collective. Raises MemoryLimitError on every rank where one is granted none.

        MPI libraries die of sizes that the system does not grant, or wait forever for the rank that it refused.
        """
        with agreed(self.comm):
            try:
                memory = np.empty(mine, np.uint8)
            except MemoryError:
                host = os.uname().nodename
                raise MemoryLimitError(
                    f"memory: {host} cannot allocate {mine} bytes for a rank; use more ranks"
                ) from None
        return memory

    def _opened(self, wanted: Flavour, memory: Callable[[Flavour], int | NDArray[Any]]) -> Window:
        """Open a window whose transfers proceed while its ranks multiply, of the wanted flavour or its replacement.

        A flavour that was asked for and is absent is an error, as when a mesh is made on it.

        memory: what it exposes, by flavour. Collective; raises as `open_window`.
        """
        mesh = self.mesh
        while True:
            flavour = mesh.granted(wanted)
            self._count_windows(flavour)
            try:
                window = open_window(
                    flavour.name, mesh.comm, memory(flavour), node_of=mesh.node_of, checks=mesh.checks
                )
            except (MemoryLimitError, AbsentError) as error:
                is_asked = flavour == mesh.flavour and isinstance(error, AbsentError)
                if flavour.when_too_small is None or is_asked:
                    raise
                found = mesh.taken_over[flavour.name] = Fallback(flavour, flavour.when_too_small, str(error))
                mesh.fallbacks.append(str(found))
            else:
                mesh.require_progress(flavour)
                return window

    def _count_windows(self, flavour: Flavour) -> None:
        """Refuse one window more than a library bears; the count is the same on every rank."""
        windows = [*(slab.window for slab in self.slabs), *self._alone_ones()]
        count = sum(FLAVOURS[window.flavour].library == flavour.library for window in windows)
        if count >= flavour.at_most:
            raise WindowError(
                f"window: {count} windows are open, of {flavour.at_most} that {flavour.library} bears; close matrices "
                f"made by from_local, or make them with from_numpy, whose memory is shared out of few windows"
            )

    def _alone_ones(self) -> list[Window]:
        return [place for place, _, _ in self.live.values() if not isinstance(place, Slab)]

    def reserve(self, blocks: list[list[int]]) -> None:
        """Make room for blocks of these bytes by rank, so that the windows they will lie in are known. Collective."""
        taken: list[tuple[int, Slab, int]] = []
        try:
            for sizes in blocks:
                if not is_uneven(sizes):
                    taken.append((room(sizes), *self._place(room(sizes))))
        finally:
            for nbytes, slab, offset in taken:
                slab.give(offset, nbytes)

    def collect(self) -> None:
        """Take back the blocks that every rank has dropped. Collective: this is the agreement. Also after a close."""
        from rma_mm.windows.waiting import reduced

        serials = list(self.live)
        if not serials:
            return
        votes = np.array([serial in self.dropped and serial not in self.kept for serial in serials], np.uint8)
        reduced(self.comm, votes, "MIN")
        for serial, is_agreed in zip(serials, votes, strict=True):
            if is_agreed:
                self.dropped.discard(serial)
                place, offset, nbytes = self.live.pop(serial)
                if isinstance(place, Slab):
                    place.give(offset, nbytes)
                else:
                    self._free(place)

    def _free_empty(self) -> None:
        """Free slabs in which nothing lives. Collective."""
        for slab in [slab for slab in self.slabs if slab.free == [(0, slab.size)]]:
            self.slabs.remove(slab)
            self._free(slab.window)

    def _free(self, window: Window) -> None:
        """Close a window that nothing uses any more, and let plans drop operations bound to it. Collective."""
        for plan in list(self.mesh.prepared):
            plan.forget(window)
        window.close()

    def let_go(self) -> None:
        """Release all matrices' memory when the mesh is closed: only views taken earlier still hold it."""
        for block in list(self.blocks):
            block.local = np.empty((0, 0), block.dtype)

    def freed(self) -> bool:
        """Free windows that no rank views any more; return whether all are freed. Collective.

        Freeing unmaps memory on every rank, so what a view shows must wait: until here is asked again, or to the end.
        """
        self.collect()
        self._free_empty()
        return not self.slabs and not self.live

    def leave(self) -> None:
        """Close the windows that views still show; the process takes their memory with it. Collective."""
        for window in [*(slab.window for slab in self.slabs), *self._alone_ones()]:
            window.close(leave_memory=True)


def room(sizes: list[int]) -> int:
    return max(GRAIN, -(-max(sizes) // GRAIN) * GRAIN)


def is_uneven(sizes: list[int]) -> bool:
    return max(sizes) >= UNEVEN and SPREAD * sum(sizes) < max(sizes) * len(sizes)

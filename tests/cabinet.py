"""Windows that share nothing with those of the package: memory of `multiprocessing`, and a lock on a file.

All ranks must be on one host; MPI only hands the names of the segments round.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.elements.reduction import REDUCTIONS
from rma_mm.errors import WindowError
from rma_mm.flavours import Flavour
from rma_mm.geometry.span import Span
from rma_mm.windows.base import (
    Array,
    Counters,
    Patch,
    Transfer,
    check_addable,
    check_extent,
    check_transfer,
    closed,
    view_on,
)  # fmt: skip
from rma_mm.windows.copying import paired_views, require_writeable
from rma_mm.windows.ranks import exposed_sizes, node_map
from rma_mm.windows.waiting import barrier

CABINET = Flavour(
    name="cabinet", window=f"{__name__}:CabinetWindow", loads_on_node=True, needs_progress=False, packed_by_mpi=False,
    library="Python",
)  # fmt: skip
LEFT: list[SharedMemory] = []
"""Segments that arrays still show."""


class CabinetWindow:
    """A segment of each rank, which all ranks map. See `base.Window`."""

    flavour, loads_on_node = CABINET.name, True

    def __init__(
        self, comm: Any, memory: int, *, node_of: tuple[int, ...] | None = None, chunk_bytes: int | None = None
    ) -> None:
        self.sizes, self.node_of = exposed_sizes(comm, memory), node_of or node_map(comm)
        self.comm, self.rank, self.nbytes, self.counters, self.is_closed = comm, comm.rank, memory, Counters(), False
        own = SharedMemory(create=True, size=max(1, memory))
        names = comm.allgather(own.name)
        self.segments = [own if rank == comm.rank else SharedMemory(name) for rank, name in enumerate(names)]
        comm.Barrier()
        own.unlink()
        for name in names:
            with suppress(KeyError):
                resource_tracker.unregister(f"/{name}", "shared_memory") if name != own.name else None
        self.bases = [
            np.frombuffer(each.buf, np.uint8, size) for each, size in zip(self.segments, self.sizes, strict=True)
        ]
        path = comm.bcast(tempfile.mkstemp()[1] if comm.rank == 0 else "")
        self.lock = os.open(path, os.O_RDWR)
        comm.Barrier()
        if comm.rank == 0:
            os.unlink(path)

    @property
    def local(self) -> NDArray[np.uint8]:
        return self.bases[self.rank]

    def require_open(self) -> None:
        if self.is_closed:
            raise closed(f"{self.flavour} window")

    def reaches(self, rank: int) -> bool:
        self.require_open()
        return self.node_of[rank] == self.node_of[self.rank]

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DTypeLike
    ) -> Array | None:
        return view_on(self.bases[rank], offset, shape, strides, dtype) if self.reaches(rank) else None

    def get(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Transfer:
        there = self.checked(rank, target, origin, rows, cols)
        require_writeable(self.flavour, origin)
        pairs = paired_views(there, (target.rows, target.cols), origin, (rows, cols)) if there.size else []
        return Errand(self, rank, lambda: [np.copyto(mine, theirs) for mine, theirs in pairs], target)

    def accumulate(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, op: str = "SUM") -> Transfer:
        there = self.checked(rank, target, origin, rows, cols)
        check_addable(self.flavour, origin.dtype, op)
        pairs = paired_views(origin, (rows, cols), there, (target.rows, target.cols)) if there.size else []

        def add() -> None:
            with self.alone():
                for theirs, mine in pairs:
                    REDUCTIONS[op].add(theirs, mine, out=theirs)

        return Errand(self, rank, add, target)

    def fetch_add(self, rank: int, offset: int, value: int) -> int:
        self.require_open()
        check_extent(self.flavour, offset, offset + 8, self.sizes[rank])
        counter = self.bases[rank][offset : offset + 8].view(np.int64)
        with self.alone():
            before = int(counter[0])
            counter[0] += value
        self.count(rank, 0)
        return before

    def peek(self, rank: int, starts: Sequence[int], out: NDArray[np.uint8]) -> None:
        self.require_open()
        for start, line in zip(starts, out, strict=True):
            line[:] = self.bases[rank][start : start + line.size]

    def flush(self) -> None:
        self.require_open()

    sync = flush

    def close(self, leave_memory: bool = False) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        barrier(self.comm)
        self.bases = [np.empty(0, np.uint8)] * len(self.bases)
        os.close(self.lock)
        for each in self.segments:
            try:
                each.close()
            except BufferError:
                LEFT.append(each)

    # -- for errands

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other rank holds the lock."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.lock, fcntl.LOCK_UN)

    def checked(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Array:
        """The array that `target` is a box of."""
        self.require_open()
        if not 0 <= rank < len(self.sizes):
            raise WindowError(f"{self.flavour}: rank {rank} is not one of {len(self.sizes)}")
        check_transfer(self.flavour, origin, rows, cols, target, self.sizes[rank])
        shape = (target.rows.stop, target.cols.stop) if target.rows and target.cols else (0, 0)
        return view_on(self.bases[rank], target.offset, shape, target.strides, origin.dtype)

    def count(self, rank: int, words: int) -> None:
        if rank != self.rank:
            self.counters.add(words, 1, same_node=self.node_of[rank] == self.node_of[self.rank])


class Errand:
    """A transfer that is over when it has begun. See `base.Transfer`."""

    def __init__(self, window: CabinetWindow, rank: int, act: Callable[[], Any], target: Patch) -> None:
        self.window, self.rank, self.act, self.words = window, rank, act, len(target.rows) * len(target.cols)
        self.is_closed = False

    def start(self) -> None:
        if self.is_closed:
            raise closed("transfer")
        self.window.require_open()
        self.act()
        if self.words:
            self.window.count(self.rank, self.words)

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
        self.act = lambda: None

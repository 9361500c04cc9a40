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
from numpy.typing import NDArray

from rma_mm.elements.reduction import REDUCTIONS
from rma_mm.flavours import Flavour
from rma_mm.geometry.span import Span
from rma_mm.windows.base import (
    Array,
    Patch,
    Transfer,
    check_addable,
    check_extent,
    closed,
)  # fmt: skip
from rma_mm.windows.ranks import exposed_sizes, node_map
from rma_mm.windows.reach import Reach
from rma_mm.windows.waiting import barrier

CABINET = Flavour(
    name="cabinet", window=f"{__name__}:CabinetWindow", loads_on_node=True, needs_progress=False, packed_by_mpi=False,
    library="Python",
)  # fmt: skip
LEFT: list[SharedMemory] = []
"""Segments that arrays still show."""


class CabinetWindow(Reach):
    """A segment of each rank, which all ranks map. See `base.Window`."""

    flavour = CABINET.name

    def __init__(
        self, comm: Any, memory: int, *, node_of: tuple[int, ...] | None = None, chunk_bytes: int | None = None
    ) -> None:
        sizes, node_of, self.comm = exposed_sizes(comm, memory), node_of or node_map(comm), comm
        own = SharedMemory(create=True, size=max(1, memory))
        names = comm.allgather(own.name)
        self.segments = [own if rank == comm.rank else SharedMemory(name) for rank, name in enumerate(names)]
        comm.Barrier()
        own.unlink()
        for name in names:
            with suppress(KeyError):
                resource_tracker.unregister(f"/{name}", "shared_memory") if name != own.name else None
        every = zip(self.segments, sizes, strict=True)
        self.memory = [np.frombuffer(each.buf, np.uint8, size) for each, size in every]
        near = {rank: self.memory[rank] for rank, node in enumerate(node_of) if node == node_of[comm.rank]}
        super().__init__(comm.rank, node_of, sizes, near)
        path = comm.bcast(tempfile.mkstemp()[1] if comm.rank == 0 else "")
        self.lock = os.open(path, os.O_RDWR)
        comm.Barrier()
        if comm.rank == 0:
            os.unlink(path)

    def get(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Transfer:
        self.check(rank, target, origin, rows, cols, lands=True)
        pairs = self.all_pairs(rank, target, origin, rows, cols)
        return Errand(self, rank, lambda: [np.copyto(mine, theirs) for mine, theirs in pairs], target)

    def accumulate(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, op: str = "SUM") -> Transfer:
        self.check(rank, target, origin, rows, cols)
        check_addable(self.flavour, origin.dtype, op)
        pairs = self.all_pairs(rank, target, origin, rows, cols)

        def add() -> None:
            with self.alone():
                for mine, theirs in pairs:
                    REDUCTIONS[op].add(theirs, mine, out=theirs)

        return Errand(self, rank, add, target)

    def fetch_add(self, rank: int, offset: int, value: int) -> int:
        self.require_open()
        check_extent(self.flavour, offset, offset + 8, self._sizes[rank])
        counter = self.memory[rank][offset : offset + 8].view(np.int64)
        with self.alone():
            before = int(counter[0])
            counter[0] += value
        self.count(rank, 0)
        return before

    def peek(self, rank: int, starts: Sequence[int], out: NDArray[np.uint8]) -> None:
        self.require_open()
        for start, line in zip(starts, out, strict=True):
            line[:] = self.memory[rank][start : start + line.size]

    def flush(self) -> None:
        self.require_open()

    sync = flush

    def close(self, leave_memory: bool = False) -> None:
        if self.is_closed:
            return
        barrier(self.comm)
        self.forget_memory()
        self.memory = []
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

    def all_pairs(self, rank: int, *box: Any) -> list[tuple[Array, Array]]:
        """Views that pair up, whoever the rank is: all memory is mapped."""
        within, self._bases = self._bases, dict(enumerate(self.memory))
        try:
            return self.pairs(rank, *box)
        finally:
            self._bases = within


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

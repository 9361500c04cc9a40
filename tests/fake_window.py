"""Windows without MPI: the ranks are threads of one process. For tests.

Transfers land as late as the interface allows, or at a random moment before: code that reads a get before its
`wait`, changes an accumulate's origin before its `wait`, or forgets a `flush`, fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Barrier, Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.elements.reduction import REDUCTIONS
from rma_mm.errors import WindowError
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
)
from rma_mm.windows.copying import paired_views, require_writeable
from rma_mm.windows.waiting import wait_until

PATIENCE = 60.0
"""Seconds after which a rank gives up on the others."""


class FakeFabric:
    """What `size` virtual ranks share. Each rank is a thread that opens its windows here."""

    def __init__(self, size: int, nodes: tuple[int, ...] | None = None, seed: int = 0) -> None:
        """`nodes` is the node number of each rank; without it every rank is a node of its own."""
        self.size = size
        self.nodes = tuple(range(size)) if nodes is None else nodes
        self.lock = Lock()
        self.barrier = Barrier(size, timeout=PATIENCE)
        self.random = [random.Random(f"{seed}/{rank}") for rank in range(size)]
        self._opened = [0] * size
        self._memories: dict[int, dict[int, NDArray[np.uint8]]] = {}

    def open(self, rank: int, nbytes: int) -> FakeWindow:
        """Open a window that exposes `nbytes` bytes of garbage. Collective over the ranks."""
        with self.lock:
            memories = self._memories.setdefault(self._opened[rank], {})
            self._opened[rank] += 1
            memories[rank] = np.frombuffer(bytearray(self.random[rank].randbytes(nbytes)), np.uint8)
        self.barrier.wait()
        return FakeWindow(self, rank, memories)

    def abort(self) -> None:
        """Let every rank that waits for the others fail instead."""
        self.barrier.abort()


class FakeWindow:
    """The window of one virtual rank. See `base.Window`."""

    flavour = "fake"

    def __init__(self, fabric: FakeFabric, rank: int, memories: dict[int, NDArray[np.uint8]]) -> None:
        """Made by `FakeFabric.open`; `memories` is what each rank exposes."""
        self.counters = Counters()
        self.local = memories[rank]
        self.nbytes = self.local.size
        self._fabric, self._rank, self._memories = fabric, rank, memories
        self.under_way: list[_Operation] = []
        self._is_closed = False

    def reaches(self, rank: int) -> bool:
        """See `base.Window`."""
        self._require_open()
        return self._fabric.nodes[rank] == self._fabric.nodes[self._rank]

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DTypeLike
    ) -> Array | None:
        """See `base.Window`."""
        return view_on(self._memories[rank], offset, shape, strides, dtype) if self.reaches(rank) else None

    def get(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Transfer:
        """See `base.Window`."""
        require_writeable(self.flavour, origin)
        return self._prepare(rank, target, origin, rows, cols, None)

    def accumulate(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, op: str = "SUM") -> Transfer:
        """See `base.Window`."""
        check_addable(self.flavour, origin.dtype, op)
        return self._prepare(rank, target, origin, rows, cols, REDUCTIONS[op].add)

    def fetch_add(self, rank: int, offset: int, value: int) -> int:
        """See `base.Window`."""
        self._require_open()
        check_extent(self.flavour, offset, offset + 8, self._memories[rank].size)
        cell = view_on(self._memories[rank], offset, (1,), (1,), np.int64)
        with self._fabric.lock:
            before = int(cell[0])
            cell[0] += value
        self._count(rank, 0, 1)
        return before

    def flush(self) -> None:
        """See `base.Window`."""
        self._require_open()
        self._land(lambda: True)

    def sync(self) -> None:
        """See `base.Window`."""
        self._require_open()

    def close(self, leave_memory: bool = False) -> None:
        """See `base.Window`."""
        if self._is_closed:
            return
        self.flush()
        self._fabric.barrier.wait()
        self._is_closed = True
        self.local = np.empty(0, np.uint8)

    def _require_open(self) -> None:
        if self._is_closed:
            raise closed("fake window")

    def _prepare(
        self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, add: np.ufunc | None
    ) -> FakeTransfer:
        """A get, or an accumulate by `add`."""
        self._require_open()
        if not 0 <= rank < self._fabric.size:
            raise WindowError(f"fake: rank {rank} is not one of {self._fabric.size}")
        memory = self._memories[rank]
        check_transfer(self.flavour, origin, rows, cols, target, memory.size)
        shape = (target.rows.stop, target.cols.stop) if target.rows and target.cols else (0, 0)
        remote = view_on(memory, target.offset, shape, target.strides, origin.dtype)
        pairs = paired_views(remote, (target.rows, target.cols), origin, (rows, cols)) if remote.size else []
        return FakeTransfer(self, rank, pairs, add)

    def _count(self, rank: int, words: int, messages: int) -> None:
        if rank != self._rank:
            self.counters.add(words, messages, same_node=self.reaches(rank))

    def _land(self, now: Callable[[], bool]) -> None:
        """Complete each operation under way for which `now()` is true."""
        staying = []
        for operation in self.under_way:
            if now():
                operation.land(self._fabric.lock)
            else:
                staying.append(operation)
        self.under_way = staying

    # -- for transfers ----------------------------------------------------------------------------

    def begin(self, rank: int, pairs: list[tuple[Array, Array]], add: np.ufunc | None) -> _Operation:
        """Start an operation on views of the memory of `rank`, and let others under way land at random."""
        self._require_open()
        self._land(self.toss)
        operation = _Operation(pairs, add)
        self.under_way.append(operation)
        for origin, _ in pairs:
            self._count(rank, origin.size, 1)
        return operation

    def finish(self, operation: _Operation) -> None:
        """Do what this rank may rely on after a wait: a get has landed, an accumulate's origin is free."""
        if operation.add is not None:
            operation.capture()
        else:
            operation.land(self._fabric.lock)

    def toss(self) -> bool:
        """A fair coin."""
        return self._fabric.random[self._rank].random() < 0.5


class _Operation:
    """One start of a transfer between pairs of (origin view, target view)."""

    def __init__(self, pairs: list[tuple[Array, Array]], add: np.ufunc | None) -> None:
        self.pairs, self.add = pairs, add
        self._values: list[Array] | None = None
        self._is_landed = False
        if add is None:
            for origin, _ in pairs:
                origin[...] = _poison(origin.dtype)

    def is_over(self) -> bool:
        """Whether this rank may rely on it."""
        return self._is_landed if self.add is None else self._values is not None

    def capture(self) -> None:
        """Read the origin of an accumulate."""
        if self._values is None:
            self._values = [origin.copy() for origin, _ in self.pairs]

    def land(self, lock: Lock) -> None:
        """Read or add to the target."""
        if self._is_landed:
            return
        self._is_landed = True
        if self.add is not None:
            self.capture()
        with lock:
            for value, (origin, remote) in zip(self._values or self.pairs, self.pairs, strict=True):
                if self.add is not None:
                    self.add(remote, value, out=remote)
                else:
                    origin[...] = remote


def _poison(dtype: np.dtype[Any]) -> Any:
    """A value that spoils whatever reads it."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).max
    return dtype.type(True) if dtype.kind == "b" else dtype.type(np.nan)


class FakeTransfer:
    """A prepared get or accumulate. See `base.Transfer`."""

    def __init__(self, window: FakeWindow, rank: int, pairs: list[tuple[Array, Array]], add: np.ufunc | None) -> None:
        """`pairs` are (origin view, view on the memory of `rank`); `add` is None for a get."""
        self._window, self._rank, self._pairs, self._add = window, rank, pairs, add
        self._last: _Operation | None = None
        self._is_closed = False

    def start(self) -> None:
        """See `base.Transfer`."""
        if self._is_closed:
            raise closed("transfer")
        if self._last is not None and not self._last.is_over():
            raise WindowError("transfer: started again before it was done; wait for it first")
        self._last = self._window.begin(self._rank, self._pairs, self._add)

    def done(self) -> bool:
        """See `base.Transfer`."""
        if self._last is None or self._last.is_over():
            return True
        if self._window.toss():
            self._window.finish(self._last)
        return self._last.is_over()

    def wait(self) -> None:
        """See `base.Transfer`."""
        wait_until(self.done)

    def close(self) -> None:
        """See `base.Transfer`."""
        self._is_closed = True

"""The part of every window that deals with memory within reach, whoever moves the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import DTypeLike, NDArray

from rma_mm.errors import WindowError
from rma_mm.geometry.span import Span
from rma_mm.windows.base import Array, Counters, Patch, aligned_bytes, check_transfer, closed, view_on
from rma_mm.windows.boxes.copying import CopyTransfer, paired_views, require_writeable

Pairs = list[tuple[Array, Array]]


class Reach:
    """A window, except for its transfers to and from memory out of reach. See `base.Window`."""

    flavour = ""

    def __init__(
        self, rank: int, node_of: tuple[int, ...], sizes: tuple[int, ...], bases: Mapping[int, NDArray[np.uint8]]
    ) -> None:
        """sizes: bytes that each rank exposes. bases: the memory within reach by rank, this rank's own included."""
        self._rank, self._node_of, self._sizes, self._bases = rank, node_of, sizes, dict(bases)
        self.counters = Counters()
        self.local = self._bases[rank]
        self.nbytes = self.local.size
        self.is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{self.nbytes} of {sum(self._sizes)} bytes"
        return f"{self.flavour} window ({state}, {len(self._sizes)} ranks)"

    def require_open(self) -> None:
        if self.is_closed:
            raise closed(f"{self.flavour} window")

    def reaches(self, rank: int) -> bool:
        self.require_open()
        return rank in self._bases

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DTypeLike
    ) -> Array | None:
        if not self.reaches(rank):
            return None
        return view_on(self._bases[rank], offset, shape, strides, dtype)

    def check(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, *, lands: bool = False) -> None:
        """Raise for a transfer that cannot be. lands: whether it changes `origin`."""
        self.require_open()
        if not 0 <= rank < len(self._sizes):
            raise WindowError(f"{self.flavour}: rank {rank} is not one of {len(self._sizes)}")
        check_transfer(self.flavour, origin, rows, cols, target, self._sizes[rank])
        if lands:
            require_writeable(self.flavour, origin)

    def count(self, rank: int, words: int, messages: int = 1) -> None:
        """Count a call that moved `words` elements to or from `rank`."""
        if rank != self._rank:
            self.counters.add(words, messages, same_node=self._node_of[rank] == self._node_of[self._rank])

    def pairs(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Pairs:
        """Views of `origin` and of the memory of `rank`, which is in reach, that pair up."""
        shape = (target.rows.stop, target.cols.stop) if target.rows and target.cols else (0, 0)
        remote = view_on(self._bases[rank], target.offset, shape, target.strides, origin.dtype)
        return paired_views(remote, (target.rows, target.cols), origin, (rows, cols)) if remote.size else []

    def copy(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> CopyTransfer:
        """Return a get from memory in reach: by load and store, which beats every library on strided boxes."""
        counters = None if rank == self._rank else self.counters
        same_node = self._node_of[rank] == self._node_of[self._rank]
        found = self.pairs(rank, target, origin, rows, cols)
        return CopyTransfer(found, counters, self.require_open, same_node=same_node)

    def forget_memory(self) -> None:
        self.is_closed, self._bases = True, {}
        self.local = np.empty(0, np.uint8)


def given_array(memory: int | NDArray[Any]) -> NDArray[Any]:
    return aligned_bytes(max(0, memory)) if isinstance(memory, int) else memory


def array_problem(array: NDArray[Any]) -> str | None:
    """Return why the array cannot be exposed, or None."""
    if array.dtype.hasobject:
        return f"an array of dtype {array.dtype} holds references; only numbers can be exposed"
    strides = [stride for stride, extent in zip(array.strides, array.shape, strict=True) if extent > 1]
    if array.size and any(stride < 0 or stride % array.itemsize for stride in strides):
        return (
            f"an array of shape {array.shape} with byte strides {array.strides} cannot be exposed; strides must be "
            f"multiples of its item size {array.itemsize} and not negative; copy it first"
        )
    return None


def spanned_bytes(array: NDArray[Any]) -> int:
    """Return bytes from the first element of an array to the end of its last."""
    low, high = byte_bounds(array) if array.size else (0, 0)
    return int(high - low)


def exposed_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes that an array spans, gaps included, without a copy; keeps the array's memory alive."""
    nbytes = spanned_bytes(array)
    if nbytes == 0:
        return np.empty(0, np.uint8)
    first = array[(slice(0, 1),) * array.ndim].reshape(-1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (nbytes,), (1,), writeable=array.flags.writeable)

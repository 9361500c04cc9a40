"""Interface of windows: memory that every rank exposes, and one-sided transfers to and from it.

This module states the interface and imports no MPI, so that the in-process fake and everything tested with it
run without one. The flavours are in `shared`, `allocated` and `created`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import ClosedError, DtypeError, WindowError
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.span import Span

Array = NDArray[Any]

ALIGNMENT = 64  # byte alignment of memory that windows allocate themselves


@dataclass(frozen=True, slots=True)
class Patch:
    """Place of a box of a rank's dense local array in the memory that this rank exposes."""

    offset: int  # bytes from the start of the exposed memory to element (0, 0) of the local array
    strides: tuple[int, int]
    """Distance in elements between rows and between columns: (ld, 1) is row-major, (1, ld) column-major."""
    rows: Span  # row positions in the local array; may be several runs
    cols: Span  # column positions in the local array; may be several runs

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.cols)

    def stop(self, itemsize: int) -> int:
        """Return one more than the last byte that the box touches; `offset` when it is empty."""
        if not (self.rows and self.cols):
            return self.offset
        last = (self.rows.stop - 1) * self.strides[0] + (self.cols.stop - 1) * self.strides[1]
        return self.offset + (last + 1) * itemsize

    def part(self, rows: Span, cols: Span) -> Patch:
        return replace(self, rows=rows, cols=cols)


_COUNTING = Lock()  # held while a count goes up: transfers are also started by a helper thread


@dataclass(slots=True)
class Counters:
    """Traffic that this rank caused, from the buffers passed; transfers to itself count nothing."""

    words_intra: int = 0  # elements of the memory of other ranks of this node that were read or added to
    words_inter: int = 0  # elements of the memory of ranks of other nodes that were read or added to
    messages: int = 0  # MPI calls that named another rank; a copy through a view is none, but for what a group moves
    messages_inter: int = 0  # messages that named a rank of another node

    def add(self, words: int, messages: int, *, same_node: bool) -> None:
        with _COUNTING:
            if same_node:
                self.words_intra += words
            else:
                self.words_inter += words
                self.messages_inter += messages
            self.messages += messages


class NotBegunError(WindowError):
    """An accumulate or a fetch-and-add failed before it had begun, so it may be retried."""


class Transfer(Protocol):
    """A prepared one-sided operation: made once, started many times, one start at a time.

    It keeps the origin buffer alive. A get is done when the data have landed; an accumulate is done when the
    origin buffer may be changed, and is complete at its target only after `Window.flush`.

    What fails raises WindowError or OSError, from `start`, `done` or `wait`; `wait` returns when nothing of it is under
    way any more, and `start` begins it again.
    """

    def start(self) -> None:
        """Begin. Raises ClosedError after a close, WindowError while an earlier start is under way."""

    def done(self) -> bool:
        """True if the last start is over; gives MPI progress. True before the first start."""

    def wait(self) -> None:
        """Return when done, without holding a core for long."""

    def close(self) -> None:
        """Free the resources of the preparation. Local, may be repeated, in any order with the window's close."""


class Window(Protocol):
    """Memory exposed by every rank of a communicator. Calls are local unless marked collective.

    Calls on one window may come from several threads where MPI provides THREAD_MULTIPLE.
    """

    flavour: str
    """Its name in `rma_mm.flavours.FLAVOURS`, where the facts of it are."""
    nbytes: int
    """Bytes that this rank exposes."""
    counters: Counters
    """Traffic that this rank caused through this window."""

    @property
    def local(self) -> NDArray[np.uint8]:
        """The bytes that this rank exposes, shape (nbytes,); must not be used after `close`."""

    def reaches(self, rank: int) -> bool:
        """True if this rank can load from and store to the memory of `rank`: always so for its own."""

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DTypeLike
    ) -> Array | None:
        """Return an array directly on the memory of `rank`, or None when that is out of reach.

        `offset` is in bytes, `strides` in elements. Raises WindowError when the array would not fit.
        """

    def get(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Transfer:
        """Prepare to read `target` of `rank` into positions `rows` x `cols` of the 2-D array `origin`.

        Both sides have the same number of rows and of columns; elements are those of `origin`. Raises WindowError.
        """

    def accumulate(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, op: str = "SUM") -> Transfer:
        """Prepare to add positions `rows` x `cols` of the 2-D array `origin` to `target` of `rank`.

        `op` is MPI's name of one of `REDUCTIONS`; SUM of bool is logical or. Atomic per element against others with the
        same op: between an op and another on the same elements all ranks flush and meet. Raises WindowError, or
        DtypeError if `Flavour.accumulates` is false.
        """

    def fetch_add(self, rank: int, offset: int, value: int) -> int:
        """Add to the int64 at this byte offset of `rank`, atomically, and return its old value.

        Counts one message and no words. It gives up the core while the target is slow to answer.
        """

    def peek(self, rank: int, starts: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Read a stretch of the memory of `rank` from each of these bytes on into a row of `out`, and count nothing.

        So that a transfer can be checked: each stretch is read on its own, by no `Transfer`.
        """

    def flush(self) -> None:
        """Return when everything that this rank added is complete at its targets; gets are waited for one by one."""

    def sync(self) -> None:
        """Make this rank's loads and stores and the windows' transfers see each other (MPI_Win_sync)."""

    def close(self, leave_memory: bool = False) -> None:
        """Collective. Completes what is under way and frees the memory; may be repeated.

        leave_memory: what arrays show of it stays mapped until the process ends.
        """


def check_transfer(window: str, origin: Array, rows: Span, cols: Span, target: Patch, exposed: int) -> None:
    """Raise WindowError unless origin positions and target fit each other and their memories (`exposed` bytes)."""
    itemsize = origin.itemsize
    if origin.ndim != 2 or any(stride % itemsize for stride in origin.strides):
        raise WindowError(
            f"{window}: origin has shape {origin.shape} and byte strides {origin.strides}; it must be 2-D with "
            f"strides that are multiples of its {itemsize}-byte elements; copy it first"
        )
    if (len(rows), len(cols)) != target.shape:
        raise WindowError(f"{window}: origin positions {len(rows)} x {len(cols)} do not match target {target.shape}")
    if rows.stop > origin.shape[0] or cols.stop > origin.shape[1]:
        raise WindowError(f"{window}: origin positions {rows} x {cols} leave the origin's shape {origin.shape}")
    check_extent(window, target.offset, target.stop(itemsize), exposed)


def check_extent(window: str, start: int, stop: int, exposed: int) -> None:
    """Raise WindowError unless bytes start … stop - 1 lie within `exposed` bytes."""
    if start < 0 or stop > exposed:
        raise WindowError(f"{window}: bytes {start} to {stop} leave the {exposed} bytes that the target exposes")


def check_addable(window: str, dtype: np.dtype[Any], op: str) -> None:
    """Raise DtypeError for an element type that a flavour cannot add so (MPICH would end the job by assertion)."""
    flavour = FLAVOURS[window]
    if op not in flavour.operations:
        raise WindowError(f"{window}: cannot accumulate by {op!r}; use one of {', '.join(flavour.operations)}")
    if not flavour.accumulates(dtype, op):
        valid = ", ".join(name for name in flavour.types if flavour.accumulates(name, op))
        raise DtypeError(f"{window}: cannot accumulate dtype {dtype} by {op}; use one of {valid}")


def closed(what: str) -> ClosedError:
    return ClosedError(f"{what} is closed; open a new one, or close it later")


def view_on(
    base: NDArray[np.uint8], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any
) -> Array:
    """An array of this shape on the bytes `base`, `strides` in elements. Raises WindowError when it does not fit."""
    element = np.dtype(dtype)
    byte_strides = tuple(stride * element.itemsize for stride in strides)
    if 0 in shape:
        return np.empty(shape, element)
    last = sum((extent - 1) * stride for extent, stride in zip(shape, byte_strides, strict=True))
    if offset < 0 or min(strides, default=1) < 0 or offset + last + element.itemsize > base.size:
        raise WindowError(
            f"view: shape {shape}, strides {strides}, dtype {element} at byte {offset} leaves {base.size} exposed bytes"
        )
    array: Array = np.ndarray(shape, element, buffer=base.data, offset=offset, strides=byte_strides)
    return array


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Uninitialised private memory that starts at a multiple of `ALIGNMENT`."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    shift = -raw.ctypes.data % ALIGNMENT
    return raw[shift : shift + nbytes]


def window_bytes(memory: Any, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8, nbytes) if nbytes else np.empty(0, np.uint8)

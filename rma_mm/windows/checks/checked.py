"""Windows whose transfers are checked, for meshes that are made while RMA_MM_CHECK is 1.

A get begins on a poisoned place; as soon as it says that it is over, what is there is compared with what the target
holds, read by another way: in place, or line by line. What is accumulated is kept until the ranks meet, for the
target to compare (`runtime.execution.checked_pushes`). None of this is counted. What differs is noted, and told to
all ranks when an operation of the mesh ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import OptionError, quoted
from rma_mm.geometry.span import Span
from rma_mm.windows.base import Array, Patch, Transfer, Window
from rma_mm.windows.checks.poison import differing, pattern

T = TypeVar("T")

SWITCH = "RMA_MM_CHECK"  # environment variable: 1 to check, 0 or nothing not to


class Push(NamedTuple):
    window: Window
    rank: int  # to whom
    target: Patch
    values: Array
    op: str
    what: str  # the operation that it belongs to


class Checks:
    """Findings of the checks of a mesh on this rank that are not yet reported."""

    def __init__(self) -> None:
        self.findings: list[str] = []  # what differs, a sentence each
        self.pushed: list[Push] = []  # what this rank accumulated since the ranks last met

    @staticmethod
    def wanted() -> bool:
        """True if the environment asks for checks. Raises OptionError."""
        value = os.environ.get(SWITCH, "")
        if value not in ("", "0", "1"):
            raise OptionError(f"{SWITCH}: got {quoted(value)}; must be 1 to check every transfer and product, or 0")
        return value == "1"


class CheckedTransfer:
    """A transfer (see `base.Transfer`) with its expected data."""

    def __init__(
        self, inner: Transfer, window: CheckedWindow, rank: int, target: Patch, origin: Array, box: tuple[Span, Span]
    ) -> None:
        self.inner, self.window, self.rank, self.target, self.origin = inner, window, rank, target, origin
        self.box = np.ix_(*(span.indices for span in box))
        self.what = f"a transfer with rank {rank}"  # the operation that it belongs to
        self.is_closed = False

    def start(self) -> None:
        self.inner.start()

    def done(self) -> bool:
        return self.inner.done()

    def wait(self) -> None:
        self.inner.wait()

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()


class CheckedGet(CheckedTransfer):
    """A get, compared when it is over."""

    is_under_way = False

    def start(self) -> None:
        if not (self.is_closed or self.window.is_closed) and self.inner.done():
            self.origin[self.box] = pattern(self.origin.dtype)
        self.inner.start()
        self.is_under_way = True

    def done(self) -> bool:
        is_done = self._tried(self.inner.done)
        if is_done:
            self._compare()
        return is_done

    def wait(self) -> None:
        self._tried(self.inner.wait)
        self._compare()

    def _tried(self, act: Callable[[], T]) -> T:
        """Return the result of `act`; if it fails, skip the comparison."""
        try:
            return act()
        except Exception:
            self.is_under_way = False
            raise

    def _compare(self) -> None:
        if not self.is_under_way:
            return
        self.is_under_way = False
        got = self.origin[self.box]  # a copy of what is there now: nothing may land later
        held = self.window.contents(self.rank, self.target, got.dtype)
        wrong = differing(got, held)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            place = self.target.rows.indices[at[0]], self.target.cols.indices[at[1]]
            self.window.checks.findings.append(
                f"{self.what}: {wrong.sum()} of {wrong.size} elements that came from rank {self.rank} are not what it "
                f"holds: position {place[0]}, {place[1]} of its tile is {held[at]}, and {got[at]} came"
            )


class CheckedAccumulate(CheckedTransfer):
    """An accumulate, kept for its target to compare."""

    op = "SUM"

    def start(self) -> None:
        values = self.origin[self.box]
        self.inner.start()
        self.window.checks.pushed.append(Push(self.window, self.rank, self.target, values, self.op, self.what))


class CheckedWindow:
    """A window (see `base.Window`) whose gets and accumulates are checked, whatever its flavour."""

    def __init__(self, inner: Window, checks: Checks) -> None:
        self.inner, self.checks, self.is_closed = inner, checks, False
        self.flavour, self.nbytes, self.counters = inner.flavour, inner.nbytes, inner.counters
        self.reaches, self.view, self.peek = inner.reaches, inner.view, inner.peek
        self.fetch_add, self.flush, self.sync = inner.fetch_add, inner.flush, inner.sync

    @property
    def local(self) -> NDArray[np.uint8]:
        return self.inner.local

    def get(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Transfer:
        inner = self.inner.get(rank, target, origin, rows, cols)
        return CheckedGet(inner, self, rank, target, origin, (rows, cols))

    def accumulate(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, op: str = "SUM") -> Transfer:
        inner = self.inner.accumulate(rank, target, origin, rows, cols, op)
        made = CheckedAccumulate(inner, self, rank, target, origin, (rows, cols))
        made.op = op
        return made

    def close(self, leave_memory: bool = False) -> None:
        self.is_closed = True
        self.inner.close(leave_memory)

    def contents(self, rank: int, target: Patch, dtype: np.dtype[Any]) -> Array:
        """Return the memory of `rank` at `target`, read by another path than transfers use. Counts nothing."""
        rows, cols = target.rows, target.cols
        if not (rows and cols):
            return np.empty(target.shape, dtype)
        memory = self.view(rank, target.offset, (rows.stop, cols.stop), target.strides, dtype)
        if memory is not None:
            return memory[np.ix_(rows.indices, cols.indices)]
        if target.strides[0] >= target.strides[1]:
            return self._lines(rank, target, dtype)
        return self._lines(rank, Patch(target.offset, target.strides[::-1], cols, rows), dtype).T

    def _lines(self, rank: int, target: Patch, dtype: np.dtype[Any]) -> Array:
        """Return the same of memory out of reach, read without gaps for every row."""
        (down, right), first = target.strides, target.cols.start
        lines = np.empty((len(target.rows), (target.cols.stop - 1 - first) * right + 1), dtype)
        starts = target.offset + (target.rows.indices * down + first * right) * dtype.itemsize
        self.peek(rank, starts.tolist(), lines.view(np.uint8))
        return lines[:, (target.cols.indices - first) * right]


def labelled(transfer: Transfer, what: object) -> Transfer:
    """Return the transfer, labelled with the operation it belongs to if it is checked."""
    if isinstance(transfer, CheckedTransfer):
        transfer.what = str(what)
    return transfer

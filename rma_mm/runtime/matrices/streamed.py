"""Matrices that stay in files: operands of products, which read panels of them while others are multiplied."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from functools import cache, partial
from time import perf_counter_ns as clock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import FileFormatError, WindowError
from rma_mm.geometry.layout import everywhere
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.calibration.lookup import VARIABLE
from rma_mm.runtime.files.opened import Opened
from rma_mm.runtime.files.reread import reread
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows import Counters
from rma_mm.windows.waiting import wait

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

SAMPLE = 2**22  # bytes that are read to find out how fast that goes
TYPICALLY = 1 / 2e9  # seconds of a byte where that is not measured
FILE = "file"  # name used instead of that of a window's flavour


class FileMatrix(DistMatrix):
    """A matrix in a file, as a product takes it. Each rank reads what it wants of all of it, and holds nothing."""

    in_place = False
    reading = 0.0  # seconds in which a byte of it is read now, by one rank

    @classmethod
    def of(cls, name: str, x: Opened, mesh: Mesh, known: dict[str, float] | None = None) -> FileMatrix:
        """Return an opened matrix as operand `name`. Collective. Raises FileFormatError, DisagreementError.

        known: operand → what was measured of its file, of which this is a part; alike on all ranks.
        """
        with agreed(mesh.comm, "read", matrix=name) as facts:
            x.check()
            facts |= x.facts
            is_measured = mesh.rank == 0 and not os.environ.get(VARIABLE) and name not in (known or ())
            took = _seconds_a_byte(x) if is_measured else TYPICALLY
        if known is None or name not in known:
            seconds = np.array([took])
            wait(mesh.comm.Ibcast(seconds))
            took = float(seconds[0])
        took = took if known is None else known.setdefault(name, took)
        block: Any = FileBlock(FileWindow(x), x.dtype, mesh.next_serial(), np.empty((0, 0), x.dtype))
        made = cls(mesh, x.shape, x.dtype, everywhere(), block, flipped=x.fortran_order)
        made.reading = took
        return made

    @property
    def file(self) -> FileWindow:
        """Return the file, and the amount read of it."""
        window: Any = self.block.window
        assert isinstance(window, FileWindow)
        return window

    @property
    def chunks(self) -> tuple[int, int]:
        """Rows and columns that are kept together in the file."""
        rows, cols = self.file.source.chunks or (1, 1)
        return (cols, rows) if self.flipped != self.file.source.fortran_order else (rows, cols)


class FileWindow:
    """A file in the role of a window: reads that proceed behind the rank's other work."""

    flavour = FILE

    def __init__(self, source: Opened) -> None:
        self.source = source
        self.counters = Counters()  # nothing comes from other ranks
        self.nbytes = 0  # what this rank has read
        self.seconds = 0.0  # in which it did

    def reaches(self, rank: int) -> bool:
        return False

    def get(
        self, rank: int, target: Region, origin: NDArray[Any], rows: Span, cols: Span
    ) -> Reading:
        return Reading(partial(self._read, target, origin[rows.as_slice(), cols.as_slice()]))

    def sync(self) -> None:
        """Do nothing: a product only reads this file."""

    flush = sync

    def _read(self, region: Region, out: NDArray[Any]) -> None:
        begun = clock()
        if self.source.fortran_order:
            region, out = region.T, out.T
        self.source.read(region, out)
        self.nbytes += out.nbytes
        self.seconds += (clock() - begun) * 1e-9


@dataclass(eq=False)
class FileBlock:
    """A file where memory of ranks is expected."""

    window: FileWindow
    dtype: np.dtype[Any]
    serial: int
    local: NDArray[Any] = field(repr=False)  # nothing

    @property
    def key(self) -> tuple[FileWindow, int]:
        return self.window, 0

    def unheld(self) -> FileBlock:
        return self

    def patch(self, rank: int, positions: Region) -> Region:
        return positions


def _seconds_a_byte(x: Opened) -> float:
    """Measure the seconds per byte of reading from the middle of the file, with decompression."""
    order = (1, 0) if x.fortran_order else (0, 1)
    chunks, wanted = x.chunks or (1, 1), SAMPLE / x.dtype.itemsize
    (lines, step), (length, width) = ((x.shape[dim], chunks[dim]) for dim in order)
    width = min(length, max(1, round(wanted / (step * width))) * width)  # as much of a line of chunks as need be
    count = min(lines, -(-int(wanted) // (step * max(1, width))) * step)
    if count * width < wanted / 4:
        return TYPICALLY
    first = (lines - count) // 2 // step * step
    region = Region.box((first, first + count), (0, width))
    begun = clock()
    out = x.read(region.T if x.fortran_order else region)
    return (clock() - begun) * 1e-9 / out.nbytes


@cache
def reader() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1, "rma_mm reader")


class Reading:
    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read
        self._over: Future[None] | None = None

    def start(self) -> None:
        if not self.done():
            raise WindowError("read: it is under way already")
        self._over = reader().submit(self._read)

    def done(self) -> bool:
        """True if it is over. Raises what it failed with."""
        if self._over is None or not self._over.done():
            return self._over is None
        self._over.result()
        return True

    def wait(self) -> None:
        """Return when it is over. Raises what it failed with."""
        if self._over is not None:
            self._over.result()

    def close(self) -> None:
        self._over = None


@contextmanager
def read_again(*matrices: Any) -> Iterator[list[Any]]:
    """Yield the matrices for a check, with those in files read again. Collective.

    Raises FileFormatError on every rank where a file cannot be read again.
    """
    failures: list[Exception] = []
    seen = list(matrices)
    for number, x in enumerate(matrices):
        if isinstance(x, FileMatrix):
            file = x.file.source
            again = reread(x.mesh.comm, file.path, file.again, file.dtype, file.shape, failures)
            seen[number] = again.T if x.flipped != file.fortran_order else again
    try:
        yield seen
    finally:
        if files := [x for x in matrices if isinstance(x, FileMatrix)]:
            with agreed(files[0].mesh.comm, "check"):
                if failures:
                    raise FileFormatError(f"a file cannot be read again to check the result: {failures[0]}")


def as_operands(A: Any, B: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Return A and B as products take them: each in a file as a `FileMatrix`, all others as they are. Collective.

    The same matrix of a file is one twice, so that a product knows it, and reads it once where it can.
    """
    a = FileMatrix.of("A", A, mesh) if isinstance(A, Opened) else A
    if isinstance(A, Opened) and isinstance(B, Opened):
        with agreed(mesh.comm, "read") as facts:
            is_same = facts["B is A"] = A.is_same(B)
        if is_same:
            return a, a
    return a, FileMatrix.of("B", B, mesh) if isinstance(B, Opened) else B

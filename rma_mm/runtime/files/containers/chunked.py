"""Matrices that a library reads, in chunks mostly: each chunk that a part lies in is read once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.version import Version

BAND = 2**22  # bytes that are read at a time, about: what they are read into is held beside where they are to lie


@dataclass(frozen=True)
class ChunkedFile:
    """A matrix that a library reads, in chunks or not: what a `Source` does, except for `again`."""

    path: str  # the file, or folder
    inner: str  # its name there
    shape: tuple[int, int]  # rows and columns
    dtype: np.dtype[Any]  # element type once read
    chunks: tuple[int, int] | None
    """Rows and columns of what should be read as a whole by one rank; None for a vector, and without chunks."""
    step: tuple[int, int]  # rows and columns of what is decompressed together: a chunk
    version: Version  # of the file that says what it is
    array: tuple[int, ...] = field(default=(), kw_only=True)  # shape of a vector; `shape` is then that of a row
    fortran_order: bool = field(default=False, kw_only=True)
    is_reversed: bool = field(default=False, kw_only=True)

    @abstractmethod
    def reader(self) -> AbstractContextManager[Any]:
        """Return a block with what gives the array of a part for slices. Errors inside are FileFormatError."""

    @property
    def facts(self) -> Mapping[str, object]:
        """Return the facts that all ranks must have found alike."""
        facts = {"shape": self.shape, "dtype": self.dtype.name, "chunks": self.chunks}
        return facts | {"step": self.step, "matrix": self.inner}

    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (region.shape, `dtype`) with the part in `region`; each chunk it lies in is decompressed once.

        Raises FileFormatError if the file changed since it was opened, or a chunk cannot be decompressed.
        """
        if not region:
            return
        self.version.check()
        with self.reader() as held:
            most = BAND // self.dtype.itemsize
            for rows in _bands(region[0], self.step[0], most // max(1, len(region[1]))):
                for cols in _bands(region[1], self.step[1], most // len(rows)):
                    box = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
                    part = held[box] if not self.array else held[box[1]][None]
                    within = Region((Span.range(rows.start, rows.stop), Span.range(cols.start, cols.stop)))
                    inside = Region((rows, cols))
                    out[region.locate(inside).selector()] = part[within.locate(inside).selector()]
        self.version.check()

    def check(self) -> None:
        self.version.check()


def cuts_none(region: Region, shape: tuple[int, ...], step: tuple[int, ...]) -> bool:
    """True if a region holds all or nothing of each chunk, of `step` elements, of a matrix.

    >>> cuts_none(Region.box((4, 7), (0, 5)), (7, 9), (4, 5)), cuts_none(Region.box((4, 6), (0, 5)), (7, 9), (4, 5))
    (True, False)
    """
    return all(
        start % each == 0 and (stop % each == 0 or stop == extent)
        for span, extent, each in zip(region, shape, step, strict=True)
        for start, stop in span.runs
    )


def _bands(span: Span, step: int, most: int) -> Iterator[Span]:
    """Yield a span in pieces: no two of them share a chunk of `step`, none goes over a chunk that it has nothing of."""
    most = max(step, most // step * step)
    piece: list[tuple[int, int]] = []
    for start, stop in span.runs:
        for at in range(start // most * most, stop, most):
            first, last = max(start, at), min(stop, at + most)
            if piece and (piece[0][0] < at or first // step > (piece[-1][1] - 1) // step + 1):
                yield Span(piece)
                piece = []
            piece.append((first, last))
    if piece:
        yield Span(piece)

"""A part of a matrix that stays in its file, and is read as checks look at one piece of it after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.formats import Readable

BAND = 2**24
"""Bytes that are read at a time where rows, or columns, are looked at in their order."""
Index = slice | NDArray[np.int64]


class LazyTile:
    """What the checks of a product ask of an array: rows and columns of it, its shape, and its transposed view.

    What cannot be read counts as zeros, and is remembered in `failures`: a check is collective, and ends together.
    """

    def __init__(self, file: Readable, region: Region, failures: list[Exception], is_turned: bool = False) -> None:
        self.file, self.region, self.failures, self.is_turned = file, region, failures, is_turned
        self.dtype = file.dtype
        self._band: tuple[int, int, int, NDArray[Any]] | None = None
        """(dimension, first, last, elements) of what was read last."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, cols = self.region.shape
        return (cols, rows) if self.is_turned else (rows, cols)

    @property
    def size(self) -> int:
        """Elements."""
        return self.region.size

    @property
    def T(self) -> LazyTile:
        """The transposed part."""
        return LazyTile(self.file, self.region, self.failures, not self.is_turned)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def __getitem__(self, key: Index | tuple[Index, Index]) -> Any:
        """An array of some rows and columns; of all rows and a slice of columns, a part that is not read yet."""
        rows, cols = key if isinstance(key, tuple) else (key, slice(None))
        is_later = isinstance(key, tuple) and isinstance(cols, slice) and rows == slice(None)
        if self.is_turned:
            rows, cols = cols, rows
        if is_later:
            some = (_positions(span, index)[0] for span, index in zip(self.region, (rows, cols), strict=True))
            return LazyTile(self.file, Region(some), self.failures, self.is_turned)
        (down, at), (across, to) = (_positions(*each) for each in zip(self.region, (rows, cols), strict=True))
        found = self._part(Region((down, across)))
        found = found if at is None else found[at]
        found = found if to is None else found[:, to]
        return found.T if self.is_turned else found

    def _part(self, region: Region) -> NDArray[Any]:
        """Some of it; of rows, or columns, that are looked at in their order those that follow are read on the way."""
        for dim in (0, 1):
            own, other = self.region[dim], self.region[1 - dim]
            if region[1 - dim] != other or not region or not (own.is_contiguous and region[dim].is_contiguous):
                continue
            first, last = region[dim].start, region[dim].stop
            if self._band is None or self._band[0] != dim or not self._band[1] <= first <= last <= self._band[2]:
                stop = min(own.stop, max(last, first + BAND // (len(other) * self.dtype.itemsize)))
                band = Span.range(first, stop)
                self._band = dim, first, stop, self._read(Region((band, other) if dim == 0 else (other, band)))
            _, begin, _, elements = self._band
            at = slice(first - begin, last - begin)
            return elements[at] if dim == 0 else elements[:, at]
        return self._read(region)

    def _read(self, region: Region) -> NDArray[Any]:
        out = np.zeros(region.shape, self.dtype, "F" if self.file.fortran_order else "C")
        try:
            self.file.read(region, out)
        except (OSError, ValueError) as error:  # FileFormatError is one
            self.failures.append(error)
        return out


def _positions(span: Span, index: Index) -> tuple[Span, NDArray[np.int64] | None]:
    """The indices of a span at some positions, and in what order they are wanted where that is not theirs."""
    if isinstance(index, slice):
        start, stop, step = index.indices(len(span))
        at = Span.range(start, max(start, stop)) if step == 1 else Span((n, n + 1) for n in range(start, stop, step))
        return span.take(at), None
    places, order = np.unique(index, return_inverse=True)
    return span.take(Span((n, n + 1) for n in places.tolist())), order

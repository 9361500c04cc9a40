"""Matrices read from files once more, to check a product against what the disk holds.

By another way than the first time: by other code, where the format has any, in whole strips in the order of the file
that begin with another rank than the one whose part is first in most placements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import FileFormatError, display_path, truncate
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.formats import Readable
from rma_mm.runtime.ranks.agreement import agreed

if TYPE_CHECKING:
    from mpi4py import MPI

BAND = 2**24  # bytes that are read at a time where rows, or columns, are looked at in their order
Index = slice | NDArray[np.int64]


@dataclass
class Line:
    """All ranks in a line: a mesh as verification sees it."""

    comm: MPI.Intracomm
    rank: int
    grid: MeshShape


@dataclass
class Strips:
    """A matrix of which each rank holds one strip, read from a file: a matrix as verification sees it."""

    mesh: Line
    shape: tuple[int, int]  # rows and columns
    layout: Layout  # strips of rows, or of columns
    tile: Any  # this rank's strip: an array, or what stands for one

    def __post_init__(self) -> None:
        self.dtype: np.dtype[Any] = self.tile.dtype

    @property
    def region(self) -> Region:
        return self.layout.region(self.shape, self.mesh.grid, self.mesh.rank)

    @property
    def T(self) -> Strips:
        return Strips(self.mesh, self.shape[::-1], self.layout.T, self.tile.T)

    def astype(self, dtype: np.dtype[Any]) -> Strips:
        return Strips(self.mesh, self.shape, self.layout, self.tile.astype(dtype, copy=False))


def reread(
    comm: MPI.Intracomm, path: str, again: Callable[[], Readable], dtype: np.dtype[Any], shape: tuple[int, int],
    failures: list[Exception] | None = None,
) -> Strips:
    """Return the matrix in a file, of which `dtype` and `shape` are known. `again` opens it. Collective.

    failures: where it is to stay in its file, and be read as it is looked at, what then goes wrong. Raises
    FileFormatError on every rank where the file holds anything else by now.
    """
    with agreed(comm):
        try:
            made = _strips(comm, again(), dtype, shape, failures)
        except (OSError, ValueError) as error:  # ValueError: a header that cannot be read any more
            raise FileFormatError(f"{display_path(path)}: cannot be read again to check the result: {error}") from None
    return made


def _strips(
    comm: MPI.Intracomm, file: Readable, dtype: np.dtype[Any], shape: tuple[int, int],
    failures: list[Exception] | None,
) -> Strips:
    """This rank's strip. Raises OSError, ValueError."""
    if (file.shape, file.dtype) != (shape, dtype):
        raise ValueError(f"it now holds {truncate(file.shape)} of {file.dtype}, before {shape} of {dtype.name}")
    line = Line(comm, comm.rank, MeshShape((comm.size,)))
    extents = shape[::-1] if file.fortran_order else shape
    made = Strips(line, extents, strip_layout(extents[0], comm.size), np.empty((0, 0), dtype))
    if failures is not None:
        made = made.T if file.fortran_order else made
        made.tile = LazyTile(file, made.region, failures)
        return made
    made.tile = np.empty(made.region.shape, dtype)
    made = made.T if file.fortran_order else made
    file.read(made.region, made.tile)
    return made


def strip_layout(extent: int, count: int) -> Layout:
    """Strips of rows for `count` ranks, the first strip on rank 1."""
    block = max(1, -(-extent // count))
    return Layout(((Level(("i",), "cyclic", (block, 0, 1 % count)),), ()))


class LazyTile:
    """An array as the checks of a product see it: rows and columns read on demand, its shape, its transpose.

    What cannot be read counts as zeros, and is remembered in `failures`: a check is collective, and ends together.
    """

    def __init__(self, file: Readable, region: Region, failures: list[Exception], is_turned: bool = False) -> None:
        self.file, self.region, self.failures, self.is_turned = file, region, failures, is_turned
        self.dtype = file.dtype
        self._band: tuple[int, int, int, NDArray[Any]] | None = None
        """(dimension, first, last, elements) of what was read last."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.region.shape
        return (cols, rows) if self.is_turned else (rows, cols)

    @property
    def size(self) -> int:
        return self.region.size

    @property
    def T(self) -> LazyTile:
        return LazyTile(self.file, self.region, self.failures, not self.is_turned)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def __getitem__(self, key: Index | tuple[Index, Index]) -> Any:
        """Return an array of some rows and columns; of all rows and a slice of columns, a part that is not read yet."""
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
        """Return some rows or columns; if they are requested in order, the following ones are read ahead."""
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
    """Return the indices of a span at some positions, and their requested order if that differs."""
    if isinstance(index, slice):
        start, stop, step = index.indices(len(span))
        at = Span.range(start, max(start, stop)) if step == 1 else Span((n, n + 1) for n in range(start, stop, step))
        return span.take(at), None
    places, order = np.unique(index, return_inverse=True)
    return span.take(Span((n, n + 1) for n in places.tolist())), order

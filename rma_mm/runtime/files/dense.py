"""A matrix that lies in a file as one dense array, by rows or by columns: most formats are this behind a header."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import FileFormatError, display_path, truncate
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.formats import check_extents, unwritable
from rma_mm.runtime.files.sieve import read_region
from rma_mm.runtime.files.version import Version, opened
from rma_mm.unfinished import Unfinished

SMALL_BOX = 256  # elements below which a box of a many-run region is not worth a slice of its own


@dataclass(frozen=True)
class DenseFile:
    """A matrix in a file whose header has been checked: what a `Source` does, except for `again`."""

    path: str  # as the user gave it
    shape: tuple[int, int]  # rows and columns
    dtype: np.dtype[Any]  # element type once read: in native byte order, bfloat16 for |V2
    fortran_order: bool  # true if columns are contiguous
    offset: int  # bytes before the first element
    stored: np.dtype[Any]  # element type in the file, in the file's byte order
    version: Version  # the file as of when its header was read
    array: tuple[int, ...] = field(default=(), kw_only=True)
    """Shape of an array that is not two-dimensional; `shape` is then that of the matrix it is stored as."""
    is_reversed: bool = field(default=False, kw_only=True)
    """True if such an array lies in the file with its dimensions in reverse order."""

    @property
    def facts(self) -> Mapping[str, object]:
        """Return the facts that all ranks must have found alike."""
        facts = {"shape": self.shape, "dtype": self.dtype.name, "fortran_order": self.fortran_order}
        return facts | {"offset": self.offset}

    def check_size(self) -> None:
        """Raise FileFormatError if the file has too few bytes, or the matrix is larger than any can be."""
        name, size = display_path(self.path), self.version.size
        needed = self.offset + prod(self.shape) * self.stored.itemsize
        if size < needed:
            raise FileFormatError(
                f"{name}: is truncated: {truncate(self.shape)} of {self.dtype.name} needs {truncate(needed)} bytes "
                f"with its header, the file has {size}"
            )
        check_extents(name, self.shape)

    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (region.shape, `dtype`) with the part of the matrix in `region`; the file is never mapped.

        Raises FileFormatError if the file changed since its header was read.
        """
        if not region:
            return
        try:
            with opened(self.path) as descriptor:
                self.version.check(descriptor)
                stored = BFLOAT16 if self.dtype == BFLOAT16 else self.stored
                turned = self.fortran_order
                given = (self.shape[::-1], region.T, out.T) if turned else (self.shape, region, out)
                read_region(descriptor, self.offset, stored, *given)
                self.version.check(descriptor)
        except OSError as error:
            raise FileFormatError(f"{display_path(self.path)}: cannot be read any more: {error}") from None

    def check(self) -> None:
        self.version.check()


@dataclass(frozen=True)
class DenseSink:
    """A file in the making that holds a matrix by rows: what a `Sink` does, except for `source`."""

    path: str  # the final name, links followed
    temporary: str  # where the parts go until then
    shape: tuple[int, int]  # rows and columns
    dtype: np.dtype[Any]  # element type of the matrix
    stored: np.dtype[Any]  # element type in the file, of the same size: |V2 for bfloat16
    offset: int  # bytes before the first element
    held: Unfinished | None = field(compare=False, repr=False)  # the file, on the rank that made it

    @classmethod
    def reserve(
        cls, path: str | os.PathLike[str], shape: tuple[int, int], dtype: np.dtype[Any], stored: np.dtype[Any],
        header: bytes = b"",
    ) -> Self:
        """Reserve the whole file under a temporary name, so that a full disk fails before the multiplication.

        Raises FileFormatError naming the path and why it cannot be written.
        """
        held = Unfinished(f"output {display_path(path)}", path)
        held.reserve(header, len(header) + prod(shape) * stored.itemsize)
        return cls(held.path, held.temporary, shape, dtype, stored, len(header), held)

    def check(self) -> None:
        """Raise FileFormatError if this rank cannot write, say because its node does not see the directory."""
        try:
            with _to_write(self.temporary):
                pass
        except OSError as error:
            raise unwritable(self.path, str(error.strerror)) from None

    def write(self, region: Region, tile: NDArray[Any]) -> None:
        """Write `tile` (region.shape) as the part of the matrix in `region`, down to the disk. Raises FileFormatError.

        Through a map: pieces are too small for calls where columns are dealt out. It lives only as long as this call,
        so that mapped pages do not pile up.
        """
        if not region:
            return
        length = self.offset + prod(self.shape) * self.stored.itemsize
        try:
            with _to_write(self.temporary) as descriptor:
                if os.fstat(descriptor).st_size < length:
                    raise OSError(f"{display_path(self.temporary)} was truncated meanwhile")
                with mmap.mmap(descriptor, length, access=mmap.ACCESS_WRITE) as memory:
                    for part, at in _boxes(region):
                        self._matrix(memory)[part] = tile[at].view(self.stored)
                os.fsync(descriptor)  # each rank: what is kept back may be kept by its own node
        except (OSError, ValueError) as error:
            raise FileFormatError(f"output {display_path(self.path)}: {error}") from None

    def _matrix(self, memory: mmap.mmap) -> NDArray[Any]:
        return np.ndarray(self.shape, self.stored, memory, self.offset)

    def publish(self) -> None:
        """Give the file its final name; every rank has written. Raises FileFormatError. On the rank that made it."""
        assert self.held is not None
        self.held.publish()

    def discard(self) -> None:
        """Remove what was written, on the rank that made it; nothing happens elsewhere, or once it is published."""
        if self.held is not None:
            self.held.discard()


@contextmanager
def _to_write(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _boxes(region: Region) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Pairs of indices (into the matrix, into the packed tile) that cover `region`."""
    count = prod(len(span.runs) for span in region)
    if count > 1 and region.size < SMALL_BOX * count:
        return [(region.selector(), (slice(None), slice(None)))]
    return [(box.selector(), region.locate(box).selector()) for box in region.run_boxes()]

"""Matrices read from files once more, to check a product against what the disk holds.

By another way than the first time: NumPy's own reader of headers, whole strips in the order of the file, and strips
that begin with another rank than the one whose part is first in most placements.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import FileFormatError, cut, named
from rma_mm.geometry.layout import Layout, Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region
from rma_mm.runtime.ranks.agreement import agree_error

if TYPE_CHECKING:
    from mpi4py import MPI

READERS: dict[tuple[int, int], Callable[[Any], Any]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


@dataclass
class Line:
    """All ranks in a line: a mesh as verification sees it."""

    comm: MPI.Intracomm
    rank: int
    shape: MeshShape


@dataclass
class Strips:
    """A matrix of which each rank holds one strip, read from a file: a matrix as verification sees it."""

    mesh: Line
    shape: tuple[int, int]
    """Rows and columns."""
    layout: Layout
    """Strips of rows, or of columns."""
    tile: NDArray[Any]
    """This rank's strip."""

    def __post_init__(self) -> None:
        self.dtype: np.dtype[Any] = self.tile.dtype

    @property
    def region(self) -> Region:
        """The global indices that this rank holds."""
        return self.layout.region(self.shape, self.mesh.shape, self.mesh.rank)

    @property
    def T(self) -> Strips:
        """The transposed matrix, on the same memory."""
        return Strips(self.mesh, self.shape[::-1], self.layout.T, self.tile.T)

    def astype(self, dtype: np.dtype[Any]) -> Strips:
        """The same matrix in another type."""
        return Strips(self.mesh, self.shape, self.layout, self.tile.astype(dtype, copy=False))


def reread(comm: MPI.Intracomm, path: str, dtype: np.dtype[Any], shape: tuple[int, int]) -> Strips:
    """The matrix in a file, of which `dtype` and `shape` are known. Collective.

    Raises FileFormatError on every rank where the file holds anything else by now.
    """
    error: Exception | None = None
    try:
        made = _strips(comm, path, dtype, shape)
    except (OSError, ValueError) as caught:  # ValueError: a header that NumPy does not read
        error = FileFormatError(f"{named(path)}: cannot be read again to check the result: {caught}")
    agree_error(comm, error)
    return made


def _strips(comm: MPI.Intracomm, path: str, dtype: np.dtype[Any], shape: tuple[int, int]) -> Strips:
    """This rank's strip. Raises OSError, ValueError."""
    line = Line(comm, comm.rank, MeshShape((comm.size,)))
    with open(path, "rb", buffering=0) as file:
        stored, turned, found = _header(file)
        held = BFLOAT16 if stored == "V2" else stored.newbyteorder("=")
        if found != shape or held != dtype:
            raise ValueError(f"it holds {cut(found)} of {stored}, and held {shape} of {dtype.name}")
        outer, inner = shape[::-1] if turned else shape
        layout = strip_layout(outer, comm.size)
        region = layout.region((outer, inner), line.shape, comm.rank)
        raw = np.empty(region.shape, stored)
        if region:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
            file.seek(region[0].start * inner * stored.itemsize, os.SEEK_CUR)
            _fill(file, raw.reshape(-1).view(np.uint8).data)
    tile = _typed(raw, dtype)
    made = Strips(line, (outer, inner), layout, tile)
    return made.T if turned else made


def reread_vector(path: str, like: NDArray[Any]) -> NDArray[Any]:
    """The vector in a file, of the type and length of `like`. Raises OSError, ValueError."""
    with open(path, "rb") as file:
        stored, _, shape = _header(file)
        if shape != like.shape:
            raise ValueError(f"it holds {cut(shape)}, and held {like.shape}")
        found = np.fromfile(file, stored, prod(shape))
    return _typed(found, like.dtype)


def _typed(raw: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Elements as the file has them, in a type of this machine."""
    return raw.view(dtype) if raw.dtype.kind == "V" else raw.astype(dtype, copy=False)


def strip_layout(extent: int, count: int) -> Layout:
    """Strips of rows for `count` ranks, the first strip on rank 1."""
    block = max(1, -(-extent // count))
    return Layout(((Level(("i",), "cyclic", (block, 0, 1 % count)),), ()))


def _header(file: Any) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    """(element type, whether columns are contiguous, shape); the file stands at its first element then."""
    version = npy.read_magic(file)
    # 3.0 differs from 2.0 in how names of fields are written, of which a matrix has none
    shape, turned, stored = READERS[(2, 0) if version == (3, 0) else version](file)
    return stored, turned, shape


def _fill(file: Any, rest: memoryview) -> None:
    while rest:
        count = file.readinto(rest[: 2**30])
        if not count:
            raise OSError(f"it ends {len(rest)} bytes early")
        rest = rest[count:]

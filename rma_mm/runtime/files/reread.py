"""Matrices read from files once more, to check a product against what the disk holds.

By another way than the first time: by other code, where the format has any, in whole strips in the order of the file
that begin with another rank than the one whose part is first in most placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rma_mm.errors import FileFormatError, cut, named
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.formats import Readable
from rma_mm.runtime.files.lazy import LazyTile
from rma_mm.runtime.ranks.agreement import agreed

if TYPE_CHECKING:
    from mpi4py import MPI

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
    tile: Any
    """This rank's strip: an array, or what stands for one."""

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


def reread(
    comm: MPI.Intracomm, path: str, again: Callable[[], Readable], dtype: np.dtype[Any], shape: tuple[int, int],
    failures: list[Exception] | None = None,
) -> Strips:
    """The matrix in a file, of which `dtype` and `shape` are known. `again` opens it. Collective.

    failures: where it is to stay in its file, and be read as it is looked at, what then goes wrong. Raises
    FileFormatError on every rank where the file holds anything else by now.
    """
    with agreed(comm):
        try:
            made = _strips(comm, again(), dtype, shape, failures)
        except (OSError, ValueError) as error:  # ValueError: a header that cannot be read any more
            raise FileFormatError(f"{named(path)}: cannot be read again to check the result: {error}") from None
    return made


def _strips(
    comm: MPI.Intracomm, file: Readable, dtype: np.dtype[Any], shape: tuple[int, int],
    failures: list[Exception] | None,
) -> Strips:
    """This rank's strip. Raises OSError, ValueError."""
    if (file.shape, file.dtype) != (shape, dtype):
        raise ValueError(f"it holds {cut(file.shape)} of {file.dtype}, and held {shape} of {dtype.name}")
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

"""Arrays of other than two dimensions spread over a mesh: batches of matrices first of all, and vectors."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import check_dtype
from rma_mm.errors import LayoutError, ShapeError
from rma_mm.geometry.extents import as_matrix
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region
from rma_mm.runtime.matrices.arguments import checked_extents, checked_mesh, common_dtype, placed
from rma_mm.runtime.matrices.filed import loaded, saved
from rma_mm.runtime.matrices.matrix import DistMatrix, Distributed, tiles
from rma_mm.runtime.matrices.move import move
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized


class DistArray(Distributed):
    """An array of one, three or more dimensions placed on `mesh` by `layout`. Make one by the class methods.

    Of three and more dimensions the last two are those of matrices, the others count these: a batch. It does what
    `DistMatrix` does, and is kept as a matrix whose rows are all its dimensions but the last.

    >>> D = DistArray.from_numpy(x, mesh, layout="P('l', 'i', 'j')")    # doctest: +SKIP
    """

    is_matrix = False

    def __init__(self, folded: DistMatrix, shape: tuple[int, ...], layout: Layout) -> None:
        self.folded, self.shape, self.layout = folded, shape, layout
        self.mesh, self.dtype = folded.mesh, folded.dtype

    # -- making one -------------------------------------------------------------------------------

    @classmethod
    def allocated(cls, mesh: Mesh, shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout) -> Self:
        """Return an array on new memory of the arena, everything agreed already. Collective."""
        folded = DistMatrix.allocated(mesh, as_matrix(shape), dtype, layout.folded(shape))
        return cls(folded, shape, layout)

    @classmethod
    @serialized
    def from_local(
        cls, array: NDArray[Any] | None, shape: tuple[int, ...], mesh: Mesh | None = None,
        layout: str | Layout | None = None,
    ) -> DistArray:
        """Make an array from the ranks' own NumPy arrays, in place and without a copy.

        Collective.

        Parameters
        ----------
        array : ndarray or None
            This rank's part in `layout`, C-contiguous; None on ranks that own nothing. It must not be resized or freed
            before the array is closed on every rank. If it is read-only, products cannot write to it.
        shape : tuple of int
            Shape of the whole array.
        mesh : Mesh, optional
            The ranks that hold it; the default mesh if not given.
        layout : str or Layout, optional
            Placement; blocks by default.

        Returns
        -------
        DistArray
            The array; its memory is the caller's.

        Raises
        ------
        ShapeError, LayoutError, DtypeError
            If the arguments do not fit.
        """
        mesh = checked_mesh(mesh)
        with agreed(mesh.comm, "from_local", shape=shape, layout=layout):
            shape = checked_extents(shape)
            place = placed(layout, shape, mesh)
            array = _exposable(array, place.region(shape, mesh.grid, mesh.rank).shape)
        dtype = common_dtype(mesh, array)
        flat = place.folded(shape)
        mine = flat.region(as_matrix(shape), mesh.grid, mesh.rank).shape
        local = np.empty(mine, dtype) if array is None else array.reshape(mine)
        return cls(DistMatrix(mesh, as_matrix(shape), dtype, flat, DistMatrix.adopted(mesh, local)), shape, place)

    def read_from(self, file: Any) -> None:
        """Fill this rank's part from a file. Local; raises FileFormatError."""
        if not file.is_reversed:
            file.read(self.folded.region, self.folded.tile)
            return
        turned = replace(self.layout, splits=self.layout.splits[::-1]).folded(self.shape[::-1])
        region = turned.region(file.shape, self.mesh.grid, self.mesh.rank)
        part = np.empty(region.shape, file.dtype)
        file.read(region, part)
        self.tile[...] = part.reshape(self.tile.shape[::-1]).T

    # -- what it holds ----------------------------------------------------------------------------

    @property
    def region(self) -> Region:
        """The global indices that this rank holds."""
        return self.layout.region(self.shape, self.mesh.grid, self.mesh.rank)

    @property
    def tile(self) -> NDArray[Any]:
        """This rank's part as one writable array of shape `region.shape`, indices ascending."""
        tile = self.folded.tile
        return tile if len(self.shape) == 2 else tile.reshape(self.region.shape)

    @property
    def local(self) -> dict[Region, NDArray[Any]]:
        """This rank's tiles: box of global indices → writable view."""
        return tiles(self.tile, self.region)

    @property
    def block(self) -> Block:
        """The memory under the array. Raises ClosedError after `close`."""
        return self.folded.block

    @property
    def flipped(self) -> bool:
        """True if the memory holds the transposed matrix."""
        return self.folded.flipped

    @property
    def T(self) -> Self:
        """The array with its dimensions reversed: itself if it has one. Raises ShapeError for more."""
        if self.ndim > 1:
            raise ShapeError(f"T: got an array of shape {self.shape}; use matmul's transpose_a, or einsum")
        return self

    @property
    def identity(self) -> object:
        """Return what tells this array from all others; see `DistMatrix`."""
        return (self.folded.identity, self.shape, self.layout)

    @property
    def in_place(self) -> bool:
        """True if node-mates can read this array's memory: not where it is the caller's own."""
        return self.folded.in_place

    @property
    def facts(self) -> tuple[object, ...]:
        """Return the facts that all ranks must agree on when they name this array."""
        return self.folded.facts

    def reshaped(self, shape: tuple[int, ...], layout: Layout) -> DistArray | None:
        """Return the same memory as an array of another shape with parts in the same order.

        None if some rank's part is not dense. Local.
        """
        folded, mesh = self.folded, self.mesh
        flat, place = as_matrix(shape), layout.folded(shape)
        held = [folded.layout.region(folded.shape, mesh.grid, rank).shape for rank in range(mesh.size)]
        dense = zip(folded.block.strides, held, strict=True)
        if folded.flipped or not all(strides == (max(1, cols), 1) for strides, (_, cols) in dense):
            return None
        parts = [place.region(flat, mesh.grid, rank).shape for rank in range(mesh.size)]
        block = mesh.arena.reshaped(folded.block, [(rows, cols) for rows, cols in parts])
        return DistArray(DistMatrix(mesh, flat, self.dtype, place, block), shape, layout)

    # -- moving it --------------------------------------------------------------------------------

    @serialized
    def redistribute(self, layout: str | Layout) -> DistArray:
        """Return the same array in another placement; every rank pulls its new part.

        Collective.

        Parameters
        ----------
        layout : str or Layout
            The new placement.

        Returns
        -------
        DistArray
            A new array.

        Raises
        ------
        LayoutError
            If the layout does not fit.
        """
        with agreed(self.mesh.comm, "redistribute", layout=layout) as facts:
            facts["matrix"] = self.facts
            place = placed(layout, self.shape, self.mesh)
            self.folded.block.window.sync()
        made = DistArray.allocated(self.mesh, self.shape, self.dtype, place)
        move(self.folded, made.folded.layout, made.folded.tile, made.folded.block)
        return made

    @serialized
    def to_numpy(self, root: int | None = None) -> NDArray[Any] | None:
        """Gather the array into a NumPy array.

        Collective.

        Parameters
        ----------
        root : int, optional
            The only rank that gets the array. By default every rank does.

        Returns
        -------
        ndarray or None
            The whole array; None on ranks other than `root`.
        """
        whole = self.folded.to_numpy(root)
        return None if whole is None else whole.reshape(self.shape)

    @serialized
    def save(self, path: str | PathLike[str], **options: Any) -> None:
        """Write the array to a file, each rank its own part.

        Collective.

        Parameters
        ----------
        path : str or path-like
            As in `DistMatrix.save`; the format must support arrays of any dimension, as `.npy` does.
        **options
            As in `DistMatrix.save`.
        """
        saved(self, path, options)

    def copy_from(self, other: DistArray) -> None:
        """Copy the elements of an array of the same shape and layout.

        Local.

        Parameters
        ----------
        other : DistArray
            The source.
        """
        if other.shape != self.shape or other.layout != self.layout:
            raise LayoutError(f"copy_from: got {other!r}; it must be placed like {self!r}; use redistribute")
        self.folded.tile[...] = other.folded.tile

    def close(self) -> None:
        """Release the memory, which is free once every rank has done so. Local; may be repeated."""
        self.folded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DistArray({' x '.join(map(str, self.shape))}, {self.dtype}, {self.layout} on {self.mesh.grid} ranks)"


@serialized
def load(
    path: str | PathLike[str], mesh: Mesh | None = None, layout: str | Layout | None = None, dtype: str | None = None,
    format: str | None = None,  # noqa: A002
    allow_external: bool | None = None,
) -> DistMatrix | DistArray:
    """Load a matrix, or an array of another dimension, from a file; each rank reads its own part.

    Collective.

    Parameters
    ----------
    path : str or path-like
        A file, a matrix in it, or a part of that: `A.npy`, `data.h5::/group/A`, `data.h5::/group/A[0:1000, :]`. The
        suffix of the file gives the format; an unknown suffix means `.npy`.
    mesh : Mesh, optional
        The ranks that hold the matrix; the default mesh if not given.
    layout : str or Layout, optional
        Placement. By default blocks that cut no chunk of the file. A chunk that a layout cuts is read once and then
        moved.
    dtype : str, optional
        "bfloat16" for `.npy` files that hold it as `|V2`.
    format : str, optional
        Format of a file whose suffix does not tell it, as "h5".
    allow_external : bool, optional
        True to read files that this one refers to; see `open`.

    Returns
    -------
    DistMatrix or DistArray
        A DistMatrix if the array has two dimensions.

    Raises
    ------
    FileFormatError
        If the file cannot be read.
    RmaError
        LayoutError, OptionError or DisagreementError for arguments that do not fit.
    """
    made: DistMatrix | DistArray = loaded(kind_of, (path, dtype, format), mesh, layout, allow_external)
    return made


def kind_of(shape: tuple[int, ...]) -> Any:
    return DistMatrix if len(shape) == 2 else DistArray


def as_array(x: DistArray | DistMatrix) -> DistArray:
    return x if isinstance(x, DistArray) else DistArray(x, x.shape, x.layout)


def _exposable(array: NDArray[Any] | None, wanted: tuple[int, ...]) -> NDArray[Any] | None:
    """The caller's array, if it can be exposed as a local array of shape `wanted`. Raises ShapeError, DtypeError."""
    if array is None and 0 in wanted:
        return None
    if not isinstance(array, np.ndarray) or array.shape != wanted:
        got = array.shape if isinstance(array, np.ndarray) else type(array).__name__
        raise ShapeError(f"array: got {got}; this rank's part in the layout has the shape {wanted}")
    check_dtype(array.dtype, "array's dtype")
    if not array.flags.c_contiguous:
        raise ShapeError("array: got one that is not C-contiguous, as it must be in place; copy it")
    return array

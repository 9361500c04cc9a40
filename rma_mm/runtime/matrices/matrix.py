"""Matrices spread over a mesh, each rank holding one dense local array."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.elements.dtypes import as_dtype, parse_dtype
from rma_mm.errors import DtypeError, LayoutError, MeshError, ShapeError
from rma_mm.geometry.extents import as_matrix
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.formats import Source
from rma_mm.runtime.matrices.adaptors import linear_operator
from rma_mm.runtime.matrices.arguments import (
    checked_array,
    checked_extents,
    checked_mesh,
    checked_root,
    checked_shape,
    checksum,
    common_dtype,
    exposable,
    in_order,
    pinned,
    placed,
    sliced,
)
from rma_mm.runtime.matrices.filed import loaded, saved
from rma_mm.runtime.matrices.move import collected, move
from rma_mm.runtime.matrices.operators import Multiplicand
from rma_mm.runtime.matrices.stored import Shape, Stored
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

Elements = Callable[..., Any]
FILL_BLOCK = 2**17  # elements that `from_function` asks for at a time


class Distributed(Multiplicand):
    """Distributed matrices and arrays: the constructors and methods that they share."""

    is_matrix = True
    """True if it has two dimensions, or as many as it is given."""

    @classmethod
    @serialized
    def empty(
        cls, shape: Any, mesh: Mesh | None = None, layout: str | Layout | None = None, dtype: DTypeLike = np.float64
    ) -> Self:
        """Make a matrix or an array with undefined elements.

        Collective.

        Parameters
        ----------
        shape : tuple of int
            Shape of the whole.
        mesh : Mesh, optional
            The ranks that hold it; the default mesh if not given.
        layout : str or Layout, optional
            Placement; blocks by default.
        dtype : dtype
            Element type; float64 by default.

        Returns
        -------
        Self
            A new matrix or array.

        Raises
        ------
        ShapeError, LayoutError, DtypeError
            If the arguments do not fit.
        """
        mesh, layout, dtype = in_order(mesh, layout, dtype)
        mesh = checked_mesh(mesh)
        with agreed(mesh.comm, "empty", shape=shape, dtype=dtype, layout=layout):
            shape = cls._extents(shape)
            place = placed(layout, shape, mesh)
            element = as_dtype(dtype)
        return cls.allocated(mesh, shape, element, place)

    @classmethod
    @serialized
    def from_numpy(
        cls, x: NDArray[Any] | None, mesh: Mesh | None = None, layout: str | Layout | None = None,
        root: int | None = None,
    ) -> Self:
        """Make a matrix or an array with the elements of a NumPy array.

        Collective.

        Parameters
        ----------
        x : ndarray or None
            The whole array, equal on every rank; with `root`, None on all other ranks.
        mesh : Mesh, optional
            The ranks that hold it; the default mesh if not given.
        layout : str or Layout, optional
            Placement; blocks by default.
        root : int, optional
            The only rank that passes `x`.

        Returns
        -------
        Self
            A new matrix or array.

        Raises
        ------
        ShapeError, DtypeError, LayoutError
            If the arguments do not fit.
        DisagreementError
            If ranks hold different arrays.
        """
        mesh = checked_mesh(mesh)
        if root is not None:
            return cls._from_root(x, mesh, layout, root)
        with agreed(mesh.comm, "from_numpy", layout=layout) as facts:
            array = checked_array(x, cls.is_matrix)
            place = placed(layout, array.shape, mesh)
            facts |= {"shape": array.shape, "dtype": array.dtype}
            facts["elements (by checksum)"] = checksum(array.reshape(as_matrix(array.shape)))
        made = cls.allocated(mesh, array.shape, array.dtype, place)
        made.tile[...] = array[made.region.selector()]
        made.keep_first_summand()
        return made

    @classmethod
    def _from_root(cls, x: NDArray[Any] | None, mesh: Mesh, layout: str | Layout | None, root: int) -> Self:
        with agreed(mesh.comm, "from_numpy", root=root, layout=layout):
            root = checked_root(root, mesh.grid.size, f"the mesh {mesh.grid}")
            if mesh.rank == root:
                array = checked_array(x, cls.is_matrix)
                placed(layout, array.shape, mesh)
        shape, dtype = mesh.comm.bcast((array.shape, array.dtype.name) if mesh.rank == root else None, root)
        source = cls.allocated(mesh, shape, parse_dtype(dtype), pinned(mesh, root, len(shape)))
        if mesh.rank == root:
            source.tile[...] = array
        return source.redistribute(placed(layout, shape, mesh))

    @classmethod
    @serialized
    def from_function(
        cls, shape: Any, f: Elements, mesh: Mesh | None = None, layout: str | Layout | None = None,
        dtype: DTypeLike | None = None,
    ) -> Self:
        """Make a matrix or an array whose elements are f(rows, columns), or f of more indices.

        Collective.

        Parameters
        ----------
        shape : tuple of int
            Shape of the whole.
        f : callable
            Takes an open index grid for each dimension, as from `np.ogrid`, and returns elements. It is called for
            parts of this rank's indices.
        mesh : Mesh, optional
            The ranks that hold it; the default mesh if not given.
        layout : str or Layout, optional
            Placement; blocks by default.
        dtype : dtype, optional
            Element type; by default that of f's result.

        Returns
        -------
        Self
            A new matrix or array.
        """
        mesh = checked_mesh(mesh)
        if dtype is None:
            with agreed(mesh.comm, "from_function", shape=shape) as facts:
                shape = cls._extents(shape)
                first = [np.zeros((1,) * len(shape), np.int64)] * len(shape)
                dtype = np.asarray(f(*first)).dtype if min(shape) else np.dtype(np.float64)
                facts["dtype"] = dtype
        made = cls.empty(shape, mesh, layout, dtype)
        with agreed(mesh.comm, "from_function"):
            fill(made.tile, made.region, f)
        made.keep_first_summand()
        return made

    @classmethod
    def _extents(cls, shape: Any) -> tuple[int, ...]:
        return checked_shape(shape) if cls.is_matrix else checked_extents(shape)


class DistMatrix(Stored, Distributed):
    """A matrix of `shape` (rows, columns) placed on `mesh` by `layout`. Make one by the class methods.

    >>> D = DistMatrix.from_numpy(x, mesh, layout="P('i', 'j')")    # doctest: +SKIP
    """

    @classmethod
    @serialized
    def from_local(
        cls, array: NDArray[Any] | None, shape: Shape, mesh: Mesh | None = None, layout: str | Layout | None = None
    ) -> DistMatrix:
        """Make a matrix from the ranks' own NumPy arrays, in place and without a copy.

        Collective.

        Parameters
        ----------
        array : ndarray or None
            This rank's part in `layout`, with dense rows or dense columns; None on ranks that own nothing. It must not
            be resized or freed before the matrix is closed on every rank. If it is read-only, products cannot write to
            it.
        shape : tuple of int
            (rows, columns) of the whole matrix.
        mesh : Mesh, optional
            The ranks that hold it; the default mesh if not given.
        layout : str or Layout, optional
            Placement; blocks by default.

        Returns
        -------
        DistMatrix
            The matrix; its memory is the caller's.

        Raises
        ------
        ShapeError, LayoutError, DtypeError
            If the arguments do not fit.
        """
        mesh = checked_mesh(mesh)
        with agreed(mesh.comm, "from_local", shape=shape, layout=layout):
            shape = checked_shape(shape)
            place = placed(layout, shape, mesh)
            array = exposable(array, place.region(shape, mesh.grid, mesh.rank).shape)
        dtype = common_dtype(mesh, array)
        if array is None:
            array = np.empty(place.region(shape, mesh.grid, mesh.rank).shape, dtype)
        return cls(mesh, shape, dtype, place, cls.adopted(mesh, array))

    @classmethod
    @serialized
    def load(
        cls, path: str | PathLike[str], mesh: Mesh | None = None, layout: str | Layout | None = None,
        dtype: str | None = None,
        format: str | None = None,  # noqa: A002
        allow_external: bool | None = None,
    ) -> DistMatrix:
        """Load a matrix from a file; each rank reads its own part.

        Collective.

        Parameters
        ----------
        path, mesh, layout, dtype, format, allow_external
            As in `rma_mm.load`.

        Returns
        -------
        DistMatrix
            The matrix.
        """
        made: DistMatrix = loaded(lambda _: cls, (path, dtype, format), mesh, layout, allow_external)
        return made

    @classmethod
    @serialized
    def from_source(cls, x: Any, mesh: Mesh | None = None, layout: str | Layout | None = None) -> DistMatrix:
        """Make a matrix from an array-like object that reads parts of itself; each rank reads its own part.

        Collective.

        Parameters
        ----------
        x : h5py.Dataset, zarr.Array, numpy.memmap or similar
            Has `shape` with two extents, `dtype`, and elements by two slices, x[a:b, c:d]. The same on every rank.
        mesh : Mesh, optional
            The ranks that hold the matrix; the default mesh if not given.
        layout : str or Layout, optional
            Placement; blocks by default.

        Returns
        -------
        DistMatrix
            The matrix.

        Raises
        ------
        ShapeError, DtypeError, LayoutError
            If the arguments do not fit.
        """
        mesh = checked_mesh(mesh)
        with agreed(mesh.comm, "from_source", layout=layout) as facts:
            if not (hasattr(x, "shape") and hasattr(x, "dtype") and hasattr(x, "__getitem__")):
                raise ShapeError(f"x: got {type(x).__name__}; it needs shape, dtype and elements by x[a:b, c:d]")
            shape, dtype = checked_shape(x.shape), as_dtype(x.dtype)
            place = placed(layout, shape, mesh)
            facts |= {"shape": shape, "dtype": dtype.name}
        made = cls.allocated(mesh, shape, dtype, place)
        with agreed(mesh.comm, "from_source"):
            for box, tile in tiles(made.tile, made.region).items():
                tile[...] = sliced(x, box, dtype)
        made.keep_first_summand()
        return made

    def read_from(self, file: Source) -> None:
        """Fill this rank's part from a file. Local; raises FileFormatError."""
        file.read(self.region, self.tile)

    # -- what it holds ----------------------------------------------------------------------------

    @property
    def local(self) -> dict[Region, NDArray[Any]]:
        """This rank's tiles: box of global indices → writable view."""
        return tiles(self.tile, self.region)

    # -- moving it --------------------------------------------------------------------------------

    @serialized
    def redistribute(self, layout: str | Layout) -> DistMatrix:
        """Return the same matrix in another placement; every rank pulls its new part.

        Collective.

        Parameters
        ----------
        layout : str or Layout
            The new placement.

        Returns
        -------
        DistMatrix
            A new matrix.

        Raises
        ------
        LayoutError
            If the layout does not fit.
        """
        with agreed(self.mesh.comm, "redistribute", layout=layout) as facts:
            facts["matrix"] = self.facts
            place = placed(layout, self.shape, self.mesh)
            self.block.window.sync()
        made = DistMatrix.allocated(self.mesh, self.shape, self.dtype, place)
        move(self, made.layout, made.tile, made.block)
        return made

    @serialized
    def to_numpy(self, root: int | None = None) -> NDArray[Any] | None:
        """Gather the matrix into a NumPy array.

        Collective.

        Parameters
        ----------
        root : int, optional
            The only rank that gets the array. By default every rank does.

        Returns
        -------
        ndarray or None
            The whole matrix; None on ranks other than `root`.
        """
        return collected(self, root)

    @serialized
    def save(self, path: str | PathLike[str], **options: Any) -> None:
        """Write the matrix to a file, each rank its own part.

        Collective. The parts go to a temporary file beside the target, which is then renamed.

        Parameters
        ----------
        path : str or path-like
            A file, or a matrix in it: `C.npy`, `data.h5::/group/C`. The suffix gives the format; an unknown one means
            `.npy`.
        **options
            format="h5" for other suffixes; chunks=(rows, columns), shards=(rows, columns), compress="zstd" or "none"
            for formats that have these.

        Raises
        ------
        FileFormatError, OptionError
            If the file cannot be written so.
        """
        saved(self, path, options)

    def aslinearoperator(self) -> LinearOperator:
        """Return the matrix as a `scipy.sparse.linalg.LinearOperator`.

        Local; each product by the operator is collective. All ranks run the same solver on the same NumPy vectors.

        Returns
        -------
        scipy.sparse.linalg.LinearOperator
            An operator whose results are NumPy vectors, equal on every rank.

        Raises
        ------
        OptionError
            If SciPy is not installed.
        """
        return linear_operator(self)

    def copy_from(self, other: DistMatrix) -> None:
        """Copy the elements of a matrix of the same shape and layout.

        Local.

        Parameters
        ----------
        other : DistMatrix
            The source.
        """
        if other.shape != self.shape or other.layout != self.layout:
            raise LayoutError(f"copy_from: got {other!r}; it must be placed like {self!r}; use redistribute")
        self.tile[...] = other.tile

    def __repr__(self) -> str:
        return f"DistMatrix({' x '.join(map(str, self.shape))}, {self.dtype}, {self.layout} on {self.mesh.grid} ranks)"


def overlap(one: DistMatrix, other: DistMatrix) -> bool:
    """True if this rank's parts of two matrices share memory."""
    a, b = one.block, other.block
    return a is b or (np.may_share_memory(a.local, b.local) and np.shares_memory(a.local, b.local))


def check_memory(
    A: DistMatrix, B: DistMatrix, out: DistMatrix | None, c: DistMatrix | None, own: DistMatrix | None
) -> None:
    """Raise LayoutError if a result, or a summand of it, shares memory that a product must not change.

    own: where the result goes if `out` is None, if it is there already.
    """
    if out is not None and not out.tile.flags.writeable:
        raise LayoutError("out: it lies in a read-only array of the caller; pass one that can be written to")
    if out is not None and (overlap(out, A) or overlap(out, B)):
        raise LayoutError("out: it shares memory with an operand; a product cannot overwrite what it reads")
    place = out if out is not None else own
    if c is not None and place is not None and overlap(c, place):
        raise LayoutError("c: it shares memory with out, so the product would overwrite it; pass it as out only")


def copy_in(name: str, x: NDArray[Any], made: Any) -> None:
    """Copy an array that is equal on every rank into this rank's part of a matrix, or DistArray. Raises ShapeError."""
    array = np.asarray(x)
    if array.shape != made.shape or array.dtype != made.dtype:
        raise ShapeError(
            f"{name}: got {array.dtype} of shape {array.shape}; the plan is for {made.dtype} of {made.shape}"
        )
    made.tile[...] = array[made.region.selector()]
    made.keep_first_summand()


def tiles(tile: NDArray[Any], region: Region) -> dict[Region, NDArray[Any]]:
    return {box: tile[region.locate(box).selector()] for box in region.run_boxes()} if region else {}


def fill(tile: NDArray[Any], region: Region, f: Elements) -> None:
    """Fill this rank's part, a few rows at a time."""
    if not region:
        return
    rows, *rest = np.ix_(*(span.indices for span in region))
    step = max(1, FILL_BLOCK * len(region[0]) // region.size)
    for start in range(0, len(region[0]), step):
        tile[start : start + step] = f(rows[start : start + step], *rest)


def check_matrix(
    name: str, matrix: object, mesh: Mesh, facts: tuple[Any, tuple[int, int], Layout], in_place: bool, what: str
) -> None:
    """Raise an error for an operand that differs from the one a plan, or a chain (`what`), was made for.

    facts: its element type, shape and placement. in_place: whether node-mates read its memory where it lies. Raises
    LayoutError, MeshError, DtypeError, ShapeError.
    """
    if not isinstance(matrix, DistMatrix):
        raise LayoutError(f"{name}: got {type(matrix).__name__}; execute takes DistMatrix")
    if matrix.mesh is not mesh:
        raise MeshError(f"{name}: it lives on {matrix.mesh!r}; the {what} is for {mesh!r}")
    got = (matrix.dtype, matrix.shape, matrix.layout)
    for mine, wanted, kind in zip(got, facts, (DtypeError, ShapeError, LayoutError), strict=True):
        if mine != wanted:
            raise kind(
                f"{name}: got {matrix.dtype} of shape {matrix.shape} placed as {matrix.layout}; "
                f"the {what} is for {facts[0]} of shape {facts[1]} placed as {facts[2]}"
            )
    if in_place and not matrix.in_place:
        raise LayoutError(
            f"{name}: other ranks cannot read its memory in place, as this {what} does; make a {what} for it"
        )

"""Matrices spread over a mesh, each rank holding one dense local array."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from operator import index
from os import PathLike
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rma_mm.elements.dtypes import check_dtype, parse_dtype
from rma_mm.errors import ClosedError, DtypeError, LayoutError, MeshError, ShapeError, cut
from rma_mm.geometry.extents import too_large
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Region
from rma_mm.policy.planner.candidates import single_layouts
from rma_mm.runtime.ranks.agreement import agree, agreed
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import in_turn

Shape = tuple[int, int]
Elements = Callable[[NDArray[np.int64], NDArray[np.int64]], Any]
FILL_BLOCK = 2**17
"""Elements that `from_function` asks for at a time."""


class DistMatrix:
    """A matrix of `shape` (rows, columns) placed on `mesh` by `layout`. Make one by the class methods.

    >>> D = DistMatrix.from_numpy(x, mesh, layout="P('i', 'j')")    # doctest: +SKIP
    """

    def __init__(
        self, mesh: Mesh, shape: Shape, dtype: np.dtype[Any], layout: Layout, block: Block, flipped: bool = False
    ) -> None:
        self.mesh, self.shape, self.dtype, self.layout = mesh, shape, dtype, layout
        self._block: Block | None = block
        self.flipped = flipped
        """Whether the memory holds the transposed matrix."""

    # -- making one -------------------------------------------------------------------------------

    @classmethod
    @in_turn
    def empty(cls, shape: Shape, dtype: DTypeLike, mesh: Mesh, layout: str | Layout | None = None) -> DistMatrix:
        """A matrix of undefined content. Collective. Raises LayoutError, DtypeError."""
        with agreed(mesh.comm, "empty", shape=shape, dtype=dtype, layout=layout):
            shape = checked_shape(shape)
            place = placed(layout, shape, mesh)
            element = as_dtype(dtype)
        return allocated(mesh, shape, element, place)

    @classmethod
    @in_turn
    def from_numpy(
        cls, x: NDArray[Any] | None, mesh: Mesh, layout: str | Layout | None = None, root: int | None = None
    ) -> DistMatrix:
        """The matrix `x`, equal on every rank, or given by rank `root` alone (the others pass None). Collective.

        Raises ShapeError, DtypeError, LayoutError; DisagreementError where ranks hold different arrays.
        """
        if root is not None:
            return cls._from_root(x, mesh, layout, root)
        with agreed(mesh.comm, "from_numpy", layout=layout) as facts:
            array = checked_array(x)
            place = placed(layout, array.shape, mesh)
            facts |= {"shape": array.shape, "dtype": array.dtype, "elements (by checksum)": checksum(array)}
        made = allocated(mesh, (array.shape[0], array.shape[1]), array.dtype, place)
        made.tile[...] = array[made.region.selector()]
        return made

    @classmethod
    def _from_root(cls, x: NDArray[Any] | None, mesh: Mesh, layout: str | Layout | None, root: int) -> DistMatrix:
        with agreed(mesh.comm, "from_numpy", root=root, layout=layout):
            if not 0 <= root < mesh.shape.size:
                raise MeshError(f"root: got {root}; the mesh {mesh.shape} has the ranks 0 to {mesh.shape.size - 1}")
            if mesh.rank == root:
                array = checked_array(x)
                placed(layout, array.shape, mesh)
        shape, dtype = mesh.comm.bcast((array.shape, array.dtype.name) if mesh.rank == root else None, root)
        source = allocated(mesh, shape, parse_dtype(dtype), pinned(mesh, root))
        if mesh.rank == root:
            source.tile[...] = array
        return source.redistribute(layout if layout is not None else default_layout(mesh))

    @classmethod
    @in_turn
    def from_local(cls, array: NDArray[Any] | None, shape: Shape, mesh: Mesh, layout: str | Layout) -> DistMatrix:
        """A matrix on the caller's own arrays, in place and without a copy. Collective.

        array: this rank's local array, of the shape of its part in `layout`, rows or columns dense in memory (None on
        ranks that own nothing). It must stay as it is until the matrix is closed on every rank. Raises ShapeError,
        LayoutError, DtypeError.
        """
        with agreed(mesh.comm, "from_local", shape=shape, layout=layout):
            shape = checked_shape(shape)
            place = placed(layout, shape, mesh)
            array = _fitting(array, place.region(shape, mesh.shape, mesh.rank).shape)
        dtype = _common_dtype(mesh, array)
        if array is None:
            array = np.empty(place.region(shape, mesh.shape, mesh.rank).shape, dtype)
        return cls(mesh, shape, dtype, place, mesh.arena.adopt(array))

    @classmethod
    @in_turn
    def from_function(
        cls, shape: Shape, f: Elements, mesh: Mesh, layout: str | Layout | None = None, dtype: DTypeLike | None = None
    ) -> DistMatrix:
        """The matrix whose elements are f(rows, columns), called with open index grids as from `np.ogrid`. Collective.

        f sees this rank's indices only, a few rows at a time. dtype: that of what f returns when not given.
        """
        if dtype is None:
            with agreed(mesh.comm, "from_function", shape=shape) as facts:
                shape = checked_shape(shape)
                first = np.zeros((1, 1), np.int64)
                dtype = np.asarray(f(first, first)).dtype if min(shape) else np.dtype(np.float64)
                facts["dtype"] = dtype
        made = cls.empty(shape, dtype, mesh, layout)
        with agreed(mesh.comm, "from_function"):
            _fill(made.tile, made.region, f)
        return made

    # -- what it holds ----------------------------------------------------------------------------

    @property
    def block(self) -> Block:
        """The memory under the matrix. Raises ClosedError after `close`."""
        if self._block is None:
            raise ClosedError(f"matrix of shape {self.shape}: it is closed; make a new one")
        self.mesh.require_open()
        return self._block

    @property
    def region(self) -> Region:
        """The global indices that this rank holds."""
        return self.layout.region(self.shape, self.mesh.shape, self.mesh.rank)

    @property
    def tile(self) -> NDArray[Any]:
        """This rank's part as one writable array of shape `region.shape`, indices ascending."""
        local = self.block.local
        return local.T if self.flipped else local

    @property
    def local(self) -> dict[Region, NDArray[Any]]:
        """This rank's tiles: box of global indices → writable view."""
        tile, region = self.tile, self.region
        return {box: tile[region.locate(box).selector()] for box in region.run_boxes()} if region else {}

    @property
    def T(self) -> DistMatrix:
        """The transposed matrix, on the same memory."""
        return DistMatrix(self.mesh, self.shape[::-1], self.dtype, self.layout.T, self.block, not self.flipped)

    @property
    def facts(self) -> tuple[object, ...]:
        """What all ranks must agree on when they name this matrix."""
        return (self.block.serial, self.flipped)

    @property
    def in_place(self) -> bool:
        """Whether node-mates can multiply out of this matrix's memory: not where it is the caller's own."""
        return self.block.window.flavour == "shared"

    # -- moving it --------------------------------------------------------------------------------

    @in_turn
    def redistribute(self, layout: str | Layout) -> DistMatrix:
        """The same matrix placed by `layout`: every rank pulls its new part. Collective. Raises LayoutError."""
        from rma_mm.runtime.matrices.move import move

        with agreed(self.mesh.comm, "redistribute", layout=layout) as facts:
            facts["matrix"] = self.facts
            place = placed(layout, self.shape, self.mesh)
            self.block.window.sync()
        made = allocated(self.mesh, self.shape, self.dtype, place)
        move(self, made.layout, made.tile, made.block, made.flipped)
        return made

    @in_turn
    def to_numpy(self, root: int | None = None) -> NDArray[Any] | None:
        """The whole matrix as an array on every rank, or on `root` alone (None elsewhere). Collective."""
        from rma_mm.runtime.matrices.move import collected

        return collected(self, root)

    @in_turn
    def save(self, path: str | PathLike[str]) -> None:
        """Write the matrix as a `.npy` file, each rank its own part, beside the final name first. Collective."""
        from rma_mm.runtime.matrices.move import saved

        saved(self, path)

    def copy_from(self, other: DistMatrix) -> None:
        """Take the elements of a matrix of the same shape and layout. Local."""
        if other.shape != self.shape or other.layout != self.layout:
            raise LayoutError(f"copy_from: got {other!r}; it must be placed like {self!r}; use redistribute")
        self.tile[...] = other.tile

    __array_ufunc__ = None  # so that array @ matrix comes here

    def __matmul__(self, other: DistMatrix | NDArray[Any]) -> DistMatrix:
        from rma_mm.runtime.products.matmul import matmul

        return matmul(self, other, self.mesh) if isinstance(other, DistMatrix | np.ndarray) else NotImplemented

    def __rmatmul__(self, other: NDArray[Any]) -> DistMatrix:
        from rma_mm.runtime.products.matmul import matmul

        return matmul(other, self, self.mesh) if isinstance(other, np.ndarray) else NotImplemented

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local, and may be repeated."""
        self._block = None

    def __enter__(self) -> DistMatrix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DistMatrix(shape={self.shape}, dtype={self.dtype}, layout={self.layout}, mesh={self.mesh.shape})"


def default_layout(mesh: Mesh) -> Layout:
    """Blocks that hold each element once: the leading axes cut rows, the last of two or three cuts columns."""
    return next(single_layouts(mesh.shape))


def pinned(mesh: Mesh, rank: int) -> Layout:
    """The placement that puts a whole matrix on one rank."""
    return Layout(((), ()), tuple(mesh.shape.coords(rank).items()))


def placed(layout: str | Layout | None, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """`layout` as a value that fits; the default where it is None. Raises LayoutError."""
    if layout is None:
        return default_layout(mesh)
    if not isinstance(layout, str | Layout):
        raise LayoutError(f"layout: got {layout!r}; write text as \"P('i', 'j')\", or pass a Layout")
    place = parse_layout(layout, mesh.shape) if isinstance(layout, str) else layout
    place.check(shape, mesh.shape)
    return place


def overlap(one: DistMatrix, other: DistMatrix) -> bool:
    """Whether this rank's parts of two matrices share memory."""
    a, b = one.block, other.block
    return a is b or (np.may_share_memory(a.local, b.local) and np.shares_memory(a.local, b.local))


def checked_shape(shape: Any) -> Shape:
    """`shape` as two whole numbers of at least 0, and not beyond what 64 bits count. Raises ShapeError."""
    try:
        rows, cols = (index(n) for n in shape)
    except (TypeError, ValueError):
        raise ShapeError(f"shape: got {shape!r}; a matrix has two dimensions, as (3, 4)") from None
    if min(rows, cols) < 0:
        raise ShapeError(f"shape: got {shape!r}; both dimensions are at least 0")
    if reason := too_large((rows, cols)):
        raise ShapeError(f"shape: got {cut(shape)}; {reason}")
    return rows, cols


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """`dtype` as one of the supported element types; also by the names that NumPy lacks. Raises DtypeError."""
    try:
        return check_dtype(np.dtype(dtype))
    except TypeError:
        return parse_dtype(str(dtype))


def checked_array(x: Any) -> NDArray[Any]:
    """`x` as a 2-D array of a supported type. Raises ShapeError, DtypeError."""
    array = np.asarray(x)
    if array.ndim != 2:
        raise ShapeError(f"x: got an array of shape {array.shape}; a matrix has two dimensions")
    check_dtype(array.dtype, "x's dtype")
    return array


def checksum(x: NDArray[Any]) -> str:
    """A hash of an array's elements, each by its position, that reads them once; the same wherever they are.

    Lines of 64 words are summed with a random weight for each half of a word, modulo 2^64 (multilinear hashing), and
    the sums are hashed in their order.
    """
    mixed = blake2b(digest_size=16)
    rows = max(1, 2**18 // max(1, x.shape[1] * x.itemsize))
    for start in range(0, x.shape[0] if x.size else 0, rows):
        raw = np.ascontiguousarray(x[start : start + rows]).view(np.uint8).reshape(-1)
        lines = raw[: raw.size // 512 * 512].view(np.uint64).reshape(-1, 64)
        low, high = _weights()
        mixed.update((np.dot(lines & np.uint64(0xFFFFFFFF), low) + np.dot(lines >> np.uint64(32), high)).tobytes())
        mixed.update(raw[lines.size * 8 :].tobytes())
    return mixed.hexdigest()


@cache
def _weights() -> NDArray[np.uint64]:
    """Random weights of the low and of the high half of each word of a line; the same in every process."""
    return np.random.default_rng(1).integers(0, 2**64, (2, 64), np.uint64)


def allocated(mesh: Mesh, shape: Shape, dtype: np.dtype[Any], layout: Layout) -> DistMatrix:
    """A matrix on new memory of the arena, everything agreed already. Collective."""
    shapes = [layout.region(shape, mesh.shape, rank).shape for rank in range(mesh.size)]
    block = mesh.arena.allocate([(rows, cols) for rows, cols in shapes], dtype)
    return DistMatrix(mesh, shape, dtype, layout, block)


def _fitting(array: NDArray[Any] | None, wanted: tuple[int, ...]) -> NDArray[Any] | None:
    """The caller's array, if it can be exposed as a local array of shape `wanted`."""
    if array is None and 0 in wanted:
        return None
    if not isinstance(array, np.ndarray) or array.shape != wanted:
        got = array.shape if isinstance(array, np.ndarray) else type(array).__name__
        raise ShapeError(f"array: got {got}; this rank's part in the layout has the shape {wanted}")
    check_dtype(array.dtype, "array's dtype")
    dense = array.itemsize in array.strides or 1 in array.shape or array.size == 0
    if not dense or min(array.strides) < 0:
        raise ShapeError(f"array: got strides {array.strides} bytes; rows or columns must be dense; copy it first")
    if not array.flags.writeable:
        raise ShapeError("array: got a read-only array; a matrix in place must be writable; copy it first")
    return array


def _common_dtype(mesh: Mesh, array: NDArray[Any] | None) -> np.dtype[Any]:
    """The element type of all ranks' arrays. Collective; raises DisagreementError where they differ."""
    names = mesh.comm.allgather(array.dtype.name if array is not None else "")
    first = next((name for name in names if name), "float64")
    mine = array.dtype.name if array is not None else first
    agree(mesh.comm, "from_local", {"dtype": mine})
    return parse_dtype(first)


def _fill(tile: NDArray[Any], region: Region, f: Elements) -> None:
    """Fill this rank's part, a few rows at a time."""
    if not region:
        return
    rows, cols = region[0].indices[:, None], region[1].indices[None, :]
    step = max(1, FILL_BLOCK // cols.size)
    for start in range(0, rows.shape[0], step):
        tile[start : start + step] = f(rows[start : start + step], cols)


def check_matrix(
    name: str, matrix: object, mesh: Mesh, facts: tuple[Any, tuple[int, int], Layout], in_place: bool, what: str
) -> None:
    """Raise where an operand is not what a plan, or a chain (`what`), was made for.

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
            f"{name}: its memory is the caller's own, or private, which node-mates cannot read in place as this "
            f"{what} does; make a {what} for it"
        )

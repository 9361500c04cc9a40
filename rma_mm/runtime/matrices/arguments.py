"""Check the arguments from which matrices are made: shapes, element types, placements and arrays."""

from __future__ import annotations

import warnings
from functools import cache
from hashlib import blake2b
from math import prod
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import check_dtype, parse_dtype
from rma_mm.errors import LayoutError, MeshError, ShapeError, quoted, truncate
from rma_mm.geometry.extents import too_large
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.notations.pblas import text_of
from rma_mm.geometry.span import Region
from rma_mm.policy.planner.candidates import single_layouts
from rma_mm.runtime.files.containers.chunked import cuts_none
from rma_mm.runtime.matrices.stored import Shape
from rma_mm.runtime.ranks.agreement import agree
from rma_mm.runtime.ranks.mesh import Mesh, default_mesh


def default_layout(mesh: Mesh) -> Layout:
    return next(single_layouts(mesh.grid))


def default_split(mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    """Return an array of `shape` cut from its first dimension on, by as many axes of the mesh as that has indices for.

    So a batch is cut over all ranks where it can be, and nothing moves when it is multiplied.
    """
    splits: list[list[Level]] = [[] for _ in shape]
    dim, parts = 0, 1
    for axis, size in zip(mesh.grid.names, mesh.grid.dims, strict=True):
        while dim < len(shape) - 1 and parts * size > max(1, shape[dim]):
            dim, parts = dim + 1, 1
        splits[dim].append(Level((axis,)))
        parts *= size
    return Layout(tuple(map(tuple, splits)))


def by_chunks(shape: Shape, mesh: Mesh, chunks: Shape) -> Layout:
    """The default placement of a matrix, but that no chunk is cut: each rank has whole ones, next to each other."""
    splits = []
    for split, extent, step in zip(default_layout(mesh).splits, shape, chunks, strict=True):
        axes = tuple(axis for level in split for axis in level.axes)
        count = -(-extent // step)
        block = step * max(1, -(-count // prod(map(mesh.grid.axis_size, axes))))
        splits.append((Level(axes, "cyclic", (block,)),) if axes else ())
    return Layout(tuple(splits))


def keeps_whole(layout: Layout, shape: tuple[int, ...], mesh: MeshShape, chunks: Shape) -> bool:
    return layout.is_single(mesh) and all(
        cuts_none(layout.region(shape, mesh, rank), shape, chunks) for rank in range(mesh.size)
    )


def pinned(mesh: Mesh, rank: int, dims: int = 2) -> Layout:
    return Layout(((),) * dims, tuple(mesh.grid.coords(rank).items()))


def placed(layout: str | Layout | None, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """Return `layout` as a value that fits; the default for None. Raises LayoutError."""
    if layout is None:
        return default_layout(mesh) if len(shape) == 2 else default_split(mesh, shape)
    layout = text_of(layout)
    if not isinstance(layout, str | Layout):
        raise LayoutError(f"layout: got {quoted(layout)}; write text as \"P('i', 'j')\", or pass a Layout")
    place = parse_layout(layout, mesh.grid, len(shape), tuple(shape)) if isinstance(layout, str) else layout
    place.check(shape, mesh.grid)
    return place


def checked_mesh(mesh: object) -> Mesh:
    """Return `mesh` if it is one, or the default mesh for None. Raises MeshError."""
    if mesh is None:
        return default_mesh()
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh: got {quoted(mesh)}; pass a Mesh; other arguments follow by name, as dtype=\"float32\"")
    return mesh


def in_order(mesh: Any, layout: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Return the mesh, layout and element type that `empty` got, also in the order of version 0.2: dtype, mesh, layout.

    Warns of that order.
    """
    if not isinstance(layout, Mesh):
        return mesh, layout, dtype
    warnings.warn("empty: the order is now empty(shape, mesh, layout, dtype)", DeprecationWarning, stacklevel=4)
    return layout, dtype if isinstance(dtype, str | Layout) else None, mesh


def checked_root(root: Any, size: int, what: str) -> int:
    """`root` as one of `size` ranks. what: where these are. Raises MeshError."""
    rank = index(root) if hasattr(root, "__index__") else -1
    if not 0 <= rank < size:
        raise MeshError(f"root: got {root!r}; {what} has the ranks 0 to {size - 1}")
    return rank


def checked_extents(shape: Any) -> tuple[int, ...]:
    """`shape` as whole numbers, one or more, as `checked_shape`. Raises ShapeError."""
    try:
        extents = tuple(index(n) for n in shape)
    except TypeError:
        extents = ()
    if not extents:
        raise ShapeError(f"shape: got {shape!r}; an array has a dimension or more, as (12, 3, 4)")
    if min(extents) < 0:
        raise ShapeError(f"shape: got {shape!r}; every dimension is at least 0")
    if reason := too_large((prod(n or 1 for n in extents[:-1]), extents[-1])):
        raise ShapeError(f"shape: got {shape!r}; {reason}")
    return extents


def checked_shape(shape: Any) -> Shape:
    """Return `shape` as two whole numbers of at least 0, within 64 bits. Raises ShapeError."""
    try:
        rows, cols = (index(n) for n in shape)
    except (TypeError, ValueError):
        raise ShapeError(
            f"shape: got {shape!r}; a matrix has two dimensions, as (3, 4), and DistArray takes others"
        ) from None
    if min(rows, cols) < 0:
        raise ShapeError(f"shape: got {shape!r}; both dimensions are at least 0")
    if reason := too_large((rows, cols)):
        raise ShapeError(f"shape: got {truncate(shape)}; {reason}")
    return rows, cols


def sliced(x: Any, box: Region, dtype: np.dtype[Any]) -> NDArray[Any]:
    """x[a:b, c:d], the elements of `x` in a box. Raises ShapeError if they are not what x.shape and x.dtype say."""
    part = np.asarray(x[box.selector()])
    if part.shape != box.shape or part.dtype.newbyteorder("=") != dtype:
        rows, cols = box
        raise ShapeError(
            f"x: gave {part.dtype} of shape {part.shape} for x[{rows}, {cols}]; by its shape and dtype that is {dtype} "
            f"of shape {box.shape}"
        )
    return part


def array_of(name: str, x: Any) -> NDArray[Any]:
    """Return an argument as an array. Raises ShapeError if NumPy makes none of it."""
    try:
        return np.asarray(x)
    except ValueError:
        raise ShapeError(f"{name}: NumPy makes no array of this {type(x).__name__}; rows differ in length") from None


def checked_array(x: Any, is_matrix: bool = True) -> NDArray[Any]:
    """`x` as a 2-D array, or one of a dimension or more, of a supported type. Raises ShapeError, DtypeError."""
    array = array_of("x", x)
    if is_matrix and array.ndim != 2:
        raise ShapeError(
            f"x: got an array of shape {array.shape}; a matrix has two dimensions, and DistArray takes others"
        )
    if not array.ndim:
        raise ShapeError("x: got a number; an array has a dimension or more")
    check_dtype(array.dtype, "x's dtype")
    return array


def checksum(x: NDArray[Any]) -> str:
    """Return a hash of an array's elements, each by its position, that reads them once; the same wherever they are.

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
    return np.random.default_rng(1).integers(0, 2**64, (2, 64), np.uint64)


def exposable(array: NDArray[Any] | None, wanted: tuple[int, ...]) -> NDArray[Any] | None:
    """Return the caller's array, if it can be exposed as a local array of shape `wanted`."""
    if array is None and 0 in wanted:
        return None
    if not isinstance(array, np.ndarray) or array.shape != wanted:
        got = array.shape if isinstance(array, np.ndarray) else type(array).__name__
        raise ShapeError(f"array: got {got}; this rank's part in the layout has the shape {wanted}")
    check_dtype(array.dtype, "array's dtype")
    dense = array.itemsize in array.strides or 1 in array.shape or array.size == 0
    if not dense or min(array.strides) < 0:
        raise ShapeError(f"array: got strides {array.strides} bytes; rows or columns must be dense; copy it first")
    return array


def common_dtype(mesh: Mesh, array: NDArray[Any] | None) -> np.dtype[Any]:
    """Return the element type of all ranks' arrays. Collective; raises DisagreementError if they differ."""
    names = mesh.comm.allgather(array.dtype.name if array is not None else "")
    first = next((name for name in names if name), "float64")
    mine = array.dtype.name if array is not None else first
    agree(mesh.comm, "from_local", {"dtype": mine})
    return parse_dtype(first)

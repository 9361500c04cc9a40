"""Sums, extremes and other reductions of distributed matrices, equal on every rank."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple
from numpy.typing import DTypeLike, NDArray

from rma_mm.elements.dtypes import as_dtype
from rma_mm.errors import OptionError, ShapeError
from rma_mm.geometry.span import Region
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.process_group import serialized
from rma_mm.windows.waiting import wait

if TYPE_CHECKING:
    from mpi4py import MPI

AT_ONCE = 2**18  # elements that are cast at a time


@serialized
def reduced_over(
    x: Any, ufunc: Any, axis: Any, dtype: DTypeLike | None, out: object = None, *, square: bool = False
) -> Any:
    """Return a matrix reduced by a function of two elements along some of its dimensions, on every rank.

    Collective. axis: as NumPy takes it. square: reduce |x|² instead of x.
    """
    from mpi4py.MPI import IN_PLACE

    with agreed(x.mesh.comm, ufunc.__name__, matrix=x.facts, axis=axis, dtype=dtype):
        if out is not None:
            raise OptionError("out: the result of a reduction is a new array; leave out away")
        try:
            axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim, "axis")
        except (ValueError, TypeError) as error:
            raise OptionError(f"axis: got {axis!r}; {error}") from None
        if ufunc in (np.maximum, np.minimum) and not all(x.shape[dim] for dim in axes):
            raise ShapeError(f"{ufunc.__name__}: got a matrix of shape {x.shape}, empty along axis {axis}")
        result = _result(ufunc, x.dtype, dtype)
    single = x if x.layout.is_single(x.mesh.grid) else x.redistribute(x.layout.single(x.mesh.grid))
    kept = [dim for dim in range(x.ndim) if dim not in axes]
    wide = _accumulated(ufunc, result)
    total = np.full([x.shape[dim] for dim in kept], _identity(ufunc, wide), wide)
    if single.region:
        at = Region(single.region[dim] for dim in kept).selector()
        total[at] = _local(single.tile, ufunc, axes, wide, square)
    raw = total.reshape(-1).view(np.uint8)
    wait(x.mesh.comm.Iallreduce(IN_PLACE, [raw, total.size, _element(total.itemsize)], _operation(ufunc, wide)))
    reduced: NDArray[Any] = total.astype(result)
    return reduced if kept else reduced[()]


def _result(ufunc: Any, element: np.dtype[Any], dtype: DTypeLike | None) -> np.dtype[Any]:
    """Return the type of a reduction of elements of this type, by NumPy's rules."""
    if dtype is not None:
        return as_dtype(dtype)
    wide: np.dtype[Any] = ufunc.reduce(np.ones(1, element)).dtype
    return wide


def _accumulated(ufunc: Any, result: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which sums are formed."""
    if ufunc is not np.add or result.kind in "biu":
        return result
    return np.dtype(np.complex128 if result.kind == "c" else np.float64)


def _identity(ufunc: Any, dtype: np.dtype[Any]) -> Any:
    """Return the element that changes no other one."""
    if ufunc not in (np.maximum, np.minimum):
        return dtype.type(ufunc is np.logical_and)
    is_max = ufunc is np.maximum
    if dtype.kind == "b":
        return not is_max
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if is_max else np.iinfo(dtype).max
    edge = -np.inf if is_max else np.inf
    return complex(edge, edge) if dtype.kind == "c" else edge


def _local(tile: NDArray[Any], ufunc: Any, axes: tuple[int, ...], wide: np.dtype[Any], square: bool) -> NDArray[Any]:
    """Return this rank's part reduced, a few rows at a time, so that no cast copy of all of it is made."""
    step = max(1, AT_ONCE * len(tile) // tile.size)
    parts = []
    for start in range(0, len(tile), step):
        rows = tile[start : start + step]
        if square:
            rows = np.abs(rows.astype(np.complex128 if rows.dtype.kind == "c" else np.float64)) ** 2
        if ufunc in (np.logical_and, np.logical_or):
            parts.append(ufunc.reduce(rows.astype(np.bool_), axes))
        else:
            parts.append(ufunc.reduce(rows.astype(wide, copy=False), axes, dtype=wide))
    return ufunc.reduce(parts, 0, dtype=wide) if 0 in axes else np.concatenate(parts)


@cache
def _element(nbytes: int) -> MPI.Datatype:
    from mpi4py import MPI

    return MPI.BYTE.Create_contiguous(nbytes).Commit()


@cache
def _operation(ufunc: Any, dtype: np.dtype[Any]) -> MPI.Op:
    """Return a function of NumPy's as an operation of MPI, for elements of one type: NaN counts as in NumPy."""
    from mpi4py import MPI

    def combine(one: Any, other: Any, _: MPI.Datatype) -> None:
        target = np.frombuffer(other, dtype)
        ufunc(np.frombuffer(one, dtype), target, out=target)

    return MPI.Op.Create(combine, commute=True)

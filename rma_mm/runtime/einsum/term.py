"""Operands of `einsum`: arrays whose dimensions have names, and what is done to one of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import accumulator
from rma_mm.elements.semiring import Semiring
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.runtime.einsum.subscripts import Indices
from rma_mm.runtime.matrices.array import DistArray

Array = NDArray[Any]
Groups = Sequence[Indices]
"""The indices that each dimension of an arranged array is made of, the last one fastest."""


@dataclass(frozen=True, eq=False)
class Term:
    """An array with a name for each dimension: equal on every rank, or spread over the mesh."""

    names: Indices
    x: Array | DistArray  # spread without indices it has one dimension, of one element

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape[: len(self.names)]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.x.dtype

    def extent(self, name: str) -> int:
        return self.shape[self.names.index(name)]

    def without(self, dims: Sequence[int]) -> Indices:
        return tuple(name for dim, name in enumerate(self.names) if dim not in dims)


def diagonal(term: Term) -> Term:
    """The operand with every index once: where one has several dimensions, their diagonal is taken. Collective."""
    again = next((dim for dim, name in enumerate(term.names) if name in term.names[:dim]), None)
    if again is None:
        return term
    first, names = term.names.index(term.names[again]), term.without([again])
    if isinstance(term.x, np.ndarray):
        x = np.moveaxis(np.diagonal(term.x, 0, first, again), -1, first)
        return diagonal(Term(names, x))
    array = _uncut(term.x, [again])
    shape = _lacking(array.shape, [again])
    layout = replace(array.layout, splits=_lacking(array.layout.splits, [again]))
    made = DistArray.allocated(array.mesh, shape, array.dtype, layout)
    tile, rows = np.moveaxis(array.tile, (first, again), (0, 1)), array.region[first].indices
    made.tile[...] = np.moveaxis(tile[np.arange(len(rows)), rows], 0, first)
    return diagonal(Term(names, made))


def sum_over(term: Term, names: Sequence[str], dtype: np.dtype[Any], semiring: Semiring) -> Term:
    """Return the operand summed over some of its indices, as `dtype`. Collective.

    Sums are formed in the type in which those of products are. Where ranks hold parts of such an index each sums its
    own, and the result is placed in summands, if its type allows.
    """
    dims = [term.names.index(name) for name in names]
    if not dims:
        return term
    rest, wide = term.without(dims), accumulator(dtype)
    identity = semiring.identity(wide)

    def reduce(x: Array) -> Array:
        with np.errstate(all="ignore"):
            made = semiring.add.reduce(x.astype(wide, copy=False), axis=tuple(dims), dtype=wide, initial=identity)
            return np.asarray(made).astype(dtype, copy=False)

    if isinstance(term.x, np.ndarray):
        return Term(rest, reduce(term.x))
    array = term.x if semiring.is_arithmetic and dtype.kind in "iufc" and dtype.itemsize > 2 else _uncut(term.x, dims)
    layout = array.layout
    axes = [axis for dim in dims for level in layout.splits[dim] for axis in level.axes]
    layout = replace(layout, splits=_lacking(layout.splits, dims) or ((),), partial=(*layout.partial, *axes))
    made = DistArray.allocated(array.mesh, _lacking(array.shape, dims) or (1,), dtype, layout)
    made.tile[...] = reduce(array.tile).reshape(made.tile.shape) if made.tile.size else 0
    return Term(rest, made)


def dropped(term: Term, names: Sequence[str]) -> Term:
    """Return the operand without some indices of which it has but one. Collective."""
    dims = [term.names.index(name) for name in names]
    if not dims:
        return term
    if isinstance(term.x, np.ndarray):
        return Term(term.without(dims), term.x.reshape(_lacking(term.x.shape, dims)))
    array = _uncut(term.x, dims)
    return arranged(Term(term.names, array), [(name,) for name in term.without(dims)])


def arranged(term: Term, groups: Groups) -> Term:
    """Return the operand with its indices in the order of `groups`, each of them one dimension. Collective.

    It moves nothing, but where indices are joined of an array that is placed with skew. Indices that are in no group
    have the length 1 and are not cut. The memory is the operand's own where that lies so.
    """
    order = [term.names.index(name) for group in groups for name in group]
    extents = [tuple(term.extent(name) for name in group) for group in groups]
    shape = tuple(map(prod, extents))
    names = tuple("".join(group) for group in groups)
    spare = [dim for dim in range(len(term.names)) if dim not in order]
    if isinstance(term.x, np.ndarray):
        return Term(names, term.x.transpose(*order, *spare).reshape(shape))
    array = _unshifted(term.x) if any(len(group) > 1 for group in groups) else term.x
    splits = [array.layout.splits[dim] for dim in order]
    joined, at = [], 0
    for group, inner in zip(groups, extents, strict=True):
        joined.append(_joined(splits[at : at + len(group)], inner))
        at += len(group)
    layout = replace(array.layout, splits=tuple(joined) or ((),))
    extent = shape or (1,)
    if extent == array.shape and layout == array.layout and order == sorted(order):
        return Term(names, array)
    made = array.reshaped(extent, layout) if order == sorted(order) else None
    if made is None:
        made = DistArray.allocated(array.mesh, extent, array.dtype, layout)
        rest = [dim for dim in range(array.ndim) if dim not in order]
        made.tile[...] = array.tile.transpose(*order, *rest).reshape(made.tile.shape)
    return Term(names, made)


def parted(array: DistArray, groups: Groups, extents: dict[str, int]) -> Term:
    """Return the reverse of `arranged`: each index a dimension again, on the same memory. Local."""
    splits: list[Split] = []
    for split, group in zip(array.layout.splits, groups, strict=True):
        for n in range(len(group)):
            mine = split if len(group) == 1 else [level for level in split if level.fold and level.fold[1] == n]
            splits.append(tuple(mine if len(group) == 1 else (replace(level, fold=None) for level in mine)))
    names = tuple(name for group in groups for name in group)
    layout = replace(array.layout, splits=tuple(splits) or ((),))
    made = array.reshaped(tuple(extents[name] for name in names) or (1,), layout)
    assert made is not None  # what a product makes is dense
    return Term(names, made)


def _joined(splits: Sequence[Split], extents: tuple[int, ...]) -> Split:
    if len(splits) == 1:
        return splits[0]
    return tuple(replace(level, fold=(extents, n)) for n, split in enumerate(splits) for level in split)


def _uncut(array: DistArray, dims: Sequence[int]) -> DistArray:
    """Return the array placed so that some of its dimensions are whole on every rank that has a part. Collective."""
    if not any(array.layout.splits[dim] for dim in dims):
        return array
    splits = tuple(() if dim in dims else split for dim, split in enumerate(array.layout.splits))
    return array.redistribute(Layout(splits, array.layout.pins, grid=array.layout.grid))


def _unshifted(array: DistArray) -> DistArray:
    """Return the array placed without skew, which a dimension that is several in one cannot have. Collective."""
    if not array.layout.skew_axes:
        return array
    splits = tuple(
        tuple(Level(level.axes) if level.skew else level for level in split) for split in array.layout.splits
    )
    return array.redistribute(replace(array.layout, splits=splits, partial=()))


def whole(array: DistArray, dtype: np.dtype[Any]) -> DistArray:
    """Return the array without summands that are not of the type `dtype`, in which sums go on. Collective.

    The sum of some that are cast is not their sum, cast: that may wrap around, or be rounded.
    """
    if not array.layout.partial or array.dtype == dtype:
        return array
    return array.redistribute(array.layout.single(array.mesh.grid))


def _lacking(items: tuple[Any, ...], dims: Sequence[int]) -> tuple[Any, ...]:
    return tuple(item for dim, item in enumerate(items) if dim not in dims)

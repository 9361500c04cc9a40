"""Placements of PyTorch's DTensor: one for each mesh axis, as the words of SBP name them, but cut as torch.chunk cuts.

    Shard(0) = S(0)   Shard(1) = S(1)   Replicate() = B   Partial("sum") = P

torch.chunk deals out parts of ceil(extent / count) indices; what is left for the last ones is less, or nothing. Axes
that shard the same dimension nest in the order of the mesh, each cutting the parts of those before. Where that is not
how an even cut of ours falls, the parts are written as bounds.
"""

from __future__ import annotations

from itertools import accumulate

from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.sbp import Placed, Sbp, sbp_to_layout

SPOKEN = {"S(0)": "Shard(0)", "S(1)": "Shard(1)", "B": "Replicate()", "P": 'Partial("sum")'}
"""The placements, by the word of SBP."""


def chunks(extent: int, count: int) -> list[int]:
    """Lengths of the parts into which torch.chunk cuts, made up to `count` by empty ones.

    >>> chunks(5, 4)
    [2, 2, 1, 0]
    """
    most = -(-extent // count)
    return [max(0, min(most, extent - most * part)) for part in range(count)]


def sharded(words: Sbp, shape: tuple[int, int], mesh: MeshShape) -> Layout:
    """Return the layout of a DTensor of `shape` with these placements. Raises LayoutError if not each axis has one."""
    even = sbp_to_layout(words, mesh)
    splits = tuple(_chunked(split, extent, mesh) for split, extent in zip(even.splits, shape, strict=True))
    return Layout(splits, partial=even.partial)


def placements_of(layout: Layout, shape: tuple[int, int], mesh: MeshShape) -> Sbp:
    """Return the placements of a matrix of `shape` that lies as `layout` says.

    Raises LayoutError for a layout that DTensor has none for, with the nearest that it has.
    """
    if layout.grid is not None or layout.pins:
        what = "a grid of its own" if layout.grid is not None else "pins"
        raise LayoutError(f"layout: got {layout}, which has {what}; a DTensor lies on every rank of the mesh {mesh}")
    words: Sbp = tuple(_word(layout, axis) for axis in mesh.names)
    near = sharded(words, shape, mesh)
    if any(layout.region(shape, mesh, rank) != near.region(shape, mesh, rank) for rank in mesh.ranks):
        said = ", ".join(SPOKEN[word] for word in words)
        raise LayoutError(
            f"layout: got {layout} for a matrix of {shape}; a DTensor placed as ({said}) is cut as torch.chunk cuts, "
            f"which is {near}; redistribute to that"
        )
    return words


def _word(layout: Layout, axis: str) -> Placed:
    """Return the placement of a matrix along one mesh axis, in the words of DTensor."""
    rows, cols = ({axis for level in split for axis in level.axes} for split in layout.splits)
    return "S(0)" if axis in rows else "S(1)" if axis in cols else "P" if axis in layout.partial else "B"


def _chunked(split: Split, extent: int, mesh: MeshShape) -> Split:
    """Return an even cut as torch.chunk would make it."""
    lengths = [extent]
    for level in split:
        lengths = [part for length in lengths for part in chunks(length, mesh.axis_size(level.axes[0]))]
    if len(set(lengths)) == 1:
        return split
    axes = tuple(axis for level in split for axis in level.axes)
    return (Level(axes, "bounds", (0, *accumulate(lengths))),)

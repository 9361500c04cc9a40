"""Parts of a distributed matrix by NumPy's indices."""

from __future__ import annotations

from operator import index as whole_number
from typing import Any, NamedTuple

import numpy as np

from rma_mm.errors import IndexRangeError, OptionError, quoted
from rma_mm.geometry.extents import as_matrix
from rma_mm.geometry.span import Region, Span


class IndexedPart(NamedTuple):
    """A part of an array: the box that holds it, and the index within that box."""

    box: Region
    within: tuple[int | slice, ...]


def index_of(index: Any, shape: tuple[int, ...]) -> IndexedPart:
    """Return what an index of NumPy's means for an array of `shape`. Raises IndexRangeError, OptionError.

    >>> index_of((slice(2, 8, 3), -1), (10, 4))
    IndexedPart(box=Region(2:6 x 3:4), within=(slice(None, None, 3), 0))
    """
    words = list(index) if isinstance(index, tuple) else [index]
    at = next((n for n, word in enumerate(words) if word is Ellipsis), len(words))
    words[at : at + 1] = [Ellipsis]
    missing = len(shape) - len(words) + 1
    if missing < 0:
        raise IndexRangeError(f"index: got {len(words) - 1} for the shape {shape}; it has {len(shape)} dimensions")
    words[at : at + 1] = [slice(None)] * missing
    pairs = [_along(word, extent, dim) for dim, (word, extent) in enumerate(zip(words, shape, strict=True))]
    return IndexedPart(Region(span for span, _ in pairs), tuple(step for _, step in pairs))


def _along(word: Any, extent: int, dim: int) -> tuple[Span, int | slice]:
    """Return the indices of a dimension from the first to the last one wanted, and the index within these."""
    if isinstance(word, slice):
        wanted = range(extent)[word]
        if not wanted:
            return Span(), slice(None)
        low, high = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1])
        return Span.range(low, high + 1), slice(None, None, wanted.step if wanted.step != 1 else None)
    try:
        number = whole_number(word) if not isinstance(word, bool | np.bool_) else None
    except TypeError:
        number = None
    if number is None:
        raise OptionError(
            f"index: got {quoted(word)}; integers, slices and ... are supported; for others gather the matrix by "
            f"to_numpy()"
        )
    if not -extent <= number < extent:
        raise IndexRangeError(f"index: got {number} for dimension {dim} of {extent}; must be {-extent} to {extent - 1}")
    number %= extent
    return Span.range(number, number + 1), 0


def read(x: Any, part: IndexedPart) -> Any:
    """Read a part of a matrix without partial sums from the ranks that hold it. Local, after an agreement."""
    shape, mesh = x.shape, x.mesh
    out = np.empty(part.box.shape, x.dtype)
    flat = out.reshape(as_matrix(out.shape))
    block = x.block
    block.window.sync()
    transfers = []
    for rank, common in x.layout.overlapping(shape, mesh.grid, part.box, mesh.rank) if part.box else ():
        there = x.layout.region(shape, mesh.grid, rank)
        source, target = _folded(there.locate(common), there.shape), _folded(part.box.locate(common), out.shape)
        if x.flipped:
            transfers.append(block.window.get(rank, block.patch(rank, source.T), flat.T, *target.T))
        else:
            transfers.append(block.window.get(rank, block.patch(rank, source), flat, *target))
    for transfer in transfers:
        transfer.start()
    for transfer in transfers:
        transfer.wait()
        transfer.close()
    return out[part.within]


def _folded(positions: Region, shape: tuple[int, ...]) -> Region:
    """Return positions in an array as positions in the matrix that it is kept as."""
    rows = Span.folded(positions[:-1], shape[:-1]) if len(shape) > 1 else Span.range(0, 1)
    return Region((rows, positions[-1]))

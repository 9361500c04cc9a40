"""The spans of indices that ranks hold, or want, along one dimension, for any number of ranks at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Span

DENSE = 2**14  # pairs of spans up to which all are compared beforehand
RUNS = 2**22  # pairs of runs of two dimensions' spans that are compared beforehand
TURNS = 2**8  # pairs of runs of two spans that are compared; beyond, cyclic blocks are taken to meet evenly

Figures = NDArray[np.float64]
Numbers = NDArray[np.int64]
Windows = tuple[Numbers, Numbers]
"""Starts and ends of the runs of each span, both (spans, runs); filled up with empty runs."""


@dataclass(frozen=True, eq=False)
class DimSpans:
    """The spans that ranks hold, or want, along one dimension."""

    low: Numbers  # (different spans, runs): where each run begins; empty runs fill up
    high: Numbers  # where it ends
    of: Numbers  # which of the different spans each rank has
    lengths: Figures  # indices of each span
    extent: int
    parts: int  # how many parts the whole dimension is cut into
    edges: Numbers | None = None
    """Starts of the parts that are not empty, in order; None if parts are dealt out in blocks."""
    dealt: tuple[int, int] | None = None  # (block, offset) where one cyclic cut deals them out

    @cached_property
    def run(self) -> float:
        if self.edges is not None and self.low.shape[1] == 1:
            return max(1.0, self.extent / max(1, len(self.edges)))
        return max(1.0, float(self.lengths.sum()) / max(1, int((self.low < self.high).sum())))

    @property
    def each(self) -> Figures:
        return np.asarray(self.lengths[self.of])

    @property
    def count(self) -> int:
        return len(self.lengths)


def dim_spans(
    layout: Layout, dim: int, extent: int, grid: MeshShape, coords: Mapping[str, Numbers], ranks: int
) -> DimSpans:
    """Return the indices of one dimension that ranks at these coordinates hold, ignoring pins."""
    split = layout.splits[dim]
    axes = tuple(dict.fromkeys(axis for level in split for axis in (*level.axes, *level.skew)))
    if not axes:
        whole, first = np.array([[extent]]), np.zeros(1, np.int64)
        return DimSpans(0 * whole, whole, np.zeros(ranks, np.int64), whole[0].astype(float), extent, 1, first)
    sizes = tuple(grid.axis_size(axis) for axis in axes)
    keys = np.ravel_multi_index([coords[axis] for axis in axes], sizes)
    _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    at = {axis: coords[axis][first] for axis in grid.names}
    found = windows(split, extent, grid, at)
    low, high = _dealt(layout, dim, extent, grid, at) if found is None else found
    (low, high), which = _different(low, high)
    parts = prod(grid.axis_size(axis) for level in split for axis in level.axes)
    edges = None if found is None else _edges(split, extent, grid)
    is_dealt = len(split) == 1 and split[0].kind == "cyclic" and not split[0].skew
    block, offset, *_ = (*map(int, split[0].args), 0) if is_dealt else (0, 0)
    lengths = (high - low).sum(axis=1).astype(float)
    dealt = (block, offset) if is_dealt else None
    return DimSpans(low, high, which[of.reshape(-1)], lengths, extent, parts, edges, dealt)


def windows(split: Split, extent: int, grid: MeshShape, at: Mapping[str, Numbers]) -> Windows | None:
    """Return the spans at many coordinates at once, as `Layout.span` has them; None if they are not windows."""
    if any(level.kind == "cyclic" or level.skew for level in split[:-1]) or split[-1].kind == "cyclic":
        return None
    if any(level.kind in ("bounds", "weights") for level in split[1:]):
        return None
    base: Numbers = 0 * next(iter(at.values()))
    length, shift = base + extent, base
    begin, end = base, base + length
    for level in split:
        base, length = begin, end - begin
        begin, end = (base + edge for edge in _cut(level, length, extent, grid, at))
        for axis in level.skew if not level.is_table(grid) else ():
            shift = shift + at[axis] * length // grid.axis_size(axis)
    if not np.any(shift):
        return begin[:, None], end[:, None]
    size = np.maximum(1, length)
    begin, count = base + (begin - base + shift) % size, end - begin
    stop, top = begin + count, base + length  # what goes beyond the top begins again at the base
    low = np.stack([begin, base], axis=1)
    high = np.stack([np.minimum(stop, top), base + np.maximum(0, stop - top)], axis=1)
    return low, high


def _cut(
    level: Level, length: Numbers | np.int64, extent: int, grid: MeshShape, at: Mapping[str, Numbers]
) -> tuple[Numbers, Numbers]:
    """Return the bounds of the parts of a level, in positions of the level before."""
    index, count = _index(level.axes, grid, at)
    if level.kind == "even":
        return index * length // count, (index + 1) * length // count
    found = level.args
    if level.kind == "weights":
        sums = [0.0, *accumulate(level.args)]
        found = tuple(round(extent * upto / sums[-1]) for upto in sums)
    edges = np.array(found).astype(np.int64)
    if level.is_table(grid):
        index = index + _index(level.skew, grid, at)[0] * (count + 1)
    return edges[index], edges[index + 1]


def _index(axes: tuple[str, ...], grid: MeshShape, at: Mapping[str, Numbers]) -> tuple[Numbers, int]:
    """Return the combined coordinates along some axes, and how many there are, as `MeshShape.index` has them."""
    sizes = [grid.axis_size(axis) for axis in axes]
    return np.asarray(np.ravel_multi_index([at[axis] for axis in axes], sizes)), prod(sizes)


def _dealt(layout: Layout, dim: int, extent: int, grid: MeshShape, at: Mapping[str, Numbers]) -> Windows:
    columns = zip(*(at[axis].tolist() for axis in grid.names), strict=True)
    return _filled([layout.span(dim, extent, grid, dict(zip(grid.names, each, strict=True))) for each in columns])


def _filled(spans: Sequence[Span]) -> Windows:
    """Spans of different numbers of runs."""
    most = max(1, *(len(span.runs) for span in spans))
    runs = np.array([[*span.runs, *[(0, 0)] * (most - len(span.runs))] for span in spans], np.int64)
    return runs[:, :, 0], runs[:, :, 1]


def spans_of(each: Sequence[Span], extent: int) -> DimSpans:
    (low, high), of = _different(*_filled(each))
    return DimSpans(low, high, of, (high - low).sum(axis=1).astype(float), extent, len(low))


def _different(low: Numbers, high: Numbers) -> tuple[Windows, Numbers]:
    """Return the different spans, and which of them each is. Windows that go round to where they began are one run."""
    is_empty = low >= high
    low, high = np.where(is_empty, 0, low), np.where(is_empty, 0, high)
    if low.shape[1] == 2:
        is_closed = (high[:, 1] == low[:, 0]) & ~is_empty.any(axis=1)
        low[is_closed, 0], high[is_closed, 1] = low[is_closed, 1], 0
        low[is_closed, 1] = 0
    rows = np.ascontiguousarray(np.concatenate([low, high], axis=1))
    keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return (low[first], high[first]), which.reshape(-1)


def _edges(split: Split, extent: int, grid: MeshShape) -> Numbers:
    """Return the starts of the parts that are not empty, without shifts; of several lists of bounds, all starts."""
    plain = tuple(level if level.is_table(grid) else replace(level, skew=()) for level in split)
    axes = [axis for level in plain for axis in (*level.axes, *level.skew)]
    return _edges_of(plain, extent, tuple((axis, grid.axis_size(axis)) for axis in axes))


@lru_cache(maxsize=16)
def _edges_of(split: Split, extent: int, sizes: tuple[tuple[str, int], ...]) -> Numbers:
    """The same, for axes of these sizes."""
    grid = MeshShape(tuple(size for _, size in sizes), tuple(axis for axis, _ in sizes))
    at = np.unravel_index(np.arange(grid.size), grid.dims)
    found = windows(split, extent, grid, dict(zip(grid.names, at, strict=True)))
    assert found is not None, "what is shifted was made of windows"
    low, high = found
    return np.unique(low[low < high], return_index=True)[0]  # without indices it imports numpy.ma, which takes 30 ms


# -- two of them ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SpanOverlap:
    """Overlap of wanted spans with held spans."""

    wanted: DimSpans
    held: DimSpans
    all: Figures | None  # indices in common, of each wanted span with each that is held; None if there are too many

    @classmethod
    def of(cls, wanted: DimSpans, held: DimSpans) -> SpanOverlap:
        is_small = wanted.count * held.count <= DENSE and wanted.low.size * held.low.size <= RUNS
        return cls(wanted, held, _met(wanted, held) if is_small else None)

    def at(self, want: Numbers, have: Numbers) -> Figures:
        """Indices in common of these spans; the arrays of numbers are broadcast."""
        if self.all is not None:
            return np.asarray(self.all[want, have])
        wanted, held = self.wanted, self.held
        if wanted is held and wanted.edges is None:  # blocks that are dealt out alike are the same, or apart
            return np.asarray(wanted.lengths[want] * (want == have))
        if wanted.low.shape[1] * held.low.shape[1] > TURNS:
            return np.asarray(wanted.lengths[want] * held.lengths[have] / max(1, held.extent))
        met: Figures = np.zeros(np.broadcast(want, have).shape)
        for one in range(wanted.low.shape[1]):
            for other in range(held.low.shape[1]):
                high = np.minimum(wanted.high[:, one][want], held.high[:, other][have])
                met += np.maximum(0, high - np.maximum(wanted.low[:, one][want], held.low[:, other][have]))
        return met

    @property
    def run(self) -> float:
        """Indices that lie together where they are held and where they are wanted, on average.

        Blocks lie one behind the other in their owner's memory: who wants the same ones finds them so.
        """
        if self.wanted is self.held:
            return max(1.0, float(self.wanted.lengths.mean()))
        return min(self.wanted.run, self.held.run)

    def parts(self) -> Figures:
        """Parts of the one dimension that each wanted span meets."""
        wanted, held = self.wanted, self.held
        if held.edges is not None:
            return _parts_met(wanted, held.edges)
        if self.all is not None and held.count >= held.parts:
            return np.asarray((self.all > 0).sum(axis=1), np.float64)
        if held.dealt is not None:
            return _blocks_met(wanted, held, *held.dealt)
        share = wanted.lengths / max(1, held.extent) * held.parts
        return np.asarray(np.minimum(held.parts, np.minimum(wanted.lengths, np.ceil(share * held.low.shape[1]))))


def _met(wanted: DimSpans, held: DimSpans) -> Figures:
    """Indices in common, of each with each."""
    if wanted is held and held.dealt is not None:  # parts of one deal have nothing in common
        return np.diag(held.lengths)
    high = np.minimum(wanted.high.reshape(-1, 1), held.high.reshape(1, -1))
    met = np.maximum(0, high - np.maximum(wanted.low.reshape(-1, 1), held.low.reshape(1, -1)))
    return np.asarray(met.reshape(*wanted.low.shape, *held.low.shape).sum(axis=(1, 3)), np.float64)


def _blocks_met(wanted: DimSpans, held: DimSpans, block: int, offset: int) -> Figures:
    """Parts that are dealt out in blocks and that each wanted span meets; of long runs at most as many as there are."""
    is_there = wanted.low < wanted.high
    first, last = ((edge + offset) // block for edge in (wanted.low, wanted.high - 1))
    if np.all((first == last) | ~is_there):
        owners = np.sort(np.where(is_there, first % held.parts, -1), axis=1)
        is_new = np.concatenate([owners[:, :1] >= 0, owners[:, 1:] != owners[:, :-1]], axis=1)
        return np.asarray(is_new.sum(axis=1), np.float64)
    return np.asarray(np.minimum(held.parts, np.where(is_there, last - first + 1, 0).sum(axis=1)), np.float64)


def _parts_met(wanted: DimSpans, edges: Numbers) -> Figures:
    """Parts between `edges` that each wanted span meets, each counted once."""
    first = np.searchsorted(edges, wanted.low, "right")
    last = np.searchsorted(edges, wanted.high - 1, "right")
    is_there = wanted.low < wanted.high
    met = np.where(is_there, last - first + 1, 0)
    again = is_there[:, 1:] & is_there[:, :-1] & (first[:, 1:] == last[:, :-1])  # two runs in one part
    return np.asarray(met.sum(axis=1) - again.sum(axis=1), np.float64)

"""Copies between boxes of positions, by strided NumPy views.

Spans of many runs are usually regular (block-cyclic), so a copy between two of them is a few assignments
between 4-D views rather than one per pair of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rma_mm.errors import WindowError
from rma_mm.geometry.span import Span
from rma_mm.windows.base import Array, Counters, Patch, closed

Box = tuple[Span, Span]  # row and column positions


class Stretch(NamedTuple):
    """`blocks` blocks of `block` positions, regularly spaced in each of two spans."""

    block: int
    blocks: int
    source: int  # first position in the first span
    source_period: int  # distance between the starts of neighbouring blocks in the first span
    target: int  # first position in the second span
    target_period: int  # distance between the starts of neighbouring blocks in the second span


def stretches(source: Span, target: Span) -> list[Stretch]:
    """Two equally long spans cut into pieces contiguous in both, regular neighbours grouped.

    >>> stretches(Span.cyclic(10, block=2, parts=2, index=1), Span.range(0, 4))
    [Stretch(block=2, blocks=2, source=2, source_period=4, target=0, target_period=2)]
    """
    groups: list[Stretch] = []
    for block, at, to in _common_runs(source, target):
        if groups and groups[-1].block == block:
            last = groups[-1]
            steps = (at - last.source, to - last.target)
            if last.blocks == 1:
                groups[-1] = last._replace(blocks=2, source_period=steps[0], target_period=steps[1])
                continue
            if steps == (last.blocks * last.source_period, last.blocks * last.target_period):
                groups[-1] = last._replace(blocks=last.blocks + 1)
                continue
        groups.append(Stretch(block, 1, at, block, to, block))
    return groups


def _common_runs(source: Span, target: Span) -> Iterator[tuple[int, int, int]]:
    """(length, start in source, start in target) of the pieces contiguous in both."""
    i = j = 0
    done_i = done_j = 0
    while i < len(source.runs) and j < len(target.runs):
        (a, b), (p, q) = source.runs[i], target.runs[j]
        length = min(b - a - done_i, q - p - done_j)
        yield length, a + done_i, p + done_j
        done_i, done_j = done_i + length, done_j + length
        if a + done_i == b:
            i, done_i = i + 1, 0
        if p + done_j == q:
            j, done_j = j + 1, 0


def paired_views(
    source: Array, source_at: tuple[Span, Span], target: Array, target_at: tuple[Span, Span]
) -> list[tuple[Array, Array]]:
    """(target view, source view) pairs that together cover equally shaped boxes of two 2-D arrays."""
    pairs = []
    for r in stretches(source_at[0], target_at[0]):
        for c in stretches(source_at[1], target_at[1]):
            shape = (r.blocks, r.block, c.blocks, c.block)
            read = _blocks(source, (r.source, c.source), shape, (r.source_period, c.source_period))
            write = _blocks(target, (r.target, c.target), shape, (r.target_period, c.target_period))
            pairs.append((write, read))
    return pairs


def _blocks(array: Array, start: tuple[int, int], shape: tuple[int, int, int, int], period: tuple[int, int]) -> Array:
    """Blocks of a 2-D array: a 4-D view (row block, row, column block, column), 2-D when there is one block."""
    corner = array[start[0] :, start[1] :]
    if shape[0] == shape[2] == 1:
        return corner[: shape[1], : shape[3]]
    down, right = array.strides
    return as_strided(corner, shape, (period[0] * down, down, period[1] * right, right))


class CopyTransfer:
    """A get from memory within reach: plain copies, over when `start` returns."""

    def __init__(
        self, pairs: list[tuple[Array, Array]], counters: Counters | None, require_open: Callable[[], None], *,
        same_node: bool,
    ) -> None:
        """`pairs` are (target, source); `counters` is None for own memory; `require_open` raises once it is gone."""
        self.pairs: list[tuple[Array, Array]] | None = pairs
        """(target, source) of each copy; None once it is closed."""
        self._require_open = require_open
        self.counters = counters
        self.messages = 0  # messages that it stands for
        self._same_node = same_node

    def start(self) -> None:
        """Copy. Raises ClosedError after `close` of it or its window."""
        if self.pairs is None:
            raise closed("transfer")
        self._require_open()
        for target, source in self.pairs:
            np.copyto(target, source)
        if self.counters is not None:
            self.counters.add(self.words, self.messages, same_node=self._same_node)

    @property
    def words(self) -> int:
        return sum(source.size for _, source in self.pairs or ())

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once: `start` has copied everything."""

    def close(self) -> None:
        self.pairs = None


def strided_elements(array: Array) -> tuple[int, int]:
    return array.strides[0] // array.itemsize, array.strides[1] // array.itemsize


def axes(strides: tuple[int, int]) -> tuple[int, int]:
    return (0, 1) if strides[1] <= strides[0] else (1, 0)


def chunks(target: Patch, rows: Span, cols: Span, itemsize: int, chunk_bytes: int) -> list[tuple[Box, Box]]:
    """(target positions, origin positions) of pieces of at most `chunk_bytes`: whole rows where one row fits."""
    if not (rows and cols):
        return []
    wide = max(1, chunk_bytes // itemsize)
    high = max(1, wide // len(cols))
    return [
        ((far_rows, far_cols), (near_rows, near_cols))
        for far_rows, near_rows in zip(target.rows.pieces(high), rows.pieces(high), strict=True)
        for far_cols, near_cols in zip(target.cols.pieces(wide), cols.pieces(wide), strict=True)
    ]


def require_writeable(window: str, origin: Array) -> None:
    """Raise WindowError when a get would land in a read-only array."""
    if not origin.flags.writeable:
        raise WindowError(f"{window}: origin of a get must be writeable; copy it first")

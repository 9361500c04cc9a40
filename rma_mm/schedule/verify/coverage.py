"""True if boxes cover a space, and how often: no point is visited."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.span import Region, Span
from rma_mm.schedule.schedule import Schedule


def covers(parts: list[Region], region: Region) -> bool:
    return sum((part & region).size for part in parts) == region.size


def covers_union(parts: list[Region], region: Region) -> bool:
    """True if `parts`, which may overlap, contain all of `region`."""
    rest = [region]
    for part in dict.fromkeys(parts):
        left = []
        for rows, cols in rest:
            inner = rows & part[0]
            left += [Region((rows - part[0], cols)), Region((inner, cols - part[1]))]
        rest = [box for box in left if box]
    return not rest


def products_of(schedule: Schedule, face: Region) -> Region:
    """Return all points (m, n, k) of a box of C."""
    assert schedule.shape is not None
    return Region((*face, Span.range(0, schedule.shape[2])))


def coverage(boxes: list[Region], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return how often each atom (points that no box tells apart) of a space of `shape` is covered."""
    if 0 in shape:
        return np.ones((0,) * len(shape), np.int64)
    labels, sizes = [], []
    for dim, extent in enumerate(shape):
        spans = list(dict.fromkeys(box[dim] for box in boxes))
        member = np.zeros((len(spans) + 1, extent), bool)
        for n, span in enumerate(spans):
            member[n, span.indices] = True
        patterns = np.unique(member, axis=1)
        sizes.append(patterns.shape[1])
        labels.append({span: np.flatnonzero(patterns[n]) for n, span in enumerate(spans)})
    counts = np.zeros(sizes, np.int64)
    for box in boxes:
        counts[np.ix_(*(labels[dim][span] for dim, span in enumerate(box)))] += 1
    return counts

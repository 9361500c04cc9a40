"""Boxes of positions as stretches of memory, for libraries that move one stretch at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.span import Span
from rma_mm.windows.base import Patch
from rma_mm.windows.boxes.copying import axes, stretches


class Runs(NamedTuple):
    """A box of strided memory as stretches: where each begins, in bytes from the first element, and their bytes."""

    far: NDArray[np.int64]
    near: NDArray[np.int64]
    sizes: NDArray[np.int64]


def runs_of(far: Patch, near: tuple[Span, Span], near_strides: tuple[int, int], itemsize: int) -> Runs:
    """The stretches that a box of far memory has in common with positions of near memory, joined where they touch."""
    slow, fast = axes(far.strides)
    there, here = (far.rows, far.cols), near
    if not (far.rows and far.cols):
        return Runs(*(np.zeros(0, np.int64) for _ in range(3)))
    unit = far.strides[fast] == near_strides[fast] == 1
    if unit:
        parts = [
            (s.source + n * s.source_period, s.target + n * s.target_period, s.block)
            for s in stretches(there[fast], here[fast]) for n in range(s.blocks)
        ]
        starts, ends, lengths = (np.array(each, np.int64) for each in zip(*parts, strict=True))
    else:
        starts, ends = there[fast].indices, here[fast].indices
        lengths = np.ones(len(starts), np.int64)
    far_at = there[slow].indices[:, None] * far.strides[slow] + starts * far.strides[fast]
    near_at = here[slow].indices[:, None] * near_strides[slow] + ends * near_strides[fast]
    a, b = far_at.ravel(), near_at.ravel()
    sizes = np.broadcast_to(lengths, far_at.shape).ravel()
    first = np.ones(len(a), bool)
    first[1:] = (a[1:] != a[:-1] + sizes[:-1]) | (b[1:] != b[:-1] + sizes[:-1])
    begins = np.flatnonzero(first)
    return Runs(a[begins] * itemsize, b[begins] * itemsize, np.add.reduceat(sizes, begins) * itemsize)

"""A symmetric matrix completed from one triangle: boxes transposed, and zeros above the diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.elementwise import pieces

TILE_BYTES = 64 << 10
"""Of a box, what is transposed at once, from a dense copy: lines that lie apart by powers of two would meet in few
places of the cache."""
LEAST = 32
"""Rows and columns of that, at least."""


def transpose_into(image: NDArray[Any], box: NDArray[Any], conjugates: bool) -> None:
    """Copy `box`, which has the shape of `image` and lies transposed in memory, in tiles; conjugated where asked."""
    for part in pieces(image, TILE_BYTES, LEAST) if image.ndim == 2 else [...]:
        dense = np.ascontiguousarray(box[part].T).T
        if conjugates:
            np.conjugate(dense, out=image[part])
        else:
            np.copyto(image[part], dense)


def mirror_within(square: NDArray[Any], conjugates: bool) -> None:
    """Make the upper triangle of a square the mirror image of the lower; of a Hermitian one the diagonal is real."""
    lower = np.conjugate(square) if conjugates else square.copy()
    np.copyto(square, lower.T, where=np.triu(np.ones(square.shape, bool), 1))
    if conjugates and square.dtype.kind == "c":
        np.fill_diagonal(square, lower.diagonal().real)


def clear_beyond(c: NDArray[Any], lines: Sequence[int], first: Sequence[int], columns: NDArray[np.int64]) -> None:
    """Zeros in these lines of `c` in its `columns` from the given number on, which are ascending."""
    is_dense = len(columns) > 0 and columns[-1] - columns[0] + 1 == len(columns)
    for line, begin in zip(lines, first, strict=True):
        if begin < len(columns):
            c[line, slice(columns[begin], columns[-1] + 1) if is_dense else columns[begin:]] = 0

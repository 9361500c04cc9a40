"""Floats as integers in the same order, in place, so that whoever finds the least integer finds the least float.

MPI does not say what its MIN and MAX of NaN are, and libraries lose it; as keys NaN is the least integer (where the
least is sought) or the greatest, and comes through. Equal keys are equal bits, so that a result does not depend on the
order of arrival, not even in the sign of its zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.reduction import Reduction

PIECE = 1 << 12  # elements that are converted at a time, with a temporary copy


def has_keys(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f"


def key_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"int{8 * dtype.itemsize}")


def to_keys(x: NDArray[Any], reduction: Reduction) -> None:
    _convert(x, reduction, marks_nan=True)


def from_keys(x: NDArray[Any], reduction: Reduction) -> None:
    _convert(x, reduction, marks_nan=False)


def _convert(x: NDArray[Any], reduction: Reduction, marks_nan: bool) -> None:
    """Turn round the order of the bits below the sign where the sign is set: doing it twice undoes it."""
    whole = key_type(x.dtype)
    limits = np.iinfo(whole)
    last = limits.min if reduction.order < 0 else limits.max
    pieces = np.nditer(x.view(whole), ["external_loop", "buffered", "zerosize_ok"], ["readwrite"], buffersize=PIECE)
    piece: Any  # an array, of one operand
    with pieces:
        for piece in pieces:
            nan = np.isnan(piece.view(x.dtype)) if marks_nan else None
            np.bitwise_xor(piece, (piece >> (8 * whole.itemsize - 1)) & limits.max, out=piece)
            if nan is not None:
                piece[nan] = last

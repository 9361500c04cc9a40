"""Content that no result has by itself: what checked transfers and products find in memory before it is filled.

Floats are NaN with bits of their own, so that every sum they enter shows them; where a type has no NaN each byte is A5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NANS = {"float16": "7ea5", "bfloat16": "7fe5", "float32": "7fe5a5a5", "float64": "7ffda5a5a5a5a5a5"}
"""Quiet NaN by type, highest byte first; both parts of complex elements are such."""
PARTS = {"complex64": "float32", "complex128": "float64"}  # the type of the parts of complex elements


def pattern(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the one element, shape (1,), that stands for nothing."""
    bits = NANS.get(PARTS.get(dtype.name, dtype.name))
    raw = bytes.fromhex(bits)[::-1] if bits else b"\xa5"
    return np.frombuffer(raw * (dtype.itemsize // len(raw)), dtype)


def poison(array: NDArray[Any]) -> None:
    array[...] = pattern(array.dtype)


def shows_poison(dtype: np.dtype[Any]) -> bool:
    return dtype.kind not in "iu"


def poisoned(array: NDArray[Any]) -> NDArray[np.bool_]:
    return ~differing(array, np.broadcast_to(pattern(array.dtype), array.shape))


def in_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint8)


def differing(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which elements of two arrays of one shape and type differ in any bit."""
    found: NDArray[np.bool_] = (in_bytes(one) != in_bytes(other)).any(axis=-1)
    return found

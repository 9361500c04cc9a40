"""Reductions: what the ⊕ of a semiring is on its own, and what MPI has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import SUPPORTED, is_half, rank

Types = frozenset[np.dtype[Any]]

ADDABLE: Types = frozenset(dtype for dtype in SUPPORTED if not is_half(dtype))
"""Types that MPI can add portably: the 16-bit floats have no MPI type."""
_TRUTH: Types = frozenset({np.dtype(np.bool_)})
_WHOLE: Types = frozenset(dtype for dtype in ADDABLE if rank(dtype) == 1)
_NARROW: Types = frozenset(dtype for dtype in _WHOLE if dtype.itemsize < 8)
"""Open MPI 5.0.11 accumulates bits of 64-bit integers wrongly between nodes."""


@dataclass(frozen=True)
class Reduction:
    """An associative and commutative operation with which many elements become one."""

    add: np.ufunc  # what it does with two
    identity: Callable[[np.dtype[Any]], Any]
    """Return the neutral element of a type, which is also the result of reducing nothing."""
    mpi: str = ""  # MPI's name of it; empty if MPI has none
    types: Types = frozenset()
    """The element types for which MPI does the same. Of floats MPI's MIN and MAX are not NumPy's: what comes of NaN
    is each library's own affair, and mostly wrong."""
    order: int = 0  # −1 if it picks the least of its operands, 1 if it picks the greatest, 0 if it does neither
    rounds: bool = False  # true if floats come out otherwise in another order

    def added_as(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype(f"i{dtype.itemsize}") if self.order and dtype.kind == "f" else dtype


def least(dtype: np.dtype[Any]) -> Any:
    """Return the least value of an element type.

    >>> least(np.dtype("int8")), least(np.dtype("float32"))
    (np.int8(-128), np.float32(-inf))
    """
    return dtype.type(np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf)


def greatest(dtype: np.dtype[Any]) -> Any:
    """Return the greatest value of an element type.

    >>> greatest(np.dtype("uint8"))
    np.uint8(255)
    """
    return dtype.type(np.iinfo(dtype).max if dtype.kind in "iu" else np.inf)


def zero(dtype: np.dtype[Any]) -> Any:
    return dtype.type(0)


def ones(dtype: np.dtype[Any]) -> Any:
    return np.invert(dtype.type(0))


SUM = Reduction(np.add, zero, "SUM", ADDABLE, rounds=True)  # the ordinary sum; of truth values it is or
MIN = Reduction(np.minimum, greatest, "MIN", _WHOLE, order=-1)
MAX = Reduction(np.maximum, least, "MAX", _WHOLE, order=1)
LOR = Reduction(np.logical_or, zero, "LOR", _TRUTH)

REDUCTIONS: dict[str, Reduction] = {
    reduction.mpi: reduction
    for reduction in (
        *(SUM, MIN, MAX, LOR),
        Reduction(np.logical_and, ones, "LAND", _TRUTH),
        Reduction(np.logical_xor, zero, "LXOR", _TRUTH),
        Reduction(np.bitwise_or, zero, "BOR", _NARROW),
        Reduction(np.bitwise_and, ones, "BAND", _NARROW),
        Reduction(np.bitwise_xor, zero, "BXOR", _NARROW),
    )
}
"""Reductions that MPI has, by MPI's names."""

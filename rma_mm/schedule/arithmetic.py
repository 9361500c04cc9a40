"""Arithmetic of products, for readers that run a schedule on values."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Arithmetic(Protocol):
    """Operations used instead of + and × (the kernels' semirings are such)."""

    @property
    def add(self) -> np.ufunc:
        """Return ⊕, which is associative and commutative."""

    @property
    def multiply(self) -> np.ufunc:
        """Return ⊗, by which elements are multiplied."""

    def identity(self, dtype: np.dtype[Any]) -> Any:
        """Return the sum of no elements, in this type."""


class PlusTimes:
    add, multiply = np.add, np.multiply

    def identity(self, dtype: np.dtype[Any]) -> Any:
        return dtype.type(0)

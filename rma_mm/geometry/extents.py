"""How large a matrix may be: what is counted in 64 bits must fit them, and what has no elements must cost no time."""

from __future__ import annotations

from math import prod

MOST_ELEMENTS = 2**50
LONGEST_EMPTY = 2**24
"""Rows or columns of a matrix without elements; those of others are bounded by the memory that they take."""


def too_large(shape: tuple[int, int]) -> str:
    """Why no matrix has this shape; empty where one may.

    >>> too_large((0, 2**60))
    'a matrix without elements has at most 16777216 rows and columns'
    """
    if not prod(shape):
        return f"a matrix without elements has at most {LONGEST_EMPTY} rows and columns" * (max(shape) > LONGEST_EMPTY)
    return f"a matrix has at most {MOST_ELEMENTS} elements" * (prod(shape) > MOST_ELEMENTS)

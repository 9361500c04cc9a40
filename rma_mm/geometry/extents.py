"""Limits of a matrix's size: counts and byte counts must fit into 64 bits."""

from __future__ import annotations

from math import prod

MOST_ELEMENTS = 2**50  # largest number of elements of a matrix; for an empty one, the largest extent


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the matrix that an array of `shape` is kept as: all its dimensions but the last are rows.

    >>> as_matrix((2, 3, 4)), as_matrix((5,))
    ((6, 4), (1, 5))
    """
    return prod(shape[:-1]), shape[-1]


def too_large(shape: tuple[int, int]) -> str:
    """Return why no matrix can have this shape; empty if one can.

    >>> too_large((0, 2**60))
    'a matrix has at most 1125899906842624 elements, rows or columns'
    """
    counted = prod(max(1, extent) for extent in shape)
    return f"a matrix has at most {MOST_ELEMENTS} elements, rows or columns" * (counted > MOST_ELEMENTS)

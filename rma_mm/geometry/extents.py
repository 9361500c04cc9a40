"""Limits of a matrix's size: counts and byte counts must fit into 64 bits."""

from __future__ import annotations

import re
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


MOST_BYTES = 2**62
_BYTES = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return a number of bytes from text: with GiB or G it counts 2³⁰, with GB 10⁹.

    Raises ValueError, whose text is the rule.

    >>> parse_bytes("2GiB"), parse_bytes("2GB"), parse_bytes("1.5k")
    (2147483648, 2000000000, 1536)
    """
    parts = _BYTES.fullmatch(text)
    if not parts or (parts[3] and not parts[2]):
        raise ValueError("needs bytes with a unit, as 2GiB, 500MB or 1000000")
    is_decimal = parts[2] and not parts[3] and text.strip().upper().endswith("B")
    number = float(parts[1]) * (1000 if is_decimal else 1024) ** " KMGT".index(parts[2].upper() or " ")
    if number > MOST_BYTES:
        raise ValueError(f"must be at most {MOST_BYTES} bytes")
    return int(number)

"""The operands, the same for every peer, and the exact check of a result without a second product.

Elements are whole numbers, so sums are exact in float32 and float64 whatever their order. A and B follow different
rules: a peer that mistook one for the other would be found out on square shapes too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench import measure
from bench.peers.cases import Case

SHIFT = {"A": 0, "B": 1_000_003}
"""Rows by which each operand is moved within the endless matrix of `measure.whole_numbers`."""
CHUNK = 2**20
"""Elements made at a time."""
VECTORS = 3
"""Random vectors of a check: a wrong row is overlooked with a probability of 2000⁻³."""


class Piece(NamedTuple):
    """A part of C where a peer left it."""

    rows: slice
    cols: slice
    values: NDArray[Any]


def elements(which: str) -> Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]:
    """The rule of "A" or "B": open index grids → values."""
    return lambda rows, cols: measure.whole_numbers(rows + SHIFT[which], cols)


def part(which: str, rows: slice, cols: slice, dtype: str, order: Literal["C", "F"] = "C") -> NDArray[Any]:
    """These rows and columns of "A" or "B"."""
    made = np.empty((rows.stop - rows.start, cols.stop - cols.start), dtype, order)
    for chunk in chunks(rows, cols):
        made[chunk.start - rows.start : chunk.stop - rows.start] = elements(which)(*np.ogrid[chunk, cols])
    return made


def whole(which: str, case: Case) -> NDArray[Any]:
    """All of "A" or "B"."""
    rows, cols = (case.m, case.k) if which == "A" else (case.k, case.n)
    return part(which, slice(0, rows), slice(0, cols), case.dtype)


def chunks(rows: slice, cols: slice) -> Iterable[slice]:
    """The rows, few enough at a time to keep temporaries small."""
    step = max(1, CHUNK // max(1, cols.stop - cols.start))
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def wrong_rows(case: Case, piece: Piece) -> int:
    """Rows of a piece of C that are not A's rows times B's columns: C·x against A·(B·x), exact in float64."""
    rows, cols, values = piece
    inner, count = slice(0, case.k), cols.stop - cols.start
    if values.shape != (rows.stop - rows.start, count):
        raise ValueError(f"a piece of shape {values.shape} was given for rows {rows} and columns {cols}")
    x = np.random.default_rng(rows.start + cols.start).integers(-1000, 1000, (count, VECTORS)).astype(np.float64)
    y = np.concatenate([part("B", chunk, cols, "float64") @ x for chunk in chunks(inner, cols)])
    wrong = 0
    for chunk in chunks(rows, inner):
        found = values[chunk.start - rows.start : chunk.stop - rows.start].astype(np.float64) @ x
        wrong += int(np.any(found != part("A", chunk, inner, "float64") @ y, axis=1).sum())
    return wrong


def uncovered(case: Case, boxes: Sequence[tuple[int, int, int, int]]) -> str | None:
    """What is amiss where boxes (first row, end row, first column, end column) should hold each element of C once."""
    boxes = [(r0, r1, c0, c1) for r0, r1, c0, c1 in boxes if r1 > r0 and c1 > c0]
    held = sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in boxes)
    for at, one in enumerate(boxes):
        for other in boxes[at + 1 :]:
            if one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]:
                return f"boxes {one} and {other} of C overlap"
    return None if held == case.m * case.n else f"{held} elements of C are held, not {case.m * case.n}"

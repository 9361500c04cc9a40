"""Rows of products of truth values, computed again: 64 of them are one word, and 8 terms one look into a table.

That is the method of Arlazarov, Dinic, Kronrod and Faradzhev (1970); it takes m·n·k/512 operations on words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.runtime.verification.parts import Array, Part, allreduce_sums
from rma_mm.runtime.verification.rows import Indices

COUNTS = np.dtype(np.uint16)  # in which the parts of such matrices work: the given number of ranks may hold a summand
BITS = 8  # terms of one look


def true_rows(comm: Any, a: Part, b: Part, before: Part | None, reads: bool, rows: Indices) -> NDArray[np.bool_]:
    """(r, n): rows of A times B, or C0. `reads`: whether alpha is 1. Collective."""
    count = np.zeros((len(rows), b.shape[1]), COUNTS)
    if reads:
        left = allreduce_sums(comm, a.some_rows(rows))[0][:, b.rows] > 0
        count[:, b.cols] = _times(left, b.tile)
    if before is not None:
        count += before.some_rows(rows)
    made: NDArray[np.bool_] = allreduce_sums(comm, count)[0] > 0
    return made


def _times(a: NDArray[np.bool_], b: Array) -> NDArray[np.uint8]:
    """(r, n): the product of two matrices of truth values."""
    n = b.shape[1]
    padded = np.pad(b, ((0, -len(b) % BITS), (0, -n % 64)))
    packed = np.ascontiguousarray(np.packbits(padded, axis=1)).view(np.uint64)  # of a transposed tile it is not yet
    looks = np.packbits(a, axis=1, bitorder="little")
    out = np.zeros((len(a), packed.shape[1]), np.uint64)
    table = np.zeros((1 << BITS, packed.shape[1]), np.uint64)
    for at in range(looks.shape[1]):
        for bit, line in enumerate(packed[BITS * at : BITS * (at + 1)]):
            np.bitwise_or(table[: 1 << bit], line, out=table[1 << bit : 2 << bit])
        out |= table[looks[:, at]]
    return np.unpackbits(out.view(np.uint8), axis=1, count=n)

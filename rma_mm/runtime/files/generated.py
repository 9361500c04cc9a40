"""Matrices made up from a seed, element by element, so that every rank can make its own part.

An element depends on the seed, the operand and its row and column only: the matrices are the same on any number
of ranks, mesh and placement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16

Words = NDArray[np.uint64]

BLOCK = 1 << 14  # elements made at a time: their temporaries stay in a core's cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_FEW = 17  # values that a generated integer takes: -8 to 8, unsigned 0 to 16


def generated(
    seed: int, which: str, dtype: np.dtype[Any] | str
) -> Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[Any]]:
    """The function (rows, cols) → elements of the operand called `which` ("A", "B", "C"), as `from_function` wants it.

    rows: (m, 1), cols: (1, n), global indices; the result is (m, n). Floats are uniform in [-1, 1), complex in both
    parts; integers are small; bool is either with equal chance.

    >>> f = generated(0, "A", "float32")
    >>> rows, cols = np.ogrid[0:4, 0:3]
    >>> bool((f(rows, cols)[2:] == f(rows[2:], cols)).all())
    True
    """
    element = np.dtype(dtype)
    words = seed % 2**64, *which.encode()

    def f(rows: NDArray[np.int64], cols: NDArray[np.int64]) -> NDArray[Any]:
        out = np.empty((rows.size, cols.size), element)
        if element.kind == "c":
            real = out.view(element.type(0).real.dtype).reshape(*out.shape, 2)
            _fill(real[..., 0], rows, cols, (*words, 1))
            _fill(real[..., 1], rows, cols, (*words, 2))
        else:
            _fill(out, rows, cols, (*words, 0))
        return out

    return f


def _fill(out: NDArray[Any], rows: NDArray[np.int64], cols: NDArray[np.int64], words: tuple[int, ...]) -> None:
    """Set `out` (m, n) to the values of its elements, block by block."""
    if not out.size:
        return
    key = _key(words)
    row_keys = _mixed(rows.reshape(-1).astype(np.uint64) * _GOLDEN + key)
    col_keys = _mixed(cols.reshape(-1).astype(np.uint64) * _GOLDEN + _mixed(key + _GOLDEN))
    width = min(len(col_keys), BLOCK)
    height = max(1, BLOCK // width)
    scratch = np.empty((2, height, width), np.uint64)
    for top in range(0, len(row_keys), height):
        for left in range(0, len(col_keys), width):
            part = out[top : top + height, left : left + width]
            state, spare = scratch[:, : part.shape[0], : part.shape[1]]
            np.bitwise_xor(row_keys[top : top + height, None], col_keys[None, left : left + width], out=state)
            _shuffle(state, spare)
            _values(state, spare, part)


def _key(words: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return one 64-bit key of several numbers."""
    key = np.zeros(1, np.uint64)
    for word in words:
        key = _mixed(key + _GOLDEN + np.array([word], np.uint64))
    return key


def _mixed(state: Words) -> Words:
    """Return a new array with every word mixed as splitmix64 does."""
    state = state.copy()
    spare = np.empty_like(state)
    _shuffle(state, spare)
    np.right_shift(state, np.uint64(31), out=spare)
    state ^= spare
    return state


def _shuffle(state: Words, spare: Words) -> None:
    """splitmix64's mixing in place, except for its last step, which only improves bits that are not used here."""
    np.right_shift(state, np.uint64(30), out=spare)
    state ^= spare
    state *= _MIX_1
    np.right_shift(state, np.uint64(27), out=spare)
    state ^= spare
    state *= _MIX_2


def _values(state: Words, spare: Words, out: NDArray[Any]) -> None:
    """Turn random words into elements, from their highest bits."""
    if out.dtype.kind == "b":
        np.right_shift(state, np.uint64(63), out=spare)
        out[...] = spare
    elif out.dtype.kind in "iu":
        np.right_shift(state, np.uint64(32), out=spare)
        spare *= np.uint64(_FEW)
        spare >>= np.uint64(32)
        out[...] = spare
        if out.dtype.kind == "i":
            out -= out.dtype.type(_FEW // 2)
    else:
        bits = 8 if out.dtype == BFLOAT16 else np.finfo(out.dtype).nmant + 1
        np.right_shift(state, np.uint64(64 - bits), out=spare)
        # a signed view converts to a float in one instruction; every value is exact in the element type
        working = np.dtype(np.float64) if bits > 24 else np.dtype(np.float32)
        value = spare.view(np.int64).astype(working)
        np.multiply(value, working.type(2.0 ** (1 - bits)), out=value)
        np.subtract(value, working.type(1), out=value)
        out[...] = value

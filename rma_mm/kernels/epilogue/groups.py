"""Work on groups of rows, each by itself: products of batches and heads, which a matrix holds one below the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.pointwise import working

Array = NDArray[Any]


def _split(heads: int, x: Array) -> Array:
    """Return (groups, heads · rows, d) of (groups, rows, heads · d): the columns of each head below the last's."""
    groups, rows, columns = x.shape
    return x.reshape(groups, rows, heads, columns // heads).transpose(0, 2, 1, 3)


def _merge(heads: int, x: Array) -> Array:
    groups, rows, columns = x.shape
    return x.reshape(groups, heads, rows // heads, columns).transpose(0, 2, 1, 3)


WORK: dict[str, Callable[..., Array]] = {
    "bmm": lambda _, a, b: np.matmul(a, b),
    "bmm_nt": lambda _, a, b: np.matmul(a, b.swapaxes(1, 2)),
    "bmm_tn": lambda _, a, b: np.matmul(a.swapaxes(1, 2), b),
    "split_heads": _split,
    "merge_heads": _merge,
}
"""By name: functions of the number of heads and of operands (groups, rows, columns)."""


def do_groups(name: str, heads: int, groups: int, operands: Sequence[Array], out: Array) -> None:
    """Do one of `WORK` for as many groups as a rank has, into its part of the result."""
    if not groups or not out.size:
        return
    shaped = [x.reshape(groups, len(x) // groups, x.shape[1]) for x in operands]
    if name.startswith("bmm"):
        shaped = [x.astype(working(x.dtype), copy=False) for x in shaped]
    with np.errstate(all="ignore"):
        out[...] = WORK[name](heads, *shaped).reshape(out.shape)

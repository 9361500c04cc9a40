"""Predecessors on best paths, traced from known lengths along the edges that make them up."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.compiling import Source, compiled

NONE = -9999  # the predecessor of a vertex that is not reached, and of the source: SciPy's
WIDER = 16.0  # by how much rounding is allowed more where a vertex that has a length was not reached

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]


def trace(
    lengths: Floats, sources: Longs, starts: Longs, ends: Longs, weights: Floats, widest: bool, eps: float,
    exact_below: float,
) -> NDArray[np.int32]:
    """Predecessors of all vertices on best paths from some sources, each path with as few edges as can be.

    lengths: (sources, n), the best of all paths, `inf` (for widest paths `-inf`) if there is none. starts, ends,
    weights: the edges by the vertex where they begin, as in CSR. widest: whether a path is worth its least weight
    rather than the sum of its weights. eps: the rounding error of a sum, relative to it. exact_below: the length up to
    which lengths have none. A path is traced along edges with which its length comes out, to a few rounding errors.
    """
    found = np.full(lengths.shape, NONE, np.int32)
    queue = np.empty(lengths.shape[1], np.int64)
    arrays = [lengths, sources, starts, ends, weights, found, queue]
    dense = [np.ascontiguousarray(each) for each in arrays]
    _tracer()(*(each.ctypes.data for each in dense), *lengths.shape, widest, eps, exact_below)
    return dense[5]


@cache
def _tracer() -> Any:
    arguments = (*(ctypes.c_void_p,) * 7, *(ctypes.c_int64,) * 3, *(ctypes.c_double,) * 2)
    return compiled("paths", (), arguments, _source)


def _source() -> Source:
    from numba import types

    element, index, short = types.CPointer(types.float64), types.CPointer(types.int64), types.CPointer(types.int32)
    return _trace, (element, *(index,) * 3, element, short, index, *(types.int64,) * 3, *(types.float64,) * 2)


def _trace(
    lengths: Any, sources: Any, starts: Any, ends: Any, weights: Any, found: Any, queue: Any,
    count: int, n: int, widest: int, eps: float, exact_below: float,
) -> None:
    """Breadth first from each source; flat arrays."""
    for row in range(count):
        base, source = row * n, sources[row]
        reachable = 1
        for j in range(n):
            if j != source and abs(lengths[base + j]) != np.inf:
                reachable += 1
        slack, tail = eps, 0
        while tail < reachable and slack < 1e300:
            for j in range(n):
                found[base + j] = NONE
            queue[0] = source
            head, tail = 0, 1
            while head < tail:
                k = queue[head]
                head += 1
                for edge in range(starts[k], starts[k + 1]):
                    j, weight = ends[edge], weights[edge]
                    if j != source and found[base + j] == NONE:
                        before = lengths[base + k]
                        if widest:
                            fits = min(before, weight) == lengths[base + j]
                        else:
                            rounding = 0.0
                            if lengths[base + j] > exact_below:
                                rounding = slack * (abs(before) + abs(weight))
                            fits = before + weight <= lengths[base + j] + rounding
                        if fits:
                            found[base + j] = k
                            queue[tail] = j
                            tail += 1
            slack = slack * WIDER if slack > 0 else np.inf

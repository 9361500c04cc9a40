"""Figures from samples: costs and kernels that come closest to what was measured, in relative terms. No MPI."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rma_mm.policy.model.machine import Cost, Kernel

Vector = NDArray[np.float64]
Shape = tuple[int, int, int, bool]  # m, n, k of a product, and whether rows of C lie a multiple of a page apart


def nonnegative(table: Vector, wanted: Vector) -> Vector:
    """Return the x ≥ 0 that minimises |table · x − wanted|.

    table: (samples, unknowns). By trying every set of unknowns that are not 0, which is exact and quick for the six
    or fewer that there are here. A minimum without a bound solves its own set's normal equations, and the true one is
    such a minimum; columns that depend on each other leave several, of which one is taken.

    >>> nonnegative(np.array([[1.0, 1], [1, 2], [1, 3]]), np.array([3.0, 2, 1])).round(3).tolist()
    [2.0, 0.0]
    """
    unknowns = table.shape[1]
    best, least = np.zeros(unknowns), float(wanted @ wanted)
    for count in range(1, unknowns + 1):
        for chosen in map(list, combinations(range(unknowns), count)):
            found = np.linalg.lstsq(table[:, chosen], wanted, rcond=None)[0]
            rest = table[:, chosen] @ found - wanted
            if found.min() >= 0 and float(rest @ rest) < least:
                best, least = np.zeros(unknowns), float(rest @ rest)
                best[chosen] = found
    return best


def cost_of(points: Sequence[tuple[float, float, float]]) -> Cost:
    """Return the cost behind (transfers, bytes, seconds) of several sizes; of a single one all is alpha.

    A deviation counts as a share of the root of what was measured: between seconds, by which small transfers would
    count nothing, and shares of them, by which large ones, which come out of another cache, would count too little.
    A large transfer contains a small one: what the small one took more is noise.
    alpha is no less than what the smallest transfer took beyond its bytes.
    """
    transfers, nbytes, seconds = np.array(points, np.float64).T
    if len(points) == 1:
        return Cost(float(seconds[0] / transfers[0]), 0.0)
    order = nbytes.argsort()
    seconds[order] = np.minimum.accumulate(seconds[order][::-1])[::-1]
    alpha, beta = scaled(np.stack([transfers, nbytes], axis=1), seconds, np.sqrt(seconds))
    at = int(nbytes.argmin())
    least = max(float(alpha), float((seconds[at] - beta * nbytes[at]) / transfers[at]))
    others = nbytes > nbytes[at]
    rest = np.maximum(0.0, seconds - least * transfers)[others]
    return Cost(least, float(scaled(nbytes[others, None], rest, np.sqrt(seconds[others]))[0]))


def scaled(table: Vector, wanted: Vector, unit: Vector) -> Vector:
    """Return the x ≥ 0 that minimises |table · x − wanted|, with each deviation in its own unit."""
    scale = table.max(axis=0)
    scale[scale == 0] = 1.0
    found: Vector = nonnegative(table / scale / unit[:, None], wanted / unit) / scale
    return found


def kernel_of(shapes: Sequence[Shape], seconds: Sequence[float]) -> Kernel:
    """Return the kernel behind the seconds of products of these shapes, by the least relative deviations."""
    m, n, k, is_aliased = np.array(shapes, np.float64).T
    table = np.stack([np.ones(len(m)), m * n * k, m * k, k * n, m * n, m * n * is_aliased], axis=1)
    measured = np.array(seconds, np.float64)
    return Kernel(*map(float, scaled(table, measured, measured)))

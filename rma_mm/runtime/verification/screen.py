"""Does a large product of floats look right? Cheap enough to go with each: a few per cent of it, one look at a matrix.

The sums of `sketch`, of more neighbours and by rows alone, with weights that are near 1 instead of vectors over all
columns: what cancels among neighbours with signs does not with weights of their own. What looks wrong is not judged
here, nor what holds NaN, infinities or numbers whose squares are none.
"""

from __future__ import annotations

import numpy as np

from rma_mm.runtime.verification.floats import FloatProduct, scalar, squared
from rma_mm.runtime.verification.parts import Array, Part, allreduce_sums, run
from rma_mm.runtime.verification.sketch import (
    PANEL_TERMS,
    ROWS_AT_ONCE,
    ROWS_TOGETHER,
    cells,
    grouped,
    mean_squares,
    scores,
)

NEIGHBOURS = 128
"""Columns of C whose sum is looked at: that costs 1/`NEIGHBOURS` of the product, and reading the matrices."""
CLEAR = 8.0  # standard deviations of a sum up to which it is not suspicious
PASSED = 350
"""Standard deviations of its neighbours' rounding by which one element may be off and pass; beyond, one in 10^6 is."""
SPREAD = 0.05  # how far weights are from 1
SAMPLED = 128  # rows of a part of B from which the norms of its columns are estimated
FEW = 16  # sums in a row from whose squares those of C's elements are not known well
ALL = np.zeros(1, np.int64)


def looks_right(p: FloatProduct, seed: int) -> bool:
    """True if no sum of neighbours in C is suspicious: alike on all ranks. Collective."""
    if p.alpha == 0 or p.activation or p.bias.any() or not np.isfinite([p.alpha, p.beta]).all():
        return False
    (m, n), k = p.c.shape, p.a.shape[1]
    a, b, c = (part.as_type(p.narrow) for part in (p.a, p.b, p.c))
    x = _weights(p, b, seed)
    groups = -(-n // NEIGHBOURS)
    z, made = (np.zeros((rows, groups), p.narrow) for rows in (k, m))
    _add(z, b, x)
    z = allreduce_sums(p.comm, z)[0]
    _add(made, c, x)
    results, squares = mean_squares(made, ALL), np.zeros((m, 1))
    if p.rounding.final or groups < FEW:  # too much rests on it
        results = np.zeros((m, 1))
        for at, block in c.blocks(ROWS_TOGETHER):
            results[run(at)] += squared(block) @ np.square(x[c.cols, None]) / groups
    if p.before is not None:
        _add(made, p.before.as_type(p.narrow), -scalar(p.beta, made) * x)
    z, weights = z[run(a.cols)], mean_squares(z, ALL).astype(x.dtype)[run(a.cols)]
    error = made.astype(p.c.working)
    for at, block in a.blocks(ROWS_TOGETHER):
        total = np.zeros((len(at), groups), error.dtype)
        for left in range(0, block.shape[1], PANEL_TERMS):
            total += block[:, left : left + PANEL_TERMS] @ z[left : left + PANEL_TERMS]
        error[run(at)] -= scalar(p.alpha, total) * total
        squares[run(at)] += squared(block) @ weights
    error, squares, results = allreduce_sums(p.comm, error, squares, results)
    worst = scores(p, np.abs(error).max(axis=1, keepdims=True), squares, results, NEIGHBOURS)
    return bool(p.comm.bcast(np.isfinite(squares + results).all() and (worst <= CLEAR).all()))


def _weights(p: FloatProduct, b: Part, seed: int) -> Array:
    """Return (n,): the weights of the columns, of either sign; smaller for large columns."""
    n, squares = p.c.shape[1], np.zeros(p.c.shape[1])
    if b.tile.size:
        some = b.tile[:: -(-len(b.tile) // SAMPLED)].astype(p.narrow, copy=False)
        squares[b.cols] = squared(some).sum(axis=0)
    norms = np.sqrt(allreduce_sums(p.comm, squares)[0])
    norms[~(norms > 0)] = norms.mean() or 1.0
    rng = np.random.default_rng(seed)
    signs = rng.choice((-1.0, 1.0), n) * rng.uniform(1 - SPREAD, 1 + SPREAD, n)
    x: Array = (signs / norms).astype(np.empty(0, p.narrow).real.dtype)
    return x


def _add(to: Array, part: Part, x: Array) -> None:
    """Add the sums of neighbouring columns times x."""
    if len(part.cols):
        which, starts = np.unique(part.cols // NEIGHBOURS, return_index=True)
        mine = x[part.cols]
        for at, block in part.blocks(ROWS_AT_ONCE):
            to[cells(at, which)] += grouped(block, mine, starts, NEIGHBOURS)

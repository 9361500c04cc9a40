"""Products of batches as RMA_MM_CHECK has them checked; `rma_mm.runtime.verification.checked_product` says by what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.policy.planner.batches import Batch
from rma_mm.runtime.execution.operands import Operands
from rma_mm.runtime.matrices.array import DistArray
from rma_mm.runtime.verification.check import verify
from rma_mm.runtime.verification.checked_product import tell, unwritten
from rma_mm.runtime.verification.contents import LocalMatrix, differences
from rma_mm.windows.checks.poison import poison

MOST = 64  # products of a batch that are computed again; of more, as many that are drawn
Index = tuple[int, ...]


@contextmanager
def checked_batch(
    batch: Batch, given: Operands, seed: int, A: DistArray, B: DistArray, C: DistArray, added: DistArray | None
) -> Iterator[None]:
    """Check products of a batch, on whose operands all ranks have agreed. Collective; raises CheckError.

    given: of one of them. seed: for what is drawn, the same on every rank. added: what beta adds, where that is not C.
    """
    o, mesh = given.options, C.mesh
    before = None if o.beta == 0 else _by_rows(C if added is None else added)
    if before is None:
        poison(C.tile)
    yield
    what = f"products {batch.a} @ {batch.b} of {C.dtype} into {C.layout}"
    found = differences(C.folded, C.folded, "C, its batch folded into rows,") if not C.layout.partial else ()
    tell(mesh, what, [*unwritten(C.folded, before is None), *found])
    left, right, made = (_by_rows(x) for x in (A, B, C))
    every = list(np.ndindex(*C.shape[:-2]))
    drawn = np.random.default_rng(seed).permutation(len(every))[:MOST]
    for index in (every[n] for n in sorted(drawn)):
        a, b = _one(left, index, o.transpose_a), _one(right, index, o.transpose_b)
        verdict = verify(
            a, b, _one(made, index), alpha=o.alpha, beta=o.beta, before=None if before is None else _one(before, index),
            conj_a=o.conjugate_a, conj_b=o.conjugate_b, seed=seed, semiring=given.semiring, product=given.product_dtype,
        )
        where = ", ".join(map(str, index))
        tell(mesh, what, [] if verdict.ok else [f"C[{where}] is wrong, computed again: {verdict.reason}"])


def _by_rows(x: DistArray) -> DistArray:
    """Return a copy whose matrices are cut by rows over all ranks. Collective."""
    rows = Level(x.mesh.grid.names)
    return x.redistribute(Layout((*((),) * (len(x.shape) - 2), (rows,), ())))


def _one(x: DistArray, index: Index, is_transposed: bool = False) -> LocalMatrix:
    """Return one matrix of a batch that lies by rows, that for a product of C; transposed where it is stored so."""
    own = index[len(index) - len(x.shape) + 2 :]
    at = tuple(0 if extent == 1 else n for n, extent in zip(own, x.shape[:-2], strict=True))
    layout = replace(x.layout, splits=x.layout.splits[-2:])
    shape, tile = (x.shape[-2], x.shape[-1]), x.tile[at] if x.mesh.is_member else np.empty((0, 0), x.dtype)
    if is_transposed:
        shape, tile, layout = shape[::-1], tile.T, layout.T
    return LocalMatrix(x.mesh, shape, x.dtype, layout, tile)

"""A product of batches settled: how it is cut over the mesh, and where its operands lie and are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from rma_mm.errors import AlgorithmError, MemoryLimitError, OptionError, ShapeError
from rma_mm.geometry.extents import as_matrix, too_large
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Split
from rma_mm.kernels import choose_kernel
from rma_mm.policy.planner.batches import Batch, BatchPrices, BatchShare, best, candidates, named, share
from rma_mm.policy.planner.preference import TWO_SIDED, VARIABLE
from rma_mm.policy.planner.tables import seconds_text
from rma_mm.runtime.execution.operands import Operand, Operands
from rma_mm.runtime.products.prices import tariff_of
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows.waiting import reduced

SHOWN = 5
"""Ways to cut a product that are told of beside the one that was taken."""
UNSERVED = (
    f"prefer: got {TWO_SIDED!r} (or {VARIABLE}); every way to cut these products of a batch gets or accumulates; place "
    f"A, B and C so that the same axes cut the batch of each, or leave more placements to the plan"
)
"""What is said where no way moves nothing: batches are moved by gets and accumulates alone."""


@dataclass(frozen=True, eq=False)
class BatchRequest:
    """What was asked."""

    batch: Batch
    operands: Operands
    """Of one product of the batch."""
    layouts: Mapping[str, Layout | None]
    """Where A, B and C lie; None for wherever the product wants them."""


@dataclass(frozen=True, eq=False)
class SettledBatch:
    """What was asked, and the way to cut it that was taken."""

    request: BatchRequest
    mesh: Mesh
    cuts: Mapping[str, Split]
    inner: Mapping[str, Layout]
    """Where A and B are needed, and C is summed."""
    layouts: Mapping[str, Layout]
    """Where A, B and C lie."""
    share: BatchShare
    """Of the slowest, busiest and fullest rank."""
    beside: tuple[str, ...]
    """Other ways to cut it in words, the fastest first."""

    def __str__(self) -> str:
        """What is multiplied, how, and in how much memory."""
        batch, operands = self.request.batch, self.request.operands
        a, b, c = (list(batch.shape(x)) for x in "ABC")
        how = f"{operands.semiring.note}in {operands.c.dtype} on a mesh of {self.mesh.shape}"
        lines = [
            f"C{c} = A{a} @ B{b} {how}",
            f"algorithm   batch: {named(self.cuts, batch)} (the fastest, predicted {seconds_text(self.share.seconds)})",
            *(f"{x}           {self.layouts[x]}{self._moves(x)}" for x in "ABC"),
            f"kernel      {operands.kernel}",
            f"words       {self.share.words} of the busiest rank",
            f"peak memory {self.share.held} bytes on the fullest rank",
        ]
        return "\n".join(lines)

    def _moves(self, x: str) -> str:
        if self.inner[x] == self.layouts[x]:
            return ""
        return f", summed as {self.inner[x]}" if x == "C" else f", brought to {self.inner[x]}"

    def explain(self) -> str:
        """The same, and the other ways to cut the product."""
        return "\n".join([str(self), "", *self.beside])


def batch_request(batch: Batch, a: Operand, b: Operand, layout: Layout | None, operands: Operands) -> BatchRequest:
    """What was asked, checked. a, b: the whole batches. Raises ShapeError, AlgorithmError, OptionError."""
    shape, options = batch.shape("C"), operands.options
    if reason := too_large(as_matrix(shape)):
        raise ShapeError(f"shapes: A is {a.shape}, B is {b.shape}, C would be {shape}; {reason}")
    if options.algorithm != "auto":
        raise AlgorithmError(
            f"algorithm: got {options.algorithm!r} for a batch; how it is cut the planner finds: leave it out"
        )
    refused = {
        "epilogue": options.epilogue is not None,
        "check": bool(options.check),
        "symmetric": options.symmetric is not None,
    }
    for name, given in refused.items():
        if given:
            raise OptionError(f"{name}: a product of batches takes none; leave it out")
    m, n, k = operands.shape
    rows = m * prod(shape[:-2])
    kernel = choose_kernel(options.kernel, operands.summed, rows, n, k, operands.semiring, operands.operand_dtype)
    return BatchRequest(batch, replace(operands, kernel=kernel), {"A": a.layout, "B": b.layout, "C": layout})


def settle_batch(mesh: Mesh, request: BatchRequest) -> SettledBatch:
    """The fastest way to cut a product on the slowest rank, of those that fit and move as is preferred.

    Collective; raises OptionError, MemoryLimitError.
    """
    batch, operands, shape = request.batch, request.operands, mesh.shape
    tariff = tariff_of(mesh, operands)
    sizes = {x: operands.dtype(x).itemsize for x in "ABC"}
    prices = BatchPrices(tariff.machine, (tariff.dtype, tariff.kernel), sizes, mesh.flavour.name)
    found = candidates(batch, shape, request.layouts, _may_sum(operands))
    figures = np.zeros((len(found), 3))
    with agreed(mesh.comm, "plan"):
        if mesh.is_member:
            mine = [share(batch, shape, mesh.rank, cuts, request.layouts, prices) for cuts in found]
            figures[:] = [(each.seconds, each.words, each.held) for each in mine]
    reduced(mesh.comm, figures, "MAX")
    shares = [BatchShare(float(seconds), int(words), int(held)) for seconds, words, held in figures]
    rests = (operands.options.prefer or mesh.prefer) == TWO_SIDED
    able = [each for each in shares if not (rests and each.words)]
    if not able:
        raise OptionError(UNSERVED)
    taken = best(shares, operands.options.memory_limit, rests)
    if taken is None:
        least = min(each.held for each in able)
        raise MemoryLimitError(
            f"memory_limit: got {operands.options.memory_limit} bytes; this product of batches needs {least} on the "
            f"fullest rank: allow more, or use more ranks"
        )
    cuts = found[taken]
    inner = {x: batch.layout(x, cuts) for x in "ABC"}
    layouts = {x: request.layouts[x] or batch.lying(x, cuts, shape) for x in "ABC"}
    others = sorted((n for n in range(len(found)) if n != taken), key=lambda n: (shares[n].seconds, n))[:SHOWN]
    beside = tuple(
        f"{seconds_text(shares[n].seconds):>8}, {shares[n].words} words: {named(found[n], batch)}" for n in others
    )
    return SettledBatch(request, mesh, cuts, inner, layouts, shares[taken], beside)


def _may_sum(operands: Operands) -> bool:
    """Whether sums of several ranks may be added up: exactly so, or in an order that does not matter."""
    is_plain = operands.semiring.is_arithmetic and operands.summed == operands.c.dtype
    return is_plain and operands.c.dtype.kind in "iufc" and not operands.needs_order


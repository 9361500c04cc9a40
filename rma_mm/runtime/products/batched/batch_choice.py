"""A product of batches settled: how it is cut over the mesh, and where its operands lie and are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.errors import AlgorithmError, MemoryLimitError, OptionError, ShapeError
from rma_mm.geometry.extents import as_matrix, too_large
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Split
from rma_mm.kernels import choose_kernel
from rma_mm.kernels.batched import scratch_bytes as batch_bytes
from rma_mm.kernels.threads import using_threads
from rma_mm.policy.planner.batches import Batch, BatchLoad, BatchPrices, batch_load, best, box, candidates, cuts_text
from rma_mm.policy.planner.candidates import adds_in_any_order
from rma_mm.policy.planner.preference import TWO_SIDED, VARIABLE
from rma_mm.policy.planner.tables import seconds_text
from rma_mm.runtime.execution.operands import Operand, Operands
from rma_mm.runtime.matrices.move import scratch_bytes
from rma_mm.runtime.products.prices import cost_model_of
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.algorithm import same_place
from rma_mm.windows.waiting import largest, reduced

SHOWN = 5  # ways to cut a product that are told of beside the one that was taken
UNSERVED = (
    f"prefer: got {TWO_SIDED!r} (or {VARIABLE}); every partitioning of this batch needs one-sided transfers; "
    "shard the batch dimensions of A, B and C over the same mesh axes, or leave more placements open"
)
"""Message if every way moves data: batches move by gets and accumulates alone."""


@dataclass(frozen=True, eq=False)
class BatchRequest:
    """A request for a product of batches."""

    batch: Batch
    operands: Operands  # of one product of the batch
    layouts: Mapping[str, Layout | None]  # placements of A, B and C; None for the product's choice

    def dtype(self, x: str) -> np.dtype[Any]:
        o = self.operands
        return {"A": o.a, "B": o.b, "C": o.c}[x].dtype

    def moved_dtype(self, x: str) -> np.dtype[Any]:
        """Return the type of a matrix while it is moved; contributions to C are rounded once, afterwards."""
        is_added = x == "C" and self.operands.options.beta != 0
        return self.operands.accum_dtype if is_added else self.dtype(x)


RedistributionKey = tuple[tuple[int, int], np.dtype[Any], Layout, Layout]
"""The shape and the element type of a matrix, where it is, and where it is brought to."""


@dataclass(frozen=True, eq=False)
class BatchChoice:
    """The way in which a product of batches is cut."""

    request: BatchRequest
    mesh: Mesh
    cuts: Mapping[str, Split]
    load: BatchLoad  # of the slowest, busiest and fullest rank
    beside: tuple[str, ...] = ()  # other ways to cut it in words, the fastest first

    @cached_property
    def inner(self) -> dict[str, Layout]:
        return {x: self.request.batch.layout(x, self.cuts) for x in "ABC"}

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        batch, given = self.request.batch, self.request.layouts
        return {x: given[x] or batch.lying(x, self.cuts, self.mesh.grid) for x in "ABC"}

    @cached_property
    def moves(self) -> dict[str, RedistributionKey]:
        """Return the redistributions of A, B and C, each as the matrix it is stored as."""
        found: dict[str, RedistributionKey] = {}
        for x in "ABC":
            shape, outer, inner = self.request.batch.shape(x), self.layouts[x], self.inner[x]
            if not same_place(inner, outer, shape, self.mesh.grid):
                ends = (inner, outer) if x == "C" else (outer, inner)
                source, target = (layout.folded(shape) for layout in ends)
                found[x] = (as_matrix(shape), self.request.moved_dtype(x), source, target)
        return found

    @property
    def scratch_bytes(self) -> int:
        """Bytes that this rank needs beside its parts of A, B and C and their redistributed copies."""
        request, o = self.request, self.request.operands.options
        moving = sum(scratch_bytes(self.mesh, *each) for each in self.moves.values())
        *count, m, n, k = box(request.batch, self.mesh.grid, self.mesh.rank, self.cuts)
        made, beta = (request.moved_dtype("C"), 0) if "C" in self.moves else (request.dtype("C"), o.beta)
        types, conj = (request.dtype("A"), request.dtype("B"), made), o.conjugate_a or o.conjugate_b
        kernel, semiring = request.operands.kernel, request.operands.semiring
        return moving + batch_bytes(prod(count), m, n, k, types, o.alpha, beta, conj, kernel, semiring)

    def __str__(self) -> str:
        batch, operands = self.request.batch, self.request.operands
        a, b, c = (list(batch.shape(x)) for x in "ABC")
        how = f"{operands.semiring.note}in {operands.c.dtype} on a mesh of {self.mesh.grid}"
        why = f"the fastest, predicted {seconds_text(self.load.seconds)}"
        lines = [
            f"C{c} = A{a} @ B{b} {how}",
            f"algorithm   batch: {cuts_text(self.cuts, batch)} ({why})",
            *(f"{x}           {self.layouts[x]}{self._moves(x)}" for x in "ABC"),
            f"kernel      {operands.kernel}",
            f"words       {self.load.words} of the busiest rank",
            f"peak memory {self.load.nbytes} bytes on the fullest rank",
        ]
        return "\n".join(lines)

    def _moves(self, x: str) -> str:
        if x not in self.moves:
            return ""
        return f", summed as {self.inner[x]}" if x == "C" else f", brought to {self.inner[x]}"

    def explain(self) -> str:
        return "\n".join([str(self), "", *self.beside])


def batch_request(batch: Batch, a: Operand, b: Operand, layout: Layout | None, operands: Operands) -> BatchRequest:
    """Check the arguments of a product of batches. a, b: the whole batches.

    a, b: the whole batches. Raises ShapeError, AlgorithmError, OptionError.
    """
    shape, options = batch.shape("C"), operands.options
    if reason := too_large(as_matrix(shape)):
        raise ShapeError(f"shapes: A is {a.shape}, B is {b.shape}, C would be {shape}; {reason}")
    if options.algorithm != "auto":
        raise AlgorithmError(
            f"algorithm: got {options.algorithm!r} for a batch; the planner chooses how to cut batches: leave it out"
        )
    refused = {
        "epilogue": options.epilogue is not None,
        "check": bool(options.check),
        "symmetric": options.symmetric is not None,
    }
    for name, given in refused.items():
        if given:
            raise OptionError(f"{name}: is not supported for batches; leave it out")
    m, n, k = operands.shape
    rows = m * prod(shape[:-2])
    kernel = choose_kernel(options.kernel, operands.accum_dtype, rows, n, k, operands.semiring, operands.operand_dtype)
    return BatchRequest(batch, replace(operands, kernel=kernel), {"A": a.layout, "B": b.layout, "C": layout})


def choose_batch(mesh: Mesh, request: BatchRequest) -> BatchChoice:
    """Choose the cut that is fastest on the slowest rank, of those that fit and move data as preferred.

    Collective; raises AlgorithmError, OptionError, MemoryLimitError.
    """
    batch, operands, shape = request.batch, request.operands, mesh.grid
    if operands.needs_order and adds_in_any_order(shape, [request.layouts[x] for x in "AB"]):
        raise AlgorithmError(
            "batch: partial sums of A or B are added in no fixed order, which deterministic=True excludes"
        )
    cost_model = cost_model_of(mesh, operands)
    dtypes = ({x: request.dtype(x) for x in "ABC"}, {x: request.moved_dtype(x) for x in "ABC"})
    sizes, moved = ({x: dtype.itemsize for x, dtype in each.items()} for each in dtypes)
    prices = BatchPrices(
        cost_model.machine, (cost_model.dtype, cost_model.kernel), sizes, moved, dict(cost_model.flavours)
    )
    found = candidates(batch, shape, request.layouts, _may_sum(operands))
    figures = np.zeros((len(found), 3))
    with agreed(mesh.comm, "plan"):
        if mesh.is_member:
            mine = [batch_load(batch, shape, mesh.rank, cuts, request.layouts, prices) for cuts in found]
            figures[:] = [(each.seconds, each.words, each.nbytes) for each in mine]
    reduced(mesh.comm, figures, "MAX")
    shares = [BatchLoad(float(seconds), int(words), int(held)) for seconds, words, held in figures]
    choice = _fastest_that_fits(mesh, request, found, shares)
    others = [n for n, cuts in enumerate(found) if cuts is not choice.cuts]
    nearest = sorted(others, key=lambda n: (shares[n].seconds, n))[:SHOWN]
    beside = tuple(
        f"{seconds_text(shares[n].seconds):>8}, {shares[n].words} words: {cuts_text(found[n], batch)}" for n in nearest
    )
    return replace(choice, beside=beside)


def _fastest_that_fits(
    mesh: Mesh, request: BatchRequest, found: list[dict[str, Split]], shares: list[BatchLoad]
) -> BatchChoice:
    """Return the fastest of the ways `found` that fits with its scratch memory, which is looked at where the rest fits.

    Collective; raises OptionError, MemoryLimitError.
    """
    options = request.operands.options
    limit, rests = options.memory_limit, (options.prefer or mesh.prefer) == TWO_SIDED
    if rests and all(each.words for each in shares):
        raise OptionError(UNSERVED)
    while (taken := best(shares, limit, rests)) is not None:
        choice = BatchChoice(request, mesh, found[taken], shares[taken])
        with using_threads(mesh.threads), agreed(mesh.comm, "plan"):
            scratch = choice.scratch_bytes
        held = shares[taken].nbytes + largest(mesh.comm, [scratch])[0]
        shares[taken] = replace(shares[taken], nbytes=held)
        if limit is None or held <= limit:
            return replace(choice, load=shares[taken])
    least = min(each.nbytes for each in shares if not (rests and each.words))
    raise MemoryLimitError(
        f"memory_limit: got {limit} bytes; this product of batches needs at least {least} on the fullest rank: allow "
        f"more, or use more ranks"
    )


def _may_sum(operands: Operands) -> bool:
    """True if sums of several ranks may be added up: exactly so, or in an order that does not matter."""
    is_plain = operands.semiring.is_arithmetic and operands.accum_dtype == operands.c.dtype
    return is_plain and operands.c.dtype.kind in "iufc" and not operands.needs_order


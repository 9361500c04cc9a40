"""Operands of whole numbers for one case, each placement made once; and the exact product to hold results against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import rma_mm
from bench import measure
from bench.peers.cases import bounds
from rma_mm.geometry.layout import Layout

if TYPE_CHECKING:
    from mpi4py import MPI

    from bench.policy.cases import Case

SHIFT = {"A": 0, "B": 1_000_003}
"""Added to an operand's row numbers, so that A and B differ where they have one shape."""
STEP = 2**20
"""Elements that are made at a time."""


def rows_of(case: Case, operand: str, start: int, stop: int) -> NDArray[Any]:
    """Some rows of A or B, whose products and sums are exact in float32 up to k = 2¹⁸; made a few at a time."""
    cols = np.arange(case.extent(operand)[1])[None, :]
    made = np.empty((stop - start, cols.size), case.dtype)
    step = max(1, STEP // max(1, cols.size))
    for at in range(start, stop, step):
        part = np.arange(at, min(at + step, stop))[:, None]
        made[at - start : at - start + part.size] = measure.whole_numbers(part + SHIFT[operand], cols)
    return made


def whole_matrices(case: Case, comm: MPI.Intracomm) -> dict[str, NDArray[Any]]:
    """A, B and NumPy's product of them, on every rank; each rank makes some rows of all three. Collective."""
    cuts = {x: bounds(case.extent(x)[0], comm.size) for x in "ABC"}
    a, b = (rows_of(case, x, *cuts[x][comm.rank : comm.rank + 2]) for x in "AB")
    whole_b = gathered(comm, b, cuts["B"])
    return {"A": gathered(comm, a, cuts["A"]), "B": whole_b, "C": gathered(comm, a @ whole_b, cuts["C"])}


def gathered(comm: MPI.Intracomm, mine: NDArray[Any], cuts: list[int]) -> NDArray[Any]:
    """The rows of all ranks, as `cuts` tells them apart. Collective."""
    whole = np.empty((cuts[-1], mine.shape[1]), mine.dtype)
    measure.rest(comm)
    comm.Allgatherv(mine, [whole, [mine.shape[1] * rows for rows in np.diff(cuts).tolist()]])
    return whole


class Matrices:
    """A, B and C of a case on one mesh: those that are placed alike are the same matrix."""

    def __init__(self, case: Case, mesh: rma_mm.Mesh, whole: dict[str, NDArray[Any]]) -> None:
        self.case, self.mesh, self.whole = case, mesh, whole
        self.made: dict[tuple[str, Layout], rma_mm.DistMatrix] = {}

    def of(self, plan: rma_mm.Plan) -> tuple[rma_mm.DistMatrix, rma_mm.DistMatrix, rma_mm.DistMatrix]:
        """A, B and C as a plan wants them. Collective."""
        a, b, c = (self.get(x, plan.layouts[x]) for x in "ABC")
        return a, b, c

    def get(self, operand: str, layout: Layout) -> rma_mm.DistMatrix:
        """An operand placed so. Collective."""
        key = (operand, layout)
        if key not in self.made:
            self.made[key] = self.new(operand, layout)
        return self.made[key]

    def new(self, operand: str, layout: Layout) -> rma_mm.DistMatrix:
        """The same, made anew; C is undefined. Collective."""
        extent, dtype = self.case.extent(operand), self.case.dtype
        if operand in self.case.own:
            region = layout.region(extent, self.mesh.grid, self.mesh.rank)
            mine = np.ascontiguousarray(self.whole[operand][region.selector()])
            return rma_mm.DistMatrix.from_local(mine, extent, self.mesh, layout)
        made = rma_mm.DistMatrix.empty(extent, self.mesh, layout, dtype)
        if operand != "C":
            made.tile[...] = self.whole[operand][made.region.selector()]
        return made

    def holds_product(self, c: rma_mm.DistMatrix) -> bool:
        """Whether this rank's part of C is right in every element. Local."""
        return np.array_equal(c.tile, self.whole["C"][c.region.selector()])

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local."""
        for matrix in self.made.values():
            matrix.close()
        self.made.clear()

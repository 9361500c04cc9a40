"""rma_mm, its placements and its algorithm left to itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

import rma_mm
from bench import measure
from bench.peers.operands import Piece, elements
from bench.peers.systems import OverMPI, Task, mpi_library
from rma_mm.runtime.execution.footprint import merged
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.products.prices import best_grid


class RmaMM(OverMPI):
    """`plan.execute(A, B)` of matrices that lie as the plan would have them, each element once, into the plan's C."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        case, comm = task.case, self.comm
        m, n, k = case.m, case.n, case.k
        self.mesh = rma_mm.Mesh(best_grid(comm, (m, n, k), case.dtype), comm)
        a, b = (Operand(shape, np.dtype(case.dtype)) for shape in ((m, k), (k, n)))
        self.plan = rma_mm.plan(a, b, self.mesh)
        self.a, self.b = (
            rma_mm.DistMatrix.from_function(shape, elements(which), self.mesh, self.plan.layouts[which], case.dtype)
            for which, shape in (("A", (m, k)), ("B", (k, n)))
        )
        self.c = self.plan.execute(self.a, self.b)
        self.facts = {
            "rma_mm": rma_mm.__version__, "mpi": mpi_library(), "blas": measure.blas_name(),
            "mesh": str(self.mesh.grid),
            "algorithm": self.plan.algorithm, "window": self.mesh.window_flavour, "threads": self.mesh.threads,
            "layouts": {name: str(layout) for name, layout in self.plan.layouts.items()},
            "movement": merged(comm.allgather(self.plan.movement)), "result": "into the plan's own C",
        }

    def multiply(self) -> None:
        """C = A · B."""
        self.c = self.plan.execute(self.a, self.b)

    def pieces(self) -> Iterable[Piece]:
        """This rank's tiles."""
        for box, tile in self.c.local.items():
            rows, cols = box.selector()
            yield Piece(rows, cols, tile)

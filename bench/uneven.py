"""`mpiexec -n 3 python -m bench.uneven`: ranks of different speed, pinned 1 + 2 to two cores, and how products fare.

Rank 0 has a core for itself, the others share the next. Plans of three meshes are timed in turn: one with the speeds
that are measured, one whose ranks count as equal, and rows by name. The ideal is m·n·k over the sum of all speeds,
measured beside. Bars: auto at most 1.10 of the ideal, the best even cut at least 1.3.
"""

from __future__ import annotations

import os
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure
from rma_mm import DistMatrix, Mesh
from rma_mm.kernels.choice.speed import SIZE
from rma_mm.kernels.threads import cores
from rma_mm.runtime.calibration.site import Site
from rma_mm.runtime.calibration.speeds import round_of
from rma_mm.runtime.execution.operands import Operand

if TYPE_CHECKING:
    from mpi4py import MPI

BARS = {"auto": 1.10, "even": 1.3}
"""At most so much of the ideal, and at least."""
CASES = {
    "auto": (True, "auto"),
    "even": (False, "stationary_c"),
    "even auto": (False, "auto"),
    "weighted": (True, "weighted"),
    "queue": (True, "queue"),
    "data_parallel": (False, "data_parallel"),
}
"""Name → whether speeds are known, and the algorithm."""


def main(comm: MPI.Intracomm) -> int:
    """Pin, measure and report; `WRONG` where a product was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--shape", default="2048,2048,2048", help="m,n,k (2048,2048,2048); an FFN: 2048,11008,4096")
    parser.add_argument("--repeat", type=int, default=9, help="samples of each case (9)")
    options = parser.parse_args()
    m, n, k = map(int, options.shape.split(","))
    pin(comm.rank)
    grid, equal = (comm.size,), (1,) * comm.size
    with Mesh(grid, comm, threads=1) as mesh, Mesh(grid, comm, threads=1, speeds=equal) as flat:
        site = Site.of(mesh.comm, mesh.node_of, 1)
        products = {name: Case(mesh if known else flat, row, (m, n, k)) for name, (known, row) in CASES.items()}
        right = min([product.is_right() for product in products.values()])
        rates = [round_of(mesh.comm, site)]
        samples = measure.interleaved(comm, {name: product.run for name, product in products.items()}, options.repeat)
        rates.append(round_of(mesh.comm, site))
        together = median(sum(each) for each in rates) * SIZE**3
        ideal = m * n * k / together
        result = {name: product.told(samples[name], ideal) for name, product in products.items()}
        where = measure.machine(comm, mesh.window_flavour)
    if comm.rank == 0:
        head = ["case", "row", "C", "median ms", "of the ideal", "words", "fullest share"]
        rows = [[name, *each.values()] for name, each in result.items()]
        met = result["auto"]["of ideal"] <= BARS["auto"], result["even"]["of ideal"] >= BARS["even"]
        lines = [
            *measure.table(head, rows),
            f"multiply-adds a second of each rank, 10⁹: {', '.join(f'{1e-9 * SIZE**3 * x:.1f}' for x in rates[-1])}",
            f"the ideal takes {1e3 * ideal:.1f} ms; bars {BARS['auto']} and {BARS['even']}, met: {met}",
            f"all results right: {measure.text(right)}",
        ]
        found = {"results": result, "rates": rates, "samples": samples}
        measure.publish(options.json, "uneven", where, lines, shape=[m, n, k], **found)
    return 0 if right else measure.WRONG


def pin(rank: int) -> None:
    """Rank 0 to the first core, all others to the second."""
    first, second, *_ = sorted(cores()) * 2
    os.sched_setaffinity(0, {second if rank else first})


class Case:
    """One way to do the product. Collective."""

    def __init__(self, mesh: Mesh, algorithm: str, shape: tuple[int, int, int]) -> None:
        m, n, k = self.shape = shape
        self.mesh = mesh
        a, b = (Operand(extents, np.dtype(np.float32)) for extents in ((m, k), (k, n)))
        self.plan = rma_mm.plan(a, b, mesh, algorithm=algorithm)
        self.a, self.b = (
            DistMatrix.from_function(extents, measure.whole_numbers, mesh, dtype="float32", layout=self.plan.layouts[x])
            for x, extents in (("A", (m, k)), ("B", (k, n)))
        )
        self.run = partial(self.plan.execute, self.a, self.b)

    def is_right(self) -> bool:
        """Whether it equals NumPy's product; all sums are exact. Collective."""
        c, a, b = (x.to_numpy(root=0) for x in (self.run(), self.a, self.b))
        return bool(self.mesh.comm.bcast(None if c is None else bool((c == a @ b).all())))

    def told(self, samples: list[float], ideal: float) -> dict[str, Any]:
        """What the table shows. Collective."""
        m, n, k = self.shape
        choice = self.plan.choice
        words = sum(self.mesh.comm.allgather(self.plan.words.words_intra + self.plan.words.words_inter))
        work = choice.chosen.algorithm.work(choice.problem.reduced)
        most = max(work.region(self.shape, self.mesh.grid, rank).size for rank in range(self.mesh.size))
        took = median(samples)
        return {
            "row": self.plan.algorithm, "C": str(self.plan.layouts["C"]), "ms": 1e3 * took, "of ideal": took / ideal,
            "words": words, "share": "by ticket" if choice.chosen.algorithm.order == "ticket" else most / (m * n * k),
        }


if __name__ == "__main__":
    measure.run(main)

"""`mpiexec -n P python -m bench.rows`: every algorithm beside SUMMA, interleaved, with the words that each moves.

Each row runs on the mesh that it would choose for this many ranks. Bar: on one node no row that moves the same words
as SUMMA takes more than 1.15 times SUMMA's time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure
from rma_mm.runtime.execution.footprint import merged
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.products.prices import best_grid

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm import Plan

BAR = 1.15
"""SUMMA's time times this is the most that a row with the same words may take."""
SUMMA = "summa_c"


def main(comm: MPI.Intracomm) -> int:
    """Measure and report; `WRONG` where a product was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--shape", default="4096,4096,4096", help="M,N,K (4096,4096,4096)")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument("--repeat", type=int, default=5, help="samples of each row (5)")
    parser.add_argument("--algorithms", nargs="+", default=rma_mm.list_algorithms(), help="all")
    options = parser.parse_args()
    m, n, k = map(int, options.shape.split(","))
    results = [measured(comm, name, (m, n, k), options) for name in options.algorithms]
    where = measure.machine(comm)
    if comm.rank == 0:
        head = ["algorithm", "mesh", "words", "messages", "peak MiB", "median s", "/ SUMMA", "bar", "movement"]
        measure.publish(options.json, "rows", where, measure.table(head, map(line_of, results)), results=results)
    return 0 if all(result["right"] for result in results) else measure.WRONG


def measured(comm: MPI.Intracomm, name: str, shape: tuple[int, int, int], options: Any) -> dict[str, Any]:
    """One row in turn with SUMMA. Collective."""
    grids = [best_grid(comm, shape, options.dtype, each) for each in (SUMMA, name)]
    with rma_mm.Mesh(grids[0], comm) as first, rma_mm.Mesh(grids[1], comm) as second:
        summa, row = (Product(mesh, each, shape, options.dtype) for mesh, each in ((first, SUMMA), (second, name)))
        right = row.is_right()
        calls = {SUMMA: summa.run, "row": row.run}
        samples = measure.interleaved(comm, calls, options.repeat)
        seconds = measure.medians(samples)
        (words, messages), (theirs, _) = (product.traffic() for product in (row, summa))
        ratio = seconds["row"] / seconds[SUMMA]
        return {
            "algorithm": name, "mesh": list(grids[1]), "right": right, "words": words, "words_of_summa": theirs,
            "messages": messages, "peak_bytes": row.plan.peak_bytes, "seconds": seconds, "samples": samples,
            "ratio": ratio, "met": ratio <= BAR if words == theirs and first.num_nodes == 1 else None,
            "movement": row.movement(),
        }


class Product:
    """A product of generated matrices by one algorithm."""

    def __init__(self, mesh: rma_mm.Mesh, name: str, shape: tuple[int, int, int], dtype: str) -> None:
        m, n, k = shape
        self.mesh = mesh
        a, b = (Operand(extent, np.dtype(dtype)) for extent in ((m, k), (k, n)))
        self.plan: Plan = rma_mm.plan(a, b, mesh, algorithm=name)
        made = partial(rma_mm.DistMatrix.from_function, f=measure.whole_numbers, mesh=mesh, dtype=dtype)
        self.a = made((m, k), layout=self.plan.layouts["A"])
        self.b = made((k, n), layout=self.plan.layouts["B"])
        self.c = made((m, n), layout=self.plan.layouts["C"])
        self.plan.prepare(self.a, self.b, self.c)

    def run(self) -> None:
        """Multiply once. Collective."""
        self.plan.execute(self.a, self.b, out=self.c)

    def is_right(self) -> bool:
        """Whether C is exactly NumPy's product of whole numbers. Collective."""
        self.run()
        a, b, c = (x.to_numpy(root=0) for x in (self.a, self.b, self.c))
        verdict = None if a is None else bool(np.array_equal(a @ b, c))
        return bool(self.mesh.comm.bcast(verdict))

    def traffic(self) -> tuple[int, int]:
        """Words and messages of all ranks in the last run. Collective."""
        mine = self.plan.words
        words, messages = zip(
            *self.mesh.comm.allgather((mine.words_intra + mine.words_inter, mine.messages)), strict=True
        )
        return sum(words), sum(messages)

    def movement(self) -> dict[str, str]:
        """How A, B and C moved, on any rank. Collective."""
        return merged(self.mesh.comm.allgather(self.plan.movement))


def line_of(result: dict[str, Any]) -> list[object]:
    """A row of the table."""
    met = "-" if result["met"] is None else measure.text(result["met"])
    return [
        result["algorithm"], "x".join(map(str, result["mesh"])), result["words"], result["messages"],
        f"{result['peak_bytes'] / 2**20:.0f}", result["seconds"]["row"], f"{result['ratio']:.3f}", met,
        " ".join(f"{x}:{how}" for x, how in result["movement"].items()),
    ]


if __name__ == "__main__":
    measure.run(main)

"""`mpiexec -n P python -m bench.orientations`: operands that lie transposed on the same grid, beside those that do not.

A, B and C lie in blocks, rows over i and columns over j, as they are stored: NN multiplies A · B, TN Aᵀ · B, and so on,
in turn. Between two hosts: `python -m bench.hosts --rate 1gbit -- python -m bench.orientations`. Bar: by groups TN
takes at most 1.1 times as long as NN, by whichever row is chosen for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure
from rma_mm import DistMatrix, Mesh
from rma_mm.geometry.mesh import grids
from rma_mm.policy.planner.preference import TWO_SIDED
from rma_mm.runtime.execution.footprint import merged

if TYPE_CHECKING:
    from mpi4py import MPI

BAR = 1.1
WAYS = ("NN", "TN", "NT", "TT")


def main(comm: MPI.Intracomm) -> int:
    """Measure and report; `WRONG` where a product was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--shape", default="2048,2048,2048", help="M,N,K (2048,2048,2048)")
    parser.add_argument("--mesh", help="as 2x1; the squarest when not given")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument("--repeat", type=int, default=7, help="samples of each case (7)")
    parser.add_argument("--algorithms", nargs="+", default=["auto", "summa_c", "summa_b", "cannon"])
    options = parser.parse_args()
    m, n, k = map(int, options.shape.split(","))
    grid = measure.grid(options.mesh) if options.mesh else min(grids(comm.size, 2), key=max)
    with Mesh(grid, comm) as mesh:
        cases = {
            f"{name} {way}": Case(mesh, name, way, (m, n, k), options.dtype)
            for name in options.algorithms
            for way in WAYS
        }
        right = min([case.is_right() for case in cases.values()])
        samples = measure.interleaved(comm, {name: case.run for name, case in cases.items()}, options.repeat)
        seconds = measure.medians(samples)
        result = {name: case.told(seconds[name], seconds[f"{name.split()[0]} NN"]) for name, case in cases.items()}
        where = measure.machine(comm, mesh.window_flavour)
    if comm.rank == 0:
        head = ["case", "row", "ms", "/ NN", "words", "between nodes", "movement"]
        lines = measure.table(head, [[name, *each.values()] for name, each in result.items()])
        if "auto" in options.algorithms:
            lines.append(f"auto TN at most {BAR} of NN, met: {measure.text(result['auto TN']['ratio'] <= BAR)}")
        lines.append(f"all results right: {measure.text(right)}")
        found = {"results": result, "samples": samples, "mesh": list(grid)}
        measure.publish(options.json, "orientations", where, lines, shape=[m, n, k], **found)
    return 0 if right else measure.WRONG


class Case:
    """A product of blocks in one orientation, without gets and accumulates where the row is to be chosen."""

    def __init__(self, mesh: Mesh, name: str, way: str, shape: tuple[int, int, int], dtype: str) -> None:
        m, n, k = shape
        self.mesh, self.turned = mesh, [letter == "T" for letter in way]
        extents = ((k, m) if self.turned[0] else (m, k)), ((n, k) if self.turned[1] else (k, n))
        place = f"{mesh.grid.names[0]}, {mesh.grid.names[1]}"
        self.a, self.b = (
            DistMatrix.from_function(each, measure.whole_numbers, mesh, dtype=dtype, layout=place) for each in extents
        )
        self.c = DistMatrix.empty((m, n), mesh, place, np.dtype(dtype))
        self.plan = rma_mm.plan(
            self.a, self.b, mesh, layout=place, algorithm=name, prefer=TWO_SIDED if name == "auto" else None,
            transpose_a=self.turned[0], transpose_b=self.turned[1],
        )

    def run(self) -> None:
        """Multiply once. Collective."""
        self.plan.execute(self.a, self.b, out=self.c)

    def is_right(self) -> bool:
        """Whether C is exactly NumPy's product of whole numbers. Collective."""
        self.run()
        a, b, c = (x.to_numpy(root=0) for x in (self.a, self.b, self.c))
        if a is None:
            return bool(self.mesh.comm.bcast(None))
        left, right = (x.T if turned else x for x, turned in zip((a, b), self.turned, strict=True))
        return bool(self.mesh.comm.bcast(bool(np.array_equal(left @ right, c))))

    def told(self, seconds: float, upright: float) -> dict[str, Any]:
        """What the table shows. Collective."""
        words = self.mesh.comm.allgather((self.plan.words.words_intra, self.plan.words.words_inter))
        moved = merged(self.mesh.comm.allgather(self.plan.movement))
        return {
            "row": self.plan.algorithm, "ms": 1e3 * seconds, "ratio": seconds / upright, "words": sum(map(sum, words)),
            "between": sum(inter for _, inter in words), "movement": " ".join(f"{x}:{moved[x]}" for x in "ABC"),
        }


if __name__ == "__main__":
    measure.run(main)

"""`mpiexec -n P python -m bench.batches`: products of batches that are cut over all ranks.

Rate: rank 0 alone with NumPy's batched product on all cores, the others idle, and `plan.execute` on all ranks, in turn.
Each begins when the threads of NumPy's BLAS have come to rest: they spin for 30 ms after a product, and a rank that
shares its core with one takes twice as long. Bar at 2 and 4 ranks: 0.9 of NumPy's rate.
Overhead: what `plan.execute` adds to each rank's own share by numpy.matmul, on small products. All ranks do one or the
other over and over, so that ranks that share a core do so in both. Bar: 100 µs.
Both: no word is moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure
from rma_mm.kernels.threads import cores, using_threads

if TYPE_CHECKING:
    from mpi4py import MPI

RATE, OVERHEAD = 0.9, 100.0
"""The bars: of NumPy's rate, and microseconds."""
ROW = 200
"""Small products of one sample: more than ranks that share a core do before they take turns."""


def main(comm: MPI.Intracomm) -> int:
    """Measure and report; `WRONG` where a product was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--shape", default="96,512,512,64", help="of the rate: batch, m, n, k (96,512,512,64)")
    parser.add_argument("--small", default="64,64,64,64", help="of the overhead, likewise (64,64,64,64)")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument("--repeat", type=int, default=30, help="samples of each (30)")
    options = parser.parse_args()
    with rma_mm.Mesh((comm.size,), comm) as mesh:
        where = measure.machine(comm, mesh.window_flavour) | {"mesh": str(mesh.grid), "threads": mesh.threads}
        large = Case(mesh, options.shape, options.dtype)
        rate = large.rate(options.repeat)
        small = Case(mesh, options.small, options.dtype)
        overhead = small.overhead(options.repeat)
        facts = {"right": large.is_right() and small.is_right(), "words": large.words() + small.words()}
    if comm.rank == 0:
        lines = [
            "",
            *measure.table(["batch, m, k, n", "NumPy ms", "rma_mm ms", "ratio", "bar", "met"], [
                [options.shape, *(1e3 * x for x in rate["seconds"]), rate["ratio"], RATE, rate["met"]],
            ]),
            *measure.table(["batch, m, k, n", "NumPy µs", "rma_mm µs", "overhead µs", "bar", "met"], [
                [options.small, *overhead["us"], overhead["overhead_us"], OVERHEAD, overhead["met"]],
            ]),
            f"words moved: {facts['words']}; exactly numpy's: {measure.text(facts['right'])}",
        ]
        measure.publish(options.json, "batches", where, lines, **facts, rate=rate, overhead=overhead)
    return 0 if facts["right"] else measure.WRONG


class Case:
    """One product of batches, on the mesh and on rank 0 by itself. Collective to make."""

    def __init__(self, mesh: rma_mm.Mesh, shape: str, dtype: str) -> None:
        batch, m, n, k = map(int, shape.split(","))
        self.mesh = mesh
        self.a, self.b = (
            rma_mm.DistArray.from_function((batch, *face), _elements, mesh, dtype=dtype) for face in ((m, k), (k, n))
        )
        self.plan = rma_mm.plan(self.a, self.b, mesh)
        self.c = self.plan.execute(self.a, self.b)
        self.whole = [x.to_numpy() for x in (self.a, self.b)]
        self.made = np.empty((batch, m, n), dtype)

    def rate(self, repeat: int) -> dict[str, Any]:
        """Seconds of both, in turn. Collective."""
        samples = measure.interleaved(self.mesh.comm, {"NumPy": self._alone, "rma_mm": self._execute}, repeat, warmup=2)
        seconds = list(measure.medians(samples).values())
        ratio = seconds[0] / seconds[1]
        return {"seconds": seconds, "ratio": ratio, "bar": RATE, "met": ratio >= RATE, "samples": samples}

    def overhead(self, repeat: int) -> dict[str, Any]:
        """Microseconds of a product on the slowest rank, beside its own share by numpy.matmul, in turn. Collective."""
        x, y, z = (np.array(each.tile) for each in (self.a, self.b, self.c))
        cases = {"NumPy": _many(lambda: np.matmul(x, y, out=z)), "rma_mm": _many(self._execute)}
        with using_threads(self.mesh.threads):
            samples = measure.interleaved(self.mesh.comm, cases, repeat, warmup=2, settle=0)
        us = [1e6 * seconds / ROW for seconds in measure.medians(samples).values()]
        over = us[1] - us[0]
        return {"us": us, "overhead_us": over, "bar_us": OVERHEAD, "met": over <= OVERHEAD}

    def words(self) -> int:
        """Words that all ranks moved in the last product. Collective."""
        words = self.plan.words
        return sum(self.mesh.comm.allgather(words.words_intra + words.words_inter))

    def is_right(self) -> bool:
        """Whether the product is exactly numpy's. Collective."""
        found = self.c.to_numpy()
        return all(self.mesh.comm.allgather(np.array_equal(found, np.matmul(*self.whole))))

    def _alone(self) -> None:
        """The whole product by NumPy on rank 0."""
        if self.mesh.rank == 0:
            with using_threads(len(cores())):
                np.matmul(*self.whole, out=self.made)

    def _execute(self) -> None:
        self.plan.execute(self.a, self.b, self.c)


def _elements(batch: Any, rows: Any, cols: Any) -> Any:
    """Small whole numbers, so that sums are exact."""
    return (3 * batch + 5 * rows + 7 * cols) % 9 - 4


def _many(call: Callable[[], object]) -> Callable[[], None]:
    """`ROW` calls in a row."""

    def calls() -> None:
        for _ in range(ROW):
            call()

    return calls


if __name__ == "__main__":
    measure.run(main)

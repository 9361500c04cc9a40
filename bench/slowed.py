"""`mpiexec -n 3 python -m bench.slowed`: a rank loses half of its core for a while, and how its products fare.

Rank 0 has a core for itself, the others share the next. Beside one rank, another program runs on its core from product
30 to 130. The ideal is m·n·k over the sum of all speeds, measured with and without that program. Bars: the rank is
named within 10 products, and no other; within 30 more, products take at most 1.15 of the new ideal; when the program
has ended, shares are back within 40.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import TYPE_CHECKING

import rma_mm
from bench import measure
from bench.uneven import pin
from rma_mm import DistMatrix, Mesh
from rma_mm.kernels.choice.speed import SIZE
from rma_mm.runtime.calibration.site import Site
from rma_mm.runtime.calibration.speeds import round_of

if TYPE_CHECKING:
    from mpi4py import MPI

FROM, TO, PRODUCTS = 30, 130, 190
"""The products between which a rank is slow, and how many there are."""
NAMED, FOLLOWED, BACK = 10, 30, 40
"""Products in which it is to be named, in which its share is to follow, and in which that is to be back."""
BAR = 1.15
"""Of the ideal at most."""
ROUNDS = 5
"""In which speeds are measured."""


def main(comm: MPI.Intracomm) -> int:
    """Pin, measure and report; `WRONG` where a product was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--shape", default="1536,1536,1536", help="m,n,k (1536,1536,1536)")
    parser.add_argument("--slow", type=int, default=0, help="the rank that loses half of its core (0)")
    options = parser.parse_args()
    m, n, k = map(int, options.shape.split(","))
    pin(comm.rank)
    with Mesh((comm.size,), comm, threads=1) as mesh:
        usual = ideal(mesh, m * n * k)
        with disturbed(comm.rank == options.slow):
            slowed = ideal(mesh, m * n * k)
        run = Run(mesh, (m, n, k), options.slow)
        samples, where = measure.slowest(comm, run.samples), measure.machine(comm, mesh.window_flavour)
    if comm.rank == 0:
        table, found = judged(run, samples, usual, slowed)
        ideals = f"the ideal takes {1e3 * usual:.1f} ms, and {1e3 * slowed:.1f} beside the other program"
        lines = [*table, ideals, *(f"{name}: {measure.text(value)}" for name, value in found.items())]
        facts = {"samples": samples, "steps": run.steps, "notes": run.notes, "ideals": [usual, slowed]}
        measure.publish(options.json, "slowed", where, lines, shape=[m, n, k], results=found, **facts)
    return 0 if run.is_right else measure.WRONG


@contextmanager
def disturbed(is_here: bool) -> Iterator[None]:
    """Another program on the cores of this process, if `is_here`."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_here else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def ideal(mesh: Mesh, work: int) -> float:
    """Seconds of so many multiply-adds, shared out by the speeds of now. Collective."""
    site = Site.of(mesh.comm, mesh.node_of, 1)
    return work / median(sum(round_of(mesh.comm, site)) * SIZE**3 for _ in range(ROUNDS))


class Run:
    """The products, one after the other. Collective."""

    def __init__(self, mesh: Mesh, shape: tuple[int, int, int], slow: int) -> None:
        m, n, k = shape
        made = (DistMatrix.from_function(x, measure.whole_numbers, mesh, dtype="float32") for x in ((m, k), (k, n)))
        self.mesh, (self.a, self.b) = mesh, made
        self.samples: list[float] = []
        """Seconds of each product on this rank, without those in which C is placed."""
        self.steps: list[tuple[int, ...]] = []
        """By how many steps each rank's share is shrunk after a product."""
        self.notes: list[int] = []
        """How much was said until then."""
        self._repeat(FROM)
        with disturbed(mesh.rank == slow):
            self._repeat(TO - FROM)
        self._repeat(PRODUCTS - TO)
        c, a, b = (x.to_numpy(root=0) for x in (rma_mm.matmul(self.a, self.b), self.a, self.b))
        self.is_right = bool(mesh.comm.bcast(None if c is None else bool((c == a @ b).all())))
        self.named = next((at for at, count in enumerate(self.notes) if count), None)
        """The product by which a rank was named."""
        self.said = list(mesh.fallbacks)

    def _repeat(self, products: int) -> None:
        for _ in range(products):
            measure.meet(self.mesh.comm)
            rma_mm.matmul(self.a, self.b)
            self.samples.append(self.mesh.metrics.last.seconds)
            self.steps.append(self.mesh.metrics.relief.steps)
            self.notes.append(sum("its multiplies take" in note for note in self.mesh.fallbacks))


def judged(run: Run, samples: list[float], usual: float, slowed: float) -> tuple[list[str], dict[str, object]]:
    """A table of the phases, and whether bars are met."""
    named = run.named if run.named is not None else TO
    phases = {
        "before": (FROM // 3, FROM, usual), "slow": (FROM, named, slowed), "follows": (named, named + FOLLOWED, slowed),
        "followed": (named + FOLLOWED, TO, slowed), "recovers": (TO, TO + BACK, usual),
        "after": (TO + BACK, PRODUCTS, usual),
    }
    rows, took = [], {}
    for name, (first, last, best) in phases.items():
        if part := samples[first:last]:
            took[name] = median(part) / best
            rows.append([name, first, last, 1e3 * median(part), took[name], fmean(part) / best, run.steps[last - 1]])
    back = next((at - TO for at in range(TO, PRODUCTS) if not any(run.steps[at])), PRODUCTS)
    found = {
        "named": f"{run.named}, {max(run.notes)} ranks",
        "named within 10 products, and no other": FROM <= named < FROM + NAMED and max(run.notes) == 1,
        "followed within 1.15 of the ideal": took.get("followed", 2.0) <= BAR,
        "shares back after": back, "shares back within 40": back <= BACK, "all results right": run.is_right,
    }
    head = ["phase", "from", "to", "median ms", "of the ideal", "mean", "steps"]
    return [*measure.table(head, rows), *run.said], found


if __name__ == "__main__":
    measure.run(main)

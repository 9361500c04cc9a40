"""`mpiexec -n P python -m bench.square`: square products against one process's numpy.matmul on all cores.

Rank 0 runs numpy while the other ranks sleep, in turn with the product on all ranks. numpy.matmul makes its result in
every call, and so does rma_mm.matmul; numpy's comes fresh from the system while ours takes used memory again, so both
are also measured with `out`. Bars: ratio (numpy's seconds / ours) of at least 0.97 at 2 ranks, 0.95 at 4 on 2 cores;
`--fast 1` takes no more than 0.90 of the time of the classical product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure
from rma_mm.kernels.threads import get_threads, set_threads
from rma_mm.runtime.products.prices import best_grid

if TYPE_CHECKING:
    from mpi4py import MPI

BARS = {2: 0.97, 4: 0.95}
"""Ranks → the least ratio."""


def main(comm: MPI.Intracomm) -> int:
    """Measure every type and report; `WRONG` where a product was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns (4096)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"], help="element types (float32 float64)")
    parser.add_argument("--repeat", type=int, default=7, help="samples of each case (7)")
    parser.add_argument("--fast", nargs="*", type=int, default=[], choices=(1, 2), help="also with matmul's fast")
    parser.add_argument("--mesh", help="as 2x1; chosen when not given")
    parser.add_argument("--window", choices=measure.WINDOWS, help="RMA_MM_WINDOW, or shared")
    options = parser.parse_args()
    size = options.size
    grid = measure.grid(options.mesh) if options.mesh else best_grid(comm, (size, size, size), options.dtype[0])
    with rma_mm.Mesh(grid, comm, window=options.window) as mesh:
        where = measure.machine(comm, mesh.window_flavour)
        results = [measured(mesh, size, dtype, options.repeat, options.fast) for dtype in options.dtype]
        where |= {"mesh": str(mesh.grid), "threads": mesh.threads}
    if comm.rank == 0:
        head = ["case", "median s", "GF/s", "fastest s", "slowest s"]
        lines = [line for result in results for line in ["", *lines_of(result, head)]]
        measure.publish(options.json, "square", where, lines, size=size, results=results)
    return 0 if all(result["right"] for result in results) else measure.WRONG


def measured(mesh: rma_mm.Mesh, size: int, dtype: str, repeat: int, fast: Sequence[int]) -> dict[str, Any]:
    """All samples of one element type, and what follows from them. Collective."""
    shape = (size, size)
    a, b, out = (rma_mm.DistMatrix.from_function(shape, measure.whole_numbers, mesh, dtype=dtype) for _ in range(3))
    solo = Solo(mesh.rank == 0, shape, dtype)
    cases: dict[str, Callable[[], object]] = {
        "numpy": solo.multiply,
        "rma_mm": partial(rma_mm.matmul, a, b, mesh),
        "numpy, out": solo.multiply_into,
        "rma_mm, out": partial(rma_mm.matmul, a, b, mesh, out),
    }
    cases |= {f"fast={n}, out": partial(rma_mm.matmul, a, b, mesh, out, fast=n) for n in fast}
    right = all(is_right(mesh, rma_mm.matmul(a, b, mesh, fast=n), solo) for n in (0, *fast))
    idle = resting_share(mesh.comm, solo.multiply)
    samples = measure.interleaved(mesh.comm, cases, repeat)
    right = right and is_right(mesh, out, solo)
    seconds = measure.medians(samples)
    ratio = seconds["numpy"] / seconds["rma_mm"]
    bar = BARS.get(mesh.size)
    return {
        "dtype": dtype,
        "right": right,
        "samples": samples,
        "seconds": seconds,
        "gflops": {name: 2e-9 * size**3 / took for name, took in seconds.items()},
        "ratio": ratio,
        "ratio_out": seconds["numpy, out"] / seconds["rma_mm, out"],
        "fast": {n: seconds[f"fast={n}, out"] / seconds["rma_mm, out"] for n in fast},
        "ratio_strict": seconds["numpy, out"] / seconds["rma_mm"],
        "bar": bar,
        "met": None if bar is None else ratio >= bar,
        "resting_share": idle,
    }


class Solo:
    """The same product by numpy on one rank, with a thread for every core; on the others it does nothing."""

    def __init__(self, is_here: bool, shape: tuple[int, int], dtype: str) -> None:
        self.is_here = is_here
        self.cores = measure.machine()["cores"]
        if is_here:
            self.x, self.y = (measure.whole_matrix(shape, dtype) for _ in range(2))
            self.out = np.empty(shape, dtype)

    def multiply(self, out: Any = None) -> Any:
        """The product as a new array, or into `out`."""
        if not self.is_here:
            return None
        threads = get_threads()
        set_threads(self.cores)
        product = np.matmul(self.x, self.y, out=out)
        set_threads(threads)
        return product

    def multiply_into(self) -> Any:
        """The product into an array that is there already."""
        return self.multiply(self.out) if self.is_here else None


def is_right(mesh: rma_mm.Mesh, c: rma_mm.DistMatrix, solo: Solo) -> bool:
    """Whether `c` equals numpy's product; all sums of whole numbers are exact here. Collective."""
    whole = c.to_numpy(root=0)
    measure.rest(mesh.comm)
    verdict = bool(np.array_equal(whole, solo.multiply())) if whole is not None else None
    measure.rest(mesh.comm)
    return bool(mesh.comm.bcast(verdict))


def resting_share(comm: MPI.Intracomm, call: Callable[[], object]) -> float:
    """Share of a core that a resting rank takes while rank 0 is in `call`: how far numpy was disturbed. Collective."""
    measure.meet(comm)
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    measure.rest(comm)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    return float(max(comm.allgather(share if comm.rank else 0.0)))


def lines_of(result: dict[str, Any], head: list[str]) -> list[str]:
    """The table of one element type."""
    samples, gflops = result["samples"], result["gflops"]
    rows = [
        [f"{result['dtype']} {name}", took, gflops[name], min(samples[name]), max(samples[name])]
        for name, took in result["seconds"].items()
    ]
    bar = "no bar" if result["bar"] is None else f"bar {result['bar']}, met: {measure.text(result['met'])}"
    strict = f"numpy with out against ours without {result['ratio_strict']:.3f}"
    resting = f"a resting rank took {100 * result['resting_share']:.2f} % of a core"
    fast = [f"fast={n} takes {share:.3f} of the classical product's time" for n, share in result["fast"].items()]
    return [
        *measure.table(head, rows),
        *fast,
        f"ratio {result['ratio']:.3f} ({bar}); with out {result['ratio_out']:.3f}; {strict}",
        f"result exactly numpy's: {measure.text(result['right'])}; {resting}",
    ]


if __name__ == "__main__":
    measure.run(main)

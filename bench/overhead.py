"""`mpiexec -n 2 python -m bench.overhead`: what plan.execute and matmul cost beyond the local multiply.

The bare multiply is what every rank's own operations do, bound by `rma_mm.kernels.bind` on the same memory, with no
synchronisation: run freely in a loop, and started by all ranks together after a barrier. Bars: at 2 ranks plan.execute
takes at most 25 µs longer than the faster of the two, and matmul, into a matrix or a new one, at most 40 µs longer than
plan.execute; and nothing grows over 10 000 executions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure, resident
from rma_mm.kernels import Product, bind
from rma_mm.kernels.threads import get_threads, set_threads
from rma_mm.runtime.execution.executor import Executable
from rma_mm.runtime.products.prices import best_grid
from rma_mm.schedule.ops import Multiply
from rma_mm.windows.waiting import barrier

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm import DistMatrix, Plan

BAR, MATMUL_BAR = 25.0, 40.0
"""Microseconds: of plan.execute beyond the multiply, and of matmul beyond plan.execute."""
CALLS = "execute", "matmul, out", "matmul"
BLOCK = 100
"""Samples of one case in a row."""

Samples = list[list[float]]


def main(comm: MPI.Intracomm) -> int:
    """Measure and report; `WRONG` where the product was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--size", type=int, default=256, help="rows and columns (256)")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument("--repeat", type=int, default=30, help=f"blocks of {BLOCK} samples of each case (30)")
    parser.add_argument("--growth", type=int, default=10000, help="executions watched for growth (10000)")
    parser.add_argument("--window", choices=measure.WINDOWS, help="RMA_MM_WINDOW, or shared")
    options = parser.parse_args()
    size = options.size
    mesh = rma_mm.Mesh(best_grid(comm, (size, size, size), options.dtype), comm, window=options.window)
    with mesh:
        where = measure.machine(comm, mesh.window_flavour) | {"mesh": str(mesh.grid), "threads": mesh.threads}
        a, b = (
            rma_mm.DistMatrix.from_function((size, size), measure.whole_numbers, mesh, dtype=options.dtype)
            for _ in range(2)
        )
        plan = rma_mm.plan(a, b, mesh)
        plan.adapt = False  # it is held against its own multiplies
        right = is_right(plan, a, b)
        result = summary(comm, measured(plan, a, b, options.repeat))
        grew = resident.growth(mesh, lambda _: plan.execute(a, b), options.growth, options.growth // 5)
    if comm.rank == 0:
        lines = ["", *lines_of(result), f"result exactly numpy's: {measure.text(right)}"]
        lines += ["", *resident.growth_lines(grew)]
        facts = {"size": size, "dtype": options.dtype, "right": right, "overhead": result, "growth": grew}
        measure.publish(options.json, "overhead", where, lines, **facts)
    return 0 if right else measure.WRONG


def is_right(plan: Plan, a: DistMatrix, b: DistMatrix) -> bool:
    """Whether the plan's product equals numpy's. Collective."""
    found, x, y = plan.execute(a, b).to_numpy(), a.to_numpy(), b.to_numpy()
    assert found is not None and x is not None and y is not None
    return all(plan.mesh.comm.allgather(np.array_equal(found, x @ y)))


def measured(plan: Plan, a: DistMatrix, b: DistMatrix, blocks: int) -> dict[str, Samples]:
    """Microseconds of each case, in turn by blocks, by rank. Collective."""
    comm = plan.mesh.comm
    c, result = plan.execute(a, b), rma_mm.matmul(a, b)
    products = bare_products(plan, next(reversed(plan.prepared.bound.values())))

    def multiply() -> None:
        for product in products:
            product()

    def synchronise() -> None:
        barrier(comm)

    def nothing() -> None:
        pass

    threads = get_threads()
    # (what is timed, what goes before it untimed, threads of the BLAS: execute itself sets the mesh's)
    cases: dict[str, tuple[Callable[[], object], Callable[[], None], int]] = {
        "execute": (lambda: plan.execute(a, b, c), nothing, threads),
        "matmul, out": (lambda: rma_mm.matmul(a, b, out=result), nothing, threads),
        "matmul": (lambda: rma_mm.matmul(a, b), nothing, threads),
        "multiply, free": (multiply, nothing, plan.mesh.threads),
        "multiply, together": (multiply, synchronise, plan.mesh.threads),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(-1, blocks):
        for name, (call, before, count) in cases.items():
            set_threads(count)
            measure.meet(comm)
            samples = block(call, before)
            if turn >= 0:
                found[name] += samples
    set_threads(threads)
    measure.rest(comm)
    every = comm.allgather(found)
    return {name: [mine[name] for mine in every] for name in cases}


def bare_products(plan: Plan, executable: Executable) -> list[Product]:
    """This rank's multiplications, bound anew on the memory that the plan uses."""
    if not plan.mesh.is_member:
        return []
    program = [op for op in plan.schedule.program(plan.mesh.rank) if isinstance(op, Multiply)]
    return [
        bind(
            executable.setup.places.array(op.a),
            executable.setup.places.array(op.b),
            executable.setup.places.array(op.c, summing=True),
            beta=0 if op.first else 1,
            kernel=plan.kernel,
        )
        for op in program
    ]


def block(call: Callable[[], object], before: Callable[[], None]) -> list[float]:
    """Microseconds of `BLOCK` calls."""
    clock, samples = time.perf_counter, []
    for _ in range(BLOCK):
        before()
        start = clock()
        call()
        samples.append(round(1e6 * (clock() - start), 2))
    return samples


def summary(comm: MPI.Intracomm, samples: dict[str, Samples]) -> dict[str, Any]:
    """What the samples say. The multiply's noise is left out, and execute's is not: no rank's luck hides overhead."""
    typical = {name: max(median(mine) for mine in found) for name, found in samples.items()}
    for name in CALLS if comm.size > 1 else ():
        typical[name] = median(map(max, *samples[name]))
    multiply = min(typical["multiply, free"], typical["multiply, together"])
    overhead, more = typical["execute"] - multiply, max(typical[name] for name in CALLS[1:]) - typical["execute"]
    met = overhead <= BAR and more <= MATMUL_BAR if comm.size == 2 else None
    return {"us": typical, "overhead_us": overhead, "matmul_us": more, "bar_us": BAR, "met": met, "samples_us": samples}


def lines_of(result: dict[str, Any]) -> list[str]:
    """The table."""
    rows = [
        [name, took, *np.percentile(result["samples_us"][name], [10, 90]).tolist()]
        for name, took in result["us"].items()
    ]
    bar = f"bars at 2 ranks: {BAR:g} and {MATMUL_BAR:g} µs, met: {measure.text(result['met'])}"
    return [
        *measure.table(["case, slowest rank", "median µs", "10 %", "90 %"], rows),
        f"execute beyond multiply {result['overhead_us']:.1f} µs, matmul beyond execute {result['matmul_us']:.1f} µs",
        bar,
    ]


if __name__ == "__main__":
    measure.run(main)

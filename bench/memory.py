"""`mpiexec -n P python -m bench.memory`: resident memory against `plan.peak_bytes`, and growth over many calls.

Memory is counted from the state after imports and one warm local product, before any mesh. What a rank holds is its
own private memory at its peak (a thread looks every 2 ms) plus its share of shared memory, where each page is divided
among the ranks that touched it (Pss): a tile that node-mates read in place counts once on the node. What MPI kept from
the plans before is shown as "left" and not counted again; for a plan in fresh processes name one window and algorithm.
Bar: within plan.peak_bytes + 16 MiB on every rank, and on all ranks together within the sum of their own peaks and
16 MiB each; 5000 matmul calls without close neither fail nor grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure, resident
from rma_mm.kernels import bind
from rma_mm.runtime.execution.footprint import peak_bytes
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.products.matmul import PLANS
from rma_mm.runtime.products.prices import best_grid

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm import DistMatrix, Mesh, Plan

ALLOWANCE = 2**24
"""Bytes beyond the plan that a rank may take."""
MIB = 2**20
WARM = 1024
"""Rows of the local product that fills OpenBLAS's own buffers before the count starts."""
SMALL = 64
"""Rows of the matrices that are multiplied over and over."""
ROW_PERIOD, COL_PERIOD = 7, 5
"""A[i, :] = i mod 7 and B[:, j] = j mod 5, so that C[i, j] = k · A[i, 0] · B[0, j] is checked without more memory."""


def main(comm: MPI.Intracomm) -> int:
    """Measure and report; `WRONG` where a product was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--size", type=int, default=2048, help="rows and columns (2048)")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument("--windows", nargs="+", default=measure.WINDOWS, choices=measure.WINDOWS)
    parser.add_argument("--algorithms", nargs="+", default=rma_mm.list_algorithms(), help="all")
    parser.add_argument("--calls", type=int, default=5000, help="matmul calls watched for growth (5000)")
    options = parser.parse_args()
    size = options.size
    grid = best_grid(comm, (size, size, size), options.dtype)
    where = measure.machine(comm, ", ".join(options.windows))
    warm(options.dtype)
    start = baseline(comm)
    peaks = []
    for window in options.windows:
        for algorithm in options.algorithms:
            before = baseline(comm)
            left = max(comm.allgather(sum(before) - sum(start)))
            own = best_grid(comm, (size, size, size), options.dtype, algorithm)
            with rma_mm.Mesh(own, comm, window=window) as mesh:
                peaks.append(measured(mesh, algorithm, size, options.dtype, before) | {"left": left})
    loops = repeated(comm, grid, options.calls)
    if comm.rank == 0:
        lines = ["", *peak_lines(peaks)]
        for name, found in loops.items():
            lines += ["", f"matmul in a loop, {name}", *resident.growth_lines(found)]
        facts = {"size": size, "dtype": options.dtype, "mesh": list(grid), "peaks": peaks, "growth": loops}
        measure.publish(options.json, "memory", where, lines, **facts)
    return 0 if all(peak["right"] for peak in peaks) else measure.WRONG


def warm(dtype: str) -> None:
    """One local product, so that the BLAS has its buffers and threads."""
    a, b, c = (np.zeros((WARM, WARM), dtype) for _ in range(3))
    bind(a, b, c)()


def baseline(comm: MPI.Intracomm) -> tuple[int, int]:
    """Bytes that this rank holds, private and shared, before something is measured. Collective."""
    resident.trim()
    measure.rest(comm)
    found = (resident.private_bytes(), resident.shared_bytes())
    measure.rest(comm)
    return found


# -- the peak of a plan ---------------------------------------------------------------------------


def measured(mesh: Mesh, algorithm: str, size: int, dtype: str, before: tuple[int, int]) -> dict[str, Any]:
    """What every rank held while a plan was made, its operands filled, and executed three times. Collective."""
    shared = [resident.shared_bytes()]
    with resident.PrivatePeak() as private:
        operand = Operand((size, size), np.dtype(dtype))
        plan = rma_mm.plan(operand, operand, mesh, algorithm=algorithm)
        a, b = (rma_mm.DistMatrix.empty((size, size), mesh, plan.layouts[x], dtype) for x in "AB")
        fill(a, b)
        shared.append(moment(mesh))
        for _ in range(3):
            c = plan.execute(a, b)
            shared.append(moment(mesh))
    own = peak_bytes(mesh, plan.schedule, plan.spec)
    every = mesh.comm.allgather((private.peak - before[0], [x - before[1] for x in shared], own, is_right(c)))
    return record(plan, every, list(mesh.fallbacks))


def fill(a: DistMatrix, b: DistMatrix) -> None:
    """Write the tiles of A and B in place: `from_function` would hold more for a while. Local."""
    if a.tile.size:
        a.tile[...] = (a.region[0].indices % ROW_PERIOD)[:, None]
    if b.tile.size:
        b.tile[...] = (b.region[1].indices % COL_PERIOD)[None, :]


def is_right(c: DistMatrix) -> bool:
    """Whether this rank's part of C is what A and B of `fill` give."""
    rows, cols = (span.indices for span in c.region)
    expected = c.shape[0] * (cols % COL_PERIOD)
    return all(np.array_equal(line, row % ROW_PERIOD * expected) for row, line in zip(rows, c.tile, strict=True))


def moment(mesh: Mesh) -> int:
    """This rank's shared memory while no rank touches any. Collective."""
    measure.rest(mesh.comm)
    found = resident.shared_bytes()
    measure.rest(mesh.comm)
    return found


def record(plan: Plan, every: list[tuple[int, list[int], int, bool]], fallbacks: list[str]) -> dict[str, Any]:
    """What follows from the figures of all ranks. Bytes."""
    private, shared, own, right = zip(*every, strict=True)
    held = [mine + max(moments) for mine, moments in zip(private, shared, strict=True)]
    node = sum(private) + max(map(sum, zip(*shared, strict=True)))
    promise = plan.peak_bytes + ALLOWANCE
    return {
        "algorithm": plan.algorithm,
        "window": plan.mesh.window_flavour,
        "fallbacks": fallbacks,
        "right": all(right),
        "peak_bytes": plan.peak_bytes,
        "own_peak_bytes": list(own),
        "private": list(private),
        "shared": [list(moments) for moments in shared],
        "held": held,
        "fullest": max(held),
        "held_together": node,
        "beyond": max(held) - plan.peak_bytes,
        "beyond_together": (node - sum(own)) // len(own),
        "met": max(held) <= promise and node <= sum(own) + ALLOWANCE * len(own),
    }


def peak_lines(peaks: list[dict[str, Any]]) -> list[str]:
    """A table of all plans, in MiB."""
    head = ["MiB", "peak_bytes", "fullest held", "beyond", "all held", "beyond, a rank", "left", "met", "right"]
    rows = []
    for peak in peaks:
        keys = ("peak_bytes", "fullest", "beyond", "held_together", "beyond_together", "left")
        cells = [f"{peak[key] / MIB:.1f}" for key in keys]
        rows.append([f"{peak['window']} {peak['algorithm']}", *cells, peak["met"], peak["right"]])
    missed = sum(not peak["met"] for peak in peaks)
    return [*measure.table(head, rows), f"bar: beyond at most {ALLOWANCE / MIB:g} MiB a rank, missed: {missed}"]


# -- growth ---------------------------------------------------------------------------------------


def repeated(comm: MPI.Intracomm, grid: tuple[int, ...], calls: int) -> dict[str, Any]:
    """Growth over calls of matmul whose results are dropped without close. Collective.

    With one shape of operands; with more shapes than plans are kept, so that each call makes a plan anew; and with
    NumPy arrays, of which each call makes matrices.
    """
    found = {}
    with rma_mm.Mesh(grid, comm) as mesh:
        a = operand(mesh, SMALL)
        found["one shape"] = resident.growth(mesh, lambda _: rma_mm.matmul(a, a, mesh), calls, calls // 5)
    with rma_mm.Mesh(grid, comm) as mesh:
        many = [operand(mesh, SMALL + n) for n in range(PLANS + 16)]

        def multiply(n: int) -> object:
            return rma_mm.matmul(many[n % len(many)], many[n % len(many)], mesh)

        found[f"{len(many)} shapes"] = resident.growth(mesh, multiply, calls // 5, warmup=min(calls, 2 * len(many)))
    with rma_mm.Mesh(grid, comm) as mesh:
        x = measure.whole_matrix((SMALL, SMALL), "float32")
        found["NumPy arrays"] = resident.growth(mesh, lambda _: rma_mm.matmul(x, x, mesh), calls // 5, calls // 5)
    return found


def operand(mesh: Mesh, size: int) -> DistMatrix:
    """A small square matrix. Collective."""
    return rma_mm.DistMatrix.from_function((size, size), measure.whole_numbers, mesh, dtype="float32")


if __name__ == "__main__":
    measure.run(main)

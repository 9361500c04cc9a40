"""`mpiexec -n 4 python -m bench.torch_linear`: y = x @ w and its gradients by rma_mm.torch and by DTensor over gloo.

Both run in the same processes on the same data, round by round in turn, and the results of both are compared with each
other. x is 4096×1024 and w 1024×4096, placed as in a column layer (w and y in columns), a row layer (x in columns, w in
rows, y summed into rows), a data-parallel one (x and y in rows), and in blocks on the squarest grid. Beside them stands
what no system can go below that multiplies with the BLAS of NumPy, as rma_mm does, or of PyTorch, as DTensor: each rank
multiplies its share of all three products, and moves nothing. The last line says what `mm` adds to `plan.execute` at
512³. The bars: ratio ≤ 0.75 on one node, ≤ 0.5 between two hosts at 1 Gbit/s, ≤ 100 µs.

`python -m bench.hosts --ranks 1 --rate 1gbit -- python -m bench.torch_linear` measures between two hosts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.tensor import DTensor

import rma_mm
import rma_mm.torch as rt
from bench import measure
from rma_mm.geometry.mesh import grids
from rma_mm.kernels.threads import using_threads

PLACES = {
    "column": (1, "*, *", "*, i", "*, i"),
    "row": (1, "*, i", "i, *", "i, *"),
    "data": (1, "i, *", "*, *", "i, *"),
    "blocks": (2, "i, j", "i, j", "i, j"),
}
"""Axes of the mesh, and layouts of x, w and y."""
COLUMNS = ("rma_mm", "DTensor", "NumPy alone", "torch alone")
"""What is measured in turn."""
TOLERANCE = 1e-5
"""Of the largest element, for sums in another order in float32."""


class Case:
    """One product on some placements, and both ways to compute it."""

    def __init__(self, mesh: rma_mm.Mesh, shape: tuple[int, int, int], places: Sequence[str]) -> None:
        m, n, k = shape
        random = np.random.default_rng(1)
        self.mesh, self.places = mesh, places
        self.shapes = (m, k), (k, n), (m, n)
        tiles = []
        for extents, place in zip(self.shapes, places, strict=True):
            whole = random.standard_normal(extents, np.float32)
            D = rma_mm.DistMatrix.from_numpy(whole, mesh, place)
            tiles.append(torch.from_numpy(np.array(D.tile)))
        x, w, self.dy = tiles
        self.ours = [each.clone().requires_grad_() for each in (x, w)]
        self.theirs = [self.dtensor(n, each).requires_grad_() for n, each in enumerate((x, w))]
        self.theirs_dy = self.dtensor(2, self.dy)
        rows, cols = self.dy.shape
        depth = m * n * k // (mesh.size * rows * cols)
        self.share = [torch.from_numpy(random.standard_normal(x, np.float32)) for x in ((rows, depth), (depth, cols))]
        self.results = [np.empty(x, np.float32) for x in ((rows, cols), (rows, depth), (depth, cols))]

    def dtensor(self, n: int, tile: torch.Tensor) -> DTensor:
        """A copy of x, w or dy."""
        matrix = rma_mm.DistMatrix.from_local(tile.clone().numpy(), self.shapes[n], self.mesh, self.places[n])
        return rt.to_dtensor(matrix)

    def by_rma_mm(self) -> list[torch.Tensor]:
        """y and both gradients; this rank's tiles."""
        x, w = self.ours
        x.grad = w.grad = None
        y = rt.mm(x, w, self.mesh, *self.places)
        y.backward(self.dy)
        return [y.detach(), x.grad, w.grad]

    def by_dtensor(self) -> list[torch.Tensor]:
        """The same, placed the same."""
        x, w = self.theirs
        x.grad = w.grad = None
        y = (x @ w).redistribute(placements=self.theirs_dy.placements)
        y.backward(self.theirs_dy)
        grads = [each.grad.redistribute(placements=each.placements) for each in (x, w)]
        return [each.to_local().detach() for each in (y, *grads)]

    def by_numpy_alone(self) -> None:
        """As many multiplications, cut as y is, on memory that is used again."""
        x, w, dy = (each.numpy() for each in (*self.share, self.dy))
        for a, b, out in zip((x, dy, x.T), (w, w.T, dy), self.results, strict=True):
            np.matmul(a, b, out=out)

    def by_torch_alone(self) -> list[torch.Tensor]:
        """The same by PyTorch, in new memory."""
        x, w = self.share
        return [x @ w, self.dy @ w.T, x.T @ self.dy]


def balanced(ranks: int, axes: int) -> tuple[int, ...]:
    """The squarest grid of so many axes."""
    return max(grids(ranks, axes), key=min)


def contest(comm: MPI.Intracomm, case: Case, rounds: int) -> dict[str, Any]:
    """Median seconds of all, in turn, and whether both have the same results."""
    pairs = zip(case.by_rma_mm(), case.by_dtensor(), strict=True)
    off = max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)
    right = comm.allreduce(off, MPI.MAX) < TOLERANCE
    ways = dict(zip(COLUMNS, (case.by_rma_mm, case.by_dtensor, case.by_numpy_alone, case.by_torch_alone), strict=True))
    with using_threads(case.mesh.threads):
        seconds = measure.interleaved(comm, ways, rounds)
    found = measure.medians(seconds)
    return {"right": right, "seconds": seconds, **found, "ratio": found["rma_mm"] / found["DTensor"]}


def overhead(comm: MPI.Intracomm, mesh: rma_mm.Mesh, rounds: int) -> float:
    """Seconds that `mm` takes beyond `plan.execute` at 512³: the difference of medians."""
    n, places = 512, ("i, *", "*, *", "i, *")
    case = Case(mesh, (n, n, n), places)
    x, w = (each.detach() for each in case.ours)
    A, B = (
        rma_mm.DistMatrix.from_local(each.numpy(), (n, n), mesh, place)
        for each, place in zip((x, w), places, strict=False)
    )
    plan = rma_mm.plan(A, B, mesh, layout=places[2])
    calls = {"execute": lambda: plan.execute(A, B), "mm": lambda: rt.mm(x, w, mesh, *places)}
    found = measure.medians(measure.interleaved(comm, calls, 20 * rounds, settle=0))
    return found["mm"] - found["execute"]


def interface() -> dict[str, str]:
    """What makes gloo use the interface that MPI was told to use between hosts."""
    name = os.environ.get("FI_TCP_IFACE")
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def main(comm: MPI.Intracomm) -> int:
    """Measure and report; `WRONG` where the results of both differ."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--shape", type=int, nargs=3, default=(4096, 4096, 1024), metavar=("M", "N", "K"))
    parser.add_argument("--rounds", type=int, default=5, help="of each case (5)")
    options = parser.parse_args()
    os.environ.update(interface())
    with tempfile.TemporaryDirectory() as own:
        store = f"file://{comm.bcast(own)}/store"
        dist.init_process_group("gloo", store, world_size=comm.size, rank=comm.rank)
        cases = {}
        for name, (axes, *places) in PLACES.items():
            with rma_mm.Mesh(balanced(comm.size, axes), comm) as mesh:
                torch.set_num_threads(mesh.threads)
                cases[name] = contest(comm, Case(mesh, options.shape, places), options.rounds)
        with rma_mm.Mesh((comm.size,), comm) as mesh:
            where = measure.machine(comm, mesh.window_flavour) | {"torch": torch.__version__, "threads": mesh.threads}
            added = overhead(comm, mesh, options.rounds)
        dist.destroy_process_group()
    if comm.rank == 0:
        rows = [[name, *(f"{case[x]:.3f}" for x in (*COLUMNS, "ratio"))] for name, case in cases.items()]
        lines = measure.table(["layer", *(f"{x} s" for x in COLUMNS), "ratio"], rows)
        lines += [f"mm beyond plan.execute at 512³: {added * 1e6:.0f} µs"]
        measure.publish(options.json, "torch_linear", where, lines, cases=cases, overhead=added)
    return 0 if all(case["right"] for case in cases.values()) else measure.WRONG


if __name__ == "__main__":
    measure.run(main)

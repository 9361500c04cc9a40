"""One product on every rank of a job, in turn with the multiplies that it needs and nothing else, reported as JSON.

`bench.hosts.bars` starts it on a cluster: `python -m bench.hosts.rounds --shape M,N,K --mesh 2x1`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure
from bench.hosts.cluster import INTERFACE
from bench.rows import Product
from rma_mm.kernels.threads import set_threads
from rma_mm.runtime.products.prices import best_grid
from rma_mm.schedule.ops import Multiply
from rma_mm.schedule.schedule import expand
from rma_mm.windows.ranks import node_map

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm import Plan

DTYPE = "float32"


def main(comm: MPI.Intracomm) -> int:
    """Measure, and print the JSON on rank 0; `WRONG` where the product was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True, help="M,N,K")
    parser.add_argument("--mesh", help="as 2x1; chosen when not given")
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--repeat", type=int, default=5, help="samples of each case (5)")
    options = parser.parse_args()
    m, n, k = map(int, options.shape.split(","))
    chosen = best_grid(comm, (m, n, k), DTYPE, options.algorithm)
    with rma_mm.Mesh(measure.grid(options.mesh) if options.mesh else chosen, comm) as mesh:
        set_threads(mesh.threads)
        product = Product(mesh, options.algorithm, (m, n, k), DTYPE)
        right = product.is_right()
        found = traffic(comm, product)
        calls = {"product": product.run, "multiply alone": multiply_alone(product.plan, comm.rank)}
        samples = measure.interleaved(comm, calls, options.repeat)
        right = product.is_right() and right
        facts = {
            "shape": [m, n, k], "mesh": list(mesh.grid.dims), "nodes": mesh.num_nodes, "threads": mesh.threads,
            "algorithm": product.plan.algorithm, "movement": product.movement(), "right": right,
            "seconds": measure.medians(samples), "samples": samples, **found,
        }
        where = measure.machine(comm, mesh.window_flavour)
    if comm.rank == 0:
        print(json.dumps({"machine": where, **facts}))
    return 0 if right else measure.WRONG


def multiply_alone(plan: Plan, rank: int) -> Callable[[], object]:
    """What the plan multiplies on this rank, as one NumPy product of memory of its own."""
    products = [op for op in expand(plan.schedule, rank) if isinstance(op, Multiply)]
    rows, cols = ({span for op in products for span in op.c.region[axis].runs} for axis in (0, 1))
    m, n = (max(stop for _, stop in runs) - min(start for start, _ in runs) if runs else 0 for runs in (rows, cols))
    volume = sum(op.c.region.size * len(op.a.region[1 - plan.options.transpose_a]) for op in products)
    k = volume // (m * n) if m * n else 0
    a, b, c = np.ones((m, k), DTYPE), np.ones((k, n), DTYPE), np.empty((m, n), DTYPE)
    return partial(np.matmul, a, b, out=c)


def traffic(comm: MPI.Intracomm, product: Product) -> dict[str, Any]:
    """What one product moves between hosts, as the transports count it and as the links do. Collective."""
    measure.rest(comm)
    before = carried()
    measure.rest(comm)  # whoever is here has read its counters
    product.run()
    measure.rest(comm)
    after = carried()
    words = product.plan.words
    each = comm.allgather((node_map(comm)[comm.rank], words.words_inter, words.words_intra, after - before))
    hosts = sorted({host for host, *_ in each})
    arrived = [sum(inter for host, inter, *_ in each if host == wanted) for wanted in hosts]
    itemsize = np.dtype(DTYPE).itemsize
    return {
        "words_inter": sum(arrived),
        "words_intra": sum(intra for _, _, intra, _ in each),
        "busiest_host_bytes": max(arrived) * itemsize,
        "sent_by_hosts_bytes": [next(sent for host, *_, sent in each if host == wanted) for wanted in hosts],
    }


def carried() -> int:
    """Bytes that this host has sent over its link."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    return 0


if __name__ == "__main__":
    measure.run(main)

"""One product of `bench.disk` in processes of its own: `python -m bench.disk.worker JOB.json`.

Rank 0 prints what it took from opening the files to a C in memory, and the most that each rank's memory grew
meanwhile, as the system counts it; memory that ranks share counts for each. Then C times a vector is held against what
that has to be.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from bench import measure
from bench.resident import rollup


def main(comm: Any = None) -> int:
    """Multiply as the job says, and print what there is to tell; `WRONG` where C is."""
    job = json.loads(Path(sys.argv[1]).read_text())
    prepared = SYSTEMS[job["system"]](job, comm)
    before = rollup()["Rss"]
    begun = time.perf_counter()
    c, facts = prepared()
    took = time.perf_counter() - begun
    grown = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found = [(took, grown)] if comm is None else comm.allgather((took, grown))
    whole = c() if callable(c) else c
    if comm is not None and comm.rank:
        return 0
    x, expected = (np.array(job[name], np.float64) for name in ("x", "expected"))
    is_right = bool((whole @ x == expected).all())
    seconds, peaks = zip(*found, strict=True)
    print(json.dumps({"seconds": max(seconds), "peaks": peaks, "right": is_right, **facts}))
    return 0 if is_right else measure.WRONG


Prepared = Callable[[], tuple[Any, dict[str, Any]]]
"""Multiplies: C, or what gives it, and what else there is to tell."""


def streamed(job: dict[str, Any], comm: Any) -> Prepared:
    """rma_mm with A and B in their files."""
    import rma_mm

    mesh, plan_of = rma_mm.Mesh((comm.size,), comm), rma_mm.plan  # imported now

    def multiply() -> tuple[Any, dict[str, Any]]:
        a, b = map(rma_mm.open, job["files"])
        plan = plan_of(a, b, mesh, memory_limit=job["limit"], transpose_a=job["turned"])
        c = plan.execute(a, b)
        return c.to_numpy, {"algorithm": plan.algorithm, "read": plan.choice.bytes_read}

    return multiply


def loaded(job: dict[str, Any], comm: Any) -> Prepared:
    """rma_mm with A and B in memory, which the clock leaves out, as it does a product before to warm up."""
    import rma_mm

    mesh = rma_mm.Mesh((comm.size,), comm)
    a = rma_mm.load(job["files"][0], mesh)
    b = a if job["turned"] else rma_mm.load(job["files"][1], mesh)
    plan = rma_mm.plan(a, b, mesh, transpose_a=job["turned"])
    plan.execute(a, b)
    return lambda: (plan.execute(a, b).to_numpy, {"algorithm": plan.algorithm})


def by_dask(job: dict[str, Any], _: object) -> Prepared:
    """Dask's threads on the chunks of a Zarr store, each product on one core; `turned` is of rma_mm alone."""
    import dask.array

    threadpool_limits(1, "blas")

    def multiply() -> tuple[Any, dict[str, Any]]:
        a, b = map(dask.array.from_zarr, job["files"])
        product = dask.array.tensordot(a, b, axes=1)
        return product.compute(scheduler="threads", num_workers=job["ranks"]), {"algorithm": f"dask {dask.__version__}"}

    return multiply


def by_blosc2(job: dict[str, Any], _: object) -> Prepared:
    """Blosc2 on arrays in its own files."""
    import blosc2

    blosc2.set_nthreads(job["ranks"])

    def multiply() -> tuple[Any, dict[str, Any]]:
        a, b = (blosc2.open(file, mode="r") for file in job["files"])
        return blosc2.matmul(a, b)[:], {"algorithm": f"blosc2 {blosc2.__version__}"}

    return multiply


SYSTEMS: dict[str, Callable[[dict[str, Any], Any], Prepared]] = {
    "rma_mm": streamed, "in memory": loaded, "dask": by_dask, "blosc2": by_blosc2,
}
ALONE = ("dask", "blosc2")
"""Systems that run as one process with threads."""


if __name__ == "__main__":
    if json.loads(Path(sys.argv[1]).read_text())["system"] in ALONE:
        sys.exit(main())
    measure.run(main)

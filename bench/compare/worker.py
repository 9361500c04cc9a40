"""One job of `bench.compare`: ranks that measure what they are asked for, and sleep in between.

A script by itself, which imports whichever rma_mm its interpreter has: `python worker.py SETTING FOLDER`. Rank 0 looks
for a file `ask-N` with the name of a measurement in the folder, and answers with `answer-N`, in JSON. It uses the
public names of rma_mm alone, so that it runs with older versions too; what a version lacks is answered with an error.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import rma_mm
from rma_mm.errors import RmaError

LOOK, PATIENCE = 0.02, 300.0
"""Seconds between two looks at what there is to do, and after which a job that is asked nothing ends."""
SAMPLE, MOST, BATCHES = 0.04, 400, 3
"""Seconds that a batch takes at least: so many times the same is done, but no more than MOST. The quickest of so many
batches is a sample: others who are at work here only make it longer."""
BLOCKS, ROWS, COLUMNS = "P('i', 'j')", "P(('i', 'j'), None)", "P(None, ('i', 'j'))"
STEPS = ("H = X @ W1", "Y = H @ W2", "dH = dY @ W2.T", "dW2 = H.T @ dY", "dW1 = X.T @ dH")

Call = Callable[[], object]
Make = Callable[[rma_mm.Mesh], Call]


def matrix(mesh: rma_mm.Mesh, rows: int, cols: int, dtype: str = "float32", layout: str | None = BLOCKS) -> Any:
    """Return a matrix of small whole numbers."""
    filled = (np.arange(rows * cols, dtype=np.int64) * 69621 >> 7) % 17 - 8
    return rma_mm.DistMatrix.from_numpy(filled.astype(dtype).reshape(rows, cols), mesh, layout)


def execute(
    mesh: rma_mm.Mesh, m: int, n: int, k: int, algorithm: str, dtype: str = "float32",
    layouts: tuple[str, str, str | None] = (BLOCKS, BLOCKS, None),
) -> Call:
    """Prepare a plan that is executed again and again, of matrices that are placed so."""
    a, b = matrix(mesh, m, k, dtype, layouts[0]), matrix(mesh, k, n, dtype, layouts[1])
    plan = rma_mm.plan(a, b, mesh, algorithm=algorithm, layout=layouts[2])
    plan.adapt = False
    return partial(plan.execute, a, b)


def by_matmul(mesh: rma_mm.Mesh, m: int, n: int, k: int, algorithm: str) -> Call:
    """Prepare `matmul` on a plan that is kept, into memory that is there."""
    a, b = matrix(mesh, m, k), matrix(mesh, k, n)
    c = rma_mm.matmul(a, b, mesh, algorithm=algorithm)
    return partial(rma_mm.matmul, a, b, mesh, out=c, algorithm=algorithm)


def gram(mesh: rma_mm.Mesh, rows: int, cols: int) -> Call:
    """Prepare a matrix times its own transpose, half of which is multiplied."""
    a = matrix(mesh, rows, cols)
    return partial(rma_mm.matmul, a, a, mesh, transpose_b=True, algorithm="stationary_c:syrk")


def batch(mesh: rma_mm.Mesh, count: int, size: int) -> Call:
    """Prepare the products of a batch."""
    x = np.ones((count, size, size), np.float32)
    a, b = (rma_mm.DistArray.from_numpy(x, mesh) for _ in range(2))
    return partial(rma_mm.matmul, a, b, mesh)


def chain(mesh: rma_mm.Mesh, rows: int, width: int) -> Call:
    """Prepare the forward and backward pass of two layers."""
    x, w = matrix(mesh, rows, width), matrix(mesh, width, width)
    given = {"X": x, "W1": w, "W2": w, "dY": x}
    planned = rma_mm.plan_chain(STEPS, mesh, **given)
    return partial(planned.execute, given)


def planning(mesh: rma_mm.Mesh, sizes: tuple[int, ...] = (300, 1100)) -> Call:
    """Prepare plans by "auto" of products that were not asked for before."""
    made = iter(range(10**6))

    def plan() -> None:
        at = next(made)
        for size in sizes:
            shape = size + at % 97, size - at // 97 % 31
            a, b = matrix(mesh, *shape), matrix(mesh, *shape[::-1])
            rma_mm.plan(a, b, mesh).close()

    return plan


def redistribute(mesh: rma_mm.Mesh, size: int) -> Call:
    """Prepare a change from rows to columns."""
    a = matrix(mesh, size, size, layout=ROWS)
    return partial(a.redistribute, COLUMNS)


def make(size: int, algorithm: str, **more: Any) -> Make:
    """Return what prepares a square product."""
    return partial(execute, m=size, n=size, k=size, algorithm=algorithm, **more)


SETTINGS: dict[str, tuple[tuple[int, ...], dict[str, Make]]] = {
    "1 rank": ((1, 1), {
        "call 32³": make(32, "stationary_c"),
        "matmul 128³": partial(by_matmul, m=128, n=128, k=128, algorithm="stationary_c"),
        "square 1024": make(1024, "stationary_c"),
    }),
    "2 ranks": ((2, 1), {
        "execute 256³": make(256, "stationary_c"),
        "execute 512³": make(512, "stationary_c"),
        "square 1024 float64": make(1024, "stationary_c", dtype="float64"),
        "square 2048": make(2048, "stationary_c"),
        "int8 512": make(512, "stationary_c", dtype="int8"),
        "push 1024": partial(execute, m=1024, n=1024, k=1024, algorithm="stationary_b"),
        "planning": planning,
    }),
    "4 ranks": ((2, 2), {
        "matmul 512³": partial(by_matmul, m=512, n=512, k=512, algorithm="stationary_c"),
        "summa 1024": make(1024, "summa_c"),
        "cannon 1024": make(1024, "cannon"),
        "thin 8192×64×512": partial(execute, m=8192, n=64, k=512, algorithm="stationary_c"),
        "deep 256×256×16384": partial(
            execute, m=256, n=256, k=16384, layouts=(COLUMNS, ROWS, BLOCKS), algorithm="stationary_a",
        ),
        "Gram 1536": partial(gram, rows=1536, cols=1536),
        "batch 32×128³": partial(batch, count=32, size=128),
        "chain": partial(chain, rows=8192, width=64),
        "redistribute 2048": partial(redistribute, size=2048),
        "auto 1024": make(1024, "auto"),
    }),
    "2 hosts, 5gbit": ((2, 1), {"overlap 2048": make(2048, "stationary_c"), "push 2048": make(2048, "stationary_b")}),
    "2 hosts, 1gbit": ((2, 1), {"overlap 2048": make(2048, "stationary_c"), "auto 2048": make(2048, "auto")}),
}
"""Setting → (grid, what is measured there)."""


def main(setting: str, folder: Path) -> None:
    """Answer until asked to end. On every rank."""
    comm = MPI.COMM_WORLD
    grid, cases = SETTINGS[setting]
    calls: dict[str, tuple[Call, int] | str] = {}
    with rma_mm.Mesh(grid, comm, threads=1) as mesh:  # else the one's threads spin while the other is measured
        number = 0
        while (name := asked(comm, folder, number)) != "end":
            if name not in calls:
                calls[name] = prepared(comm, mesh, cases[name])
            found = calls[name]
            answer = {"error": found} if isinstance(found, str) else {"seconds": sample(comm, *found)}
            answer["peak"] = comm.allreduce(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, MPI.MAX)
            if comm.rank == 0:
                write(folder / f"answer-{number}", json.dumps(answer))
            number += 1
        calls.clear()


def asked(comm: MPI.Intracomm, folder: Path, number: int) -> str:
    """Return the next measurement on every rank; nobody takes a processor while there is none."""
    text = np.zeros(64, np.uint8)
    if comm.rank == 0:
        file, begin = folder / f"ask-{number}", time.monotonic()
        while not file.exists() and time.monotonic() - begin < PATIENCE:
            time.sleep(LOOK)
        told = (file.read_text() if file.exists() else "end").encode()
        text[: len(told)] = list(told)
    request = comm.Ibcast(text)
    while not request.Test():
        time.sleep(LOOK)
    return text.tobytes().rstrip(b"\0").decode()


def prepared(comm: MPI.Intracomm, mesh: rma_mm.Mesh, made: Make) -> tuple[Call, int] | str:
    """Return what is timed, and how often for a sample; or why it cannot be."""
    try:
        call = made(mesh)
        call()
        took = min(seconds(comm, call, 1) for _ in range(2))
    except (RmaError, TypeError, AttributeError) as error:  # an older version has less
        return f"{type(error).__name__}: {error}"
    return call, max(1, min(MOST, round(SAMPLE / took)))


def sample(comm: MPI.Intracomm, call: Call, times: int) -> float:
    """Return what one takes, of the quickest batch."""
    return min(seconds(comm, call, times) for _ in range(BATCHES))


def seconds(comm: MPI.Intracomm, call: Call, times: int) -> float:
    """Return what one of so many takes the slowest rank."""
    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    took: float = comm.allreduce((time.perf_counter() - begin) / times, MPI.MAX)
    return took


def write(file: Path, text: str) -> None:
    """Write a file that nobody reads before it is complete."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.rename(file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""What the benchmarks share: a description of the machine, clocks, tables, JSON, and the frame of a command."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

import mpi4py
import numpy as np
import threadpoolctl
from numpy.typing import NDArray

import rma_mm

if TYPE_CHECKING:
    from mpi4py import MPI

WINDOWS = ("shared", "allocated", "created", "ucx")
"""Window flavours, in the order in which they are measured."""
WRONG = 4
"""Exit code where a product came out wrong, as of `rma_mm.run`."""
NAP = 0.02
"""Seconds between two looks at who has arrived."""
SETTLE = 0.15
"""Seconds before each sample: OpenBLAS's threads spin for 2²⁸ cycles, or 0.1 s, after their last product."""


# -- clocks ---------------------------------------------------------------------------------------


def rest(comm: MPI.Intracomm) -> None:
    """Return when every rank is here; a rank that waits takes about 0.2 % of a core.

    The library's own barrier looks more often, and each waiting rank takes 4 % of a core: little beside ranks of the
    same product, but three of them would slow down a rank that measures alone on two cores by 6 %.
    """
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP)


def meet(comm: MPI.Intracomm) -> None:
    """Return at about the same moment on every rank, nobody having burnt a core meanwhile."""
    from rma_mm.windows.waiting import barrier

    rest(comm)
    barrier(comm)


def slowest(comm: MPI.Intracomm, samples: Sequence[float]) -> list[float]:
    """Each sample as the slowest rank has it. Collective."""
    from mpi4py import MPI

    rest(comm)
    found = np.array(samples, np.float64)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    return [float(x) for x in found]


def interleaved(
    comm: MPI.Intracomm,
    cases: Mapping[str, Callable[[], object]],
    repeat: int,
    warmup: int = 1,
    settle: float = SETTLE,
) -> dict[str, list[float]]:
    """Seconds of every case, `repeat` times, on the slowest rank; in turn, each round starting with another case.

    What a case returns is dropped after the clock has stopped. settle: seconds before each sample; with 0 it begins
    when all ranks have met, which is enough where every case ends alike on all of them and none has threads that spin.
    Collective.
    """
    from rma_mm.windows.waiting import barrier

    names = list(cases)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, repeat):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            time.sleep(settle)
            (meet if settle else barrier)(comm)
            start = time.perf_counter()
            kept = cases[name]()
            took = time.perf_counter() - start
            del kept
            if turn >= 0:
                samples[name].append(took)
    every = iter(slowest(comm, [took for found in samples.values() for took in found]))
    return {name: [next(every) for _ in found] for name, found in samples.items()}


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each list of samples."""
    return {name: median(found) for name, found in samples.items()}


# -- operands -------------------------------------------------------------------------------------


def whole_numbers(rows: NDArray[np.int64], cols: NDArray[np.int64]) -> NDArray[np.int64]:
    """Elements −8…8 that follow no pattern: their products and sums are exact in float32 up to k = 2¹⁸."""
    return (rows * 2654435761 + cols * 40503 + rows * cols * 69621 >> 7) % 17 - 8


def whole_matrix(shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """The matrix of `whole_numbers`, a few rows at a time."""
    made = np.empty(shape, dtype)
    step = max(1, 2**20 // max(1, shape[1]))
    for start in range(0, shape[0], step):
        rows, cols = np.ogrid[start : min(start + step, shape[0]), : shape[1]]
        made[start : start + step] = whole_numbers(rows, cols)
    return made


# -- the machine ----------------------------------------------------------------------------------


def machine(comm: MPI.Intracomm | None = None, window: str | None = None) -> dict[str, Any]:
    """What the figures were measured on. Collective over `comm`."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas_name(),
        "mpi4py": mpi4py.__version__,
        "rma_mm": rma_mm.__version__,
    }
    if comm is not None:
        from mpi4py import MPI

        found["mpi"] = " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split())
        found["ranks"] = comm.size
        found["hosts"] = len(set(comm.allgather(MPI.Get_processor_name())))
        found["window"] = window
    return found


def cpu_name() -> str:
    """The processor as Linux names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def blas_name() -> str:
    """The BLAS that NumPy uses, with the kernels that it chose for this processor."""
    loaded = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]
    return "; ".join(f"{x['internal_api']} {x['version']} ({x.get('architecture')})" for x in loaded)


def no_plot(file: Path) -> str:
    """Return why nothing can be drawn in a file, else nothing, with matplotlib set to draw without a screen."""
    try:
        import matplotlib as mpl
    except ImportError:
        return f"no plot in {file}: matplotlib is not installed (pip install matplotlib)"
    mpl.use("Agg")
    return ""


# -- the frame of a command -----------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Arguments, parsed on every rank; only the first speaks."""

    def __init__(self, summary: str | None, rank: int = 0) -> None:
        super().__init__(description=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.rank = rank
        self.add_argument("--json", metavar="FILE", type=Path, help="write everything measured there")

    def _print_message(self, message: str, file: Any = None) -> None:
        if self.rank == 0:
            super()._print_message(message, file)


def grid(name: str) -> tuple[int, ...]:
    """The shape of a mesh, as 2x3."""
    return tuple(map(int, name.split("x")))


def run(main: Callable[[MPI.Intracomm], int]) -> NoReturn:
    """Run a benchmark on all ranks and leave with its exit code; an exception on one rank ends them all."""
    from mpi4py import MPI

    try:
        code = main(MPI.COMM_WORLD)
    except Exception:  # noqa: BLE001 - the other ranks would wait for ever
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
        code = 1  # where all ranks abort at once, some come back
    sys.exit(code)


def publish(json_file: Path | None, name: str, where: Mapping[str, Any], lines: Iterable[str], **facts: Any) -> None:
    """Print a benchmark's lines and write its JSON: `bench`, `command`, `machine` and `facts`. On one rank."""
    print(f"bench.{name} on {', '.join(f'{key} {value}' for key, value in where.items())}")
    print(*lines, sep="\n", flush=True)
    if json_file is not None:
        report = {"bench": name, "command": sys.argv[1:], "machine": dict(where), **facts}
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table, the first column to the left."""
    cells = [[text(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]


def text(cell: object) -> str:
    """A cell of a table."""
    if isinstance(cell, bool) or cell is None:
        return {True: "yes", False: "NO", None: "-"}[cell]
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)

"""`mpiexec -n 2 python -m bench.windows`: what transfers through each kind of window take, by size.

The last rank gets from, and adds to, the first one, which waits (idle), or multiplies matrices for half a second at a
time (busy), as inside a product: with the helper thread where the windows need one. Contiguous memory, and rows of
2 KiB that lie 4 KiB apart. Medians. Between hosts: `python -m bench.hosts -- python -m bench.windows`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from bench import measure
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.span import Span
from rma_mm.windows import Patch, Window, absent, open_window
from rma_mm.windows.progress import Progress
from rma_mm.windows.ranks import node_map
from rma_mm.windows.waiting import barrier

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = (8, 2**12, 2**16, 2**20, 2**23, 2**26)
"""Bytes of transfers."""
ROW = 512
"""float32 of a row of strided memory: 2 KiB."""
MULTIPLY = 0.5
"""Seconds of a busy owner's multiply."""
BUDGET, TIMES = 0.4, 50
"""Seconds, and repetitions, of a case at most; at least three."""
TOO_LONG = 3.0
"""Seconds of a transfer from which on larger ones are left out."""
Act = Callable[[], object]
Timing = dict[str, Any]


def main(comm: MPI.Intracomm) -> int:
    """Measure and report. Collective."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.prog = "python -m bench.windows"
    parser.add_argument("--windows", nargs="+", default=list(FLAVOURS), choices=list(FLAVOURS), help="which (all)")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest transfer (64 MiB)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures there (needs matplotlib)")
    options = parser.parse_args()
    if comm.size < 2:
        parser.error("it takes two ranks")
    sizes = [size for size in SIZES if size <= options.largest]
    nodes, found, left_out = node_map(comm), [], []
    for flavour in options.windows:
        reason = comm.bcast(absent(flavour))
        if reason:
            left_out.append(f"{flavour} is absent: {reason}")
            continue
        needs = FLAVOURS[flavour].needs_progress or len(set(nodes)) > 1
        with Exposure(comm, flavour, nodes, max(sizes), needs) as exposure:
            found += exposure.measured(sizes)
    if comm.rank == 0:
        lines = [*measure.table(["µs", *map(named, sizes), "GB/s"], rows(found, sizes)), *left_out]
        if options.plot is not None:
            lines.append(plot(options.plot, found))
        measure.publish(options.json, "windows", measure.machine(), lines, transfers=found)
    return 0


class Exposure:
    """A window, whose first rank is measured from the last."""

    def __init__(self, comm: MPI.Intracomm, flavour: str, nodes: tuple[int, ...], nbytes: int, needs: bool) -> None:
        self.comm, self.flavour, self.target = comm, flavour, 0
        self.is_owner, self.is_asking = comm.rank == 0, comm.rank == comm.size - 1
        room = 2 * nbytes + 64
        memory: Any = np.zeros(room, np.uint8) if FLAVOURS[flavour].takes_arrays else room
        self.window: Window = open_window(flavour, comm, memory, node_of=nodes)
        self.window.local.fill(0)
        self.origin: NDArray[np.float32] = np.zeros(2 * nbytes // 4, np.float32)
        self.progress = Progress(is_needed=needs)
        side = 512
        while (took := multiplied(side)) < MULTIPLY / 8:
            side *= 2
        self.matrix = np.ones((int(side * (MULTIPLY / took) ** (1 / 3)),) * 2, np.float32)

    def __enter__(self) -> Exposure:
        return self

    def __exit__(self, *_: object) -> None:
        barrier(self.comm)
        self.progress.close()
        self.window.close()

    def measured(self, sizes: Sequence[int]) -> list[Timing]:
        """All cases. Collective; rank 0 has them."""
        found = []
        for move, lies in (("get", "contiguous"), ("get", "strided"), ("accumulate", "contiguous"),
                           ("accumulate", "strided"), ("fetch_add", "contiguous")):  # fmt: skip
            for is_busy in (False, True):
                took = 0.0
                for size in [8] if move == "fetch_add" else sizes:
                    if (lies == "strided" and size < 2 * ROW * 4) or took > TOO_LONG:
                        continue
                    took = self.timed(move, size, lies == "strided", is_busy)
                    found.append({
                        "window": self.flavour, "move": move, "lies": lies, "owner": "busy" if is_busy else "idle",
                        "bytes": size, "seconds": took,
                    })  # fmt: skip
        return found

    def timed(self, move: str, size: int, is_strided: bool, is_busy: bool) -> float:
        """Seconds of one transfer, the median. Collective."""
        barrier(self.comm)
        samples = [0.0]
        act = self.action(move, size, is_strided) if self.is_asking else None
        if act is not None:
            act()  # paths are found, and memory is touched, by the first
        barrier(self.comm)
        if act is None:
            self.own(is_busy)
        else:
            time.sleep(0.05 * is_busy)
            samples, end = [], time.perf_counter() + BUDGET
            while len(samples) < 3 or (len(samples) < TIMES and time.perf_counter() < end):
                begin = time.perf_counter()
                act()
                samples.append(time.perf_counter() - begin)
            barrier(self.comm)
        return float(self.comm.bcast(median(samples), self.comm.size - 1))

    def own(self, is_busy: bool) -> None:
        """Be the owner, or a bystander, until the others are done."""
        if not (is_busy and self.is_owner):
            barrier(self.comm)
            return
        done = self.comm.Ibarrier()
        with self.progress:
            while not done.Test():
                self.progress.during(lambda: np.matmul(self.matrix, self.matrix))

    def action(self, move: str, size: int, is_strided: bool) -> Act:
        """One transfer, begun and awaited; an accumulate is complete at its target."""
        if move == "fetch_add":
            return lambda: self.window.fetch_add(self.target, 0, 1)
        rows, cols = (size // (ROW * 4), ROW) if size > ROW * 4 else (1, size // 4)
        here = Span.range(0, rows), Span.range(0, cols)
        far = Patch(64, (cols * (1 + is_strided), 1), *here)
        origin = self.origin[: rows * cols].reshape(rows, cols)
        if move == "get":
            transfer = self.window.get(self.target, far, origin, *here)
        else:
            transfer = self.window.accumulate(self.target, far, origin, *here)

        def act() -> None:
            transfer.start()
            transfer.wait()
            if move != "get":
                self.window.flush()

        return act


def multiplied(side: int) -> float:
    """Seconds of a square product, warm."""
    matrix = np.ones((side, side), np.float32)
    for _ in range(2):
        begin = time.perf_counter()
        np.matmul(matrix, matrix)
        took = time.perf_counter() - begin
    return took


def named(size: int) -> str:
    """A number of bytes in a few letters."""
    unit = next(n for n in (3, 2, 1, 0) if size >= 1024**n)
    return f"{size // 1024**unit} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def rows(found: Sequence[Timing], sizes: Sequence[int]) -> list[list[object]]:
    """A row of the table for each kind of transfer; in the last column the bandwidth of the largest."""
    kinds = dict.fromkeys((each["window"], each["move"], each["lies"], each["owner"]) for each in found)
    lines: list[list[object]] = []
    for kind in kinds:
        took = {
            each["bytes"]: each["seconds"] for each in found
            if (each["window"], each["move"], each["lies"], each["owner"]) == kind
        }  # fmt: skip
        largest = max(took)
        each_took = (1e6 * took[size] if size in took else None for size in sizes)
        lines.append([" ".join(kind), *each_took, 1e-9 * largest / took[largest]])
    return lines


def plot(file: Path, found: Sequence[Timing]) -> str:
    """Draw seconds by size; what is to be said of it."""
    if reason := measure.no_plot(file):
        return reason
    from matplotlib import pyplot

    panels = [(move, owner) for move in ("get", "accumulate") for owner in ("idle", "busy")]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 8), sharex=True, sharey=True, layout="constrained")
    for (move, owner), panel in zip(panels, axes.flat, strict=True):
        curves(panel, [each for each in found if (each["move"], each["owner"]) == (move, owner)])
        panel.set_title(f"{move}, owner {owner}")
    axes[0, 0].legend(fontsize=8)
    where = measure.machine()
    figure.suptitle(f"Transfers through windows (dashed: strided), {where['cpu']}, {where['date'][:10]}")
    figure.savefig(file, dpi=120)
    return f"drawn in {file}"


def curves(panel: Axes, found: Sequence[Timing]) -> None:
    """A line for each window, dashed where memory is strided."""
    for number, window in enumerate(dict.fromkeys(each["window"] for each in found)):
        for lies, style in (("contiguous", "-"), ("strided", "--")):
            points = [(x["bytes"], x["seconds"]) for x in found if (x["window"], x["lies"]) == (window, lies)]
            label = window if style == "-" else None
            panel.loglog(*zip(*points, strict=True), style, marker=".", color=f"C{number}", label=label)
    panel.set_xlabel("bytes")
    panel.set_ylabel("seconds")
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    measure.run(main)

"""Benchmarks of one rank's own work: copies, local products, the runtime's overhead; and meetings of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from mpi4py import MPI

from rma_mm.elements.dtypes import accumulator, parse_dtype
from rma_mm.kernels import bind
from rma_mm.kernels.choice.rates import SETTLE
from rma_mm.kernels.choice.speed import square
from rma_mm.kernels.gemm.form import FEW
from rma_mm.policy.model.machine import COPY, PAGE, Cost
from rma_mm.runtime.calibration.fitting import Shape
from rma_mm.runtime.calibration.overlap import WIDTH
from rma_mm.runtime.calibration.sampling import Act, Case, Sample, TransferBenchmark
from rma_mm.runtime.calibration.site import Site
from rma_mm.runtime.calibration.transfers import ROWS, SIZES, Array, at_once, boxes
from rma_mm.windows.boxes.copying import CopyTransfer
from rma_mm.windows.progress import Progress
from rma_mm.windows.waiting import barrier, reduced

SHAPES: tuple[Shape, ...] = (
    (32, 32, 32, False), (64, 64, 64, False), (128, 128, 128, False), (256, 256, 256, False),
    (32, 512, 512, False), (512, 32, 512, False), (512, 512, 32, False), (64, 64, 1024, False),
    (64, 1024, 1024, False), (1024, 64, 1024, False), (256, 1024, 32, True), (1024, 1024, 64, False),
    (1024, 1024, 64, True), (512, 512, 512, False), (768, 768, 768, False),
    (1024, 1024, 512, False),
)
"""m, n, k of the products that are timed, and whether rows of C lie a multiple of a page apart; the quickest first."""
PRODUCTS = 4e-3  # seconds for which each is repeated
GUESSED, TRIES = (128, 128, 128, False), 3
"""The one that tells how long others take, and how often it is tried: the first time it finds nothing prepared."""
SLOW = 0.1  # seconds beyond which one is left out: some types have no fast kernel
LARGEST, OPERANDS, PLACES = 2**23, 2**23 + 2**17, 16
"""Bytes of an operand at most, of the memory that operands of one kind lie in, and how many lie there at most."""
FILL = 0x3C  # value of every byte of an operand: a small number in every type, neither denormal nor soon overflowing
APART = 64  # bytes by which rows are set apart that would else lie a multiple of a page apart
NARROW = 32  # columns of what is copied in pieces: those of the smallest blocks that are usually dealt out
MOST_CROWDED = 1.5  # slowdown beyond which other programs must be the cause
CROWDED, CROWDS = 6e-3, 4
"""Seconds of a processor for which each rank multiplies where they are in each other's way, and how often in a row."""
MEETINGS, OPERATIONS = 20, 1000  # number of meetings, and of operations, in one sample


def copies(site: Site, source: Array, target: Array) -> list[TransferBenchmark]:
    """Copies within a rank's own memory, by all ranks at once."""
    load = site.processor_load(dict.fromkeys(range(site.size), 1))
    found = []
    for rows in SIZES:
        pairs = [(target[box[0].start : box[0].stop], source[box[0].start : box[0].stop]) for box in boxes(rows)]
        moves = [at_once(CopyTransfer([pair], None, _always_open, same_node=True)) for pair in pairs]
        found.append(TransferBenchmark("own", COPY, rows * WIDTH * 4, load, moves))
    return found


class Pieces(TransferBenchmark):
    """A copy of a few columns, of which no two rows lie together."""

    def __init__(self, site: Site, source: Array, target: Array) -> None:
        load = site.processor_load(dict.fromkeys(range(site.size), 1))
        pair = target[:, :NARROW], source[:, :NARROW]
        move = at_once(CopyTransfer([pair], None, _always_open, same_node=True))
        super().__init__("own", "pieces", pair[1].nbytes, load, [move])

    def seconds(self, found: float, copy: Cost) -> float:
        return max(0.0, found / self.load[0] - copy.seconds(self.nbytes)) / ROWS


def largest(shape: Shape) -> int:
    m, n, k, _ = shape
    return max(m * n, m * k, k * n)


def _always_open() -> None:
    """Do nothing: ordinary memory needs no opening."""


class LocalScratch:
    """Memory for operands of any type, larger than any cache."""

    def __init__(self) -> None:
        self.a, self.b, self.c = (np.full(OPERANDS, FILL, np.uint8) for _ in range(3))

    def product(self, shape: Shape, dtype: np.dtype[Any], kernel: str) -> Act:
        """The product c += a @ b as a walk over panels does it: each time on operands that were not read just now."""
        m, n, k, is_aliased = shape
        summed = accumulator(dtype)
        stride = n if is_aliased or n * summed.itemsize % PAGE else n + APART // summed.itemsize
        faces = ((self.a, m, k, dtype), (self.b, k, n, dtype), (self.c, m, stride, summed))
        places = min(PLACES, *(OPERANDS // (rows * cols * of.itemsize) for _, rows, cols, of in faces))
        calls = []
        for place in range(places):
            start = place * (OPERANDS // places // APART * APART)
            a, b, c = (
                memory[start:][: rows * cols * of.itemsize].view(of).reshape(rows, cols)
                for memory, rows, cols, of in faces
            )
            calls.append(bind(a, b, c[:, :n], beta=1, kernel=kernel))
        following = cycle(calls)

        def product() -> None:
            next(following)()

        return product


class Products:
    """Local products of one type by one kernel, by all ranks at once, which share the processors as in a product.

    Of a rank with one thread the processor's own time counts, on average: nobody else who is at work on this machine
    enters it.
    """

    begins_together = False

    def __init__(self, comm: MPI.Intracomm, site: Site, dtype: str, kernel: str, scratch: LocalScratch) -> None:
        """Prepare the calls to measure; raise DtypeError, or AlgorithmError for a kernel that is missing."""
        self.comm, self.name, self.scratch = comm, f"{dtype} {kernel}", scratch
        self.load = site.processor_load(dict.fromkeys(range(site.size), 1))[0]
        self.settles = site.threads > 1
        of = parse_dtype(dtype)
        widest = accumulator(of).itemsize
        few = FEW if kernel == "numba" else 0  # these rows have code of their own, which is compiled for who needs it
        self.shapes = [shape for shape in SHAPES if largest(shape) * widest <= LARGEST and min(shape[:2]) > few]
        self.figures = len(self.shapes)
        self.calls = [scratch.product(shape, of, kernel) for shape in self.shapes]
        self.counts = [0] * self.figures
        """Number of repetitions of each product in a sample; 0 for products that would take too long."""

    def sample(self) -> list[Sample]:
        if not any(self.counts):
            self.counts = self.guessed()
        self.scratch.c.fill(FILL)
        clock = time.perf_counter if self.settles else time.process_time
        found = np.zeros(self.figures)
        for at, (call, count) in enumerate(zip(self.calls, self.counts, strict=True)):
            barrier(self.comm)
            begin = clock()
            for _ in range(count):
                call()
            found[at] = (clock() - begin) / count if count else 0.0
        time.sleep(SETTLE * self.settles)
        reduced(self.comm, found, "SUM")
        return [Sample(0.0, each / self.comm.size) for each in found]

    def guessed(self) -> list[int]:
        """Return the repetitions of each product in a sample, from the time of a small one. Collective."""
        m, n, k, _ = GUESSED
        call, took = self.calls[self.shapes.index(GUESSED)], []
        for _ in range(TRIES):
            begin = time.process_time()
            call()
            took.append(time.process_time() - begin)
        point = max(self.comm.allgather(min(took))) / (m * n * k)
        takes = [point * self.load * m * n * k for m, n, k, _ in self.shapes]
        return [self.count_of(each) if each < SLOW else 0 for each in takes]

    def count_of(self, seconds: float) -> int:
        return max(1, round(PRODUCTS / max(1e-9, seconds)))

    def learn(self, seconds: Sequence[float]) -> None:
        self.counts = [
            self.count_of(each) if count else 0 for each, count in zip(seconds, self.counts, strict=True)
        ]

    def timed(self, seconds: Sequence[float]) -> tuple[list[Shape], list[float]]:
        """Return shapes and their seconds on an idle processor, without those that would take too long."""
        shared = self.load if self.settles else 1.0
        kept = [(shape, each / shared) for shape, each in zip(self.shapes, seconds, strict=True) if each]
        return [shape for shape, _ in kept], [each for _, each in kept]


class Crowding:
    """Small products for some milliseconds by all ranks of a host at once, which share its processors."""

    figures, begins_together = CROWDS, True

    def __init__(self, comm: MPI.Intracomm, site: Site, multiply: Act) -> None:
        self.comm, self.multiply = comm, multiply
        self.load = site.processor_load(dict.fromkeys(range(site.size), 1))[0]
        self.count = 1
        self.own: list[list[float]] = []  # seconds of a processor that each sample took a rank, on average

    def sample(self) -> list[Sample]:
        laps, took = [], []
        for _ in range(CROWDS):
            barrier(self.comm)
            begin, before = time.perf_counter(), time.process_time()
            for _ in range(self.count):
                self.multiply()
            took.append(time.process_time() - before)
            laps.append(Sample(begin, time.perf_counter()))
        self.own.append(np.mean(self.comm.allgather(took), axis=0).tolist())
        return laps

    def learn(self, seconds: Sequence[float]) -> None:
        self.count = max(1, round(self.count * CROWDED / max(1e-9, *self.own[-1])))

    def slowdown(self, rounds: np.ndarray[Any, Any]) -> float:
        """Return the slowdown relative to processors that are never idle, from the lowest tenth of the samples."""
        if self.load <= 1:
            return 1.0
        ratios = rounds[1:] / (np.array(self.own[1:]) * self.load)
        return float(np.clip(np.quantile(ratios, 0.1), 1.0, MOST_CROWDED))


class Meeting(Case):
    figures, begins_together = 1, True

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    def sample(self) -> list[Sample]:
        begin = time.perf_counter()
        for _ in range(MEETINGS):
            barrier(self.comm)
        return [Sample(begin, time.perf_counter(), MEETINGS)]


class Operation(Case):
    """A small product as the executor calls it, and called directly: the difference is the runtime's own."""

    figures, begins_together = 2, True

    def __init__(self, comm: MPI.Intracomm, site: Site, progress: Progress) -> None:
        self.comm = comm
        self.load = site.processor_load(dict.fromkeys(range(site.size), 1))[0]
        product = square(8)

        def multiply() -> None:
            progress.during(product)
            self.count(512.0)

        self.done = 0.0
        self.actions: list[list[Act]] = [[multiply] * OPERATIONS, [product] * OPERATIONS]

    def count(self, work: float) -> None:
        self.done += work

    def sample(self) -> list[Sample]:
        found = []
        for actions in self.actions:
            barrier(self.comm)
            begin = time.perf_counter()
            for action in actions:
                action()
            found.append(Sample(begin, time.perf_counter(), OPERATIONS))
        return found

    def seconds(self, found: Sequence[float]) -> float:
        return max(0.0, found[0] - found[1]) / self.load

"""One-sided movements to be timed: prepared transfers on windows, started and awaited as the executor does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from rma_mm.errors import AbsentError, MemoryLimitError
from rma_mm.flavours import find_flavour
from rma_mm.geometry.span import Region
from rma_mm.policy.model.machine import PACKED
from rma_mm.runtime.calibration.overlap import LONG, WIDTH, Overlap
from rma_mm.runtime.calibration.sampling import Act, BusyTransferBenchmark, Case, Sample, TransferBenchmark
from rma_mm.runtime.calibration.site import Site
from rma_mm.windows import Patch, Transfer, Window, open_window
from rma_mm.windows.progress import Progress
from rma_mm.windows.waiting import barrier

Array = NDArray[np.float32]

ROWS = 8192
"""Rows, of `WIDTH` float32, of what a rank exposes and of where it puts what it gets: 16 MiB each, so that large
transfers find their memory cold, as those of matrices do."""
SIZES = (1, 64, 1024)  # rows of transfers: 2 KiB, 128 KiB and 2 MiB
BUSY_SIZES = (1, 512)  # rows of those whose target is inside a multiply
PLACES = 8  # places that transfers of one size go to and come from in turn, where there is room
TICKET = ROWS * WIDTH * 4  # where the counter for fetch-and-add lies
EXPOSED = TICKET + 64  # bytes that a rank exposes
TURNS = 4  # number of times that each place is read while readers compete for an owner
SIDE = 512  # of the square products that targets are inside of


def buffer() -> Array:
    """Return memory that has been touched: zeros, so that sums remain zero."""
    made = np.empty((ROWS, WIDTH), np.float32)
    made.fill(0)
    return made


def boxes(rows: int) -> list[Region]:
    return [Region.box((n * rows, (n + 1) * rows), (0, WIDTH)) for n in range(min(PLACES, ROWS // rows))]


def at_once(transfer: Transfer) -> Act:
    def act() -> None:
        transfer.start()
        transfer.wait()

    return act


class OneSided:
    """A window of one flavour, and the benchmarks that use it."""

    def __init__(
        self, comm: MPI.Intracomm, site: Site, flavour: str, room: Array, progress: Progress,
        multiply: Act,
    ) -> None:
        """room: this rank's own memory. Collective over `comm`. Raises MemoryLimitError, on every rank."""
        self.site, self.flavour, self.room, self.progress, self.multiply = site, flavour, room, progress, multiply
        self.comm = comm
        self.window: Window = open_window(flavour, comm, EXPOSED, node_of=site.node_of)
        self.window.local.fill(0)
        self.transfers: list[Transfer] = []
        self.has_long = False

    def cases(self, has_long: bool) -> list[TransferBenchmark]:
        """Return every movement on every class of link that there is, its targets idle and busy.

        has_long: whether `overlaps` tell what large ones take between nodes.
        """
        self.has_long = has_long
        links = [link for link in ("node", "between") if self.site.has(link)]
        return [*self._own(), *(case for link in links for busy in (False, True) for case in self._cases(link, busy))]

    def _own(self) -> list[TransferBenchmark]:
        """Accumulates to a rank's own memory, which go through MPI as all others do."""
        ranks = range(self.site.size)
        pairs = dict(zip(ranks, ranks, strict=True))
        add = partial(self.prepared, self.accumulate)
        return [self._case("own", "accumulate", rows, pairs, partial(add, rows), busy=False) for rows in SIZES]

    def contention(self) -> list[Contention]:
        return [Contention(self, link) for link in ("node", "between") if self.site.readers(link)[0]]

    def _cases(self, link: str, busy: bool) -> list[TransferBenchmark]:
        pairs = self.site.pairs(link, busy)
        makers: dict[str, Callable[[int, Region], Transfer]] = {"get": self.get, "accumulate": self.accumulate}
        sizes = BUSY_SIZES if busy else SIZES[:-1] if self.has_long and link == "between" else SIZES
        found = [
            self._case(link, name, rows, pairs, partial(self.prepared, make, rows), busy)
            for name, make in makers.items()
            for rows in sizes
        ]
        return [*found, self._case(link, "fetch_add", 0, pairs, self._tickets, busy)]

    def overlaps(self) -> list[Overlap]:
        """Return benchmarks of long gets and accumulates between nodes, contiguous and strided."""
        pairs = self.site.pairs("between")
        load, target = self.site.pair_load("between", pairs), pairs.get(self.site.rank)
        found = []
        for name, make in (("get", self.get), ("accumulate", self.accumulate)):
            finish = self.window.flush if name == "accumulate" else None
            for suffix, cols in (("", WIDTH), (PACKED, WIDTH // 2)):
                areas = [Region.box((0, rows * WIDTH // cols), (0, cols)) for rows in LONG]
                moves = [[make(target, area)] if target is not None else [] for area in areas]
                self.transfers += [transfer for each in moves for transfer in each]
                label = f"{self.flavour}.{name}{suffix}"
                found.append(Overlap(self.comm, self.site, label, load, moves, self.progress, self.multiply, finish))
        return found

    def _case(
        self, link: str, name: str, rows: int, pairs: dict[int, int], prepare: Callable[[int], list[Act]], busy: bool
    ) -> TransferBenchmark:
        """Return one movement of the given number of rows; `prepare` makes it for a target."""
        target = pairs.get(self.site.rank)
        moves = [] if target is None else prepare(target)
        finish = self.window.flush if name == "accumulate" and moves else None
        load = self.site.pair_load(link, pairs, busy)
        nbytes, name = rows * WIDTH * 4 or 8, f"{self.flavour}.{name}"
        if not busy:
            return TransferBenchmark(link, name, nbytes, load, moves, finish)
        multiply = self.multiply if self.site.rank in pairs.values() else None
        return BusyTransferBenchmark(link, name, nbytes, load, moves, finish, self.progress, multiply)

    def prepared(self, make: Callable[[int, Region], Transfer], rows: int, target: int) -> list[Act]:
        """Transfers of the given number of rows, at different places."""
        made = [make(target, box) for box in boxes(rows)]
        self.transfers += made
        return [at_once(transfer) for transfer in made]

    def _tickets(self, target: int) -> list[Act]:
        return [partial(self.window.fetch_add, target, TICKET, 1)]

    def get(self, target: int, box: Region) -> Transfer:
        return self.window.get(target, Patch(0, (WIDTH, 1), *box), self.room, *box)

    def accumulate(self, target: int, box: Region) -> Transfer:
        return self.window.accumulate(target, Patch(0, (WIDTH, 1), *box), self.room, *box)

    def close(self) -> None:
        for transfer in self.transfers:
            transfer.close()
        self.window.close()


class Contention(Case):
    """Time of several readers of one owner, relative to as many readers of different owners."""

    figures, begins_together = 2, True

    def __init__(self, via: OneSided, link: str) -> None:
        self.link, self.flavour = link, via.flavour
        ways = via.site.readers(link)
        self.readers = len(ways[0])
        mine = [way.get(via.site.rank) for way in ways]
        self.ways = [[] if owner is None else via.prepared(via.get, BUSY_SIZES[-1], owner) for owner in mine]
        self.comm = via.comm

    def sample(self) -> list[Sample]:
        found = []
        for moves in self.ways:
            barrier(self.comm)
            begin = time.perf_counter()
            for move in moves * TURNS:
                move()
            found.append(Sample(begin, time.perf_counter()) if moves else Sample())
        return found


def opened(
    comm: MPI.Intracomm, site: Site, flavours: Sequence[str], room: Array, progress: dict[bool, Progress], multiply: Act
) -> list[OneSided]:
    """Open windows of these flavours, except for unavailable ones. Collective over `comm`."""
    found: list[OneSided] = []
    for flavour in flavours:
        needed = progress[find_flavour(flavour).needs_progress]
        try:
            found.append(OneSided(comm, site, flavour, room, needed, multiply))
        except (AbsentError, MemoryLimitError):
            continue
    return found

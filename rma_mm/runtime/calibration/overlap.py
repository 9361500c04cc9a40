"""Measure long transfers between nodes: their bandwidth, and the share that a multiply hides."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from rma_mm.policy.model.machine import COLLECTIVES, COPY, PACKED, SUMS
from rma_mm.runtime.calibration.sampling import Act, Sample
from rma_mm.runtime.calibration.site import Load, Site
from rma_mm.windows import Transfer
from rma_mm.windows.progress import Progress
from rma_mm.windows.waiting import barrier

WIDTH = 512  # columns, in float32, of the memory that transfers come from and go to
LONG = (128, 512, 1024, 4096)
"""Rows of `WIDTH` that are moved: from 256 KiB to 8 MiB; the first round tells which of them."""
FIRST, LASTS = 1, 0.04
"""The size to begin with, by position, and the seconds that a transfer of the size taken should last at most."""
LONGER = 1.5  # duration of the multiply beside a transfer, over that of the transfer
MOST = 4000  # small products that the multiply is made of at most


def overlap_kind(name: str) -> str:
    """Return the kind of movement with the same hidden fraction, for any window.

    >>> overlap_kind("shared.get packed"), overlap_kind("broadcast"), overlap_kind("created.get busy")
    ('get packed', 'shift', 'get')
    """
    movement = name.rpartition(".")[2].removesuffix(" busy")
    packed = PACKED if movement.endswith(PACKED) else ""
    movement = movement.removesuffix(PACKED)
    movement = "reduce" if movement in SUMS else "shift" if movement in (*COLLECTIVES, COPY) else movement
    return movement + packed


class Overlap:
    """A multiply alone, a transfer alone, and both at once: the transfer begins first, and is awaited last.

    Links let some bytes through at once before they limit the rate: another transfer, which is not timed, uses that up.
    """

    figures, begins_together = 3, True

    def __init__(
        self, comm: MPI.Intracomm, site: Site, name: str, load: Load, moves: Sequence[Sequence[Transfer]],
        progress: Progress, multiply: Act, finish: Act | None = None,
    ) -> None:
        """moves: for each of `LONG` what a rank moves; nothing on one that takes no part.

        multiply: a short product. finish: what completes a transfer, if anything is left to do.
        """
        self.comm, self.site, self.name, self.load, self.moves = comm, site, name, load, moves
        self.progress, self.product, self.finish = progress, multiply, finish
        self.products, self.size, self.is_settled = 4, FIRST, False
        self.counts: list[int] = []  # products of each round

    def sample(self) -> list[Sample]:
        self.counts.append(self.products)
        with self.progress:
            alone = self._timed(move=False)._replace(times=self.products)
            return [alone, self._timed(multiply=False), self._timed()]

    def learn(self, seconds: Sequence[float]) -> None:
        """The first round tells how large a transfer is taken; each how long a multiply."""
        multiply, move, _ = seconds
        if not self.is_settled:
            each = move / LONG[self.size]
            self.size = max((n for n, rows in enumerate(LONG) if each * rows <= LASTS), default=0)
            move, self.is_settled = each * LONG[self.size], True
        self.products = min(MOST, max(1, round(LONGER * move / max(1e-9, multiply))))

    def point(self, rounds: NDArray[np.float64]) -> tuple[float, float, float]:
        """Return the terms of the transfer's time: transfers, bytes, and seconds of the quickest of a few.

        A get takes up to twice as long where its owner has begun to send before it asks for something itself: its
        seconds are the mean.
        """
        took = rounds[1:, 1]
        seconds = took.mean() if overlap_kind(self.name) == "get" else took.min()
        return self.load[0], self.load[1] * LONG[self.size] * WIDTH * 4, float(seconds)

    def exposed(self, rounds: NDArray[np.float64]) -> float:
        """Return its seconds that no multiply hides, from the quickest valid rounds.

        The processors of a host share them: so much of them each of its ranks has, and of the wire of its node.
        """
        multiply, _, both = rounds.T
        ranks = self.site.size * self.site.nodes_per_host / len(self.site.nodes)
        share = min(self.site.slots, ranks) / self.site.nodes_per_host
        beyond = both - multiply.min() * np.array(self.counts)
        return share * max(0.0, float(beyond[1:].min()))

    def _timed(self, multiply: bool = True, move: bool = True) -> Sample:
        if move:
            self._start()
            self._wait()
        barrier(self.comm)
        begin = time.perf_counter()
        if move:
            self._start()
        if multiply:
            self.progress.during(self._multiply)
        if move:
            self._wait()
        return Sample(begin, time.perf_counter())

    def _start(self) -> None:
        for transfer in self.moves[self.size]:
            transfer.start()

    def _wait(self) -> None:
        for transfer in self.moves[self.size]:
            transfer.wait()
        if self.finish is not None:
            self.finish()

    def _multiply(self) -> None:
        for _ in range(self.products):
            self.product()

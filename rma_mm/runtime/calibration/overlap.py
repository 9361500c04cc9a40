"""How much of a transfer between nodes goes on behind a multiply."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from rma_mm.geometry.span import Region
from rma_mm.runtime.calibration.sampling import Act, Lap
from rma_mm.runtime.calibration.transfers import ROWS, WIDTH, OneSided
from rma_mm.windows.progress import Progress
from rma_mm.windows.waiting import barrier

LONGEST = 200
"""Small products that the multiply is made of at most."""


class Overlap:
    """A multiply alone, a transfer alone, and both at once: the transfer begins first, and is awaited last."""

    figures, begins_together = 3, True

    def __init__(self, comm: MPI.Intracomm, via: OneSided, progress: Progress, multiply: Act) -> None:
        """Every rank gets from one of another node. multiply: a short product."""
        self.comm, self.progress = comm, progress
        self.product, self.products = multiply, 4
        self.transfer = via.get(via.site.pairs("between")[via.site.rank], Region.box((0, ROWS // 4), (0, WIDTH)))
        via.transfers.append(self.transfer)

    def sample(self) -> list[Lap]:
        """See `Case`."""
        with self.progress:
            return [self._timed(move=False), self._timed(multiply=False), self._timed()]

    def learn(self, seconds: Sequence[float]) -> None:
        """As long a multiply as the transfer is."""
        multiply, move, _ = seconds
        self.products = min(LONGEST, max(1, round(self.products * move / max(1e-9, multiply))))

    def share(self, rounds: NDArray[np.float64]) -> float:
        """The hidden share of the shorter of the two, 0 to 1; the first round guessed how long to multiply."""
        multiply, move, both = rounds[1:].T
        return float(np.median(np.clip((multiply + move - both) / np.minimum(multiply, move), 0.0, 1.0)))

    def _timed(self, multiply: bool = True, move: bool = True) -> Lap:
        barrier(self.comm)
        begin = time.perf_counter()
        if move:
            self.transfer.start()
        if multiply:
            self.progress.during(self._multiply)
        if move:
            self.transfer.wait()
        return Lap(begin, time.perf_counter())

    def _multiply(self) -> None:
        for _ in range(self.products):
            self.product()

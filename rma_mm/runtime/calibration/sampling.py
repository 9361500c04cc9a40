"""Cases that are timed in turn, round after round, until the time is up: the lower quartile of the rounds counts.

So that all see the same machine, each round measures every case once; a figure is that of the slowest rank, which all
ranks learn, so that all decide alike. The clock of a host begins with the first of its ranks: where there are more
ranks than processors, some begin when others have already done their part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rma_mm.policy.model.machine import SCATTERED
from rma_mm.runtime.calibration.site import Load
from rma_mm.windows.waiting import barrier, reduced, wait

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm.windows.progress import Progress

Act = Callable[[], object]

SAMPLE = 3e-3
"""Seconds that a sample takes where every rank has a processor: more by as much as they share them, since ranks that
waited do not all begin at once."""
MOST = 2048  # movements of a sample at most
BUSY = 0.02  # seconds that a target is inside a multiply: those of a product of some 1000³ on one processor
NAP = 2e-3  # seconds between two looks of a rank that must not take a processor from one that works
LEAST, ROUNDS = 3, 15
"""Rounds at least and at most. The first does not count: it finds everything cold."""


class Sample(NamedTuple):
    """An interval of time.perf_counter, one clock for all processes of a host."""

    begin: float = inf
    end: float = 0.0
    times: float = 1.0  # number of repetitions in the sample; infinite if this rank only took part


class Case(Protocol):
    figures: int  # how many figures a sample has
    begins_together: bool  # true if the clock begins with the first rank of a host, and not with each for itself

    def sample(self) -> Sequence[Sample]:
        """Return the times of this rank's clock. All ranks have just met. All ranks have just met. Collective."""

    def learn(self, seconds: Sequence[float]) -> None:
        return


def sampled(
    comm: MPI.Intracomm, host: MPI.Intracomm, cases: Sequence[Case], deadline: float
) -> list[NDArray[np.float64]]:
    """Return the figures of every case: rounds × figures, those of the slowest rank. Collective over `comm`.

    host: the ranks of this one's host. deadline: what time.perf_counter says on the first rank when the last round
    should be over. After `LEAST` rounds none begins that would end later; where rounds differ, twice as many do.
    """
    rounds: list[NDArray[np.float64]] = []
    goes_on, start = np.ones(1, np.int8), time.perf_counter()
    latest = deadline + max(0.0, deadline - start)
    while goes_on[0]:
        began = time.perf_counter()
        rounds.append(_round(comm, host, cases))
        now = time.perf_counter()
        end = latest if scatter(rounds) > SCATTERED else deadline
        goes_on[0] = len(rounds) < LEAST or (len(rounds) < ROUNDS and 2 * now - began < end)
        wait(comm.Ibcast(goes_on))
    bounds = _bounds(cases)
    return [np.array([each[a:b] for each in rounds]) for a, b in pairwise(bounds)]


def scatter(rounds: Sequence[NDArray[np.float64]]) -> float:
    """Return the relative spread of the valid rounds: of their middle half, the median over all figures."""
    if len(rounds) < LEAST:
        return 0.0
    low, middle, high = np.quantile(np.array(rounds[1:]), (0.25, 0.5, 0.75), axis=0)
    known = middle > 0
    return float(np.median((high - low)[known] / middle[known])) if known.any() else 0.0


def _round(comm: MPI.Intracomm, host: MPI.Intracomm, cases: Sequence[Case]) -> NDArray[np.float64]:
    laps: list[Sample] = []
    for case in cases:
        barrier(comm)
        laps += case.sample()
    begin, end, times = np.array(laps, np.float64).reshape(-1, 3).T
    first = begin.copy()
    reduced(host, first, "MIN")
    together = np.repeat([case.begins_together for case in cases], [case.figures for case in cases])
    takes_part = np.isfinite(begin) & np.isfinite(times)
    found = np.zeros(len(laps))
    found[takes_part] = ((end - np.where(together, first, begin)) / times)[takes_part]
    reduced(comm, found, "MAX")
    for case, (a, b) in zip(cases, pairwise(_bounds(cases)), strict=True):
        case.learn(found[a:b].tolist())
    return found


def _bounds(cases: Sequence[Case]) -> list[int]:
    return list(accumulate((case.figures for case in cases), initial=0))


def typical(samples: NDArray[np.float64]) -> list[float]:
    """Each figure's lower quartile over the rounds that count: others who are at work here only make it larger."""
    found: list[float] = np.quantile(samples[1:], 0.25, axis=0, method="lower").tolist()
    return found


def rest(comm: MPI.Intracomm) -> None:
    """Return when every rank is here; who waits sleeps. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP)


def multiply_for(seconds: float, multiply: Act, progress: Progress) -> None:
    """Be inside a multiply for so long; `multiply` is a short product."""

    def work() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            multiply()

    progress.during(work)


class TransferBenchmark:
    """One movement of one size, with idle targets. Every rank that takes part starts and ends its share."""

    figures, begins_together = 1, True

    def __init__(
        self, link: str, name: str, nbytes: int, load: Load, moves: Sequence[Act], finish: Act | None = None
    ) -> None:
        """moves: prepared at different places, to be done in turn; none on a rank that takes no part.

        finish: what completes them all, if anything is left to do.
        """
        self.link, self.name, self.nbytes, self.load = link, name, nbytes, load
        self.moves, self.finish = moves, finish
        self.count = 4  # movements of a sample; the same on all ranks

    def sample(self) -> list[Sample]:
        return [self.lap(self.count, inf) if self.moves else Sample()]

    def learn(self, seconds: Sequence[float]) -> None:
        self.count = min(MOST, max(1, round(SAMPLE * max(1.0, self.load[0]) / max(1e-9, seconds[0]))))

    def lap(self, most: int, seconds: float) -> Sample:
        """So many movements, but no more than go into the time."""
        begin, count, moves = time.perf_counter(), 0, self.moves
        end = begin + seconds
        while not count or (count < most and time.perf_counter() < end):
            moves[count % len(moves)]()
            count += 1
        if self.finish is not None:
            self.finish()
        return Sample(begin, time.perf_counter(), count)

    def point(self, seconds: float) -> tuple[float, float, float]:
        return self.load[0], self.load[1] * self.nbytes, seconds


class BusyTransferBenchmark(TransferBenchmark):
    """The same while the targets are inside a multiply."""

    def __init__(
        self, link: str, name: str, nbytes: int, load: Load, moves: Sequence[Act], finish: Act | None,
        progress: Progress, multiply: Act | None,
    ) -> None:
        """multiply: a short product, where this rank is a target; it does nothing else then."""
        super().__init__(link, f"{name} busy", nbytes, load, moves, finish)
        self.progress, self.multiply = progress, multiply

    def sample(self) -> list[Sample]:
        """See `Case`: of the origins, as many movements as go into the time."""
        with self.progress:
            if self.multiply is not None:
                begin = time.perf_counter()
                multiply_for(BUSY, self.multiply, self.progress)
                return [Sample(begin, begin, inf)]
            return [self.lap(MOST, 0.6 * BUSY) if self.moves else Sample()]

    def learn(self, seconds: Sequence[float]) -> None:
        """Do nothing: the time limit decides how many samples fit."""

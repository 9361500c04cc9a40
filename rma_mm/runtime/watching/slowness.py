"""Has a rank, or a link, become slow? Told from figures of one product after the other. No MPI here.

A product is late on a rank whose multiplies took longer than mean + 2σ of its last 20 products, and at least 1.3 times
that mean, while another rank's did not: where all slow down together, none is late. A rank is slow after 6 late
products; each that is not takes two of them back, for the system takes cores away now and then, and on a machine with
other programs every second product may be late on one rank or the other.
"""

from __future__ import annotations

from collections import deque
from math import fsum, inf, sqrt

SEEN = 20  # products that the next is compared with
SIGMAS, LEAST = 2.0, 1.3
"""Limits beyond which a product is late: standard deviations above the mean, and at least this multiple of the mean."""
BESIDE = 1.4  # multiple of the smallest slowdown of any rank beyond which a rank is slow
RUN = 6  # late products, less those between them that were not, that make a rank slow; and the other way round
BACK = 2  # late products that one other product takes back
PACES = 10  # products of which a rank's pace is the mean, except for the two fastest and the two slowest
LASTING = 0.3  # seconds that this lasts at least: the system may take a core away for several short products
POOR, LONG = 0.5, 20  # share of the calibrated bandwidth, and products in a row below it, that make a link slow


class Recent:
    """The last figures of a series, with their mean and the outliers' limit."""

    def __init__(self) -> None:
        self.values: deque[float] = deque()
        self.mean, self.limit = 0.0, inf  # 0 and infinite before enough was seen
        self._sum = self._squares = 0.0

    def add(self, value: float) -> None:
        """The next figure, cut where it is beyond the limit."""
        values = self.values
        if len(values) < SEEN:
            values.append(value)
            if len(values) == SEEN:  # of the first ones, none is to hide what comes
                from statistics import median  # slow to import

                most = LEAST * median(values)
                self.values = values = deque(min(each, most) for each in values)
                self._sum, self._squares = fsum(values), fsum(each * each for each in values)
                self._measure()
            return
        value = min(value, self.limit)
        old = values.popleft()
        values.append(value)
        self._sum += value - old
        self._squares += value * value - old * old
        self._measure()

    def _measure(self) -> None:
        self.mean = mean = self._sum / SEEN
        variance = max(0.0, self._squares / SEEN - mean * mean)
        self.limit = max(mean + SIGMAS * sqrt(variance), LEAST * mean)


class Slowness:
    def __init__(self) -> None:
        self.is_slow = False
        self.factor = 1.0  # time of the last late product over the mean before it
        self.seen = Recent()  # times of recent products of the kind at hand; each kind has its own
        self._paces: deque[float] = deque(maxlen=PACES)
        self._turning, self._lasting = 0, 0.0

    @property
    def pace(self) -> float:
        """Time of recent multiplies, of any kind of product, relative to their usual time; 0 before that is known.

        It outlives plans: another plan for the same products goes on with what was seen of them.
        """
        paces = sorted(self._paces)
        middle = paces[2:-2] or paces
        return fsum(middle) / len(middle) if middle else 0.0

    def relative(self, own: float) -> float:
        return own / self.seen.mean if self.seen.mean else 0.0

    def note(self, own: float, least: float, seconds: float = LASTING) -> None:
        """Record a product's time for a multiply-add; least: the smallest `relative` of any rank."""
        relative = self.relative(own)
        if not relative:  # of a kind that is new to a rank that is slow: as it would be else
            self.seen.add(own / self.pace if self.is_slow else own)
            return
        self._paces.append(relative)
        is_late = own > self.seen.limit and relative > BESIDE * least
        self._turning = self._turning + 1 if is_late != self.is_slow else max(0, self._turning - BACK)
        self._lasting = self._lasting + seconds if self._turning else 0.0
        if self._turning >= RUN and self._lasting >= LASTING:
            self.is_slow, self._turning = is_late, 0
        if is_late:
            self.factor = relative
        elif not self.is_slow:
            self.seen.add(own)


class SlowLink:
    """One class of link, as one rank sees it."""

    def __init__(self) -> None:
        self.run = 0  # products in a row in which it was slow
        self.fraction = 1.0  # achieved over calibrated bandwidth in the last product that used it

    def note(self, share: float) -> None:
        self.fraction = share
        self.run = self.run + 1 if share < POOR else 0

    @property
    def is_slow(self) -> bool:
        return self.run >= LONG

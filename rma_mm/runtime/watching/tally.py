"""Counters of one rank: seconds, words, messages, and durations of transfers. No MPI here. No MPI here."""

from __future__ import annotations

from threading import Lock

from rma_mm.windows.base import Counters

BUCKETS = 64
OPERATIONS = ("get", "accumulate", "group", "wait")
"""Operations with a histogram: transfers by kind, and waits for those that had not completed."""
FAR_LINKS = ("node", "between")  # classes of links, as machines have them, that lead to other ranks

_UNDER_WAY = Lock()  # held while a transfer begins or ends: a helper thread does it, too


class Histogram:
    """Durations by powers of two: bucket b counts those from 2ᵇ⁻¹ to less than 2ᵇ nanoseconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.total = 0  # nanoseconds of all together

    def add(self, nanoseconds: int) -> None:
        self.counts[nanoseconds.bit_length()] += 1
        self.total += nanoseconds

    def join(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def quantile(self, share: float) -> float:
        """Return seconds that this share of them took at most, right within a factor √2; 0 if there are none.

        >>> histogram = Histogram()
        >>> for microseconds in (1, 1, 1, 1000):
        ...     histogram.add(1000 * microseconds)
        >>> f"{histogram.quantile(0.5):.1e} {histogram.quantile(0.99):.1e}"
        '7.2e-07 7.4e-04'
        """
        left = share * sum(self.counts)
        for bucket, count in enumerate(self.counts):
            left -= count
            if count and left <= 0:
                return 1e-9 * 2 ** (bucket - 0.5)
        return 0.0


class LinkUse:
    """Large gets over one class of link: seconds with any in progress, and calibrated seconds.

    Counts where the end was seen when it came; what landed unseen behind a multiply says nothing.
    """

    __slots__ = ("busy", "expected", "pending", "since", "under_way")

    def __init__(self) -> None:
        self.busy = self.since = self.under_way = 0
        self.expected = self.pending = 0.0

    def begin(self, now: int, expected: float) -> None:
        """A get begins that should take so many nanoseconds."""
        with _UNDER_WAY:
            if not self.under_way:
                self.since, self.pending = now, 0.0
            self.under_way += 1
            self.pending += expected

    def end(self, now: int, is_seen: bool) -> None:
        """One is over; `is_seen`: now, and not some time ago."""
        with _UNDER_WAY:
            self.under_way -= 1
            if not self.under_way and is_seen:
                self.busy += now - self.since
                self.expected += self.pending


class Tally:
    """One rank's counts since its mesh was made. Times are in nanoseconds."""

    def __init__(self) -> None:
        self.products = self.nanoseconds = 0  # products, and what they took
        self.multiplying = self.waiting = 0
        """Nanoseconds in local products; in waits for transfers, for ranks of the node, and for all ranks to end."""
        self.work = 0.0  # multiply-adds
        self.moving = self.exposed = 0
        """Nanoseconds in which a transfer was under way; and those of them in which nothing else was done."""
        self.traffic = Counters()  # words and messages of products
        self.slices = self.plan_changes = self.check_failures = self.retries = 0
        self.latencies = {operation: Histogram() for operation in OPERATIONS}
        self.links = {link: LinkUse() for link in FAR_LINKS}
        self.is_slow = False  # true if this rank's multiplies take longer than they did

    def waited(self, nanoseconds: int) -> None:
        self.waiting += nanoseconds
        self.latencies["wait"].add(nanoseconds)

    def copied(self, nanoseconds: int, slices: int) -> None:
        """Count copies of other ranks' memory, made one after the other in so many nanoseconds."""
        self.slices += slices
        self.moving += nanoseconds
        self.exposed += nanoseconds
        for _ in range(slices):
            self.latencies["get"].add(nanoseconds // slices)

    @property
    def hidden(self) -> float | None:
        return 1 - min(self.exposed, self.moving) / self.moving if self.moving else None

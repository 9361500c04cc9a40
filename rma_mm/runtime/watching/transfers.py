"""Transfers and waits that are timed for the metrics of their mesh. No MPI here."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns as clock

from rma_mm.policy.model.machine import Machine
from rma_mm.runtime.watching.retries import FAULTS, retry
from rma_mm.runtime.watching.tally import FAR_LINKS, LinkUse, Tally
from rma_mm.windows.base import Transfer
from rma_mm.windows.hosts.liveness import ACCUMULATE, CELLS, DOING, GET, GROUP, activity, activity_text

LARGE = 2**16  # bytes from which on a get tells of its link's bandwidth
KINDS = {"get": GET, "accumulate": ACCUMULATE, "group": GROUP}


def timed(tally: Tally, wait: Callable[[], None], kind: int) -> Callable[[], None]:
    def waited() -> None:
        start, CELLS[DOING] = clock(), kind
        wait()
        tally.waited(clock() - start)

    return waited


class WatchedTransfer:
    """A transfer (see `windows.Transfer`) that is timed from its start until it was seen to be over."""

    def __init__(self, inner: Transfer, tally: Tally, operation: str, is_slice: bool, rank: int = 0) -> None:
        self.inner, self.tally, self.latency = inner, tally, tally.latencies[operation]
        self.activity, self.repeats = activity(KINDS[operation], rank), operation == "get"
        self.is_slice = is_slice  # true if it moves words that this rank counts
        self.link: LinkUse | None = None
        self.expected = 0.0  # nanoseconds that calibration gives it, where there is a link to hold it against
        self._begun: int | None = None

    def start(self) -> None:
        begun, CELLS[DOING] = clock(), self.activity
        try:
            self.inner.start()
            is_done = self.inner.done()
        except FAULTS as fault:
            is_done = self._again(fault)
        now = clock()
        self._begun = begun
        self.tally.slices += self.is_slice
        self.tally.exposed += now - begun
        if self.link is not None:
            self.link.begin(begun, self.expected)
        if is_done:
            self._end(now, True)

    def done(self) -> bool:
        try:
            is_done = self.inner.done()
        except FAULTS as fault:
            is_done = self._again(fault)
        if is_done and self._begun is not None:
            self._end(clock(), False)
        return is_done

    def wait(self) -> None:
        is_over = self._begun is None or self.done()  # seen before, or nothing is left to wait for
        start, CELLS[DOING] = clock(), self.activity
        try:
            self.inner.wait()
        except FAULTS as fault:
            self._again(fault)
        now = clock()
        if not is_over:
            self.tally.waited(now - start)
            self.tally.exposed += now - start
        self._end(now, not is_over)

    def hold_against(self, machine: Machine, link: str, nbytes: int, flavour: str, ranks: int) -> None:
        """Tell of the bandwidth of a get: while `ranks` move as much over the same wire, or on the same processors."""
        if nbytes >= LARGE:
            costs = [machine.cost(link, "get", flavour, busy).seconds(nbytes) for busy in (False, True)]
            beside = ranks if link == FAR_LINKS[-1] else max(1.0, ranks / machine.slots)
            self.link, self.expected = self.tally.links[link], 1e9 * (machine.operation + beside * max(costs))

    def close(self) -> None:
        self.inner.close()

    def _again(self, fault: Exception) -> bool:
        """Repeat the failed transfer until it is over. Raise WindowError if it keeps failing."""
        return retry(fault, self._repeat, activity_text(self.activity), self.tally, self.repeats)

    def _repeat(self) -> bool:
        self.inner.wait()  # a part of it may still be under way
        self.inner.start()
        self.inner.wait()
        return True

    def _end(self, now: int, is_seen: bool) -> None:
        """Record that the transfer is over. is_seen: it was seen to end now, not some time ago."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self.latency.add(now - begun)
            self.tally.moving += now - begun
            if self.link is not None:
                self.link.end(now, is_seen)

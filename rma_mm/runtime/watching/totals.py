"""Counters of all ranks of a mesh, and their text in Prometheus' format. No MPI here. No MPI here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

from rma_mm.classes import dataclass
from rma_mm.errors import OptionError
from rma_mm.runtime.watching.tally import BUCKETS, FAR_LINKS, OPERATIONS, Histogram, Tally

SHOWN = range(10, 37, 2)
"""Buckets of a histogram that are written: about 1 µs to 1 minute, each four times the one before."""


class OverRanks(NamedTuple):
    """A figure over the ranks of the grid."""

    least: float
    median: float
    most: float


@dataclass(frozen=True)
class Totals:
    """The counts of every rank, since the mesh was made."""

    tallies: list[Tally]  # by rank
    hosts: list[str]
    members: int  # ranks of the grid, the first of all

    def spread(self, figure: str) -> OverRanks:
        """Return the distribution of a count of `Tally`, as "multiplying", over the ranks of the grid."""
        from statistics import median  # slow to import

        values = [getattr(tally, figure) for tally in self.tallies[: self.members]]
        return OverRanks(min(values), median(values), max(values))

    def sum(self, figure: str) -> int:
        return sum(getattr(tally if hasattr(tally, figure) else tally.traffic, figure) for tally in self.tallies)

    def latency(self, operation: str) -> Histogram:
        """Return the durations of all ranks' gets, accumulates, group transfers ("group") or waits ("wait")."""
        joined = Histogram()
        for tally in self.tallies:
            joined.join(tally.latencies[operation])
        return joined

    def bandwidth(self, link: str) -> float | None:
        """Achieved over calibrated bandwidth of large gets on a class of link; None if that is not known."""
        used = [tally.links[link] for tally in self.tallies]
        busy = sum(each.busy for each in used)
        return sum(each.expected for each in used) / busy if busy else None

    @property
    def hidden(self) -> float | None:
        """The share of transfers' time in which ranks did something else; None without transfers."""
        moving = self.sum("moving")
        return 1 - sum(min(each.exposed, each.moving) for each in self.tallies) / moving if moving else None

    @property
    def by_link(self) -> dict[str, tuple[int, int]]:
        """Class of link → words and messages of all products."""
        far = self.sum("messages_inter")
        counts = (self.sum("words_intra"), self.sum("messages") - far), (self.sum("words_inter"), far)
        return dict(zip(FAR_LINKS, counts, strict=True))

    def text(self) -> str:
        """Return all of it in Prometheus' text format. Raises OptionError without prometheus_client."""
        require_client()
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(_Families(list(_families(self))))
        return generate_latest(registry).decode()


@dataclass(frozen=True, eq=False)
class _Families:
    """A collector for a Prometheus registry."""

    families: list[Any]

    def collect(self) -> list[Any]:
        return self.families


def require_client() -> None:
    """Raise OptionError if metrics cannot be written as text."""
    if find_spec("prometheus_client") is None:
        raise OptionError(
            "metrics: writing them needs prometheus_client, which is not installed: pip install prometheus_client"
        )


def _families(totals: Totals) -> Iterator[Any]:
    """Yield the metrics, by the names that docs/how-to/metrics.md lists."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    counts = {
        "products": ("Products of the mesh.", totals.tallies[0].products),
        "slices_sent": ("Transfers that moved words between ranks.", totals.sum("slices")),
        "retries": ("Transfers that failed and were tried again.", totals.sum("retries")),
        "plan_changes": ("Repeated products that another plan went on with.", totals.tallies[0].plan_changes),
        "checksum_failures": ("Results that a check found wrong.", totals.tallies[0].check_failures),
    }
    for name, (text, value) in counts.items():
        yield CounterMetricFamily(f"rma_mm_{name}", text, value=value)
    for n, what in enumerate(("words", "messages")):
        family = CounterMetricFamily(f"rma_mm_{what}", f"{what.capitalize()} between ranks.", labels=["link"])
        for link, counted in totals.by_link.items():
            family.add_metric([link], counted[n])
        yield family
    spreads = {"product": "nanoseconds", "multiply": "multiplying", "wait": "waiting"}
    for what, figure in spreads.items():
        family = CounterMetricFamily(f"rma_mm_{what}_seconds", f"Seconds in each {what} of a rank.", labels=["over"])
        for over, nanoseconds in zip(("min", "median", "max"), totals.spread(figure), strict=True):
            family.add_metric([over], 1e-9 * nanoseconds)
        yield family
    yield _latencies(totals)
    yield GaugeMetricFamily("rma_mm_ranks", "Ranks of the mesh.", value=len(totals.tallies))
    if totals.hidden is not None:
        yield GaugeMetricFamily("rma_mm_hidden_ratio", "Share of transfers' time behind other work.", totals.hidden)
    ratios = GaugeMetricFamily("rma_mm_bandwidth_ratio", "Achieved over calibrated bandwidth.", labels=["link"])
    for link in FAR_LINKS:
        if (ratio := totals.bandwidth(link)) is not None:
            ratios.add_metric([link], ratio)
    yield ratios
    slow = GaugeMetricFamily("rma_mm_straggler", "1 for a rank that has become slow.", labels=["rank", "host"])
    for rank, (tally, host) in enumerate(zip(totals.tallies, totals.hosts, strict=True)):
        if tally.is_slow:
            slow.add_metric([str(rank), host], 1)
    yield slow


def _latencies(totals: Totals) -> Any:
    """Return the metric family of the durations of transfers and waits."""
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily("rma_mm_rma_latency_seconds", "From start until seen to be over.", labels=["op"])
    for operation in OPERATIONS:
        histogram = totals.latency(operation)
        below = [(str(1e-9 * 2**bucket), sum(histogram.counts[: bucket + 1])) for bucket in SHOWN]
        family.add_metric([operation], [*below, ("+Inf", sum(histogram.counts[:BUCKETS]))], 1e-9 * histogram.total)
    return family

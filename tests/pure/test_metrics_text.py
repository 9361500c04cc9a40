"""What is written for Prometheus, and the alerts and the dashboard that read it."""

from __future__ import annotations

import json
import re
from unittest import mock

import pytest

from rma_mm.errors import OptionError
from rma_mm.runtime.watching import totals as module
from rma_mm.runtime.watching.tally import Histogram, LinkUse, Tally
from rma_mm.runtime.watching.totals import OverRanks, Totals
from rma_mm.windows import Counters
from tests.processes import ROOT

NAME = re.compile(r"\brma_mm_\w+")
DOCS = ROOT / "docs" / "how-to" / "metrics"


def some() -> Totals:
    """Three ranks, of which the last is beyond the grid."""
    tallies = [Tally() for _ in range(3)]
    for rank, tally in enumerate(tallies):
        tally.products, tally.nanoseconds, tally.multiplying = 4, 10**9, (rank + 1) * 10**8
        tally.traffic = Counters(10 * rank, 5, 3, 1)
        tally.moving, tally.exposed = 1000, 250
        tally.latencies["get"].add(2000 * (rank + 1))
        tally.slices, tally.plan_changes, tally.check_failures, tally.retries = 2, 1, 1, rank
    tallies[1].is_slow = True
    tallies[0].links["between"].begin(100, 50.0)
    tallies[0].links["between"].end(200, True)
    return Totals(tallies, ["one", "two", "two"], 2)


def samples(totals: Totals) -> dict[tuple[str, ...], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    found = [each for family in parser.text_string_to_metric_families(totals.text()) for each in family.samples]
    assert len({(each.name, *each.labels.items()) for each in found}) == len(found)
    return {(each.name, *(value for _, value in sorted(each.labels.items()))): each.value for each in found}


def test_what_is_counted_is_what_is_read() -> None:
    found = samples(some())
    wanted = {
        ("rma_mm_products_total",): 4, ("rma_mm_slices_sent_total",): 6, ("rma_mm_plan_changes_total",): 1,
        ("rma_mm_checksum_failures_total",): 1, ("rma_mm_words_total", "node"): 30,
        ("rma_mm_words_total", "between"): 15, ("rma_mm_messages_total", "node"): 6,
        ("rma_mm_messages_total", "between"): 3, ("rma_mm_multiply_seconds_total", "min"): 0.1,
        ("rma_mm_multiply_seconds_total", "max"): 0.2, ("rma_mm_hidden_ratio",): 0.75, ("rma_mm_ranks",): 3,
        ("rma_mm_retries_total",): 3, ("rma_mm_bandwidth_ratio", "between"): 0.5, ("rma_mm_straggler", "two", "1"): 1,
        ("rma_mm_rma_latency_seconds_count", "get"): 3, ("rma_mm_rma_latency_seconds_sum", "get"): 12e-6,
        ("rma_mm_rma_latency_seconds_bucket", "+Inf", "get"): 3,
    }
    assert {key: pytest.approx(value) for key, value in wanted.items()} == {key: found[key] for key in wanted}
    below = [value for key, value in found.items() if key[0].endswith("_bucket") and key[2] == "get"]
    assert below[0] == 0 and below == sorted(below) and below[-1] == 3
    assert some().spread("multiplying") == OverRanks(1e8, 1.5e8, 2e8)


def test_without_a_client_one_is_told_what_to_install() -> None:
    with mock.patch.object(module, "find_spec", return_value=None), pytest.raises(OptionError, match="pip install"):
        some().text()


def test_quantiles_are_right_within_a_factor() -> None:
    histogram = Histogram()
    for microseconds in range(1, 1001):
        histogram.add(1000 * microseconds)
    for share in (0.01, 0.5, 0.99):
        assert 2**-0.51 < histogram.quantile(share) / (1e-3 * share) < 2**0.51
    assert Histogram().quantile(0.5) == 0


def test_a_link_is_busy_once_while_several_gets_are_under_way() -> None:
    """And what landed unseen says nothing."""
    use = LinkUse()
    for begin, end, is_seen in ((0, 100, True), (1000, 5000, False)):
        use.begin(begin, 30.0)
        use.begin(begin + 10, 30.0)
        use.end(begin + 20, False)
        use.end(end, is_seen)
    assert (use.busy, use.expected) == (100, 60.0)


def read_by(expressions: list[str]) -> set[str]:
    """Our metrics in these expressions."""
    assert all(expressions)
    return {name for text in expressions for name in NAME.findall(text)}


def test_alerts_read_what_is_written() -> None:
    yaml = pytest.importorskip("yaml")
    rules = [rule for group in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    assert all({"alert", "expr", "labels", "annotations"} <= set(rule) for rule in rules)
    assert {"rma_mm_straggler"} < read_by([rule["expr"] for rule in rules]) <= {name for name, *_ in samples(some())}


def test_the_dashboard_reads_all_that_is_written() -> None:
    dashboard = json.loads((DOCS / "dashboard.json").read_text())
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    read = read_by([target["expr"] for panel in dashboard["panels"] for target in panel["targets"]])
    written = {name for name, *_ in samples(some())}
    assert read <= written
    assert {name for name in written if name.endswith("_total")} <= read


def test_the_page_lists_what_is_written() -> None:
    page = set(NAME.findall((ROOT / "docs" / "how-to" / "metrics.md").read_text())) - {"rma_mm"}
    assert page == {re.sub("_(bucket|count|sum)$", "", name) for name, *_ in samples(some())}

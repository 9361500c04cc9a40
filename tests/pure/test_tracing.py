"""Traces and timelines, without ranks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rma_mm.geometry.mesh import MeshShape
from rma_mm.runtime.execution.tracing import Trace, TracedTransfer, TraceEvent, call_noted, transfer_noted
from rma_mm.runtime.reports.timeline import Record, offset_of, rows_of, timeline


class Later:
    """A transfer that is over when it has been asked `looks` times."""

    def __init__(self, looks: int) -> None:
        self.looks, self.left, self.calls = looks, 0, []

    def start(self) -> None:
        self.calls.append("start")
        self.left = self.looks

    def done(self) -> bool:
        self.left = max(0, self.left - 1)
        return self.left == 0

    def wait(self) -> None:
        self.calls.append("wait")
        self.left = 0

    def close(self) -> None:
        self.calls.append("close")


FACTS = {"operand": "A", "bytes": 8}


def test_without_a_trace_nothing_is_wrapped() -> None:
    """The very same objects."""
    call, transfer = object(), Later(1)
    assert call_noted(None, call, "x") is call
    assert transfer_noted(None, transfer, None, None) is transfer


def test_a_transfer_that_goes_on_is_started_and_waited_for() -> None:
    """Each start has one end, however often one asks."""
    trace, inner = Trace(), Later(10)
    traced = TracedTransfer(trace, inner, "get", FACTS)
    for _ in range(2):
        traced.begin()
        assert not traced.done()
        traced.wait()
        traced.wait()
        assert traced.done()
    traced.close()
    assert inner.calls == ["start", "wait", "wait"] * 2 + ["close"]
    assert [event.name for event in trace.calls] == ["start get A", "wait"] * 2
    assert [(event.name, event.kind, event.facts) for event in trace.transfers] == [("get A", "get", FACTS)] * 2
    for moved, waited in zip(trace.transfers, trace.calls[1::2], strict=True):
        assert moved.start <= waited.start <= waited.end <= moved.end


def test_a_transfer_that_is_over_at_once_is_the_ranks_own_work() -> None:
    """Copies within reach are made by the rank that asks."""
    trace = Trace()
    traced = TracedTransfer(trace, Later(1), "get", FACTS)
    traced.begin()
    traced.wait()
    assert [event.name for event in trace.calls] == ["get A"]
    assert len(trace.transfers) == 1


def test_started_by_a_helper_it_is_no_call_of_the_rank() -> None:
    """What a thread begins stands beside what the rank does."""
    trace = Trace()
    traced = TracedTransfer(trace, Later(2), "get", FACTS)
    traced.start()
    assert traced.done()
    assert (len(trace.calls), len(trace.transfers)) == (0, 1)


def test_calls_give_what_they_give() -> None:
    """And a repetition begins with the wait for all ranks."""
    trace = Trace()
    with trace.repetition():
        assert call_noted(trace, lambda: 42, "claim", {"for": "a box"})() == 42
    assert [(event.name, event.facts) for event in trace.calls] == [
        ("wait", {"for": "all ranks to begin"}), ("claim", {"for": "a box"})
    ]
    assert trace.calls[0].end == trace.calls[1].start
    trace.clear()
    assert not (trace.calls or trace.transfers or trace.repetitions)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_rows_hold_everything_once_and_nothing_overlaps(spans: list[tuple[int, int]]) -> None:
    """As many rows as transfers were under way at a time, and no more."""
    events = [TraceEvent("get A", "get", start, start + length, {"n": n}) for n, (start, length) in enumerate(spans)]
    rows = rows_of(events)
    assert sorted(event.facts["n"] for row in rows for event in row) == list(range(len(events)))
    for row in rows:
        assert all(first.end <= second.start for first, second in pairwise(row))
    held = [sum(e.start <= moment <= e.end for e in events) for moment in range(71)]
    assert len(rows) <= max(held)


@given(st.integers(-10**12, 10**12), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1))
def test_clocks_are_told_within_half_the_shortest_way(ahead: int, ways: list[tuple[int, int]]) -> None:
    """Whatever the way there and the way back took."""
    answers, now = [], 0
    for there, back in ways:
        start, told, end = now, now + there + ahead, now + there + back
        answers.append((end - start, told - (start + end) // 2))
        now = end
    trip = min(trip for trip, _ in answers)
    found = offset_of(answers)
    assert abs(found - ahead) <= (trip / 2 if found else trip) + 1


def test_one_clock_is_one_clock() -> None:
    """A slow answer of a rank on the same machine moves nothing."""
    assert offset_of([(1000, 400), (5000, 2400)]) == 0
    assert offset_of([(1000, 600), (5000, 0)]) == 600


def test_nodes_are_processes_and_ranks_are_threads() -> None:
    """With names, in order, and times in microseconds from the first start."""
    def record(rank: int, start: int) -> Record:
        call = TraceEvent("multiply", "multiply", start + 500, start + 2500, {"multiply_adds": 8})
        get = TraceEvent("get A", "get", start + 100, start + 1100, FACTS)
        return Record(rank, f"host{rank}", [call], [get, get], [(start, start + 3000), (start + 5000, start + 6000)])

    records = [record(0, 10_000), record(1, 12_000), record(2, 11_000)]
    found = timeline(records, MeshShape((1, 2), node_of_rank=(0, 1)), (0, 1, 1), {"algorithm": "x"})
    assert found["otherData"] == {"algorithm": "x"}
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in found["traceEvents"] if event["name"] in ("process_name", "thread_name")
    }
    assert sorted(names.values()) == sorted([
        "products", "repetitions", "node 0 (host0)", "node 1 (host1)",
        "rank 0 at (0, 0)", "rank 1 at (0, 1)", "rank 2 beyond the mesh",
        *(f"rank {rank} transfers {row}" for rank in range(3) for row in (1, 2)),
    ])
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    products = [(event["name"], event["ts"], event["dur"]) for event in spans if event["pid"] == 1]
    assert products == [("repetition 1", 0, 5), ("repetition 2", 5, 3)]
    multiplies = {names[e["pid"], e["tid"]]: (e["ts"], e["dur"]) for e in spans if e["name"] == "multiply"}
    starts = {"rank 0 at (0, 0)": 0.5, "rank 1 at (0, 1)": 2.5, "rank 2 beyond the mesh": 1.5}
    assert multiplies == {name: (start, 2) for name, start in starts.items()}
    assert names[next(e["pid"] for e in spans if e["ts"] == 2.5), None] == "node 1 (host1)"

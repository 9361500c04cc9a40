"""A report of products as one page of HTML that needs nothing from elsewhere: timeline, traffic, prediction, decision.

Bokeh draws it; its script is part of the page, so that the page opens with the network off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import OptionError
from rma_mm.policy.planner.decision import Decision
from rma_mm.policy.planner.tables import seconds_text
from rma_mm.runtime.execution.tracing import TraceEvent
from rma_mm.runtime.reports.timeline import PREDICTED, Record

EVENTS = 12_000  # bars of the timeline: of more, the shortest are left out, and said to be
CANDIDATES = 60  # rows of the table of candidates
COLORS = {
    "multiply": "#3b8a5a", "wait": "#d2694f", "barrier": "#d2694f", "start": "#8a8f98", "get": "#3f77b8",
    "view": "#3f77b8", "accumulate": "#9467bd", "broadcast": "#17a2b8", "all-gather": "#17a2b8", "shift": "#17a2b8",
    "reduce": "#b8860b", "reduce-scatter": "#b8860b", "scale": "#c08497", "cast": "#c08497",
}
OTHER = "#8a8f98"
WIDE = 1100  # pixels
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.2em; max-width: 1140px }
h1 { font-size: 1.3em; margin: 0 0 .3em } h2 { font-size: 1.1em; margin: 1.2em 0 .3em } p { margin: .3em 0 }
table { border-collapse: collapse } td, th { padding: .15em .8em .15em 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } pre { overflow-x: auto }
.plot { background: #fff; padding: .4em }
"""


@dataclass(frozen=True)
class ReportContent:
    """All that a page tells. Unknown parts are empty."""

    title: str
    facts: Sequence[tuple[str, str]]  # name and text, a row each
    records: Sequence[Record] = ()  # traces of all ranks, on one clock
    predicted: Sequence[Record] = ()  # what one product was expected to be like
    traffic: NDArray[np.int64] | None = None  # words by source and destination
    memory: Sequence[tuple[str, int]] = ()  # bytes of the fullest rank, by purpose
    limit: int | None = None  # bytes that a rank may hold
    decision: Decision | None = None
    command: str = ""  # repeats it


def require_bokeh() -> None:
    """Raise OptionError unless Bokeh, which draws the pages, is installed."""
    if find_spec("bokeh") is None:
        raise OptionError("report: it needs bokeh; pip install 'rma_mm[report]'")


def report_page(report: ReportContent) -> str:
    """Return the page. Raises OptionError without Bokeh."""
    require_bokeh()
    from bokeh.embed import components
    from bokeh.resources import Resources

    plots = {
        "Timeline": _timeline(report), "Words from rank to rank": _heat_map(report.traffic),
        "Predicted and measured, by kind of work": _kinds(report), "Memory of the fullest rank": _memory(report),
    }
    drawn = {title: (plot, note) for title, (plot, note) in plots.items() if plot is not None or note}
    script, parts = components([plot for plot, _ in drawn.values() if plot is not None])
    left = iter(parts)
    body = [f"<h1>{escape(report.title)}</h1>", _table(report.facts)]
    for title, (plot, note) in drawn.items():
        shown = f'<div class="plot">{next(left)}</div>' if plot is not None else ""
        body.append(f"<h2>{title}</h2>{shown}<p>{note}</p>")
    body += _candidates(report.decision) if report.decision is not None else []
    body += ["<h2>To repeat it</h2>", f'<pre id="command">{escape(report.command)}</pre>'] * bool(report.command)
    resources = Resources(mode="inline", components=["bokeh"])
    head = f'<meta charset="utf-8"><title>{escape(report.title)}</title><style>{STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}{resources.render_js()}</head>\n'
        f"<body>{''.join(body)}\n{script}</body></html>\n"
    )


def _table(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td id="{escape(name.replace(" ", "-"))}">{escape(text)}</td></tr>'
        for name, text in facts
    )
    return f"<table>{rows}</table>"


# -- plots ----------------------------------------------------------------------------------------


def _events(records: Sequence[Record], origin: int) -> list[tuple[str, str, float, float, str]]:
    """Return bars: row, kind, start and end in milliseconds, and what was done."""
    found = []
    for record in records:
        row = f"rank {record.rank}" + (f" {PREDICTED}" if record.host == PREDICTED else "")
        for beside, events in ((False, record.calls), (True, record.transfers)):
            for event in events:
                name = f"{row} transfers" if beside else row
                found.append(
                    (name, event.kind, (event.start - origin) / 1e6, (event.end - origin) / 1e6, _what(event))
                )
    return found


def _what(event: TraceEvent) -> str:
    facts = event.facts
    ranks = "".join(f" {way} {', '.join(map(str, facts[way]))}" for way in ("from", "to") if facts.get(way))
    size = f", {facts['bytes']} bytes" if facts.get("bytes") else ""
    return f"{event.name}{ranks}{size}" if ranks or size else str(facts.get("operation") or event.name)


def _timeline(report: ReportContent) -> tuple[Any, str]:
    """Return the timeline of the ranks, predicted below measured, and a note; None if there is nothing to draw."""
    from bokeh.models import BoxZoomTool, ColumnDataSource, HoverTool, PanTool, ResetTool, WheelZoomTool
    from bokeh.plotting import figure

    origin = min((record.repetitions[0][0] for record in report.records if record.repetitions), default=0)
    bars = _events(report.records, origin) + _events(report.predicted, 0)
    if not bars:
        return None, "No execution was traced."
    left_out = len(bars) - EVENTS
    bars = sorted(bars, key=lambda bar: bar[2] - bar[3])[:EVENTS]
    rows = _rows(report)
    plot = figure(
        width=WIDE, height=min(1600, 110 + 20 * len(rows)), y_range=rows[::-1], x_axis_label="milliseconds",
        tools=[zoom := WheelZoomTool(dimensions="width"), PanTool(dimensions="width"), BoxZoomTool(dimensions="width"),
               ResetTool(), HoverTool(tooltips=[("", "@what"), ("ms", "@left{0.000} to @right{0.000}")])],
        toolbar_location="above", output_backend="canvas",
    )
    plot.toolbar.active_scroll = zoom
    by_kind = defaultdict(list)
    for bar in bars:
        by_kind[bar[1]].append(bar)
    for kind in sorted(by_kind, key=lambda kind: -sum(end - start for _, _, start, end, _ in by_kind[kind])):
        where, _, start, end, what = zip(*by_kind[kind], strict=True)
        source = ColumnDataSource({
            "row": list(where), "left": np.array(start, np.float32), "right": np.array(end, np.float32),
            "what": list(what),
        })
        plot.hbar(
            y="row", left="left", right="right", height=0.8, color=COLORS.get(kind, OTHER), source=source,
            legend_label=kind,
        )
    plot.add_layout(plot.legend[0], "right")
    plot.legend.click_policy = "hide"
    note = "Scroll to zoom, drag to move; click a kind to hide it. A transfer ends when its rank noticed its end."
    return plot, note + (f" The shortest {left_out} of {left_out + EVENTS} bars are left out." if left_out > 0 else "")


def _rows(report: ReportContent) -> list[str]:
    """Return the rows of the timeline: of each rank its calls, its transfers, and both as predicted."""
    expected = {record.rank: record for record in report.predicted}
    rows = []
    for rank in sorted({record.rank for record in (*report.records, *report.predicted)}):
        measured = next((record for record in report.records if record.rank == rank), None)
        for record, more in ((measured, ""), (expected.get(rank), f" {PREDICTED}")):
            if record is not None:
                rows.append(f"rank {rank}{more}")
                rows += [f"rank {rank}{more} transfers"] * bool(record.transfers)
    return rows


def _heat_map(traffic: NDArray[np.int64] | None) -> tuple[Any, str]:
    from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter
    from bokeh.plotting import figure
    from bokeh.transform import linear_cmap

    if traffic is None:
        return None, ""
    ranks = len(traffic)
    source, to = (each.ravel() for each in np.indices(traffic.shape))
    names = [str(rank) for rank in range(ranks)]
    cells = ColumnDataSource({
        "source": [names[n] for n in source], "to": [names[n] for n in to], "words": traffic.ravel().astype(float),
    })
    side = min(620, 180 + 32 * ranks)
    plot = figure(
        width=side + 110, height=side, x_range=names, y_range=names[::-1], x_axis_label="to rank",
        y_axis_label="from rank", toolbar_location=None,
        tools=[HoverTool(tooltips=[("from", "@source"), ("to", "@to"), ("words", "@words{0,0}")])],
    )
    fill = linear_cmap("words", "Blues256", float(max(1, traffic.max())), 0.0)
    drawn = plot.rect("to", "source", 1, 1, source=cells, fill_color=fill, line_color="#ddd")
    plot.add_layout(drawn.construct_color_bar(width=12, formatter=NumeralTickFormatter(format="0,0")), "right")
    total = f'Sum: <b id="words-sum">{int(traffic.sum())}</b> words.'
    return plot, f"{total} A word is an element of another rank's memory."


def _kinds(report: ReportContent) -> tuple[Any, str]:
    """Return bars of the mean seconds of a rank in each kind of work, for one product."""
    from bokeh.models import ColumnDataSource, FactorRange, HoverTool
    from bokeh.plotting import figure

    repetitions = max((len(record.repetitions) for record in report.records), default=0)
    measured, predicted = seconds_by_kind(report.records, max(1, repetitions)), seconds_by_kind(report.predicted, 1)
    largest = {kind: max(measured.get(kind, 0), predicted.get(kind, 0)) for kind in measured | predicted}
    kinds = sorted(largest, key=lambda kind: -largest[kind])
    if not kinds:
        return None, ""
    columns = [(name, each) for name, each in (("measured", measured), ("predicted", predicted)) if each]
    factors = [(kind, name) for kind in kinds for name, _ in columns]
    values = [1e3 * each.get(kind, 0) for kind in kinds for _, each in columns]
    colors = ["#3f77b8" if name == "measured" else "#b0b7c3" for _, name in factors]
    plot = figure(
        width=WIDE, height=300, x_range=FactorRange(*factors), y_axis_label="milliseconds of a rank",
        toolbar_location=None, tools=[HoverTool(tooltips=[("", "@x"), ("ms", "@top{0.000}")])],
    )
    bars = ColumnDataSource({"x": factors, "top": values, "color": colors})
    plot.vbar(x="x", top="top", width=0.8, color="color", source=bars)
    plot.xaxis.major_label_orientation = plot.xaxis.group_label_orientation = 0.9
    plot.y_range.start = 0
    return plot, "Means over ranks, of one product. Transfers overlap with multiplies, so the bars do not add up."


def seconds_by_kind(records: Sequence[Record], repetitions: int) -> dict[str, float]:
    """Return the mean seconds that a rank spends in each kind of call, and its transfers take, in one product."""
    found: dict[str, float] = defaultdict(float)
    for record in records:
        for events, more in ((record.calls, ""), (record.transfers, " (transfer)")):
            for event in events:
                found[event.kind + more] += (event.end - event.start) / 1e9 / repetitions / len(records)
    return dict(found)


def _memory(report: ReportContent) -> tuple[Any, str]:
    from bokeh.models import ColumnDataSource, HoverTool, Span
    from bokeh.plotting import figure

    if not report.memory:
        return None, ""
    names, sizes = zip(*report.memory, strict=True)
    ends = np.cumsum(sizes) / 2**20
    bars = ColumnDataSource({
        "name": list(names), "left": np.concatenate([[0], ends[:-1]]), "right": ends, "y": ["bytes"] * len(names),
        "size": [size / 2**20 for size in sizes], "color": ["#3f77b8", "#3b8a5a", "#b8860b", "#8a8f98"][: len(names)],
    })
    plot = figure(
        width=WIDE, height=140, y_range=["bytes"], x_axis_label="MiB", toolbar_location=None,
        tools=[HoverTool(tooltips=[("", "@name"), ("MiB", "@size{0.000}")])],
    )
    plot.hbar(y="y", left="left", right="right", height=0.7, color="color", source=bars, legend_field="name")
    plot.add_layout(plot.legend[0], "right")
    plot.yaxis.visible = False
    most = max(float(ends[-1]), (report.limit or 0) / 2**20)
    if report.limit is not None:
        plot.add_layout(Span(location=report.limit / 2**20, dimension="height", line_color="#d2694f", line_width=3))
    plot.x_range.start, plot.x_range.end = 0, most * 1.05
    limit = "no limit was set" if report.limit is None else f"the red line is the limit of {report.limit} bytes"
    return plot, f'In all <b id="peak-bytes">{sum(sizes)}</b> bytes; {limit}.'


def _candidates(decision: Decision) -> list[str]:
    """Return the table of candidates, folded."""
    rows = [
        f'<tr><td>{escape(each.algorithm)}</td><td class="number">{escape(seconds_text(each.seconds))}</td>'
        f'<td class="number">{each.words:,.0f}</td><td class="number">{each.held:,.0f}</td>'
        f"<td>{escape(each.why)}</td></tr>"
        for each in decision.considered[:CANDIDATES]
    ]
    head = "<tr><th>algorithm</th><th>predicted</th><th>words</th><th>elements held</th><th>why</th></tr>"
    refused = defaultdict(list)
    for each in decision.refused:
        refused[each.why].append(each.algorithm)
    cannot = "".join(f"<p>Cannot: {escape(', '.join(names))}: {escape(why)}</p>" for why, names in refused.items())
    count = len(decision.considered)
    summary = f"{count} were priced; {escape(decision.algorithm)} was chosen"
    table = f"<table>{head}{''.join(rows)}</table>{cannot}"
    return ["<h2>Candidates</h2>", f'<details id="candidates"><summary>{summary}</summary>{table}</details>']


def traffic_of(records: Sequence[Record], ranks: int) -> NDArray[np.int64]:
    """Return the words that moved from each rank to each other by the traces, which have one repetition."""
    found = np.zeros((ranks, ranks), np.int64)
    for record in records:
        reads = (event for event in record.calls if event.kind == "multiply")  # others tell of transfers once more
        for event in (*reads, *record.transfers):
            for source, to, words in event.facts.get("pairs", ()):
                found[source, to] += words
    return found

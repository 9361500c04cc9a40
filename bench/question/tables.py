"""The tables of the literature's experiments, as they stand in the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

HEAD = (
    "way", "algorithm", "mesh", "seconds", "predicted", "times fastest", "million words", "formula", "messages",
    "MiB of a rank",
)
Record = Mapping[str, Any]


def seconds_of(entry: Mapping[str, Any]) -> float:
    """The median."""
    return float(median(entry["samples"]))


def experiment_lines(records: Sequence[Record]) -> list[str]:
    """A table for each experiment, and how long its local products take alone."""
    found = []
    for record in records:
        if "entries" not in record:
            continue
        extents = "×".join(map(str, record["shape"]))
        found += ["", f"### {record['kind']}, {record['ranks']} ranks, {extents}", "", *table(record["entries"])]
        if "limit" in record:
            found += ["", f"The local products alone take {median(record['limit']):.3g} s."]
    return found


def table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows in the order in which they were given; the fastest is bold."""
    least = min(map(seconds_of, entries))
    rows = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for entry in entries:
        took = seconds_of(entry)
        ratio = f"**{took / least:.2f}**" if took == least else f"{took / least:.2f}"
        cells = [
            entry["name"], entry.get("algorithm", "–"), entry.get("mesh", "–"), f"{took:.3g}",
            f"{predicted:.3g}" if (predicted := entry.get("predicted")) else "–", ratio,
            f"{entry['words'] / 1e6:.1f}", *(_figure(entry, name, unit) for name, unit in (
                ("priced_words", 1e6), ("messages", 0), ("peak_bytes", 2**20),
            )),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _figure(entry: Mapping[str, Any], name: str, unit: float) -> str:
    if name not in entry:
        return "–"
    return f"{entry[name] / unit:.1f}" if unit else str(entry[name])


def experiment_faults(records: Sequence[Record]) -> list[str]:
    """What is wrong, or moved other words than its closed form has."""
    found = []
    for record in records:
        for entry in record.get("entries", ()):
            name = f"{record['case']}: {entry['name']} on {entry.get('mesh', 'its mesh')}"
            found += [f"{name}: wrong"] * (not entry["right"])
            if abs(entry["words"] - entry.get("priced_words", entry["words"])) > 0.5:
                found.append(f"{name}: {entry['words']} words, and {entry['priced_words']:.0f} by its closed form")
    return found

"""Pictures of the tables: who won by how much in each cell, and the literature's experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import measure
from bench.question.cells import COLUMNS, Cell
from bench.question.tables import Record, seconds_of

MOST = 2.0
"""Times the fastest from which on a colour is the darkest."""
WIDTH, ROW = 5.6, 0.34
"""Inches: of a panel, and of a row of it."""


def plot(cells: Sequence[Cell], experiments: Sequence[Record], where: Mapping[str, Any], folder: Path) -> str:
    """Write cells.svg and literature.svg into a folder; return what stood in the way, if anything did."""
    if reason := measure.no_plot(folder):
        return reason
    measured = [cell for cell in cells if cell.is_measured]
    folder.mkdir(exist_ok=True)
    if measured:
        _save(_cells(measured), where, folder / "cells.svg")
    if found := [record for record in experiments if "entries" in record]:
        _save(_experiments(found), where, folder / "literature.svg")
    return ""


def _cells(cells: Sequence[Cell]) -> Any:
    """A panel for each setting: shapes down, families across, times the fastest in colour and in figures."""
    from matplotlib import colormaps

    colours = colormaps["YlGnBu"].with_extremes(bad="0.9")
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    most = max(sum(cell.setting == setting for cell in cells) for setting in settings)
    figure, panels = _panels(len(settings), ROW * most + 1.3)
    for axes, setting in zip(panels, settings, strict=True):
        group = [cell for cell in cells if cell.setting == setting]
        ratios = [[cell.ratios.get(each) for each in COLUMNS] for cell in group]
        axes.imshow(np.array(ratios, float), cmap=colours, vmin=1, vmax=MOST, aspect="auto")
        for y, (cell, row) in enumerate(zip(group, ratios, strict=True)):
            for x, (family, each) in enumerate(zip(COLUMNS, row, strict=True)):
                text = "–" if each is None else f"{each:.2f}"
                is_dark = each is not None and each > (1 + MOST) / 2
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if is_dark else "black",
                          weight="bold" if family == cell.winner else "normal")
        axes.set_xticks(range(len(COLUMNS)), COLUMNS, fontsize=7, rotation=30, ha="right")
        axes.set_yticks(range(len(group)), [cell.shape for cell in group], fontsize=7)
        axes.set_title(setting, fontsize=9)
    figure.suptitle("Time of the best of each family, as a multiple of the fastest (bold)", fontsize=10)
    return figure


def _experiments(records: Sequence[Record]) -> Any:
    """A panel for each experiment: bars of seconds, with the words that moved beside them."""
    most = max(len(record["entries"]) for record in records)
    figure, panels = _panels(len(records), ROW * most + 1.1)
    for axes, record in zip(panels, records, strict=True):
        entries = record["entries"]
        took = [seconds_of(entry) for entry in entries]
        axes.barh(range(len(entries)), took, color="#5b8cc0")
        for y, (each, entry) in enumerate(zip(took, entries, strict=True)):
            axes.text(each, y, f" {each:.3g} s, {entry['words'] / 1e6:.0f} M words", va="center", fontsize=7)
        names = [f"{entry['name']} {entry.get('mesh', '')}".strip() for entry in entries]
        axes.set_yticks(range(len(entries)), names, fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.5 * max(took))
        axes.set_xlabel("seconds", fontsize=7)
        extents = "×".join(map(str, record["shape"]))
        axes.set_title(f"{record['kind']}: {extents} on {record['ranks']} ranks", fontsize=9)
        if "limit" in record:
            axes.axvline(median(record["limit"]), color="0.4", linestyle="--", linewidth=1)
    figure.suptitle("Experiments of the literature; dashed: the local products alone", fontsize=10)
    return figure


def _panels(count: int, height: float) -> tuple[Any, list[Any]]:
    """Return a figure and so many panels of it, two in a row, of a height in inches."""
    from matplotlib import pyplot

    rows = ceil(count / 2)
    figure, grid = pyplot.subplots(rows, 2, figsize=(2 * WIDTH, rows * height), layout="constrained", squeeze=False)
    for axes in grid.flat[count:]:
        axes.axis("off")
    return figure, list(grid.flat[:count])


def _save(figure: Any, where: Mapping[str, Any], file: Path) -> None:
    """Write a picture, with the day and the machine in it."""
    from matplotlib import pyplot, rc_context

    machine = f"{where['date'][:10]}, {where['cpu']}, {where['cores']} cores, {where['blas']}"
    figure.supxlabel(machine, fontsize=7)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": file.name}):  # text stays text, and files repeat
        figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)

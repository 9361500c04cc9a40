"""The predictions and the regrets as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import measure
from bench.policy.report import BAR, WITHIN, WORST, Record, decided, predictions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN = "0.55"
"""Grey."""


def plot(results: Sequence[Record], file: Path) -> str | None:
    """Draw measured against predicted seconds of every candidate, and the regrets by size; what stood in the way."""
    if reason := measure.no_plot(file):
        return reason
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.6), layout="constrained")
    draw_predictions(left, results)
    draw_regrets(right, [result["regret"] for result in decided(results)])
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return None


def draw_predictions(axes: Axes, results: Sequence[Record]) -> None:
    """Every candidate, coloured by its setting; between the dotted lines are the good predictions."""
    found = predictions(results)
    for setting in dict.fromkeys(x.result["setting"] for x in found):
        points = [x.contender for x in found if x.result["setting"] == setting]
        milliseconds: list[list[Any]] = [[1e3 * x[name] for x in points] for name in ("predicted", "seconds")]
        axes.scatter(*milliseconds, s=12, alpha=0.6, label=f"{setting} ({len(points)})")
    axes.set(xscale="log", yscale="log", xlabel="predicted ms", ylabel="measured ms", title="candidates")
    for ratio, style in ((1, "-"), *((bound, ":") for bound in WITHIN)):
        axes.axline((1, 1 / ratio), (10, 10 / ratio), color="black", linewidth=0.8, linestyle=style)
    if found:
        axes.legend(fontsize="small")
    axes.grid(visible=True, alpha=0.3)


def draw_regrets(axes: Axes, regrets: Sequence[float]) -> None:
    """The regrets by size, with their bars."""
    axes.step(range(len(regrets)), sorted(regrets), where="mid", marker=".", color="tab:blue")
    for bar, what in ((BAR, "geometric mean at most"), (WORST, "none above")):
        axes.axhline(bar, color=PLAIN, linestyle="--", linewidth=1, label=f"{what} {bar}")
    axes.set(xlabel="cases, by regret", ylabel="time of the chosen / time of the best", title="regret")
    axes.legend(fontsize="small")
    axes.grid(visible=True, alpha=0.3)

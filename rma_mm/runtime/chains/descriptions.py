"""Descriptions of a chain and its plan, as text."""

from __future__ import annotations

from collections.abc import Sequence

from rma_mm.policy.planner.chain_search import Answer, PricedConversion
from rma_mm.policy.planner.chain_steps import Step
from rma_mm.policy.planner.tables import seconds_text, table


def step_table(steps: Sequence[Step], answer: Answer, chosen: Sequence[tuple[str, float]]) -> str:
    """Return a table of the steps with their algorithms and seconds (`chosen`), placements and conversions."""
    rows = [["", "step", "algorithm", "A", "B", "C", "seconds"]]
    for number, (step, placed) in enumerate(zip(steps, answer.steps, strict=True)):
        rows += [_conversion_row(each) for each in placed.conversions]
        algorithm, seconds = chosen[number]
        count = len(step.factors)
        layouts = [*map(str, placed.layouts[:count]), *[""] * (2 - count), str(placed.layouts[-1])]
        rows.append([str(number + 1), str(step), algorithm, *layouts, seconds_text(seconds)])
    return table(rows + [_conversion_row(each) for each in answer.last])


def _conversion_row(each: PricedConversion) -> list[str]:
    return ["", f"convert {each.name}", "", str(each.source), "to", str(each.target), seconds_text(each.seconds)]


def seconds_line(overlapped: float, apart: float, greedy: float, known: bool, exact: bool) -> str:
    """Return a line on the predicted seconds: with overlap, without it, and for the greedy choice."""
    found = "predicted" if known else "by figures that were not measured here"
    how = "" if exact else " (the best of what was looked at: too many states for all)"
    ratio = greedy / apart if apart else 1.0
    return (
        f"{found} {seconds_text(overlapped)}{how}\n"
        f"one after the other {seconds_text(apart)}; by greedy choice {seconds_text(greedy)}, {ratio:.3g} times as long"
    )

"""Decisions in words: the table of candidates behind `--explain`."""

from __future__ import annotations

from .planner import Candidate


def table(rows: list[list[str]]) -> str:
    """Rows of text in aligned columns; the first row is the head."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def explain(found: list[Candidate], chosen: Candidate, asked: str) -> str:
    """The candidates, cheapest first, with what each moves and why each loser lost."""
    rows = [["algorithm", "A", "B", "C", "words between nodes", "copied within", "read in place", "why"]]
    for candidate in found:
        layouts = [str(layout) for layout in candidate.layouts] if candidate.layouts else ["", "", ""]
        words = candidate.traffic
        figures = (
            [f"{words.between:.0f}", f"{words.within:.0f}", f"{words.in_place:.0f}"] if candidate.layouts else [""] * 3
        )
        rows.append([candidate.row.name, *layouts, *figures, _why(candidate, chosen, asked)])
    return table(rows)


def _why(candidate: Candidate, chosen: Candidate, asked: str) -> str:
    if candidate is chosen:
        return "chosen: it was named" if asked != "auto" else "chosen: it moves least"
    if candidate.rejected:
        return f"cannot: {candidate.rejected}"
    ours, best = candidate.traffic.price, chosen.traffic.price
    if ours < best:
        return "does not fit the memory limit"
    if ours == best:
        return "moves as much, and comes later in the list"
    return f"moves {ours / best:.2f} times the price" if best else "moves words where the chosen one moves none"

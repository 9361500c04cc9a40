"""Decisions in words: the table of candidates behind `--explain`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rma_mm.algorithms.search.t10_points import frontier
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import notations
from rma_mm.policy.model.lower_bounds import least_words
from rma_mm.policy.planner.candidates import Candidate, by_seconds

LITTLE = 0.05  # the share of a difference below which parts are folded into one


def table(rows: list[list[str]]) -> str:
    """Return rows of text in aligned columns; the first row is the head."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def alike(found: Sequence[Candidate], chosen: Candidate) -> list[list[Candidate]]:
    """Return the candidates in groups of which all have one price and one placement, the cheapest first.

    The chosen one is first in its group.
    """
    groups: list[list[Candidate]] = []
    for candidate in sorted(found, key=by_seconds):
        group = next((each for each in groups if not candidate.rejected and each[0].is_like(candidate)), None)
        if group is None:
            groups.append([candidate])
        else:
            group.insert(0 if candidate is chosen else len(group), candidate)
    return groups


def same_lines(groups: Iterable[Sequence[str]]) -> list[str]:
    return [f"the same as {names[0]}: {', '.join(names[1:])}" for names in groups if len(names) > 1]


def explain(found: list[Candidate], chosen: Candidate, asked: str) -> str:
    """Return the candidates, fastest first, with what each takes and moves and why each loser lost."""
    head = ["seconds", "words between nodes", "copied within", "read in place", "messages", "elements held"]
    rows, groups = [["algorithm", "A", "B", "C", *head, "why"]], alike(found, chosen)
    for candidate, *_ in groups:
        layouts, figures = ["", "", ""], [""] * len(head)
        if candidate.layouts:
            words = candidate.traffic
            copied = [" copied" if x in candidate.copied else "" for x in "ABC"]
            layouts = [f"{layout}{note}" for layout, note in zip(candidate.layouts, copied, strict=True)]
            counts = (words.between, words.within, words.in_place, words.messages, words.elements_held)
            figures = [seconds_text(candidate.seconds), *(f"{count:.0f}" for count in counts)]
        rows.append([candidate.algorithm.name, *layouts, *figures, why_lost(candidate, chosen, asked, found)])
    return "\n".join([table(rows), *same_lines([each.algorithm.name for each in group] for group in groups)])


def why_lost(candidate: Candidate, chosen: Candidate, asked: str, found: Sequence[Candidate]) -> str:
    """Return why a candidate was chosen or not. found: all candidates, best first."""
    ours, best = candidate.seconds, chosen.seconds
    if candidate is chosen:
        return f"chosen: {'it was named' if asked != 'auto' else how_fast(chosen, found)}"
    if candidate.rejected:
        return f"cannot: {candidate.rejected}"
    if next(each for each in found if each is candidate or each is chosen) is candidate:
        return "does not fit the memory limit"
    if ours <= best:
        fast = "as fast" if ours == best else f"{percent_text(best / ours - 1)} faster"
        is_late = candidate.is_compiled or not chosen.is_compiled
        return f"{fast}, {'and later in the list' if is_late else 'but repeated calls of it are not compiled'}"
    return f"{percent_text(ours / best - 1)} slower: {_where(candidate, chosen)}"


def how_fast(chosen: Candidate, found: Iterable[Candidate]) -> str:
    """Return how fast a candidate is, relative to all others."""
    least = min(found, key=by_seconds).seconds
    if not 0 < least < chosen.seconds:
        return "the fastest"
    return f"{percent_text(chosen.seconds / least - 1)} slower than the fastest"


def lost_by(candidate: Candidate, chosen: Candidate) -> dict[str, float]:
    """Return how many seconds more each part of a price is, the largest first; they sum to the difference.

    Parts that are less than `LITTLE` of the difference are taken together as "rest".
    """
    parts, best = candidate.parts, chosen.parts
    lost = {name: parts[name] - best[name] for name in sorted(parts, key=lambda each: best[each] - parts[each])}
    least = LITTLE * abs(sum(lost.values()))
    named = {name: seconds for name, seconds in lost.items() if abs(seconds) >= least}
    rest = sum(seconds for name, seconds in lost.items() if name not in named)
    return {**named, "rest": rest} if rest else named


def _where(candidate: Candidate, chosen: Candidate) -> str:
    """Return the parts of the time by which a candidate loses."""
    lost = lost_by(candidate, chosen)
    signed = (f"{name} {'-' if seconds < 0 else '+'}{seconds_text(abs(seconds))}" for name, seconds in lost.items())
    return ", ".join(signed)


def percent_text(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


def seconds_text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def frontier_table(shape: tuple[int, int, int], size: int) -> str:
    """T10's plans that none beats in both memory and words: elements that a rank holds, words that it moves.

    The words to make copies, from placements that hold each element once, stand apart.
    """
    rows = [["plan", "ranks m,n,k", "rings A,B,C", "elements held", "words moved", "words to place", ""]]
    plans = frontier(shape, size)
    for point in plans:
        m, n, _ = point.ranks
        like = "Cannon's placement" if m == n and point.rings == (m, n, 1) and m > 1 else ""
        ranks, rings = (",".join(map(str, each)) for each in (point.ranks, point.rings))
        figures = [str(each(shape)) for each in (point.elements_held, point.moved, point.placing)]
        rows.append([f"t10_rotate:{point}", ranks, rings, *figures, like])
    return table(rows)


def words_line(words: list[int], shape: tuple[int, int, int], memory: int | None) -> str:
    """Return a line on the words that move, beside the lower bound for the busiest rank."""
    ranks = sum(count > 0 for count in words) or 1
    least = least_words(shape, ranks, memory)
    bound = f"lower bound for {ranks} ranks: {least:.0f}"
    return f"words       {sum(words)} in all, {max(words)} of the busiest rank ({bound})"


def files_line(nbytes: int, least: float) -> str:
    return f"files       {nbytes} bytes read ({nbytes / least if least else 1:.2f} of the lower bound: {least:.0f})"


def written(layouts: dict[str, Layout], mesh: MeshShape, shapes: dict[str, tuple[int, int]]) -> str:
    """Return the placements in every notation that can express them."""
    found = {x: notations(layout, mesh, shapes[x]) for x, layout in layouts.items()}
    names = [name for name in found["A"] if name != "rma_mm"]
    rows = [["placement", *names], *([x, *(found[x][name].text or "-" for name in names)] for x in found)]
    lacking: dict[str, list[str]] = {}
    for x, name in ((x, name) for name in names for x in found if found[x][name].reason):
        lacking.setdefault(found[x][name].reason, []).append(x)
    return "\n".join([table(rows), *(f"{', '.join(letters)}: {reason}" for reason, letters in lacking.items())])

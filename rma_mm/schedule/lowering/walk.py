"""A rank's walk along one dimension in which every operand is fetched at its own grain.

Positions along the walk count from where the rank starts, so an owner's circular window is one interval. An operand's
*chunks* are what moves at once: an owner's interval, or a piece of it, or all of it. A *turn* is what is multiplied at
once: it lies within one chunk of each operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from rma_mm.geometry.span import Region, Span, even_part
from rma_mm.schedule.lowering import fitted as limits
from rma_mm.schedule.lowering.boxes import Boxes
from rma_mm.schedule.row import OPERAND_DIMS, side


@dataclass(frozen=True)
class Turn:
    """One multiply of the walk."""

    step: int
    """Where it begins: a global index of the walked dimension."""
    span: Span
    """What is multiplied of it."""
    chunks: dict[str, Span]
    """Operand → the chunk that `span` is part of."""
    ends: frozenset[str]
    """Operands whose chunk ends here."""


def turns(boxes: Boxes, rank: int, box: Region, start: int) -> Iterator[Turn]:
    """The turns of a rank's box, whose walk starts `start` indices into it. All ranks that walk alike cut alike."""
    dim, row = boxes.fitted.dim, boxes.fitted.row
    extent = len(box[dim])
    edges = {x: _edges(boxes, rank, x, box, start) for x in "ABC"}
    if any(narrow for _, narrow in edges.values()):
        common = _fused(sorted({edge for found, _ in edges.values() for edge in found}))
        edges = {x: (common if dim in OPERAND_DIMS[x] and x not in row.whole else found, True)
                 for x, (found, _) in edges.items()}  # fmt: skip

    def at(begin: int, end: int) -> Span:
        return box[dim].take(Span.window(extent, begin + start, end - begin))

    wrap = {extent - start} if start else set()  # what goes round the end is not dense in a slot
    cuts = sorted({edge for found, _ in edges.values() for edge in found} | wrap)
    for begin, end in pairwise(cuts):
        inside = {x: _around(found, begin) for x, (found, _) in edges.items()}
        chunks = {x: at(*interval) for x, interval in inside.items()}
        ends = frozenset(x for x, interval in inside.items() if interval[1] == end)
        yield Turn(at(begin, begin + 1).start, at(begin, end), chunks, ends)


def _edges(boxes: Boxes, rank: int, x: str, box: Region, start: int) -> tuple[list[int], bool]:
    """Where the chunks of an operand begin and end, and whether they are an owner's scattered blocks."""
    dim, row = boxes.fitted.dim, boxes.fitted.row
    extent = len(box[dim])
    if not boxes.fitted.cuts(x, dim) or (x not in row.grouped and boxes.is_own(rank, x, side(box, x))):
        return [0, extent], False
    spans = [box[dim].locate(s) for s in boxes.owner_spans(rank, x, box, dim)]
    if not spans:
        return [0, extent], False
    longest = max(map(len, spans))
    pieces = max(min(row.pieces, *map(len, spans), longest), -(-longest // boxes.fitted.width))
    edges = {0, extent}
    scattered = False
    for span in spans:
        intervals = _shifted(span, start, extent)
        scattered |= len(intervals) > 2
        for begin, end in intervals:
            count = -(-(end - begin) * pieces // longest)
            edges |= {begin + even_part(end - begin, n, count).stop for n in range(count)} | {begin}
    return sorted(edges), scattered


def _shifted(span: Span, start: int, extent: int) -> list[tuple[int, int]]:
    """The intervals of the walk that positions in the box make up."""
    runs = [(a - start, b - start) for a, b in span.runs]
    parts = [(a + extent, b + extent) if b <= 0 else (a, b) for a, b in runs if b <= 0 or a >= 0]
    for a, b in runs:
        if a < 0 < b:
            parts += [(a + extent, extent), (0, b)]
    return list(Span(parts).runs)


def _fused(edges: list[int]) -> list[int]:
    """The edges that leave at least NARROW indices between them."""
    kept = edges[:1]
    for edge in edges[1:-1]:
        if edge - kept[-1] >= limits.NARROW and edges[-1] - edge >= limits.NARROW:
            kept.append(edge)
    return [*kept, *edges[-1:]]


def _around(edges: list[int], at: int) -> tuple[int, int]:
    """The interval between edges that contains `at`."""
    return next((begin, end) for begin, end in pairwise(edges) if begin <= at < end)

"""A rank's walk along one dimension in which every operand is fetched at its own grain.

Positions along the walk count from where the rank starts, so an owner's circular window is one interval. An operand's
*chunks* are what moves at once: an owner's interval, or a piece of it, or all of it. A *turn* is what is multiplied at
once: it lies within one chunk of each operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from rma_mm.classes import dataclass
from rma_mm.geometry.span import Region, Span, even_part
from rma_mm.schedule.algorithm import OPERAND_DIMS, OWNERS, Cuts, side
from rma_mm.schedule.lowering import decisions as limits
from rma_mm.schedule.lowering.boxes import Boxes, from_multiples


@dataclass(frozen=True)
class WalkStep:
    step: int  # first index of the step in the walked dimension, global
    span: Span  # what is multiplied of it
    chunks: dict[str, Span]  # operand → the chunk that `span` is part of
    ends: frozenset[str]  # operands whose chunk ends here


Interval = tuple[int, int]  # where a piece of the walk begins and ends


def walk_steps(boxes: Boxes, rank: int, box: Region, start: int) -> Iterator[WalkStep]:
    """Yield the steps of a rank's box, whose walk starts `start` indices into it.

    All ranks that walk alike cut alike.
    """
    decisions = boxes.decisions
    dim, algorithm = decisions.dim, decisions.algorithm
    extent = len(box[dim])
    edges = {x: _edges(boxes, rank, x, box, start) for x in (*algorithm.operands, "C")}
    if any(narrow for _, narrow in edges.values()):
        common = _fused(sorted({edge for found, _ in edges.values() for edge in found}))
        keep = [
            x
            for x in edges
            if dim not in OPERAND_DIMS[x] or x in algorithm.prefetch_all or OWNERS not in decisions.grain(x)
        ]
        edges = {x: (found if x in keep else common, True) for x, (found, _) in edges.items()}

    def at(begin: int, end: int) -> Span:
        return box[dim].take(Span.window(extent, begin + start, end - begin))

    wrap = {extent - start} if start else set()  # what goes round the end is not dense in a slot
    cuts = sorted({edge for found, _ in edges.values() for edge in found} | wrap)
    for begin, end in pairwise(cuts):
        inside = {x: _around(found, begin) for x, (found, _) in edges.items()}
        chunks = {x: at(*interval) for x, interval in inside.items()}
        ends = frozenset(x for x, interval in inside.items() if interval[1] == end)
        yield WalkStep(at(begin, begin + 1).start, at(begin, end), chunks, ends)


def _edges(boxes: Boxes, rank: int, x: str, box: Region, start: int) -> tuple[list[int], bool]:
    """Return the bounds of an operand's chunks, and whether they are an owner's scattered blocks."""
    decisions = boxes.decisions
    dim, extent = decisions.dim, len(box[decisions.dim])
    if not extent or not decisions.cuts(x, dim):
        return [0, extent], False
    if not decisions.is_grouped(x) and boxes.is_own(rank, x, side(box, x)):
        return [0, extent], False
    grain = decisions.grain(x)
    is_by_owner = grain[0] == OWNERS
    spans = [box[dim].locate(s) for s in boxes.owner_spans(rank, x, box, dim)] if is_by_owner else [
        Span([piece]) for piece in _finer([(0, extent)], grain, [extent])
    ]
    walked = [_shifted(span, start, extent) for span in spans]
    pieces = [interval for intervals in walked for interval in intervals]
    if is_by_owner and pieces:
        pieces = _finer(pieces, grain[1:], list(map(len, spans)))
        longest = max(map(_length, pieces))
        if x in decisions.problem.chunks:
            parts = map(box[dim].locate, from_multiples(box[dim], decisions.width))
            pieces = [interval for part in parts for interval in _shifted(part, start, extent)]
        else:
            pieces = _evenly(pieces, -(-longest // decisions.width), longest)
    edges = {0, extent, *(edge for piece in pieces for edge in piece)}
    return sorted(edges), any(len(intervals) > 2 for intervals in walked)


def _finer(pieces: list[Interval], cuts: Cuts, lengths: list[int]) -> list[Interval]:
    """Intervals cut further by each of the cuts in turn. lengths: of what they are, or are parts of."""
    for cut in cuts:
        if cut.size:
            pieces = [(at, min(at + cut.size, end)) for begin, end in pieces for at in range(begin, end, cut.size)]
        else:
            pieces = _evenly(pieces, min(int(cut.parts), *lengths), max(lengths))
        lengths = list(map(_length, pieces))
    return pieces


def _evenly(pieces: list[Interval], parts: int, longest: int) -> list[Interval]:
    """Intervals in even parts: so many of the longest, and of others in proportion."""
    counted = [(begin, end - begin, -(-(end - begin) * parts // longest)) for begin, end in pieces]
    return [
        (begin + part.start, begin + part.stop)
        for begin, length, count in counted
        for part in (even_part(length, n, count) for n in range(count))
    ]


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def _shifted(span: Span, start: int, extent: int) -> list[tuple[int, int]]:
    """Return the intervals of the walk that positions in the box make up."""
    runs = [(a - start, b - start) for a, b in span.runs]
    parts = [(a + extent, b + extent) if b <= 0 else (a, b) for a, b in runs if b <= 0 or a >= 0]
    for a, b in runs:
        if a < 0 < b:
            parts += [(a + extent, extent), (0, b)]
    return list(Span(parts).runs)


def _fused(edges: list[int]) -> list[int]:
    """Return the edges that leave at least NARROW indices between them."""
    kept = edges[:1]
    for edge in edges[1:-1]:
        if edge - kept[-1] >= limits.NARROW and edges[-1] - edge >= limits.NARROW:
            kept.append(edge)
    return [*kept, *edges[-1:]]


def _around(edges: list[int], at: int) -> tuple[int, int]:
    return next((begin, end) for begin, end in pairwise(edges) if begin <= at < end)

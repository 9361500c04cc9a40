"""Spans that several operands cut together: into how many panels, and whose parts are then put together in one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import lcm

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.policy.model.spans import DimSpans, Figures, Numbers

FEW = 2**14  # edges times spans up to which all are looked at one by one


@dataclass(frozen=True, eq=False)
class Joint:
    """Pieces that each distinct wanted span is cut into."""

    whole: Figures  # pieces where every change of an owner cuts
    fused: Figures  # pieces of which none is narrow
    narrowest: Figures  # indices of the narrowest piece before they are fused
    repacked: tuple[Figures, ...]
    """The share of the span, by operand, in fused pieces of which several owners hold parts."""
    interleaved: tuple[Figures, ...]
    """By operand: 1 if a piece skips some of an owner's indices between others that it takes, else 0."""


def joint(wanted: DimSpans, helds: Sequence[DimSpans], parts: Sequence[Figures], least: int) -> Joint:
    """Return the spans that are wanted, cut where an owner changes. parts: those of each operand that a span meets."""
    count = wanted.count
    edges = [held.edges for held in helds if held.edges is not None]
    if not helds:
        one = np.ones(count)
        return Joint(one, one, wanted.lengths, (), ())
    if len(edges) == len(helds) and count * sum(map(len, edges)) <= FEW:
        return _by_edges(wanted, edges, least)
    return _by_counts(wanted, helds, parts, least)


def _by_edges(wanted: DimSpans, edges: Sequence[Numbers], least: int) -> Joint:
    """Blocks, looked at one by one."""
    changes = [each.tolist() for each in edges]
    ends = zip(wanted.low.tolist(), wanted.high.tolist(), strict=True)
    rows = [_span_by_edges(low, high, changes, least) for low, high in ends]
    whole, fused, narrowest, *repacked = (np.array(column, float) for column in zip(*rows, strict=True))
    return Joint(whole, fused, narrowest, tuple(repacked), (np.zeros(wanted.count),) * len(edges))


def _span_by_edges(
    low: list[int], high: list[int], edges: Sequence[list[int]], least: int
) -> tuple[float, ...]:
    """(pieces, fused pieces, narrowest, each operand's repacked share) of one span, which may have several runs."""
    runs = sorted((a, b) for a, b in zip(low, high, strict=True) if a < b)
    own = [{edge for a, b in runs for edge in each[bisect_right(each, a) : bisect_left(each, b)]} for each in edges]
    bounds = sorted({edge for run in runs for edge in run}.union(*own))
    ends = {a: b for (_, a), (b, _) in pairwise(runs)}  # between runs lies nothing
    inside = [(a, b) for a, b in pairwise(bounds) if ends.get(a) != b]
    joined: list[list[int]] = []  # where the pieces of each panel begin
    widths: list[int] = []
    for begin, end in inside:
        if joined and min(end - begin, widths[-1]) < least:
            joined[-1].append(begin)
            widths[-1] += end - begin
        else:
            joined.append([begin])
            widths.append(end - begin)
    panels = [(set(begins[1:]), width) for begins, width in zip(joined, widths, strict=True)]
    repacked = (sum(width for begins, width in panels if not begins.isdisjoint(each)) for each in own)
    narrowest = min((end - begin for begin, end in inside), default=0)
    return max(1, len(inside)), max(1, len(joined)), narrowest, *(each / max(1, sum(widths)) for each in repacked)


def _by_counts(wanted: DimSpans, helds: Sequence[DimSpans], parts: Sequence[Figures], least: int) -> Joint:
    """Blocks that are dealt out, or too many to be looked at: by how many there are."""
    parts = [np.maximum(1.0, each) for each in parts]  # of an empty span too
    lengths = np.maximum(1.0, wanted.lengths)
    dealt, combs, blocks, is_comb = 0, np.ones(wanted.count), np.ones(wanted.count), np.zeros(wanted.count, np.bool_)
    for held, each in zip(helds, parts, strict=True):
        if held.edges is None:
            dealt += 1
            combs = np.array([lcm(int(a), int(b)) for a, b in zip(combs, each, strict=True)], float)
            is_comb |= lengths > held.run * each  # an owner has several blocks of one span
        else:
            blocks = joint_pieces(blocks, each)
    whole = np.minimum(lengths, combs * blocks)
    width = lengths / whole
    fused = np.where(width >= least, whole, 1.0)  # what is narrow joins its neighbour, here all
    is_comb &= fused == whole
    mixed = [is_comb & (whole > each) & (dealt > (held.edges is None)) for held, each in zip(helds, parts, strict=True)]
    joined = [(fused < whole) & (each > 1) for each in parts]
    return Joint(whole, fused, width, *(tuple(each.astype(np.float64) for each in flags) for flags in (joined, mixed)))


def joint_pieces(one: Figures, other: Figures) -> Figures:
    """Pieces into which two even cuts of the same indices, into the given number of parts each, cut them together."""
    whole = np.gcd(one.astype(np.int64), other.astype(np.int64))
    return np.asarray(one + other - whole)

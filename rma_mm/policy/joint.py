"""Spans that several operands cut together: into how many panels, and whose parts are then put together in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np

from .marks import Figures, Marks, Numbers

FEW = 2**14
"""Edges times spans up to which all are looked at one by one."""


@dataclass(frozen=True, eq=False)
class Joint:
    """What becomes of each of the different spans that are wanted."""

    whole: Figures
    """Pieces where every change of an owner cuts."""
    fused: Figures
    """Pieces of which none is narrow."""
    narrowest: Figures
    """Indices of the narrowest piece before they are fused."""
    torn: tuple[Figures, ...]
    """For each operand: the share of the span that lies in fused pieces which several of its owners have parts of."""
    combed: tuple[Figures, ...]
    """For each operand: 1 where a piece takes some of an owner's indices and leaves out others between them, or 0."""


def joint(wanted: Marks, helds: Sequence[Marks], parts: Sequence[Figures], least: int) -> Joint:
    """The spans that are wanted, cut where an owner changes. parts: those of each operand that a span meets."""
    count = wanted.count
    edges = [held.edges for held in helds if held.edges is not None]
    if not helds:
        one = np.ones(count)
        return Joint(one, one, wanted.lengths, (), ())
    if len(edges) == len(helds) and count * sum(map(len, edges)) <= FEW:
        return _by_edges(wanted, edges, least)
    return _by_counts(wanted, helds, parts, least)


def _by_edges(wanted: Marks, edges: Sequence[Numbers], least: int) -> Joint:
    """Blocks, looked at one by one."""
    changes = [each.tolist() for each in edges]
    ends = zip(wanted.low.tolist(), wanted.high.tolist(), strict=True)
    rows = [_span_by_edges(low, high, changes, least) for low, high in ends]
    whole, fused, narrowest, *torn = (np.array(column, float) for column in zip(*rows, strict=True))
    return Joint(whole, fused, narrowest, tuple(torn), (np.zeros(wanted.count),) * len(edges))


def _span_by_edges(
    low: list[int], high: list[int], edges: Sequence[list[int]], least: int
) -> tuple[float, ...]:
    """(pieces, fused pieces, narrowest, each operand's torn share) of one span, which may have several runs."""
    runs = sorted((a, b) for a, b in zip(low, high, strict=True) if a < b)
    own = [{edge for edge in each if any(a < edge < b for a, b in runs)} for each in edges]
    bounds = sorted({edge for run in runs for edge in run}.union(*own))
    inside = [(a, b) for a, b in pairwise(bounds) if any(x <= a < y for x, y in runs)]
    fused: list[list[tuple[int, int]]] = []
    for piece in inside:
        if fused and min(_width([piece]), _width(fused[-1])) < least:
            fused[-1].append(piece)
        else:
            fused.append([piece])
    wide = [sum(_width(group) for group in fused if any(a in each for a, _ in group[1:])) for each in own]
    narrowest = min((_width([piece]) for piece in inside), default=0)
    return max(1, len(inside)), max(1, len(fused)), narrowest, *(each / max(1, _width(inside)) for each in wide)


def _width(pieces: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in pieces)


def _by_counts(wanted: Marks, helds: Sequence[Marks], parts: Sequence[Figures], least: int) -> Joint:
    """Blocks that are dealt out, or too many to be looked at: by how many there are."""
    parts = [np.maximum(1.0, each) for each in parts]  # of an empty span too
    dealt = [each for held, each in zip(helds, parts, strict=True) if held.edges is None]
    combs, blocks = np.ones(wanted.count), np.ones(wanted.count)
    for each in dealt:
        combs = np.array([lcm(int(a), int(b)) for a, b in zip(combs, each, strict=True)], float)
    for held, each in zip(helds, parts, strict=True):
        if held.edges is not None:
            blocks = blocks + each - np.gcd(blocks.astype(np.int64), each.astype(np.int64))
    lengths = np.maximum(1.0, wanted.lengths)
    whole = np.minimum(lengths, combs * blocks)
    width = lengths / whole
    fused = np.where(width >= least, whole, 1.0)  # what is narrow joins its neighbour, here all
    combed = [(whole > each) & (len(dealt) > (held.edges is None)) for held, each in zip(helds, parts, strict=True)]
    torn = [(fused < whole) & (each > 1) for each in parts]
    return Joint(whole, fused, width, *(tuple(each.astype(np.float64) for each in flags) for flags in (torn, combed)))


__all__ = ["Joint", "joint"]

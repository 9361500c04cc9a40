"""Find the pieces into which a walk's boxes are cut, and the operands that are then put together from several parts.

As `schedule.lowering.boxes` and `walk` cut one rank's box into spans, except for all ranks at once, and by counts
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.geometry.span import even_part
from rma_mm.policy.model.joint_cuts import joint_pieces
from rma_mm.policy.model.locality import RankSample, Spread, rank_sample
from rma_mm.policy.model.spans import DimSpans, Figures, spans_of
from rma_mm.policy.model.traffic import LocalWork
from rma_mm.schedule.algorithm import OPERAND_DIMS, OWNERS
from rma_mm.schedule.lowering import decisions as limits
from rma_mm.schedule.lowering.decisions import LoweringDecisions, repackings, touched
from rma_mm.schedule.lowering.syrk import Halves, halves_of

UNCUT = 1e12  # indices of a panel that is never cut

Pieces = tuple[Figures, Figures, Figures]  # into how many each rank's m, n and k are cut
Repacked = dict[str, Figures]
"""Operand → the share that a rank puts together in slots, since no multiply is cut where the owner changes."""


class WorkBoxes:
    """The boxes of (m, n, k) of the sampled ranks, and the sources of their operands."""

    def __init__(self, decisions: LoweringDecisions) -> None:
        self.decisions = decisions
        self.sample: RankSample = rank_sample(decisions.problem.mesh)
        self.halves = halves_of(decisions)
        self.spans = [
            self.sample.spans(decisions.work, dim, extent) for dim, extent in enumerate(decisions.problem.shape)
        ]
        if self.halves:
            self.spans[:2] = self.halved(self.halves)
        self.has_place = self.sample.holds(decisions.work)
        m, n, k = (spans.each > 0 for spans in self.spans)
        self.has_work: NDArray[np.bool_] = self.has_place & m & n & k

    def halved(self, halves: Halves) -> list[DimSpans]:
        """Return the rows and columns of the products of a symmetric C."""
        boxes = [halves.work(rank, 0) for rank in self.sample.ranks.tolist()]
        extent = halves.shape[0]
        return [spans_of([box[dim] for box in boxes], extent) for dim in (0, 1)]

    def face(self, x: str) -> tuple[DimSpans, DimSpans]:
        rows, cols = OPERAND_DIMS[x]
        return self.spans[rows], self.spans[cols]

    def spread(self, x: str) -> Spread:
        """Return the sources of the operand's parts that boxes need."""
        return self.sample.spread(self.decisions.layout(x), self.decisions.problem.extent(x), self.face(x), self.who(x))

    def who(self, x: str) -> NDArray[np.bool_]:
        """Return which ranks need parts of an operand; those that reduce C may add zeros to it."""
        return self.has_place if x == "C" and self.decisions.algorithm.result == "reduce" else self.has_work

    def alike(self, x: str) -> Figures:
        """Return the number of ranks of its node, the rank included, that need the same part."""
        return self.sample.alike(self.face(x), self.who(x))

    def sharers(self, x: str) -> Figures | float:
        return self.alike(x) if self.decisions.may_share else 1.0

    @cached_property
    def extents(self) -> tuple[Figures, Figures, Figures]:
        """m, n and k of each box; zeros where one is."""
        count = self.sample.count
        m, n, k = (spans.each[:count] * self.has_work[:count] for spans in self.spans)
        return m, n, k


class TaskBoxes(WorkBoxes):
    """Boxes of the queue, which fall to any rank: as many as ranks are sampled, drawn evenly along each dimension."""

    def __init__(self, decisions: LoweringDecisions, counts: Sequence[int]) -> None:
        """counts: boxes along m, n and k."""
        super().__init__(decisions)
        drawn = len(self.sample.ranks)
        self.spans = [
            spans_of([even_part(extent, at * parts // drawn, max(1, parts)) for at in range(drawn)], extent)
            for extent, parts in zip(decisions.problem.shape, counts, strict=True)
        ]
        self.has_place = self.has_work = np.ones(drawn, np.bool_)


def split_work(boxes: WorkBoxes, spreads: dict[str, Spread]) -> tuple[LocalWork, Figures, Repacked]:
    """Return the work of a walk in pieces, its number of steps, and the operands repacked into slots.

    Of what is in reach some is copied together where that is worth it.
    """
    decisions, sample, cutter = boxes.decisions, boxes.sample, _Cutter(boxes, spreads)
    pieces, repacked = cutter.pieces("")
    crossed = [x for x, spread in spreads.items() if max(cuts.max() for cuts in spread.cuts) > 1]
    if crossed and decisions.may_repack:
        options = repackings(crossed)
        found = [(pieces, repacked), *map(cutter.pieces, options[1:])]
        words = np.array([touched(boxes.extents, each, x) for (each, _), x in zip(found, options, strict=True)])
        best = np.where(words[0] - words.min(axis=0) >= limits.WORTH, words.argmin(axis=0), 0)
        m, n, k = (np.choose(best, [each[dim] for each, _ in found]) for dim in range(3))
        pieces, repacked = (m, n, k), {x: np.choose(best, [each[x] for _, each in found]) for x in repacked}
    columns = boxes.extents[1] / pieces[1]
    if decisions.by_chunks and not decisions.is_here:
        pieces = summed_apart(boxes, pieces)
    if decisions.is_here:
        mine = sample.parts(decisions.layout("C"), decisions.problem.extent("C"))[1].each[: sample.count]
        columns = np.where(boxes.has_work[: sample.count], mine, columns)
    return LocalWork(boxes.extents, pieces, columns), pieces[decisions.dim], repacked


def summed_apart(boxes: WorkBoxes, pieces: Pieces) -> Pieces:
    """The pieces where groups sum C up, for which a rank has one sum for each owner of a part that is a block."""
    decisions, (m, n, k) = boxes.decisions, pieces
    found = boxes.spread("C")
    if "C" not in decisions.algorithm.grouped or any(
        (found.owner_changes[at] > 1.5 * found.cuts[at]).any() for at in (0, 1)
    ):
        return pieces
    down, across = (np.maximum(1.0, found.cuts[at]) if at != decisions.dim else np.ones_like(m) for at in (0, 1))
    return m * down, n * across, k


@dataclass(frozen=True)
class _Cutter:
    """Cuts boxes where the owners of operands change."""

    boxes: WorkBoxes
    spreads: dict[str, Spread]

    def pieces(self, copied: str) -> tuple[Pieces, Repacked]:
        """Return the pieces along each dimension if the operands in `copied` cut nothing, and which ranks repack."""
        decisions, spreads = self.boxes.decisions, self.spreads
        repacked = {x: np.zeros(self.boxes.sample.count) for x in spreads}
        found = []
        for dim, extent in enumerate(self.boxes.extents):
            cutters = [x for x in spreads if decisions.cuts(x, dim)]
            in_slots = set(cutters) if decisions.by_chunks and dim != decisions.dim else set(cutters) & set(copied)
            for x in in_slots:
                repacked[x] = np.maximum(repacked[x], spreads[x].cuts[OPERAND_DIMS[x].index(dim)] > 1)
            each = self.parted(dim, [x for x in cutters if x not in in_slots], repacked)
            if dim == decisions.dim:
                each = np.maximum(each, np.ceil(extent / self.longest))
            found.append(each)
        m, n, k = found
        return (m, n, k), repacked

    def parted(self, dim: int, cutters: list[str], repacked: Repacked) -> Figures:
        """Return the pieces between changes of owners, merging narrow ones; add the ranks that repack to `repacked`."""
        decisions, sample, wanted = self.boxes.decisions, self.boxes.sample, self.boxes.spans[dim]
        ats = {x: OPERAND_DIMS[x].index(dim) for x in cutters}
        if dim == decisions.dim and decisions.by_chunks:
            return self.chunks(ats)
        helds = tuple(sample.spans(decisions.read.layout(x), at, wanted.extent) for x, at in ats.items())
        joint = sample.joint(wanted, helds, limits.NARROW)
        of = wanted.of[: sample.count]
        if dim == decisions.dim:
            for x, is_repacked, is_interleaved in zip(cutters, joint.repacked, joint.interleaved, strict=True):
                repacked[x] = np.maximum(repacked[x], np.maximum(is_repacked, is_interleaved)[of])
            return np.asarray(joint.fused[of])
        is_wide = joint.narrowest[of] >= limits.NARROW
        for (x, at), is_interleaved in zip(ats.items(), joint.interleaved, strict=True):
            repacked[x] = np.maximum(repacked[x], np.where(is_wide, is_interleaved[of], self.spreads[x].cuts[at] > 1))
        return np.where(is_wide, joint.whole[of], 1.0)

    def chunks(self, ats: dict[str, int]) -> Figures:
        """Pieces of the walk where every operand moves at its own grain. ats: which dimension of each operand it is."""
        decisions = self.boxes.decisions
        spreads = dict(self.spreads)
        if decisions.cuts("C", decisions.dim):
            spreads["C"], ats = self.boxes.spread("C"), ats | {"C": OPERAND_DIMS["C"].index(decisions.dim)}
        turns = {x: spreads[x].owner_changes[at] for x, at in ats.items()}
        extent = np.maximum(1.0, self.boxes.extents[decisions.dim])
        once = np.ones(self.boxes.sample.count)
        found = once
        for x, each in turns.items():
            found = joint_pieces(found, each) if OWNERS in decisions.grain(x) else found
        owned = found
        if any((turns[x] > 2 * spreads[x].cuts[at]).any() for x, at in ats.items()):  # scattered ones are fused
            owned = np.minimum(found, np.maximum(1.0, np.floor(extent / limits.NARROW)))
        found = owned
        for x in turns:
            grain = decisions.grain(x)
            pieces = owned if OWNERS in grain else once
            for cut in grain:
                length = extent / pieces  # parts are cut alike, so into no more than the shortest has indices
                parts = np.clip(np.floor(length), 1, max(1, int(cut.parts)))
                pieces = pieces * (np.ceil(length / cut.size) if cut.size else parts)
            pieces = np.minimum(pieces, extent)  # what cuts owners' parts further cuts where they end, too
            found = np.maximum(found, pieces) if OWNERS in grain else joint_pieces(found, pieces)
        return found

    @cached_property
    def longest(self) -> float:
        """The most indices of a panel: as many as there are where all is read in place."""
        decisions = self.boxes.decisions
        is_whole = decisions.loads_all and not any(spread.between.any() for spread in self.spreads.values())
        by_owner = [
            x for x in self.spreads if x not in decisions.algorithm.prefetch_all and OWNERS in decisions.grain(x)
        ]
        return UNCUT if is_whole or not by_owner else float(decisions.width)

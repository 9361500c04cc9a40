"""Into what pieces the boxes of a walk are cut, and which operands are then put together from several owners' parts."""

from __future__ import annotations

import numpy as np

from rma_mm.policy.model.footing import Footing
from rma_mm.policy.model.joint_cuts import together
from rma_mm.policy.model.locality import Spread
from rma_mm.policy.model.spans import Figures
from rma_mm.policy.model.traffic import Work
from rma_mm.schedule.lowering import boxes
from rma_mm.schedule.row import OPERAND_DIMS

UNCUT = 1e12
"""Indices of a panel that is never cut."""


class Cutting(Footing):
    """One row applied to one problem: as `schedule.lowering.boxes` cuts it, for all ranks at once."""

    torn: dict[str, Figures]
    """Operand → the share that a rank puts together in slots, since no multiply is cut where the owner changes."""

    def cut(self, spreads: dict[str, Spread]) -> tuple[Work, Figures]:
        """Into how many pieces boxes are cut along each dimension, and the turns of the walk."""
        count = self.crowd.count
        m, n, k = (marks.each[:count] * self.has_work[:count] for marks in self.marks)
        pieces, self.torn = self.loosened((m, n, k), spreads)
        columns = n / pieces[1]
        if self.row.result == "here":
            columns = np.where(self.has_work[:count], self.marks_of(self.problem.target, "C")[1].each[:count], columns)
        return Work((m, n, k), pieces, columns), pieces[self.dim]

    def loosened(
        self, extents: tuple[Figures, Figures, Figures], spreads: dict[str, Spread]
    ) -> tuple[tuple[Figures, Figures, Figures], dict[str, Figures]]:
        """The pieces, and who is torn; of what is in reach some is copied together where that is worth it."""
        pieces, torn = self.pieces(extents, spreads, "")
        cut = [x for x, spread in spreads.items() if max(cuts.max() for cuts in spread.cuts) > 1]
        if not cut or not self.may_loosen:
            return pieces, torn
        m, n, k = extents
        faces = {"A": m * k, "B": k * n}
        first = best = self.words(extents, pieces, "")
        for loose in (*cut, *(["AB"] if len(cut) == 2 else [])):
            others, also = self.pieces(extents, spreads, loose)
            words = self.words(extents, others, loose)
            is_better = (words < best) & (first - words >= boxes.WORTH)
            best = np.where(is_better, words, best)
            a, b, c = (np.where(is_better, new, old) for new, old in zip(others, pieces, strict=True))
            pieces = a, b, c
            torn = {x: np.where(is_better & (faces[x] > 0), also[x], torn[x]) for x in torn}
        return pieces, torn

    @property
    def may_loosen(self) -> bool:
        """Whether all is read where it lies."""
        is_alone = self.crowd.mates is None and self.problem.in_place == "AB" and not self.row.grouped
        return self.row.result == "here" and is_alone and self.width >= boxes.WIDTH

    def words(
        self, extents: tuple[Figures, Figures, Figures], pieces: tuple[Figures, Figures, Figures], loose: str
    ) -> Figures:
        """Words to and from memory: every part of k touches C again, every part of m reads B, every part of n A."""
        (m, n, k), (cut_m, cut_n, cut_k) = extents, pieces
        copied = 2 * sum({"A": m * k, "B": k * n}[x] for x in loose)
        return np.asarray(cut_n * m * k + cut_m * k * n + 2 * cut_k * m * n + copied)

    def pieces(
        self, extents: tuple[Figures, Figures, Figures], spreads: dict[str, Spread], loose: str
    ) -> tuple[tuple[Figures, Figures, Figures], dict[str, Figures]]:
        """Pieces along each dimension where the operands in `loose` cut nothing, and who is torn."""
        torn = {x: np.zeros(self.crowd.count) for x in spreads}
        found = []
        for dim, extent in enumerate(extents):
            cutters = [x for x in spreads if self.cuts(x, dim)]
            for x in cutters:
                if x in loose:
                    torn[x] = np.maximum(torn[x], spreads[x].cuts[OPERAND_DIMS[x].index(dim)] > 1)
            each = self.parted(dim, [x for x in cutters if x not in loose], spreads, torn)
            if dim == self.dim:
                each = np.maximum(each, np.ceil(extent / self.longest(spreads)))
                each = np.maximum(each, np.minimum(self.row.pieces * each, np.maximum(1, extent)))
            found.append(each)
        m, n, k = found
        return (m, n, k), torn

    def cuts(self, x: str, dim: int) -> bool:
        """Whether pieces along a dimension end where an operand's owners change."""
        if dim not in OPERAND_DIMS[x]:
            return False
        return x not in self.row.whole if dim == self.dim else x not in self.row.grouped

    def parted(self, dim: int, cutters: list[str], spreads: dict[str, Spread], torn: dict[str, Figures]) -> Figures:
        """Pieces between changes of owners, of which none is narrow; who is torn is added to `torn`."""
        count, wanted = self.crowd.count, self.marks[dim]
        ats = [OPERAND_DIMS[x].index(dim) for x in cutters]
        if dim == self.dim and self.by_chunks:
            return self.chunks(dim, [spreads[x].turns[at] for x, at in zip(cutters, ats, strict=True)])
        helds = tuple(
            self.crowd.marks(self.problem.layout(x), at, self.marks[dim].extent)
            for x, at in zip(cutters, ats, strict=True)
        )
        joint = self.crowd.joint(wanted, helds, boxes.NARROW)
        of = wanted.of[:count]
        if dim == self.dim:
            for x, is_torn, is_combed in zip(cutters, joint.torn, joint.combed, strict=True):
                torn[x] = np.maximum(torn[x], np.maximum(is_torn, is_combed)[of])
            return np.asarray(joint.fused[of])
        is_wide = joint.narrowest[of] >= boxes.NARROW
        for x, at, is_combed in zip(cutters, ats, joint.combed, strict=True):
            torn[x] = np.maximum(torn[x], np.where(is_wide, is_combed[of], spreads[x].cuts[at] > 1))
        return np.where(is_wide, joint.whole[of], 1.0)

    def chunks(self, dim: int, turns: list[Figures]) -> Figures:
        """Pieces where every operand moves at its own grain."""
        found = np.ones(self.crowd.count)
        for each in turns:
            found = together(found, each)
        extent = self.marks[dim].each[: self.crowd.count] * self.has_work[: self.crowd.count]
        return np.asarray(np.minimum(found, np.maximum(1.0, np.floor(extent / boxes.NARROW))))

    def longest(self, spreads: dict[str, Spread]) -> float:
        """The most indices of a panel: as many as there are where all is read in place."""
        in_place = all(
            x in self.problem.in_place and x not in self.row.grouped and not spread.between.any()
            for x, spread in spreads.items()
        )
        is_whole = in_place and self.row.result == "here"
        return UNCUT if is_whole or self.row.whole == "AB" else float(self.width)

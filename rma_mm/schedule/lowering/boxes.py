"""One box of (m, n, k) on one rank: where its multiplies read A and B, and how it is cut into panels.

A rank's box is cut along the dimension that it walks in time wherever the owner of an operand changes ("Slicing Is
All You Need", Brock and Golin 2025), narrow slices are fused to at least a panel, and each panel becomes Copies into
slots (where memory is out of reach, or scattered) and one or a few Multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product

from rma_mm.classes import dataclass
from rma_mm.geometry.span import Region, Span
from rma_mm.schedule.algorithm import OPERAND_DIMS, side
from rma_mm.schedule.lowering import decisions as limits
from rma_mm.schedule.lowering.decisions import LoweringDecisions, repackings, touched
from rma_mm.schedule.ops import Copy, Multiply, Op, Ref, Scale, Slot
from rma_mm.schedule.schedule import home_region


@dataclass(frozen=True)
class Boxes:
    """Access of ranks to the operands of one problem."""

    decisions: LoweringDecisions

    # -- where operands lie -----------------------------------------------------------------------

    def owners_asked(self, rank: int, x: str, region: Region) -> list[tuple[int, Region]]:
        """Return the owners of `region` of operand `x`, as `rank` asks them."""
        problem = self.decisions.read
        return self.decisions.layout(x).overlapping(problem.extent(x), problem.mesh, region, rank)

    def owner_spans(self, rank: int, x: str, box: Region, dim: int) -> list[Span]:
        """Return the spans along a dimension of (m, n, k) between changes of the owner of operand `x`."""
        at = OPERAND_DIMS[x].index(dim)
        return disjoint([part[at] for _, part in self.owners_asked(rank, x, side(box, x))])

    def is_direct(self, rank: int, owner: int, x: str, part: Region) -> bool:
        """True if `part` is in reach of `rank` and dense in its owner's local array."""
        problem = self.decisions.read
        if not self.decisions.reaches(rank, owner, x):
            return False
        return home_region(problem.layout(x), problem.extent(x), problem.mesh, owner).locate(part).is_contiguous

    def is_own(self, rank: int, x: str, region: Region) -> bool:
        """True if a rank reads all of `region` out of its own memory."""
        found = self.owners_asked(rank, x, region) if x != "C" else []
        return len(found) == 1 and found[0][0] == rank and self.is_direct(rank, rank, x, region)

    def all_direct(self, rank: int, box: Region) -> bool:
        return all(
            self.is_direct(rank, owner, x, part)
            for x in "AB"
            for owner, part in self.owners_asked(rank, x, side(box, x))
        )

    def repacked(self, rank: int, box: Region) -> str:
        """Return the operands in reach that are better copied together than multiplied in parts, where they lie."""
        if not self.decisions.may_repack:
            return ""
        spans = {(x, dim): self.owner_spans(rank, x, box, dim) for x in "AB" for dim in OPERAND_DIMS[x]}

        def pieces(dim: int, copied: str) -> int:
            cutters = [spans[x, dim] for x in "AB" if (x, dim) in spans and x not in copied]
            return len(fused(reduce(refine, cutters, [box[dim]])))

        def words(copied: str) -> int:
            return touched([len(span) for span in box], [pieces(dim, copied) for dim in range(3)], copied)

        best = min(repackings([x for x in "AB" if any(len(spans[x, d]) > 1 for d in OPERAND_DIMS[x])]), key=words)
        return best if words("") - words(best) >= limits.WORTH else ""

    # -- panels and boxes -------------------------------------------------------------------------

    def parts(self, rank: int, box: Region, dim: int, operands: str) -> list[Span]:
        """Return a dimension of a box, cut where owners of operands change that are not copied together."""
        repacked = self.repacked(rank, box)
        cutters = [x for x in operands if self.decisions.cuts(x, dim) and x not in repacked]
        return reduce(refine, (self.owner_spans(rank, x, box, dim) for x in cutters), [box[dim]])

    def panels(self, rank: int, box: Region) -> list[Span]:
        """Return the walked dimension cut where owners change, fused where narrow, cut again where wide.

        Where C is multiplied into, and a part would be scattered there, it is not cut by owner.
        """
        dim, problem = self.decisions.dim, self.decisions.read
        panels: list[Span] = []
        parts = fused(self.parts(rank, box, dim, "ABC"))
        home = home_region(problem.layout("C"), problem.extent("C"), problem.mesh, rank)
        if self.decisions.is_here and not _are_dense(parts, dim, home):
            parts = [box[dim]]
        for part in parts:
            whole = with_dim(box, dim, part)
            longest = self.decisions.longest_piece(whole, dim)
            is_whole = self.decisions.is_in_reach and self.all_direct(rank, whole)
            if problem.files:
                panels += from_multiples(part, self.decisions.width)
            else:
                panels += part.pieces(longest if is_whole else min(longest, self.decisions.width))
        return panels

    def box(
        self, rank: int, box: Region, step: int, slot: Slot | None, prefix: str = "", faces: Sequence[Region] = ()
    ) -> list[Op]:
        """Copies and Multiplies of one box; C is `slot`, or the rank's home. faces: the parts of C that are wanted."""
        c_buffer = slot or "C"
        problem = self.decisions.read
        c_holds = slot.region if slot else home_region(problem.layout("C"), problem.extent("C"), problem.mesh, rank)
        cuts = [self.cuts(rank, box, dim, c_holds) for dim in range(3)]
        if any(_is_cut(face, cuts) for face in faces if face[0] == face[1]):
            cuts[:2] = [box[0]], [box[1]]
        ops: list[Op] = []
        operands: dict[tuple[str, Region], Ref] = {}
        for k, m, n in product(cuts[2], cuts[0], cuts[1]):
            part = Region((m, n))
            wanted = [c for face in faces if (c := part & face)] if faces else [part]
            refs = []
            for x, region in (("A", Region((m, k))), ("B", Region((k, n)))) if wanted else ():
                if (x, region) not in operands:
                    operands[x, region] = self.operand(rank, x, region, step, f"{prefix}{step}", ops)
                refs.append(operands[x, region])
            longest = self.decisions.longest_piece(Region((m, n, k)), 2) if problem.files else len(k)
            for c, piece in product(wanted, k.pieces(longest)):
                a, b = replace(refs[0], region=Region((c[0], piece))), replace(refs[1], region=Region((piece, c[1])))
                ops.append(Multiply(a, b, Ref(rank, c_buffer, c), False, step, bool(faces) and c[0] == c[1]))
        return ops

    def cuts(self, rank: int, box: Region, dim: int, c_holds: Region) -> list[Span]:
        """Return the span of a dimension, cut by owner where each piece is wide and stays dense in C."""
        parts = self.parts(rank, box, dim, "AB")
        is_dense = _are_dense(parts, dim, c_holds)
        return parts if is_dense and min(map(len, parts)) >= limits.NARROW else [box[dim]]

    def operand(self, rank: int, x: str, region: Region, step: int, name: str, ops: list[Op]) -> Ref:
        """Return the reference through which a multiply reads `region` of operand `x`: in place, or a slot."""
        source, found = self.decisions.sources[x], self.owners_asked(rank, x, region)
        if len(found) == 1 and self.is_direct(rank, found[0][0], x, region):
            return Ref(found[0][0], source, region)
        slot = Slot(f"{x}{name}.{len(ops)}", region)
        ops += [Copy(Ref(owner, source, part), Ref(rank, slot, part), step) for owner, part in found]
        return Ref(rank, slot, region)


def _are_dense(parts: Sequence[Span], dim: int, c_holds: Region) -> bool:
    return dim == 2 or all(c_holds[dim].locate(part).is_contiguous for part in parts)


def from_multiples(span: Span, width: int) -> list[Span]:
    """Return a span cut at the multiples of `width`: chunks of a file begin there."""
    cuts = range(span.start // width * width, span.stop, width) if span else ()
    return [piece for at in cuts if (piece := span & Span.range(at, at + width))]


def _is_cut(face: Region, cuts: Sequence[Sequence[Span]]) -> bool:
    return any(all(face[dim] & part != face[dim] for part in cuts[dim]) for dim in (0, 1))


def with_dim(box: Region, dim: int, span: Span) -> Region:
    return Region(span if d == dim else own for d, own in enumerate(box))


def refine(parts: list[Span], cutters: list[Span]) -> list[Span]:
    """Return every non-empty intersection, in order of first index; cutters are disjoint."""
    if len(cutters) == 1:
        return [common for part in parts if (common := part & cutters[0])]
    found = [common for part in parts for cutter in cutters if (common := part & cutter)]
    return sorted(found, key=lambda span: span.start)


def disjoint(spans: Iterable[Span]) -> list[Span]:
    """Return the atoms into which overlapping spans cut their union."""
    atoms: list[Span] = []
    for span in dict.fromkeys(spans):
        rest = span
        grown = []
        for atom in atoms:
            common = atom & span
            if common and common != atom:
                grown += [common, atom - common]
            else:
                grown.append(atom)
            rest = rest - common
        atoms = [*grown, rest] if rest else grown
    return atoms


def fused(parts: list[Span], width: int | None = None) -> list[Span]:
    """Neighbours joined until none is narrower than `width` indices, or than NARROW, unless all together are."""
    width = width or limits.NARROW
    joined: list[Span] = []
    for part in parts:
        if joined and (len(part) < width or len(joined[-1]) < width):
            joined[-1] = joined[-1] | part
        else:
            joined.append(part)
    return joined


def opened(c: Ref, ops: list[Op], keep: bool, step: int = 0) -> list[Op]:
    """`ops` with the region `c` opened exactly once: by the first Multiply of each part, or by a Scale in front.

    step: that of the Scale where there is no other operation.
    """
    regions: list[Region] = []
    for op in ops:
        if not (isinstance(op, Multiply) and op.c.buffer == c.buffer):
            continue
        if op.c.region & c.region and op.c.region not in regions:
            regions.append(op.c.region)
    covered = sum(region.size for region in regions) == c.region.size
    apart = not any(a & b for n, a in enumerate(regions) for b in regions[:n])
    if not c.region:
        return ops
    if keep or not (covered and apart):
        return [Scale(c, keep, ops[0].step if ops else step), *ops]
    pending = set(regions)
    result: list[Op] = []
    for op in ops:
        if isinstance(op, Multiply) and op.c.buffer == c.buffer and op.c.region in pending:
            pending.remove(op.c.region)
            op = replace(op, first=True)
        result.append(op)
    return result

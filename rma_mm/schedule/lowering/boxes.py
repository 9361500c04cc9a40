"""One box of (m, n, k) on one rank: where its multiplies read A and B, and how it is cut into panels.

A rank's box is cut along the dimension that it walks in time wherever the owner of an operand changes ("Slicing Is
All You Need", Brock and Golin 2025), narrow slices are fused to at least a panel, and each panel becomes Copies into
slots (where memory is out of reach, or scattered) and one or a few Multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region, Span
from rma_mm.schedule.ops import Copy, Multiply, Op, Ref, Scale, Slot
from rma_mm.schedule.row import OPERAND_DIMS, Problem, Row, side
from rma_mm.schedule.schedule import held

WIDTH = 1024
"""Panel width where memory is not scarce."""
WORTH = 2**20
"""Words to and from memory from which on it is worth copying an operand together."""
NARROW = 128
"""A slice narrower than this is fused with its neighbours: a multiply that thin runs far below the BLAS rate."""
LONGEST = 2 * 10**10
"""Multiply-adds in one Multiply at most (about 0.4 s of one core), so that signals and progress are served."""


@dataclass(frozen=True)
class Boxes:
    """How one row reads the operands of one problem."""

    row: Row
    problem: Problem
    """With A and B placed as the product reads them."""
    sources: dict[str, str]
    """A and B → the home that the product reads: A, or A+ where it was summed or staged."""
    width: int
    """Indices along the walked dimension in one panel, where slots are needed."""

    # -- where operands lie -----------------------------------------------------------------------

    def layout(self, x: str) -> Layout:
        """The placement that operand `x` is read by, or for C pushed by."""
        return self.problem.target if x == "C" else self.problem.layout(x)

    def found(self, rank: int, x: str, region: Region) -> list[tuple[int, Region]]:
        """The owners of `region` of operand `x`, as `rank` asks them."""
        return self.layout(x).overlapping(self.problem.extent(x), self.problem.mesh, region, rank)

    def owner_spans(self, rank: int, x: str, region: Region, dim: int) -> list[Span]:
        """The spans along one dimension of operand `x` in which `region` changes its owner."""
        return disjoint([part[dim] for _, part in self.found(rank, x, region)])

    def is_direct(self, rank: int, owner: int, x: str, part: Region) -> bool:
        """Whether `part` is in reach of `rank` and dense in its owner's local array."""
        if owner != rank and (x in self.row.grouped or not self.problem.reaches(rank, owner, x)):
            return False
        home = held(self.problem.layout(x), self.problem.extent(x), self.problem.mesh, owner)
        return home.locate(part).is_contiguous

    def is_own(self, rank: int, x: str, region: Region) -> bool:
        """Whether a rank reads all of `region` out of its own memory."""
        found = self.found(rank, x, region) if x != "C" else []
        return len(found) == 1 and found[0][0] == rank and self.is_direct(rank, rank, x, region)

    @property
    def is_in_place(self) -> bool:
        """Whether every rank reads all of A and B where they lie, so that nothing but density asks for slots."""
        one_node = len(set(self.problem.mesh.nodes)) == 1
        return self.row.result == "here" and one_node and self.problem.in_place == "AB" and not self.row.grouped

    def all_direct(self, rank: int, box: Region) -> bool:
        """Whether both operands of a box can be multiplied out of their owners' memory."""
        return all(
            self.is_direct(rank, owner, x, part) for x in "AB" for owner, part in self.found(rank, x, side(box, x))
        )

    def loose(self, rank: int, box: Region) -> str:
        """The operands in reach that are better copied together than multiplied in parts, where they lie.

        Every part of k reads and writes C once more, every part of m reads B again, and every part of n A.
        """
        if not self.is_in_place or self.width < WIDTH:
            return ""
        faces = {x: side(box, x) for x in "ABC"}
        spans = {
            (x, dim): self.owner_spans(rank, x, faces[x], at) for x in "AB" for at, dim in enumerate(OPERAND_DIMS[x])
        }

        def parts(dim: int, copied: str) -> int:
            found = [box[dim]]
            for x in "AB":
                found = refine(found, spans[x, dim]) if (x, dim) in spans and x not in copied else found
            return len(fused(found, NARROW))

        def words(copied: str) -> int:
            m, n, k = (parts(dim, copied) for dim in range(3))
            again = n * faces["A"].size + m * faces["B"].size + 2 * k * faces["C"].size
            return again + 2 * sum(faces[x].size for x in copied)

        cut = [x for x in "AB" if any(len(spans[x, dim]) > 1 for dim in OPERAND_DIMS[x])]
        best = min(("", *cut, *(["AB"] if len(cut) == 2 else [])), key=words)
        return best if words("") - words(best) >= WORTH else ""

    # -- panels and boxes -------------------------------------------------------------------------

    def panels(self, rank: int, box: Region, dim: int) -> list[Span]:
        """The walked dimension cut where owners change, fused where narrow, cut again where wide."""
        parts = [box[dim]]
        loose = self.loose(rank, box)
        for x, dims in OPERAND_DIMS.items():
            if dim in dims and x not in loose:
                parts = refine(parts, self.owner_spans(rank, x, side(box, x), dims.index(dim)))
        panels: list[Span] = []
        for part in fused(parts, NARROW):
            whole = Region(part if d == dim else span for d, span in enumerate(box))
            longest = longest_piece(whole, dim)
            is_whole = self.is_in_place and self.all_direct(rank, whole)
            panels += part.pieces(longest if is_whole else min(longest, self.width))
        return panels

    def box(self, rank: int, box: Region, step: int, slot: Slot | None, prefix: str = "") -> list[Op]:
        """Copies and Multiplies of one box; C is `slot`, or the rank's home."""
        c_buffer = slot or "C"
        problem = self.problem
        c_holds = slot.region if slot else held(problem.layout("C"), problem.extent("C"), problem.mesh, rank)
        cuts = [self.cuts(rank, box, dim, c_holds) for dim in range(3)]
        ops: list[Op] = []
        operands: dict[tuple[str, Region], Ref] = {}
        for k, m, n in product(cuts[2], cuts[0], cuts[1]):
            refs = []
            for x, region in (("A", Region((m, k))), ("B", Region((k, n)))):
                if (x, region) not in operands:
                    operands[x, region] = self.operand(rank, x, region, step, f"{prefix}{step}", ops)
                refs.append(operands[x, region])
            ops.append(Multiply(refs[0], refs[1], Ref(rank, c_buffer, Region((m, n))), False, step))
        return ops

    def cuts(self, rank: int, box: Region, dim: int, c_holds: Region) -> list[Span]:
        """The span of a dimension, cut by owner where each piece is wide and stays dense in C."""
        parts = [box[dim]]
        loose = self.loose(rank, box)
        for x in "AB":
            if dim in OPERAND_DIMS[x] and x not in self.row.grouped and x not in loose:
                parts = refine(parts, self.owner_spans(rank, x, side(box, x), OPERAND_DIMS[x].index(dim)))
        dense = dim == 2 or all(c_holds[dim].locate(part).is_contiguous for part in parts)
        return parts if dense and min(map(len, parts)) >= NARROW else [box[dim]]

    def operand(self, rank: int, x: str, region: Region, step: int, name: str, ops: list[Op]) -> Ref:
        """Where a multiply reads `region` of operand `x`: in place, or a slot that Copies appended to `ops` fill."""
        source, found = self.sources[x], self.found(rank, x, region)
        if len(found) == 1 and self.is_direct(rank, found[0][0], x, region):
            return Ref(found[0][0], source, region)
        slot = Slot(f"{x}{name}.{len(ops)}", region)
        ops += [Copy(Ref(owner, source, part), Ref(rank, slot, part), step) for owner, part in found]
        return Ref(rank, slot, region)


def longest_piece(box: Region, dim: int) -> int:
    """Indices of `dim` that one Multiply of the box may take."""
    return max(1, LONGEST * len(box[dim]) // max(1, box.size))


def refine(parts: list[Span], cutters: list[Span]) -> list[Span]:
    """Every non-empty intersection, in order of first index; cutters are disjoint."""
    if len(cutters) == 1:
        return [common for part in parts if (common := part & cutters[0])]
    found = [common for part in parts for cutter in cutters if (common := part & cutter)]
    return sorted(found, key=lambda span: span.start)


def disjoint(spans: Iterable[Span]) -> list[Span]:
    """The atoms into which overlapping spans cut their union."""
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


def fused(parts: list[Span], width: int) -> list[Span]:
    """Neighbours joined until each is at least `width` indices (but for the case that all together are not)."""
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
        if isinstance(op, Multiply) and op.c.buffer == c.buffer and op.c.region not in regions:
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

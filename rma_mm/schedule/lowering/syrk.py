"""Choose the half of a symmetric C that each owner multiplies, and the half that it mirrors.

An element and its mirror image have two owners, or one. Two owners share out what they both hold, so that each does
half of the multiplications that all of its part would take. Where ranks hold whole rows, or columns, and one after the
other, a pair of them leaves its part to one, as in a round of a tournament, so that the other fetches nothing for it;
half of the pairs of a rank fall to it (of an even number of ranks, the one opposite is shared). What one rank holds
both of, a square on the diagonal, it multiplies on and below the diagonal, in one product; where its memory scatters
that square, the block below the diagonal, and by halves the two squares that are left.

The balance is that of the triangle blocks of Beaumont, Eyraud-Dubois, Vérité and Langou (2022) and of Al Daas, Ballard,
Grigori, Kumar and Rouse (2023), for a C that lies where it lies. In those blocks themselves a rank has few blocks of
rows of A, each of which it fetches once, for both factors, and multiplies with each other; what it makes goes to C's
owners. Where ranks share out k instead, each multiplies all of the half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from functools import cached_property, lru_cache

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region, Span, even_part
from rma_mm.schedule.lowering.decisions import LoweringDecisions
from rma_mm.schedule.lowering.difference_cover import pairs
from rma_mm.schedule.schedule import home_region

Boxes = list[Region]


@dataclass(frozen=True, eq=False)
class Halves:
    """The halves of a square C whose owners hold parts of it."""

    shape: tuple[int, int]
    mesh: MeshShape
    owners: Layout  # which owner has which part, each element once
    is_lower: bool = False
    """True if just what lies below the diagonal is multiplied, because C's old value enters, or others multiply it: no
    balance is sought."""
    boxes_of_rank: dict[int, Boxes] = field(default_factory=dict)

    def home(self, rank: int) -> Region:
        return home_region(self.owners, self.shape, self.mesh, rank)

    def multiplied(self, rank: int) -> Boxes:
        return self.computed(rank)

    def work(self, rank: int, k: int) -> Region:
        """Return the least box of (m, n, k) that holds these products, over all of k."""
        spans = [Span(run for box in self.multiplied(rank) for run in box[dim].runs) for dim in (0, 1)]
        return Region((*spans, Span.range(0, k)))

    def computed(self, rank: int) -> Boxes:
        """Return the boxes of a rank's C that are multiplied, each dense in its memory: it opens and finishes them."""
        if rank not in self.boxes_of_rank:
            found = (box for other, mine in self.mirror_partners(rank) for box in self.split(rank, other, mine)[0])
            self.boxes_of_rank[rank] = [part for box in found for part in _dense_parts(self.home(rank), box)]
        return self.boxes_of_rank[rank]

    def mirrored(self, rank: int) -> list[tuple[int, Region]]:
        """(rank that has its mirror image, which is multiplied, box of C) of all of a rank's C that is not multiplied.

        Boxes on the diagonal, of which half is multiplied, are among them.
        """
        found: list[tuple[int, Region]] = []
        for other, mine in self.mirror_partners(rank):
            found += [(other, box) for box in self.split(rank, other, mine)[1]]
        return found

    def mirror_partners(self, rank: int) -> list[tuple[int, Region]]:
        """Return (other rank, box): the parts of a rank's C whose mirror image a rank holds, maybe itself."""
        found = self.owners.overlapping(self.shape, self.mesh, self.home(rank).T, rank)
        return [(other, part.T) for other, part in found]

    def split(self, rank: int, other: int, mine: Region) -> tuple[Boxes, Boxes]:
        """Return the boxes of a part of two ranks that `rank` multiplies, and those that it mirrors."""
        if rank == other:
            square = list(self.triangle(rank, mine[0]))
            return square, [box if box[0] == box[1] else box.T for box in square]
        if self.is_lower:
            pure = list(mine.run_boxes())
            below = [box for box in pure if box[0].start > box[1].start]
            return below, [box for box in pure if box not in below]
        if self.alternates and 2 * ((other - rank) % self.mesh.size) != self.mesh.size:
            is_mine = 2 * ((other - rank) % self.mesh.size) < self.mesh.size
            return ([mine], []) if is_mine else ([], [mine])
        one, two = _split_longer_side(mine if rank < other else mine.T)
        first, second = [one] * bool(one), [two] * bool(two)
        return (first, second) if rank < other else ([box.T for box in second], [box.T for box in first])

    def triangle(self, rank: int, span: Span) -> Iterator[Region]:
        """Yield the boxes on and below the diagonal of a square that a rank holds."""
        square = Region((span, span))
        if self.home(rank).locate(square).is_contiguous:
            yield square
            return
        upper, lower = _halves(span)
        yield from self.triangle(rank, upper)
        yield Region((lower, upper))
        yield from self.triangle(rank, lower)

    @cached_property
    def alternates(self) -> bool:
        """True if ranks hold equal parts of whole rows, or of whole columns."""
        cut = [split for split in self.owners.splits if split]
        levels = [level for split in cut for level in split]
        is_even = all(level.kind in ("even", "cyclic") and not level.skew for level in levels)
        return len(cut) == 1 and is_even and self.owners.is_single(self.mesh) and not self.owners.pins


@dataclass(frozen=True, eq=False)
class Triangles(Halves):
    """The halves of a square C that is multiplied in triangle blocks, and lies below its diagonal at its owners."""

    multiplied_of_rank: dict[int, Boxes] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[Span]:
        """Return the blocks of rows of A that ranks fetch together; each rank's own block is on the diagonal."""
        extent, count = self.shape[0], self.mesh.size
        return [even_part(extent, block, count) for block in range(count)]

    def multiplied(self, rank: int) -> Boxes:
        """Return the products of a rank's two blocks of rows: one times the other, and half of one times itself."""
        if rank not in self.multiplied_of_rank:
            self.multiplied_of_rank[rank] = [box for box in (*self.diagonal(rank), *self.below(rank)) if box]
        return self.multiplied_of_rank[rank]

    def work(self, rank: int, k: int) -> Region:
        """Return the work of a half; its operand A has both the rows and the columns."""
        rows, cols, over = super().work(rank, k)
        return Region((rows | cols, rows | cols, over))

    def diagonal(self, rank: int) -> Iterator[Region]:
        """Yield a rank's block on the diagonal as its owners have it, each part dense in A too."""
        square = Region((self.blocks[rank],) * 2)
        for owner in dict.fromkeys(owner for owner, _ in self.owners.overlapping(self.shape, self.mesh, square, rank)):
            for box in self.computed(owner):
                yield from (box & square).run_boxes()

    def below(self, rank: int) -> Iterator[Region]:
        """Yield a rank's blocks below the diagonal; neighbouring blocks of a line are joined."""
        count, lines = self.mesh.size, dict[int, list[int]]()
        met = [sorted((rank + each) % count for each in pair) for pair in pairs(count)]
        for upper, lower in met:
            if 2 * (lower - upper) != count:
                lines.setdefault(lower, []).append(upper)
            else:  # the rank opposite has it too
                yield _split_longer_side(Region((self.blocks[lower], self.blocks[upper])))[2 * rank >= count]
        had = sorted({rank, *(block for pair in met for block in pair)})
        for lower, uppers in lines.items():
            for beside in _beside(sorted(map(had.index, uppers))):
                cols = Span(run for at in beside for run in self.blocks[had[at]].runs)
                yield Region((self.blocks[lower], cols))

    def triangle(self, rank: int, span: Span) -> Iterator[Region]:
        """Yield the boxes on and below the diagonal: squares of each block and run, and the boxes beside them."""
        before = Span()
        for block in self.blocks:
            for run in (span & block).runs:
                part = Span([run])
                yield from [Region((part, before))] * bool(before)
                yield Region((part, part))
                before |= part


@dataclass(frozen=True, eq=False)
class Summands(Triangles):
    """All of the half, which every rank multiplies for its own share of k."""

    work_layout: Layout = field(kw_only=True)  # placement of the iteration space (m, n, k)

    @cached_property
    def blocks(self) -> list[Span]:
        return [Span.range(0, self.shape[0])]

    def multiplied(self, rank: int) -> Boxes:
        """Return the lower halves of all owners' parts of C, cut so that each is dense in A too."""
        found = (box for owner in self.mesh.ranks for box in self.computed(owner))
        return [part for box in found for part in box.run_boxes()]

    def work(self, rank: int, k: int) -> Region:
        return self.work_layout.region((*self.shape, k), self.mesh, rank)


def halves_of(decisions: LoweringDecisions) -> Halves | None:
    """Return the halves of C for an algorithm that multiplies half of it; None for others."""
    given, work = decisions.problem, None if decisions.is_here else decisions.work
    return (
        _halves_of(given.extent("C"), given.mesh, given.output_layout, given.keeps_c, work)
        if decisions.algorithm.half
        else None
    )


@lru_cache(maxsize=64)
def _halves_of(shape: tuple[int, int], mesh: MeshShape, share: Layout, keeps_c: bool, work: Layout | None) -> Halves:
    """Remembered, for prices and lowering ask for the same ones several times. work: of halves that are pushed."""
    if work is None:
        return Halves(shape, mesh, share, keeps_c)
    return (
        Summands(shape, mesh, share, True, work_layout=work) if work.splits[2] else Triangles(shape, mesh, share, True)
    )


def _beside(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers in groups of consecutive ones."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _halves(span: Span) -> tuple[Span, Span]:
    """Return a span cut near its middle: between two runs where it has several."""
    if span.is_contiguous:
        middle = len(span) // 2
    else:
        ends = [span.locate(Span.range(*run)).stop for run in span.runs[:-1]]
        middle = min(ends, key=lambda end: abs(2 * end - len(span)))
    return span.take(Span.range(0, middle)), span.take(Span.range(middle, len(span)))


def _split_longer_side(box: Region) -> tuple[Region, Region]:
    """Return a box cut in two along its longer side."""
    rows, cols = box
    if len(rows) >= len(cols):
        one, two = (rows.take(part) for part in _even(len(rows)))
        return Region((one, cols)), Region((two, cols))
    one, two = (cols.take(part) for part in _even(len(cols)))
    return Region((rows, one)), Region((rows, two))


def _even(extent: int) -> tuple[Span, Span]:
    return Span.range(0, extent // 2), Span.range(extent // 2, extent)


def _dense_parts(home: Region, box: Region) -> Boxes:
    return [
        Region(span.take(at) for span, at in zip(home, part, strict=True)) for part in home.locate(box).run_boxes()
    ]

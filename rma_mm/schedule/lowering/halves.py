"""Which half of a symmetric C each of its owners multiplies, and which it mirrors.

An element and its mirror image have two owners, or one. Two owners share out what they both hold, so that each does
half of the multiplications that all of its part would take. Where ranks hold whole rows, or columns, and one after the
other, a pair of them leaves its part to one, as in a round of a tournament, so that the other fetches nothing for it;
half of the pairs of a rank fall to it (of an even number of ranks, the one opposite is shared). What one rank holds
both of, a square on the diagonal, it multiplies on and below the diagonal, in one product; where its memory scatters
that square, the block below the diagonal, and by halves the two squares that are left.

The balance is that of the triangle blocks of Beaumont, Eyraud-Dubois, Vérité and Langou (2022) and of Al Daas, Ballard,
Grigori, Kumar and Rouse (2023), for a C that lies where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region, Span
from rma_mm.schedule.lowering.fitted import Fitted
from rma_mm.schedule.schedule import held

Boxes = list[Region]


@dataclass(frozen=True, eq=False)
class Halves:
    """The halves of a square C whose owners each hold parts of their own."""

    shape: tuple[int, int]
    mesh: MeshShape
    share: Layout
    """Which owner has which part, each element once."""
    is_lower: bool = False
    """Whether just what lies below the diagonal is multiplied, because C's old value enters: no balance is sought."""
    known: dict[int, Boxes] = field(default_factory=dict)

    def home(self, rank: int) -> Region:
        """What a rank has of C."""
        return held(self.share, self.shape, self.mesh, rank)

    def computed(self, rank: int) -> Boxes:
        """The boxes of C that a rank multiplies, each dense in its memory."""
        if rank not in self.known:
            found = (box for other, mine in self.shared(rank) for box in self.halved(rank, other, mine)[0])
            self.known[rank] = [part for box in found for part in _dense_parts(self.home(rank), box)]
        return self.known[rank]

    def mirrored(self, rank: int) -> list[tuple[int, Region]]:
        """(rank that multiplies its mirror image, box of C) of all that a rank does not multiply.

        Boxes on the diagonal, of which it multiplies half, are among them.
        """
        found: list[tuple[int, Region]] = []
        for other, mine in self.shared(rank):
            found += [(other, box) for box in self.halved(rank, other, mine)[1]]
        return found

    def shared(self, rank: int) -> list[tuple[int, Region]]:
        """(other rank, box): the parts of a rank's C whose mirror image another, or the rank itself, holds."""
        found = self.share.overlapping(self.shape, self.mesh, self.home(rank).T, rank)
        return [(other, part.T) for other, part in found]

    def halved(self, rank: int, other: int, mine: Region) -> tuple[Boxes, Boxes]:
        """What of a part that two ranks share `rank` multiplies, and what it mirrors: together all of it."""
        if rank == other:
            square = list(self.triangle(rank, mine[0]))
            return square, [box if box[0] == box[1] else box.T for box in square]
        if self.is_lower:
            pure = list(mine.run_boxes())
            below = [box for box in pure if box[0].start > box[1].start]
            return below, [box for box in pure if box not in below]
        if self.takes_turns and 2 * ((other - rank) % self.mesh.size) != self.mesh.size:
            is_mine = 2 * ((other - rank) % self.mesh.size) < self.mesh.size
            return ([mine], []) if is_mine else ([], [mine])
        one, two = _cut(mine if rank < other else mine.T)
        first, second = [one] * bool(one), [two] * bool(two)
        return (first, second) if rank < other else ([box.T for box in second], [box.T for box in first])

    def triangle(self, rank: int, span: Span) -> Iterator[Region]:
        """The boxes on and below the diagonal of a square that a rank holds."""
        square = Region((span, span))
        if self.home(rank).locate(square).is_contiguous:
            yield square
            return
        upper, lower = _halves(span)
        yield from self.triangle(rank, upper)
        yield Region((lower, upper))
        yield from self.triangle(rank, lower)

    @cached_property
    def takes_turns(self) -> bool:
        """Whether ranks hold equal parts of whole rows, or of whole columns."""
        cut = [split for split in self.share.splits if split]
        levels = [level for split in cut for level in split]
        is_even = all(level.kind in ("even", "cyclic") and not level.skew for level in levels)
        return len(cut) == 1 and is_even and self.share.is_single(self.mesh) and not self.share.pins


def halves_of(fitted: Fitted) -> Halves | None:
    """Those of the C of a row that multiplies half of it; None for other rows."""
    given = fitted.given
    if not fitted.row.half:
        return None
    return _halves_of(given.extent("C"), given.mesh, given.share, given.keeps_c)


@lru_cache(maxsize=64)
def _halves_of(shape: tuple[int, int], mesh: MeshShape, share: Layout, is_lower: bool) -> Halves:
    """Remembered, for prices and lowering ask for the same ones several times."""
    return Halves(shape, mesh, share, is_lower)


def faced(boxes: Boxes, k: int) -> Region:
    """The least box of (m, n, k) that holds products for several boxes of C, over all of k."""
    spans = [Span(run for box in boxes for run in box[dim].runs) for dim in (0, 1)]
    return Region((*spans, Span.range(0, k)))


def _halves(span: Span) -> tuple[Span, Span]:
    """A span cut near its middle: between two runs where it has several."""
    if span.is_contiguous:
        middle = len(span) // 2
    else:
        ends = [span.locate(Span.range(*run)).stop for run in span.runs[:-1]]
        middle = min(ends, key=lambda end: abs(2 * end - len(span)))
    return span.take(Span.range(0, middle)), span.take(Span.range(middle, len(span)))


def _cut(box: Region) -> tuple[Region, Region]:
    """A box cut in two along its longer side."""
    rows, cols = box
    if len(rows) >= len(cols):
        one, two = (rows.take(part) for part in _even(len(rows)))
        return Region((one, cols)), Region((two, cols))
    one, two = (cols.take(part) for part in _even(len(cols)))
    return Region((rows, one)), Region((rows, two))


def _even(extent: int) -> tuple[Span, Span]:
    return Span.range(0, extent // 2), Span.range(extent // 2, extent)


def _dense_parts(home: Region, box: Region) -> Boxes:
    """A box in parts that are each dense in the memory of who holds `home`."""
    return [
        Region(span.take(at) for span, at in zip(home, part, strict=True)) for part in home.locate(box).run_boxes()
    ]

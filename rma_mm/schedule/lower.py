"""From a row and a problem to a schedule: cut each rank's work into boxes, and each box into operations.

A rank's box of (m, n, k) is cut along the dimension that it walks in time wherever the owner of an operand
changes ("Slicing Is All You Need", Brock and Golin 2025), narrow slices are fused to at least a panel, and each panel
becomes Copies into slots (where memory is out of reach, or scattered), one or a few Multiplies, and, where C is
not at home, Accumulates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from ..geometry.span import Region, Span
from .ops import (
    STAGE,
    Accumulate,
    Barrier,
    Claim,
    Copy,
    Finish,
    Home,
    Multiply,
    Op,
    Pool,
    Ref,
    Scale,
    Schedule,
    Slot,
    held,
)
from .passes import frames, prefetch
from .redistribute import pieces, summed
from .row import DIMS, OPERAND_DIMS, Problem, Row, side

NARROW = 128
"""A slice narrower than this is fused with its neighbours: a multiply that thin runs far below the BLAS rate."""
LONGEST = 2 * 10**10
"""Multiply-adds in one Multiply at most (about 0.4 s of one core), so that signals and progress are served."""
TASKS_PER_RANK = 8
"""Grain of the work queue."""


@dataclass(frozen=True)
class Tuning:
    """Choices that change memory and speed but not the result."""

    width: int = 1024
    """Indices along the walked dimension in one panel, where slots are needed."""
    depth: int = 2
    """How many panels ahead Copies are issued."""


def lower(row: Row, problem: Problem, tuning: Tuning | None = None) -> Schedule:
    """The schedule of `row` for `problem`. Pure: the operations of a rank cost O(its own steps)."""
    return _Lowering(row, problem, tuning or Tuning()).schedule()


class _Lowering:
    """One row applied to one problem."""

    def __init__(self, row: Row, problem: Problem, tuning: Tuning) -> None:
        self.row = row
        self.given = problem
        self.tuning = tuning
        self.mesh = problem.mesh
        self.sources = {x: x + STAGE if problem.layout(x).partial else x for x in "AB"}
        self.problem = problem.summed
        self.work = row.work(self.problem)
        self.share, self.target = problem.share, problem.target
        one_node = len(set(self.mesh.nodes)) == 1
        self.is_in_place = row.result == "here" and one_node and problem.in_place == "AB"
        """Whether every rank reads all of A and B where they lie, so that nothing but density asks for slots."""

    # -- the whole program of a rank --------------------------------------------------------------

    def schedule(self) -> Schedule:
        homes = {x: Home(self.given.extent(x), self.given.layout(x)) for x in "ABC"}
        for x, name in self.sources.items():
            homes[name] = Home(self.given.extent(x), self.problem.layout(x))  # the same one, or its sum
        pool = Pool(len(self.tasks), self.task) if self.row.order == "ticket" else None
        return Schedule(self.mesh, homes, self.program, self.given.shape, pool)

    def program(self, rank: int) -> list[Op]:
        ops: list[Op] = []
        for x in "AB":
            if self.sources[x] != x:
                ops += summed(self.mesh, self.given.extent(x), x, self.given.layout(x), rank)
        if self.row.result == "here":
            ops += self.multiply_here(rank)
        else:
            ops += self.push(rank)
        return ops + self.gather(rank)

    def multiply_here(self, rank: int) -> list[Op]:
        """C stays where it lives: its owner, and nobody else, multiplies into it."""
        box = self.work.region(self.problem.shape, self.mesh, rank)
        mine = side(box, "C")
        ops: list[Op] = []
        for step, part in self.walk(rank, box):
            ops += self.box(rank, part, step, None)
        ops = opened(Ref(rank, "C", mine), ops, self.problem.keeps_c)
        return [*self.passes(ops), *([Finish(Ref(rank, "C", mine), 0)] if mine else [])]

    def push(self, rank: int) -> list[Op]:
        """Every partial C goes to its owner by accumulate, the owner's own too: one kind of writer."""
        mine = held(self.share, self.problem.extent("C"), self.mesh, rank)
        ops: list[Op] = [Scale(Ref(rank, "C", mine), self.problem.keeps_c, 0)] if mine else []
        ops.append(Barrier(0))
        if self.row.order == "ticket":
            ops.append(Claim(0))
        else:
            box = self.work.region(self.problem.shape, self.mesh, rank)
            work = [op for step, part in self.walk(rank, box) for op in self.pushed(rank, part, step)]
            ops += self.passes(work)
        ops.append(Barrier(0))
        return [*ops, *([Finish(Ref(rank, "C", mine), 0)] if mine else [])]

    def gather(self, rank: int) -> list[Op]:
        """A replicated C was computed once; each replica takes what others made."""
        c, shape = self.given.layout("C"), self.given.extent("C")
        if not any(self.mesh.axis_size(axis) > 1 for axis in c.replicated_axes(self.mesh)):
            return []
        ops: list[Op] = [Barrier(0)]
        for owner, part in pieces(self.mesh, shape, self.share, held(c, shape, self.mesh, rank), rank):
            if owner != rank:
                ops.append(Copy(Ref(owner, "C", part), Ref(rank, "C", part), 0))
        return ops

    def passes(self, ops: list[Op]) -> list[Op]:
        return frames(prefetch(ops, self.tuning.depth), linger=self.tuning.depth > 0)

    # -- what a rank walks over in time -----------------------------------------------------------

    def walk(self, rank: int, box: Region) -> Iterator[tuple[int, Region]]:
        """(step, part) of the rank's box, in the order in which it takes them; a step is where its panel starts."""
        dim = DIMS.index(self.row.over)
        if not box:
            return
        panels = self.panels(rank, box, dim)
        first = 0
        if self.row.order == "rotated":
            # in indices rather than panels, which ranks need not cut alike
            coords, extent = self.mesh.coords(rank), len(box[dim])
            shift = sum(coords[axis] * extent // self.mesh.axis_size(axis) for axis in self.mesh.names) % extent
            begin = box[dim].take(Span.range(shift, shift + 1)).start
            first = max((n for n, panel in enumerate(panels) if panel.start <= begin), default=0)
        for panel in [*panels[first:], *panels[:first]]:
            yield panel.start, Region(panel if d == dim else span for d, span in enumerate(box))

    def panels(self, rank: int, box: Region, dim: int) -> list[Span]:
        """The walked dimension cut where owners change, fused where narrow, cut again where wide."""
        parts = [box[dim]]
        for x, dims in OPERAND_DIMS.items():
            if dim in dims:
                parts = refine(parts, self.owner_spans(rank, x, side(box, x), dims.index(dim)))
        panels: list[Span] = []
        for part in fused(parts, NARROW):
            whole = Region(part if d == dim else span for d, span in enumerate(box))
            longest = max(1, LONGEST * len(part) // max(1, whole.size))
            is_whole = self.is_in_place and self.all_direct(rank, whole)
            panels += part.pieces(longest if is_whole else min(longest, self.tuning.width))
        return panels

    def owner_spans(self, rank: int, x: str, region: Region, dim: int) -> list[Span]:
        """The spans along one dimension of operand `x` in which `region` changes its owner."""
        layout = self.target if x == "C" else self.problem.layout(x)
        found = layout.overlapping(self.problem.extent(x), self.mesh, region, rank)
        return disjoint([part[dim] for _, part in found])

    def all_direct(self, rank: int, box: Region) -> bool:
        """Whether both operands of a box can be multiplied out of their owners' memory."""
        for x in "AB":
            region = side(box, x)
            found = self.problem.layout(x).overlapping(self.problem.extent(x), self.mesh, region, rank)
            if not all(self.is_direct(rank, owner, x, part) for owner, part in found):
                return False
        return True

    def is_direct(self, rank: int, owner: int, x: str, part: Region) -> bool:
        """Whether `part` is in reach of `rank` and dense in its owner's local array."""
        if not self.problem.reaches(rank, owner, x):
            return False
        home = held(self.problem.layout(x), self.problem.extent(x), self.mesh, owner)
        return home.locate(part).is_contiguous

    # -- one box ----------------------------------------------------------------------------------

    def box(self, rank: int, box: Region, step: int, slot: Slot | None, prefix: str = "") -> list[Op]:
        """Copies and Multiplies of one box; C is `slot`, or the rank's home."""
        c_buffer = slot or "C"
        c_holds = slot.region if slot else held(self.problem.layout("C"), self.problem.extent("C"), self.mesh, rank)
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
        for x in "AB":
            if dim in OPERAND_DIMS[x]:
                parts = refine(parts, self.owner_spans(rank, x, side(box, x), OPERAND_DIMS[x].index(dim)))
        dense = dim == 2 or all(c_holds[dim].locate(part).is_contiguous for part in parts)
        return parts if dense and min(map(len, parts)) >= NARROW else [box[dim]]

    def operand(self, rank: int, x: str, region: Region, step: int, name: str, ops: list[Op]) -> Ref:
        """Where a multiply reads `region` of operand `x`: in place, or a slot that Copies appended to `ops` fill."""
        layout, shape, source = self.problem.layout(x), self.problem.extent(x), self.sources[x]
        found = layout.overlapping(shape, self.mesh, region, rank)
        if len(found) == 1 and self.is_direct(rank, found[0][0], x, region):
            return Ref(found[0][0], source, region)
        slot = Slot(f"{x}{name}.{len(ops)}", region)
        ops += [Copy(Ref(owner, source, part), Ref(rank, slot, part), step) for owner, part in found]
        return Ref(rank, slot, region)

    def pushed(self, rank: int, box: Region, step: int) -> list[Op]:
        """One box multiplied into a slot, and the slot accumulated to the owners of C."""
        face = side(box, "C")
        slot = Slot(f"C{step}", face)
        return self.accumulated(rank, slot, self.box(rank, box, step, slot), step)

    def accumulated(self, rank: int, slot: Slot, ops: list[Op], step: int) -> list[Op]:
        """`ops`, which multiply into `slot`, and the pushes of what it then holds to the owners of C."""
        ops = opened(Ref(rank, slot, slot.region), ops, False)
        for owner, part in pieces(self.mesh, self.problem.extent("C"), self.target, slot.region, rank):
            ops.append(Accumulate(Ref(rank, slot, part), Ref(owner, "C", part), step))
        return ops

    # -- the work queue ---------------------------------------------------------------------------

    @cached_property
    def tasks(self) -> list[Region]:
        """The boxes that tickets stand for."""
        return task_boxes(self.problem)

    def task(self, number: int, rank: int) -> list[Op]:
        """The operations of one task when `rank` runs it: its panels of k into one slot, then one push."""
        box = self.tasks[number]
        slot = Slot(f"C.{number}", side(box, "C"))
        ops: list[Op] = []
        for n, k in enumerate(self.panels(rank, box, DIMS.index(self.row.over))):
            ops += self.box(rank, Region((box[0], box[1], k)), n, slot, f"{number}.")
        return self.passes(self.accumulated(rank, slot, ops, number))


def task_boxes(problem: Problem) -> list[Region]:
    """Boxes of (m, n, k) for a work queue: C's tiles, cut until every rank can expect several."""
    m, n, k = problem.shape
    if not (m and n and k):
        return []
    found = problem.target.overlapping((m, n), problem.mesh, Region.whole((m, n)), 0)
    tiles = [fused(disjoint(part[dim] for _, part in found), NARROW) for dim in (0, 1)]
    spans = [*tiles, [Span.range(0, k)]]
    wanted = TASKS_PER_RANK * problem.mesh.size
    while len(spans[0]) * len(spans[1]) * len(spans[2]) < wanted:
        widths = [max(len(span) for span in one) for one in spans]
        widest = max((0, 1), key=lambda d: widths[d])
        if widths[widest] < 2 * NARROW:
            widest = 2  # C is small: its sums are shared out instead
        if widths[widest] < 2 * NARROW:
            break
        spans[widest] = [piece for span in spans[widest] for piece in span.pieces(-(-len(span) // 2))]
    return [Region(box) for box in product(*spans)]


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


def opened(c: Ref, ops: list[Op], keep: bool) -> list[Op]:
    """`ops` with the region `c` opened exactly once: by the first Multiply of each part, or by a Scale in front."""
    regions: list[Region] = []
    for op in ops:
        if isinstance(op, Multiply) and op.c.region not in regions:
            regions.append(op.c.region)
    covered = sum(region.size for region in regions) == c.region.size
    apart = not any(a & b for n, a in enumerate(regions) for b in regions[:n])
    if not c.region:
        return ops
    if keep or not (covered and apart):
        return [Scale(c, keep, ops[0].step if ops else 0), *ops]
    pending = set(regions)
    result: list[Op] = []
    for op in ops:
        if isinstance(op, Multiply) and op.c.region in pending:
            pending.remove(op.c.region)
            op = replace(op, first=True)
        result.append(op)
    return result

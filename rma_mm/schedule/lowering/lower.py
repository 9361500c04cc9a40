"""Lower an algorithm and a problem to a schedule: each rank's work as operations, in phases.

Operands are summed or staged first, where that is needed; then the rank walks its box, and multiplies into C or pushes
what it made; a replicated C is gathered at the end. Phases hold no barrier inside, so passes rewrite one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import product

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region, Span
from rma_mm.schedule.algorithm import OPERAND_DIMS, Algorithm, PlacedProblem, side
from rma_mm.schedule.lowering import decisions as limits
from rma_mm.schedule.lowering.boxes import Boxes, disjoint, fused, opened, with_dim
from rma_mm.schedule.lowering.collectives import Pass, by_node, joins, pulls, pushes
from rma_mm.schedule.lowering.decisions import LoweringDecisions
from rma_mm.schedule.lowering.mirrored import mirrored
from rma_mm.schedule.lowering.node_crossing import crossing, replicas
from rma_mm.schedule.lowering.node_fetch import Sharings, all_shared, node_fetches
from rma_mm.schedule.lowering.node_sum import merged, merging
from rma_mm.schedule.lowering.redistribute import copies, pieces, shared, sum_partial
from rma_mm.schedule.lowering.syrk import halves_of
from rma_mm.schedule.lowering.walk import WalkStep, walk_steps
from rma_mm.schedule.ops import Accumulate, Barrier, Claim, Copy, Finish, Multiply, Op, Ref, Scale, Slot
from rma_mm.schedule.passes import frames, prefetch
from rma_mm.schedule.schedule import Home, Pool, Schedule, home_region

MOST_AHEAD = 8  # panels


@dataclass(frozen=True)
class Tuning:
    """Choices that change memory and speed but not the result."""

    width: int = limits.WIDTH  # indices along the walked dimension in one panel, where slots are needed
    depth: int = 2  # how many panels ahead Copies are issued
    longest: int = limits.LONGEST  # multiply-adds of one Multiply, at the most

    @classmethod
    def of(cls, width: int) -> Tuning:
        """Return the one for panels of this width if memory is not scarce: the narrower, the more of them ahead."""
        return cls(width, max(cls.depth, min(MOST_AHEAD, cls.depth * limits.WIDTH // width)))


def lower(algorithm: Algorithm, problem: PlacedProblem, tuning: Tuning | None = None) -> Schedule:
    """Return the schedule of `algorithm` for `problem`. Pure: the operations of a rank cost O(its own steps).

    If the algorithm moves data in groups, they cost O(the steps of the groups that the rank belongs to).
    """
    tuning = tuning or Tuning()
    decisions = LoweringDecisions.of(algorithm, problem, tuning.width)
    return _Lowering(replace(decisions, longest=tuning.longest), tuning.depth).schedule()


class _Lowering:
    """The lowering of one algorithm on one problem."""

    def __init__(self, decisions: LoweringDecisions, depth: int) -> None:
        self.decisions, self.depth = decisions, depth
        self.algorithm, self.problem, self.work, self.mesh = (
            decisions.algorithm, decisions.problem, decisions.work, decisions.problem.mesh,
        )
        self.boxes, self.halves = Boxes(decisions), halves_of(decisions)
        self.walked: dict[int, list[Op]] = {}
        self.proved: dict[object, Pass | None] = {}
        self.lines: dict[str, dict[tuple[int, ...], None]] = {}
        self.fetched: dict[int, Sharings] = {}
        self.summed: dict[int, dict[int, tuple[int, ...]]] = {}

    # -- the whole program of a rank --------------------------------------------------------------

    def schedule(self) -> Schedule:
        homes = {x: Home(self.problem.extent(x), self.problem.layout(x), x in self.problem.chunks) for x in "ABC"}
        for x, name in self.decisions.sources.items():
            if name != x:  # its sum, or its stage
                homes[name] = Home(self.problem.extent(x), self.decisions.read.layout(x))
        pool = Pool(len(self.tasks), self.task) if self.decisions.is_queue else None
        symmetry = self.problem.symmetry
        return Schedule(self.mesh, homes, self.program, self.problem.shape, pool, self.problem.computed, symmetry)

    def program(self, rank: int) -> list[Op]:
        ops: list[Op] = []
        for x in self.algorithm.operands:
            if self.problem.layout(x).partial:
                ops += sum_partial(self.mesh, self.problem.extent(x), x, self.problem.layout(x), rank)
        for x, layout in self.decisions.staged.items():
            ops += self.copied(x, layout, self.problem.layout(x), rank)
        ops += [Barrier(0)] if self.decisions.staged else []
        ops += self.multiply_here(rank) if self.decisions.is_here else self.push(rank)
        if self.halves and self.problem.symmetry:
            ops += mirrored(self.halves, self.problem.symmetry, rank, self.decisions.width, self.depth)
        if self.decisions.is_gathered:  # C was computed once; each replica takes what others made
            ops += [Barrier(0), *self.copied("C", self.problem.layout("C"), self.problem.output_layout, rank)]
        return ops

    def multiply_here(self, rank: int) -> list[Op]:
        """Multiply with C in place: only its owner multiplies into it."""
        mine = self.halves.computed(rank) if self.halves else [side(self.box(rank), "C")]
        ops = self.walk(rank)
        for face in mine:
            ops = opened(Ref(rank, "C", face), ops, self.problem.keeps_c)
        return [*self.passes(ops, rank), *(Finish(Ref(rank, "C", face), 0) for face in mine if face)]

    def push(self, rank: int) -> list[Op]:
        """Every partial C goes to its owner, the owner's own too: one kind of writer."""
        home = home_region(self.problem.output_layout, self.problem.extent("C"), self.mesh, rank)
        parts = self.halves.computed(rank) if self.halves else [home]
        mine = [Ref(rank, "C", part) for part in parts if part]
        ops: list[Op] = [Scale(part, self.problem.keeps_c, 0) for part in mine]
        ops.append(Barrier(0))
        ops += [Claim(0)] if self.decisions.is_queue else self.passes(self.walk(rank), rank)
        ops.append(Barrier(0))
        return [*ops, *(Finish(part, 0) for part in mine)]

    def passes(self, ops: list[Op], rank: int) -> list[Op]:
        for x in self.algorithm.grouped:
            group = self.along(self.work, self.decisions.group_axes(x), rank)
            pulling, pushing = (
                partial(pulls, at_once=x in self.algorithm.prefetch_all),
                partial(pushes, is_dense=self.is_dense),
            )
            ops = self.by_group(ops, rank, ("walk", x, group), self.walk, pushing if x == "C" else pulling)
            if self.decisions.crosses_once(x) and (two := crossing(self.mesh, group, rank)):
                ops = by_node(ops, rank, group, two)
            for joined in self.joined(x, rank):
                ops = self.by_group(ops, rank, ("join", x, joined), self.walk, joins)
        ops = prefetch(self.summing(ops, rank), self.depth)
        ops = all_shared(ops, rank, self.decisions, self.node_fetches(self.mesh.node_of_rank[rank]))
        return frames(ops, linger=self.depth > 0)

    def node_fetches(self, node: int) -> Sharings:
        """Return how the ranks of a node fetch slices of other nodes, or of files, together."""
        if node not in self.fetched:
            ahead = cache(lambda rank: prefetch(self.summing(self.walk(rank), rank), self.depth))
            self.fetched[node] = (
                node_fetches(ahead, self.mates(node), self.decisions) if self.decisions.may_share else {}
            )
        return self.fetched[node]

    def summing(self, ops: list[Op], rank: int) -> list[Op]:
        """Return `ops` with pushes of a node's ranks to other nodes summed on the node first."""
        node = self.mesh.node_of_rank[rank]
        if node not in self.summed:
            self.summed[node] = (
                merging(self.walk, self.mates(node), self.mesh.node_of_rank) if self.decisions.may_share else {}
            )
        return merged(ops, rank, self.summed[node][rank]) if rank in self.summed[node] else ops

    def mates(self, node: int) -> list[int]:
        return [rank for rank in self.mesh.ranks if self.mesh.node_of_rank[rank] == node]

    # -- groups -----------------------------------------------------------------------------------

    def by_group(
        self, ops: list[Op], rank: int, key: tuple[str, str, tuple[int, ...]], member: Callable[[int], Sequence[Op]],
        prove: Callable[..., Pass | None],
    ) -> list[Op]:
        """`ops` moved by a group, where a pass can be: proved once for all its members. key: what, operand, group."""
        _, x, group = key
        if (len(group) > 1 or prove is joins) and key not in self.proved:
            self.proved[key] = prove(member, group, x)
        proof = self.proved.get(key)
        return proof(ops, rank) if proof else ops

    def joined(self, x: str, rank: int) -> list[tuple[int, ...]]:
        """Return the groups that lack slices of an operand which a rank may send: its own, and those it may join."""
        if not self.decisions.joins(x):
            return []
        if x not in self.lines:
            axes = self.decisions.group_axes(x)
            self.lines[x] = dict.fromkeys(self.along(self.work, axes, q) for q in self.work.mesh(self.mesh).ranks)
        mine = home_region(self.decisions.layout(x), self.problem.extent(x), self.mesh, rank)
        return [line for line in self.lines[x] if rank in line or side(self.box(line[0]), x) & mine]

    def along(self, layout: Layout, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Return the ranks along axes of a placement, in ring order from this rank; none beyond its grid."""
        grid, at = layout.mesh(self.mesh), layout.coords(self.mesh, rank)
        return tuple(grid.rank(to) for to in grid.along(axes, at)) if at is not None else ()

    # -- before and after the product -------------------------------------------------------------

    def copied(self, x: str, to: Layout, source: Layout, rank: int) -> list[Op]:
        """Copy a rank's part of an operand to its new place, by group operations if the algorithm moves it so."""
        axes = self.decisions.copy_axes(x, to, source)
        groups = [self.along(to, axes, rank)]
        member: Callable[[int], Sequence[Op]] = partial(self.copies, x, to, source)
        if self.decisions.brings_once(x, to, source):
            member = partial(self.copies_once, x, to, source)
            if two := crossing(self.mesh, groups[0], rank) if axes else None:
                groups = [*(each for each in two.across if rank in each), two.near]
        ops = list(member(rank))
        for group in groups:
            ops = self.by_group(ops, rank, ("copies", x, group), member, pulls)
        if not self.decisions.brings_by_pairs(x):
            return ops
        mine = home_region(source, self.problem.extent(x), self.mesh, rank)
        for q in self.mesh.ranks:
            if q == rank or home_region(to, self.problem.extent(x), self.mesh, q) & mine:
                ops = self.by_group(ops, rank, ("pair", x, (q,)), member, joins)
        return ops

    def copies(self, x: str, to: Layout, source: Layout, rank: int) -> list[Copy]:
        """Return Copies of a rank's part of an operand into its stage, or of others' parts into its own."""
        shape, home = self.problem.extent(x), self.decisions.sources.get(x, x)
        found = copies(self.mesh, shape, source, (x, home), home_region(to, shape, self.mesh, rank), rank)
        return [op for op in found if home != x or op.src.rank != rank]

    def copies_once(self, x: str, to: Layout, source: Layout, rank: int) -> list[Op]:
        """`copies`, of which a rank of a node makes those from other nodes that the others then make from it."""
        axes, found = self.decisions.copy_axes(x, to, source), self.copies(x, to, source, rank)
        group = self.along(to, axes, rank)
        if not axes or not group:
            return shared(self.mesh, found, replicas(self.mesh, to)[rank], rank)
        two = crossing(self.mesh, group, rank)
        return shared(self.mesh, found, two.near, rank, two.places) if two else [*found, Barrier(0)]

    # -- what a rank walks over in time -----------------------------------------------------------

    def box(self, rank: int) -> Region:
        """Return the box of (m, n, k) that a rank multiplies, or of which it does."""
        if self.halves:
            return self.halves.work(rank, self.problem.shape[2])
        return self.work.region(self.problem.shape, self.mesh, rank)

    def faces(self, rank: int) -> list[Region]:
        return self.halves.multiplied(rank) if self.halves else []

    def walk(self, rank: int) -> list[Op]:
        if rank not in self.walked:
            made = self.chunked if self.decisions.by_chunks else self.panelled
            self.walked[rank] = list(made(rank, self.box(rank)))
        return self.walked[rank]

    def start(self, rank: int, box: Region) -> int:
        """Return a rank's starting index within its box.

        Ranks of a node that fetch together go round in the same order.
        """
        extent = len(box[self.decisions.dim])
        if self.decisions.may_share:
            rank = self.mesh.node_of_rank.index(self.mesh.node_of_rank[rank])
        at, grid = self.work.coords(self.mesh, rank), self.work.mesh(self.mesh)
        if at is None or not extent:
            return 0
        ahead = self.algorithm.end_at_owner
        return sum((at[axis] + ahead) * extent // grid.axis_size(axis) for axis in self.decisions.start_axes) % extent

    def panelled(self, rank: int, box: Region) -> Iterator[Op]:
        """Yield the walk in panels that all operands share."""
        dim = self.decisions.dim
        if not box:
            return
        panels = self.boxes.panels(rank, box)
        begin = box[dim].take(Span.range(start := self.start(rank, box), start + 1)).start
        first = max((n for n, panel in enumerate(panels) if panel.start <= begin), default=0)
        for panel in [*panels[first:], *panels[:first]]:
            part = with_dim(box, dim, panel)
            if self.decisions.is_here:
                yield from self.boxes.box(rank, part, panel.start, None, faces=self.faces(rank))
            else:
                slot = Slot(f"C{panel.start}", side(part, "C"))
                ops = self.boxes.box(rank, part, panel.start, slot)
                yield from self.pushed([Ref(rank, slot, slot.region)], ops, panel.start)

    def chunked(self, rank: int, box: Region) -> Iterator[Op]:
        """Yield the walk in which every operand moves at its own grain, and C's sums leave when they are complete."""
        dim, is_here = self.decisions.dim, self.decisions.is_here
        face = side(box, "C")
        if not face:
            return
        fetched: dict[tuple[str, Span], Ref] = {}
        sums: list[Ref] = [Ref(rank, "C", face)] if is_here else []
        made: list[Op] = []
        begun = 0
        for step in walk_steps(self.boxes, rank, box, self.start(rank, box)):
            if not sums:
                begun = step.step if dim in OPERAND_DIMS["C"] else 0
                sums = self.sums(rank, with_span(face, "C", dim, step.chunks["C"]), begun)
            if box:
                made += self.walk_step(rank, box, step, fetched, sums)
            if is_here or "C" in step.ends:
                yield from made if is_here else self.pushed(sums, made, begun)
                made, sums = [], sums if is_here else []
        if not box[dim] and self.algorithm.result == "reduce":  # a rank without a share of k has zeros to add
            yield from self.pushed(self.sums(rank, face, 0), [], 0)

    def walk_step(
        self, rank: int, box: Region, step: WalkStep, fetched: dict[tuple[str, Span], Ref], sums: Sequence[Ref]
    ) -> list[Op]:
        """One turn: the Copies of chunks that are wanted for the first time, and the Multiplies."""
        dim = self.decisions.dim
        ops: list[Op] = []
        for x in self.algorithm.operands:
            key = x, step.chunks[x]
            if key not in fetched:
                region = with_span(side(box, x), x, dim, step.chunks[x])
                fetched[key] = self.boxes.operand(rank, x, region, step.step, str(step.step), ops)
        a, *others = (fetched[x, step.chunks[x]] for x in self.algorithm.operands)
        for c in sums:
            m, n = c.region & with_span(c.region, "C", dim, step.span)
            whole = Region((m, n, step.span if dim == 2 else box[2]))
            for piece in whole[dim].pieces(self.decisions.longest_piece(whole, dim)) if whole else ():
                m, n, k = with_dim(whole, dim, piece)
                left, part = replace(a, region=Region((m, k))), replace(c, region=Region((m, n)))
                right = replace(others[0], region=Region((k, n))) if others else replace(a, region=Region((n, k)))
                is_half = self.algorithm.half and m == n
                ops.append(Multiply(left, right, part, False, step.step, is_half, b_is_transposed_a=not others))
        return ops

    def is_dense(self, c: Ref) -> bool:
        """True if a box of C is one part of its owner's local array."""
        home = home_region(self.problem.layout("C"), self.problem.extent("C"), self.mesh, c.rank)
        return home.locate(c.region).is_contiguous

    def sums(self, rank: int, face: Region, step: int) -> list[Ref]:
        """Return slots for a part of C: one for each owner if groups sum them, as they are sent whole.

        Of a half one for each of its boxes.
        """
        parts = [part for _, part in self.boxes.owners_asked(rank, "C", face)]
        if "C" not in self.algorithm.grouped or not all(face.locate(part).is_contiguous for part in parts):
            parts = self.faces(rank) or [face]
        return [Ref(rank, Slot(f"C{step}.{n}", part), part) for n, part in enumerate(parts)]

    def pushed(self, sums: Sequence[Ref], ops: list[Op], step: int) -> list[Op]:
        """Return `ops`, which multiply into `sums`, followed by the pushes of the sums."""
        pushes: list[Op] = []
        for c in sums:
            ops = opened(c, ops, False, step)
            for owner, part in pieces(self.mesh, self.problem.extent("C"), self.problem.target, c.region, c.rank):
                pushes.append(Accumulate(replace(c, region=part), Ref(owner, "C", part), step))
        return ops + pushes

    # -- the work queue ---------------------------------------------------------------------------

    @cached_property
    def tasks(self) -> list[Region]:
        """The boxes that tickets stand for: C's tiles, cut until every rank can expect several."""
        shape, mesh = self.problem.shape, self.mesh
        if not all(shape):
            return []
        found = self.problem.target.overlapping(shape[:2], mesh, Region.whole(shape[:2]), 0)
        spans = [*(fused(disjoint(part[dim] for _, part in found)) for dim in (0, 1)), [Span.range(0, shape[2])]]

        def next_halved() -> int | None:
            return self.decisions.next_halved([len(one) for one in spans], [max(map(len, one)) for one in spans])

        while (dim := next_halved()) is not None:
            spans[dim] = [piece for span in spans[dim] for piece in span.pieces(-(-len(span) // 2))]
        return [Region(box) for box in product(*spans)]

    def task(self, number: int, rank: int) -> list[Op]:
        """Return the operations of one task when `rank` runs it: its panels of k into one slot, then one push."""
        box = self.tasks[number]
        slot = Slot(f"C.{number}", side(box, "C"))
        ops: list[Op] = []
        for n, panel in enumerate(self.boxes.panels(rank, box)):
            ops += self.boxes.box(rank, with_dim(box, self.decisions.dim, panel), n, slot, f"{number}.")
        return self.passes(self.pushed([Ref(rank, slot, slot.region)], ops, number), rank)


def with_span(face: Region, x: str, dim: int, span: Span) -> Region:
    return Region(span if d == dim else own for d, own in zip(OPERAND_DIMS[x], face, strict=True))

"""Workload of an algorithm on a problem, from its placements and work map alone, without its operations."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, prod

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.half import half_of, mirroring, pushed_halves
from rma_mm.policy.model.locality import WHOLE, RankSample, Spread, rank_sample
from rma_mm.policy.model.panels import Repacked, TaskBoxes, WorkBoxes, split_work
from rma_mm.policy.model.spans import DimSpans, Figures
from rma_mm.policy.model.traffic import FLAT, READ, LocalWork, Phase, TrafficItem, Workload
from rma_mm.schedule.algorithm import OPERAND_DIMS, OWNERS, Algorithm, Cut, PlacedProblem
from rma_mm.schedule.lowering import decisions as limits
from rma_mm.schedule.lowering.decisions import WIDTH, LoweringDecisions

PANELS = 3  # panels of an operand that a rank holds at once: what it multiplies, and what is fetched ahead
AHEAD, LINGERING = 3, 2  # steps whose broadcasts, and whose reductions, are under way at once


def workload_of(algorithm: Algorithm, problem: PlacedProblem, width: int = WIDTH) -> Workload:
    """Return the workload of `algorithm` for `problem`, in panels of `width`.

    Exact in words except for the queue, and for large meshes.
    """
    decisions = LoweringDecisions.of(algorithm, problem, width)

    def on(mesh: MeshShape) -> Workload:
        problem, read = (replace(x, mesh=mesh, fetches_together=False) for x in (decisions.problem, decisions.read))
        return _WorkloadOfProblem(replace(decisions, problem=problem, read=read), decisions).workload()

    return replace(_WorkloadOfProblem(decisions).workload(), on=on)


def distance(algorithm: Algorithm, problem: PlacedProblem) -> float:
    """Return a distance of the walk's words, to compare placements before they are priced."""
    boxes = WorkBoxes(LoweringDecisions.of(algorithm, problem))
    return sum(boxes.sample.distance(boxes.spread(x)) for x in algorithm.operands + "C" * (not boxes.decisions.is_here))


def reduction_phase(x: str, mesh: MeshShape, shape: tuple[int, int], layout: Layout) -> Phase:
    """Summands are pushed into a placement that holds each element once; of replicas one pushes."""
    sample, single = rank_sample(mesh), layout.single(mesh)
    coords, speaks = sample.coords(layout.mesh(mesh)), sample.holds(layout)
    for axis in layout.replicated_axes(mesh):
        speaks = speaks & (coords[axis] == 0)
    moved = _whole(sample, x, "accumulate", single, shape, sample.parts(layout, shape), speaks)
    return Phase([moved], opened=sample.words(single, shape), barriers=2)


def _whole(
    sample: RankSample, x: str, how: str, source: Layout, shape: tuple[int, int], wanted: tuple[DimSpans, DimSpans],
    is_any: NDArray[np.bool_], group: int = 1,
) -> TrafficItem:
    """Return a part of a matrix that moves as a whole."""
    found = sample.spread(source, shape, wanted, is_any)
    calls, run = found.cuts[0] * found.cuts[1], found.contiguous() if found.between.any() else found.run
    return _served(sample, TrafficItem(x, how, found.own, found.node, found.between, calls, group, run), source, shape)


def _served(sample: RankSample, moved: TrafficItem, source: Layout, shape: tuple[int, int]) -> TrafficItem:
    """Return the items with the owners' traffic to or from other nodes, in proportion to their parts."""
    if not source.pins or moved.how == "shift" or not moved.between.any():  # else all send alike
        return moved
    held = sample.elements_held(source, shape)
    usual = sample.mean(held)
    if not usual:
        return moved
    is_tree = moved.how == "broadcast" and moved.group > FLAT  # who has received sends on
    share = ceil(log2(moved.group)) / (moved.group - 1) if is_tree else 1.0
    return replace(moved, served=sample.mean(moved.between) * share / usual * held)


class _WorkloadOfProblem:
    """Builder of the workload of an algorithm on a problem."""

    def __init__(self, decisions: LoweringDecisions, lowered: LoweringDecisions | None = None) -> None:
        """lowered: those by which it is lowered, if what crosses is counted for other nodes than those."""
        self.decisions, self.lowered = decisions, lowered or decisions
        self.algorithm, self.problem, self.mesh, self.dim = (
            decisions.algorithm, decisions.problem, decisions.problem.mesh, decisions.dim,
        )
        self.boxes = WorkBoxes(decisions)
        self.sample = self.boxes.sample
        self.zero = np.zeros(self.sample.count)

    def workload(self) -> Workload:
        partial = [x for x in self.algorithm.operands if self.problem.layout(x).partial]
        phases = [reduction_phase(x, self.mesh, self.problem.extent(x), self.problem.layout(x)) for x in partial]
        if self.decisions.staged:
            staged = self.decisions.staged.items()
            phases.append(self.copying([(x, to, self.problem.reduced.layout(x)) for x, to in staged]))
            phases[-1].barriers += 1
        found = self.queue() if self.decisions.is_queue else self.walk()
        for phase in found:
            phase.moved = [
                _served(self.sample, moved, self.decisions.layout(moved.x), self.problem.extent(moved.x))
                for moved in phase.moved
            ]
        held = self.elements_held(found)
        if self.boxes.halves:
            found[-1].barriers += 1
            found.append(mirroring(self.boxes))
        if self.decisions.is_gathered:
            found.append(self.copying([("C", self.problem.layout("C"), self.problem.output_layout)]))
            found[-1].barriers += int(found[-1].moved[0].group == 1)
        return Workload(self.sample, [*phases, *found], held)

    def elements_held(self, phases: list[Phase]) -> Figures:
        """Return the elements of homes, of what is brought before the walk, and of panels in use."""
        homes = [(x, self.problem.layout(x)) for x in "ABC" if x not in self.problem.chunks]
        homes += [(x, layout.single(self.mesh)) for x, layout in homes[:2] if layout.partial]
        homes += list(self.decisions.staged.items())
        total = self.zero
        for x, layout in homes:
            total = total + self.sample.elements_held(layout, self.problem.extent(x))
        at = max(n for n, phase in enumerate(phases) if phase.work)
        walk = phases[at]
        for moved in (each for phase in phases[:at] for each in phase.moved):
            total = total + moved.own + moved.node + moved.between
        for moved in dict.fromkeys((*walk.moved, *phases[-1].moved)):
            alive = PANELS if self.decisions.is_queue else np.minimum(PANELS, walk.steps)
            share = alive / walk.steps if moved.x != "C" or self.decisions.is_queue else 1.0
            if moved.how != "view":
                total = total + (moved.own + moved.node + moved.between) * share
        return total

    def copying(self, wanted: list[tuple[str, Layout, Layout]]) -> Phase:
        """Return the phase in which operands come from one placement to another: each with where to and from where."""
        once = sum(self.lowered.brings_once(*each) for each in wanted)  # nobody passes on before all has come
        return Phase([self.copied(*each) for each in wanted], barriers=once)

    def copied(self, x: str, to: Layout, source: Layout) -> TrafficItem:
        """Return an operand on its way from one placement to another, as a whole."""
        shape = self.problem.extent(x)
        group = self.size(to, self.decisions.copy_axes(x, to, source))
        how, wanted = "all-gather" if group > 1 else "get", self.sample.parts(to, shape)
        if how == "get" and self.decisions.brings_by_pairs(x):
            group, how = 2, "broadcast"
        moved = _whole(self.sample, x, how, source, shape, wanted, self.sample.holds(to), group)
        if not self.lowered.brings_once(x, to, source):
            return moved
        sample = rank_sample(self.lowered.problem.mesh)
        crossing = moved.between / self.mates(sample.alike(sample.parts(to, shape), sample.holds(to)), sample)
        return replace(moved, node=moved.node + moved.between - crossing, between=crossing)

    def mates(self, found: Figures, sample: RankSample) -> Figures | float:
        """Return how many ranks of its node share what crosses: of each of these ranks, or on average of others."""
        return found if sample is self.sample else sample.mean(found)

    def walk_mates(self, x: str) -> Figures | float:
        """Return how many ranks of its node share what groups bring of an operand in the walk, or sum of C."""
        if not self.lowered.crosses_once(x):
            return 1.0
        boxes = self.boxes if self.lowered is self.decisions else WorkBoxes(self.lowered)
        return self.mates(boxes.alike(x), boxes.sample)

    def size(self, layout: Layout, axes: tuple[str, ...]) -> int:
        grid = layout.mesh(self.mesh)
        return prod(grid.axis_size(axis) for axis in axes)

    def group(self, x: str) -> int:
        return self.size(self.decisions.work, self.decisions.group_axes(x)) + self.decisions.joins(x)

    @property
    def opened(self) -> Figures:
        return self.sample.words(self.problem.output_layout, self.problem.extent("C"))

    # -- the walk ---------------------------------------------------------------------------------

    def walk(self) -> list[Phase]:
        """Add the walk: every rank multiplies its box, and pushes the result unless C is its own."""
        spreads = {x: self.boxes.spread(x) for x in self.algorithm.operands}
        work, steps, repacked = split_work(self.boxes, spreads)
        if self.boxes.halves:
            work = half_of(self.boxes, work)
            repacked = repacked if self.decisions.is_here else dict.fromkeys(spreads, self.zero + 1)
        phase, before = Phase(work=work, steps=steps), Phase()
        for x, found in spreads.items():
            at = before if x in self.algorithm.prefetch_all else phase
            at.moved += self.fetched(x, found, work, steps, repacked)
        before.barriers = int(any(moved.group > 1 for moved in before.moved))  # nobody multiplies before all have sent
        first = [before] if before.moved else []
        if self.decisions.is_here:
            if self.problem.keeps_c:
                phase.opened = self.opened
            return [*first, phase]
        behind = phase if self.dim in OPERAND_DIMS["C"] else Phase()  # sums over k are complete when all is multiplied
        behind.moved += [pushed_halves(self.boxes)] if self.boxes.halves else self.pushed(steps)
        behind.barriers = 1
        return [Phase(opened=self.opened, barriers=1), *first, *dict.fromkeys((phase, behind))]

    def run(self, x: str, found: Spread, steps: Figures | float) -> float:
        """Return the length of contiguous words that a step of the walk moves of an operand between nodes."""
        if OPERAND_DIMS[x][1] != self.dim:
            return found.contiguous()
        return found.contiguous(float(np.mean(self.boxes.extents[self.dim] / np.maximum(1.0, steps))))

    def fetched(
        self, x: str, found: Spread, work: LocalWork, steps: Figures, repacked: Repacked
    ) -> list[TrafficItem]:
        """Return the traffic that brings an operand to the ranks that multiply it."""
        zero = self.zero
        if x in self.problem.chunks:
            return [TrafficItem(x, READ, found.own / self.boxes.sharers(x), zero, zero, steps + zero)]
        rows, cols = found.cuts
        owners = rows * cols
        if x in self.algorithm.grouped:
            group, how = self.group(x), "shift" if self.decisions.is_ring(x) else "broadcast"
            how = "all-gather" if x in self.algorithm.prefetch_all else how
            calls = np.where(found.foreign > 0, np.maximum(1.0, owners - (found.own > 0)), 0.0)
            run = self.run(x, found, steps) if found.between.any() else found.run
            if how == "shift" and self.dim in OPERAND_DIMS[x]:  # the panels of a slice move one after the other
                calls = calls * np.maximum(1.0, steps / np.maximum(1.0, found.cuts[OPERAND_DIMS[x].index(self.dim)]))
            if how == "shift" and self.is_together(x, found):
                run = WHOLE if found.between.any() else max(run, float(found.foreign.max() / max(1.0, calls.max())))
            if how == "shift" and group > 1 and (found.owner_changes[0] <= found.cuts[0] + 1).all():
                return [self.shifted(x, found.foreign, calls, group, run)]
            rounds = self.rounds(x, found, steps, AHEAD) if how == "broadcast" else 1.0
            if group > 1:
                calls = np.maximum(calls, steps if how == "broadcast" else 1.0)
            how = how if group > 1 else "get"
            between = found.between / self.walk_mates(x)
            node = found.node + found.between - between
            return [TrafficItem(x, how, zero, node, between, calls, group, run, rounds)]
        share = np.where(found.foreign > 0, found.between / np.maximum(1.0, found.foreign), 0.0)
        foreign = np.maximum(0.0, owners - (found.own > 0))
        is_viewed = x in self.decisions.read.in_place
        gathered = repacked[x]
        again = np.maximum(1.0, steps / np.maximum(1.0, owners)) if self.dim in OPERAND_DIMS[x] else 1.0
        calls = np.where(found.foreign > 0, np.maximum(1.0, foreign) * again, 0.0)
        crossing = found.between / self.boxes.sharers(x)
        viewed, copied = is_viewed * (1 - gathered), np.maximum(gathered, not is_viewed)
        [beyond] = {0, 1, 2} - {*OPERAND_DIMS[x]}
        times = work.pieces[beyond]  # multiplies that read a word in place
        seen = TrafficItem(x, "view", zero, found.node * viewed * times, zero, zero)
        alone = calls * (1 - share) * copied
        near = TrafficItem(x, "get", found.own * gathered, found.node * copied, zero, alone, run=found.run)
        far = TrafficItem(x, "get", zero, zero, crossing, calls * share, run=self.run(x, found, steps))
        mates = TrafficItem(x, "view", zero, (found.between - crossing) * times, zero, zero)
        return [each for each in (seen, near, far, mates) if each.own.any() or each.node.any() or each.between.any()]

    def rounds(self, x: str, found: Spread, steps: Figures, window: int) -> Figures | float:
        """Return the factor by which the wire takes longer if one owner after the other serves a whole group.

        window: steps whose transfers are under way at once.
        """
        if self.dim not in OPERAND_DIMS[x]:
            return 1.0
        at, group = OPERAND_DIMS[x].index(self.dim), self.group(x)
        group = ceil(group / float(np.mean(self.walk_mates(x))))  # nodes, where one rank of each is sent to
        owners, changes = found.cuts[at], np.minimum(found.owner_changes[at], steps)
        at_once = np.clip(window * changes / np.maximum(1.0, steps), 1.0, np.maximum(1.0, owners))
        sent = group - 1 if group <= FLAT else ceil(log2(group))
        return np.asarray(np.maximum(1.0, np.ceil(owners / at_once) * sent / max(1, group - 1)))

    def is_together(self, x: str, found: Spread) -> bool:
        """True if all columns that its owner has of a slice move at once, so that it is one piece of memory."""
        if OPERAND_DIMS[x][1] != self.dim:
            return bool(found.cuts[1].max() < 1.5)  # where few ranks stand for all it is an estimate
        longest = (self.boxes.extents[self.dim] / np.maximum(1.0, found.cuts[1])).max()
        return longest <= self.decisions.width and all(
            cut == OWNERS or cut == Cut(1) for cut in self.decisions.grain(x)
        )

    def shifted(self, x: str, words: Figures, calls: Figures, group: int, run: float) -> TrafficItem:
        """Return the traffic of slices in a ring: each comes from a neighbour, maybe on another node."""
        grid, axes = self.decisions.work.mesh(self.mesh), self.decisions.group_axes(x)
        coords, sizes = self.sample.coords(grid), [grid.axis_size(axis) for axis in axes]
        place = np.ravel_multi_index([coords[axis] for axis in axes], sizes)

        def is_apart(ahead: int) -> NDArray[np.bool_]:
            at = dict(zip(axes, np.unravel_index((place + ahead) % group, sizes), strict=True))
            ranks = np.ravel_multi_index([at.get(axis, coords[axis]) for axis in grid.names], grid.dims)
            there = [self.mesh.node_of_rank[rank] for rank in ranks[: self.sample.count].tolist()]
            return np.asarray(np.array(there) != self.sample.nodes)

        comes, goes = is_apart(1), is_apart(-1)
        return TrafficItem(
            x, "shift", self.zero, words * ~comes, words * comes, calls, group, run, passed=words * ~goes,
            skips_turn=x != "C",
        )

    def pushed(self, steps: Figures) -> list[TrafficItem]:
        """Return the traffic of products to the owners of C."""
        found = self.boxes.spread("C")
        run = self.run("C", found, steps) if found.between.any() else found.run
        rows, cols = found.cuts
        owners, is_reduced = rows * cols, self.algorithm.result == "reduce"
        group = self.group("C") if is_reduced and "C" in self.algorithm.grouped else 1
        if group > 1:
            if self.algorithm.end_at_owner:
                return [self.shifted("C", found.foreign, np.maximum(1.0, owners), group, run)]
            how = "reduce-scatter" if rows.max() * cols.max() > 1 else "reduce"
            calls, rounds = np.where(found.foreign > 0, owners, 1.0), self.rounds("C", found, steps, LINGERING)
            near = found.node.sum() / max(1.0, found.foreign.sum())
            passed = found.own * (group - 1) * near  # who has a part of C takes what all others of its group made of it
            mates = self.walk_mates("C")
            between = found.between / mates
            node = found.node + found.between - between
            if self.lowered.crosses_once("C"):  # and sums of those parts that other nodes have
                passed = passed * group / mates
            return [TrafficItem("C", how, self.zero, node, between, calls, group, run, rounds, 0.0, passed)]
        parts = steps if not is_reduced and self.dim in OPERAND_DIMS["C"] else 1.0
        calls = np.maximum(owners, parts * np.minimum(owners, 1.0))
        sharers = np.where(found.between > 0, self.boxes.sharers("C"), 1.0)
        summed = (found.own + found.foreign) * (1 - 1 / sharers)
        own, node, between = (words / sharers for words in (found.own, found.node, found.between))
        beside = [cuts for dim, cuts in zip(OPERAND_DIMS["C"], found.cuts, strict=True) if dim != self.dim]
        skips_turn = self.algorithm.end_at_owner and len(beside) == 1 and bool(found.own.all() and beside[0].max() <= 1)
        calls = calls * np.ones_like(own)
        moved = [TrafficItem("C", "accumulate", own, node, between, calls, run=run, skips_turn=skips_turn)]
        if np.any(summed):
            moved.append(TrafficItem("C", "reduce", self.zero, summed, self.zero, np.ones_like(summed)))
        return moved

    # -- the queue --------------------------------------------------------------------------------

    def queue(self) -> list[Phase]:
        """Equal shares of all boxes, which fall to any rank, from owners that may be anywhere."""
        mesh, (m, n, k) = self.mesh, self.problem.shape
        counts = self.tasks()
        total = float(prod(counts))
        shares = total / mesh.size
        ones = np.ones(self.sample.count)
        beyond = 1 - self.sample.populations / mesh.size
        near = 1 - 1 / mesh.size - beyond
        moved = []
        boxes = TaskBoxes(self.decisions, counts)
        drawn, _, repacked = split_work(boxes, {x: boxes.spread(x) for x in "AB"})
        faces = {"A": float(m * k * counts[1]), "B": float(k * n * counts[0]), "C": float(m * n * counts[2])}
        for x, words in faces.items():
            spans = self.sample.parts(self.decisions.layout(x), self.problem.extent(x))
            owners = max(1.0, prod(spans[d].parts / max(1, counts[at]) for d, at in enumerate(OPERAND_DIMS[x])))
            mine, calls = ones * words / mesh.size, ones * shares * owners
            column = OPERAND_DIMS[x][1]
            run = min(spans[1].run, max(1.0, self.problem.shape[column] / max(1, counts[column])))
            if x == "C":
                moved.append(TrafficItem(x, "accumulate", mine / mesh.size, mine * near, mine * beyond, calls, run=run))
                continue
            gathered, zero = float(repacked[x].mean()), self.zero
            copied = gathered if x in self.decisions.read.in_place else 1.0
            moved.append(TrafficItem(x, "view", zero, mine * near * (1 - copied), zero, zero))
            own, calls_near = mine / mesh.size * gathered, calls * near * copied
            moved.append(TrafficItem(x, "get", own, mine * near * copied, zero, calls_near, run=run))
            moved.append(TrafficItem(x, "get", zero, zero, mine * beyond, calls * beyond, run=run))
        extents = (ones * m, ones * n, ones * k)
        cut_m, cut_n, cut_k = (ones * count * each.mean() for count, each in zip(counts, drawn.pieces, strict=True))
        work = LocalWork(extents, (cut_m, cut_n, cut_k), ones * n / max(1, counts[1]))
        walk = Phase(moved, work, steps=max(1.0, shares), claims=shares + 1, is_shared=True, barriers=1)
        return [Phase(opened=self.opened, barriers=1), walk]

    def tasks(self) -> list[int]:
        """Boxes of the queue along m, n and k, taken to be even."""
        m, n, k = self.problem.shape
        if not (m and n and k):
            return [0, 0, 0]
        tiles = self.sample.parts(self.problem.target, (m, n))
        counts = [*(max(1, min(each.parts, each.extent // limits.NARROW)) for each in tiles), 1]
        widths = [-(-extent // count) for extent, count in zip((m, n, k), counts, strict=True)]
        while (dim := self.decisions.next_halved(counts, widths)) is not None:
            counts[dim] *= 2
            widths[dim] = -(-widths[dim] // 2)
        return counts

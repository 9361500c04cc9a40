"""The account of a row for a problem, from its placements and work map alone, without its operations."""

from __future__ import annotations

from math import ceil, log2, prod

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import AXIS_NAMES
from rma_mm.policy.model.locality import Spread
from rma_mm.policy.model.panels import Cutting
from rma_mm.policy.model.spans import Figures, Marks
from rma_mm.policy.model.traffic import FLAT, Account, Moved, Phase, Work
from rma_mm.schedule.lowering import boxes
from rma_mm.schedule.lowering.lower import TASKS_PER_RANK
from rma_mm.schedule.row import OPERAND_DIMS, Problem, Row

PANELS = 3
"""Panels of an operand that a rank holds at once: what it multiplies, and what is fetched ahead."""
AHEAD, LINGERING = 3, 2
"""Steps whose broadcasts, and whose reductions, are under way at once."""


def account(row: Row, problem: Problem, width: int = boxes.WIDTH) -> Account:
    """What `row` does for `problem`, in panels of `width`. Exact in words but for the queue, and for large meshes."""
    return _Accounting(row, problem, width).account()


def distance(row: Row, problem: Problem) -> float:
    """How far away the walk's words lie, to compare placements by before they are priced."""
    found = _Accounting(row, problem, boxes.WIDTH)
    spreads = [found.spread(x) for x in ("AB" if row.result == "here" else "ABC")]
    return sum(found.crowd.distance(spread) for spread in spreads)


class _Accounting(Cutting):
    """What it moves and multiplies."""

    def account(self) -> Account:
        phases = [*self.summed(), *self.brought()]
        found = self.queue() if self.is_queue else self.walk()
        for phase in found:
            phase.moved = [self.served(moved, self.owners(moved.x)) for moved in phase.moved]
        phases += found
        return Account(self.crowd, [*phases, *self.gathered()], self.held(phases))

    def held(self, phases: list[Phase]) -> Figures:
        """Elements of homes, of what operands are brought to, and of the panels that are under way."""
        homes = [(x, self.given.layout(x)) for x in "ABC"]
        homes += [(x, self.given.layout(x).single(self.given.mesh)) for x in "AB" if self.given.layout(x).partial]
        homes += list(self.staged.items())
        total = np.zeros(self.crowd.count)
        for x, layout in homes:
            total = total + self.each(self.marks_of(layout, x)) * self.crowd.holds(layout)[: self.crowd.count]
        walk = phases[-1]
        for moved in walk.moved:
            alive = np.minimum(PANELS, walk.steps) / walk.steps if moved.x != "C" and not self.is_queue else 1.0
            if moved.how != "view":
                words = moved.own + moved.node + moved.between
                total = total + words * (alive if not self.is_queue else PANELS / walk.steps)
        return total

    # -- before and after -------------------------------------------------------------------------

    def summed(self) -> list[Phase]:
        """Summands of A and B are pushed into placements that hold each element once; of replicas one pushes."""
        phases = []
        mesh = self.given.mesh
        for x in "AB":
            layout, shape = self.given.layout(x), self.given.extent(x)
            if layout.partial:
                coords = self.crowd.coords(layout.mesh(mesh))
                speaks = self.crowd.holds(layout)
                for axis in layout.replicated_axes(mesh):
                    speaks = speaks & (coords[axis] == 0)
                wanted = self.marks_of(layout, x)
                moved = self.moved(x, "accumulate", layout.single(mesh), shape, wanted, speaks)
                mine = self.each(self.marks_of(layout.single(mesh), x))
                phases.append(Phase([moved], opened=mine, barriers=2))
        return phases

    def brought(self) -> list[Phase]:
        """Operands that the row wants elsewhere."""
        if not self.staged:
            return []
        moved = []
        for x, layout in self.staged.items():
            source = self.given.summed.layout(x)
            group = self.alike(layout, source) if x in self.row.grouped else 1
            moved.append(
                self.moved(x, "all-gather" if group > 1 else "get", source, self.given.extent(x),
                           self.marks_of(layout, x), self.crowd.holds(layout), group=group)
            )  # fmt: skip
        return [Phase(moved, barriers=1)]

    def gathered(self) -> list[Phase]:
        """What ranks take of a replicated C that others computed."""
        mesh, layout = self.given.mesh, self.given.layout("C")
        if not any(layout.mesh(mesh).axis_size(axis) > 1 for axis in layout.replicated_axes(mesh)):
            return []
        wanted, share = self.marks_of(layout, "C"), self.given.share
        group = self.alike(layout, share) if "C" in self.row.grouped else 1
        how = "all-gather" if group > 1 else "get"
        moved = self.moved("C", how, share, self.given.extent("C"), wanted, self.crowd.holds(layout), group=group)
        return [Phase([moved])] if group > 1 else [Phase([moved], barriers=1)]

    def moved(
        self, x: str, how: str, source: Layout, shape: tuple[int, int], wanted: tuple[Marks, Marks],
        is_any: np.ndarray, group: int = 1,
    ) -> Moved:  # fmt: skip
        """A part of a matrix that moves as a whole."""
        found = self.crowd.spread(source, shape, wanted, is_any)
        calls = found.cuts[0] * found.cuts[1]
        return self.served(Moved(x, how, found.own, found.node, found.between, calls, group, found.run), source)

    # -- the walk ---------------------------------------------------------------------------------

    def walk(self) -> list[Phase]:
        """Every rank multiplies its box, and pushes what it made where C is not its own."""
        phase = Phase(barriers=0)
        spreads = {x: self.spread(x) for x in "AB"}
        phase.work, phase.steps = self.cut(spreads)
        before = Phase()
        for x, found in spreads.items():
            (before if x in self.row.whole else phase).moved += self.fetched(x, found, phase)
        first = [before] if before.moved else []
        if self.row.result == "here":
            if self.given.keeps_c:
                phase.opened = self.each(self.marks_of(self.given.share, "C"))
            return [*first, phase]
        phase.moved += self.pushed(phase)
        phase.barriers = 1
        return [Phase(opened=self.each(self.marks_of(self.given.share, "C")), barriers=1), *first, phase]

    def fetched(self, x: str, found: Spread, phase: Phase) -> list[Moved]:
        """How an operand comes to the ranks that multiply it."""
        zero = np.zeros(self.crowd.count)
        rows, cols = found.cuts
        owners = rows * cols
        if x in self.row.grouped:
            group, how = self.group(x), "shift" if self.is_ring(x) else "broadcast"
            how = "all-gather" if x in self.row.whole else how
            calls = np.where(found.foreign > 0, np.maximum(1.0, owners - (found.own > 0)), 0.0)
            if how == "shift" and group > 1 and (found.turns[0] <= found.cuts[0] + 1).all():
                return [self.shifted(x, found.foreign, calls, group, found.run)]
            rounds = self.rounds(x, found, phase, AHEAD) if how == "broadcast" else 1.0
            if group > 1:
                calls = np.maximum(calls, phase.steps if how == "broadcast" else 1.0)
            how = how if group > 1 else "get"
            return [Moved(x, how, zero, found.node, found.between, calls, group, found.run, rounds)]
        share = np.where(found.foreign > 0, found.between / np.maximum(1.0, found.foreign), 0.0)
        foreign = np.maximum(0.0, owners - (found.own > 0))
        is_viewed = x in self.problem.in_place
        gathered = self.torn[x]
        again = np.maximum(1.0, phase.steps / np.maximum(1.0, owners)) if self.dim in OPERAND_DIMS[x] else 1.0
        calls = np.where(found.foreign > 0, np.maximum(1.0, foreign) * again, 0.0)
        sharers = self.sharers(x, self.has_work)
        crossing = found.between / sharers
        viewed, copied = is_viewed * (1 - gathered), np.maximum(gathered, not is_viewed)
        seen = Moved(x, "view", zero, found.node * viewed, zero, zero)
        alone = calls * (1 - share) * copied
        near = Moved(x, "get", found.own * gathered, found.node * copied, zero, alone, run=found.run)
        far = Moved(x, "get", zero, zero, crossing, calls * share, run=found.run)
        mates = Moved(x, "view", zero, found.between - crossing, zero, zero)
        return [each for each in (seen, near, far, mates) if each.own.any() or each.node.any() or each.between.any()]

    def is_ring(self, x: str) -> bool:
        """Whether the ranks of a group start at different places, so that slices go round."""
        if self.row.order != "rotated":
            return False
        named = dict(zip(AXIS_NAMES, self.given.mesh.names, strict=False)) if self.work.grid is None else {}
        by = {named.get(axis, axis) for axis in self.row.by}
        return not by or not by.isdisjoint(self.free_axes(x))

    def rounds(self, x: str, found: Spread, phase: Phase, window: int) -> Figures | float:
        """How much longer the wire takes where one owner after the other sends to, or receives from, a whole group.

        window: steps whose transfers are under way at once.
        """
        if self.dim not in OPERAND_DIMS[x]:
            return 1.0
        at, group = OPERAND_DIMS[x].index(self.dim), self.group(x)
        owners, changes = found.cuts[at], np.minimum(found.turns[at], phase.steps)
        at_once = np.clip(window * changes / np.maximum(1.0, phase.steps), 1.0, np.maximum(1.0, owners))
        sent = group - 1 if group <= FLAT else ceil(log2(group))
        return np.asarray(np.maximum(1.0, np.ceil(owners / at_once) * sent / max(1, group - 1)))

    def shifted(self, x: str, words: Figures, calls: Figures, group: int, run: float) -> Moved:
        """What goes round a ring comes from a rank's neighbour, whoever owns it."""
        is_apart = self.is_apart(x)
        return Moved(x, "shift", np.zeros_like(words), words * ~is_apart, words * is_apart, calls, group, run)

    def is_apart(self, x: str) -> NDArray[np.bool_]:
        """Whose neighbour in the ring along the axes that do not cut an operand lives on another node."""
        mesh = self.given.mesh
        grid = self.work.mesh(mesh)
        free = self.free_axes(x)
        coords = self.crowd.coords(grid)
        sizes = tuple(grid.axis_size(axis) for axis in free)
        place = np.ravel_multi_index([coords[axis] for axis in free], sizes)
        following = dict(zip(free, np.unravel_index((place + 1) % prod(sizes), sizes), strict=True))
        ranks = np.ravel_multi_index([following.get(axis, coords[axis]) for axis in grid.names], grid.shape)
        there = np.array([mesh.nodes[rank] for rank in ranks.tolist()])
        return np.asarray(there[: self.crowd.count] != self.crowd.nodes[: self.crowd.count])

    def pushed(self, phase: Phase) -> list[Moved]:
        """How products come to the owners of C."""
        found = self.spread("C")
        rows, cols = found.cuts
        is_reduced = self.row.result == "reduce" and "C" in self.row.grouped
        group = self.group("C") if is_reduced else 1
        if group > 1:
            how = "reduce-scatter" if rows.max() * cols.max() > 1 else "reduce"
            if self.row.own_last:
                return [self.shifted("C", found.foreign, np.maximum(1.0, rows * cols), group, found.run)]
            calls = np.where(found.foreign > 0, rows * cols, 1.0)
            zero, rounds = np.zeros(self.crowd.count), self.rounds("C", found, phase, LINGERING)
            return [Moved("C", how, zero, found.node, found.between, calls, group, found.run, rounds)]
        parts = phase.steps if self.row.result == "accumulate" and self.dim in OPERAND_DIMS["C"] else 1.0
        again = phase.steps if self.row.result == "accumulate" and self.dim == 2 else 1.0
        calls = np.maximum(rows * cols, parts * np.minimum(rows * cols, 1.0))
        sharers = np.where(found.between > 0, self.sharers("C", self.has_work), 1.0)
        summed = (found.own + found.foreign) * (1 - 1 / sharers)
        own, node, between = (words * again / sharers for words in (found.own, found.node, found.between))
        moved = [Moved("C", "accumulate", own, node, between, calls * again * np.ones_like(own), run=found.run)]
        if np.any(summed):
            zero = np.zeros_like(summed)
            moved.append(Moved("C", "reduce", zero, summed, zero, np.ones_like(summed)))
        return moved

    # -- the queue --------------------------------------------------------------------------------

    def queue(self) -> list[Phase]:
        """Equal shares of all boxes, which fall to any rank, from owners that may be anywhere."""
        mesh, (m, n, k) = self.given.mesh, self.given.shape
        counts = self.tasks()
        total = float(prod(counts))
        shares = total / mesh.size
        ones = np.ones(self.crowd.count)
        beyond = 1 - self.crowd.populations / mesh.size
        near = 1 - 1 / mesh.size - beyond
        moved = []
        faces = {"A": float(m * k * counts[1]), "B": float(k * n * counts[0]), "C": float(m * n * counts[2])}
        for x, words in faces.items():
            marks = self.marks_of(self.owners(x), x)
            owners = max(1.0, prod(marks[d].parts / max(1, counts[at]) for d, at in enumerate(OPERAND_DIMS[x])))
            mine, calls = ones * words / mesh.size, ones * shares * owners
            column = OPERAND_DIMS[x][1]
            run = min(marks[1].run, max(1.0, self.given.shape[column] / max(1, counts[column])))
            if x == "C":
                moved.append(Moved(x, "accumulate", mine / mesh.size, mine * near, mine * beyond, calls, run=run))
                continue
            how, zero = "view" if x in self.problem.in_place else "get", np.zeros_like(ones)
            moved.append(Moved(x, how, zero, mine * near, zero, calls * near * (how == "get"), run=run))
            moved.append(Moved(x, "get", zero, zero, mine * beyond, calls * beyond, run=run))
        extents = (ones * m, ones * n, ones * k)
        cut = [float(count) for count in counts]
        panels = max(1.0, ceil(k / max(1, counts[2]) / self.width))
        work = Work(extents, (ones * cut[0], ones * cut[1], ones * cut[2] * panels), ones * n / max(1.0, cut[1]))
        opened = self.each(self.marks_of(self.given.share, "C"))
        walk = Phase(moved, work, steps=max(1.0, shares), claims=shares + 1, is_shared=True, barriers=1)
        return [Phase(opened=opened, barriers=1), walk]

    def tasks(self) -> tuple[int, int, int]:
        """Boxes of the queue along m, n and k, as `lower.task_boxes` cuts them."""
        m, n, k = self.given.shape
        if not (m and n and k):
            return 0, 0, 0
        target = self.problem.target
        counts, widths = [], []
        for dim, extent in enumerate((m, n)):
            parts = max(1, min(self.crowd.marks(target, dim, extent).parts, extent // boxes.NARROW))
            counts.append(parts)
            widths.append(-(-extent // parts))
        counts, widths = [*counts, 1], [*widths, k]
        wanted = TASKS_PER_RANK * self.given.mesh.size
        while prod(counts) < wanted:
            widest = max((0, 1), key=lambda d: widths[d])
            if widths[widest] < 2 * boxes.NARROW:
                widest = 2
            if widths[widest] < 2 * boxes.NARROW:
                break
            counts[widest] *= 2
            widths[widest] = -(-widths[widest] // 2)
        return counts[0], counts[1], counts[2]

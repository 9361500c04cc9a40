"""A row applied to one problem, before anything moves: what ranks hold and want, and which of them are alike."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, prod

import numpy as np

from rma_mm.geometry.layout import Layout
from rma_mm.policy.model.locality import Spread, crowd
from rma_mm.policy.model.spans import Figures, Marks
from rma_mm.policy.model.traffic import FLAT, Moved
from rma_mm.schedule.row import DIMS, OPERAND_DIMS, Problem, Row


class Footing:
    """One row applied to one problem."""

    def __init__(self, row: Row, problem: Problem, width: int) -> None:
        self.row, self.width = row, width
        fitted = row.fitted(problem)
        self.given, self.problem, self.staged, self.work = fitted.given, fitted.read, fitted.staged, fitted.work
        self.crowd = crowd(problem.mesh)
        self.dim = DIMS.index(row.over)
        self.is_queue = row.order == "ticket"
        self.by_chunks = bool(row.grouped) or (row.result != "here" and row.over == "k")
        self.marks = [self.crowd.marks(self.work, dim, extent) for dim, extent in enumerate(problem.shape)]
        self.has_place = self.crowd.holds(self.work)
        is_any = [marks.each > 0 for marks in self.marks]
        self.has_work = self.has_place & is_any[0] & is_any[1] & is_any[2]

    # -- what there is ------------------------------------------------------------------------------

    def owners(self, x: str) -> Layout:
        """The placement that an operand is read by, or pushed to."""
        return self.problem.target if x == "C" else self.problem.layout(x)

    def spread(self, x: str) -> Spread:
        """Where ranks find what their boxes want of an operand."""
        who = self.has_place if x == "C" and self.row.result == "reduce" else self.has_work  # it may have zeros to add
        return self.crowd.spread(self.owners(x), self.problem.extent(x), self.face(x), who)

    def face(self, x: str) -> tuple[Marks, Marks]:
        """What boxes want of an operand."""
        rows, cols = OPERAND_DIMS[x]
        return self.marks[rows], self.marks[cols]

    def marks_of(self, layout: Layout, x: str) -> tuple[Marks, Marks]:
        """What ranks hold of an operand."""
        rows, cols = self.given.extent(x)
        return self.crowd.marks(layout, 0, rows), self.crowd.marks(layout, 1, cols)

    def each(self, marks: tuple[Marks, Marks]) -> Figures:
        """Words of each rank's box."""
        return marks[0].each[: self.crowd.count] * marks[1].each[: self.crowd.count]

    def served(self, moved: Moved, source: Layout) -> Moved:
        """With what the owners send to other nodes, or receive from them, which is shared out as they hold it."""
        if not source.pins or moved.how == "shift" or not moved.between.any():  # else all send alike
            return moved
        held = self.each(self.marks_of(source, moved.x)) * self.crowd.holds(source)[: self.crowd.count]
        usual = self.crowd.mean(held)
        if not usual:
            return moved
        is_tree = moved.how == "broadcast" and moved.group > FLAT  # who has received sends on
        share = ceil(log2(moved.group)) / (moved.group - 1) if is_tree else 1.0
        return replace(moved, served=self.crowd.mean(moved.between) * share / usual * held)

    # -- who is like whom -------------------------------------------------------------------------

    def sharers(self, x: str, is_any: np.ndarray) -> Figures | float:
        """Ranks of a node that fetch, or push, the same part together."""
        if not self.problem.shares or self.row.grouped:
            return 1.0
        return self.crowd.alike(self.face(x), is_any)

    def group(self, x: str) -> int:
        """Ranks that work on the same slices of A or B, or add to the same part of C (as `lower` finds them)."""
        grid = self.work.mesh(self.given.mesh)
        return prod(grid.axis_size(axis) for axis in self.free_axes(x))

    def free_axes(self, x: str) -> tuple[str, ...]:
        """The axes along which ranks work on the same slices."""
        grid, layout = self.work.mesh(self.given.mesh), self.owners(x)
        if layout.mesh(self.given.mesh) != grid:
            return ()
        cutting = {axis for dim in OPERAND_DIMS[x] for level in self.work.splits[dim] for axis in level.axes}
        if x != "C":
            cutting |= set(layout.replicated_axes(grid))
        return tuple(axis for axis in grid.names if axis not in cutting)

    def alike(self, to: Layout, source: Layout) -> int:
        """Ranks that hold the same part of a matrix placed by `to`, and not of one placed by `source`."""
        mesh = self.given.mesh
        if not to.split_axes and not to.pins and not to.partial:
            return mesh.size
        grid = to.mesh(mesh)
        if source.mesh(mesh) != grid:
            return 1
        free = [axis for axis in to.replicated_axes(grid) if axis not in source.replicated_axes(grid)]
        return prod(grid.axis_size(axis) for axis in free)

"""Placements that loops written in words need for their operands, on any mesh; see `scheduling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rma_mm.classes import dataclass
from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.distal import parse_distal
from rma_mm.schedule.algorithm import DIMS, OPERAND_DIMS, PlacedProblem, Wanted


@dataclass(frozen=True)
class PlacedLoops:
    """The placements of op(A), op(B) and C, and those that operands are staged to before the product."""

    notations: tuple[str, str, str]  # of A, B and C, as they lie
    transposed: str  # those of A and B that lie transposed
    axes: tuple[str, ...]  # names here of the axes of the mesh
    work: Mapping[str, tuple[str, ...]]  # m, n, k → the axes that share it out, outermost first
    over: str  # which of them is the loop in time
    by: tuple[str, ...]  # the axes by whose coordinates it is rotated
    chunked: str  # the operands that are communicated in chunks of it

    @property
    def any_mesh(self) -> MeshShape:
        return MeshShape((10,) * len(self.axes))

    def placed(self, x: str, mesh: MeshShape) -> Layout:
        """Return the placement of op(A), op(B) or C on a mesh. Raises LayoutError."""
        layout = parse_distal(self.notations["ABC".index(x)], mesh)
        return layout.T if x in self.transposed else layout

    def staged_layout(self, x: str, mesh: MeshShape) -> Layout | None:
        """Return the placement that A or B is redistributed to before the product; None if it stays.

        Of what moves in chunks, copies are made first; what is cut over a rotating axis is skewed by the others.
        """
        placed = self.placed(x, mesh)
        if x not in self.chunked:
            return None
        brought = self._skewed(x, placed, mesh) if DIMS.index(self.over) in OPERAND_DIMS[x] else placed
        return brought if brought != placed or placed.replicated_axes(mesh) else None

    def _skewed(self, x: str, placed: Layout, mesh: MeshShape) -> Layout:
        """An operand in circular windows of each rank's share of the loop in time, where its part of that rotates."""
        named = dict(zip(self.axes, mesh.names, strict=False))
        dim = OPERAND_DIMS[x].index(DIMS.index(self.over))
        own, other = ([axis for level in placed.splits[d] for axis in level.axes] for d in (dim, 1 - dim))
        share, by = ([named[axis] for axis in axes] for axes in (self.work.get(self.over, ()), self.by))
        outer = [axis for axis in share if axis not in other]
        inner = [axis for axis in own if axis not in outer]
        turning = next((axis for axis in inner if axis in by), None)
        skew = tuple(axis for axis in by if axis not in (*inner, *outer))
        if turning is None or not skew:
            return placed
        split = tuple(Level((axis,), skew=skew if axis == turning else ()) for axis in (*outer, *inner))
        splits = tuple(split if d == dim else placed.splits[d] for d in (0, 1))
        return replace(placed, splits=splits, pins=tuple(pin for pin in placed.pins if pin[0] not in outer))

    def placements(self, mesh: MeshShape) -> Wanted | str:
        """Return the placements on a mesh, or why it cannot be used."""
        if len(mesh.dims) != len(self.axes):
            texts = ", ".join(self.notations)
            return f"needs a mesh with as many axes as {texts} have entries; this one is {mesh}"
        try:
            return self.placed("A", mesh), self.placed("B", mesh), self.placed("C", mesh).split_replicas(mesh)
        except LayoutError as error:
            return str(error)

    def also_accepts(self, mesh: MeshShape) -> dict[str, Layout]:
        """Return placements accepted too: staged A and B, a single copy at coordinate 0, all copies of C."""
        found = {"C": self.placed("C", mesh)}
        for x in "AB":
            placed, brought = self.placed(x, mesh), self.staged_layout(x, mesh)
            spare = placed.replicated_axes(mesh)
            if brought is not None:
                first = replace(placed, pins=(*placed.pins, *((axis, 0) for axis in spare)))
                found[x] = first if spare else brought
        return found

    def staged_to(self, problem: PlacedProblem) -> dict[str, Layout]:
        wanted = {x: self.staged_layout(x, problem.mesh) for x in "AB"}
        return {x: layout for x, layout in wanted.items() if layout is not None}

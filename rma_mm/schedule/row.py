"""An algorithm as a value: placements, work map, order in time. `lower` turns it into a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ..geometry.layout import Layout, Level
from ..geometry.mesh import MeshShape
from ..geometry.span import Region

Operand = Literal["A", "B", "C"]

DIMS = "mnk"
"""Dimensions of the iteration space, in the order of its regions."""
OPERAND_DIMS: dict[str, tuple[int, int]] = {"A": (0, 2), "B": (2, 1), "C": (0, 1)}
"""Which dimensions of (m, n, k) the rows and columns of each operand are."""


def side(box: Region, operand: str) -> Region:
    """The face of a box of (m, n, k) that lies in `operand`."""
    rows, cols = OPERAND_DIMS[operand]
    return Region((box[rows], box[cols]))


@dataclass(frozen=True)
class Problem:
    """C[m, n] = alpha · A[m, k] @ B[k, n] + beta · C with its placements (transposes already applied)."""

    shape: tuple[int, int, int]
    """(m, n, k)."""
    mesh: MeshShape
    layouts: tuple[Layout, Layout, Layout]
    """Placements of op(A), op(B) and C."""
    keeps_c: bool = False
    """Whether beta ≠ 0, so that C's old value enters."""
    in_place: str = "AB"
    """The operands whose memory a rank can read on its node-mates too (else only its own)."""

    def extent(self, operand: str) -> tuple[int, int]:
        """(rows, columns) of an operand."""
        rows, cols = OPERAND_DIMS[operand]
        return self.shape[rows], self.shape[cols]

    def layout(self, operand: str) -> Layout:
        """The placement of an operand."""
        return self.layouts["ABC".index(operand)]

    def reaches(self, rank: int, owner: int, operand: str) -> bool:
        """Whether `rank` can multiply out of `owner`'s part of `operand` in place."""
        return rank == owner or (operand in self.in_place and self.mesh.nodes[rank] == self.mesh.nodes[owner])

    @property
    def summed(self) -> Problem:
        """The problem once partial operands have been summed into placements that hold each element once."""
        a, b, c = self.layouts
        mesh = self.mesh
        return replace(self, layouts=(a.single(mesh) if a.partial else a, b.single(mesh) if b.partial else b, c))

    @property
    def share(self) -> Layout:
        """What each rank opens and finishes of C: replicas share it out, of partial sums every summand is opened."""
        return self.layout("C").unshared(self.mesh)

    @property
    def target(self) -> Layout:
        """Where pushed products go: one rank for each element, of partial sums the first summand."""
        share = self.share
        return replace(share, partial=(), pins=(*share.pins, *((axis, 0) for axis in share.partial)))


WorkMap = Callable[[Problem], Layout]
"""Problem → placement of the iteration space (m, n, k): which rank multiplies which box."""


@dataclass(frozen=True)
class Row:
    """One algorithm of the literature, as the survey's table has it."""

    name: str
    """The name on the command line."""
    source: str
    """Author, year: where it was published."""
    summary: str
    """One line for `--list`."""
    work: WorkMap
    """Which rank multiplies which box of (m, n, k)."""
    over: Literal["m", "n", "k"]
    """The dimension that a rank walks in time."""
    order: Literal["rotated", "plain", "ticket"] = "rotated"
    """Where a rank starts on it; `ticket` hands out boxes by fetch-and-add."""
    result: Literal["here", "accumulate"] = "here"
    """Whether C is multiplied into where it lives, or pushed to its owner."""
    placements: Callable[[MeshShape], tuple[Layout, Layout, Layout] | str] | None = None
    """The placements it needs on a mesh (or why it cannot use that mesh); None where it takes any."""

    @property
    def reproducible(self) -> bool:
        """Whether sums are formed in a fixed order: no accumulate."""
        return self.result == "here"


def stationary(operand: Operand) -> WorkMap:
    """The work map in which the owners of `operand` do the work; replicas share it out.

    Replicas of C share out its elements, and axes along which it holds partial sums cut k. Replicas of A or B share
    out the dimension that the operand lacks.
    """

    def work(problem: Problem) -> Layout:
        layout, mesh = problem.layout(operand), problem.mesh
        spare = layout.partial
        if operand == "C":
            layout = layout.unshared(mesh)
        else:
            spare = layout.replicated_axes(mesh)
        splits: list[tuple[Level, ...]] = [(), (), ()]
        for dim, split in zip(OPERAND_DIMS[operand], layout.splits, strict=True):
            splits[dim] = split
        splits["BAC".index(operand)] = tuple(Level((axis,)) for axis in spare)
        return Layout(tuple(splits), layout.pins)

    return work

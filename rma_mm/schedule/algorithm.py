"""An algorithm as a value: placements, work map, order in time. `lower` turns it into a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import lcm
from typing import Literal

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region
from rma_mm.schedule.symmetry import Symmetry

Operand = Literal["A", "B", "C"]

DIMS = "mnk"  # dimensions of the iteration space, in the order of its regions
OPERAND_DIMS: dict[str, tuple[int, int]] = {"A": (0, 2), "B": (2, 1), "C": (0, 1)}
"""The dimensions of (m, n, k) that are the rows and columns of each operand."""


def side(box: Region, operand: str) -> Region:
    """Return the face of a box of (m, n, k) that lies in `operand`."""
    rows, cols = OPERAND_DIMS[operand]
    return Region((box[rows], box[cols]))


Files = tuple[tuple[str, tuple[int, int]], ...]
"""(A or B, rows and columns of the chunks in which a file keeps it; ones where any part is read by itself)."""
LONGEST_GRAIN = 2**14
"""Indices that panels are at most made to begin at multiples of, where two files keep different ones together."""


@dataclass(frozen=True)
class PlacedProblem:
    """C[m, n] = alpha · A[m, k] @ B[k, n] + beta · C with its placements (transposes already applied)."""

    shape: tuple[int, int, int]  # (m, n, k)
    mesh: MeshShape
    layouts: tuple[Layout, Layout, Layout]  # placements of op(A), op(B) and C
    keeps_c: bool = False  # true if beta ≠ 0, so that C's old value enters
    in_place: str = "AB"  # the operands whose memory a rank can read on its node-mates too (else only its own)
    fetches_together: bool = False
    """True if ranks of a node can fetch slices from other nodes into memory that all of them read."""
    computed: Layout | None = None  # owners of the parts of a replicated C, if the algorithm has its own division
    copied: str = ""  # operands that every rank first copies to where its node-mates can read them in place
    symmetry: Symmetry | None = None  # symmetry of C, if it is known
    files: Files = ()  # the operands that stay in files: each rank copies what it reads of them

    def extent(self, operand: str) -> tuple[int, int]:
        rows, cols = OPERAND_DIMS[operand]
        return self.shape[rows], self.shape[cols]

    @cached_property
    def chunks(self) -> dict[str, tuple[int, int]]:
        return dict(self.files)

    def chunk_multiple(self, dim: int) -> int:
        """Indices of m, n or k that files keep together, and that no panel, and no share of a rank, should cut."""
        found = [chunk[OPERAND_DIMS[x].index(dim)] for x, chunk in self.files if dim in OPERAND_DIMS[x]]
        return lcm(*found) if found and lcm(*found) <= LONGEST_GRAIN else max(found, default=1)

    def layout(self, operand: str) -> Layout:
        return self.layouts["ABC".index(operand)]

    def reaches(self, rank: int, owner: int, operand: str) -> bool:
        """True if `rank` can multiply out of `owner`'s part of `operand` in place."""
        if operand in self.chunks:
            return False
        return rank == owner or (
            operand in self.in_place and self.mesh.node_of_rank[rank] == self.mesh.node_of_rank[owner]
        )

    def placed(self, x: str, layout: Layout) -> PlacedProblem:
        a, b, c = (layout if name == x else old for name, old in zip("ABC", self.layouts, strict=True))
        return replace(self, layouts=(a, b, c))

    @property
    def reduced(self) -> PlacedProblem:
        """The problem once partial operands have been summed into placements that hold each element once."""
        a, b, c = self.layouts
        mesh = self.mesh
        return replace(self, layouts=(a.single(mesh) if a.partial else a, b.single(mesh) if b.partial else b, c))

    @cached_property
    def output_layout(self) -> Layout:
        return self.computed or self.layout("C").split_replicas(self.mesh)

    @cached_property
    def target(self) -> Layout:
        """Return the layout that products are pushed to: one rank for each element, the first of partial sums."""
        share = self.output_layout
        if not share.partial:
            return share
        return replace(share, partial=(), pins=(*share.pins, *((axis, 0) for axis in share.partial)))


WorkMap = Callable[[PlacedProblem], Layout]
"""Problem → placement of the iteration space (m, n, k): which rank multiplies which box."""
Layouts = tuple[Layout, Layout, Layout]  # placements of A, B and C
Wanted = tuple[Layout | None, Layout | None, Layout | None]  # placements of A, B and C; None if any will do


@dataclass(frozen=True)
class Problem:
    """The facts that an algorithm may use when it specializes itself to a product."""

    shape: tuple[int, int, int]  # (m, n, k)
    mesh: MeshShape
    layouts: Wanted = (None, None, None)  # placements of op(A), op(B) and C that are given
    memory: int | None = None  # elements of A, B and C that a rank may hold; None for no limit
    symmetry: Symmetry | None = None  # symmetry of C, if it is known

    def extent(self, x: str) -> tuple[int, int]:
        rows, cols = OPERAND_DIMS[x]
        return self.shape[rows], self.shape[cols]

    @property
    def speeds(self) -> tuple[float, ...]:
        return ()

    @property
    def is_named(self) -> bool:
        return True

    def seconds(self, algorithm: Algorithm) -> float:
        return 0.0

    def unless_given(self, layouts: Wanted) -> Wanted:
        """`layouts`, but None (any will do) for a matrix that is placed otherwise already."""
        a, b, c = (
            layout if given in (None, layout) else None for layout, given in zip(layouts, self.layouts, strict=True)
        )
        return a, b, c


@dataclass(frozen=True)
class Cut:
    """One cut of the walked dimension, or of the pieces of earlier cuts: by default at changes of owner."""

    parts: int | str = 0
    """Into so many even parts, fewer where there are not as many indices; or as many as the mesh has ranks along an
    axis, which is named as in `AXIS_NAMES`."""
    size: int = 0  # into pieces of the given number of indices, of which the last may be shorter


OWNERS = Cut()  # where an operand's owners change
Cuts = tuple[Cut, ...]  # cuts within each other, the outermost first; `OWNERS` comes first, or not at all
Grains = tuple[Cuts, Cuts, Cuts]  # of A, B and C


def in_pieces(parts: int) -> Grains:
    return ((OWNERS, Cut(parts)),) * 3


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of the literature, as the survey's table has it."""

    name: str
    """The name on the command line."""
    source: str
    """Author, year: where it was published."""
    summary: str
    """One line for `--list`."""
    work: WorkMap
    """The box of (m, n, k) that each rank multiplies."""
    over: Literal["m", "n", "k"]
    """The dimension that a rank walks in time."""
    order: Literal["rotated", "plain", "ticket"] = "rotated"
    """Start of a rank's walk along it; `ticket` hands out boxes by fetch-and-add instead."""
    rotate_by: tuple[str, ...] = ()
    """The axes of the work's grid by whose coordinates starts are rotated; all of them when none is named."""
    end_at_owner: bool = False
    """True if rotated walks end, rather than begin, at a rank's own part: sums then travel round a ring to it, or what
    is pushed to other ranks leaves while a rank multiplies its own."""
    result: Literal["here", "accumulate", "reduce"] = "here"
    """True if C is multiplied into where it lives, pushed panel by panel, or pushed once it is summed (`reduce`)."""
    placements: Callable[[MeshShape], Wanted | str] | None = None
    """The placements it needs on a mesh (or why it cannot use that mesh); None if it takes any."""
    also_accepts: Callable[[MeshShape], dict[str, Layout]] | None = None
    """Further placements that it takes, by operand."""
    accepts_transposed: str = ""
    """The operands that may lie transposed on the same grid."""
    staged_to: Callable[[PlacedProblem], Mapping[str, Layout]] | None = None
    """Placements that A or B is brought to before the product, unless it lies so already."""
    grouped: str = ""
    """The operands whose transfers become broadcasts, shifts or reductions wherever a pass proves them equal."""
    prefetch_all: str = ""
    """The operands that a rank fetches all at once, before it multiplies."""
    granularity: Grains = ((OWNERS,),) * 3
    """Pieces of the walked dimension that move at once, for A, B and C.

    From `OWNERS` on it is cut further where a piece is wider than a panel.
    """
    half: bool = False
    """True if of a symmetric C half is multiplied, and the rest mirrored: by C's owners where the result is `here`,
    else of A and its own transpose in triangle blocks, from which it is pushed."""
    found_as: str = ""
    """The form that gives this algorithm without repeating the search."""
    notes: tuple[str, ...] = ()
    """Lines for `--explain` on choices within the algorithm."""
    specialize: Callable[[Problem], Algorithm | str] | None = None
    """Return the algorithm for a product, if it depends on shape and memory (or the reason why there is none)."""
    form: Callable[[str], Algorithm | str] | None = None
    """Return another form, named behind a colon (or a text that lists the forms)."""

    @property
    def reproducible(self) -> bool:
        """True if sums are formed in a fixed order: no accumulate."""
        return self.result != "accumulate"

    @property
    def operands(self) -> str:
        """The operands that it reads; A alone where that is both factors."""
        return "A" if self.half and self.result != "here" else "AB"

    @cached_property
    def pulled(self) -> Algorithm:
        """Its one-sided form: the same placements and work, every slice pulled by who needs it, in rotated order."""
        a, b, c = (cuts if OWNERS not in cuts else (OWNERS,) for cuts in self.granularity)
        return replace(
            self,
            name=f"{self.name}:pull",
            order="rotated",
            rotate_by=(),
            end_at_owner=self.result == "reduce" and self.over != "k",
            grouped="",
            prefetch_all="",
            granularity=(a, b, c),
            staged_to=None,
            result="accumulate" if self.result == "reduce" else self.result,
            form=None,
            summary=f"{self.summary} (one-sided form: pulls and accumulates)",
            specialize=partial(_pulled, self.specialize) if self.specialize else None,
        )


def _pulled(fit: Callable[[Problem], Algorithm | str], problem: Problem) -> Algorithm | str:
    fitted = fit(problem)
    return fitted if isinstance(fitted, str) else fitted.pulled


def is_placed_as(
    given: Layout, taken: Layout, shape: tuple[int, int], mesh: MeshShape, by_column: bool = False
) -> bool:
    """True if a given placement is one that is taken: cut over the same axes, if in other blocks, or the same parts.

    by_column: the blocks may differ from column to column of ranks, whose operands move one by one.
    """
    return given.outline(mesh, by_column) == taken.outline(mesh, by_column) or same_place(given, taken, shape, mesh)


@lru_cache(maxsize=4096)
def same_place(one: Layout, other: Layout, shape: tuple[int, ...], mesh: MeshShape) -> bool:
    """True if two placements give every rank the same part of a matrix, however they say it."""
    if one == other:
        return True
    if one.partial or other.partial:
        return False
    if (one.grid, one.pins) == (other.grid, other.pins):  # as many comparisons as there are different spans
        return all(_same_spans(one, other, dim, extent, one.mesh(mesh)) for dim, extent in enumerate(shape))
    return all(one.region(shape, mesh, rank) == other.region(shape, mesh, rank) for rank in mesh.ranks)


def _same_spans(one: Layout, other: Layout, dim: int, extent: int, grid: MeshShape) -> bool:
    """True if two placements on one grid cut a dimension alike."""
    levels = [level for layout in (one, other) for level in layout.splits[dim]]
    axes = tuple(dict.fromkeys(axis for level in levels for axis in (*level.axes, *level.skew)))
    places = grid.along(axes, dict.fromkeys(grid.names, 0))
    return all(one.span(dim, extent, grid, at) == other.span(dim, extent, grid, at) for at in places)


def stationary(operand: Operand) -> WorkMap:
    """Return the work map in which the owners of `operand` do the work; replicas share it out.

    Replicas of C share out its elements, and axes along which it holds partial sums cut k. Replicas of A or B share
    out the dimension that the operand lacks.
    """

    def work(problem: PlacedProblem) -> Layout:
        layout, mesh = problem.layout(operand), problem.mesh
        spare = layout.partial
        if operand == "C":
            layout = problem.output_layout
        else:
            spare = layout.replicated_axes(mesh)
        splits: list[tuple[Level, ...]] = [(), (), ()]
        for dim, split in zip(OPERAND_DIMS[operand], layout.splits, strict=True):
            splits[dim] = split
        splits["BAC".index(operand)] = tuple(Level((axis,)) for axis in spare)
        return Layout(tuple(splits), layout.pins, grid=layout.grid)

    return work

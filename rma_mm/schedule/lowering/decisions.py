"""Decisions of lowering an algorithm on a problem: made once, and read by lowering and by the cost model.

Lowering asks for one rank, exactly, and prices for all ranks at once, in NumPy: what takes figures here takes either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import AXIS_NAMES
from rma_mm.geometry.span import Region
from rma_mm.schedule.algorithm import DIMS, OPERAND_DIMS, OWNERS, Algorithm, Cuts, PlacedProblem, same_place
from rma_mm.schedule.lowering.node_crossing import can_share, crosses, is_worth
from rma_mm.schedule.ops import Ref
from rma_mm.schedule.schedule import STAGE

WIDTH = 1024  # panel width where memory is not scarce
WORTH = 2**20  # words to and from memory from which on it is worth copying an operand together
NARROW = 128
"""A slice narrower than this is fused with its neighbours: a multiply that thin runs far below the BLAS rate."""
LONGEST = 2 * 10**10
"""Multiply-adds in one Multiply at most (about 0.4 s of one core), so that signals and progress are served."""
TASKS_PER_RANK = 8  # grain of the work queue

Figure = TypeVar("Figure", int, NDArray[np.float64])  # of one rank, or of each of many


@dataclass(frozen=True, eq=False)
class LoweringDecisions:
    """Everything that is decided for an algorithm on a problem before operations are generated."""

    algorithm: Algorithm
    problem: PlacedProblem  # as it was asked, with where replicas of C compute it
    read: PlacedProblem  # with A and B placed as the multiplies read them
    staged: dict[str, Layout]  # the placements that operands are brought to first
    work: Layout
    """The placement of (m, n, k): who multiplies what. Of a C that is multiplied into where it lives, its owners."""
    width: int = WIDTH  # indices along the walked dimension in one panel, where slots are needed
    longest: int = LONGEST  # multiply-adds of one Multiply, at the most

    @classmethod
    def of(cls, algorithm: Algorithm, problem: PlacedProblem, width: int = WIDTH) -> LoweringDecisions:
        """Decide where `algorithm` computes C, where it reads A and B, and which rank multiplies which box."""
        problem = replace(problem, computed=problem.computed or _computed(algorithm, problem))
        read, staged = placed_for(algorithm, problem.reduced)
        work = algorithm.work(read)
        if algorithm.result == "here":
            if problem.computed and _is_contiguous(work):  # C is all there: nothing need be cut otherwise than the work
                problem = replace(problem, computed=_face(work))
                read = replace(read, computed=problem.computed)
            if not same_place(_face(work), read.output_layout, read.extent("C"), read.mesh):
                work = Layout(
                    (*read.output_layout.splits, work.splits[2]), read.output_layout.pins, grid=read.output_layout.grid
                )
        made = cls(algorithm, problem, read, staged, work, width)
        for x in algorithm.operands:  # those that groups bring as a whole, where that takes two steps
            if x not in algorithm.prefetch_all or x in staged or problem.layout(x).partial:
                continue
            rows, cols = OPERAND_DIMS[x]
            whole = Layout((work.splits[rows], work.splits[cols]), work.pins, grid=work.grid)
            if made.brings_once(x, whole, made.layout(x)):
                made = replace(made, read=made.read.placed(x, whole), staged={**made.staged, x: whole})
        return made

    # -- the walk ---------------------------------------------------------------------------------

    def longest_piece(self, box: Region, dim: int) -> int:
        """Return how many indices of a dimension one Multiply may take."""
        return max(1, self.longest * len(box[dim]) // max(1, box.size))

    @property
    def dim(self) -> int:
        return DIMS.index(self.algorithm.over)

    @property
    def is_here(self) -> bool:
        return self.algorithm.result == "here"

    @property
    def is_queue(self) -> bool:
        return self.algorithm.order == "ticket"

    @property
    def by_chunks(self) -> bool:
        """True if every operand moves at its own grain, and C's sums leave complete, rather than panel by panel."""
        has_grain = any(OWNERS not in self.grain(x) for x in "ABC")
        is_summed = not self.is_here and self.algorithm.over == "k" and not self.is_queue
        return bool(self.algorithm.grouped) or has_grain or is_summed

    def cuts(self, x: str, dim: int) -> bool:
        """True if pieces along a dimension end where an operand's owners change."""
        if dim not in OPERAND_DIMS[x] or (x == "C" and (self.is_here or dim != self.dim)):
            return False
        return x not in (self.algorithm.prefetch_all if dim == self.dim else self.algorithm.grouped)

    def grain(self, x: str) -> Cuts:
        """Return the cuts of the walked dimension into pieces of an operand that move at once, in numbers."""
        cuts, mesh = self.algorithm.granularity["ABC".index(x)], self.problem.mesh
        return tuple(
            replace(cut, parts=mesh.dims[AXIS_NAMES.index(cut.parts)]) if isinstance(cut.parts, str) else cut
            for cut in cuts
        )

    @property
    def start_axes(self) -> tuple[str, ...]:
        """Return the axes of the work's grid whose coordinates rotate the starts."""
        if self.algorithm.order != "rotated":
            return ()
        mesh = self.problem.mesh
        named = dict(zip(AXIS_NAMES, mesh.names, strict=False)) if self.work.grid is None else {}
        return tuple(named.get(axis, axis) for axis in self.algorithm.rotate_by) or self.work.mesh(mesh).names

    # -- where operands are -----------------------------------------------------------------------

    def layout(self, x: str) -> Layout:
        return self.read.target if x == "C" else self.read.layout(x)

    @cached_property
    def sources(self) -> dict[str, str]:
        """Operands that are read → the home that the product reads: A, or A+ where it was summed or staged."""
        is_added = {x: self.problem.layout(x).partial or x in self.staged for x in self.algorithm.operands}
        return {x: x + STAGE if is_added[x] else x for x in is_added}

    @property
    def is_gathered(self) -> bool:
        """True if C is replicated, so that each replica fetches the parts that others computed."""
        c, mesh = self.problem.layout("C"), self.problem.mesh
        return any(c.mesh(mesh).axis_size(axis) > 1 for axis in c.replicated_axes(mesh))

    def reaches(self, rank: int, owner: int, x: str) -> bool:
        """True if `rank` can multiply out of `owner`'s part of an operand in place."""
        is_own = rank == owner and x not in self.problem.chunks
        return is_own or (x not in self.algorithm.grouped and self.read.reaches(rank, owner, x))

    def is_far(self, rank: int, src: Ref) -> bool:
        """True if a copy comes from another node, or from a file."""
        nodes = self.problem.mesh.node_of_rank
        return src.buffer in self.problem.chunks or nodes[src.rank] != nodes[rank]

    @property
    def loads_all(self) -> bool:
        return self.is_here and self.read.in_place == "AB" and not self.algorithm.grouped

    @property
    def is_in_reach(self) -> bool:
        return self.loads_all and self.problem.mesh.is_one_node

    @property
    def may_repack(self) -> bool:
        return self.is_in_reach and self.width >= WIDTH and not self.by_chunks  # chunks are put together as they come

    # -- who moves the same -----------------------------------------------------------------------

    def group_axes(self, x: str) -> tuple[str, ...]:
        """Return the axes along which ranks work on the same slices of A or B, or add to the same part of C."""
        mesh, layout = self.problem.mesh, self.layout(x)
        grid = self.work.mesh(mesh)
        if layout.mesh(mesh) != grid:
            return ()
        levels = [level for dim in OPERAND_DIMS[x] for level in self.work.splits[dim]]
        taken = {axis for level in levels for axis in (*level.axes, *level.skew)}
        if x != "C":  # every replica has its own source
            taken.update(layout.replicated_axes(grid))
        return tuple(axis for axis in grid.names if axis not in taken)

    def is_grouped(self, x: str) -> bool:
        """True if ranks walk in step because some of them work on the same slices of an operand, or add to the same."""
        grid = self.work.mesh(self.problem.mesh)
        return x in self.algorithm.grouped and (
            self.joins(x) or any(grid.axis_size(axis) > 1 for axis in self.group_axes(x))
        )

    def joins(self, x: str) -> bool:
        """True if owners of A or B outside a group may have slices that it needs, so that all ranks walk alike.

        That is so where what it does not walk of the operand is cut otherwise than the work, as of one that lies
        transposed.
        """
        layout, algorithm = self.layout(x), self.algorithm
        if x not in algorithm.grouped or x == "C" or x in algorithm.prefetch_all or self.start_axes or self.is_queue:
            return False
        if layout.mesh(self.problem.mesh) != self.work.mesh(self.problem.mesh):
            return False
        cuts = zip(OPERAND_DIMS[x], layout.splits, strict=True)
        return any(self.work.splits[dim] != split for dim, split in cuts if dim != self.dim)

    def brings_by_pairs(self, x: str) -> bool:
        return (
            x in self.algorithm.grouped and x in self.algorithm.accepts_transposed and not self.problem.mesh.is_one_node
        )

    def copy_axes(self, x: str, to: Layout, source: Layout) -> tuple[str, ...]:
        """The axes along which ranks get the same part of an operand by groups, from `source` to `to`, as a whole."""
        grid = to.mesh(self.problem.mesh)
        if x not in self.algorithm.grouped:
            return ()
        if not to.split_axes and not to.pins and not to.partial:
            return grid.names
        if source.mesh(self.problem.mesh) != grid:
            return ()
        return tuple(axis for axis in to.replicated_axes(grid) if axis not in source.replicated_axes(grid))

    def brings_once(self, x: str, to: Layout, source: Layout) -> bool:
        """True if what several ranks of a node hold of an operand's new placement is brought to the node once."""
        mesh = self.problem.mesh
        if not can_share(mesh, self.problem.extent(x), source, to) or self.brings_by_pairs(x):
            return False
        axes = self.copy_axes(x, to, source)
        return crosses(mesh, to.mesh(mesh), axes) if axes else x not in self.algorithm.grouped

    def crosses_once(self, x: str) -> bool:
        """True if what groups bring of an operand in the walk, or sum of C, crosses to a node once, in two steps."""
        mesh = self.problem.mesh
        if x not in self.algorithm.grouped or not is_worth(mesh, self.problem.extent(x)):
            return False
        return crosses(mesh, self.work.mesh(mesh), self.group_axes(x))

    def is_ring(self, x: str) -> bool:
        return not set(self.start_axes).isdisjoint(self.group_axes(x))

    @property
    def may_share(self) -> bool:
        """True if ranks of a node may fetch or sum together: nothing moves in groups or by ticket."""
        is_far = bool(self.problem.files) or not self.problem.mesh.is_one_node
        return self.problem.fetches_together and is_far and not self.algorithm.grouped and not self.is_queue

    # -- how large --------------------------------------------------------------------------------

    def next_halved(self, counts: Sequence[int], widths: Sequence[int]) -> int | None:
        """Along which of m, n and k the queue's tasks are cut in two next; None if there are enough of them.

        counts: tasks along each. widths: of the widest.
        """
        if prod(counts) >= TASKS_PER_RANK * self.problem.mesh.size:
            return None
        widest = max((0, 1), key=lambda dim: widths[dim])
        at = widest if widths[widest] >= 2 * NARROW else 2  # C is small: its sums are shared out instead
        return at if widths[at] >= 2 * NARROW else None


def touched(extents: Sequence[Figure], pieces: Sequence[Figure], repacked: str) -> Figure:
    """Return the words to and from memory for a box cut into pieces, with some operands repacked first.

    Every part of k reads and writes C once more, every part of m reads B again, and every part of n A.
    """
    (m, n, k), (cut_m, cut_n, cut_k) = extents, pieces
    words = cut_n * m * k + cut_m * k * n + 2 * cut_k * m * n
    for x in repacked:
        words = words + 2 * (m * k if x == "A" else k * n)
    return words


def repackings(cut: Sequence[str]) -> list[str]:
    return ["", *cut, *(["AB"] if len(cut) == 2 else [])]


def placed_for(algorithm: Algorithm, problem: PlacedProblem) -> tuple[PlacedProblem, dict[str, Layout]]:
    """Return the problem with A and B placed as the multiplies read them, and the placements they are staged to."""
    staged = {x: problem.layout(x) for x in problem.copied if x in algorithm.operands}
    if staged:
        problem = replace(problem, in_place="".join(x for x in "AB" if x in problem.in_place or x in staged))
    for x, layout in (algorithm.staged_to(problem) if algorithm.staged_to else {}).items():
        if not same_place(problem.layout(x), layout, problem.extent(x), problem.mesh):
            staged[x] = layout
            problem = problem.placed(x, layout)
    return problem, staged


def _computed(algorithm: Algorithm, problem: PlacedProblem) -> Layout | None:
    """Return where `algorithm` computes a C that is wanted everywhere; None for where it lies."""
    c = problem.layout("C")
    grid = c.mesh(problem.mesh)
    is_cut = any(grid.axis_size(axis) > 1 for axis in (*c.split_axes, *(axis for axis, _ in c.pins)))
    if algorithm.placements is None or is_cut or c.partial or grid.size < problem.mesh.size:
        return None
    needed = algorithm.placements(problem.mesh)
    return None if isinstance(needed, str) else needed[2]


def _face(work: Layout) -> Layout:
    return Layout(work.splits[:2], work.pins, grid=work.grid)


def _is_contiguous(work: Layout) -> bool:
    return not any(level.kind == "cyclic" or level.skew for split in work.splits[:2] for level in split)

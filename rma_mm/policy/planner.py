"""Choose among rows and placements by the words they move. Pure: no MPI, no measurement.

Every candidate is priced from its placements and work map alone, without making its operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from ..algorithms import ALGORITHMS, find_algorithm
from ..errors import AlgorithmError
from ..geometry.layout import Layout, Level, everywhere
from ..geometry.mesh import MeshShape, grids
from ..geometry.span import Region
from ..schedule.lower import task_boxes
from ..schedule.ops import held
from ..schedule.row import OPERAND_DIMS, Layouts, Problem, Row, Setting, same_place, side

BETWEEN, WITHIN, IN_PLACE = 10.0, 1.0, 0.1
"""Relative price of a word that crosses nodes, is copied within a node, or is read where it lies."""
SAMPLE = 16
"""Ranks that are priced, evenly spread, on larger meshes."""


@dataclass(frozen=True)
class Request:
    """What is asked of the planner. Placements are of op(A), op(B) and C; None where it may choose."""

    shape: tuple[int, int, int]
    """(m, n, k)."""
    mesh: MeshShape
    layouts: tuple[Layout | None, Layout | None, Layout | None] = (None, None, None)
    keeps_c: bool = False
    in_place: str = "AB"
    """Operands that node-mates can read where they lie."""
    shares: bool = False
    """Whether node-mates can fetch slices from other nodes together."""
    algorithm: str = "auto"
    deterministic: bool = False
    memory: int | None = None
    """Elements of A, B and C that a rank may hold."""
    speeds: tuple[float, ...] = ()
    """How fast each rank multiplies; empty where they count as equal."""


@dataclass(frozen=True)
class Traffic:
    """Words of a whole product, all ranks together."""

    between: float = 0
    """Words that cross nodes."""
    within: float = 0
    """Words copied or added within nodes."""
    in_place: float = 0
    """Words of node-mates that are multiplied where they lie."""

    @property
    def price(self) -> float:
        """One figure to compare candidates by."""
        return BETWEEN * self.between + WITHIN * self.within + IN_PLACE * self.in_place

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.between + other.between, self.within + other.within, self.in_place + other.in_place)

    def times(self, factor: float) -> Traffic:
        """The traffic of `factor` such ranks."""
        return Traffic(self.between * factor, self.within * factor, self.in_place * factor)


@dataclass(frozen=True)
class Candidate:
    """One way to do the product."""

    row: Row
    layouts: Layouts | None
    traffic: Traffic
    rejected: str = ""
    """Why it cannot be taken; empty where it can."""


def candidates(request: Request) -> list[Candidate]:
    """Every row of the registry on its best placements, cheapest first, those that cannot serve last."""
    rows = list(ALGORITHMS.values()) if request.algorithm == "auto" else [find_algorithm(request.algorithm)]
    found = [_best(row, request) for row in rows]
    return sorted(found, key=lambda c: (bool(c.rejected), c.traffic.price))


def choose(request: Request) -> list[Candidate]:
    """`candidates`, of which the first can serve. Raises AlgorithmError where none can, saying what would fit."""
    found = candidates(request)
    if found[0].rejected:
        raise AlgorithmError("; ".join(f"{c.row.name}: {c.rejected}" for c in found))
    return found


def _best(row: Row, request: Request) -> Candidate:
    """`row` on the cheapest placements that the request leaves open."""
    if row.fit is not None:
        may_idle = request.algorithm != "auto"
        fitted = row.fit(
            Setting(request.shape, request.mesh, request.memory, request.layouts, request.speeds, may_idle)
        )
        if isinstance(fitted, str):
            return Candidate(row, None, Traffic(), fitted)
        row = fitted
    if request.deterministic and (not row.reproducible or adds_in_any_order(request.mesh, request.layouts)):
        what = "adds up summands of A or B" if row.reproducible else "accumulates"
        return Candidate(row, None, Traffic(), f"{what} in no fixed order, and deterministic=True excludes that")
    options = _placements(row, request)
    if isinstance(options, str):
        return Candidate(row, None, Traffic(), options)
    priced = [(traffic(row, problem_of(request, layouts)), layouts) for layouts in options]
    cheapest, layouts = min(priced, key=lambda pair: pair[0].price)
    return Candidate(row, layouts, cheapest)


def _placements(row: Row, request: Request) -> list[Layouts] | str:
    """The placements that `row` may take, or why there are none."""
    if row.placements is None:
        a, b, c = (_open(request, given) for given in request.layouts)
        return list(product(a, b, c))
    needed = row.placements(request.mesh)
    if isinstance(needed, str):
        return needed
    options: list[list[Layout]] = []
    for x, given, wanted in zip("ABC", request.layouts, needed, strict=True):
        taken = _taken(row, request, x, wanted)
        if given is None or wanted is None:
            options.append(taken[:1] or _open(request, given))
        elif any(_fits(request, x, given, layout) for layout in taken):
            options.append([given])
        else:
            fits = " or ".join(dict.fromkeys(map(str, taken)))
            return f"needs {x} placed as {fits}, and it is {given}; redistribute it, or name a stationary form"
        if request.algorithm == "auto" and given is None and options[-1][0].pins:
            return f"keeps {x} on a face of the mesh and not in equal shares; name it to have that"
    a, b, c = options
    return list(product(a, b, c))


def placements_taken(row: Row, request: Request) -> list[Layouts]:
    """Every combination of placements that `row` takes where it asks for some; raises AlgorithmError where none."""
    needed = row.placements(request.mesh) if row.placements else "takes any placements"
    if isinstance(needed, str):
        raise AlgorithmError(f"{row.name}: {needed}")
    taken = (
        _taken(row, request, x, wanted) or _open(request, given)
        for x, wanted, given in zip("ABC", needed, request.layouts, strict=True)
    )
    a, b, c = (dict.fromkeys(each) for each in taken)
    return list(product(a, b, c))


def _open(request: Request, given: Layout | None) -> list[Layout]:
    """What a placement may be that is given, or not."""
    return [given] if given else list(single_layouts(request.mesh))


def _taken(row: Row, request: Request, x: str, wanted: Layout | None) -> list[Layout]:
    """The placements of operand `x` that `row` takes; the first, where none is given, holds each element once."""
    if wanted is None:
        return []
    single = wanted if wanted.is_single(request.mesh) or wanted.pins else wanted.single(request.mesh)
    others = row.also(request.mesh) if row.also else {}
    dense = not any(level.kind == "cyclic" for split in wanted.splits for level in split)  # in a C that is all there
    return [single, wanted, *([others[x]] if x in others else []), *([everywhere()] if x == "C" and dense else [])]


def _fits(request: Request, x: str, given: Layout, taken: Layout) -> bool:
    """Whether a given placement is one that is taken: cut over the same axes, if in other blocks, or the same parts."""
    alike = given.outline == taken.outline
    rows, cols = OPERAND_DIMS[x]
    return alike or same_place(given, taken, (request.shape[rows], request.shape[cols]), request.mesh)


def adds_in_any_order(mesh: MeshShape, layouts: Sequence[Layout | None]) -> bool:
    """Whether A or B comes in three summands or more, which are added up as they arrive (two give one result)."""
    given = [layout for layout in layouts[:2] if layout is not None]
    return any(prod(layout.mesh(mesh).axis_size(axis) for axis in layout.partial) > 2 for layout in given)


def problem_of(request: Request, layouts: Layouts) -> Problem:
    """The problem that a request becomes once its placements are settled."""
    return Problem(request.shape, request.mesh, layouts, request.keeps_c, request.in_place, request.shares)


def single_layouts(mesh: MeshShape) -> Iterator[Layout]:
    """Placements that hold each element once in equal shares: leading axes cut rows, the others columns.

    Blocks come first and stripes last, so that of equals the squarest tiles are taken.
    """
    count = len(mesh.names)
    for cut in sorted(range(count, -1, -1), key=lambda cut: abs(2 * cut - count)):
        levels = [Level((axis,)) for axis in mesh.names]
        yield Layout((tuple(levels[:cut]), tuple(levels[cut:])))


def traffic(row: Row, problem: Problem) -> Traffic:
    """Words that `row` moves for `problem`, all ranks together; exact but for the queue and for large meshes."""
    mesh = problem.mesh
    count = min(mesh.size, SAMPLE)
    sample = [n * mesh.size // count for n in range(count)]
    total = Traffic()
    problem = row.adapted(problem)
    read, staged = row.reads(problem)
    for rank in sample:
        total += _summed(problem, rank) + _rank_traffic(row, read, rank) + _gathered(problem, rank)
        for x, layout in staged.items():
            total += _moved(problem, x, problem.layout(x), held(layout, problem.extent(x), mesh, rank), rank)
    return total.times(mesh.size / count)


def _summed(problem: Problem, rank: int) -> Traffic:
    """What `rank` pushes to sum partial operands; of several replicas one does."""
    mesh = problem.mesh
    total = Traffic()
    for x in "AB":
        layout = problem.layout(x)
        coords = layout.coords(mesh, rank) or {}
        if layout.partial and not any(coords.get(axis) for axis in layout.replicated_axes(mesh)):
            region = held(layout, problem.extent(x), mesh, rank)
            total += _moved(problem, x, layout.single(mesh), region, rank)
    return total


def _rank_traffic(row: Row, problem: Problem, rank: int) -> Traffic:
    """What `rank` pulls and pushes for its own box, or is expected to for its share of a queue."""
    if row.order == "ticket":
        return _expected(problem, rank)
    work = row.work(problem)
    box = work.region(problem.shape, problem.mesh, rank)
    total = Traffic()
    for x in "AB" if box else "":
        in_place = x in problem.in_place and x not in row.grouped
        moved = _moved(problem, x, problem.layout(x), side(box, x), rank, in_place)
        sharers = _sharers(problem, work, x, rank) if problem.shares and not row.grouped else 1
        total += Traffic(moved.between / sharers, moved.within, moved.in_place + moved.between * (1 - 1 / sharers))
    if row.result == "reduce" or (box and row.result == "accumulate"):
        moved = _moved(problem, "C", problem.target, side(box, "C"), rank)
        sharers = _sharers(problem, work, "C", rank) if problem.shares and not row.grouped and moved.between else 1
        summed = side(box, "C").size * (1 - 1 / sharers)
        total += Traffic(moved.between / sharers, moved.within / sharers + summed)
    return total


def _sharers(problem: Problem, work: Layout, x: str, rank: int) -> int:
    """How many ranks of a node, `rank` among them, want the same part of `x`, and so fetch it together."""
    nodes = problem.mesh.nodes
    boxes = {q: work.region(problem.shape, problem.mesh, q) for q in problem.mesh.ranks if nodes[q] == nodes[rank]}
    return sum(side(box, x) == side(boxes[rank], x) for box in boxes.values() if box)


def _expected(problem: Problem, rank: int) -> Traffic:
    """An equal share of a queue's boxes, which fall to any rank, from owners that may be anywhere."""
    mesh = problem.mesh
    other_nodes = 1 - mesh.nodes.count(mesh.nodes[rank]) / mesh.size
    node_mates = 1 - 1 / mesh.size - other_nodes
    total = Traffic()
    for x, all_words in zip("ABC", _task_words(problem), strict=True):
        words = all_words / mesh.size
        within = words * node_mates
        is_viewed = x in problem.in_place
        total += Traffic(words * other_nodes, 0 if is_viewed else within, within if is_viewed else 0)
    return total


@lru_cache(maxsize=256)
def _task_words(problem: Problem) -> tuple[int, int, int]:
    """Words of A, B and C in all boxes of a queue."""
    boxes = task_boxes(problem)
    a, b, c = (sum(side(box, x).size for box in boxes) for x in "ABC")
    return a, b, c


def _gathered(problem: Problem, rank: int) -> Traffic:
    """What `rank` takes of a replicated C that others computed."""
    mine = held(problem.layout("C"), problem.extent("C"), problem.mesh, rank)
    return _moved(problem, "C", problem.share, mine, rank)


def _moved(problem: Problem, x: str, layout: Layout, region: Region, rank: int, in_place: bool = False) -> Traffic:
    """Words of `region` of `x`, placed by `layout`, that are not `rank`'s own."""
    between, within = _foreign(problem.mesh, layout, problem.extent(x), region, rank)
    return Traffic(between, 0 if in_place else within, within if in_place else 0)


@lru_cache(maxsize=2**15)
def _foreign(mesh: MeshShape, layout: Layout, shape: tuple[int, int], region: Region, rank: int) -> tuple[int, int]:
    """Words of `region` on other nodes, and on other ranks of `rank`'s node; candidates share most of these."""
    own = region & held(layout, shape, mesh, rank)
    if len(set(mesh.nodes)) == 1:
        return 0, region.size - own.size  # whichever node-mate gives it
    between = within = 0
    if region and own != region:
        for owner, part in layout.overlapping(shape, mesh, region, rank):
            if mesh.nodes[owner] != mesh.nodes[rank]:
                between += part.size
            elif owner != rank:
                within += part.size
    return between, within


def default_mesh(
    size: int, shape: tuple[int, int, int], nodes: tuple[int, ...] = (), algorithm: str = "auto"
) -> tuple[int, ...]:
    """The grid of `size` ranks on which a product of `shape` = (m, n, k) moves least; of two axes where those will do.

    Raises AlgorithmError for an algorithm that is not there.
    """
    for axes in (2, 3, 1):
        priced = []
        for grid in sorted(grids(size, axes), key=lambda grid: (max(grid) - min(grid), [-n for n in grid])):
            best = candidates(Request(shape, MeshShape(grid, nodes=nodes), algorithm=algorithm))[0]
            if not best.rejected:
                priced.append((best.traffic.price, grid))
        if priced:
            return min(priced, key=lambda pair: pair[0])[1]
    return (1, size)

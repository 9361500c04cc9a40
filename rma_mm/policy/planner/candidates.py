"""Choose among rows, their forms and placements by the seconds they would take. Pure: no MPI, no measurement.

Every candidate is priced from its placements and work map alone, without making its operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf, prod
from typing import Any, cast

from rma_mm.algorithms import ALGORITHMS, REGISTERED, find_algorithm
from rma_mm.classes import dataclass
from rma_mm.errors import AlgorithmError, LayoutError
from rma_mm.geometry.layout import Layout, everywhere
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape, grids
from rma_mm.geometry.shares import cuts_by_speed
from rma_mm.policy.model.cost_model import NOTHING, TYPICALLY, CostBreakdown, CostModel, estimate
from rma_mm.policy.model.machine import COLLECTIVES
from rma_mm.policy.model.traffic import NO_TRAFFIC, Traffic, traffic
from rma_mm.policy.model.volumes import distance, workload_of
from rma_mm.policy.planner.preference import AUTO, EXCLUDED, TWO_SIDED, UNSERVED, pulls_or_pushes
from rma_mm.schedule.algorithm import OPERAND_DIMS, Algorithm, Files, Layouts, PlacedProblem, Problem, is_placed_as
from rma_mm.schedule.lowering.decisions import NARROW, WIDTH

NARROWER = (256,)  # panel widths that are tried beside `WIDTH`, on the best candidates
REFINED = 4  # how many of these there are
CLOSE = 1.02
"""Price over that of the cheapest up to which, within a node, the first of the registry is taken: small differences of
prices tell nothing there. Of 15 products on 4 ranks regret was 1.010 with 1.02, and 1.028 with 1.05. Between nodes the
cheapest is taken."""
UNCOMPILED, UNCOMPILED_MEETINGS = 0.2e-3, 16
"""Seconds, and meetings of all ranks, by which, within a node, other algorithms must be cheaper than those whose
repeated calls are compiled, which neither move data in groups, nor add sums, nor multiply a half. A call that is not
compiled took 0.3 to 0.5 ms longer on 2 ranks, and 1.1 to 1.3 on 4 that shared 2 cores, where a meeting takes long."""
WORTH = 1.03  # an operand is copied first only where other ways take this many times as long: the copy takes memory
CLOSEST = 8  # placements that are priced for one algorithm: those with the fewest remote words
NO_PUSHES = "MPI cannot accumulate this element type with the semiring's operation"  # why ranks cannot
FROM_FILES = "cannot read operands that stay in files; stationary_c can"  # why an algorithm is rejected
PULL = "pull"  # the one-sided form of an algorithm that moves data in groups
SUMMANDS = "stationary_c:summands"  # the form that reads each element of a file once
SYMMETRIC = ("stationary_c:syrk", "stationary_c:triangles", SUMMANDS)
"""Algorithms that multiply half of a symmetric product."""
FEW, FEWER = ("stationary_c", "stationary_a", "stationary_b", "cosma:pull"), ("t10_rotate", "weighted")
"""Algorithms for placing chains: for any placements one of them is the fastest, or nearly so."""
KNOWN = 64  # requests that are remembered with what was found
PricedAlgorithm = dict[str, Any]
"""The fields of a `Candidate` that pricing finds; processes can send them, unlike algorithms.

Dicts can be sent to other processes, algorithms cannot.
"""
Each = Callable[[Callable[[int], PricedAlgorithm], int], list[PricedAlgorithm]]
"""(what to do, count) → what becomes of 0…count − 1, whoever does it."""
PriceBy = Callable[["Request"], Each | None]


@dataclass(frozen=True)
class Request(Problem):
    """A problem for the planner, which may choose the placements that are not given."""

    keeps_c: bool = False
    in_place: str = "AB"  # operands that node-mates can read where they lie
    fetches_together: bool = False  # true if node-mates can fetch slices from other nodes together
    algorithm: str = "auto"
    deterministic: bool = False
    copyable: str = ""  # operands that node-mates cannot read where they lie, but could in a copy
    cost_model: CostModel = TYPICALLY  # what it is priced by
    pushes: bool = True  # true if ranks can accumulate: MPI may have nothing that adds up as ⊕ does
    prefer: str = AUTO  # what it may be done by: one of `PREFERENCES`
    files: Files = ()  # operands that stay in files
    is_brief: bool = False  # true if few algorithms are to be priced, as pricing all takes longer than the product

    @property
    def speeds(self) -> tuple[float, ...]:
        return self.cost_model.machine.speeds_of(self.mesh.size)

    @property
    def is_named(self) -> bool:
        return self.algorithm != "auto"

    def seconds(self, algorithm: Algorithm) -> float:
        """Return the seconds of an algorithm on its cheapest placements; infinite if it cannot be used."""
        found = _best(algorithm, self)
        return float("inf") if "rejected" in found else float(found["cost"].seconds)


@dataclass(frozen=True)
class Candidate:
    """One way to do the product."""

    algorithm: Algorithm
    layouts: Layouts | None
    traffic: Traffic = NO_TRAFFIC
    cost: CostBreakdown = NOTHING
    rejected: str = ""  # why it cannot be taken; empty if it can
    width: int = WIDTH  # indices of a panel
    copied: str = ""  # operands that are copied first to where node-mates can read them in place
    correction: float = 1.0  # measured over predicted time of transfers and calls of its kind on this machine
    kind: str = ""  # movement of operands in a word: two-sided (by groups), one-sided, or in place

    @property
    def seconds(self) -> float:
        return self.cost.corrected(self.correction).seconds

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of its price, which sum to `seconds`."""
        cost = self.cost
        return {
            "products": cost.multiplying, "transfers": cost.moving, "calls": cost.meeting,
            "correction": (self.correction - 1) * (cost.moving + cost.meeting),
        }

    @property
    def is_compiled(self) -> bool:
        """Return whether its repeated calls can be compiled ones, within a node: it reads no file, among others."""
        able = self.kind != "two-sided" and self.algorithm.reproducible and not self.algorithm.half
        return able and not self.traffic.read

    def is_like(self, other: Candidate) -> bool:
        """Return whether another has the same price and placements, as one schedule has that is known by many names."""
        mine, others = ((x.layouts, x.traffic, x.parts, x.copied, x.width, x.kind) for x in (self, other))
        return self.layouts is not None and mine == others


def _here(act: Callable[[int], PricedAlgorithm], count: int) -> list[PricedAlgorithm]:
    return [act(n) for n in range(count)]


def candidates(request: Request, each: Each | None = None) -> list[Candidate]:
    """Return every algorithm and its one-sided form on its best placements, the best first and rejected ones last.

    each: who prices them, which takes most of the time; this process if it is not given. It then remembers what was
    found for a request before.
    """
    algorithms = _algorithms(request)
    if each is not None or (request, algorithms) not in _known:
        each = each or _here
        priced = each(lambda n: _best(algorithms[n], request), len(algorithms))
        listed = [_candidate(algorithm, what, request) for algorithm, what in zip(algorithms, priced, strict=True)]
        found = sorted(listed, key=by_seconds)
        finer = each(lambda n: _refined(found[n], request), min(REFINED, len(found)))
        refined = {id(candidate): replace(candidate, **what) for candidate, what in zip(found, finer, strict=False)}
        _known[request, algorithms] = _preferred([refined.get(id(each), each) for each in listed], request)
        if len(_known) > KNOWN:
            _known.popitem(last=False)
    _known.move_to_end((request, algorithms))
    return list(_known[request, algorithms])


def needs_pricing(request: Request) -> bool:
    """True if there is enough to price for several processes, and none of it was remembered."""
    algorithms = _algorithms(request)
    return len(algorithms) > 1 and (request, algorithms) not in _known


def _algorithms(request: Request) -> tuple[Algorithm, ...]:
    if request.algorithm != "auto":
        return (find_algorithm(request.algorithm),)
    is_brief = request.is_brief and request.mesh.is_one_node and request.memory is None and not request.files
    if is_brief and (few := _few(request)):
        return tuple(map(find_algorithm, dict.fromkeys((*few, *REGISTERED))))
    further = SYMMETRIC if request.symmetry else (SUMMANDS,) if request.files else ()
    return (*every_form(), *map(find_algorithm, further))


def _few(request: Request) -> tuple[str, ...]:
    """Return algorithms of which one is the best on given placements, as a rule; none where others may be wanted.

    Within a node these are `FEW`, between nodes also `FEWER`.
    """
    if request.is_named or request.prefer != AUTO:
        return ()
    return FEW + FEWER * (not request.mesh.is_one_node) + SYMMETRIC * bool(request.symmetry)


_known: OrderedDict[tuple[Request, tuple[Algorithm, ...]], list[Candidate]] = OrderedDict()


def every_form() -> list[Algorithm]:
    """Return the registered algorithms, and the one-sided forms of those that move data in groups."""
    algorithms = []
    for algorithm in ALGORITHMS.values():
        pulled = algorithm.form(PULL) if algorithm.form and algorithm.grouped else None
        algorithms += [algorithm, pulled] if isinstance(pulled, Algorithm) else [algorithm]
    return algorithms


def by_seconds(candidate: Candidate) -> tuple[bool, float]:
    return bool(candidate.rejected), candidate.seconds


def _preferred(listed: Sequence[Candidate], request: Request) -> list[Candidate]:
    """Candidates in the order in which they are taken, from that of the registry."""
    found, is_one_node = sorted(listed, key=by_seconds), request.mesh.is_one_node
    meeting = request.cost_model.machine.meet(request.mesh.size)
    uncompiled = UNCOMPILED + UNCOMPILED_MEETINGS * meeting if is_one_node else 0.0

    def price(each: Candidate) -> float:
        return inf if each.rejected else each.seconds + uncompiled * (not each.is_compiled)

    limit = min(map(price, listed)) * (CLOSE if is_one_node else 1.0)
    first = [each for each in listed if price(each) <= limit < inf]
    first.sort(key=lambda each: each.traffic.read)  # of a file a part is measured, and the rest may be slower
    taken = set(map(id, first))
    return [*first, *(each for each in found if id(each) not in taken)]


def _refined(candidate: Candidate, request: Request) -> PricedAlgorithm:
    """Return the fields that change with the best panel width; empty if the default is best."""
    if candidate.rejected or candidate.layouts is None or request.files:  # of which wide panels are read faster
        return {}
    problem = placed_problem(request, candidate.layouts, candidate.copied)
    found = {width: workload_of(candidate.algorithm, problem, width) for width in NARROWER}
    costs = {width: estimate(each, request.cost_model) for width, each in found.items()}
    width = min(costs, key=lambda each: costs[each].seconds)
    if costs[width].seconds >= candidate.cost.seconds:
        return {}
    return {"traffic": traffic(found[width]), "cost": costs[width], "width": width}


def choose(request: Request, each: Each | None = None) -> list[Candidate]:
    """`candidates`, of which the first can serve. Raises AlgorithmError if none can, saying what would fit."""
    found = candidates(request, each)
    if found[0].rejected:
        if len(found) > 1 and any(each.rejected == EXCLUDED for each in found):
            raise AlgorithmError(UNSERVED)
        raise AlgorithmError("; ".join(f"{c.algorithm.name}: {c.rejected}" for c in found))
    return found


def about_seconds(request: Request) -> float:
    """Return the approximate seconds of the best algorithm, from a few; infinite if there is none."""
    priced = (_best(find_algorithm(name), request) for name in _few(request))
    found = [each for each in priced if "rejected" not in each]
    if not found:
        best = candidates(request)[0]
        return inf if best.rejected else best.seconds
    return min(float(each["cost"].corrected(each["correction"]).seconds) for each in found)


def _taken_as(algorithm: Algorithm, request: Request) -> tuple[Algorithm, str]:
    """Return the algorithm specialized to the request, and the reason if that is impossible."""
    fitted = algorithm.specialize(request) if algorithm.specialize is not None else algorithm
    return (algorithm, fitted) if isinstance(fitted, str) else (fitted, "")


def _candidate(algorithm: Algorithm, what: PricedAlgorithm, request: Request) -> Candidate:
    """Return the candidate that was priced, maybe by another rank; its search is not repeated."""
    form = what.pop("found_as", "")
    if form and algorithm.form is not None:
        named = algorithm.form(form)
        assert isinstance(named, Algorithm)
        return Candidate(replace(_taken_as(named, request)[0], name=algorithm.name), **what)
    return Candidate(_taken_as(algorithm, request)[0], **what)


def _best(algorithm: Algorithm, request: Request) -> PricedAlgorithm:
    """Price `algorithm`, specialized to the request, on the cheapest placements that are left open."""
    algorithm, misfit = _taken_as(algorithm, request)
    if misfit:
        return _rejected(misfit)
    known = request.symmetry
    if known is not None and not algorithm.half and (known.fill == "lower" or request.keeps_c):
        return _rejected("multiplies all of C, but only its lower triangle is wanted, or counts in the old C")
    if request.deterministic and (not algorithm.reproducible or adds_in_any_order(request.mesh, request.layouts)):
        what = "adds partial sums of A or B" if algorithm.reproducible else "accumulates"
        return _rejected(f"{what} in no fixed order, which deterministic=True excludes")
    pushes_once = algorithm.over == "k" and algorithm.order != "ticket"
    if request.files and (
        algorithm.grouped
        or algorithm.placements
        or algorithm.staged_to
        or not (algorithm.result == "here" or pushes_once)
    ):
        return _rejected(FROM_FILES)
    if not (request.pushes or algorithm.reproducible):
        return _rejected(f"accumulates, and {NO_PUSHES}")
    options = _placements(algorithm, request)
    if isinstance(options, str):
        return _rejected(options)
    if len(options) > CLOSEST:
        options = sorted(options, key=lambda layouts: distance(algorithm, placed_problem(request, layouts)))[:CLOSEST]
    if request.speeds:
        options += [cut for layouts in options for cut in _by_speed(algorithm, request, layouts)]
    copies = ("", request.copyable) if request.copyable and not algorithm.grouped else ("",)
    ways = list(product(copies, options))
    found = [workload_of(algorithm, placed_problem(request, layouts, copied)) for copied, layouts in ways]
    able = [n for n, each in enumerate(found) if request.prefer != TWO_SIDED or not pulls_or_pushes(each)]
    if not able:
        return _rejected(EXCLUDED)
    costs = {n: estimate(found[n], request.cost_model) for n in able}
    best = min(able, key=lambda n: costs[n].seconds * (WORTH if ways[n][0] else 1))
    copied, layouts = ways[best]
    moved = traffic(found[best])
    kind = "one-sided" if moved.messages else "in place"
    if any(each.how in COLLECTIVES for phase in found[best].phases for each in phase.moved):
        kind = "two-sided"
    correction = request.cost_model.machine.corrections.get(kind, 1.0)
    return {
        "layouts": layouts, "traffic": moved, "cost": costs[best], "copied": copied, "kind": kind,
        "correction": correction, "found_as": algorithm.found_as,
    }


def _rejected(why: str) -> PricedAlgorithm:
    return {"layouts": None, "rejected": why}


def _placements(algorithm: Algorithm, request: Request) -> list[Layouts] | str:
    """Return the placements that `algorithm` may use, or the reason why there are none."""
    if algorithm.placements is None:
        a, b, c = (_open(request, given) for given in request.layouts)
        return list(product(a, b, c))
    needed = algorithm.placements(request.mesh)
    if isinstance(needed, str):
        return needed
    options: list[list[Layout]] = []
    for x, given, wanted in zip("ABC", request.layouts, needed, strict=True):
        taken = _taken(algorithm, request, x, wanted)
        if given is None or wanted is None:
            options.append(taken[:1] or _open(request, given))
        elif any(
            is_placed_as(given, layout, request.extent(x), request.mesh, not algorithm.grouped) for layout in taken
        ):
            is_named = request.algorithm != "auto" and x in algorithm.grouped
            if is_named and given.split_axes and given.mesh(request.mesh) != wanted.mesh(request.mesh):
                return (
                    f"moves {x} by groups along one axis of all ranks, and {x} is placed as {given} over several; "
                    f"leave its placement to the plan, use a mesh of one axis, or name {algorithm.name}:pull, one-sided"
                )
            options.append([given])
        else:
            fits = " or ".join(dict.fromkeys(map(str, taken)))
            return f"needs {x} placed as {fits}, and it is {given}; redistribute it, or name a stationary form"
        if given is None and wanted is not None and (misfit := _misfit(request, x, wanted)):
            return misfit
        if request.algorithm == "auto" and given is None and (options[-1][0].pins or options[-1][0].partial):
            where = "as partial sums" if options[-1][0].partial else "on one face of the mesh, not in equal shares"
            return f"keeps {x} {where}; name it to have that"
    a, b, c = options
    return list(product(a, b, c))


def _by_speed(algorithm: Algorithm, request: Request, layouts: Layouts) -> list[Layouts]:
    """Return the same placements, with the open ones cut by the speeds of the ranks that multiply.

    Where operands move one by one also by column: their groups want the same slices.
    """
    work = algorithm.work(placed_problem(request, layouts).reduced)
    grid, order = work.mesh(request.mesh), (0, 2, 1)
    old, extents = tuple(work.splits[dim] for dim in order), tuple(request.shape[dim] for dim in order)
    ways = (False, True) if not algorithm.grouped and not any(layout.skew_axes for layout in layouts) else (False,)
    found = []
    for by_column in ways:
        new = cuts_by_speed(old, extents, grid, request.speeds, NARROW, by_column)
        changed = [change for change in zip(order, old, new, strict=True) if change[1] != change[2]]
        found.append(cast(Layouts, tuple(
            _recut(x, layout, changed) if given is None and layout.mesh(request.mesh) == grid else layout
            for x, layout, given in zip("ABC", layouts, request.layouts, strict=True)
        )))
    return [each for each in dict.fromkeys(found) if each != layouts]


def _recut(x: str, layout: Layout, changed: Sequence[tuple[int, Split, Split]]) -> Layout:
    """Return a placement whose cuts of m, n and k are replaced as given: (dim, from, to)."""
    to = {(dim, old): new for dim, old, new in changed}
    splits = zip(OPERAND_DIMS[x], layout.splits, strict=True)
    return replace(layout, splits=tuple(to.get((dim, split), split) for dim, split in splits))


def placements_taken(algorithm: Algorithm, request: Request) -> list[Layouts]:
    """Return every combination of placements that `algorithm` accepts. Raises AlgorithmError if there is none."""
    needed = algorithm.placements(request.mesh) if algorithm.placements else "takes any placements"
    if isinstance(needed, str):
        raise AlgorithmError(f"{algorithm.name}: {needed}")
    taken = (
        _taken(algorithm, request, x, wanted) or _open(request, given)
        for x, wanted, given in zip("ABC", needed, request.layouts, strict=True)
    )
    a, b, c = (dict.fromkeys(each) for each in taken)
    return list(product(a, b, c))


def _open(request: Request, given: Layout | None) -> list[Layout]:
    return [given] if given else list(single_layouts(request.mesh))


def _taken(algorithm: Algorithm, request: Request, x: str, wanted: Layout | None) -> list[Layout]:
    """Return the placements of operand `x` that `algorithm` accepts; the first one holds each element once,

    unless the algorithm leaves C as partial sums, as an SBP signature may.
    """
    if wanted is None:
        return []
    single = wanted if wanted.is_single(request.mesh) or wanted.pins else wanted.single(request.mesh)
    others = algorithm.also_accepts(request.mesh) if algorithm.also_accepts else {}
    more = [others[x]] if x in others else []
    more += [layout.transposed for layout in (more or [wanted]) if x in algorithm.accepts_transposed]
    dense = not any(level.kind == "cyclic" for split in wanted.splits for level in split)  # in a C that is all there
    found = [single, wanted, *more, *([everywhere()] if x == "C" and dense else [])]
    return sorted(found, key=lambda layout: not (x in others and others[x].partial and layout == others[x]))


def _misfit(request: Request, x: str, wanted: Layout) -> str:
    """Return why operand `x` cannot be placed so; empty if it can."""
    try:
        wanted.check(request.extent(x), request.mesh)
    except LayoutError as error:
        return str(error)
    return ""


def adds_in_any_order(mesh: MeshShape, layouts: Sequence[Layout | None]) -> bool:
    """True if A or B comes in three summands or more, which are added up as they arrive (two give one result)."""
    given = [layout for layout in layouts[:2] if layout is not None]
    return any(prod(layout.mesh(mesh).axis_size(axis) for axis in layout.partial) > 2 for layout in given)


def placed_problem(request: Request, layouts: Layouts, copied: str = "") -> PlacedProblem:
    return PlacedProblem(
        request.shape, request.mesh, layouts, request.keeps_c, request.in_place, request.fetches_together,
        copied=copied, symmetry=request.symmetry, files=request.files,
    )


def single_layouts(mesh: MeshShape) -> Iterator[Layout]:
    """Placements that hold each element once in equal shares: leading axes cut rows, the others columns.

    Blocks come first and stripes last, so that of equals the squarest tiles are taken.
    """
    count = len(mesh.names)
    for cut in sorted(range(count, -1, -1), key=lambda cut: abs(2 * cut - count)):
        levels = [Level((axis,)) for axis in mesh.names]
        yield Layout((tuple(levels[:cut]), tuple(levels[cut:])))


def default_mesh(
    size: int, shape: tuple[int, int, int], nodes: tuple[int, ...] = (), price_by: PriceBy | None = None,
    **options: Any,
) -> tuple[int, ...]:
    """Return the grid of `size` ranks on which a product of `shape` = (m, n, k) is fastest, of two axes if possible.

    Of equals the squarest is taken, and of those the widest: where k is small, C is written faster by products of all
    columns of a part and some rows than the other way round.

    price_by: returns who prices the candidates of a request, see `candidates`. options: of `Request`. Raises
    AlgorithmError for an algorithm that is not there.
    """
    for axes in (2, 3, 1):
        priced = []
        for grid in sorted(grids(size, axes), key=lambda grid: (max(grid) - min(grid), grid)):
            mesh = MeshShape(grid, node_of_rank=nodes)
            request = Request(shape, mesh, **options)
            best = candidates(request, price_by and price_by(request))[0]
            if not best.rejected:
                priced.append((best.seconds, grid))
        if priced:
            return min(priced, key=lambda pair: pair[0])[1]
    return (1, size)

"""Prices of a product on a described machine, for any number of ranks, and how they grow with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from heapq import nsmallest
from importlib import import_module
from itertools import chain, islice, repeat
from math import prod
from typing import Any, BinaryIO

import numpy as np

from rma_mm.algorithms.search import cosma_grids
from rma_mm.classes import dataclass
from rma_mm.errors import MeshError, OptionError, RmaError
from rma_mm.geometry.mesh import MeshShape, grids
from rma_mm.geometry.notation import parse_layout
from rma_mm.policy.model.cost_model import CostModel, of_each
from rma_mm.policy.model.locality import rank_sample
from rma_mm.policy.model.lower_bounds import least_words
from rma_mm.policy.model.volumes import workload_of
from rma_mm.policy.planner.candidates import Candidate, Request, candidates, every_form, placed_problem
from rma_mm.policy.planner.tables import seconds_text, table
from rma_mm.schedule.algorithm import OPERAND_DIMS
from rma_mm.schedule.lowering.lower import Tuning, lower
from rma_mm.schedule.schedule import Schedule

MOST = 2**24  # ranks that are priced at most
GRIDS = 3  # grids of two axes, and as many of three, on which a product is priced where no mesh is given
SHOWN = 8  # lines of a plot

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class SweepProblem:
    """A product to be priced on many meshes."""

    shape: Shape  # (m, n, k)
    ranks: int
    cost_model: CostModel
    per_node: int  # ranks of a node: so many consecutive ones
    mesh: tuple[int, ...] | None = None  # ranks along each axis; None if it is to be chosen
    algorithm: str = "auto"  # a name, or all of them
    layouts: tuple[str | None, str | None, str | None] = (None, None, None)
    """Placements of A, B and C, in any notation; None if they are to be chosen."""
    memory: int | None = None  # bytes that a rank has for operands, result and scratch; None if nobody counts

    @property
    def element(self) -> int:
        return max(self.cost_model.itemsize, self.cost_model.accum_itemsize)

    @property
    def ideal(self) -> float:
        """Seconds of the multiply-adds alone, in equal shares, on processors that ranks of a node share."""
        ranks = min(self.per_node, self.ranks)
        crowding = max(1.0, ranks / self.cost_model.machine.slots)
        speeds = self.cost_model.machine.speeds[: self.ranks]
        together = sum(speeds) if len(speeds) == self.ranks else self.ranks
        return self.cost_model.local.point * prod(self.shape) / together * crowding

    @property
    def least(self) -> float:
        return least_words(self.shape, self.ranks, self.memory // self.element if self.memory else None)


@dataclass(frozen=True)
class Price:
    question: SweepProblem
    algorithm: str
    mesh: tuple[int, ...]  # the mesh on which it is fastest, or the grid that it makes of its ranks
    candidate: Candidate
    request: Request  # what was asked of the planner on that mesh

    @property
    def seconds(self) -> float:
        return self.candidate.seconds

    @property
    def has_own_grid(self) -> bool:
        """True if it uses the ranks in their order, on any mesh."""
        layouts = self.candidate.layouts
        return layouts is not None and all(layout.grid is not None for layout in layouts)

    @property
    def efficiency(self) -> float:
        return self.question.ideal / self.seconds if self.seconds else 1.0

    @property
    def bytes_held(self) -> float:
        return self.candidate.traffic.elements_held * self.question.element

    @property
    def why_not(self) -> str:
        """The reason why the cell cannot be computed; empty if it can."""
        if self.candidate.rejected:
            return self.candidate.rejected
        held, room = self.tightest
        if room is not None and held > room:
            return f"needs {_bytes(held)} a rank, and {_bytes(room)} may be held"
        return ""

    @cached_property
    def tightest(self) -> tuple[float, float | None]:
        """Return the bytes that the rank with least memory holds, and its limit; None if there is no limit."""
        memory, rooms, candidate = self.question.memory, self.question.cost_model.machine.rooms, self.candidate
        if memory is None or not rooms or candidate.layouts is None:
            return self.bytes_held, memory
        problem = placed_problem(self.request, candidate.layouts, candidate.copied)
        workload = workload_of(candidate.algorithm, problem, candidate.width)
        each = of_each(rooms, workload.sample.ranks[: workload.sample.count], 1.0)
        at = int(np.argmax(workload.elements_held / each))
        return float(workload.elements_held[at]) * self.question.element, memory * float(each[at])

    def schedule(self) -> Schedule:
        """Return all operations of all ranks, for a candidate that can serve."""
        candidate = self.candidate
        assert candidate.layouts is not None
        problem = placed_problem(self.request, candidate.layouts, candidate.copied)
        return lower(candidate.algorithm, problem, Tuning.of(candidate.width))

    def as_json(self) -> dict[str, Any]:
        """Plain figures; None if there are none."""
        question, words = self.question, self.candidate.traffic
        found: dict[str, Any] = {
            "algorithm": self.algorithm, "ranks": question.ranks, "shape": list(question.shape),
            "mesh": list(self.mesh), "fits": not self.why_not, "why_not": self.why_not or None,
            "lower_bound": question.least,
        }
        if self.candidate.layouts is None:
            return found
        cost = self.candidate.cost
        return found | {
            "layouts": {x: str(layout) for x, layout in zip("ABC", self.candidate.layouts, strict=True)},
            "seconds": self.seconds, "efficiency": self.efficiency,
            "multiplying": cost.multiplying, "moving": cost.moving, "meeting": cost.meeting,
            "busiest": words.busiest, "over_bound": words.busiest / question.least if question.least else None,
            "words": {"between": words.between, "within": words.within, "in_place": words.in_place},
            "messages": words.messages, "bytes": self.bytes_held, "memory": question.memory,
        }


# -- prices ---------------------------------------------------------------------------------------


def prices(question: SweepProblem) -> list[Price]:
    """Return every algorithm on its best mesh: the fastest first, then those that need more memory or cannot run.

    Raises RmaError if no mesh goes with the placements that are given.
    """
    names = [algorithm.name for algorithm in every_form()] if question.algorithm == "auto" else [question.algorithm]
    best: dict[str, Price] = {}
    for request in _requests(question):
        for name in names:
            if name in best and best[name].has_own_grid:  # whatever the mesh
                continue
            price = _price(question, name, request)
            if name not in best or _order(price) < _order(best[name]):
                best[name] = price
        rank_sample.cache_clear()  # of a million ranks it holds a lot
    return sorted(best.values(), key=_order)


def _order(price: Price) -> tuple[bool, bool, float]:
    return bool(price.candidate.rejected), bool(price.why_not), price.seconds


def _price(question: SweepProblem, name: str, request: Request) -> Price:
    """Price one algorithm on one mesh. Being named, it may use fewer ranks or unequal shares."""
    found = candidates(replace(request, algorithm=name))[0]
    own = {layout.grid for layout in found.layouts or () if layout.grid is not None}
    mesh = own.pop() if len(own) == 1 else request.mesh
    return Price(question, name, mesh.dims, found, request)


def _requests(question: SweepProblem) -> list[Request]:
    """Return a request to the planner for each mesh that goes with the given placements.

    Memory of a node is shared, as by default when products run.
    """
    nodes = node_map(question.ranks, question.per_node)
    least = min(question.cost_model.machine.rooms, default=1.0)
    memory = int(least * question.memory) // question.element if question.memory is not None else None
    asked, refused = [], []
    for grid in [question.mesh] if question.mesh else default_grids(question.shape, question.ranks):
        mesh = MeshShape(grid, node_of_rank=nodes)
        try:
            a, b, c = (_layout(question, mesh, x, text) for x, text in zip("ABC", question.layouts, strict=True))
        except RmaError as error:
            refused.append(error)
            continue
        shares = nodes[-1] > 0
        asked.append(
            Request(
                question.shape, mesh, (a, b, c), fetches_together=shares, memory=memory, cost_model=question.cost_model
            )
        )
    if not asked:
        raise refused[0]
    return asked


def _layout(question: SweepProblem, mesh: MeshShape, x: str, text: str | None) -> Any:
    if text is None:
        return None
    rows, cols = OPERAND_DIMS[x]
    layout = parse_layout(text, mesh)
    layout.check((question.shape[rows], question.shape[cols]), mesh)
    return layout


@lru_cache(maxsize=4)
def node_map(ranks: int, per_node: int) -> tuple[int, ...]:
    """Return the node of each of the given number of ranks, where consecutive ones share a node."""
    if not 1 <= ranks <= MOST:
        raise MeshError(f"ranks: got {ranks}; 1 to {MOST} are priced")
    count = -(-ranks // per_node)
    nodes = tuple(islice(chain.from_iterable(repeat(node, per_node) for node in range(count)), ranks))
    return MeshShape((ranks,), node_of_rank=nodes).node_of_rank


def default_grids(shape: Shape, ranks: int) -> list[tuple[int, ...]]:
    """The grids on which a product is priced where no mesh is given: of two axes and of three, the most promising.

    That is where the busiest rank has least to multiply and to move, by COSMA's count, whichever dimension a grid of
    two axes leaves uncut. All grids of the given number of ranks would be thousands.
    """

    def flat(grid: tuple[int, ...]) -> int:
        p, q = grid
        return min(cosma_grids.cost(each, shape) for each in ((p, q, 1), (p, 1, q), (1, p, q)))

    def deep(grid: tuple[int, ...]) -> int:
        return cosma_grids.cost((grid[0], grid[1], grid[2]), shape)

    cubes = [grid for grid in grids(ranks, 3) if min(grid) > 1] or list(grids(ranks, 3))
    best = nsmallest(GRIDS, grids(ranks, 2), key=lambda grid: (flat(grid), max(grid), grid))
    return [*best, *nsmallest(GRIDS, cubes, key=lambda grid: (deep(grid), max(grid), grid))]


# -- sweeps ---------------------------------------------------------------------------------------


def strong(question: SweepProblem, ranks: Sequence[int]) -> list[SweepProblem]:
    return [replace(question, ranks=count, mesh=None) for count in ranks]


def weak(question: SweepProblem, ranks: Sequence[int]) -> list[SweepProblem]:
    """Products that grow with the ranks, all sides alike, so that m · n · k of a rank stays; the first as it is."""
    factors = [(count / ranks[0]) ** (1 / 3) for count in ranks]
    shapes = [tuple(max(1, round(extent * factor)) if extent else 0 for extent in question.shape) for factor in factors]
    grown = strong(question, ranks)
    return [replace(each, shape=(m, n, k)) for each, (m, n, k) in zip(grown, shapes, strict=True)]


# -- as text, and as a picture ----------------------------------------------------------------------


def price_table(found: Sequence[Price]) -> str:
    head = ["mesh", "seconds", "efficiency", "words", "bound", "ratio", "messages", "memory"]
    rows = [["algorithm", *head, ""]]
    for price in found:
        cells = _cells(price) if price.candidate.layouts else [""] * len(head)
        reason = f"cannot: {price.why_not}" if price.why_not else ""
        rows.append([price.algorithm, *cells, reason])
    return table(rows)


def _cells(price: Price) -> list[str]:
    """Return figures of an algorithm: words of the busiest rank, messages of an average one, bytes of the fullest."""
    words, least = price.candidate.traffic, price.question.least
    return [
        "x".join(map(str, price.mesh)), seconds_text(price.seconds), f"{price.efficiency:.1%}", f"{words.busiest:.4g}",
        f"{least:.4g}", f"{words.busiest / least:.2f}" if least else "-",
        f"{words.messages / price.question.ranks:.4g}", _bytes(price.bytes_held),
    ]


def sweep_table(found: Sequence[Sequence[Price]]) -> str:
    """Return seconds and efficiency of every algorithm on every number of ranks, then the shape and the fastest."""
    rows = [["algorithm", *(f"{prices[0].question.ranks} ranks" for prices in found)]]
    for name in dict.fromkeys(price.algorithm for prices in reversed(found) for price in prices):
        cells = [_cell(price) for prices in found for price in prices if price.algorithm == name]
        rows.append([name, *cells])
    rows.append(["shape", *("x".join(map(str, prices[0].question.shape)) for prices in found)])
    rows.append(["fastest", *(prices[0].algorithm if not prices[0].why_not else "none" for prices in found)])
    return table(rows)


def _cell(price: Price) -> str:
    if price.why_not:
        return "too much memory" if price.candidate.layouts else "-"
    return f"{seconds_text(price.seconds)}, {price.efficiency:.1%}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"


def draw(found: Sequence[Sequence[Price]], file: BinaryIO, form: str, title: str) -> None:
    """Plot seconds and efficiency against ranks, for algorithms that are nearly the fastest somewhere.

    Needs matplotlib.

    form: what the picture is written as, "svg", "png", … Raises OptionError for one that matplotlib does not know.
    """
    import_module("matplotlib").use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 9), layout="constrained")
    for name in _leading(found):
        fits = [price for prices in found for price in prices if price.algorithm == name and not price.why_not]
        ranks = [price.question.ranks for price in fits]
        above.plot(ranks, [price.seconds for price in fits], "o-", markersize=3, label=name)
        below.plot(ranks, [100 * price.efficiency for price in fits], "o-", markersize=3, label=name)
    questions = [prices[0].question for prices in found]
    ideal = [question.ideal for question in questions]
    above.plot([question.ranks for question in questions], ideal, "k--", label="multiply-adds alone")
    above.set(xscale="log", yscale="log", ylabel="seconds", title=title)
    below.set(xscale="log", xlabel="ranks", ylabel="efficiency, %", ylim=(0, 105))
    above.legend(fontsize="x-small")
    for panel in (above, below):
        panel.grid(alpha=0.3)
    try:
        figure.savefig(file, format=form)
    except ValueError as error:
        raise OptionError(f"--plot: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def _leading(found: Sequence[Sequence[Price]]) -> list[str]:
    """Return the algorithms to be drawn: the fastest on the most ranks, on the fewest, …, then the next of each."""
    columns = [[price.algorithm for price in prices if not price.why_not] for prices in reversed(found)]
    places = max(map(len, columns), default=0)
    names = (column[place] for place in range(places) for column in columns if place < len(column))
    return list(islice(dict.fromkeys(names), SHOWN))


__all__ = [
    "Price",
    "SweepProblem",
    "default_grids",
    "draw",
    "node_map",
    "price_table",
    "prices",
    "strong",
    "sweep_table",
    "weak",
]

"""Placements for all matrices of a chain of products, found together: what is converted, and when.

The placements that a matrix may have are few, and whoever asks says what products and conversions cost (`Question`).
`jointly` finds the cheapest placements of the whole chain by dynamic programming, `greedily` those of one product after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, permutations, product
from math import inf
from typing import NamedTuple

from rma_mm.classes import dataclass
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.layout import Layout
from rma_mm.policy.planner.chain_steps import Step

Places = tuple[Layout, ...]  # placements of several matrices

BEAM = 2000
"""States that are kept after each step. Chains that need more are no longer placed exactly; no worse than greedily."""
STATES = 40_000
"""States that are kept after all steps of a chain together, `BEAM` after each at most; planning takes time."""
NARROW = 16  # states that are kept when a first answer is looked for
ROUNDING = 1e-9  # by which sums of the same seconds may differ
DOMINATORS = 64
"""The cheapest states, which others are compared with: what can be had from one of them for less is dropped."""


@dataclass(frozen=True, eq=False)
class Question:
    """A chain to be placed. Placements are of the matrices as they are, not as products read them."""

    steps: tuple[Step, ...]
    options: Mapping[str, tuple[Layout, ...]]
    """The placements that each matrix may have, those of `given` and `wanted` among them."""
    input_layouts: Mapping[str, Layout]  # placements of inputs; inputs that are not named here may be anywhere
    result_layouts: Mapping[str, Layout]  # where results must be in the end
    price: Callable[[int, Places], float]
    """Number of a step, placements of its factors and its result → seconds; infinite if it cannot be done so."""
    conversion: Callable[[str, Layout, Layout], float]  # matrix, where it is, where it is wanted → seconds
    beside: Callable[[int, Layout], Places | None] = lambda *_: ()
    """Number of a step, placement of its result → those of the others that it reads; None if none will do."""


@dataclass(frozen=True)
class PricedConversion:
    """A matrix that is brought to another placement; it remains where it was, too."""

    name: str
    source: Layout
    target: Layout
    seconds: float


@dataclass(frozen=True)
class PlacedStep:
    conversions: tuple[PricedConversion, ...]  # what is done first
    layouts: Places  # placements of everything it reads, and of its result: A, B and C of a product
    seconds: float  # of the step alone


@dataclass(frozen=True)
class Answer:
    steps: tuple[PlacedStep, ...]
    last: tuple[PricedConversion, ...]  # what is done in the end
    start: Mapping[str, Layout]  # where inputs are to be
    is_exact: bool = True  # true if no other choice of placements can be cheaper

    @property
    def conversions(self) -> tuple[PricedConversion, ...]:
        return (*(each for step in self.steps for each in step.conversions), *self.last)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps) + sum(each.seconds for each in self.conversions)


def jointly(question: Question, may_convert: bool = True) -> Answer:
    """The cheapest placements of the whole chain, conversions included. Raises AlgorithmError if there are none.

    A state is, for each matrix that is still needed, the set of placements that it is available in. Exact as long as
    at most `BEAM` states are left after a step of which none can be had from another for less. may_convert: False for
    conversions in the end only.
    """
    search = _Search(question)
    found = [search.run(may_convert, NARROW)[0]]  # what cannot become cheaper than this need not be looked at
    if may_convert:
        with suppress(AlgorithmError):  # where one product after the other comes to a dead end
            found.append(search.greedy())
    limit = min((node.seconds for node in found if node is not None), default=inf)
    beam = min(BEAM, max(NARROW, STATES // max(1, len(question.steps))))
    last, is_exact = search.run(may_convert, beam, limit)
    ends = [node for node in (last, *found) if node is not None]
    return replace(search.answer(min(ends, key=lambda node: node.seconds, default=None)), is_exact=is_exact)


def greedily(question: Question) -> Answer:
    """Return every product in turn on the best placement of its result for where its operands are.

    It places free operands as if it were alone, and converts others only where it could not be done otherwise.
    """
    search = _Search(question)
    return search.answer(search.greedy())


# -- the search -----------------------------------------------------------------------------------

Masks = tuple[int, ...]
"""The available placements, as bits, of each matrix that is still needed; 0 for one not placed yet."""


class _Arrival(NamedTuple):
    """A way to have a matrix in one of its placements."""

    name: str
    place: int
    mask: int  # what it is then available in
    seconds: float = 0.0
    start: int = -1  # first placement of an input that may be anywhere
    source: int = -1  # where it is converted from, if it is


class _Node(NamedTuple):
    """A state of the search: the steps done so far."""

    seconds: float
    masks: Masks
    before: _Node | None = None
    arrivals: tuple[_Arrival, ...] = ()
    """Ways in which the operands of this step arrive; at the end, those of the results."""
    place: int = -1  # placement of its result; −1 at the beginning and at the end
    alone: float = 0.0  # seconds of the step


_Brought = tuple[tuple[_Arrival, ...], float, dict[str, int]]
"""Ways to bring several matrices to their places, the seconds of that, and the placements then available."""


class _Search:
    def __init__(self, question: Question) -> None:
        self.question = question
        steps = question.steps
        last = {f.name: n for n, step in enumerate(steps) for f in step.reads}
        last |= dict.fromkeys(question.result_layouts, len(steps))
        made = {step.result: n for n, step in enumerate(steps)}
        self.alive = [
            [name for name in question.options if made.get(name, -1) < n <= last.get(name, -1)]
            for n in range(len(steps) + 1)
        ]
        """Matrices that are there before each step and needed by it or later; last, in the end."""
        given = question.input_layouts
        masks = tuple(1 << self.number(x, given[x]) if x in given else 0 for x in self.alive[0])
        self.root = _Node(0.0, masks)
        self.costs: dict[tuple[str, int, int], float] = {}
        self.prices: dict[tuple[int, ...], float] = {}
        self.besides: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self.direct: dict[str, bool] = {}
        self.arrived: dict[tuple[str, int, bool], list[_Arrival]] = {}

    def number(self, name: str, layout: Layout) -> int:
        return self.question.options[name].index(layout)

    # -- costs ------------------------------------------------------------------------------------

    def cost(self, name: str, source: int, target: int) -> float:
        key = name, source, target
        if key not in self.costs:
            options = self.question.options[name]
            self.costs[key] = self.question.conversion(name, options[source], options[target])
        return self.costs[key]

    def price(self, number: int, places: tuple[int, ...]) -> float:
        """Return seconds of a step; places of its factors and its result."""
        key = number, *places
        if key not in self.prices:
            step, options = self.question.steps[number], self.question.options
            names = (*(each.name for each in step.factors), step.result)
            layouts = tuple(options[x][n] for x, n in zip(names, places, strict=True))
            self.prices[key] = self.question.price(number, layouts)
        return self.prices[key]

    def beside(self, number: int, place: int) -> tuple[int, ...] | None:
        """Return the placements of a step's other operands that give its result a placement, or None."""
        step = self.question.steps[number]
        if not step.others:
            return ()
        if (number, place) not in self.besides:
            layouts = self.question.beside(number, self.question.options[step.result][place])
            found = None if layouts is None else tuple(map(self.number, (x.name for x in step.others), layouts))
            self.besides[number, place] = found
        return self.besides[number, place]

    @cached_property
    def rest(self) -> list[float]:
        """Seconds that all that comes after each number of steps takes at least."""
        options, least = self.question.options, []
        for number, step in enumerate(self.question.steps):
            every = (range(len(options[name])) for name in (*(each.name for each in step.factors), step.result))
            least.append(min(self.price(number, places) for places in product(*every)))
        return [*accumulate(reversed(least), initial=0.0)][::-1]

    def nearest(self, name: str, mask: int, target: int) -> tuple[float, int]:
        return min((self.cost(name, source, target), source) for source in _bits(mask))

    def is_direct(self, name: str) -> bool:
        """True if no conversion of a matrix would be cheaper by way of another placement."""
        if name not in self.direct:
            every = range(len(self.question.options[name]))
            self.direct[name] = all(
                self.cost(name, a, c) <= self.cost(name, a, b) + self.cost(name, b, c)
                for a, b, c in permutations(every, 3)
            )
        return self.direct[name]

    # -- states -----------------------------------------------------------------------------------

    def run(self, may_convert: bool, beam: int, limit: float = inf) -> tuple[_Node | None, bool]:
        """Return the best end of cost at most `limit`, and whether keeping `beam` states may have missed one."""
        nodes, is_exact = [self.root], True
        for number in range(len(self.question.steps)):
            highest = limit * (1 + ROUNDING) - self.rest[number + 1]
            found: dict[Masks, _Node] = {}
            for node in nodes:
                for after in self.ways(node, number, may_convert, highest):
                    known = found.get(after.masks)
                    if known is None or after.seconds < known.seconds:
                        found[after.masks] = after
            nodes = self.pruned(found.values(), number + 1, may_convert, beam + 1)
            is_exact, nodes = is_exact and len(nodes) <= beam, nodes[:beam]
        return min(map(self.finished, nodes), key=lambda node: node.seconds, default=None), is_exact

    def greedy(self) -> _Node:
        """Return the end to which the best way of each step leads. Raises AlgorithmError if it leads nowhere."""
        node = self.root
        for number, step in enumerate(self.question.steps):
            wanted = self.question.result_layouts.get(step.result)
            ends = [] if wanted is None else [self.number(step.result, wanted)]
            for may_convert, only in ((False, ends), (True, ends), (True, [])):
                ways = list(self.ways(node, number, may_convert, inf, only))
                if ways:
                    break
            node = min(ways, key=lambda way: way.seconds, default=node)
            if not ways:
                self.answer(None)
        return self.finished(node)

    def arrivals(self, name: str, mask: int, may_convert: bool) -> list[_Arrival]:
        """Return every way to have a matrix in any of its placements."""
        key = name, mask, may_convert
        if key not in self.arrived:
            self.arrived[key] = list(self._arrivals(*key))
        return self.arrived[key]

    def _arrivals(self, name: str, mask: int, may_convert: bool) -> Iterator[_Arrival]:
        every = range(len(self.question.options[name]))
        for start in every if not mask else [-1]:
            there = mask or 1 << start
            for place in every:
                if there >> place & 1:
                    yield _Arrival(name, place, there, 0.0, start)
                elif may_convert:
                    seconds, source = self.nearest(name, there, place)
                    is_better = mask or not self.is_direct(name) or seconds < self.cost(name, place, start)
                    if is_better:  # than to begin there, and to come back here
                        yield _Arrival(name, place, there | 1 << place, seconds, start, source)

    def ways(
        self, node: _Node, number: int, may_convert: bool, highest: float, only: Sequence[int] = ()
    ) -> Iterator[_Node]:
        """Yield the states that follow by one step at `highest` seconds at most.

        only: where its result may be, if said.
        """
        step, alive = self.question.steps[number], self.alive[number + 1]
        masks = dict(zip(self.alive[number], node.masks, strict=True))
        ends = only or range(len(self.question.options[step.result]))
        is_dead = step.result not in alive and not step.others
        factors = [(each.name, None) for each in step.factors]
        for brought, begun, there in self.ways_to_have(factors, masks, may_convert):
            at = tuple(each.place for each in brought)
            costs = [(self.price(number, (*at, place)), place) for place in ends]
            for alone, place in [min(costs)] if is_dead else costs:
                if node.seconds + begun + alone <= highest and alone < inf:
                    for beside, more, held in self.others(number, place, there, may_convert):
                        seconds = node.seconds + begun + more + alone
                        if seconds <= highest:
                            masks_after = tuple(held.get(x, 1 << place) for x in alive)
                            yield _Node(seconds, masks_after, node, (*brought, *beside), place, alone)

    def others(self, number: int, place: int, masks: dict[str, int], may_convert: bool) -> Iterator[_Brought]:
        """Yield every way to have the others that a step reads where its result is in a place."""
        where = self.beside(number, place)
        if where is not None:
            names = [each.name for each in self.question.steps[number].others]
            yield from self.ways_to_have(list(zip(names, where, strict=True)), masks, may_convert)

    def ways_to_have(
        self, wanted: Sequence[tuple[str, int | None]], masks: dict[str, int], may_convert: bool
    ) -> Iterator[_Brought]:
        """Return every way to have matrices in these places, or in any: conversions, seconds, result."""
        if not wanted:
            yield (), 0.0, masks
            return
        (name, place), rest = wanted[0], wanted[1:]
        for one in self.arrivals(name, masks[name], may_convert):
            if place in (None, one.place):
                for more, seconds, there in self.ways_to_have(rest, masks | {name: one.mask}, may_convert):
                    yield (one, *more), one.seconds + seconds, there

    def pruned(self, nodes: Iterable[_Node], number: int, may_convert: bool, most: int) -> list[_Node]:
        """Return the `most` cheapest states, without states that a cheaper one can reach at no extra cost."""
        kept: list[_Node] = []
        for node in sorted(nodes, key=lambda each: each.seconds):
            if not (may_convert and any(self.reaches(one, node, number) for one in kept[:DOMINATORS])):
                kept.append(node)
                if len(kept) == most:
                    break
        return kept

    def reaches(self, one: _Node, other: _Node, number: int) -> bool:
        """True if all that a state has can be had from another, conversions included, at no more than it cost."""
        left = other.seconds - one.seconds
        for name, mine, theirs in zip(self.alive[number], one.masks, other.masks, strict=True):
            for place in _bits(theirs & ~mine):
                left -= self.nearest(name, mine, place)[0]
                if left < 0 or not self.is_direct(name):
                    return False
        return left >= 0

    def finished(self, node: _Node) -> _Node:
        """Return the state with every result where it is wanted."""
        done = []
        for name, mask in zip(self.alive[-1], node.masks, strict=True):
            target = self.number(name, self.question.result_layouts[name])
            if not mask >> target & 1:
                seconds, source = self.nearest(name, mask, target)
                done.append(_Arrival(name, target, mask, seconds, source=source))
        return _Node(node.seconds + sum(each.seconds for each in done), (), node, tuple(done))

    # -- what comes of it -------------------------------------------------------------------------

    def answer(self, end: _Node | None) -> Answer:
        """Return the plan that led to an end. Raises AlgorithmError if there is none."""
        if end is None:
            texts = "; ".join(map(str, self.question.steps))
            raise AlgorithmError(f"steps: got {texts}; no placements allow all of them")
        path, node = [], end.before
        while node is not None and node.before is not None:
            path.append(node)
            node = node.before
        start, steps = dict(self.question.input_layouts), []
        options = self.question.options
        for step, node in zip(self.question.steps, reversed(path), strict=True):
            start |= {each.name: options[each.name][each.start] for each in node.arrivals if each.start >= 0}
            layouts = tuple(options[each.name][each.place] for each in node.arrivals)
            steps.append(PlacedStep(self.conversions(node), (*layouts, options[step.result][node.place]), node.alone))
        return Answer(tuple(steps), self.conversions(end), start)

    def conversions(self, node: _Node) -> tuple[PricedConversion, ...]:
        options = self.question.options
        return tuple(
            PricedConversion(x.name, options[x.name][x.source], options[x.name][x.place], x.seconds)
            for x in node.arrivals if x.source >= 0
        )


@lru_cache(maxsize=1024)
def _bits(mask: int) -> tuple[int, ...]:
    return tuple(n for n in range(mask.bit_length()) if mask >> n & 1)

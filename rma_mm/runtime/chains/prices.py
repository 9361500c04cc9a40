"""Prices of a chain's placements on a mesh, for `chain_search`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, isinf
from typing import Any

import numpy as np

from rma_mm.elements.dtypes import accumulator
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.layout import Layout
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.policy.planner.candidates import Request, candidates
from rma_mm.policy.planner.chain_graph import Shape
from rma_mm.policy.planner.chain_places import (
    all_places,
    beside,
    beside_groups,
    conversion_seconds,
    elementwise_seconds,
    grouped_seconds,
    matching_layout,
    product_seconds,
    summands,
)
from rma_mm.policy.planner.chain_search import Answer, Places, Question, greedily, jointly
from rma_mm.policy.planner.preference import TWO_SIDED, VARIABLE
from rma_mm.runtime.chains.chain_request import Chain
from rma_mm.runtime.execution.operands import Operand, Operands
from rma_mm.runtime.products.choosing import request_of
from rma_mm.runtime.products.make_plan import operands_of, with_kernel
from rma_mm.runtime.products.prices import cost_model_of, flavour_of, is_known
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows.waiting import barrier, reduced

CONVERTED = (
    "steps: on these placements they cannot all be done without gets, as conversions are, and accumulates; "
    f"prefer={TWO_SIDED!r} (or {VARIABLE}) excludes those; leave more placements to the chain"
)
"""Message if no placements work."""


class Prices:
    """The choices for a chain, and their prices. Measures the machine if it must.

    Collective to make; measures the machine where it must.
    """

    def __init__(self, mesh: Mesh, chain: Chain) -> None:
        self.mesh, self.chain = mesh, chain
        self.products = {number: with_kernel(mesh, each) for number, each in chain.products.items()}
        self.tariffs = {number: self._tariffs(each) for number, each in self.products.items()}
        self.is_known = bool(self.products) and all(
            is_known(cost_model, each)
            for number, each in self.products.items()
            for cost_model in self.tariffs[number].values()
        )
        self.cost_model = self._usual()  # what everything else is priced by
        self.shapes = {name: x.shape for name, x in chain.matrices.items()}
        speeds = self.cost_model.machine.speeds_of(mesh.grid.size)
        options = all_places(mesh.grid, chain.steps, self.shapes, chain.input_layouts | chain.result_layouts, speeds)
        self.question = Question(
            chain.steps, options, chain.input_layouts, chain.result_layouts, self.price, self.conversion, self.beside
        )
        self.is_two_sided = (chain.options.prefer or mesh.prefer) == TWO_SIDED
        self.table: dict[tuple[int, Places], float] = {}

    def _usual(self) -> CostModel:
        """Return the cost model of the chain's last product, or of a typical one. Collective."""
        if self.tariffs:
            return self.tariffs[max(self.tariffs)][False, False]
        first = next(iter(self.chain.matrices.values()))
        one = Operand((1, 1), first.dtype)
        return cost_model_of(
            self.mesh, with_kernel(self.mesh, operands_of(one, one, self.mesh, None, self.chain.options))
        )

    def _tariffs(self, given: Operands) -> dict[tuple[bool, bool], CostModel]:
        """Return the cost models of a product, keyed by whether A and B are read from a caller's own arrays.

        Collective.
        """
        ways = [(False, True) if x.in_place is False else (False,) for x in (given.a, given.b)]
        found = {}
        for own_a, own_b in product(*ways):
            a, b = (replace(x, in_place=False if own else None) for x, own in ((given.a, own_a), (given.b, own_b)))
            found[own_a, own_b] = cost_model_of(self.mesh, replace(given, a=a, b=b))
        return found

    def matrix(self, name: str, layout: Layout) -> Operand:
        """Return a matrix in one of its placements: where it was given, on its own memory, else on the mesh's."""
        known = self.chain.matrices[name]
        is_there = name in self.chain.inputs and layout == known.layout
        return replace(known, layout=layout, in_place=known.in_place if is_there else None)

    def request(self, number: int, layouts: Places) -> Request:
        """Return the question to the planner for a product on these placements."""
        step, given = self.chain.steps[number], self.products[number]
        names = (*(each.name for each in step.factors), step.result)
        a, b, c = (self.matrix(name, layout) for name, layout in zip(names, layouts, strict=True))
        cost_model = self.tariffs[number][a.in_place is False, b.in_place is False]
        return request_of(self.mesh, replace(given, a=a, b=b, c=c), cost_model)

    def price(self, number: int, layouts: Places) -> float:
        """Seconds of a step on these placements of its factors and its result; infinite if it cannot be done so."""
        step = self.chain.steps[number]
        if step.axes:
            return self.sums(number, *layouts)
        if step.grouped is not None:
            if beside_groups(self.mesh.grid, step, layouts[-1], self.shapes) is None:
                return inf
            cost_model = replace(self.cost_model, itemsize=self.chain.matrices[step.result].dtype.itemsize)
            return grouped_seconds(self.mesh.grid, step, self.shapes, cost_model)
        seconds = 0.0
        if step.is_product:
            known = self.table.get((number, layouts))
            seconds = product_seconds(self.request(number, layouts)) if known is None else known
        return seconds + (self.elementwise(number, step.result, layouts[-1]) if step.work is not None else 0.0)

    def elementwise(self, number: int, name: str, layout: Layout) -> float:
        """Return the seconds of the element-wise work on a matrix in a step."""
        cost_model = replace(self.cost_model, itemsize=self.chain.matrices[name].dtype.itemsize)
        step = self.chain.steps[number]
        return elementwise_seconds(self.mesh.grid, step, self.shapes[name], layout, cost_model)

    def sums(self, number: int, source: Layout, target: Layout) -> float:
        """Return seconds of sums: of the own part, and of bringing these together."""
        step = self.chain.steps[number]
        own, name = summands(step, source, self.mesh.grid), step.factors[0].name
        if own is None or target.partial or source.partial:
            return inf
        there = matching_layout(own, [target], self.shapes[step.result], self.mesh.grid)
        moved = 0.0 if there else self.conversion(step.result, own, target)
        return self.elementwise(number, name, source) + moved

    def beside(self, number: int, layout: Layout) -> Places | None:
        """Return the placements of a step's other operands for a result that is placed so; None if there are none."""
        step, places = self.chain.steps[number], []
        grouped = None if step.grouped is None else beside_groups(self.mesh.grid, step, layout, self.shapes)
        if step.grouped is not None and grouped is None:
            return None
        for n, x in enumerate(step.others):
            wanted = grouped[n] if grouped else beside(layout, self.shapes[step.result], x, self.shapes[x.name])
            place = wanted and matching_layout(
                wanted, self.question.options[x.name], self.shapes[x.name], self.mesh.grid
            )
            if place is None:
                return None
            places.append(place)
        return tuple(places)

    def conversion(self, name: str, source: Layout, target: Layout) -> float:
        """Return seconds of bringing a matrix to another placement."""
        if self.is_two_sided:
            return inf  # ranks pull what they convert
        x = self.matrix(name, source)
        is_own, cost_model = x.in_place is False, self.cost_model
        for number, tariffs in self.tariffs.items():
            names = [each.name for each in self.chain.steps[number].factors]
            if name in names:
                cost_model = tariffs[is_own and name == names[0], is_own and name == names[1]]
                break
        flavours, summed = (("A", flavour_of(self.mesh, x)),), accumulator(x.dtype).itemsize
        cost_model = replace(cost_model, itemsize=x.dtype.itemsize, accum_itemsize=summed, flavours=flavours)
        return conversion_seconds(self.mesh.grid, x.shape, source, target, cost_model)

    def every(self, number: int) -> list[Places]:
        step, options = self.chain.steps[number], self.question.options
        return list(product(*(options[each.name] for each in step.factors), options[step.result]))

    def fill(self) -> None:
        """Price every product on every placement: each rank its share, for all of them. Collective."""
        comm = self.mesh.comm
        keys = [(number, layouts) for number in self.products for layouts in self.every(number)]
        requests = [self.request(*key) for key in keys]
        place = {request: n for n, request in enumerate(dict.fromkeys(requests))}
        seconds = np.zeros(len(place))
        with agreed(comm, "plan_chain"):
            for request, n in place.items():
                if n % comm.size == comm.rank:
                    seconds[n] = product_seconds(request)
        reduced(comm, seconds, "SUM")
        self.table = {key: float(seconds[place[request]]) for key, request in zip(keys, requests, strict=True)}

    def chosen(self, joint: bool, may_convert: bool = True) -> tuple[Answer, Answer]:
        """Return the joint choice and the greedy choice, as rank 0 finds them. Collective. Raises AlgorithmError."""
        comm, may_convert = self.mesh.comm, may_convert and not self.is_two_sided
        if joint and not self.table:
            self.fill()
        told: tuple[Answer, Answer] | Exception | None = None
        if comm.rank == 0:
            try:
                greedy = greedily(self.question)
                told = jointly(self.question, may_convert) if joint else greedy, greedy
                if isinf(told[0].seconds):
                    raise AlgorithmError("steps: no placements work without conversions")
            except AlgorithmError as error:
                told = AlgorithmError(self.unserved() or (CONVERTED if self.is_two_sided else str(error)))
            except Exception as error:  # noqa: BLE001 - the others wait for what it has to say
                told = error
        barrier(comm)  # in which they sleep
        told = comm.bcast(told)
        if isinstance(told, Exception):
            raise told
        assert told is not None
        return told

    def unserved(self) -> str:
        """Return the first product that cannot be done on any placements, and why; empty if there is none."""
        for number in self.products:
            places = self.every(number)
            if all(isinf(self.price(number, layouts)) for layouts in places):
                best = candidates(self.request(number, places[0]))[0]
                step = self.chain.steps[number]
                return f"steps: '{step}' can be done on no placements; {best.algorithm.name}: {best.rejected}"
        return ""


def nbytes(mesh: Mesh, shape: Shape, dtype: np.dtype[Any], layout: Layout) -> int:
    return int(layout.region(shape, mesh.grid, mesh.rank).size * dtype.itemsize)

"""What a chain of products consists of, and what its placements cost on a mesh: what `chain_search` asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isinf
from typing import Any

import numpy as np

from rma_mm.algorithms import find_algorithm
from rma_mm.elements.dtypes import accumulator, as_dtype
from rma_mm.errors import AlgorithmError, DtypeError, LayoutError, OptionError, ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.policy.model.price import Tariff
from rma_mm.policy.planner.candidates import Request, candidates
from rma_mm.policy.planner.chain_search import Answer, Question, greedily, jointly
from rma_mm.policy.planner.chain_steps import (
    Shape,
    Step,
    conversion_seconds,
    outputs_of,
    parsed,
    placements,
    problem,
    product_seconds,
)
from rma_mm.policy.planner.preference import TWO_SIDED, VARIABLE
from rma_mm.runtime.execution.operands import Operand, Operands, ProductOptions
from rma_mm.runtime.matrices.arguments import checked_shape, placed
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.products.make_plan import operand_of, operands_of, with_kernel
from rma_mm.runtime.products.prices import flavour_of, is_known, tariff_of
from rma_mm.runtime.products.settling import request_of
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.row import Layouts
from rma_mm.windows.waiting import barrier, reduced

CONVERTED = (
    "steps: on these placements they cannot all be done without gets, as conversions are, and accumulates; "
    f"prefer={TWO_SIDED!r} (or {VARIABLE}) excludes those; leave more placements to the chain"
)
"""What is said where no placements do."""


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain that was asked for, checked."""

    steps: tuple[Step, ...]
    matrices: dict[str, Operand]
    """Inputs, then results, in the order of the steps; with their placements as far as those are given."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    products: tuple[Operands, ...]
    """A, B and C of every step."""

    @property
    def given(self) -> dict[str, Layout]:
        """Where inputs are, as far as that is given."""
        found = {name: self.matrices[name].layout for name in self.inputs}
        return {name: layout for name, layout in found.items() if layout is not None}

    @property
    def wanted(self) -> dict[str, Layout]:
        """Where results must be, as far as that is given."""
        found = {step.result: self.matrices[step.result].layout for step in self.steps}
        return {name: layout for name, layout in found.items() if layout is not None}

    @classmethod
    def of(
        cls, mesh: Mesh, steps: str | Sequence[str], inputs: Mapping[str, object], outputs: Sequence[str],
        layouts: Mapping[str, str | Layout], options: Mapping[str, Any],
    ) -> Chain:  # fmt: skip
        """The chain of these arguments. Local; raises as `plan_chain` does."""
        found = parsed(steps, tuple(inputs))
        if options["algorithm"] != "auto":
            find_algorithm(options["algorithm"])
        if not isinstance(layouts, Mapping):
            raise OptionError(f"layouts: got {layouts!r}; it is a dict of placements by the names of matrices")
        names = (*inputs, *(step.result for step in found))
        for name in layouts:
            if name not in names:
                raise OptionError(f"layouts: got {name!r}; there are {', '.join(names)}")
        matrices = {name: _input(name, x, mesh, layouts.get(name)) for name, x in inputs.items()}
        products = []
        for step in found:
            problem(step, {name: x.shape for name, x in matrices.items()})
            a, b = matrices[step.a.name], matrices[step.b.name]
            turns = (bool(step.a.turn), bool(step.b.turn), step.a.turn == "H", step.b.turn == "H")
            asked = ProductOptions(1, 0, *turns, **options).normalised()
            products.append(operands_of(a, b, mesh, layouts.get(step.result), asked))
            matrices[step.result] = products[-1].c
        return cls(found, matrices, tuple(inputs), outputs_of(found, outputs), tuple(products))


def _input(name: str, x: object, mesh: Mesh, layout: str | Layout | None) -> Operand:
    """An input as an operand, placed where that is given. Raises what `plan_chain` does."""
    if isinstance(x, tuple) and len(x) == 2:
        try:
            x = Operand(checked_shape(x[0]), as_dtype(x[1]))
        except (ShapeError, DtypeError) as error:
            raise type(error)(f"{name}: {error}") from None
    if not isinstance(x, DistMatrix | Operand):
        raise OptionError(
            f"{name}: got {type(x).__name__}; pass a DistMatrix, or (shape, dtype) of a matrix that is to be placed"
        )
    operand = operand_of(name, x, mesh)
    if layout is None:
        return operand
    if isinstance(x, DistMatrix):
        raise LayoutError(f"layouts: got {layout} for {name}, which lies as {x.layout}; redistribute it, or leave this")
    return replace(operand, layout=placed(layout, operand.shape, mesh))


class Prices:
    """What may be chosen for a chain, and what it costs. Collective to make; measures the machine where it must."""

    def __init__(self, mesh: Mesh, chain: Chain) -> None:
        self.mesh, self.chain = mesh, chain
        self.products = [with_kernel(mesh, each) for each in chain.products]
        self.tariffs = [self._tariffs(each) for each in self.products]
        self.is_known = all(
            is_known(tariff, each) for each, found in zip(self.products, self.tariffs, strict=True)
            for tariff in found.values()
        )  # fmt: skip
        turned = {factor.name for step in chain.steps for factor in (step.a, step.b) if factor.turn}
        speeds = next(iter(self.tariffs[0].values())).machine.speeds_of(mesh.shape.size)
        options = {
            name: placements(mesh.shape, x.shape, name in turned, () if x.layout is None else (x.layout,), speeds)
            for name, x in chain.matrices.items()
        }
        self.question = Question(chain.steps, options, chain.given, chain.wanted, self.product, self.conversion)
        self.is_two_sided = (self.products[0].options.prefer or mesh.prefer) == TWO_SIDED
        self.table: dict[tuple[int, Layouts], float] = {}

    def _tariffs(self, given: Operands) -> dict[tuple[bool, bool], Tariff]:
        """What a product is priced by, by whether A and B are read from a caller's own arrays. Collective."""
        ways = [(False, True) if x.in_place is False else (False,) for x in (given.a, given.b)]
        found = {}
        for own_a, own_b in product(*ways):
            a, b = (replace(x, in_place=False if own else None) for x, own in ((given.a, own_a), (given.b, own_b)))
            found[own_a, own_b] = tariff_of(self.mesh, replace(given, a=a, b=b))
        return found

    def matrix(self, name: str, layout: Layout) -> Operand:
        """A matrix in one of its placements: where it was given, on its own memory, else on the mesh's."""
        known = self.chain.matrices[name]
        is_there = name in self.chain.inputs and layout == known.layout
        return replace(known, layout=layout, in_place=known.in_place if is_there else None)

    def request(self, number: int, layouts: Layouts) -> Request:
        """The question to the planner for a step on these placements."""
        step, given = self.chain.steps[number], self.products[number]
        names = (step.a.name, step.b.name, step.result)
        a, b, c = (self.matrix(name, layout) for name, layout in zip(names, layouts, strict=True))
        tariff = self.tariffs[number][a.in_place is False, b.in_place is False]
        return request_of(self.mesh, replace(given, a=a, b=b, c=c), tariff)

    def product(self, number: int, layouts: Layouts) -> float:
        """Seconds of a step on these placements; infinite where it cannot be done so."""
        known = self.table.get((number, layouts))
        return product_seconds(self.request(number, layouts)) if known is None else known

    def conversion(self, name: str, source: Layout, target: Layout) -> float:
        """Seconds of bringing a matrix to another placement."""
        if self.is_two_sided:
            return inf  # ranks pull what they convert
        x = self.matrix(name, source)
        is_own = x.in_place is False
        found = self.tariffs[-1][False, False]  # of the last step, for a result that none reads
        for step, tariffs in zip(self.chain.steps, self.tariffs, strict=True):
            if name in (step.a.name, step.b.name):
                found = tariffs[is_own and name == step.a.name, is_own and name == step.b.name]
                break
        flavours, summed = (("A", flavour_of(self.mesh, x)),), accumulator(x.dtype).itemsize
        tariff = replace(found, itemsize=x.dtype.itemsize, summed=summed, flavours=flavours)
        return conversion_seconds(self.mesh.shape, x.shape, source, target, tariff)

    def triples(self, number: int) -> list[Layouts]:
        """All placements of A, B and C of a step."""
        step, options = self.chain.steps[number], self.question.options
        return list(product(options[step.a.name], options[step.b.name], options[step.result]))

    def fill(self) -> None:
        """Price every step on every placement: each rank its share, for all of them. Collective."""
        comm = self.mesh.comm
        keys = [(number, layouts) for number in range(len(self.chain.steps)) for layouts in self.triples(number)]
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
        """What is chosen, and what greedy choice would be: rank 0's answers. Collective. Raises AlgorithmError."""
        comm, may_convert = self.mesh.comm, may_convert and not self.is_two_sided
        if joint and not self.table:
            self.fill()
        told: tuple[Answer, Answer] | Exception | None = None
        if comm.rank == 0:
            try:
                greedy = greedily(self.question)
                told = jointly(self.question, may_convert) if joint else greedy, greedy
                if isinf(told[0].seconds):
                    raise AlgorithmError("steps: nothing does without conversions")
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
        """The first step that cannot be done on any placements, and why; empty where there is none."""
        for number, step in enumerate(self.chain.steps):
            triples = self.triples(number)
            if all(isinf(self.product(number, layouts)) for layouts in triples):
                best = candidates(self.request(number, triples[0]))[0]
                return f"steps: '{step}' can be done on no placements; {best.row.name}: {best.rejected}"
        return ""


def nbytes(mesh: Mesh, shape: Shape, dtype: np.dtype[Any], layout: Layout) -> int:
    """Bytes of this rank's part of a matrix."""
    return int(layout.region(shape, mesh.shape, mesh.rank).size * dtype.itemsize)

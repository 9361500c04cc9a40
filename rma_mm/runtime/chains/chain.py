"""Chains of products and of everything between them: placed together, prepared once, run many times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from numpy.typing import DTypeLike

from rma_mm.algorithms import REGISTERED
from rma_mm.errors import AlgorithmError, ClosedError, LayoutError, MemoryLimitError, OptionError, RmaError, quoted
from rma_mm.geometry.layout import Layout
from rma_mm.kernels.epilogue.pointwise import work_bytes
from rma_mm.policy.model.cost_model import CostBreakdown
from rma_mm.policy.planner.chain_gradients import gradients
from rma_mm.policy.planner.chain_graph import Shape
from rma_mm.policy.planner.chain_places import matching_layout, summands
from rma_mm.policy.planner.chain_search import Answer, PlacedStep, PricedConversion
from rma_mm.policy.planner.chain_steps import Step
from rma_mm.runtime.chains.actions import (
    Action,
    AxisSums,
    Conversion,
    Elementwise,
    GroupWork,
    Multiplication,
    Place,
    StepPlaces,
)
from rma_mm.runtime.chains.chain_request import Chain, as_matrix_on
from rma_mm.runtime.chains.descriptions import seconds_line, step_table
from rma_mm.runtime.chains.memory import Frontier, divide_memory
from rma_mm.runtime.chains.overlapped import Overlapped
from rma_mm.runtime.chains.prices import Prices, nbytes
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.matrices.matrix import DistMatrix, check_matrix, overlap
from rma_mm.runtime.matrices.move import Redistribution, scratch_bytes
from rma_mm.runtime.products.make_plan import common_mesh, describe
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.metrics import tell_together
from rma_mm.runtime.ranks.process_group import serialized
from rma_mm.windows.waiting import largest

Given = DistMatrix | Operand | tuple[Shape, DTypeLike] | complex
T = TypeVar("T")


@serialized
def plan_chain(
    steps: str | Sequence[str] = "",
    /,
    mesh: Mesh | None = None,
    *,
    outputs: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    layouts: Mapping[str, str | Layout] | None = None,
    algorithm: str = "auto",
    memory_limit: int | str | None = None,
    compute_dtype: DTypeLike | None = None,
    deterministic: bool = False,
    kernel: str = "auto",
    joint: bool = True,
    check: bool | str = False,
    prefer: str | None = None,
    inputs: Mapping[str, Given] | None = None,
    **named: Given,
) -> ChainPlan:
    """Plan a sequence of products and element-wise steps so that all together take least time.

    Collective.

    Parameters
    ----------
    steps : str or sequence of str
        Assignments as "H = gelu(X @ W + b)"; later steps may read earlier results. Operators are @ and, with
        NumPy's broadcasting, + - * /; a bias is (n,), (1, n) or (m, 1). Functions are .T, .H, .conj(), gelu, relu,
        their derivatives gelu' and relu', exp, log, sqrt, tanh, sigmoid and where(X > Y, A, B). Along an axis there are
        sum(X, 0), max(X, 1), softmax(X), layer_norm(X) and broadcast_to(b, (m, n)).
    mesh : Mesh, optional
        The mesh of an input, or else the default mesh, if not given.
    outputs : sequence of str, optional
        Results to return besides those that no step reads.
    only : sequence of str, optional
        The only results to return; steps that none of them needs are dropped.
    layouts : mapping of str to str or Layout, optional
        Placements that results must have, and placements of inputs given as (shape, dtype).
    algorithm : str
        As in `matmul`, for every product.
    memory_limit : int or str, optional
        Bytes, or text such as "2GiB", that a rank may hold of all matrices, copies and scratch memory.
    compute_dtype, deterministic, kernel : optional
        As in `matmul`, for every product.
    joint : bool
        False to plan each step by itself (default True).
    check, prefer : optional
        As in `matmul`, for every product.
    inputs : mapping, optional
        Inputs by name, if a name is also an option of this function.
    **named : DistMatrix, tuple or number
        Inputs by name: a matrix where it lies, (shape, dtype) of one that the chain may place, or a number.

    Returns
    -------
    ChainPlan
        The prepared steps.

    Raises
    ------
    RmaError
        OptionError, ShapeError, DtypeError, LayoutError, MeshError or AlgorithmError for arguments that do not fit.
        MemoryLimitError says how much memory is missing. DisagreementError if ranks pass different arguments.

    Notes
    -----
    Equal expressions are computed once. Element-wise work is done with the product before it, unless products are
    checked.
    """
    steps = steps or named.pop("steps", "")  # type: ignore[assignment]
    given = _by_name(inputs, named)
    mesh = common_mesh(mesh, *given.values())
    options = {
        "algorithm": algorithm, "memory_limit": memory_limit, "compute_dtype": compute_dtype,
        "deterministic": deterministic, "kernel": kernel, "check": check, "prefer": prefer,
    }
    with agreed(
        mesh.comm, "plan_chain", steps=steps, outputs=outputs, only=only, layouts=layouts, joint=joint,
        registered=REGISTERED, **options,
    ) as facts:
        facts |= {f"input {name}": describe(x) for name, x in given.items()}
        said = options | {"outputs": outputs, "only": only, "layouts": layouts, "joint": joint, "out": named.get("out")}
        for name, x in said.items():
            if isinstance(x, DistMatrix | Operand):
                raise OptionError(
                    f"{name}: plan_chain or execute has an option of this name; pass such a matrix to both in a dict: "
                    f"inputs={{'{name}': …}}, execute({{'{name}': …}})"
                )
        chain = Chain.of(mesh, steps, given, outputs, only, layouts or {}, options)
    prices = Prices(mesh, chain)
    answer, greedy = prices.chosen(joint)
    try:
        return ChainPlan(mesh, chain, prices, answer, greedy)
    except MemoryLimitError as error:
        try:
            leaner, _ = prices.chosen(joint, may_convert=False)  # copies are what it can do without
        except AlgorithmError:
            leaner = answer
        if len(leaner.conversions) >= len(answer.conversions):
            raise error from None
    return ChainPlan(mesh, chain, prices, leaner, greedy)


def _by_name(inputs: Mapping[str, T] | None, named: Mapping[str, T]) -> dict[str, T]:
    """Return all inputs, those in a dict and those by keyword. Raises OptionError."""
    if not isinstance(inputs, Mapping | None):
        raise OptionError(f"inputs: got {type(inputs).__name__}; must be a dict of matrices by their names")
    for name in inputs or ():
        if name in named:
            raise OptionError(f"inputs: got {quoted(name)}, which is given by keyword too; pass it once")
    return {**(inputs or {}), **named}


class ChainPlan:
    """A sequence of steps, placed and prepared. Made by `plan_chain`; collective to execute."""

    def __init__(self, mesh: Mesh, chain: Chain, prices: Prices, answer: Answer, greedy: Answer) -> None:
        self.mesh, self.chain, self.answer, self.greedy = mesh, chain, answer, greedy
        self.layouts = dict(answer.start)
        """Placements: of inputs as `execute` takes them, of results as they are made, of outputs as it returns them."""
        self.layouts |= {step.result: done.layouts[-1] for step, done in zip(chain.steps, answer.steps, strict=True)}
        self.layouts |= chain.result_layouts
        self.serial = mesh.next_serial()
        self.plans: list[Plan] = []
        """The plan of each product."""
        self._matrices: dict[Place, DistMatrix] = {}
        self._actions: list[Action] = []
        self._in_place: set[Place] = set()
        """Matrices that are read where they lie on node-mates."""
        self._is_closed = False
        self._overlapped: Overlapped | None = None
        self._last: tuple[list[tuple[str, float]], float] = [], 0.0
        """The algorithm of each step when the chain was closed, and the predicted seconds of all."""
        self._prices = prices
        try:
            self.peak_bytes = self._prepared()
            """Bytes that the fullest rank holds at most, as made: all matrices, copies, and the products' scratch."""
        except RmaError:  # the same on every rank
            self.close()
            raise
        inputs = [(name, answer.start[name]) for name in chain.inputs]
        self._overlapped = Overlapped(mesh, self._actions, inputs, bool(chain.options.check))
        self.outputs = {name: self._matrices[name, self.layouts[name]] for name in chain.outputs}
        """The results that `execute` returns."""

    @property
    def adapt(self) -> bool:
        """True if steps may switch to other ways of doing the same, as plans do; to be set alike on all ranks."""
        return all(plan.adapt for plan in self.plans)

    @adapt.setter
    def adapt(self, value: bool) -> None:
        for plan in self.plans:
            plan.adapt = value

    @property
    def predicted_seconds(self) -> float | None:
        """Predicted seconds of an execution; None if this machine, or such products on it, were not measured."""
        return self._seconds if self._prices.is_known else None

    @property
    def _chosen(self) -> list[tuple[str, float]]:
        """Algorithm and seconds of each step."""
        if self._is_closed:
            return self._last[0]
        plans, pairs = iter(self.plans), zip(self.chain.steps, self.answer.steps, strict=True)
        return [self._in_force(step, placed, plans) for step, placed in pairs]

    def _in_force(self, step: Step, placed: PlacedStep, plans: Iterator[Plan]) -> tuple[str, float]:
        """Return the algorithm that does a step now, and its predicted seconds."""
        if not step.is_product:
            return "sums" if step.axes else "groups" if step.grouped else "element-wise", placed.seconds
        plan = next(plans, None)
        return ("", placed.seconds) if plan is None else (plan.algorithm, plan.choice.chosen.seconds)

    @property
    def _seconds(self) -> float:
        return min(self._apart, self._overlapped.seconds) if self._overlapped else self._last[1]

    @property
    def _apart(self) -> float:
        return sum(seconds for _, seconds in self._chosen) + sum(each.seconds for each in self.answer.conversions)

    @property
    def greedy_seconds(self) -> float | None:
        """Predicted seconds of an execution in which each product is planned by itself."""
        return self.greedy.seconds if self._prices.is_known else None

    # -- executing --------------------------------------------------------------------------------

    @serialized
    def execute(
        self, inputs: Mapping[str, DistMatrix] | None = None, /, *, out: Mapping[str, DistMatrix] | None = None,
        **named: DistMatrix,
    ) -> dict[str, DistMatrix]:
        """Run all steps.

        Collective. Creates no window, communicator or buffer after the first time.

        Parameters
        ----------
        inputs : mapping of str to DistMatrix, optional
            Inputs by name, placed as `layouts` says.
        out : mapping of str to DistMatrix, optional
            Matrices that receive outputs, by name, placed likewise; none may share memory with another.
        **named : DistMatrix
            Further inputs by name.

        Returns
        -------
        dict of str to DistMatrix
            The outputs by name: those in `out`, and else the same matrices each time.

        Raises
        ------
        RmaError
            OptionError, ShapeError, DtypeError, LayoutError, MeshError or ClosedError for arguments that do not fit.
            VerificationError if the chain was made with `check` and a product is wrong. DisagreementError.
        """
        inputs = self._with_rows(inputs) if isinstance(inputs, Mapping) else inputs
        named = self._with_rows(named)
        with agreed(self.mesh.comm, "execute", chain=self.serial, adapt=[plan.adapt for plan in self.plans]) as facts:
            if self._is_closed:
                raise ClosedError("chain: it is closed; make a new one")
            given = _by_name(inputs, named)
            out = self._check_names(given, out)
            read = {name: given[name] for name in self.chain.inputs}
            others = [(name, own) for (name, _), own in self._matrices.items()]
            for name, matrix in (read | out).items():
                self._check(name, matrix, others if name in read else [*others, *read.items()])
                others += [(name, matrix)] * (name in out)
                facts[name] = matrix.facts
                matrix.block.window.sync()  # what this rank stored, before the others may read it
        places = {(name, self._first[name]): matrix for name, matrix in (read | out).items()}
        here = self._matrices | {place: x for place, x in places.items() if x.layout == place[1]}
        for plan in self.plans:
            if plan.adapt:
                plan.follow()
        tell_together(self.mesh.comm, [plan.watch for plan in self.plans])
        assert self._overlapped is not None
        self._overlapped.run(here)
        for name, matrix in out.items():
            if matrix.layout != self._first[name]:  # it was converted, to where it always is
                matrix.copy_from(self.outputs[name])
        return self.outputs | out

    def _with_rows(self, given: Mapping[str, DistMatrix]) -> dict[str, DistMatrix]:
        """Return matrices, and vectors as matrices of one row. Collective if there is a vector."""
        return {name: as_matrix_on(self.mesh, x, self.layouts.get(name)) for name, x in given.items()}

    def _check_names(self, inputs: Mapping[str, object], out: object) -> dict[str, DistMatrix]:
        """Return the matrices for outputs, once names are known to be right."""
        wanted = self.chain.inputs
        for name in (*wanted, *inputs):
            if name not in inputs or name not in (*wanted, *self.chain.spare):
                what = "missing" if name in wanted else "no input of this chain"
                raise OptionError(f"{name}: it is {what}; execute takes {', '.join(f'{each}=' for each in wanted)}")
        if out is not None and not isinstance(out, Mapping):
            raise OptionError(f"out: got {type(out).__name__}; must be a dict of matrices by the names of outputs")
        for name in out or {}:
            if name not in self.chain.outputs:
                raise OptionError(f"out: got {name!r}; the outputs are {', '.join(self.chain.outputs)}")
        return dict(out or {})

    def _check(self, name: str, matrix: DistMatrix, others: Sequence[tuple[str, DistMatrix]]) -> None:
        """Raise an error for a matrix that differs from the planned one, or shares memory with another."""
        wanted = self.chain.matrices[name]
        facts = (wanted.dtype, wanted.shape, self.layouts[name])
        check_matrix(name, matrix, self.mesh, facts, (name, self.layouts[name]) in self._in_place, "chain")
        for other, own in others:
            if overlap(matrix, own):
                raise LayoutError(f"{name}: it shares memory with {other}, and the chain writes one; pass a copy")

    def close(self) -> None:
        """Release the chain's memory, which is free once every rank has done so; outputs live on while in use.

        Local; may be repeated.
        """
        self._last, self._is_closed, self._overlapped = (self._chosen, self._seconds), True, None
        for plan in self.plans:
            plan.close()
        for action in self._actions:
            action.close()
        self.plans.clear()
        self._actions.clear()
        self._matrices.clear()
        self.outputs = {}

    def __enter__(self) -> ChainPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def backward(self, result: str, prefix: str = "d") -> list[str]:
        """Return the steps that compute the gradients of a result, to be planned together with the chain's.

        Local.

        Parameters
        ----------
        result : str
            Name of the result.
        prefix : str
            Prefix of gradients' names: the steps read "dY" and make "dX" for every input X and named result on the way.

        Returns
        -------
        list of str
            The steps.

        Raises
        ------
        OptionError, DtypeError
            If there is no such result, or no gradient.
        """
        return gradients(self.chain.graph, result, prefix)

    # -- preparing --------------------------------------------------------------------------------

    def _prepared(self) -> int:
        """Make matrices, plans and conversions; bytes of the fullest rank. Collective. Raises MemoryLimitError."""
        places = self._places()
        gathered = self._gathered()
        moved = sum(map(self._scratch, [*self.answer.conversions, *gathered]))
        held = [*places, *((each.name, each.source) for each in gathered)]
        taken = sum(self._nbytes(*place) for place in held) + moved + self._work_bytes()
        (most,) = largest(self.mesh.comm, [taken])
        limit = self.chain.options.memory_limit
        if limit is not None and most > limit:
            raise MemoryLimitError(
                f"memory_limit: got {limit} bytes a rank; the matrices of the chain alone take {most}, {most - limit} "
                f"more; raise the limit or use more ranks"
            )
        for name, layout in places[len(self.chain.inputs) :]:
            x = self.chain.matrices[name]
            self._matrices[name, layout] = DistMatrix.allocated(self.mesh, x.shape, x.dtype, layout)
        products = self._products(taken, limit)
        for number, (step, placed) in enumerate(zip(self.chain.steps, self.answer.steps, strict=True)):
            for each in placed.conversions:
                self._convert((each.name, each.source), (each.name, each.target), each.seconds)
            self._add(StepPlaces(step, placed.layouts), placed.seconds, products.get(number))
        for each in self.answer.last:
            self._convert((each.name, each.source), (each.name, each.target), each.seconds)
        extras = sum(each.extra(plan.choice) for each, plan in zip(products.values(), self.plans, strict=True))
        (most,) = largest(self.mesh.comm, [taken + extras])
        return most

    def _places(self) -> list[Place]:
        """Return every matrix in each placement that it is held in, inputs first."""
        chain, answer = self.chain, self.answer
        held = [(name, answer.start[name]) for name in chain.inputs]
        held += [(step.result, done.layouts[-1]) for step, done in zip(chain.steps, answer.steps, strict=True)]
        self._first = dict(held)
        return [*held, *((each.name, each.target) for each in answer.conversions)]

    def _nbytes(self, name: str, layout: Layout) -> int:
        x = self.chain.matrices[name]
        return nbytes(self.mesh, x.shape, x.dtype, layout)

    def _work_bytes(self) -> int:
        """Return bytes that element-wise steps take for pieces, one after the other."""
        sizes = [0]
        for step, placed in zip(self.chain.steps, self.answer.steps, strict=True):
            if not step.is_product and not step.axes and step.grouped is None:
                sizes.append(work_bytes(self._nbytes(step.result, placed.layouts[-1])))
        return max(sizes)

    def _scratch(self, each: PricedConversion) -> int:
        """Return the bytes that this rank needs for a conversion besides its part of the copy."""
        x = self.chain.matrices[each.name]
        return scratch_bytes(self.mesh, x.shape, x.dtype, each.source, each.target)

    def _gathered(self) -> list[PricedConversion]:
        """Return the sums of ranks' own parts, as they are brought together."""
        made = []
        for step, placed in zip(self.chain.steps, self.answer.steps, strict=True):
            own = summands(step, placed.layouts[0], self.mesh.grid) if step.axes else None
            if own is not None and not self._is_there(step, own, placed.layouts[-1]):
                made.append(PricedConversion(step.result, own, placed.layouts[-1], 0.0))
        return made

    def _is_there(self, step: Step, own: Layout, target: Layout) -> bool:
        return matching_layout(own, [target], self.chain.matrices[step.result].shape, self.mesh.grid) is not None

    def _convert(self, source: Place, target: Place, seconds: float) -> None:
        """A conversion as the next action. Collective."""
        made = self._matrices[target]
        redistributions = Redistribution(
            self.mesh, made.shape, made.dtype, source[1], made.layout, made.tile, made.block
        )
        self._actions.append(Conversion(redistributions, source, target, made, CostBreakdown(moving=seconds)))

    def _add(self, placed: StepPlaces, seconds: float, product: Frontier | None) -> None:
        """A step as the next action, or two. Collective."""
        step, layouts = placed.step, placed.layouts
        if product is not None:
            plan = product.plan()
            self.plans.append(plan)
            pairs = zip("AB", placed.reads, strict=False)
            self._in_place |= {place for x, place in pairs if plan.choice.reads_in_place(x)}
            self._actions.append(Multiplication(step, layouts, plan))
        elif step.axes:
            self._add_sums(placed, CostBreakdown(seconds))
        elif step.grouped is not None:
            self._actions.append(GroupWork(step, layouts, CostBreakdown(seconds)))
        else:
            self._actions.append(Elementwise(step, layouts, CostBreakdown(seconds), self._prices.cost_model.kernel))

    def _add_sums(self, placed: StepPlaces, cost: CostBreakdown) -> None:
        """Add sums of the ranks' own parts as the next action, and the reduction of these. Collective."""
        step, made = placed.step, self._matrices[placed.result]
        own = summands(step, placed.layouts[0], self.mesh.grid)
        assert own is not None
        if self._is_there(step, own, placed.layouts[-1]):
            self._actions.append(AxisSums(step, placed.layouts, cost, placed.result))
            return
        part = f"{step.result} of each rank", own
        self._matrices[part] = DistMatrix.allocated(self.mesh, made.shape, made.dtype, own)
        self._actions.append(AxisSums(step, placed.layouts, cost, part))
        self._convert(part, placed.result, 0.0)

    def _products(self, taken: int, limit: int | None) -> dict[int, Frontier]:
        """Choose a candidate for each product so that all of them fit the limit together.

        Collective. Raises MemoryLimitError.
        """
        products = {}
        for number, given in self._prices.products.items():
            step, placed = self.chain.steps[number], self.answer.steps[number]
            places = StepPlaces(step, placed.layouts)
            three = [*places.reads[:2], places.result]
            a, b = (self._prices.matrix(*place) for place in three[:2])
            own = sum(self._nbytes(*place) for place in three)
            operands = replace(given, a=a, b=b, c=replace(given.c, layout=placed.layouts[-1]))
            products[number] = Frontier(self.mesh, str(step), operands, own)
        if limit is not None:
            divide_memory(self.mesh, list(products.values()), taken, limit)
        return products

    # -- in words ---------------------------------------------------------------------------------

    def __repr__(self) -> str:
        steps = ", ".join(step.result for step in self.chain.steps)
        return f"ChainPlan(makes {steps}; {len(self.chain.products)} products on {self.mesh.grid} ranks)"

    def __str__(self) -> str:
        """Describe the steps, their algorithms and placements, the conversions, and the predicted seconds."""
        seconds = self._seconds, self._apart, self.greedy.seconds
        lines = [
            f"chain of {len(self.chain.products)} products on a mesh of {self.mesh.grid}",
            step_table(self.chain.steps, self.answer, self._chosen),
            seconds_line(*seconds, self._prices.is_known, self.answer.is_exact),
            f"peak memory {self.peak_bytes} bytes on the fullest rank",
        ]
        return "\n".join(lines)


__all__ = ["ChainPlan", "plan_chain"]

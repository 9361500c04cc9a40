"""Chains of products: placed together, prepared once, run many times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from numpy.typing import DTypeLike

from rma_mm.algorithms import REGISTERED
from rma_mm.errors import AlgorithmError, ClosedError, LayoutError, MemoryLimitError, OptionError, RmaError
from rma_mm.geometry.layout import Layout
from rma_mm.policy.planner.chain_search import Answer, PricedConversion
from rma_mm.policy.planner.chain_steps import Shape
from rma_mm.policy.planner.tables import seconds_text, table
from rma_mm.runtime.chains.prices import Chain, Prices, nbytes
from rma_mm.runtime.execution.needs import peak_bytes
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.matrices.matrix import DistMatrix, check_matrix, overlap
from rma_mm.runtime.matrices.move import Moving, scratch_bytes
from rma_mm.runtime.products.make_plan import common_mesh, describe, planned
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import in_turn
from rma_mm.windows.waiting import largest

Place = tuple[str, Layout]
"""A matrix in one of its placements."""
Here = Mapping[Place, DistMatrix]
"""The matrices of an execution."""


@in_turn
def plan_chain(
    steps: str | Sequence[str],
    mesh: Mesh | None = None,
    *,
    outputs: Sequence[str] | None = None,
    layouts: Mapping[str, str | Layout] | None = None,
    algorithm: str = "auto",
    memory_limit: int | None = None,
    compute_dtype: DTypeLike | None = None,
    deterministic: bool = False,
    kernel: str = "auto",
    joint: bool = True,
    check: bool | str = False,
    prefer: str | None = None,
    **inputs: DistMatrix | Operand | tuple[Shape, DTypeLike],
) -> ChainPlan:
    """Place a sequence of products so that all of them together take least, and prepare them. Collective.

    steps: texts as "dW = X.T @ dY" (.H also conjugates); later steps may read a result. inputs: by name, a matrix where
    it lies, or (shape, dtype) of one that the chain may place: `layouts` of the chain then says where. outputs: results
    to hand back beside those that no step reads. layouts: placements that results must have, or inputs that are not
    there yet. memory_limit: bytes a rank may hold of all matrices, copies and scratch. joint: False for each product on
    what is best for it alone. The other options are those of `matmul`, for every product.

    Raises OptionError, ShapeError, DtypeError, LayoutError, MeshError, AlgorithmError; MemoryLimitError saying what is
    missing; DisagreementError.
    """
    mesh = common_mesh(mesh, *inputs.values())
    options = {
        "algorithm": algorithm, "memory_limit": memory_limit, "compute_dtype": compute_dtype,
        "deterministic": deterministic, "kernel": kernel, "check": check, "prefer": prefer,
    }  # fmt: skip
    with agreed(
        mesh.comm, "plan_chain", steps=steps, outputs=outputs, layouts=layouts, joint=bool(joint),
        registered=REGISTERED, **options,
    ) as facts:  # fmt: skip
        facts |= {f"input {name}": describe(x) for name, x in inputs.items()}
        chain = Chain.of(mesh, steps, inputs, outputs or (), layouts or {}, options)
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


class ChainPlan:
    """A sequence of products, placed and prepared. Made by `plan_chain`; collective to execute."""

    def __init__(self, mesh: Mesh, chain: Chain, prices: Prices, answer: Answer, greedy: Answer) -> None:
        self.mesh, self.chain, self.answer, self.greedy = mesh, chain, answer, greedy
        self.layouts = dict(answer.start)
        """Placements: of inputs as `execute` takes them, of results as they are made, of outputs as it returns them."""
        self.layouts |= {step.result: done.layouts[2] for step, done in zip(chain.steps, answer.steps, strict=True)}
        self.layouts |= chain.wanted
        self.serial = mesh.next_serial()
        self.plans: list[Plan] = []
        """The plan of each step."""
        self._made: dict[Place, DistMatrix] = {}
        self._conversions: dict[PricedConversion, Moving] = {}
        self._actions: list[Callable[[Here], object]] = []
        self._in_place: set[str] = set()
        """Inputs that are read where they lie on node-mates."""
        self._is_closed = False
        self._last: list[tuple[str, float]] = []
        """What was in force for each step when the chain was closed."""
        self._prices = prices
        try:
            self.peak_bytes = self._prepared()
            """Bytes that the fullest rank holds at most, as made: all matrices, copies, and the products' scratch."""
        except RmaError:  # the same on every rank
            self.close()
            raise
        self.outputs = {name: self._made[name, self.layouts[name]] for name in chain.outputs}
        """The results that `execute` returns."""

    @property
    def adapt(self) -> bool:
        """Whether steps may go over to other ways of doing the same, as plans do; to be set alike on all ranks."""
        return all(plan.adapt for plan in self.plans)

    @adapt.setter
    def adapt(self, value: bool) -> None:
        for plan in self.plans:
            plan.adapt = value

    @property
    def predicted_seconds(self) -> float | None:
        """What an execution is expected to take; None where this machine, or such products on it, were not measured."""
        return self._seconds if self._prices.is_known else None

    @property
    def _chosen(self) -> list[tuple[str, float]]:
        """Algorithm and seconds of each step."""
        return [(plan.algorithm, plan.settled.chosen.seconds) for plan in self.plans] or self._last

    @property
    def _seconds(self) -> float:
        return sum(seconds for _, seconds in self._chosen) + sum(each.seconds for each in self.answer.conversions)

    @property
    def greedy_seconds(self) -> float | None:
        """The same for every product in turn on what is best for it alone."""
        return self.greedy.seconds if self._prices.is_known else None

    # -- executing --------------------------------------------------------------------------------

    @in_turn
    def execute(self, **inputs: DistMatrix) -> dict[str, DistMatrix]:
        """Run all steps. Collective; makes no window, communicator or buffer after the first time.

        inputs: every one by name, placed as `layouts` says. Returns the outputs by name, the same matrices each time.
        Raises VerificationError where the chain was made with `check`, and a product is wrong; OptionError, ShapeError,
        DtypeError, LayoutError, MeshError, ClosedError; DisagreementError.
        """
        with agreed(self.mesh.comm, "execute", chain=self.serial) as facts:
            if self._is_closed:
                raise ClosedError("chain: it is closed; make a new one")
            self._check_names(inputs)
            for name, matrix in inputs.items():
                self._check(name, matrix)
                facts[name] = matrix.facts
                matrix.block.window.sync()  # what this rank stored, before the others may read it
        here = self._made | {(name, self.layouts[name]): matrix for name, matrix in inputs.items()}
        for action in self._actions:
            action(here)
        return dict(self.outputs)

    def _check_names(self, inputs: Mapping[str, object]) -> None:
        wanted = self.chain.inputs
        for name in (*wanted, *inputs):
            if name not in inputs or name not in wanted:
                what = "missing" if name in wanted else "no input of this chain"
                raise OptionError(f"{name}: it is {what}; execute takes {', '.join(f'{each}=' for each in wanted)}")

    def _check(self, name: str, matrix: DistMatrix) -> None:
        """Raise where an input is not what the chain was planned for."""
        wanted = self.chain.matrices[name]
        facts = (wanted.dtype, wanted.shape, self.layouts[name])
        check_matrix(name, matrix, self.mesh, facts, name in self._in_place, "chain")
        for (other, _), own in self._made.items():
            if overlap(matrix, own):
                raise LayoutError(f"{name}: it shares memory with {other}, which the chain writes; pass a copy")

    def close(self) -> None:
        """Give the memory back, once all ranks have; outputs live on while they are in use.

        Local, and may be repeated.
        """
        self._is_closed, self._last = True, self._chosen
        self._actions.clear()
        for plan in self.plans:
            plan.close()
        for conversion in self._conversions.values():
            conversion.close()
        self.plans.clear()
        self._conversions.clear()
        self._made.clear()
        self.outputs = {}

    def __enter__(self) -> ChainPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- preparing --------------------------------------------------------------------------------

    def _prepared(self) -> int:
        """Make matrices, plans and conversions; bytes of the fullest rank. Collective. Raises MemoryLimitError."""
        places = self._places()
        taken = sum(self._nbytes(*place) for place in places) + sum(map(self._scratch, self.answer.conversions))
        (most,) = largest(self.mesh.comm, [taken])
        limit = self.chain.products[0].options.memory_limit
        if limit is not None and most > limit:
            raise MemoryLimitError(
                f"memory_limit: got {limit} bytes a rank; the matrices of the chain alone take {most}, {most - limit} "
                f"more; raise the limit or use more ranks"
            )
        for name, layout in places[len(self.chain.inputs) :]:
            x = self.chain.matrices[name]
            self._made[name, layout] = DistMatrix.allocated(self.mesh, x.shape, x.dtype, layout)
        for number, (step, placed) in enumerate(zip(self.chain.steps, self.answer.steps, strict=True)):
            for each in placed.conversions:
                self._convert(each)
            plan, extra = self._planned(number, taken)
            taken += extra
            a, b, c = zip((step.a.name, step.b.name, step.result), placed.layouts, strict=True)
            read = {place for x, place in (("A", a), ("B", b)) if plan.settled.reads_in_place(x)}
            self._in_place |= {name for name, _ in read - self._made.keys()}
            self._actions.append(partial(_multiply, plan, a, b, c))
        for each in self.answer.last:
            self._convert(each)
        (most,) = largest(self.mesh.comm, [taken])
        if limit is not None and most > limit:
            raise MemoryLimitError(
                f"memory_limit: got {limit} bytes a rank; the chain takes {most}, {most - limit} more; raise the limit"
            )
        return most

    def _places(self) -> list[Place]:
        """Every matrix in each placement that it is held in, inputs first."""
        chain, answer = self.chain, self.answer
        found = [(name, answer.start[name]) for name in chain.inputs]
        found += [(step.result, done.layouts[2]) for step, done in zip(chain.steps, answer.steps, strict=True)]
        return [*found, *((each.name, each.target) for each in answer.conversions)]

    def _nbytes(self, name: str, layout: Layout) -> int:
        """Bytes of this rank's part of a matrix."""
        x = self.chain.matrices[name]
        return nbytes(self.mesh, x.shape, x.dtype, layout)

    def _scratch(self, each: PricedConversion) -> int:
        """Bytes that this rank takes for a conversion beside its part of the copy."""
        x = self.chain.matrices[each.name]
        return scratch_bytes(self.mesh, x.shape, x.dtype, each.source, each.target)

    def _convert(self, each: PricedConversion) -> None:
        """A conversion as the next action. Collective."""
        to = self._made[each.name, each.target]
        moving = Moving(self.mesh, to.shape, to.dtype, each.source, to.layout, to.tile, to.block)
        self._conversions[each] = moving
        self._actions.append(partial(_convert, moving, (each.name, each.source)))

    def _planned(self, number: int, taken: int) -> tuple[Plan, int]:
        """The plan of a step, and the bytes of its scratch on this rank. Collective. Raises MemoryLimitError.

        taken: what this rank holds already. What the limit leaves is shared out among the products still to be planned.
        """
        step, placed = self.chain.steps[number], self.answer.steps[number]
        names = (step.a.name, step.b.name, step.result)
        places = list(zip(names, placed.layouts, strict=True))
        a, b = (self._made.get(place) or self._prices.matrix(*place) for place in places[:2])
        own = sum(self._nbytes(*place) for place in places)
        options = self._prices.products[number].options
        limit = whole = options.memory_limit
        if limit is not None:
            most, fullest = largest(self.mesh.comm, [own, taken])
            limit = most + (limit - fullest) // (len(self.chain.steps) - number)
        try:
            plan = planned(a, b, self.mesh, placed.layouts[2], replace(options, memory_limit=limit))
        except MemoryLimitError as error:
            raise MemoryLimitError(
                f"memory_limit: got {whole} bytes a rank for the chain; too little of it is left for '{step}': {error}"
            ) from None
        assert isinstance(plan, Plan)  # no step multiplies batches
        self.plans.append(plan)
        return plan, max(0, peak_bytes(self.mesh, plan.schedule, plan.given) - own)

    # -- in words ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The steps, their algorithms and placements, what is converted between them, and what all that takes."""
        rows = [["", "step", "algorithm", "A", "B", "C", "seconds"]]
        for number, (step, placed) in enumerate(zip(self.chain.steps, self.answer.steps, strict=True)):
            rows += [_conversion_row(each) for each in placed.conversions]
            algorithm, seconds = self._chosen[number]
            layouts = [str(layout) for layout in placed.layouts]
            rows.append([str(number + 1), str(step), algorithm, *layouts, seconds_text(seconds)])
        rows += [_conversion_row(each) for each in self.answer.last]
        known = "predicted" if self._prices.is_known else "by figures that were not measured here"
        seconds = self._seconds
        ratio = self.greedy.seconds / seconds if seconds else 1.0
        how = "" if self.answer.is_exact else " (the best of what was looked at: too many states for all)"
        greedy = f"by greedy choice {seconds_text(self.greedy.seconds)}, {ratio:.3g} times as long"
        lines = [
            f"chain of {len(self._chosen)} products on a mesh of {self.mesh.shape}",
            table(rows),
            f"{known} {seconds_text(seconds)}{how}; {greedy}",
            f"peak memory {self.peak_bytes} bytes on the fullest rank",
        ]
        return "\n".join(lines)


def _multiply(plan: Plan, a: Place, b: Place, c: Place, here: Here) -> None:
    plan.execute(here[a], here[b], here[c])


def _convert(moving: Moving, source: Place, here: Here) -> None:
    moving.run(here[source])


def _conversion_row(each: PricedConversion) -> list[str]:
    """A conversion as a line of the table."""
    return ["", f"convert {each.name}", "", str(each.source), "to", str(each.target), seconds_text(each.seconds)]


__all__ = ["ChainPlan", "plan_chain"]

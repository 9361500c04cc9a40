"""Actions of a chain's steps on real memory, each prepared once and run many times.

An action begins, works and finishes. What it moves may be under way from its beginning to its end, and other actions
may come between (`rma_mm.runtime.chains.overlapped`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.kernels.epilogue.epilogue import compiles
from rma_mm.kernels.epilogue.groups import do_groups
from rma_mm.kernels.epilogue.pointwise import Fused, apply, reduce_axes
from rma_mm.policy.model.cost_model import CostBreakdown
from rma_mm.policy.planner.chain_steps import Step
from rma_mm.runtime.execution.executor import Executable, Running
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.move import Redistribution
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.verification.checked_product import checked_move
from rma_mm.schedule.schedule import Schedule

Place = tuple[str, Layout]  # A matrix in one of its placements
Here = Mapping[Place, DistMatrix]  # the matrices of an execution


class Action:
    """Work on matrices. Collective if it has a schedule, else local. Collective where it has a schedule, else local."""

    cost: CostBreakdown  # what it was priced at

    @property
    def reads(self) -> Sequence[Place]:
        raise NotImplementedError

    @property
    def result(self) -> Place:
        raise NotImplementedError

    @property
    def schedule(self) -> Schedule | None:
        return None

    def begin(self, here: Here, is_met: bool) -> None:
        """Begin the transfers that depend on A and B only. is_met: whether barriers of the schedule are kept."""

    def work(self, here: Here) -> None:
        raise NotImplementedError

    def finish(self, here: Here) -> None:
        """Complete the action, so that this rank's part of the result exists."""

    def checked(self, here: Here) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local."""


@dataclass
class StepPlaces:
    """A step, and the places of all that it reads and of its result."""

    step: Step
    layouts: tuple[Layout, ...]  # as of `PlacedStep`

    @property
    def reads(self) -> list[Place]:
        return list(zip((each.name for each in self.step.reads), self.layouts, strict=False))

    @property
    def result(self) -> Place:
        return self.step.result, self.layouts[-1]

    def others(self, here: Here) -> list[NDArray[np.generic]]:
        """Return this rank's parts of the element-wise operands, in the result's orientation."""
        count = len(self.step.factors)
        pairs = zip(self.step.others, self.reads[count:], strict=True)
        return [here[place].T.tile if x.transposed else here[place].tile for x, place in pairs]


@dataclass
class Multiplication(StepPlaces, Action):
    """A product with its element-wise work."""

    plan: Plan
    running: Running | None = None

    @property
    def cost(self) -> CostBreakdown:  # type: ignore[override]  # it follows the plan
        chosen = self.plan.choice.chosen
        return chosen.cost.corrected(chosen.correction)

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    def begin(self, here: Here, is_met: bool) -> None:
        executable = self.plan.prepared.executable(*self._operands(here), self.plan.trace)
        executable.is_met = is_met
        self.running = Running(executable, self.plan.watch)
        with self.running.noted():
            executable.begin()

    def work(self, here: Here) -> None:
        fused = self.plan.options.epilogue
        if isinstance(fused, Fused):
            fused.operands[:] = self.others(here)
        assert self.running is not None
        with self.running.noted():
            self.running.executable.work()
        if isinstance(fused, Fused):
            fused.operands.clear()  # views keep memory

    def finish(self, here: Here) -> None:
        assert self.running is not None
        with self.running.noted():
            self.running.executable.finish()
        self.plan.ended(self.running)
        self.running = None

    def checked(self, here: Here) -> AbstractContextManager[None]:
        return self.plan.checked(*self._operands(here))

    def _operands(self, here: Here) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
        a, b = self.reads[:2]
        return here[a], here[b], here[self.result]


@dataclass
class Elementwise(StepPlaces, Action):
    """Element-wise work on matrices that lie alike."""

    cost: CostBreakdown
    kernel: str

    def work(self, here: Here) -> None:
        made = here[self.result]
        assert self.step.work is not None
        call = partial(apply, self.step.work, self.others(here), made.tile, compiles(self.kernel, made.shape))
        made.mesh.progress.during(call)


@dataclass
class GroupWork(StepPlaces, Action):
    """Work on groups of rows: each rank has whole ones."""

    cost: CostBreakdown

    def work(self, here: Here) -> None:
        made = here[self.result]
        assert self.step.grouped is not None
        name, groups, heads = self.step.grouped
        own = len(made.tile) * groups // max(1, made.shape[0])
        made.mesh.progress.during(partial(do_groups, name, heads, own, self.others(here), made.tile))


@dataclass
class AxisSums(StepPlaces, Action):
    """Sums over axes: each rank sums its own part, into its part of `own`."""

    cost: CostBreakdown
    own: Place  # the result, or what a conversion then adds up to it

    @property
    def result(self) -> Place:
        return self.own

    def work(self, here: Here) -> None:
        (place,) = self.reads
        own, factor = here[self.own], self.step.factors[0]
        source = here[place].T if factor.transposed else here[place]
        if own.tile.size:
            own.mesh.progress.during(partial(reduce_axes, self.step.reduction, source.tile, self.step.axes, own.tile))
            if factor.conjugated and own.tile.dtype.kind == "c":
                np.conjugate(own.tile, out=own.tile)


@dataclass
class Conversion(Action):
    """A matrix brought to another placement."""

    moving: Redistribution
    source: Place
    target: Place
    converted: DistMatrix  # the converted matrix; it is copied if the caller gives another
    cost: CostBreakdown
    executable: Executable | None = field(default=None, init=False)

    @property
    def reads(self) -> list[Place]:
        return [self.source]

    @property
    def result(self) -> Place:
        return self.target

    @property
    def schedule(self) -> Schedule:
        return self.moving.schedule

    def begin(self, here: Here, is_met: bool) -> None:
        self.executable = self.moving.executable(here[self.source])
        self.executable.is_met = is_met
        self.executable.begin()

    def work(self, here: Here) -> None:
        assert self.executable is not None
        self.executable.work()

    def finish(self, here: Here) -> None:
        assert self.executable is not None
        self.executable.finish()
        self.executable = None
        if here[self.target] is not self.converted:
            here[self.target].tile[...] = self.converted.tile

    def checked(self, here: Here) -> AbstractContextManager[None]:
        return checked_move(here[self.source], self.moving.target, self.converted.tile)

    def close(self) -> None:
        self.moving.close()

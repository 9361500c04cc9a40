"""What the steps of a chain do on real memory, once they are placed: each prepared once, to be run many times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.layout import Layout
from rma_mm.kernels.epilogue.epilogue import compiles
from rma_mm.kernels.epilogue.pointwise import Fused, apply, summed
from rma_mm.policy.planner.chain_steps import Step
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.move import Moving
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows.waiting import barrier

Place = tuple[str, Layout]
"""A matrix in one of its placements."""
Here = Mapping[Place, DistMatrix]
"""The matrices of an execution."""


@dataclass
class StepPlaces:
    """A step, and the places of all that it reads and of its result."""

    step: Step
    layouts: tuple[Layout, ...]
    """As of `PlacedStep`."""

    @property
    def reads(self) -> list[Place]:
        """All that it reads."""
        return list(zip((each.name for each in self.step.reads), self.layouts, strict=False))

    @property
    def result(self) -> Place:
        """What it makes."""
        return self.step.result, self.layouts[-1]

    def others(self, here: Here) -> list[NDArray[np.generic]]:
        """This rank's parts of what element-wise work reads, as it reads them."""
        count = len(self.step.factors)
        pairs = zip(self.step.others, self.reads[count:], strict=True)
        return [here[place].T.tile if x.transposed else here[place].tile for x, place in pairs]


@dataclass
class Multiplication(StepPlaces):
    """A product, and what is done to its elements on the way. Collective."""

    plan: Plan

    def __call__(self, here: Here) -> None:
        """Do it."""
        fused, (a, b) = self.plan.options.epilogue, self.reads[:2]
        if isinstance(fused, Fused):
            fused.operands[:] = self.others(here)
        self.plan.execute(here[a], here[b], here[self.result])
        if isinstance(fused, Fused):
            fused.operands.clear()  # views keep memory


@dataclass
class Elementwise(StepPlaces):
    """What is done to elements of matrices that lie alike. Local."""

    kernel: str

    def __call__(self, here: Here) -> None:
        """Do it."""
        made = here[self.result]
        assert self.step.work is not None
        apply(self.step.work, self.others(here), made.tile, compiles(self.kernel, made.shape))


@dataclass
class AxisSums(StepPlaces):
    """Sums over axes: each rank those of its own part, which are then added up where parts are cut. Collective."""

    own: DistMatrix | None
    """The sums of ranks' own parts; None where they are the result."""
    moving: Moving | None
    """What brings them together in the chain's own result."""
    made: DistMatrix
    """The chain's own result; it is copied where the caller gives another."""

    def __call__(self, here: Here) -> None:
        """Do it."""
        (place,) = self.reads
        own = here[self.result] if self.own is None else self.own
        factor = self.step.factors[0]
        source = here[place].T if factor.transposed else here[place]
        if own.tile.size:
            summed(source.tile, self.step.axes, own.tile)
            if factor.conjugated:
                np.conjugate(own.tile, out=own.tile)
        if self.moving is not None:
            meet(own)
            self.moving.run(own)
            if here[self.result] is not self.made:
                here[self.result].copy_from(self.made)

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local."""
        if self.moving is not None and self.own is not None:
            self.moving.close()
            self.own.close()


@dataclass
class Conversion:
    """A matrix brought to another placement. Collective."""

    moving: Moving
    source: Place
    is_news: bool
    """Whether ranks have not met since it was made."""

    def __call__(self, here: Here) -> None:
        """Do it."""
        if self.is_news:
            meet(here[self.source])
        self.moving.run(here[self.source])

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local."""
        self.moving.close()


Action = Multiplication | Elementwise | AxisSums | Conversion


def meet(*matrices: DistMatrix) -> None:
    """Let all ranks see what each stored in its parts of matrices. Collective."""
    for matrix in matrices:
        matrix.block.window.sync()
    barrier(matrices[0].mesh.comm)
    for matrix in matrices:
        matrix.block.window.sync()


def summing(mesh: Mesh, placed: StepPlaces, own: Layout, made: DistMatrix, is_there: bool) -> AxisSums:
    """Sums prepared: `own` is where those of ranks' own parts are, `is_there` whether the result is. Collective."""
    if is_there:
        return AxisSums(placed.step, placed.layouts, None, None, made)
    stage = DistMatrix.allocated(mesh, made.shape, made.dtype, own)
    moving = Moving(mesh, made.shape, made.dtype, own, made.layout, made.tile, made.block)
    return AxisSums(placed.step, placed.layouts, stage, moving, made)


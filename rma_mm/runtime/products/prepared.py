"""A product prepared: its scratch and windows, and its operations bound to operands, to be run many times."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.threads import using_threads
from rma_mm.runtime.execution.accumulators import Accumulator
from rma_mm.runtime.execution.addressing import Memory, Tickets
from rma_mm.runtime.execution.binding import Scalars
from rma_mm.runtime.execution.executor import Executable
from rma_mm.runtime.execution.footprint import groups_of
from rma_mm.runtime.execution.node_slots import NodeScratch
from rma_mm.runtime.execution.proving import prove
from rma_mm.runtime.execution.tracing import Trace
from rma_mm.runtime.matrices.arguments import pinned
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.products.workspace import check_room, frames, nbytes, split_frames
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.schedule import STAGE
from rma_mm.windows import Window

BOUND = 8  # sets of operands that a product is kept bound to
OWN = "the plan's own C"  # text that ranks compare if no result matrix is passed


class Prepared:
    """A settled product on a mesh. Collective to make; raises ScheduleError if it would not be right."""

    def __init__(self, mesh: Mesh, choice: PlanChoice, workspace: NDArray[np.uint8] | None = None) -> None:
        """workspace: the caller's memory for what this rank needs beside its matrices, and shares with no other."""
        self.mesh, self.choice = mesh, choice
        sizes = frames(mesh, choice)
        self.scratch_bytes = nbytes(sizes)  # what a workspace has to hold on this rank
        if workspace is not None:
            with agreed(mesh.comm, "plan"):
                check_room(self.scratch_bytes, workspace, mesh.rank)
        self.bound: OrderedDict[tuple[object, ...], Executable] = OrderedDict()
        self._added: dict[str, DistMatrix] = self._allocate()
        self.node_scratch = NodeScratch(mesh, choice.schedule, choice.spec) if choice.fetches_together else None
        """Scratch for what ranks of a node fetch together; None if nothing is."""
        self.frames = split_frames(sizes, workspace)
        self.tickets = Tickets(self._added["ticket"].block) if choice.schedule.pool else None
        if self.node_scratch and self.node_scratch.blocks and choice.spec.files:
            mesh.progress.look_out()  # panels are asked for as soon as there is room, also while a rank multiplies
        if (choice.chosen.algorithm.grouped or choice.fetches_together) and mesh.is_member:
            mesh.open_channels(groups_of(choice.schedule, mesh) | {tuple(mesh.grid.ranks)})
        prove(mesh, choice.schedule, "plan")

    @property
    def window_bytes(self) -> int:
        """Return the bytes of this rank that the plan needs in windows.

        Operands that are summed or brought elsewhere, sums of C in another type, tickets, slots that a node shares.
        """
        blocks = [matrix.block for matrix in self._added.values()] + (
            self.node_scratch.blocks if self.node_scratch else []
        )
        return sum(block.local.nbytes for block in blocks)

    @property
    def is_outdated(self) -> bool:
        """True if the memory that it was chosen for turned out too small, and other took over."""
        choice = self.choice
        return self.mesh.window_flavour != choice.flavour.name and bool(choice.request.in_place or self.node_scratch)

    def executable(self, A: DistMatrix, B: DistMatrix, C: DistMatrix, trace: Trace | None) -> Executable:
        """The operations on these operands, bound when first wanted. trace: where to note what this rank does when."""
        key = tuple((*matrix.block.key, matrix.flipped) for matrix in (A, B, C))
        found = self.bound.get(key)
        if found is None:
            if len(self.bound) >= BOUND:
                self.bound.popitem(last=False)[1].close()
            with using_threads(self.mesh.threads):  # products are cut for them
                found = self.bound[key] = self._bind(A, B, C, trace)
        self.bound.move_to_end(key)
        return found

    def _bind(self, A: DistMatrix, B: DistMatrix, C: DistMatrix, trace: Trace | None) -> Executable:
        choice, o = self.choice, self.choice.spec.options
        # a bound plan must not keep a dropped matrix alive, so it holds the memory and not the blocks
        homes: dict[str, Block] = {name: x.block.unheld() for name, x in (("A", A), ("B", B), ("C", C))}
        homes |= {name: matrix.block for name, matrix in self._added.items() if name.endswith(STAGE)}
        flips = {"A": A.flipped != o.transpose_a, "B": B.flipped != o.transpose_b, "C": C.flipped}
        memory = Memory(
            homes, homes["C"].local.T if C.flipped else homes["C"].local,
            self._added["shadow"].block if "shadow" in self._added else None,
            frozenset(name for name, flipped in flips.items() if flipped), self.frames, self.tickets, self.node_scratch,
        )
        may_push = choice.request.pushes
        sums = Accumulator(choice.spec.semiring, may_push and choice.chosen.algorithm.result != "here", may_push)
        scalars = Scalars(o.alpha, o.beta, o.conjugate_a, o.conjugate_b, choice.spec.kernel, sums, o.epilogue)
        machine = choice.request.cost_model.machine
        return Executable(choice.schedule, self.mesh, memory, scalars, trace, machine if machine.measured else None)

    def refresh_bias(self) -> None:
        """Let bound operations use the current values of the epilogue's bias."""
        for executable in self.bound.values():
            executable.setup.closings.refresh()

    def forget(self, window: Window) -> None:
        """Drop operations bound to a window that will be closed."""
        for key in [key for key, executable in self.bound.items() if window in executable.windows]:
            self.bound.pop(key).close()

    def unbind(self) -> None:
        """Drop all bound operations, so that the next execution binds them again. Local."""
        for executable in self.bound.values():
            executable.close()
        self.bound.clear()

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local, and may be repeated."""
        self.unbind()
        self.frames.clear()
        self.node_scratch = None
        for matrix in self._added.values():
            matrix.close()

    def _allocate(self) -> dict[str, DistMatrix]:
        """Allocate summed or copied operands, C's shadow and the ticket. Collective."""
        added, given, schedule = {}, self.choice.spec, self.choice.schedule
        for name in "AB":
            if name + STAGE in schedule.homes:
                home = schedule.homes[name + STAGE]
                added[name + STAGE] = DistMatrix.allocated(
                    self.mesh, home.shape, given.dtype(name + STAGE), home.layout
                )
        if given.accum_dtype != given.c.dtype:
            home = schedule.homes["C"]
            added["shadow"] = DistMatrix.allocated(self.mesh, home.shape, given.accum_dtype, home.layout)
        if schedule.pool:
            added["ticket"] = DistMatrix.allocated(self.mesh, (1, 1), np.dtype(np.int64), pinned(self.mesh, 0))
            added["ticket"].tile[...] = 0
        return added


class OnMemory(Protocol):
    """A matrix, or an array, on memory of the arena."""

    @property
    def block(self) -> Block:
        """The memory under it. Raises ClosedError if it is closed."""

    @property
    def block_or_none(self) -> Block | None:
        """The memory under it; None if it is closed."""


M = TypeVar("M", bound=OnMemory)
E = TypeVar("E")


class BoundOperands(Generic[M, E]):
    """The operands of a plan's last execution: checked, bound and agreed on. Keeps no operand alive.

    Holds no operand alive.
    """

    def __init__(
        self, matrices: tuple[M, M, M, M | None], executable: E, facts: tuple[object, ...], digest: int
    ) -> None:
        """Remember an execution. matrices: A, B, the result, and the matrix added to it if that is another."""
        self.executable, self.facts, self.digest = executable, facts, digest
        self._known = [(ref(matrix), ref(matrix.block)) for matrix in matrices if matrix is not None]
        self._is_own = facts[-1] == OWN

    def names(self, A: object, B: object, out: object, c: object) -> bool:
        """True if these are the same matrices, still open; `out` is None if the plan's own C was meant."""
        if (out is None) != self._is_own or (c is None) != (len(self._known) == 3):
            return False
        given = (A, B, self._known[2][0]() if out is None else out, *(() if c is None else (c,)))
        for matrix, (known, block) in zip(given, self._known, strict=True):
            found = known()
            if (
                found is None
                or matrix is not found
                or found.block_or_none is None
                or found.block_or_none is not block()
            ):
                return False
        return True

    @property
    def matrices(self) -> tuple[M, M, M]:
        """A, B and the result, which must be alive."""
        A, B, out = (known() for known, _ in self._known[:3])
        assert A is not None and B is not None and out is not None
        return A, B, out

    @property
    def out(self) -> M:
        return self.matrices[2]

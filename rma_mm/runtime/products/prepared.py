"""A product prepared: its scratch and windows, and its operations bound to operands, to be run many times."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rma_mm.flavours import FLAVOURS
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
from rma_mm.runtime.matrices.stored import identity_of
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.products.workspace import check_room, frames, nbytes, split_frames
from rma_mm.runtime.ranks.agreement import Ballot, agreed
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.meeting import NodeCall, open_line
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.metrics import ProductWatch
from rma_mm.runtime.ranks.process_group import ALONE, abandon
from rma_mm.runtime.ranks.rank_state import rank_state
from rma_mm.schedule.schedule import STAGE
from rma_mm.windows import Counters, Window
from rma_mm.windows.hosts.liveness import CELLS, PRODUCT, call_name, enter_call, leave_call

BOUND = 12  # sets of operands that a product is kept bound to
RESULTS, SMALL = 3, 2**22  # results whose memory a plan keeps for later ones, and bytes of a rank's part at most
VAIN = 8  # results that are kept at most while none of them is dropped
REPEATED = 20  # executions of a plan after which the next are compiled: loading LLVM takes 0.04 s
NEVER = -(2**62)  # executions of a plan that cannot be compiled
LONGEST = 100e-3
"""Seconds of executions that are compiled at most. Of longer ones a call is not 1 %, also where ranks share processors;
of 1024³ and 2048×768×3072 in float32 on 4 ranks of 2 cores it was 14 and 6 %."""
TOLD_EVERY, FEWEST_REPEATS, MOST_REPEATS = 10e-3, 4, 31
"""Seconds after which ranks tell each other again how long products took, and compiled calls before that."""
_EXECUTE = call_name("Plan.execute")
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

    @property
    def kernels(self) -> set[str]:
        """Local kernels of this rank's products, on the operands of its last executions."""
        return {kernel for executable in self.bound.values() for kernel in executable.setup.kernels}

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


E = TypeVar("E")


class BoundOperands(Generic[E]):
    """Operands that a plan was executed on: checked, bound and agreed on. Keeps none of them alive."""

    def __init__(self, operands: tuple[object, ...], executable: E, facts: tuple[object, ...], digest: int) -> None:
        """Remember an execution. operands: A, B, the result and the matrix added to it, None for each not given."""
        self.executable, self.facts, self.digest = executable, facts, digest
        self.identities = tuple(map(identity_of, operands))
        self.call: NodeCall | None = None
        """An execution as one compiled call; None as long as there is none."""
        self.words, self.copies = Counters(), 0
        """Words of other ranks that it reads, and how many copies of such it makes."""


class KnownOperands:
    """The operands that a plan was executed on lately, and which of its executions are compiled calls."""

    def __init__(self, mesh: Mesh, ballot: Ballot) -> None:
        self.mesh, self.ballot = mesh, ballot
        self.sets: list[BoundOperands[Executable]] = []
        """Sets of operands, the latest new ones first."""
        self.results: list[Block] = []
        """Memory of results of `matmul`, used again once no matrix on it is left."""
        self.executions = 0  # that were not compiled calls
        self.in_vain = 0  # results that were kept since the last whose memory was used again
        self.repeats = 0
        """Compiled calls that may be made before ranks tell each other of them."""

    def find(self, *operands: object) -> BoundOperands[Executable] | None:
        """Return the set of A, B, out and c; None if it is not known."""
        identities = tuple(map(identity_of, operands))
        for each in self.sets:
            if each.identities == identities and not each.executable.is_closed:
                return each
        return None

    def add(
        self, operands: tuple[object, ...], executable: Executable, facts: tuple[object, ...], digest: int
    ) -> BoundOperands[Executable]:
        """Add a set, and forget those whose operations were dropped meanwhile."""
        made = BoundOperands(operands, executable, facts, digest)
        self.sets = [made, *(each for each in self.sets if not each.executable.is_closed)][:BOUND]
        return made

    def clear(self) -> None:
        self.sets, self.repeats = [], 0

    def unused_result(self) -> Block | None:
        """Return memory of a result that this rank uses no more; None if there is none."""
        is_unused = self.mesh.arena.is_unused
        return next((block for block in self.results if is_unused(block)), None)

    def keep_result(self, block: Block) -> bool:
        """Keep the memory of a small result, instead of the oldest that was kept; True if it is.

        If results are not dropped, so that none is used again, that is given up for a while.
        """
        self.in_vain += 1
        if self.in_vain > VAIN:
            self.executions = self.in_vain = 0
        if not self.executions or not 0 < block.most <= SMALL:
            return False
        self._let_go(self.results[RESULTS - 1 :])
        self.results = [block.unheld(), *self.results[: RESULTS - 1]]
        self.mesh.arena.kept.add(block.serial)
        return True

    def _let_go(self, results: list[Block]) -> None:
        """Give memory of results back, which is free once all ranks have and no matrix is on it."""
        self.mesh.arena.kept.difference_update(block.serial for block in results)

    def close(self) -> None:
        """Give the memory of all results back. Local; may be repeated."""
        self.clear()
        if self.results:
            self._let_go(self.results)
        self.results = []

    def wants_calls(self, seconds: float) -> bool:
        """True if the next executions are to be compiled calls, as far as this rank knows.

        seconds: what the last but one took.
        """
        is_worth = self.executions >= REPEATED and seconds <= LONGEST and bool(self.sets)
        return is_worth and self._can_compile(self.sets[0].executable)

    def _can_compile(self, executable: Executable) -> bool:
        """True if this rank copies and multiplies within its node, and no more."""
        mesh = self.mesh
        if not executable.is_plain or executable.setup.trace is not None or mesh.checks is not None:
            return False
        flavours = [FLAVOURS[window.flavour] for window in executable.windows]
        are_near = mesh.num_nodes == 1 and all(each.loads_on_node and not each.needs_progress for each in flavours)
        return are_near and not rank_state().is_pretended

    def begin_repeats(self, seconds: float) -> None:
        """Let the next executions be compiled calls. Collective, among ranks that all want to."""
        if open_line(self.mesh) is not None:
            self.repeats = min(MOST_REPEATS, max(FEWEST_REPEATS, int(TOLD_EVERY / (seconds or TOLD_EVERY))))
        else:
            self.executions = 0

    def compile(self, found: BoundOperands[Executable]) -> None:
        """Compile the call for these operands, unless that was done before. Local."""
        line, executable = self.mesh.group.line, found.executable
        if found.call is None and line is not None and self._can_compile(executable):
            found.words, found.copies = executable.words, len(executable.copies)
            try:
                found.call = NodeCall(self.mesh, line, self.ballot, found.digest, executable.program.steps)
            except Exception:  # noqa: BLE001 - whatever does not compile is executed as before
                self.executions = NEVER

    def repeated(self, found: BoundOperands[Executable], watch: ProductWatch) -> bool:
        """Execute by a compiled call; False, and nothing is done, if not all ranks do. Collective."""
        state, executable, tally, call = rank_state(), found.executable, self.mesh.metrics.tally, found.call
        if call is None or not self.repeats:
            return False
        with state.lock:
            if state.broken or state.within:
                return False
            enter_call(_EXECUTE)
            CELLS[PRODUCT] = tally.products + 1
            try:
                is_done = call()
            except ALONE as error:
                abandon("Plan.execute", error)
                raise
            finally:
                leave_call()
            if not is_done:
                self.repeats = self.executions = 0
                return False
            self.repeats -= 1
            took, copied, multiplied, waited = call.took
            executable.count_views(found.words)
            tally.multiplying += multiplied
            tally.work += executable.setup.total_work
            tally.waited(waited)
            if found.copies:
                tally.copied(copied, found.copies)
            watch.note(took, multiplied, waited, executable.setup.total_work, found.words)
        return True

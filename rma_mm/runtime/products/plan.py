"""Plans: a product chosen, its memory counted and its operations prepared once, to be executed many times."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from operator import sub
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import ClosedError, LayoutError, OptionError, ShapeError
from rma_mm.kernels.threads import using_threads
from rma_mm.policy.planner.decision import Decision
from rma_mm.policy.planner.tables import frontier_table
from rma_mm.runtime.execution.accumulators import Sums
from rma_mm.runtime.execution.addressing import Memory, Tickets
from rma_mm.runtime.execution.binding import Scalars
from rma_mm.runtime.execution.executor import Executable, Listener, Progress
from rma_mm.runtime.execution.needs import frames_of, groups_of, movement
from rma_mm.runtime.execution.node_slots import Shared
from rma_mm.runtime.execution.operands import frame_dtype
from rma_mm.runtime.execution.tracing import Trace
from rma_mm.runtime.matrices.arguments import pinned
from rma_mm.runtime.matrices.matrix import DistMatrix, check_matrix, overlap
from rma_mm.runtime.products.latest import OWN, Latest
from rma_mm.runtime.products.settled import Settled
from rma_mm.runtime.ranks.agreement import Ballot, digest, disagree, in_words
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.metrics import ProductWatch
from rma_mm.runtime.ranks.process_group import in_turn
from rma_mm.runtime.verification.checked_product import checked_product, verified_product
from rma_mm.schedule.drawing.page import page
from rma_mm.schedule.drawing.text import drawn
from rma_mm.schedule.schedule import STAGE
from rma_mm.windows import Counters, Window
from rma_mm.windows.liveness import CELLS, PRODUCT

BOUND = 8
"""Sets of operands that a plan keeps bound."""


class Plan:
    """C = alpha · op(A) @ op(B) + beta · C, settled and prepared. Made by `make_plan`; collective to execute."""

    def __init__(self, mesh: Mesh, settled: Settled) -> None:
        self.mesh, self.settled, self.given, self.options = mesh, settled, settled.given, settled.given.options
        self.schedule, self.layouts, self.peak_bytes = settled.schedule, settled.layouts, settled.peak_bytes
        self.predicted_seconds = settled.predicted_seconds
        """What an execution is expected to take; None where this machine, or such products on it, were not measured."""
        self.serial = mesh.next_serial()
        self.bound: OrderedDict[tuple[object, ...], Executable] = OrderedDict()
        self.agreed: tuple[tuple[object, ...], int] = ((), 0)
        self.ballot = Ballot(mesh.comm, "execute")
        self.words = Counters()
        """What this rank moved in the last execution."""
        self.watch = ProductWatch(mesh.metrics)
        self.last_seconds = 0.0
        """What the last execution but one took on the slowest rank: the ranks tell each other when they meet again."""
        self.claims: list[int] = []
        """Tasks of a queue that this rank ran in the last execution."""
        self.trace: Trace | None = None
        """Where to note what this rank does when; to be set before anything is bound."""
        self._own_c: DistMatrix | None = None
        self._latest: Latest | None = None
        self._added: dict[str, DistMatrix] = self._allocate()
        self.shared = Shared(mesh, settled.schedule, settled.given) if settled.shares else None
        """Scratch for what ranks of a node fetch together; None where nothing is."""
        self.frames = self._scratch()
        self.tickets = Tickets(self._added["ticket"].block) if self.schedule.pool else None
        if (settled.chosen.row.grouped or settled.shares) and mesh.is_member:
            mesh.open_channels(groups_of(settled.schedule, mesh) | {tuple(mesh.shape.ranks)})
        self._is_closed = False
        self._done = 0
        """Products that it was asked to check each N-th of."""
        mesh.prepared.add(self)

    # -- what was decided -------------------------------------------------------------------------

    @property
    def algorithm(self) -> str:
        """Name of the row."""
        return self.settled.chosen.row.name

    @property
    def why(self) -> str:
        """Why it was chosen."""
        return self.settled.why

    @property
    def c_shape(self) -> tuple[int, int]:
        """(m, n)."""
        return self.given.c.shape

    @property
    def c_dtype(self) -> np.dtype[Any]:
        """Element type of the result."""
        return self.given.c.dtype

    @property
    def reproducible(self) -> bool:
        """Whether the same operands give the same bits again."""
        return self.settled.reproducible

    @property
    def kernel(self) -> str:
        """The local kernel."""
        return self.given.kernel

    @property
    def epilogue(self) -> str | None:
        """What becomes of each element of C once it is summed, in words; None for nothing."""
        return self.settled.epilogue

    @property
    def movement(self) -> dict[str, str]:
        """How A, B and C move on this rank: here, view, get, accumulate, broadcast, all-gather, shift, reduce, …"""
        return movement(self.schedule, self.mesh)

    @property
    def decision(self) -> Decision:
        """What was considered, what each candidate would take and move, and why it lost."""
        return self.settled.decision

    def explain(self, every: bool = False) -> str:
        """The decision as a table, of 100 columns; of `every` candidate, with its placements, as a wide one.

        The whole schedule, all ranks', is verified on the way.
        """
        return self.settled.explain(every)

    def frontier(self) -> str:
        """T10's compute-shift plans for this product as a table: the most words for the least memory first."""
        return frontier_table(self.given.shape, self.mesh.shape.size)

    def picture(self) -> str:
        """The schedule drawn as text: who multiplies what when, and who moves what to whom. Small meshes only."""
        return drawn(self.schedule)

    def page(self) -> str:
        """The schedule drawn as an HTML page that stands by itself."""
        return page(self.schedule, str(self))

    def __str__(self) -> str:
        return str(self.settled)

    # -- executing --------------------------------------------------------------------------------

    @in_turn
    def execute(
        self,
        A: DistMatrix | NDArray[Any],
        B: DistMatrix | NDArray[Any],
        out: DistMatrix | None = None,
        progress: Progress | None = None,
    ) -> DistMatrix:
        """Multiply. Collective; makes no window, communicator or buffer. Returns `out`, or the plan's own C.

        The operands must be placed as `layouts` says; arrays (for a plan that was made for arrays) must be equal on
        every rank, which is not checked here. progress is called with (done, total) multiply-adds of this rank; what
        it raises is raised here, on its rank, once the product is complete, and it cannot call what is collective.
        Raises ShapeError, LayoutError, DtypeError, MeshError, OptionError, ClosedError; DisagreementError; where the
        plan was made with `check`, VerificationError; where a transfer fails for good, WindowError, on all ranks, which
        can agree on nothing more.
        """
        latest = self._latest
        if latest is None or not latest.names(A, B, out):
            A, B, out = self._agreed(A, B, out)
            latest = self._latest = Latest(A, B, out, self._executable(A, B, out), *self.agreed)
        else:  # checked and bound already: only the other ranks remain to be asked
            latest.executable.sync()
            self._vote(latest.facts, latest.digest, None)
            out = latest.out
        listener = None if progress is None else Listener(progress)
        if self.mesh.checks is None and not self.options.check:
            self._run(latest.executable, listener)
        else:
            with using_threads(self.mesh.threads), self._checks(*latest.matrices):
                self._run(latest.executable, listener)
        if listener is not None and listener.error is not None:
            raise listener.error
        return out

    @in_turn
    def prepare(
        self, A: DistMatrix | NDArray[Any], B: DistMatrix | NDArray[Any], out: DistMatrix | None = None
    ) -> None:
        """Bind these operands now, which the first `execute` on them does otherwise. Collective; raises as it does."""
        self._executable(*self._agreed(A, B, out))

    def _agreed(
        self, A: DistMatrix | NDArray[Any], B: DistMatrix | NDArray[Any], out: DistMatrix | None
    ) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
        """The operands as matrices of this plan, once all ranks have brought the same ones. Collective."""
        self.mesh.require_open()
        error: Exception | None = None
        facts: tuple[object, ...] = ()
        try:
            if self._is_closed:
                raise ClosedError("plan: it is closed; make a new one")
            if out is None and self.options.beta != 0:
                raise OptionError(f"beta: got {self.options.beta}; beta other than 0 adds to C, so pass out")
            A, B = self._staged_input("A", A), self._staged_input("B", B)
            for name, matrix in (("A", A), ("B", B), ("C", out)):
                if matrix is not None:
                    self._check(name, matrix)
            if out is not None and (overlap(out, A) or overlap(out, B)):
                raise LayoutError("out: it shares memory with an operand; a product cannot overwrite what it reads")
            facts = (self.serial, A.facts, B.facts, out.facts if out is not None else OWN)
            for window in {matrix.block.window for matrix in (A, B, out) if matrix is not None}:
                window.sync()  # what this rank stored, before the others may read it
        except Exception as caught:  # noqa: BLE001 - agreed on below, in one allreduce
            error = caught
        if facts != self.agreed[0]:
            self.agreed = (facts, digest(facts))
        self._vote(*self.agreed, error)
        assert isinstance(A, DistMatrix) and isinstance(B, DistMatrix)
        return A, B, out if out is not None else self._c()

    def _vote(self, facts: tuple[object, ...], hashed: int, error: Exception | None) -> None:
        """One allreduce that is agreement and start barrier at once; what differs is found out only if it fails."""
        is_agreed = self.ballot.cast(hashed, error is not None, self.watch.tells())
        told = self.ballot.told
        self.last_seconds = 1e-9 * told[0]
        if is_agreed:
            self.watch.hears(told)
        else:
            names = ("plan", "A", "B", "C")
            disagree(self.ballot, in_words(dict(zip(names, facts, strict=False))), error)

    def _checks(self, *matrices: DistMatrix) -> AbstractContextManager[None]:
        """What is checked of the next product."""
        if self.mesh.checks is not None:
            return checked_product(self.algorithm, self.given, self.serial, *matrices)
        self._done += 1
        if self._done % self.options.checked_every:
            return nullcontext()
        return verified_product(self.algorithm, self.given, self.mesh.next_serial(), *matrices)

    def _run(self, executable: Executable, progress: Progress | None) -> None:
        before, seen, begun = executable.traffic(), self.mesh.metrics.now(), perf_counter_ns()
        CELLS[PRODUCT] = self.mesh.metrics.tally.products + 1
        with using_threads(self.mesh.threads):
            executable.run(progress)
        elapsed = perf_counter_ns() - begun
        self.claims = executable.claims
        self.words = Counters(*map(sub, executable.traffic(), before))
        self.watch.note(elapsed, seen, self.words)

    def close(self) -> None:
        """Give the plan's memory back, once all ranks have; its own C lives on while it is in use.

        Local, and may be repeated.
        """
        self._is_closed = True
        for executable in self.bound.values():
            executable.close()
        self.bound.clear()
        self._latest = None
        self.frames.clear()
        self.shared = None
        for matrix in self._added.values():
            matrix.close()
        self._own_c = None

    def forget(self, window: Window) -> None:
        """Drop what is bound to a window that is about to be closed."""
        for key in [key for key, executable in self.bound.items() if window in executable.windows]:
            self.bound.pop(key).close()
        self._latest = None

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- preparing --------------------------------------------------------------------------------

    def _allocate(self) -> dict[str, DistMatrix]:
        """What a plan needs in windows: its own operands, summed operands, C's shadow, the ticket. Collective."""
        added = {}
        for name in self.options.arrays:
            operand = self.settled.operands[name]
            assert operand.layout is not None
            added[name] = DistMatrix.allocated(self.mesh, operand.shape, operand.dtype, operand.layout)
        for name in "AB":
            if name + STAGE in self.schedule.homes:
                home = self.schedule.homes[name + STAGE]
                dtype = self.given.dtype(name + STAGE)
                added[name + STAGE] = DistMatrix.allocated(self.mesh, home.shape, dtype, home.layout)
        if self.given.summed != self.c_dtype:
            home = self.schedule.homes["C"]
            added["shadow"] = DistMatrix.allocated(self.mesh, home.shape, self.given.summed, home.layout)
        if self.schedule.pool:
            added["ticket"] = DistMatrix.allocated(self.mesh, (1, 1), np.dtype(np.int64), pinned(self.mesh, 0))
            added["ticket"].tile[...] = 0
        return added

    def _scratch(self) -> dict[str, NDArray[Any]]:
        """Frames of scratch memory, flat."""
        sizes = frames_of(self.schedule, self.mesh)
        return {frame: np.empty(n, frame_dtype(self.given, self.schedule, frame)) for frame, n in sizes.items()}

    def _c(self) -> DistMatrix:
        """The plan's own C, made when first wanted. Collective then."""
        if self._own_c is None:
            c = self.settled.operands["C"]
            assert c.layout is not None
            self._own_c = DistMatrix.allocated(self.mesh, c.shape, c.dtype, c.layout)
            self._own_c.tile[...] = 0
        return self._own_c

    def _staged_input(self, name: str, x: DistMatrix | NDArray[Any]) -> DistMatrix:
        """An operand given as an array, copied into the plan's own matrix."""
        if isinstance(x, DistMatrix):
            return x
        if name not in self._added:
            raise LayoutError(f"{name}: got a NumPy array; this plan was made for a DistMatrix")
        operand = self.settled.operands[name]
        array = np.asarray(x)
        if array.shape != operand.shape or array.dtype != operand.dtype:
            raise ShapeError(
                f"{name}: got {array.dtype} of shape {array.shape}; the plan is for {operand.dtype} of {operand.shape}"
            )
        made = self._added[name]
        made.tile[...] = array[made.region.selector()]
        return made

    def _check(self, name: str, matrix: DistMatrix) -> None:
        operand = self.settled.operands[name]
        assert operand.layout is not None
        facts = (operand.dtype, operand.shape, operand.layout)
        check_matrix(name, matrix, self.mesh, facts, self.settled.reads_in_place(name), "plan")

    def _executable(self, A: DistMatrix, B: DistMatrix, C: DistMatrix) -> Executable:
        key = tuple((*matrix.block.key, matrix.flipped) for matrix in (A, B, C))
        found = self.bound.get(key)
        if found is None:
            if len(self.bound) >= BOUND:
                self.bound.popitem(last=False)[1].close()
            with using_threads(self.mesh.threads):  # products are cut for them
                found = self.bound[key] = self._bind(A, B, C)
        self.bound.move_to_end(key)
        return found

    def _bind(self, A: DistMatrix, B: DistMatrix, C: DistMatrix) -> Executable:
        o = self.options
        # a bound plan must not keep a dropped matrix alive, so it holds the memory and not the blocks
        homes: dict[str, Block] = {name: x.block.unheld() for name, x in (("A", A), ("B", B), ("C", C))}
        homes |= {name: matrix.block for name, matrix in self._added.items() if name.endswith(STAGE)}
        flips = {"A": A.flipped != o.transpose_a, "B": B.flipped != o.transpose_b, "C": C.flipped}
        memory = Memory(
            homes,
            homes["C"].local.T if C.flipped else homes["C"].local,
            self._added["shadow"].block if "shadow" in self._added else None,
            frozenset(name for name, flipped in flips.items() if flipped),
            self.frames,
            self.tickets,
            self.shared,
        )
        sums = Sums(self.given.semiring, pushed=self.settled.chosen.row.result != "here")
        scalars = Scalars(o.alpha, o.beta, o.conjugate_a, o.conjugate_b, self.kernel, sums, o.epilogue)
        machine = self.settled.request.tariff.machine
        return Executable(self.schedule, self.mesh, memory, scalars, self.trace, machine if machine.measured else None)

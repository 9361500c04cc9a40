"""Plans: a product chosen, its memory counted and its operations prepared once, to be executed many times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import ClosedError, LayoutError, OptionError, RmaError
from rma_mm.kernels.threads import using_threads
from rma_mm.policy.planner.decision import Decision
from rma_mm.policy.planner.tables import frontier_table
from rma_mm.runtime.execution.executor import Executable, Listener, Progress, Running
from rma_mm.runtime.execution.footprint import movement
from rma_mm.runtime.execution.node_slots import NodeScratch
from rma_mm.runtime.execution.operands import Operands
from rma_mm.runtime.execution.tracing import Trace
from rma_mm.runtime.files.opened import Opened
from rma_mm.runtime.matrices.matrix import DistMatrix, check_matrix, check_memory, copy_in
from rma_mm.runtime.matrices.streamed import FileMatrix, as_operands, read_again
from rma_mm.runtime.products.adaptation import Adaptation
from rma_mm.runtime.products.choosing import choose_plan
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.products.prepared import OWN, BoundOperands, KnownOperands, Prepared
from rma_mm.runtime.products.symmetry import check_own
from rma_mm.runtime.products.workspace import check_apart
from rma_mm.runtime.ranks.agreement import AgreedVotes, Ballot, digest, disagree, in_words
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.metrics import ProductWatch
from rma_mm.runtime.ranks.process_group import serialized
from rma_mm.runtime.verification.checked_product import SELDOM, as_before, checked_product, required
from rma_mm.schedule.schedule import Schedule
from rma_mm.windows import Counters, Window

Given = DistMatrix | Opened | NDArray[Any]  # what operands may be


class Plan:
    """A prepared product C = alpha · op(A) @ op(B) + beta · C, made by `rma_mm.plan`.

    Collective to execute. A plan chosen by "auto" that is slower than predicted, or has a slow rank, may change its
    algorithm twice, with the same placements and memory limit; `mesh.fallbacks` reports it. Set `adapt` to False to
    prevent that. With `deterministic` or a workspace it never changes.
    """

    def __init__(self, mesh: Mesh, choice: PlanChoice, workspace: NDArray[np.uint8] | None = None) -> None:
        self.mesh, self.options, self.workspace = mesh, choice.spec.options, workspace
        self.prepared = Prepared(mesh, choice, workspace)
        """The prepared product in use."""
        self._adaptation = Adaptation(mesh, choice)
        self._adapt, self._may_adapt = workspace is None and not choice.spec.files, False
        """The adaptation, and whether ranks have agreed on it."""
        self.layouts = choice.layouts
        """Placements of A, B and C, each in its own orientation."""
        self.serial = mesh.next_serial()
        self.agreed: tuple[tuple[object, ...], int] = ((), 0)
        self.ballot = Ballot(mesh.comm, "execute")
        self.words = Counters()
        """Words that this rank moved in the last execution."""
        self.watch = ProductWatch(mesh.metrics, self.spec.kind)
        self.claims: list[int] = []
        """Tasks of a queue that this rank ran in the last execution."""
        self.trace: Trace | None = mesh.trace
        """Trace of this rank; set it before anything is bound."""
        self._own_c: DistMatrix | None = None
        self._known = KnownOperands(mesh, self.ballot)
        self._will_repeat = False
        """True if all ranks can make the next executions by a compiled call, as they told with the last votes."""
        self._arrays = {x: self._allocated(x) for x in self.options.arrays}
        """The matrices of operands that come as arrays."""
        self._is_closed = False
        self._done = 0
        """Products that it was asked to check each N-th of."""
        mesh.prepared.add(self)

    # -- what was decided -------------------------------------------------------------------------

    @property
    def adapt(self) -> bool:
        """True if it may switch to another way of doing the same; to be set alike on all ranks."""
        return self._adapt

    @adapt.setter
    def adapt(self, value: bool) -> None:
        can = self.workspace is None and not self.spec.files
        self._adapt, self._may_adapt = bool(value) and can, False
        self._known.clear()

    @property
    def choice(self) -> PlanChoice:
        """Return the choice in use: the request, all candidates, and the one that was taken."""
        return self.prepared.choice

    @property
    def spec(self) -> Operands:
        """Return the operands and options of the product."""
        return self.choice.spec

    @property
    def schedule(self) -> Schedule:
        """The operations of all ranks."""
        return self.choice.schedule

    @property
    def peak_bytes(self) -> int:
        """Bytes that the fullest rank holds while the product runs."""
        return self.choice.peak_bytes

    @property
    def scratch_bytes(self) -> int:
        """Scratch bytes that this rank needs; a workspace has at least as many."""
        return self.prepared.scratch_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes that it takes on this rank of the mesh's windows, where others reach them, and no workspace serves."""
        return self.prepared.window_bytes

    @property
    def predicted_seconds(self) -> float | None:
        """Predicted seconds of an execution; None if this machine, or such products on it, were not measured."""
        return self.choice.predicted_seconds

    @property
    def node_scratch(self) -> NodeScratch | None:
        """Scratch memory for slices that ranks of a node fetch together; None if there are none."""
        return self.prepared.node_scratch

    @property
    def algorithm(self) -> str:
        """Name of the algorithm in use."""
        return self.choice.chosen.algorithm.name

    @property
    def why(self) -> str:
        """The reason why this plan was chosen."""
        return self.choice.why

    @property
    def c_shape(self) -> tuple[int, int]:
        """(m, n)."""
        rows, cols = self.spec.c.shape
        return rows, cols

    @property
    def c_dtype(self) -> np.dtype[Any]:
        """Element type of the result."""
        return self.spec.c.dtype

    @property
    def reproducible(self) -> bool:
        """True if the same operands give the same bits again."""
        return self.choice.reproducible

    @property
    def kernel(self) -> str:
        """The local kernel."""
        return self.spec.kernel

    @property
    def epilogue(self) -> str | None:
        """Description of the epilogue; None if there is none."""
        return self.choice.epilogue

    @property
    def movement(self) -> dict[str, str]:
        """Movement of A, B and C on this rank: here, view, get, accumulate, broadcast, all-gather, shift, reduce, …"""
        return movement(self.schedule, self.mesh)

    @property
    def decision(self) -> Decision:
        """The candidates, their predicted time and traffic, and why each lost."""
        return self.choice.decision

    def explain(self, every: bool = False) -> str:
        """Explain the choice of this plan; all operations of all ranks are verified for it.

        Parameters
        ----------
        every : bool
            True for all candidates with their placements, in a wide table; by default 100 columns.

        Returns
        -------
        str
            The plan, its lower bounds and the table of candidates.
        """
        return self.choice.explain(every)

    def frontier(self) -> str:
        """Return T10's compute-shift plans for this product as a table, from most words to least memory.

        Returns
        -------
        str
            The table.
        """
        return frontier_table(self.spec.shape, self.mesh.grid.size)

    def picture(self) -> str:
        """Draw the schedule as text: the work and the transfers of each rank in each step.

        Returns
        -------
        str
            The drawing; small meshes only.
        """
        from rma_mm.schedule.drawing.text import drawn

        return drawn(self.schedule)

    def page(self) -> str:
        """Draw the schedule as a self-contained HTML page.

        Returns
        -------
        str
            The page.
        """
        from rma_mm.schedule.drawing.page import page

        m, n, k = self.spec.shape
        title = f"{self.algorithm}: C[{m}, {n}] = A[{m}, {k}] @ B[{k}, {n}] on {self.mesh.grid} ranks"
        return page(self.schedule, title, str(self))

    def report(self, path: str | PathLike[str]) -> None:
        """Write a report as one page of HTML, which needs nothing from elsewhere: `rma_mm[report]` draws it.

        Collective. It tells of the executions since `trace` was set or `rma_mm.trace` began: the timeline of the ranks,
        predicted and measured. Without a trace it tells what was predicted, and which words moved.

        Parameters
        ----------
        path : path-like
            The file; it is replaced as a whole.

        Raises
        ------
        FileFormatError
            If the file cannot be written.
        OptionError
            If bokeh is not installed.
        """
        from rma_mm.runtime.reports.timeline import gathered
        from rma_mm.runtime.reports.traced import write_report

        is_traced = self.trace is not None and bool(self.trace.calls or self.trace.transfers)
        write_report(self, path, gathered(self.trace, self.mesh.comm) if self.trace and is_traced else [])

    def retrace(self, trace: Trace | None) -> None:
        """Note from now on in another trace what this rank does, or in none. Local; operations are bound again."""
        self.trace = trace
        self._known.clear()
        self.prepared.unbind()

    def __repr__(self) -> str:
        m, n, k = self.spec.shape
        how = f"{self.spec.c.dtype}, {self.algorithm} on {self.mesh.grid} ranks"
        return f"Plan(C[{m}, {n}] = A[{m}, {k}] @ B[{k}, {n}], {how})"

    def __str__(self) -> str:
        return str(self.choice)

    # -- executing --------------------------------------------------------------------------------

    def execute(
        self, A: Given, B: Given, out: DistMatrix | None = None, progress: Progress | None = None, *,
        c: DistMatrix | None = None, opened: AgreedVotes = None,
    ) -> DistMatrix:
        """Multiply.

        Collective. Creates no window, communicator or buffer, unless `adapt` switches to another algorithm.

        Parameters
        ----------
        A, B : DistMatrix, Opened or ndarray
            Operands, placed as `layouts` says. Arrays, for a plan made for arrays, must be equal on every rank; this is
            not checked.
        out : DistMatrix, optional
            Receives C. By default the plan's own C, the same matrix each time.
        progress : callable, optional
            Called with (done, total) multiply-adds of this rank. It must not make collective calls. Its error is raised
            on its rank after the product is complete.
        c : DistMatrix, optional
            Matrix that beta multiplies, instead of `out`. It is not changed, and not read if beta is 0.
        opened : sequence of int, optional
            Result of a ballot of the caller's in which each rank voted its `opening`.

        Returns
        -------
        DistMatrix
            C.

        Raises
        ------
        RmaError
            ShapeError, LayoutError, DtypeError, MeshError, OptionError or ClosedError for arguments that do not fit.
            VerificationError if the plan was made with `check` and C is wrong. DisagreementError.
        WindowError
            If a transfer fails for good, on all ranks; no further call is possible then.
        """
        if progress is None and opened is None and self.repeat(A, B, out, c):
            return out if out is not None else self._c()
        return self._execute(A, B, out, progress, c, opened)

    def repeat(self, A: object, B: object, out: object, c: object = None) -> bool:
        """Execute by a compiled call; False, and nothing is done, where that cannot be. Collective."""
        return self._known.repeats > 0 and self._repeated(self._known.find(A, B, out, c))

    def _repeated(self, bound: BoundOperands[Executable] | None) -> bool:
        if bound is None or not self._known.repeated(bound, self.watch):
            return False
        self.claims, self.words = [], bound.words
        return True

    def repeat_anew(self, A: DistMatrix, B: DistMatrix) -> DistMatrix | None:
        """Execute by a compiled call into a new matrix; None, and nothing is done, where that cannot be. Collective.

        Each rank takes memory that it finds unused. Which it takes is part of what ranks compare in the call.
        """
        known, place = self._known, self.layouts["C"]
        block = known.unused_result() if known.repeats else None
        if block is None:
            return None
        out = DistMatrix(self.mesh, self.c_shape, self.c_dtype, place, block)
        if (bound := known.find(A, B, out, None)) is None:
            try:
                facts = self._facts_of(A, B, out, None)
            except RmaError:  # which all ranks hear of where they vote
                return None
            executable = self.prepared.executable(A, B, out, self.trace)
            known.compile(bound := known.add((A, B, out, None), executable, facts, digest(facts)))
        if not self._repeated(bound):
            return None
        known.in_vain = 0
        return DistMatrix(self.mesh, self.c_shape, self.c_dtype, place, self.mesh.arena.revived(block))

    def execute_anew(self, A: DistMatrix, B: DistMatrix) -> DistMatrix:
        """Execute into a new matrix, whose memory later results may use when it is dropped. Collective."""
        return self._execute(A, B, self._allocated("C"), is_new=True)

    @serialized
    def _execute(
        self, A: Given, B: Given, out: DistMatrix | None, progress: Progress | None = None, c: DistMatrix | None = None,
        opened: AgreedVotes = None, is_new: bool = False,
    ) -> DistMatrix:
        if self._may_adapt:
            self.follow()
        A, B = as_operands(A, B, self.mesh)
        known, bound = self._known, self._known.find(A, B, out, c)
        can_repeat = (bound is not None or is_new) and c is None and not self.options.check
        repeats = can_repeat and known.wants_calls(self.watch.last_seconds)
        known.executions += 1
        if bound is None:
            A, B, made = self._agreed(A, B, out, c, opened, repeats)
            executable = self.prepared.executable(A, B, made, self.trace)
            bound = known.add((A, B, out, c), executable, *self.agreed)
        else:  # checked and bound already: only the other ranks remain to be asked
            assert isinstance(A, DistMatrix) and isinstance(B, DistMatrix)
            bound.executable.sync()
            self._vote(bound.facts, bound.digest, None, opened, repeats)
            made = out if out is not None else self._c()
        listener = None if progress is None else Listener(progress)
        added = c if self.options.beta != 0 else None
        with using_threads(self.mesh.threads), self.checked(A, B, made, added):
            self._run(bound.executable, listener, made, added)
        if self._will_repeat:
            known.begin_repeats(self.watch.last_seconds)
            if not is_new or known.keep_result(made.block):
                known.compile(bound)
        if listener is not None and listener.error is not None:
            raise listener.error
        return made

    def opening(self, *operands: DistMatrix) -> tuple[int, ...]:
        """Return the facts for a caller's ballot that is to open the next execution on these operands. Local.

        Nothing if an execution must take its own, as before the first and where the plan may change; alike on all
        ranks that have executed it alike.
        """
        if self._is_closed or self._may_adapt != self._adapt or (self._adapt and self._adaptation.is_due(self.watch)):
            return ()
        for window in {matrix.block.window for matrix in operands}:
            window.sync()
        return self.watch.piggyback()

    @serialized
    def prepare(self, A: Given, B: Given, out: DistMatrix | None = None) -> None:
        """Bind these operands now, which their first `execute` would do.

        Collective.

        Parameters
        ----------
        A, B, out
            As in `execute`.
        """
        A, B = as_operands(A, B, self.mesh)
        self.prepared.executable(*self._agreed(A, B, out), self.trace)

    def set_bias(self, values: NDArray[Any], at: NDArray[np.int64] | slice = slice(None)) -> None:
        """Replace values of the epilogue's bias, from the next execution on.

        Local: a rank needs no values of other ranks' rows or columns, unless C is verified.

        Parameters
        ----------
        values : ndarray
            The new values.
        at : ndarray of int or slice
            Their indices; all by default.

        Raises
        ------
        OptionError
            If the plan was made without a bias.
        ShapeError, DtypeError
            If the values do not fit.
        """
        epilogue = self.options.epilogue
        if epilogue is None or epilogue.bias is None:
            raise OptionError("set_bias: this plan adds no bias; make one with epilogue=Epilogue(bias=…, per=…)")
        epilogue.put(at, values)
        self.prepared.refresh_bias()

    def _agreed(
        self, A: Given, B: Given, out: DistMatrix | None, c: DistMatrix | None = None, opened: AgreedVotes = None,
        repeats: bool = False,
    ) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
        """Return the operands as matrices of this plan, once all ranks have brought the same ones. Collective."""
        self.mesh.require_open()
        error: Exception | None = None
        facts: tuple[object, ...] = ()
        try:
            A, B = self._staged_input("A", A), self._staged_input("B", B)
            facts = self._facts_of(A, B, out, c)
            for window in {matrix.block.window for matrix in (A, B, out) if matrix is not None}:
                window.sync()  # what this rank stored, before the others may read it
        except Exception as caught:  # noqa: BLE001 - agreed on below, in one allreduce
            error = caught
        if facts != self.agreed[0]:
            self.agreed = (facts, digest(facts))
        self._vote(*self.agreed, error, opened, repeats)
        self._may_adapt = self._adapt
        assert isinstance(A, DistMatrix) and isinstance(B, DistMatrix)
        return A, B, out if out is not None else self._c()

    def _facts_of(
        self, A: DistMatrix, B: DistMatrix, out: DistMatrix | None, c: DistMatrix | None
    ) -> tuple[object, ...]:
        """Return the facts that ranks compare of an execution on these operands. Local; raises for those unfit."""
        if self._is_closed:
            raise ClosedError("plan: it is closed; make a new one")
        if out is None and c is None and self.options.beta != 0:
            raise OptionError(f"beta: got {self.options.beta}; beta other than 0 adds to C, so pass out, or c")
        for name, matrix, said in (("A", A, "A"), ("B", B, "B"), ("C", out, "C"), ("C", c, "c")):
            if matrix is not None:
                self._check(name, matrix, said)
        check_own(self.options, A, B)
        check_memory(A, B, out, c, self._own_c)
        check_apart(self.workspace, A=A, B=B, out=out, c=c)
        results = None if c is None else c.facts, OWN if out is None else out.facts
        return (self.serial, self._adapt, A.facts, B.facts, *results)

    def _vote(
        self, facts: tuple[object, ...], hashed: int, error: Exception | None, opened: AgreedVotes,
        repeats: bool = False,
    ) -> None:
        """Vote: one allreduce that is agreement and start barrier at once; details are exchanged only if it fails."""
        told = (*self.watch.piggyback(), -repeats)
        if error if opened else not self.ballot.cast(hashed, error is not None, told):
            names = ("plan", "adapt", "A", "B", "c", "C")
            disagree(self.ballot, in_words(dict(zip(names, facts, strict=False))), error)
        votes = opened or self.ballot.votes
        self._will_repeat = not opened and votes[len(told) - 1] < 0
        self.watch.act_on_votes(votes)

    def follow(self) -> None:
        """Go over to another way of doing the same where that is due. Collective; ranks have agreed that it may."""
        if not self._is_closed and (other := self._adaptation.next(self.choice, self.watch)):
            self._go_over(other)

    def checked(
        self, A: DistMatrix, B: DistMatrix, C: DistMatrix, added: DistMatrix | None = None
    ) -> AbstractContextManager[None]:
        """Check the next product, where checks are on. added: the matrix that beta scales, where that is not C."""
        if self.mesh.checks is not None and not self.spec.files:
            return checked_product(self.algorithm, self.spec, self.serial, A, B, C, added)
        self._done += 1
        if not self.options.check or self._done % self.options.checked_every:
            return nullcontext()
        return self._verified(A, B, C, added)

    @contextmanager
    def _verified(self, A: DistMatrix, B: DistMatrix, C: DistMatrix, added: DistMatrix | None) -> Iterator[None]:
        """Verify C after the product in the block. Collective; raises VerificationError.

        Where many products are checked it is done so that it costs little (`screen`), of few as `rma_mm.verify` does.
        """
        given, seed, before = self.spec, self.mesh.next_serial(), as_before(self.spec, C, added)
        yield
        with read_again(A, B) as (a, b):
            required(self.algorithm, given, seed, a, b, C, before, quick=given.options.checked_every < SELDOM)

    def _run(self, executable: Executable, progress: Progress | None, out: DistMatrix, c: DistMatrix | None) -> None:
        if c is not None:
            out.tile[...] = c.tile
        with (running := Running(executable, self.watch)).noted():
            executable.run(progress)
        self.ended(running)

    def ended(self, running: Running) -> None:
        """A product is done, of which this tells from now on."""
        running.end()
        self.claims, self.words = running.executable.claims, running.words

    def _go_over(self, choice: PlanChoice) -> None:
        """Do the product as `settled` from now on; as before where that cannot be prepared. Collective."""
        before = self.choice
        try:
            self._put(choice)
        except RmaError as error:  # the same on every rank, as in memory that is not there
            self.mesh.fallbacks.append(
                f"{choice.chosen.algorithm.name}: {error}; {before.chosen.algorithm.name} goes on"
            )
            self.adapt = False
            self._put(before)
        self.watch = ProductWatch(self.mesh.metrics, self.spec.kind)

    def _put(self, choice: PlanChoice) -> None:
        """Replace the prepared product, whose memory may be needed. Collective."""
        while True:
            self._known.clear()
            self.prepared.close()
            self.prepared = Prepared(self.mesh, choice)
            if not self.prepared.is_outdated:
                break
            choice = choose_plan(self.mesh, choice.placed)

    def close(self) -> None:
        """Release the plan's memory, which is free once every rank has done so; its own C lives on while in use.

        Local; may be repeated.
        """
        self._is_closed = True
        self._known.close()
        self.prepared.close()
        for matrix in self._arrays.values():
            matrix.close()
        self._own_c = None

    def forget(self, window: Window) -> None:
        """Drop operations bound to a window that will be closed."""
        self.prepared.forget(window)
        self._known.clear()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- preparing --------------------------------------------------------------------------------

    def _c(self) -> DistMatrix:
        """Return the plan's own C, made when first wanted. Collective then."""
        if self._own_c is None:
            self._own_c = self._allocated("C")
            self._own_c.tile[...] = 0
        return self._own_c

    def _allocated(self, name: str) -> DistMatrix:
        """Return a new matrix for an operand, or for C. Collective."""
        x = self.choice.operands[name]
        assert x.layout is not None
        return DistMatrix.allocated(self.mesh, x.shape, x.dtype, x.layout)

    def _staged_input(self, name: str, x: Given) -> DistMatrix:
        """Return an operand given as an array, copied into the plan's own matrix."""
        if isinstance(x, DistMatrix | Opened):
            assert isinstance(x, DistMatrix)
            return x
        if name not in self._arrays:
            raise LayoutError(f"{name}: got a NumPy array; this plan was made for a DistMatrix")
        copy_in(name, x, self._arrays[name])
        return self._arrays[name]

    def _check(self, name: str, matrix: DistMatrix, said: str) -> None:
        """Raise where a matrix, which the caller calls `said`, is not A, B or C (`name`) of this plan."""
        operand = self.choice.operands[name]
        assert operand.layout is not None
        if isinstance(matrix, FileMatrix) != bool(operand.chunks):
            where = "stays in a file" if operand.chunks else "is in memory"
            raise LayoutError(f"{said}: this plan was made for one that {where}; make a plan for it")
        facts = (operand.dtype, operand.shape, operand.layout)
        check_matrix(said, matrix, self.mesh, facts, self.choice.reads_in_place(name), "plan")

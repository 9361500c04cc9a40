"""One run of the command line: from options to a verified, written and reported product. Collective throughout."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.command.frame import DONE, Frame
from rma_mm.command.jobs.report import (
    Facts,
    Streamed,
    Transferred,
    check_report,
    gather_facts,
    in_bytes,
    plan_lines,
    read_so_far,
    write_json,
)
from rma_mm.command.options.run import DEFAULT_DTYPE, RunOptions
from rma_mm.command.progress import ProgressReport
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import DtypeError, MemoryLimitError, RmaError, ShapeError, VerificationError, display_path
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.notation import parse_layout
from rma_mm.kernels.choice.choice import working_once
from rma_mm.kernels.elementwise import cast, check_cast
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.kernels.threads import set_threads
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.execution.tracing import Trace
from rma_mm.runtime.files.formats import Shape
from rma_mm.runtime.files.generated import generated
from rma_mm.runtime.files.opened import Opened
from rma_mm.runtime.files.opened import open as open_matrix
from rma_mm.runtime.files.output import Output, Saving
from rma_mm.runtime.matrices.filed import write
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.streamed import FileMatrix, as_operands
from rma_mm.runtime.products.adaptation import late_note
from rma_mm.runtime.products.make_plan import make_plan
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.products.prices import best_grid
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.unfinished import check_target, write_whole
from rma_mm.windows.waiting import barrier

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm.runtime.reports.timeline import Record
    from rma_mm.runtime.verification.check import Verdict


@dataclass
class Job:
    """The state of one run: its options, matrices, timings and trace."""

    options: RunOptions
    frame: Frame
    larger: Callable[[Job, Mesh, tuple[int, int, int]], int]
    """Multiplies where C does not fit in memory, or where an earlier job is gone on with."""
    files: dict[str, Opened] = field(default_factory=dict)  # headers of A, B and C0, where they are files
    bias: Any = None  # the file of the bias, on rank 0, which reads it
    output: Output | None = None
    moved: dict[str, Transferred] = field(default_factory=lambda: {"read": Transferred(), "written": Transferred()})
    """Bytes and seconds that this rank spent on reading matrices and on writing C."""
    streamed: Streamed | None = None  # bytes that the last product read of operands that stay in their files
    predicted: list[Record] = field(default_factory=list)
    """Timeline predicted for each rank, on rank 0, if a timeline is wanted."""
    trace: Trace | None = None  # trace of this rank, if a timeline is wanted
    progress: ProgressReport = field(init=False)

    def __post_init__(self) -> None:
        self.progress = ProgressReport(self.options.progress, self.comm.rank == 0 and not self.options.quiet)

    @property
    def comm(self) -> MPI.Intracomm:
        comm: MPI.Intracomm = self.frame.comm
        return comm

    def run(self) -> int:
        """The exit code, the same on every rank. Raises RmaError on all: VerificationError for a wrong result."""
        try:
            with ExitStack() as open_things:
                open_things.callback(self.progress.close)
                return self._multiply(open_things)
        except RmaError:
            if self.output and self.comm.rank == 0:
                self.output.discard()
            raise

    def _multiply(self, open_things: ExitStack) -> int:
        o = self.options
        self._read_headers()
        shape = self._shape()
        dtype = self._made_dtype()
        open_things.enter_context(working_once(o.work_ahead(prod(shape))))
        with self.progress.stage("planning"):
            grid = o.mesh or best_grid(
                self.comm, shape, dtype, o.algorithm, o.threads, o.prefer, o.speeds, o.window, o.kernel, o.semiring
            )
        mesh = Mesh(grid, self.comm, window=o.window, threads=o.threads, speeds=o.speeds, timeout=o.timeout)
        open_things.enter_context(mesh)
        mesh.when_lost = self.frame.interruption.when_lost
        open_things.enter_context(mesh.progress)  # a host may be lost while files are read or written, too
        set_threads(mesh.threads)  # for the verification too: threads beyond the cores spin and wait for each other
        try:
            with self.progress.stage("planning"):
                plan = None if o.resume else self._plan(mesh, shape)
        except MemoryLimitError:  # the same on every rank
            if not {"A", "B"} <= self.files.keys() or o.output is None or o.layout_a or o.layout_b or o.layout_c:
                raise
            plan = None
        if plan is None:
            return self.larger(self, mesh, shape)
        plan.adapt = False  # what is reported is of one plan
        self.trace = plan.trace = Trace() if o.trace is not None or o.report is not None else None
        self._show(plan)
        a_shape, b_shape = (plan.choice.operands[x].shape for x in "AB")
        self.check_start(a_shape, b_shape, plan.c_shape, plan.c_dtype)
        if o.dry_run:
            return DONE
        self._open_output(plan)
        if o.metrics is not None:
            mesh.metrics.write(o.metrics)
        self.show_plan(plan, mesh, shape)
        loaded = [x for name, x in self.files.items() if name == "C" or plan.choice.operands[name].chunks is None]
        sizes = [prod(x.shape) * x.dtype.itemsize for x in loaded]
        title = f"reading {in_bytes(sum(sizes))}" if sizes else "generating A and B"
        with self.moved["read"].timed(sizes), self.progress.stage(title):
            a, b, before = self._operands(mesh, plan, shape)
        c = DistMatrix.empty(plan.c_shape, mesh, plan.layouts["C"], plan.c_dtype)
        self.frame.has_begun = True
        seconds = self._execute(plan, a, b, c, before)
        size = prod(c.shape) * c.dtype.itemsize
        title = f"writing {in_bytes(size)}"
        with self.moved["written"].timed([size] if self.output else []), self.progress.stage(title):
            self._write(c)
        made = {"A": a, "B": b, "C": c}
        verdict = self._verdict(plan, made) if o.is_checked else None
        self.require_unchanged()
        if o.trace is not None and self.comm.rank == 0:
            self._predict(plan, mesh)
        if late := late_note(plan.choice, seconds):
            mesh.fallbacks.append(late)
        moved = {how: each.all_ranks(mesh) for how, each in self.moved.items()}
        moved |= {"streamed": self.streamed.all_ranks(mesh)} if self.streamed else {}
        facts = gather_facts(plan, mesh, shape, seconds, verdict, moved, kernel=o.kernel, measure_blas=o.measures_blas)
        is_right = verdict is None or verdict.ok
        if is_right:
            self._publish()
        else:
            mesh.metrics.tally.check_failures += 1
        records = self._records(mesh) if self.trace else []
        self.report(facts, is_right, mesh, records)
        self._write_page(plan, records, seconds)
        for thing in (a, b, c, before, plan):
            if thing is not None:
                thing.close()
        if verdict is not None and not verdict.ok:
            kept = "; nothing was written" if o.output else ""
            raise VerificationError(f"the result is wrong: {verdict.reason}{kept}")
        return DONE

    # -- before -----------------------------------------------------------------------------------

    def _read_headers(self) -> None:
        """Look at the input files, all before anything is multiplied. Raises FileFormatError on every rank."""
        o = self.options
        named = dict(zip("AB", o.files, strict=False)) | ({"C": o.c} if o.c is not None else {})
        with agreed(self.comm):
            said = o.dtype if o.files else None
            self.files = {name: open_matrix(path, said, o.format) for name, path in named.items()}
            check_report("--json", o.json)
            check_report("--picture", o.picture)
            check_report("--trace", o.trace)
            if o.report is not None:
                from rma_mm.runtime.reports.page import require_bokeh

                require_bokeh()
                check_target(f"--report {display_path(o.report)}", o.report)
            check_report("--metrics", o.metrics)

    def _shape(self) -> tuple[int, int, int]:
        """(m, n, k). Raises ShapeError for operands that do not fit, naming all shapes."""
        o = self.options
        if not o.files:
            m, n, k = o.shape
            return m, n, k
        a, b = self.files["A"].shape, self.files["B"].shape
        (m, k), (inner, n) = a[::-1] if o.transpose_a else a, b[::-1] if o.transpose_b else b
        if k != inner:
            ops = [" (transposed)" if turned else "" for turned in (o.transpose_a, o.transpose_b)]
            raise ShapeError(
                f"inner dimensions differ: A is {a}{ops[0]}, B is {b}{ops[1]}, C would be {(m, n)}; "
                f"op(A) has {k} columns and op(B) {inner} rows, which must be equal"
            )
        return m, n, k

    def _plan(self, mesh: Mesh, shape: tuple[int, int, int]) -> Plan:
        o = self.options
        m, n, k = shape
        made = self._made_dtype()
        shapes = {"A": (k, m) if o.transpose_a else (m, k), "B": (n, k) if o.transpose_b else (k, n)}
        operands: dict[str, Any] = {
            name: Operand(each, self.files[name].dtype if name in self.files else made, self._layout(name, mesh, each))
            for name, each in shapes.items()
        }
        try:
            return self._plan_of(mesh, operands, shape)
        except MemoryLimitError:  # the same on every rank
            staying = {name: self.files[name] for name in "AB" if name in self.files and not operands[name].layout}
            if not staying:
                raise
        return self._plan_of(mesh, operands | staying, shape)

    def _plan_of(self, mesh: Mesh, operands: Mapping[str, Any], shape: tuple[int, int, int]) -> Plan:
        """Return the plan for operands that will be generated or loaded, or stay in their files."""
        m, n, _ = shape
        layout = self._layout("C", mesh, (m, n))
        stay = all(isinstance(x, Opened) for x in operands.values())  # then it is found out whether they are the same
        is_known = (self.options.symmetric if stay else self.options.is_symmetric) or None
        return make_plan(
            operands["A"], operands["B"], mesh, layout=layout, symmetric=is_known, **self.how_to_multiply()
        )

    def how_to_multiply(self) -> dict[str, Any]:
        """Return the options of `make_plan`, without C's placement. Collective."""
        o = self.options
        names = (
            "alpha", "beta", "transpose_a", "transpose_b", "conjugate_a", "conjugate_b", "algorithm", "prefer",
            "memory_limit", "compute_dtype", "kernel", "semiring", "fast",
        )
        return {name: getattr(o, name) for name in names} | {"epilogue": self._epilogue()}

    def _made_dtype(self) -> np.dtype[Any]:
        """Return the type of generated matrices; of files, that of A's counts where grids are compared."""
        if "A" in self.files:
            return self.files["A"].dtype
        return np.dtype(parse_dtype(self.options.dtype or DEFAULT_DTYPE))

    def _epilogue(self) -> Epilogue | None:
        """Return the epilogue that the options ask for, or None. Raises FileFormatError on every rank."""
        o = self.options
        bias = None
        if o.bias is not None:
            from rma_mm.command.jobs.bias import read_bias, watched

            with agreed(self.comm):
                self.bias = None if self.comm.rank else watched(o.bias, o.dtype, o.format)
            bias = read_bias(self.comm, o.bias, o.dtype, o.format)
        if bias is None and o.activation is None and o.result_dtype is None:
            return None
        return Epilogue(bias, o.bias_per, o.activation, o.result_dtype)

    def _layout(self, name: str, mesh: Mesh, shape: tuple[int, int]) -> Layout | None:
        """Return the placement that the command line names for an operand. Raises LayoutError, saying for which."""
        text: str | None = getattr(self.options, f"layout_{name.lower()}")
        return None if text is None else parse_layout(text, mesh.grid, shape=shape)

    def check_start(self, a: Shape, b: Shape, wanted: Shape, dtype: np.dtype[Any]) -> None:
        """Raise ShapeError or DtypeError if C0 cannot be scaled into C, which is `wanted` for A of `a`, B of `b`."""
        if "C" not in self.files:
            return
        c = self.files["C"]
        if c.shape != wanted:
            raise ShapeError(f"{c.path}: C0 is {c.shape}, but A of {a} and B of {b} give {wanted}")
        try:
            check_cast(c.dtype, dtype, c.path, "C")
        except DtypeError as error:
            raise DtypeError(f"{error}, or name --compute-dtype") from None

    def _open_output(self, plan: Plan) -> None:
        """Make sure that the result can be written. Raises FileFormatError on every rank."""
        if self.options.output is None:
            return
        self.frame.interruption.losing = self.options.output
        how = Saving.of(self.options.saving)
        self.output = Output.begin(self.comm, self.options.output, plan.c_shape, plan.c_dtype, how)
        self.frame.interruption.unfinished = self.output.temporary  # whoever ends the job removes it

    def _operands(
        self, mesh: Mesh, plan: Plan, shape: tuple[int, int, int]
    ) -> tuple[DistMatrix, DistMatrix, DistMatrix | None]:
        """A, B and C0, placed as the plan wants them."""
        o = self.options
        made: list[Any] = []
        for name in "AB":
            operand, layout = plan.choice.operands[name], plan.layouts[name]
            if operand.chunks is not None:
                made.append(self.files[name])
            elif name in self.files:
                said = operand.dtype.name if o.dtype else None
                made.append(DistMatrix.load(self.files[name].path, mesh, layout, said, o.format))
            else:
                elements = generated(o.seed, name, operand.dtype)
                if (o.transpose_a, o.transpose_b)["AB".index(name)]:
                    elements = _transposed(elements)  # op(A) is the same matrix whether it comes transposed or not
                made.append(DistMatrix.from_function(operand.shape, elements, mesh, layout, dtype=operand.dtype))
        a, b = as_operands(made[0], made[1], mesh)
        before = None
        if "C" in self.files:
            layout = plan.layouts["C"]
            said = self.files["C"].dtype.name if o.dtype else None
            before = DistMatrix.load(self.files["C"].path, mesh, layout, said, o.format)
            if before.dtype != plan.c_dtype:
                wide = DistMatrix.empty(plan.c_shape, mesh, layout, plan.c_dtype)
                cast(before.tile, wide.tile)
                before.close()
                before = wide
        return a, b, before

    def _show(self, plan: Plan) -> None:
        """Print the plan, its explanation or its picture before the product runs, on rank 0.

        Raises FileFormatError on every rank.
        """
        o = self.options
        with agreed(self.comm):
            if self.comm.rank == 0:
                texts = [plan.explain(o.explain == "all")] if o.explain else [str(plan)] if o.dry_run else []
                texts += [plan.frontier()] * o.frontier + [plan.picture()] * (o.picture == "-")
                if texts and not (o.quiet and o.picture != "-"):
                    self.frame.say("\n\n".join(texts))
                if o.picture is not None and o.picture != "-":
                    from rma_mm.runtime.reports.traced import is_page

                    drawn = plan.page() if is_page(o.picture) else plan.picture()
                    write_whole(f"--picture {display_path(o.picture)}", o.picture, drawn)

    # -- the product, and after -------------------------------------------------------------------

    def _execute(
        self, plan: Plan, a: DistMatrix, b: DistMatrix, c: DistMatrix, before: DistMatrix | None
    ) -> list[float]:
        """Multiply as often as asked; the seconds of each timed repetition, of the slowest rank."""
        o = self.options
        seconds = []
        plan.prepare(a, b, c)
        warmup = o.untimed(bool(plan.spec.files))
        for number in range(warmup + o.repeat):
            if before is not None:
                c.copy_from(before)
            if number == warmup and self.trace:
                self.trace.clear()
            title = "warm-up" if number < warmup else f"product {number - warmup + 1} of {o.repeat}"
            files = list(dict.fromkeys(x.file for x in (a, b) if isinstance(x, FileMatrix)))
            for file in files:
                file.nbytes, file.seconds = 0, 0.0
            multiplied = plan.mesh.metrics.tally.multiplying
            with self.progress.stage(title, partial(read_so_far, files)) as progress:
                barrier(self.comm)
                start = time.perf_counter()
                with self.trace.repetition() if self.trace else nullcontext():
                    plan.execute(a, b, out=c, progress=progress)
                seconds.append(time.perf_counter() - start)
            multiplied = plan.mesh.metrics.tally.multiplying - multiplied
            self.streamed = Streamed(files, seconds[-1], multiplied * 1e-9) if files else None
        slowest = np.max(self.comm.allgather(seconds[warmup:]), axis=0)
        return [float(second) for second in slowest]

    def _write(self, c: DistMatrix) -> None:
        """Write the result under a temporary name. Raises FileFormatError on every rank."""
        if self.output is None:
            return
        with self.output.removed_by_errors():
            write(c, self.output)

    def _verdict(self, plan: Plan, made: dict[str, DistMatrix]) -> Verdict:
        """Compare the result with the operands, and the file with the result. Collective."""
        from rma_mm.command.jobs.checking import Check

        with self.progress.stage("checking the result"):
            return Check(self.options, self.comm, plan, self.files, made, self.output).verdict()

    def _predict(self, plan: Plan, mesh: Mesh) -> None:
        """Predict the timeline of each rank."""
        from rma_mm.command.options.simulate import SIMULATED
        from rma_mm.runtime.reports.timeline import predicted_run

        self.predicted = predicted_run(plan.schedule, plan.choice.request.cost_model, mesh.size, SIMULATED)

    def _records(self, mesh: Mesh) -> list[Record]:
        """Return what the ranks did, on rank 0. Collective."""
        from rma_mm.runtime.reports.timeline import gathered

        assert self.trace is not None
        return gathered(self.trace, mesh.comm)

    def _write_page(self, plan: Plan, records: Sequence[Record], seconds: Sequence[float]) -> None:
        """Write the report as a page, if it is wanted. Collective."""
        if self.options.report is not None:
            from rma_mm.runtime.reports.traced import write_report

            command = shlex.join(["mpiexec", "-n", str(self.comm.size), "rma-mm", *sys.argv[1:]])
            write_report(plan, self.options.report, records, seconds, command)

    def require_unchanged(self) -> None:
        """Raise FileFormatError on every rank where an input is no longer the file that it was. Collective."""
        with agreed(self.comm):
            for file in self.files.values():
                file.check()
            if self.bias is not None:
                self.bias.check()

    def _publish(self) -> None:
        """Give the result its final name. Raises FileFormatError on every rank."""
        if self.output is None:
            return
        output, self.output = self.output, None
        output.finish()
        self.frame.interruption.unfinished = self.frame.interruption.losing = ""

    def show_plan(self, plan: Plan, mesh: Mesh, shape: tuple[int, int, int]) -> None:
        """Print the plan before the product runs, on rank 0."""
        if not self.options.quiet and "-" not in (self.options.json, self.options.trace):
            self.frame.say(*plan_lines(plan, mesh, shape))

    def report(self, facts: Facts, is_right: bool, mesh: Mesh, records: Sequence[Record] = ()) -> None:
        """Write the report on rank 0, and print it if the result is right. Raises FileFormatError on every rank."""
        o = self.options
        if is_right and not o.quiet and "-" not in (o.json, o.trace):
            self.frame.say(*facts.lines(self.options.verbose))
        with agreed(self.comm):
            if self.comm.rank == 0:
                write_json(self.frame, "--json", o.json, facts.json)
                if records:
                    from rma_mm.runtime.reports.timeline import timeline

                    document = timeline(records, mesh.grid, mesh.node_of, facts.json, self.predicted)
                    write_json(self.frame, "--trace", o.trace, document, None)


def _transposed(elements: Any) -> Any:
    return lambda rows, cols: elements(cols.T, rows.T).T

"""One run of the command line for batches: from options to a verified, written and reported product. Collective."""

from __future__ import annotations

import time
from contextlib import closing
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.command.frame import DONE, Frame
from rma_mm.command.jobs.report import check_report, write_json
from rma_mm.command.options.run import DEFAULT_DTYPE, RunOptions
from rma_mm.command.progress import ProgressReport
from rma_mm.elements.dtypes import BFLOAT16, parse_dtype
from rma_mm.elements.semiring import PLUS_TIMES
from rma_mm.errors import OptionError, VerificationError
from rma_mm.kernels.choice.choice import working_once
from rma_mm.kernels.threads import set_threads
from rma_mm.policy.planner.batches import Batch
from rma_mm.runtime.execution.operands import Operand, ProductOptions
from rma_mm.runtime.files.formats import check_dimensions
from rma_mm.runtime.files.generated import generated
from rma_mm.runtime.files.opened import extents_of, open_array
from rma_mm.runtime.matrices.arguments import placed
from rma_mm.runtime.matrices.array import DistArray, as_array, load
from rma_mm.runtime.matrices.matrix import fill
from rma_mm.runtime.products.batched.plan import BatchPlan
from rma_mm.runtime.products.make_plan import planned
from rma_mm.runtime.products.matmul import matmul
from rma_mm.runtime.products.memory import require_free
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows.waiting import barrier

if TYPE_CHECKING:
    from mpi4py import MPI

UNUSED = (
    "c", "bias", "bias_per", "activation", "result_dtype", "frontier", "picture", "trace", "report", "metrics",
    "prefer", "speeds", "symmetric", "chunks", "shards", "compress", "resume",
)
"""Options that a product of batches does not take."""


@dataclass
class BatchJob:
    """One run of `rma_mm.run` that multiplies batches."""

    options: RunOptions
    frame: Frame

    def run(self) -> int:
        """The exit code, the same on every rank. Raises RmaError on all: VerificationError for a wrong result."""
        o, comm = self.options, self.frame.comm
        operands = self._checked(comm)
        with agreed(comm):
            batch = Batch(operands[0].shape, operands[1].shape, "A" * o.transpose_a + "B" * o.transpose_b)
        progress = ProgressReport(o.progress, comm.rank == 0 and not o.quiet)
        with (
            closing(progress),
            working_once(o.work_ahead(prod(batch.extents.values()))),
            Mesh(o.mesh or (comm.size,), comm, window=o.window, threads=o.threads, timeout=o.timeout) as mesh,
        ):
            set_threads(mesh.threads)
            with progress.stage("planning"):
                plan = self._plan(mesh, operands)
            if comm.rank == 0 and (o.dry_run or o.explain) and not o.quiet:
                self.frame.say(plan.explain() if o.explain else str(plan))
            if o.dry_run:
                return DONE
            require_free(comm, mesh.node_of, plan.peak_bytes if mesh.is_member else 0)
            with progress.stage("reading A and B" if o.files else "generating A and B"):
                a, b = (self._operand(mesh, plan, name, x) for name, x in zip("AB", operands, strict=True))
            c = DistArray.allocated(mesh, plan.c_shape, plan.c_dtype, plan.layouts["C"])
            with progress.stage("multiplying"):
                seconds = self._execute(plan, a, b, c)
            with progress.stage("checking the result"):
                verdict = self._is_right(a, b, c) if o.is_checked else None
            if verdict is False:
                raise VerificationError("the result is wrong: C · x differs from A · (B · x) for a random vector x")
            if o.output is not None:
                with progress.stage("writing C"):
                    c.save(o.output, format=o.format)
            self._report(plan, seconds, verdict)
        return DONE

    def _checked(self, comm: MPI.Intracomm) -> list[Operand]:
        """Return A and B as they are stored. Raises OptionError, FileFormatError, ShapeError on every rank."""
        o = self.options
        with agreed(comm):
            for name in UNUSED:
                if getattr(o, name):
                    flag = f"--{name.replace('_', '-')}"
                    raise OptionError(f"{flag}: is not supported for batches; leave it out")
            check_report("--json", o.json)
            if o.output is not None:
                check_dimensions(o.output, (1, 1, 1), o.format)
            if o.files:
                files = [open_array(path, o.dtype, o.format) for path in o.files]
                return [Operand(extents_of(file), file.dtype) for file in files]
            *batch, m, n, k = o.shape
            dtype = np.dtype(parse_dtype(o.dtype or DEFAULT_DTYPE))
            one = (k, m) if o.transpose_a else (m, k)
            other = (n, k) if o.transpose_b else (k, n)
        return [Operand((*batch, *one), dtype), Operand((*batch, *other), dtype)]

    def _plan(self, mesh: Mesh, operands: list[Operand]) -> BatchPlan:
        o = self.options
        with agreed(mesh.comm):
            texts = (o.layout_a, o.layout_b)
            a, b = (
                Operand(x.shape, x.dtype, None if text is None else placed(text, x.shape, mesh))
                for x, text in zip(operands, texts, strict=True)
            )
        options = ProductOptions(
            o.alpha, transpose_a=o.transpose_a, transpose_b=o.transpose_b, conjugate_a=o.conjugate_a,
            conjugate_b=o.conjugate_b, algorithm=o.algorithm, memory_limit=o.memory_limit,
            compute_dtype=o.compute_dtype, kernel=o.kernel, semiring=o.semiring, fast=o.fast,
        )
        plan = planned(a, b, mesh, o.layout_c, options)
        assert isinstance(plan, BatchPlan)
        return plan

    def _operand(self, mesh: Mesh, plan: BatchPlan, name: str, x: Operand) -> DistArray:
        """Return A or B, placed as the plan wants it, from its file or made up."""
        o = self.options
        if o.files:
            return as_array(load(o.files["AB".index(name)], mesh, plan.layouts[name], o.dtype, o.format))
        made = DistArray.allocated(mesh, x.shape, x.dtype, plan.layouts[name])
        fill(made.folded.tile, made.folded.region, generated(o.seed, name, x.dtype))
        made.keep_first_summand()
        return made

    def _execute(self, plan: BatchPlan, a: DistArray, b: DistArray, c: DistArray) -> list[float]:
        """Multiply as often as asked; the seconds of each timed repetition, of the slowest rank."""
        seconds = []
        warmup = self.options.untimed(False)
        for _ in range(warmup + self.options.repeat):
            barrier(plan.mesh.comm)
            start = time.perf_counter()
            plan.execute(a, b, c)
            seconds.append(time.perf_counter() - start)
        slowest = np.max(plan.mesh.comm.allgather(seconds[warmup:]), axis=0)
        return [float(second) for second in slowest]

    def _is_right(self, a: DistArray, b: DistArray, c: DistArray) -> bool:
        """True if C · x equals A · (B · x), within rounding, for random x of 1 and −1. Collective."""
        o, dtype = self.options, c.dtype
        signs = np.random.default_rng(o.seed).integers(0, 2, (c.shape[-1], 4))
        x = (signs if dtype.kind in "bu" else 2 * signs - 1).astype(dtype)
        expected, got = self._times(a, b, x), matmul(c, x, semiring=o.semiring).to_numpy()
        same = (expected == got) | ((expected != expected) & (got != got))
        if dtype.kind in "biu":
            return bool(same.all())
        sizes = _absolute(a), _absolute(b)
        if o.semiring == PLUS_TIMES.name:
            bound = np.abs(self._times(*sizes, np.abs(x))).astype(np.float64)
        else:  # a sum of three, or one of these
            most = [float(each.tile.real.max(initial=0)) for each in sizes]
            bound = np.float64(1 + c.mesh.comm.allreduce(sum(most)))
        wide = np.complex128 if dtype.kind == "c" else np.float64
        unit = 2.0**-8 if dtype == BFLOAT16 else float(np.finfo(dtype).eps)
        steps = 8 * (a.shape[-1] + a.shape[-2] + c.shape[-1])
        with np.errstate(all="ignore"):
            off = np.abs(expected.astype(wide) - got.astype(wide))
        return bool(np.all(same | (off <= unit * steps * bound)))

    def _times(self, a: DistArray, b: DistArray, x: Any) -> Any:
        """Alpha · op(A) @ (op(B) @ x), on every rank. Collective."""
        o = self.options
        types: dict[str, Any] = {"semiring": o.semiring, "compute_dtype": o.compute_dtype}
        inner = matmul(b, x, transpose_a=o.transpose_b, conjugate_a=o.conjugate_b, **types)
        return matmul(
            a, inner, alpha=o.alpha, transpose_a=o.transpose_a, conjugate_a=o.conjugate_a, **types
        ).to_numpy()

    def _report(self, plan: BatchPlan, seconds: list[float], verdict: bool | None) -> None:
        """Print and write the report. Raises FileFormatError on every rank."""
        o, comm = self.options, plan.mesh.comm
        words = sum(comm.allgather(plan.words.words_intra + plan.words.words_inter))
        batch = plan.choice.request.batch
        work = float(np.prod([float(extent) for extent in batch.extents.values()]))
        facts = {
            "a": batch.a, "b": batch.b, "c": plan.c_shape, "dtype": plan.c_dtype.name, "mesh": plan.mesh.grid.dims,
            "layouts": {x: str(layout) for x, layout in plan.layouts.items()}, "kernel": plan.kernel, "words": words,
            "seconds": seconds, "gflops": 2e-9 * work / min(seconds), "verified": verdict,
        }
        with agreed(comm):
            if comm.rank == 0:
                if not o.quiet and o.json != "-":
                    checked = "right" if verdict else "not asked for"
                    rate = f"{min(seconds):.4g} s, {facts['gflops']:.4g} GF/s"
                    self.frame.say(f"{plan}\ntime        {rate}\nverified    {checked}")
                write_json(self.frame, "--json", o.json, facts)


def _absolute(x: DistArray) -> DistArray:
    """Return the absolute values, placed alike. Collective."""
    made = DistArray.allocated(x.mesh, x.shape, x.dtype, x.layout)
    made.tile[...] = np.abs(x.tile)
    return made

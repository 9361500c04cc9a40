"""A run whose C is larger than memory: block by block into its file, beside a journal by which it is gone on with."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from rma_mm.command.frame import DONE
from rma_mm.command.jobs.bias import reread_bias
from rma_mm.command.jobs.job import Job
from rma_mm.command.jobs.report import Streamed, gather_facts, read_so_far
from rma_mm.errors import FileFormatError, OptionError, RmaError, VerificationError
from rma_mm.runtime.execution.executor import Progress
from rma_mm.runtime.execution.operands import Operand, Operands, ProductOptions
from rma_mm.runtime.files.formats import named_in
from rma_mm.runtime.files.journal import Journal, checksum, interrupted
from rma_mm.runtime.files.output import Output, Saving, is_resumable
from rma_mm.runtime.files.reread import reread
from rma_mm.runtime.matrices.filed import shifted, write
from rma_mm.runtime.products.blocks import BlockedProduct
from rma_mm.runtime.products.make_plan import operands_of
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.verification.check import Verdict
from rma_mm.runtime.verification.checked_product import verdict_of
from rma_mm.unfinished import JOURNAL, real_path
from rma_mm.windows.hosts.shm_limits import memory_free
from rma_mm.windows.waiting import largest

SHARE = 0.7
"""Fraction of the free memory that the ranks of a host use together if no limit is given; the rest caches files."""
SAME = (
    "transpose_a", "transpose_b", "conjugate_a", "conjugate_b", "alpha", "beta", "semiring", "compute_dtype",
    "bias_per", "activation", "result_dtype",
)
"""Options by which C would be another matrix."""
UNUSED = ("trace", "report", "picture", "frontier", "warmup", "layout_a", "layout_b", "layout_c")
"""Options that are of one product."""


class InBlocks:
    """The part of a `Job` that computes a C larger than memory, block by block. Collective throughout."""

    def __init__(self, job: Job, mesh: Mesh, shape: tuple[int, int, int]) -> None:
        self.job, self.options, self.comm, self.mesh, self.shape = job, job.options, job.comm, mesh, shape
        self.journal: Journal | None = None  # on rank 0, where the output's format can be gone on with
        self.has_journal = False
        self.done: dict[int, int] = {}  # number of each block that is whole → its checksum
        self.nbytes = 0  # bytes of C that all ranks have written
        self.written = 0.0  # seconds that this rank took to write

    def run(self) -> int:
        """Multiply the remaining blocks and give the result its final name. Raises RmaError on every rank."""
        o = self.options
        for name in UNUSED + ("repeat",) * (o.repeat > 1) + ("symmetric",) * (o.beta != 0):  # the same on every rank
            if getattr(o, name):
                raise OptionError(
                    f"--{name.replace('_', '-')}: is not supported if C is computed in blocks; leave it out"
                )
        how, begun = Saving.of(o.saving), self._begun()
        given = self._operands()
        if o.metrics is not None:
            self.mesh.metrics.write(o.metrics)
        self.job.check_start(given.a.shape, given.b.shape, given.c.shape, given.c.dtype)
        if o.dry_run:
            self._show(self._product(begun, how.shards or how.chunks))
            return DONE
        assert o.output is not None
        self.job.frame.interruption.losing = o.output
        output = self._output(how, given, begun)
        with output.removed_by_errors() if begun is None else nullcontext():
            with self.job.progress.stage("planning"):
                product = self._product(begun, output.unit)
            self._show(product)
            self.job.show_plan(product.first, self.mesh, self.shape)
            if begun is None and is_resumable(o.output, how):
                self._keep(output, product)
        if not is_resumable(o.output, how):
            self.job.frame.interruption.unfinished = output.temporary
        self.job.frame.has_begun = True
        return self._multiply(product, output)

    def _multiply(self, product: BlockedProduct, output: Output) -> int:
        o, blocks = self.options, product.blocks
        multiplying, start = self.mesh.metrics.tally.multiplying, time.perf_counter()
        try:
            self.done = self._whole(product, output)
            resumed, left = len(self.done), [number for number in range(len(blocks)) if number not in self.done]
            title = f"{len(left)} blocks"
            with self.job.progress.stage(title, lambda: read_so_far([product], lambda: self.nbytes)) as progress:
                whole, done = sum(blocks[number].size for number in left), 0
                for number in left:
                    part = blocks[number].size
                    show = progress and partial(_of_all, progress, done, part, whole)
                    self._block(product, output, number, f"block {number + 1} of {len(blocks)}", show)
                    done += part
            seconds = max(self.comm.allgather(time.perf_counter() - start))
            multiplying = self.mesh.metrics.tally.multiplying - multiplying
            with self.job.progress.stage("checking the result"):
                verdict = self._verdict(product, output) if o.is_checked else None
            self.job.require_unchanged()
        except RmaError as error:
            if not self.has_journal:
                output.discard()
                raise
            output.leave()
            kept = f"{len(self.done)} of {len(blocks)} blocks are done: --resume continues"
            raise type(error)(f"{error}; {kept}") from error
        if verdict is None or verdict.ok:
            self._publish(output)
        else:
            output.discard()
            self._forget()
        self._report(product, seconds, multiplying * 1e-9, verdict, resumed)
        product.close()
        if verdict is not None and not verdict.ok:
            raise VerificationError(f"the result is wrong: {verdict.reason}; nothing was written")
        return DONE

    # -- before -----------------------------------------------------------------------------------

    def _request(self) -> dict[str, Any]:
        """Return the facts that determine C, in JSON's types."""
        o = self.options
        files = {x: [file.path, *_identity(file.path)] for x, file in self.job.files.items()}
        bias = None if o.bias is None else [o.bias, *_identity(o.bias)]
        return {
            "shape": list(self.shape), "inputs": files, "bias": bias,
            "options": {name: str(getattr(o, name)) for name in SAME},
            "saving": {name: str(x) for name, x in o.saving.items()},
        }

    def _operands(self) -> Operands:
        """A, B and C as a whole. Raises what does not fit, on every rank."""
        names = {each.name for each in fields(ProductOptions)}
        how = self.job.how_to_multiply()
        options = ProductOptions(**{name: x for name, x in how.items() if name in names}).normalised()
        a, b = (Operand(file.shape, file.dtype) for file in (self.job.files["A"], self.job.files["B"]))
        with agreed(self.comm):
            return operands_of(a, b, self.mesh, None, options)

    def _begun(self) -> dict[str, Any] | None:
        """Return the facts of the interrupted job that this one resumes, or None for a new job."""
        o, found = self.options, None
        with agreed(self.comm):
            if self.comm.rank == 0:
                final = _journaled(o.output, o.format)
                if o.resume:
                    self.journal = Journal.resume(final)
                    self.journal.require(self._request())
                    found = self.journal.facts, self.journal.blocks
                elif os.path.lexists(final + JOURNAL):
                    raise FileFormatError(interrupted(final))
        told = self.comm.bcast(found)
        facts, self.done = told or (None, {})
        self.has_journal = facts is not None
        return facts

    def _product(self, begun: dict[str, Any] | None, unit: tuple[int, int] | None) -> BlockedProduct:
        o, files = self.options, self.job.files
        limit = o.memory_limit
        if limit is None:
            mates = self.mesh.node_of.count(self.mesh.node_of[self.mesh.rank])
            limit = -largest(self.comm, [-int(SHARE * memory_free()[0]) // mates])[0]
        cut = None if begun is None else (tuple(begun["cut"][0]), tuple(begun["cut"][1]))
        before = files.get("C") if o.beta != 0 else None
        return BlockedProduct(
            self.mesh, files["A"], files["B"], self.shape, before, unit, cut,
            **(self.job.how_to_multiply() | {"memory_limit": limit}),
        )

    def _show(self, product: BlockedProduct) -> None:
        o, (rows, cols) = self.options, map(len, product.block_shape)
        with agreed(self.comm):
            if self.comm.rank == 0 and (o.explain or o.dry_run) and not o.quiet:
                first = product.blocks[0].shape
                self.job.frame.say(
                    f"blocks      {rows} x {cols} of C, of {first[0]} x {first[1]} elements at most, by this plan each",
                    f"files       {product.bytes_read} bytes read in all",
                    product.first.explain(o.explain == "all") if o.explain else str(product.first),
                )

    def _output(self, how: Saving, given: Operands, begun: dict[str, Any] | None) -> Output:
        """Return the file in the making. Raises FileFormatError on every rank."""
        path = self.options.output
        assert path is not None
        if begun is not None:
            return Output.resumed(self.comm, path, how, begun["output"])
        return Output.begin(self.comm, path, (self.shape[0], self.shape[1]), given.c.dtype, how)

    def _keep(self, output: Output, product: BlockedProduct) -> None:
        """Begin a journal; from now on the file stays where the job ends early."""
        self.has_journal = True
        if self.comm.rank == 0:
            kept = output.kept()
            facts = self._request() | {"cut": [list(starts) for starts in product.block_shape], "output": kept}
            self.journal = Journal.begin(kept["final"], facts)

    def _whole(self, product: BlockedProduct, output: Output) -> dict[int, int]:
        """Return those blocks listed in the journal that the file still holds as they were computed. Collective."""
        found: dict[int, int] = {}
        layout, mesh, rank = product.first.layouts["C"], self.mesh.grid, self.comm.rank
        for number, expected in self.done.items():
            rows, cols = product.blocks[number]
            mine, own = layout.region((len(rows), len(cols)), mesh, rank), 0
            with agreed(self.comm):
                if mine and self.mesh.is_member:
                    place = shifted(mine, (rows.start, cols.start))
                    part = np.empty(place.shape, product.first.c_dtype)
                    output.source().read(place, part)
                    own = checksum(place, part)
            if sum(self.comm.allgather(own)) % 2**64 == expected:
                found[number] = expected
        return found

    # -- the blocks -------------------------------------------------------------------------------

    def _block(
        self, product: BlockedProduct, output: Output, number: int, title: str, progress: Progress | None
    ) -> None:
        """Compute a block, write it, and note it once it is on the disk of every rank."""
        region = product.blocks[number]
        try:
            c = product.multiply(region, progress)
            begun, at = time.perf_counter(), (region[0].start, region[1].start)
            with agreed(self.comm):
                placed = write(c, output, at)
        except FileFormatError as error:
            raise FileFormatError(f"{title}: {error}") from error
        own = checksum(shifted(placed.region, at), placed.tile) if placed.mesh.is_member else 0
        total = sum(self.comm.allgather(own)) % 2**64
        with agreed(self.comm):
            if self.journal is not None:
                self.journal.note(number, total)
        self.done[number] = total
        self.nbytes += region.size * product.first.c_dtype.itemsize
        self.written += time.perf_counter() - begun

    # -- after ------------------------------------------------------------------------------------

    def _verdict(self, product: BlockedProduct, output: Output) -> Verdict:
        """True if the written file is the product of the input files, which are read again piece by piece."""
        o, files, failures = self.options, self.job.files, list[Exception]()
        given = self._operands()
        epilogue = given.options.epilogue
        if epilogue is not None and o.bias is not None:
            epilogue = replace(epilogue, bias=reread_bias(self.comm, o.bias, epilogue.bias, o.dtype, o.format))
            given = replace(given, options=replace(given.options, epilogue=epilogue))
        seen = {x: reread(self.comm, f.path, f.again, f.dtype, f.shape, failures) for x, f in files.items()}
        dtype, shape = product.first.c_dtype, (self.shape[0], self.shape[1])
        c = reread(self.comm, output.temporary, lambda: output.source().again(), dtype, shape, failures)
        before = None
        if product.before is not None:
            file = files["C"]
            before = reread(self.comm, file.path, file.again, file.dtype, file.shape).astype(dtype)
        found = verdict_of(given, seen["A"], seen["B"], c, before, o.seed)
        with agreed(self.comm):
            if failures:
                raise FileFormatError(f"a file cannot be read again to check the result: {failures[0]}")
        return found

    def _publish(self, output: Output) -> None:
        """Give the result its name, and forget the journal. Raises FileFormatError on every rank."""
        with agreed(self.comm):
            if self.comm.rank == 0:
                output.sink.publish()
        self._forget()
        self.job.frame.interruption.unfinished = self.job.frame.interruption.losing = ""

    def _forget(self) -> None:
        """Remove the unfinished output and its journal."""
        if self.journal is not None:
            self.journal.remove()

    def _report(
        self, product: BlockedProduct, seconds: float, multiplying: float, verdict: Verdict | None, before: int
    ) -> None:
        o, plan = self.options, product.first
        plan.words = product.words
        nbytes = self.shape[0] * self.shape[1] * plan.c_dtype.itemsize
        took = max(self.comm.allgather(self.written))
        written = {"bytes": nbytes, "seconds": took, "bytes_per_second": nbytes / took if took else None}
        streamed = Streamed([product], product.executing, multiplying).all_ranks(self.mesh)
        read = {"bytes": 0, "seconds": 0.0, "bytes_per_second": None}
        moved = {"read": read, "written": written, "streamed": streamed}
        facts = gather_facts(
            plan, self.mesh, self.shape, [seconds], verdict, moved, kernel=o.kernel, measure_blas=o.measures_blas
        )
        facts.json["blocks"] = {"of": [len(starts) for starts in product.block_shape], "resumed": before}
        self.job.report(facts, verdict is None or verdict.ok, self.mesh)


def _of_all(progress: Progress, done: float, part: float, whole: float, now: float, total: float) -> None:
    progress(done + part * now / max(1.0, total), whole)


def _journaled(path: str | None, kind: str | None) -> str:
    """Return the path that gets its final name at the end: the one with a journal, if any, else the store."""
    assert path is not None
    name, _ = named_in(path, kind)
    words = name.inner.split("/") if name.inner else []
    every = [real_path(os.path.join(name.path, *words[:count])) for count in range(len(words) + 1)]
    return next((each for each in every if os.path.lexists(each + JOURNAL)), every[0])


def _identity(path: str) -> list[int]:
    """Bytes, and the time of the last change, of a file, or of a store's folder."""
    try:
        found = os.stat(named_in(path)[0].path)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]

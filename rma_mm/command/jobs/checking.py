"""Is what will be under the output's name right? The file as the disk holds it, against the inputs read once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.command.jobs.bias import reread_bias
from rma_mm.command.options.run import RunOptions
from rma_mm.errors import FileFormatError
from rma_mm.geometry.span import Region
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.files.formats import Source
from rma_mm.runtime.files.output import Output
from rma_mm.runtime.files.reread import Strips, reread
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.verification.check import Verdict
from rma_mm.runtime.verification.checked_product import verdict_of
from rma_mm.runtime.verification.parts import MatrixView, Transposable

if TYPE_CHECKING:
    from mpi4py import MPI

COMPARED = 2**20  # elements of a tile that are compared with the file at a time


@dataclass
class Check:
    """A product, and where its operands and its result are."""

    options: RunOptions
    comm: MPI.Intracomm
    plan: Plan
    files: Mapping[str, Source]  # headers of those operands that came from files
    matrices: Mapping[str, DistMatrix | None]  # A, B, C, and C0 as "before", as they are in memory
    output: Output | None  # the file that C was written to
    failures: list[Exception] = field(default_factory=list)  # errors met while matrices were read to be checked

    def verdict(self) -> Verdict:
        """True if the result is right. Collective. Raises FileFormatError if a file cannot be read again."""
        c = self._c()
        if isinstance(c, Verdict):
            return c
        given = self.plan.spec
        given = replace(given, options=replace(given.options, epilogue=self._epilogue()))
        a, b = self._operand("A"), self._operand("B")
        found = verdict_of(given, a, b, c, self._before(), self.options.seed)
        with agreed(self.comm):
            if self.failures:
                raise FileFormatError(f"a file cannot be read again to check the result: {self.failures[0]}")
        return found

    def _operand(self, name: str) -> Transposable:
        made = self._read(name) if name in self.files else self.matrices[name]
        assert made is not None
        return made

    def _before(self) -> MatrixView | None:
        return self._read("C").astype(self.plan.c_dtype) if "C" in self.files and self.options.beta != 0 else None

    def _read(self, name: str) -> Strips:
        file = self.files[name]
        stays = name != "C" and self.plan.choice.operands[name].chunks is not None
        failures = self.failures if stays else None
        return reread(self.comm, file.path, file.again, file.dtype, file.shape, failures)

    def _epilogue(self) -> Epilogue | None:
        epilogue: Epilogue | None = self.plan.options.epilogue
        o = self.options
        if epilogue is None or o.bias is None:
            return epilogue
        return replace(epilogue, bias=reread_bias(self.comm, o.bias, epilogue.bias, o.dtype, o.format))

    def _c(self) -> MatrixView | Verdict:
        """Return the matrix to check: the written file, after comparing it bit by bit, or C."""
        c = self.matrices["C"]
        assert c is not None
        if self.output is None:
            return c
        with agreed(self.comm):
            mine = difference(self.output, c) if not c.layout.partial else ""
        found = self.comm.allgather(mine)
        if reason := next(filter(None, found), ""):
            return Verdict(False, None, reason)
        written = self.output
        return reread(
            self.comm, written.temporary, lambda: written.source().again(), self.plan.c_dtype, self.plan.c_shape,
            self.failures if self.plan.spec.files else None,
        )


def difference(output: Output, c: DistMatrix) -> str:
    """Return the place where the file differs from this rank's part of C; empty if they agree.

    Local. Raises FileFormatError.
    """
    region, tile = c.region, c.tile
    if not region:
        return ""
    file = output.source()
    top = 0
    for rows in region[0].pieces(max(1, COMPARED // len(region[1]))):
        part = np.ascontiguousarray(tile[top : top + len(rows)])
        read = np.empty_like(part)
        file.read(Region((rows, region[1])), read)
        wrong = (part.view(np.uint8) != read.view(np.uint8)).reshape(*part.shape, -1).any(axis=2)
        if wrong.any():
            row, col = np.argwhere(wrong)[0]
            where = f"C[{rows.indices[row]}, {region[1].indices[col]}]"
            return f"{where} is {read[row, col]} in the file, and was computed as {part[row, col]}"
        top += len(rows)
    return ""

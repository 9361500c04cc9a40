"""A matrix written to a `.npy` file by all ranks, each its own part."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import FileFormatError, named
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.unfinished import Unfinished, temporary_name
from rma_mm.runtime.ranks.agreement import agree_error

if TYPE_CHECKING:
    from mpi4py import MPI

SMALL_BOX = 256
"""Elements below which a box of a many-run region is not worth a slice of its own."""


@dataclass(frozen=True)
class NpyOutput:
    """A `.npy` file in the making: written beside its final name, renamed when whole.

    All ranks `begin` it, each writes its own part, all `finish` it; `collective` is the three as a context. On one
    rank alone: `create`, `write`, then `publish` or `discard`.
    """

    path: str
    """The final name, links followed."""
    temporary: str
    """Where the parts go until then."""
    shape: tuple[int, int]
    """Rows and columns."""
    stored: np.dtype[Any]
    """Element type in the file: |V2 for bfloat16. Rows are contiguous."""
    offset: int
    """Bytes before the first element."""
    held: Unfinished | None = field(default=None, compare=False, repr=False)
    """The file, on the rank that made it."""

    @staticmethod
    def create(path: str | os.PathLike[str], shape: tuple[int, int], dtype: np.dtype[Any]) -> NpyOutput:
        """Reserve the whole file under a temporary name, so that what can fail fails before the multiplication.

        Raises FileFormatError naming the path and why it cannot be written.
        """
        held = Unfinished(f"output {named(path)}", path)
        stored = np.dtype("V2") if dtype == BFLOAT16 else np.dtype(dtype)
        header = _header(shape, stored)
        held.reserve(header, len(header) + prod(shape) * stored.itemsize)
        return NpyOutput(held.path, held.temporary, shape, stored, len(header), held)

    @staticmethod
    def begin(
        comm: MPI.Intracomm, path: str | os.PathLike[str], shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> NpyOutput:
        """`create` on rank 0, the same value on all ranks. Collective. Raises FileFormatError on every rank."""
        made: NpyOutput | None = None
        error: Exception | None = None
        try:
            made = NpyOutput.create(path, shape, dtype) if comm.rank == 0 else None
        except FileFormatError as caught:
            error = caught
        agree_error(comm, error)
        told = comm.bcast(made and replace(made, held=None), 0)
        output: NpyOutput = made or told
        try:
            output.check()
        except FileFormatError as caught:
            error = caught
        output.agree(comm, error)
        return output

    def finish(self, comm: MPI.Intracomm, error: Exception | None = None) -> None:
        """Publish the file if no rank brings an error, else remove it and raise that on every rank. Collective."""
        self.agree(comm, error)
        try:
            if comm.rank == 0:
                self.publish()
        except FileFormatError as caught:
            error = caught
        self.agree(comm, error)

    @staticmethod
    @contextmanager
    def collective(
        comm: MPI.Intracomm, path: str | os.PathLike[str], shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> Iterator[NpyOutput]:
        """An output that is published at the end of the block, or removed if it fails on any rank. Collective."""
        output = NpyOutput.begin(comm, path, shape, dtype)
        error: Exception | None = None
        try:
            yield output
        except Exception as caught:  # noqa: BLE001 - raised again, on every rank
            error = caught
        output.finish(comm, error)

    def agree(self, comm: MPI.Intracomm, error: Exception | None) -> None:
        """Raise on every rank where one brings an error, with nothing left on the disk. Collective."""
        try:
            agree_error(comm, error)
        except Exception:
            self.discard()
            raise

    @staticmethod
    def unfinished(path: str | os.PathLike[str]) -> str:
        """The name under which this process would write `path` until it is whole, if nothing is in the way."""
        return temporary_name(os.path.realpath(path), str(os.getpid()))

    def check(self) -> None:
        """Raise FileFormatError where this rank cannot write, say because its node does not see the directory."""
        try:
            with _opened(self.temporary):
                pass
        except OSError as error:
            raise FileFormatError(
                f"output {named(self.path)}: a rank on {os.uname().nodename} cannot write there: {error.strerror}; "
                f"all nodes must see the directory"
            ) from None

    def write(self, region: Region, tile: NDArray[Any]) -> None:
        """Write `tile` (region.shape) as the part of the matrix in `region`, down to the disk. Raises FileFormatError.

        Through a map: pieces are too small for calls where columns are dealt out. It lives only as long as this call,
        so that mapped pages do not pile up.
        """
        if not region:
            return
        length = self.offset + prod(self.shape) * self.stored.itemsize
        try:
            with _opened(self.temporary) as descriptor:
                if os.fstat(descriptor).st_size < length:
                    raise OSError(f"{named(self.temporary)} was truncated meanwhile")
                with mmap.mmap(descriptor, length, access=mmap.ACCESS_WRITE) as memory:
                    for part, at in _boxes(region):
                        self._matrix(memory)[part] = tile[at].view(self.stored)
                os.fsync(descriptor)  # each rank: what is kept back may be kept by its own node
        except (OSError, ValueError) as error:
            raise FileFormatError(f"output {named(self.path)}: {error}") from None

    def _matrix(self, memory: mmap.mmap) -> NDArray[Any]:
        """The matrix in the mapped bytes. A temporary of its statement: a map with views cannot be closed."""
        return np.ndarray(self.shape, self.stored, memory, self.offset)

    def publish(self) -> None:
        """Give the file its final name; every rank has written. Raises FileFormatError. On the rank that made it."""
        assert self.held is not None
        self.held.publish()

    def discard(self) -> None:
        """Remove what was written, on the rank that made it; nothing happens elsewhere, or once it is published."""
        if self.held is not None:
            self.held.discard()


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor to read and write by."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _header(shape: tuple[int, int], stored: np.dtype[Any]) -> bytes:
    """A .npy header of format version 1.0, padded as NumPy pads."""
    text = io.BytesIO()
    fields = {"descr": stored.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(text, fields)
    return text.getvalue()


def _boxes(region: Region) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Pairs of indices (into the matrix, into the packed tile) that cover `region`."""
    count = prod(len(span.runs) for span in region)
    if count > 1 and region.size < SMALL_BOX * count:
        return [(region.selector(), (slice(None), slice(None)))]
    return [(box.selector(), region.locate(box).selector()) for box in region.run_boxes()]

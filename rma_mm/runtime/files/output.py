"""A matrix written to a file by all ranks, each its own part, in any format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.span import Region
from rma_mm.runtime.files.formats import Path, Sink, Source, format_of
from rma_mm.runtime.ranks.agreement import agreed

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Output:
    """A file in the making: written beside its final name, renamed when whole.

    All ranks `begin` it, each writes its own part, all `finish` it; `collective` is the three as a context.
    """

    comm: MPI.Intracomm
    sink: Sink

    @staticmethod
    def begin(comm: MPI.Intracomm, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Output:
        """A file in the format of its name, made on rank 0. Collective. Raises FileFormatError on every rank."""
        with agreed(comm):
            made = format_of(path).create(path, shape, dtype) if comm.rank == 0 else None
        told = comm.bcast(made, 0)
        output = Output(comm, made or told)
        with output.removed_by_errors():
            output.sink.check()
        return output

    def finish(self) -> None:
        """Publish the file; where that fails, remove it and raise on every rank. Collective."""
        with self.removed_by_errors():
            if self.comm.rank == 0:
                self.sink.publish()

    @staticmethod
    @contextmanager
    def collective(comm: MPI.Intracomm, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Output]:
        """An output that is published at the end of the block, or removed if it fails on any rank. Collective."""
        output = Output.begin(comm, path, shape, dtype)
        with output.removed_by_errors():
            yield output
        output.finish()

    @contextmanager
    def removed_by_errors(self) -> Iterator[None]:
        """A block of which an error is raised on every rank, with nothing left on the disk. Collective."""
        try:
            with agreed(self.comm):
                yield
        except Exception:
            self.discard()
            raise

    @property
    def temporary(self) -> str:
        """Where the parts go until the file is whole."""
        return self.sink.temporary

    def write(self, region: Region, tile: NDArray[Any]) -> None:
        """Write this rank's part, down to the disk. Local; raises FileFormatError."""
        self.sink.write(region, tile)

    def source(self) -> Source:
        """What was written, as the disk has it. Local; raises FileFormatError."""
        return self.sink.source()

    def discard(self) -> None:
        """Remove what was written, unless it is published. Local; of effect on rank 0."""
        self.sink.discard()

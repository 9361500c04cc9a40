"""A matrix written to a file by all ranks, each its own part, in any format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.span import Region
from rma_mm.runtime.files.formats import Path, Shape, Sink, Source, format_of
from rma_mm.runtime.ranks.agreement import agree_error

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
    def begin(comm: MPI.Intracomm, path: Path, shape: Shape, dtype: np.dtype[Any]) -> Output:
        """A file in the format of its name, made on rank 0. Collective. Raises FileFormatError on every rank."""
        made: Sink | None = None
        error: Exception | None = None
        try:
            made = format_of(path).create(path, shape, dtype) if comm.rank == 0 else None
        except Exception as caught:  # noqa: BLE001 - raised on every rank
            error = caught
        agree_error(comm, error)
        told = comm.bcast(made, 0)
        output = Output(comm, made or told)
        try:
            output.sink.check()
        except Exception as caught:  # noqa: BLE001 - raised on every rank
            error = caught
        output.agree(error)
        return output

    def finish(self, error: Exception | None = None) -> None:
        """Publish the file if no rank brings an error, else remove it and raise that on every rank. Collective."""
        self.agree(error)
        try:
            if self.comm.rank == 0:
                self.sink.publish()
        except Exception as caught:  # noqa: BLE001 - raised on every rank
            error = caught
        self.agree(error)

    @staticmethod
    @contextmanager
    def collective(comm: MPI.Intracomm, path: Path, shape: Shape, dtype: np.dtype[Any]) -> Iterator[Output]:
        """An output that is published at the end of the block, or removed if it fails on any rank. Collective."""
        output = Output.begin(comm, path, shape, dtype)
        error: Exception | None = None
        try:
            yield output
        except Exception as caught:  # noqa: BLE001 - raised again, on every rank
            error = caught
        output.finish(error)

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank where one brings an error, with nothing left on the disk. Collective."""
        try:
            agree_error(self.comm, error)
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

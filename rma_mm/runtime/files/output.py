"""A matrix written to a file by all ranks, each its own part, in any format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import FileFormatError, OptionError, display_path, quoted
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.formats import FORMATS, Path, Shape, Sink, Source, named_in
from rma_mm.runtime.files.version import Version
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.unfinished import Unfinished

if TYPE_CHECKING:
    from mpi4py import MPI


def _is_extents(got: object) -> bool:
    return isinstance(got, tuple) and len(got) == 2 and all(type(n) is int and n > 0 for n in got)


EXTENTS = "two whole numbers of at least 1, rows and columns", _is_extents
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "format": ("the name of a format, as 'h5'", lambda got: isinstance(got, str)),
    "chunks": EXTENTS,
    "shards": EXTENTS,
    "compress": ("'zstd' or 'none'", lambda got: got in ("zstd", "none")),
}
"""Rules of the options of `Saving`: text and test."""


FOREIGN = {
    ".csv", ".tsv", ".txt", ".json", ".mat", ".mtx", ".npz", ".pkl", ".pickle", ".parquet", ".feather", ".arrow",
    ".nc", ".pt", ".pth", ".xls", ".xlsx", ".tif", ".tiff", ".png", ".gz", ".zip",
}
"""Endings of files that hold something else: such a file with the bytes of a `.npy` would mislead."""


@dataclass(frozen=True)
class Saving:
    """Options of writing a matrix; None leaves a choice to the format."""

    format: str | None = None  # the format, as "h5", where the file's name does not end so
    chunks: Shape | None = None  # rows and columns that are compressed together
    shards: Shape | None = None  # rows and columns of chunks that lie in one file
    compress: str | None = None  # by what: "zstd" or "none"

    @staticmethod
    def of(options: Mapping[str, Any]) -> Saving:
        """Return the options of `save`, checked. Raises OptionError."""
        for key, got in options.items():
            if key not in KINDS:
                raise OptionError(f"save: got the option {quoted(key)}; must be one of {', '.join(KINDS)}")
            rule, fits = KINDS[key]
            if got is not None and not fits(got):
                raise OptionError(f"{key}: got {quoted(got)}; must be {rule}")
        return Saving(**options)

    def create(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Sink:
        """Return a file in the making. Local; raises FileFormatError, OptionError."""
        name, form = named_in(path, self.format)
        if name.part is not None:
            raise FileFormatError(f"output {display_path(name.text)}: names a part of a matrix; a whole one is written")
        ending = os.path.splitext(name.path)[1].lower()
        if form is FORMATS[""] and self.format is None and ending in FOREIGN:
            known = ", ".join(sorted(suffix for suffix in FORMATS if suffix))
            raise FileFormatError(
                f"output {display_path(name.text)}: {ending} files are not written; there are {known}; or "
                "say what it is in spite of its name: --format npy, format='npy'"
            )
        said = {key: x for key, x in vars(self).items() if key != "format" and x is not None}
        for key in said:
            if key not in form.options:
                others = sorted({suffix for suffix, other in FORMATS.items() if key in other.options})
                raise OptionError(f"{key}: output {display_path(name.text)} has none; {', '.join(others)} files have")
        return form.create(name.whole, shape, dtype, **said)


@dataclass(frozen=True)
class Output:
    """A file in the making: written beside its final name, renamed when whole.

    All ranks `begin` it, each writes its own part, all `finish` it; `collective` is the three as a context.
    """

    comm: MPI.Intracomm
    sink: Sink

    @staticmethod
    def begin(
        comm: MPI.Intracomm, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], how: Saving = Saving()
    ) -> Output:
        """Return a file in the format of its name, made on rank 0. Collective. Raises FileFormatError on every rank."""
        with agreed(comm):
            made = how.create(path, shape, dtype) if comm.rank == 0 else None
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
    def resumed(comm: MPI.Intracomm, path: Path, how: Saving, facts: Mapping[str, Any]) -> Output:
        """Return the output that an interrupted job has begun, from its `facts`, which rank 0 has.

        Collective; as `begin`.
        """
        with agreed(comm):
            made = _again(path, how, facts) if comm.rank == 0 else None
        told = comm.bcast(made, 0)
        output = Output(comm, made or told)
        with agreed(comm):
            output.sink.check()
        return output

    def kept(self) -> dict[str, Any]:
        """Keep the temporary file if the job ends early; return JSON from which it can be reopened. On rank 0."""
        held: Unfinished = vars(self.sink)["held"]
        held.keep()
        return {"final": held.path} | {
            name: (x.name if name == "dtype" else x.str) if isinstance(x, np.dtype)
            else [x.path, *x.identity] if isinstance(x, Version) else x
            for name, x in vars(self.sink).items() if name != "held"
        }

    def leave(self) -> None:
        """Let it be, to be gone on with. Local; of effect on rank 0."""
        held: Unfinished | None = vars(self.sink)["held"]
        if held is not None:
            held.leave()

    @staticmethod
    @contextmanager
    def collective(
        comm: MPI.Intracomm, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], how: Saving = Saving()
    ) -> Iterator[Output]:
        """An output that is published at the end of the block, or removed if it fails on any rank. Collective."""
        output = Output.begin(comm, path, shape, dtype, how)
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
    def unit(self) -> Shape | None:
        """Rows and columns of the pieces of which each is written by one rank; None if any part may be."""
        unit: Shape | None = getattr(self.sink, "unit", None)
        return unit

    @property
    def temporary(self) -> str:
        return self.sink.temporary

    def write(self, region: Region, tile: NDArray[Any]) -> None:
        self.sink.write(region, tile)

    def source(self) -> Source:
        return self.sink.source()

    def discard(self) -> None:
        self.sink.discard()


def is_resumable(path: Path, how: Saving) -> bool:
    return named_in(path, how.format)[1].sink is not None


def _again(path: Path, how: Saving, facts: Mapping[str, Any]) -> Sink:
    """Return the sink that has these facts. Raises FileFormatError."""
    kind = named_in(path, how.format)[1].sink
    assert kind is not None
    said: dict[str, Any] = {}
    for name, x in facts.items():
        if name in ("dtype", "stored"):
            said[name] = parse_dtype(x) if name == "dtype" else np.dtype(x)
        elif name == "before" and x is not None:
            said[name] = Version(x[0], (x[1], x[2], x[3], x[4]))
        else:
            said[name] = tuple(x) if isinstance(x, list) else x
    final = said.pop("final")
    held = Unfinished.adopted(f"output {display_path(path)}", final, said["temporary"], is_folder="unit" in said)
    held.keep()
    made: Sink = kind(**said, held=held)
    return made

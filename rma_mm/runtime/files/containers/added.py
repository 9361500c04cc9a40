"""A matrix that is added to a file: in a copy of what is there, which stays as it is until the whole is renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field

from rma_mm.classes import dataclass
from rma_mm.errors import FileFormatError, display_path
from rma_mm.runtime.files.dense import DenseSink
from rma_mm.runtime.files.version import Version
from rma_mm.unfinished import Unfinished


@dataclass(frozen=True)
class AddedSink(DenseSink):
    """A file in the making that holds a matrix beside others: what a `Sink` does, except for `source`."""

    inner: str = ""  # the matrix's name in the file
    before: Version | None = field(default=None, compare=False)  # the file that was there

    def publish(self) -> None:
        """Give the file its final name. Raises FileFormatError if another program has changed it meanwhile."""
        if self.before is not None:
            self.before.check()
        elif os.path.lexists(self.path):
            raise FileFormatError(f"output {display_path(self.path)}: was made by another program meanwhile")
        super().publish()


@contextmanager
def in_the_making(what: str, path: str, is_folder: bool = False) -> Iterator[Unfinished]:
    """A new file, or folder, beside `path`, removed where the block fails. Raises FileFormatError naming `what`."""
    held = Unfinished(what, path, is_folder)
    try:
        yield held
    except FileFormatError:
        held.discard()
        raise
    except OSError as error:
        held.discard()
        raise FileFormatError(f"{what}: {error.strerror or error}") from None

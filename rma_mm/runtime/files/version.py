"""Tell versions of a file apart, as one that changes while it is in use gives parts of both."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from rma_mm.classes import dataclass
from rma_mm.errors import FileFormatError, MissingFileError, display_path


@dataclass(frozen=True)
class Version:
    """A file as it was when it was first looked at."""

    path: str
    identity: tuple[int, int, int, int]  # device, inode, size and time of the last change

    @staticmethod
    def of(path: str) -> Version | None:
        """Return the version of a file as it is now; None if there is no file."""
        try:
            return Version(path, identity_of(os.stat(path)))
        except (OSError, ValueError):  # ValueError: a null character
            return None

    @property
    def size(self) -> int:
        return self.identity[2]

    def check(self, descriptor: int | None = None) -> None:
        """Raise FileFormatError if the file, or the one that is open, is another one by now."""
        try:
            found = identity_of(os.stat(self.path) if descriptor is None else os.fstat(descriptor))
        except OSError as error:
            raise FileFormatError(f"{display_path(self.path)}: cannot be read any more: {error.strerror}") from None
        if found != self.identity:
            raise FileFormatError(
                f"{display_path(self.path)}: was replaced or changed meanwhile; "
                f"what was read of it may be of both versions"
            )


def identity_of(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def examined(path: str, suffix: str = "") -> Iterator[tuple[int, Version]]:
    """Return a descriptor to read a file's header by, and the file's version. Raises FileFormatError."""
    try:
        with opened(path, suffix) as descriptor:
            yield descriptor, Version(path, identity_of(os.fstat(descriptor)))
    except OSError as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else FileFormatError
        raise kind(f"{display_path(path)}: cannot be read: {error.strerror}") from None


@contextmanager
def opened(path: str, suffix: str = "") -> Iterator[int]:
    """A descriptor to read a regular file by. Raises OSError; FileFormatError for others, as a FIFO: it would hang.

    suffix: of the files that are read so, to be named in the error.
    """
    if "\0" in path:
        raise OSError(errno.EINVAL, "a path holds no null character")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            needed = f"; a {suffix} file is needed" if suffix else ""
            raise FileFormatError(f"{display_path(path)}: is {kind}{needed}")
        yield descriptor
    finally:
        os.close(descriptor)

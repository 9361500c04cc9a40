"""HDF5 files by their library, and what in them names other files: looked at before the library follows it.

Links, external storage and virtual datasets may name any file, themselves among them. The library follows all of them
without a word, and waits without end if one is a FIFO.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from itertools import count
from typing import Any

from rma_mm.classes import dataclass
from rma_mm.errors import FileFormatError, display_path, truncate
from rma_mm.runtime.files.containers.packages import package, refused_by
from rma_mm.runtime.files.external import external, is_allowed
from rma_mm.runtime.files.names import joined
from rma_mm.runtime.files.version import examined
from rma_mm.unfinished import SUFFIX

MOST_LINKS = 16  # soft links that are followed on the way to a dataset; the library follows as many
MOST_FILES = 8  # files that are opened on the way to a dataset
MOST_NESTED = 8  # virtual datasets that may be made of one another
MOST_BLOCKS = 10_000  # files that the pattern of a virtual dataset may name


@contextmanager
def library_file(path: str) -> Iterator[Any]:
    """The file by the library, for reading. Raises FileFormatError, for what goes wrong inside too."""
    h5py = library(path)
    locking = False if path.endswith(SUFFIX) else "best-effort"  # of what is in the making, this job holds the lock
    with library_errors(display_path(path)), h5py.File(path, "r", locking=locking) as file:
        yield file


def library(path: str) -> Any:
    """h5py. Raises FileFormatError if it is not installed."""
    return package("h5py", "hdf5", path)


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, FileFormatError):
            raise
        if "unable to lock file" in str(error):
            fix = "close it there, or say HDF5_USE_FILE_LOCKING=FALSE if nobody writes to it"
            raise FileFormatError(f"{what}: is locked by a program that writes to it; {fix}") from None
        raise refused_by("HDF5", what, error) from None


def resolved(name: str, held: Any, file: str, inner: str) -> tuple[str, str] | None:
    """Return (file, object in it) for a name, following soft links; None if it does not exist.

    After a link to another file it is that file and what is left of the name, as yet unresolved. Raises FileFormatError
    unless such links are allowed, and for one that leads to what is no regular file.
    """
    import h5py

    words, done, links = inner.split("/"), "", 0
    while words:
        word = words.pop(0)
        if word in ("", "."):
            continue
        group = held[done or "/"]
        link = group.get(word, getlink=True) if isinstance(group, h5py.Group) else None
        if link is None:
            return None
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > MOST_LINKS:
                raise FileFormatError(f"{name}: is reached by more than {MOST_LINKS} links")
            words = link.path.split("/") + words
            done = "" if link.path.startswith("/") else done
        elif isinstance(link, h5py.ExternalLink):
            if not is_allowed():
                raise external(name, "is reached by an external link to", link.filename)
            return _beside(name, file, link.filename), "/".join([link.path, *words])
        else:
            done += f"/{word}"
    return file, done or "/"


def check_no_links(what: str, held: Any, inner: str) -> None:
    """Raise FileFormatError if a place to write to is reached by a link: it may lie in another file."""
    import h5py

    done = "/"
    for word in filter(None, inner.split("/")):
        group = held[done]
        link = group.get(word, getlink=True) if isinstance(group, h5py.Group) else None
        if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            raise FileFormatError(f"{what}: {truncate(word)} is a link in that file; nothing is written through one")
        if link is None:
            return
        done = f"{done.rstrip('/')}/{word}"


def check_sources(name: str, dataset: Any, file: str) -> None:
    """Raise FileFormatError if elements of a dataset lie in other files, unless that is allowed and they can be read.

    The datasets in the same file that a virtual one is made of are looked into.
    """
    _Sources(name).check(dataset, file, ())


@dataclass
class _Sources:
    """The datasets that a virtual one is made of, each looked at once."""

    name: str  # the virtual dataset, for messages
    checked: set[str] = field(default_factory=set)

    def check(self, dataset: Any, file: str, around: tuple[str, ...]) -> None:
        """Check a dataset, which `around` are made of."""
        here = joined(os.path.realpath(file), dataset.name)
        if here in around or len(around) > MOST_NESTED:
            raise FileFormatError(f"{self.name}: is a virtual dataset of itself, or of too many of one another")
        if here in self.checked:
            return
        self.checked.add(here)
        for target, _, _ in dataset.external or ():
            if not is_allowed():
                raise external(self.name, "has its elements in the file", target)
            _beside(self.name, file, target, os.environ.get("HDF5_EXTFILE_PREFIX", os.curdir))
        if not dataset.is_virtual:
            return
        for target, inner in {(source.file_name, source.dset_name) for source in dataset.virtual_sources()}:
            if target != "." and not is_allowed():
                raise external(self.name, "is a virtual dataset of the file", target)
            for path in [file] if target == "." else _blocks(self.name, file, target):
                for one in _numbered(inner):
                    if not self._is_there(path, one, (*around, here)):
                        break

    def _is_there(self, file: str, inner: str, around: tuple[str, ...]) -> bool:
        """Check a dataset by its name; False if there is none, which reads as fill values."""
        import h5py

        for _ in range(MOST_FILES):
            with library_file(file) as held:
                place = resolved(self.name, held, file, inner)
                if place is None:
                    return False
                if place[0] == file:
                    found = held[place[1]]
                    if isinstance(found, h5py.Dataset):
                        self.check(found, file, around)
                    return True
            file, inner = place
        return False


def _blocks(name: str, file: str, pattern: str) -> Iterator[str]:
    """Yield the files of a virtual dataset: one, or those of a pattern with %b, up to the first missing one."""
    for n, target in enumerate(_numbered(pattern)):
        if n and not os.path.exists(os.path.join(os.path.dirname(file), target)):
            return
        yield _beside(name, file, target)


def _numbered(pattern: str) -> Iterator[str]:
    """Yield a name, or the names of a pattern with %b."""
    if "%b" not in pattern:
        yield pattern.replace("%%", "%")
        return
    for n in count():
        if n > MOST_BLOCKS:
            raise FileFormatError(f"{truncate(pattern)}: stands for more than {MOST_BLOCKS} names")
        yield pattern.replace("%b", str(n)).replace("%%", "%")


def _beside(name: str, file: str, target: str, folder: str | None = None) -> str:
    """The path of a file that another names, as the library looks for it. Raises FileFormatError if it is none."""
    folder = os.path.dirname(file) if folder is None else folder.replace("${ORIGIN}", os.path.dirname(file) or ".")
    path = os.path.join(folder, target)
    if not os.path.exists(path):
        raise FileFormatError(f"{name}: is put together from files of which {display_path(path)} is not there")
    with examined(path):
        return path

"""Matrices whose elements lie in files that another file names: refused, unless the user allows it.

A file that came from elsewhere may name any file that its reader can read. So an HDF5 file that names others, a link
inside a Zarr store, and an index of tensors that names files outside its own folder are followed on request only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rma_mm.errors import FileFormatError, display_path

_ALLOWED: ContextVar[bool] = ContextVar("rma_mm_allow_external", default=False)


def is_allowed() -> bool:
    return _ALLOWED.get()


@contextmanager
def allowing(allow_external: bool | None) -> Iterator[None]:
    """A block in which files that other files name are read, or refused; None leaves it as it is around the block."""
    token = _ALLOWED.set(is_allowed() if allow_external is None else bool(allow_external))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def external(name: str, how: str, target: str | os.PathLike[str]) -> FileFormatError:
    return FileFormatError(
        f"{name}: {how} {display_path(target)}, which is not read unless you allow it: "
        f"--allow-external, allow_external=True"
    )


def check_unlinked(name: str, root: str, path: str) -> None:
    """Raise FileFormatError if a symbolic link lies between the folder `root` and `path` in it, and none is allowed."""
    at, between = root, "" if is_allowed() else os.path.relpath(path, root)
    for word in between.split(os.sep):
        at = os.path.join(at, word)
        if word and os.path.islink(at):
            raise external(name, "leads by a symbolic link to", os.path.realpath(path))

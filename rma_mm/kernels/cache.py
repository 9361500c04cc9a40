"""What is kept on disk between runs: a folder of the user's, made anew whenever these sources change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path


@cache
def cache_folder() -> Path | None:
    """Where compiled code and measurements are kept; None where nothing can be written.

    RMA_MM_CACHE names another place than the user's cache.
    """
    try:
        folder = _home() / f"kernels-{_sources()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies there is run
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: nobody's home
        return None
    return folder


def _home() -> Path:
    named = os.environ.get("RMA_MM_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rma_mm"


def _sources() -> str:
    """A name for the sources as they are now: code compiled from others must not be taken."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


_turn = threading.RLock()
_depth = 0


@contextmanager
def alone() -> Iterator[None]:
    """Hold the lock of the folder: other processes of this machine wait meanwhile. Without a folder nobody waits."""
    global _depth  # noqa: PLW0603 - a process that holds the lock must not wait for itself
    folder = cache_folder()
    with ExitStack() as held, _turn:
        if folder is not None and not _depth:
            with suppress(OSError):  # no locks here, or no folder any more: better twice the work than none
                file = held.enter_context((folder / "lock").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1

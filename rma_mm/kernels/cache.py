"""Cache on disk: a folder of the user's, renewed whenever these sources change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

STICKY = 0o1000  # the bit of a folder in which everybody may make files, but take away only their own: /tmp


@cache
def cache_folder() -> Path | None:
    return folder_of(f"kernels-{_sources()}")


def folder_of(name: str) -> Path | None:
    """A folder of our own in the cache, made where it is not there; None if nothing can be written, or others could.

    Those of another user are never taken, root's neither, since nothing would be written there: what lies here is run.
    """
    try:
        if why_not(home()):
            return None
        folder = home() / name
        for each in reversed([folder, *folder.parents]):
            each.mkdir(mode=0o700, exist_ok=True)
        if why_not(folder):
            return None
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: nobody's home
        return None
    return folder


def refusal() -> str:
    """Return why an existing cache is not used, with the remedy; empty if nothing is wrong."""
    try:
        folders = (home(), home() / "machines", home() / f"kernels-{_sources()}")
        why = next(filter(None, map(why_not, folders)), "")
    except (OSError, RuntimeError):
        return ""
    return why and (
        f"cache: {why}, and could put code there that you would run; all is compiled and measured anew in each run. "
        f"Take away their rights (chmod go-w), or name a folder of your own by RMA_MM_CACHE"
    )


def why_not(path: Path) -> str:
    """Return the reason why others could write or replace a path; empty if they cannot.

    What ssh asks: nobody but the user and root owns any of them, and no group and nobody else may write; but above,
    folders with the sticky bit are fine.
    """
    real = path.resolve()
    for at in (real, *real.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            found = at.lstat()
            is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & STICKY
            if found.st_uid not in (os.geteuid(), 0):
                return f"{at} belongs to another user (number {found.st_uid})"
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
                return f"others may write to {at} (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def read_own(file: Path) -> bytes | None:
    """Return the content of a file of the cache; None unless it is a plain file that only this user can write."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            found = os.fstat(opened.fileno())
            is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_nlink > 1
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or is_shared:
                return None
            return opened.read()
    except OSError:
        return None


def write_own(file: Path, content: bytes) -> None:
    """Write a file of the cache that only this user can read and write: under its name once it is complete.

    Raises OSError.
    """
    beside = file.with_name(f".{platform.node()}.{os.getpid()}.{threading.get_ident()}")
    with suppress(FileNotFoundError):
        beside.unlink()
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(beside, flags, 0o600), "wb") as opened:
            opened.write(content)
        beside.replace(file)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def home() -> Path:
    """Return the folder of the cache, which may not exist. Raises RuntimeError for a user without a home."""
    named = os.environ.get("RMA_MM_CACHE")
    if named:
        return Path(named).expanduser().resolve()
    users = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return ((users if users.is_absolute() else Path.home() / ".cache") / "rma_mm").resolve()


def clean() -> tuple[int, int]:
    """Delete what this package keeps in the cache; files of others stay.

    Returns how many files there were, and their bytes. Raises OSError.
    """
    count = nbytes = 0
    for folder in (*home().glob("kernels-*"), home() / "machines"):
        files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
        count, nbytes = count + len(files), nbytes + sum(file.stat().st_size for file in files)
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
    return count, nbytes


@cache
def _sources() -> str:
    """Return a name for the sources as they were at the first look: code compiled from others must not be taken."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


_lock = threading.RLock()
_depth = 0


@contextmanager
def alone() -> Iterator[None]:
    """Hold the lock of the folder: other processes of this machine wait meanwhile. Without a folder nobody waits."""
    global _depth  # noqa: PLW0603 - a process that holds the lock must not wait for itself
    folder = cache_folder()
    with ExitStack() as held, _lock:
        if folder is not None and not _depth:
            with suppress(OSError):  # no locks here, or no folder any more: better twice the work than none
                file = held.enter_context((folder / "lock").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1

"""Files that are written beside their final names, which they take once they are whole: all that commands write.

Until then a file is open to nobody but its owner, and its writer holds a lock on it. A lock ends with its process, on
whichever host that is: what nobody holds was left behind, and the next writer of that name removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b

from rma_mm.errors import FileFormatError, named

SUFFIX = ".partial"
TOKEN = re.compile(r"\d+(-[0-9a-f]{8})?")
"""What stands between name and suffix: the writer's process, and a random number where that was taken."""
LONGEST_TOKEN = 20
TRIES = 8
"""Names that are tried before giving up."""
PRIVATE = 0o600


class Unfinished:
    """A file in the making, held by the process that made it. Errors name `what`, as "output C.npy"."""

    def __init__(self, what: str, path: str | os.PathLike[str]) -> None:
        """Raises FileFormatError where `path` cannot become a file. What dead writers of it left is removed."""
        self.what, self.descriptor = what, -1
        check_target(what, path)
        self.path = os.path.realpath(path)
        """The final name, links followed."""
        with self._named():
            remove_left_behind(self.path)
            self.temporary, self.descriptor = self._made()

    @contextmanager
    def _named(self, doing: str = "") -> Iterator[None]:
        """Errors of the system as FileFormatError; the file is gone then."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise FileFormatError(f"{self.what}: {doing}{error.strerror}") from None

    def _made(self) -> tuple[str, int]:
        """A new file that nobody else opens, and that this process holds."""
        for turn in range(TRIES):
            token = f"{os.getpid()}-{secrets.token_hex(4)}" if turn else str(os.getpid())
            name = temporary_name(self.path, token)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                descriptor = os.open(name, flags, PRIVATE)
            except FileExistsError:
                continue
            with suppress(OSError):  # a file system without locks: then nobody takes it for left behind either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is(name, descriptor):  # else somebody took it for left behind before it was locked
                return name, descriptor
            os.close(descriptor)
        raise FileExistsError(errno.EEXIST, f"{named(name)} is in the way; remove it")

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # other processes, which are told of what it belongs to, do not hold it

    def reserve(self, head: bytes, size: int) -> None:
        """Make the file `size` bytes long, on disk, and begin it with `head`. Raises FileFormatError."""
        with self._named(f"cannot write {size} bytes: "):
            write_at(self.descriptor, head, 0)
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(self.descriptor, 0, size)  # a full disk found now is no SIGBUS later
            else:  # macOS
                os.truncate(self.descriptor, size)

    def publish(self) -> None:
        """Give the file its final name, and the mode of the file that it replaces. Raises FileFormatError."""
        with self._named():
            if not _is(self.temporary, self.descriptor):
                raise FileNotFoundError(errno.ENOENT, f"{named(self.temporary)} was removed or replaced meanwhile")
            self._set_mode()
            os.fsync(self.descriptor)  # a name that survives a power cut must not outlive its contents
            os.replace(self.temporary, self.path)
        self._close()

    def _set_mode(self) -> None:
        """That of the file to be replaced, and its owner and group; of a new file what the umask leaves."""
        try:
            old = os.stat(self.path)
        except FileNotFoundError:
            os.fchmod(self.descriptor, 0o666 & ~_umask())
            return
        mode = stat.S_IMODE(old.st_mode) & 0o777
        with suppress(OSError):
            os.fchown(self.descriptor, old.st_uid, -1)
        try:
            os.fchown(self.descriptor, -1, old.st_gid)
        except OSError:
            mode &= ~0o070  # what one group may read is not for another
        os.fchmod(self.descriptor, mode)

    def discard(self) -> None:
        """Remove what was written; nothing happens where it is gone or has its final name."""
        if self.descriptor >= 0:
            with suppress(OSError):
                os.unlink(self.temporary)
            self._close()

    def _close(self) -> None:
        with suppress(OSError):
            os.close(self.descriptor)
        self.descriptor = -1


def check_target(what: str, path: str | os.PathLike[str]) -> None:
    """Raise FileFormatError where `path` cannot become a file."""
    final = os.path.realpath(path)
    directory = os.path.dirname(final)
    there = os.path.exists(final)
    why = ""
    if os.path.isdir(final) or not os.path.basename(os.fspath(path)):
        why = "is a directory; name a file in it"
    elif os.path.islink(final):
        why = "is a loop of symbolic links"
    elif not os.path.isdir(directory):
        why = f"the directory {named(directory)} does not exist"
    elif there and not os.path.isfile(final):
        why = "exists and is not a regular file"
    elif there and not os.access(final, os.W_OK):
        why = "exists and is read-only"
    elif not os.access(directory, os.W_OK | os.X_OK):
        why = f"the directory {named(directory)} cannot be written to"
    elif len(os.fsencode(os.path.basename(final))) > _longest_name(directory):
        why = f"a name in {named(directory)} has at most {_longest_name(directory)} bytes"
    if why:
        raise FileFormatError(f"{what}: {why}")


def temporary_name(final: str, token: str) -> str:
    """The name beside `final` under which it is written; shortened where a name may not be that long."""
    directory, name = os.path.split(final)
    room = _longest_name(directory) - LONGEST_TOKEN - len(f"..{SUFFIX}")
    raw = os.fsencode(name)
    if len(raw) > room:
        digest = blake2b(raw, digest_size=8).hexdigest()
        name = raw[: room - len(digest) - 1].decode("utf-8", "ignore") + "~" + digest
    return os.path.join(directory, f".{name}.{token}{SUFFIX}")


def name_to_be(path: str | os.PathLike[str]) -> str:
    """The name under which this process would write `path` until it is whole, if nothing is in the way."""
    return temporary_name(os.path.realpath(path), str(os.getpid()))


def remove_left_behind(final: str) -> None:
    """Remove what processes that have ended left of `final`: this user's files that no process holds."""
    directory, pattern = os.path.split(temporary_name(final, "*"))
    start, end = pattern.split("*") if pattern.count("*") == 1 else pattern.rsplit("*", 1)
    for name in os.listdir(directory):
        if name.startswith(start) and name.endswith(end) and TOKEN.fullmatch(name[len(start) : -len(end)]):
            with suppress(OSError):  # held, another user's, on a file system without locks, gone already
                _remove_unheld(os.path.join(directory, name))


def _remove_unheld(name: str) -> None:
    """Remove a file of this user that no process holds. Raises OSError otherwise."""
    descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(name, descriptor):
                os.unlink(name)
    finally:
        os.close(descriptor)


def write_whole(what: str, path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all. Raises FileFormatError naming `what`, as "--json r.json"."""
    file = Unfinished(what, path)
    raw = content.encode() if isinstance(content, str) else content
    file.reserve(raw, len(raw))
    file.publish()


def write_at(descriptor: int, raw: bytes | memoryview, offset: int) -> None:
    """Write all of `raw`. Raises OSError."""
    rest = memoryview(raw)
    while rest:
        done = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[done:], offset + done


def _is(name: str, descriptor: int) -> bool:
    """Whether the name is that of the open file."""
    try:
        return os.path.samestat(os.lstat(name), os.fstat(descriptor))
    except OSError:
        return False


def _umask() -> int:
    """What this process leaves out of the modes of new files."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def _longest_name(directory: str) -> int:
    """Bytes of a name in this directory."""
    try:
        return os.pathconf(directory or ".", "PC_NAME_MAX")
    except (OSError, ValueError):
        return 255

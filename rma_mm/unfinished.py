"""Files and folders that are written beside their final names, which they take once whole: all that commands write.

Until then one is open to nobody but its owner, and its writer holds a lock on it. A lock ends with its process, on
whichever host that is: what nobody holds was left behind, and the next writer of that name removes it.

A folder is written in a folder of the temporary name, as `new`, and renamed out of it. No call replaces a folder by
another: one that is there is moved to `old` beside the new one first, and removed when that has its name. A crash
between the two leaves neither under the final name and both under the temporary one; the old one is put back by the
next writer of that name, or by whoever ends the job early.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b

from rma_mm.errors import FileFormatError, display_path

SUFFIX = ".partial"
JOURNAL = ".journal"  # behind the final name: what of it is done, by which a job that was ended is gone on with
TOKEN = re.compile(r"\d+(-[0-9a-f]{8})?")
"""Text between name and suffix: the writer's process, and a random number if that name was taken."""
TEMPORARY = re.compile(rf"({TOKEN.pattern}){re.escape(SUFFIX)}\Z")
LONGEST_TOKEN = 20
TRIES = 8  # names that are tried before giving up
PRIVATE = 0o600
PRIVATE_FOLDER = 0o700
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
NEW, OLD = "new", "old"
"""Names in the temporary folder: of the new file, and of the old one that waits to be removed."""
HELD: set[str] = set()  # the temporary names of all that this process holds


class Unfinished:
    """A file, or folder, in the making, held by the process that made it. Errors name `what`, as "output C.npy"."""

    def __init__(self, what: str, path: str | os.PathLike[str], is_folder: bool = False) -> None:
        """Prepare to write `path`, and remove what dead writers of it left. Raise FileFormatError if it cannot be."""
        self.what, self.is_folder, self.descriptor = what, is_folder, -1
        check_target(what, path, is_folder)
        self.path = real_path(path)  # the final name, links followed
        with self._named():
            remove_left_behind(self.path)  # which may put a folder back that it had replaced
            self.replaces = os.path.lexists(self.path)
            self.temporary, self.descriptor = self._new_file()
            HELD.add(self.temporary)
        self.content = os.path.join(self.temporary, NEW) if is_folder else self.temporary
        """Path that gets the final name: the file, or the folder that its writer makes."""

    @contextmanager
    def _named(self, doing: str = "") -> Iterator[None]:
        """Errors of the system as FileFormatError; the file is gone then."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise FileFormatError(f"{self.what}: {doing}{error.strerror}") from None

    def _new_file(self) -> tuple[str, int]:
        """Return a new file that nobody else opens, and that this process holds."""
        for turn in range(TRIES):
            token = f"{os.getpid()}-{os.urandom(4).hex()}" if turn else str(os.getpid())
            name = temporary_name(self.path, token)
            try:
                descriptor = self._opened(name)
            except FileExistsError:
                continue
            with suppress(OSError):  # a file system without locks: then nobody takes it for left behind either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is(name, descriptor):  # else somebody took it for left behind before it was locked
                return name, descriptor
            os.close(descriptor)
        raise FileExistsError(errno.EEXIST, f"{display_path(name)} is in the way; remove it")

    def _opened(self, name: str) -> int:
        """Return a new file, or folder, and a descriptor of it. Raises OSError."""
        if self.is_folder:
            os.mkdir(name, PRIVATE_FOLDER)
            return os.open(name, FOLDER)
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE)

    @classmethod
    def adopted(cls, what: str, path: str, temporary: str, is_folder: bool = False) -> Unfinished:
        """Take over a temporary file that a process has left when it ended. Raises FileFormatError."""
        check_target(what, path, is_folder)
        made = cls.__new__(cls)
        made.what, made.is_folder, made.descriptor = what, is_folder, -1
        made.path, made.temporary = real_path(path), temporary
        made.replaces = os.path.lexists(made.path)
        made.content = os.path.join(temporary, NEW) if is_folder else temporary
        if os.path.dirname(temporary) != os.path.dirname(made.path) or not TEMPORARY.search(temporary):
            raise FileFormatError(f"{what}: {display_path(temporary)} is not an unfinished file")
        try:
            made.descriptor = os.open(temporary, FOLDER if is_folder else os.O_RDWR | os.O_NOFOLLOW)
            fcntl.flock(made.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_held = error.errno in (errno.EWOULDBLOCK, errno.EACCES) and made.descriptor >= 0
            why = "another process writes it" if is_held else error.strerror
            raise FileFormatError(f"{what}: cannot continue {display_path(temporary)}: {why}") from None
        return made

    def keep(self) -> None:
        HELD.discard(self.temporary)

    def leave(self) -> None:
        """Let it stay, for another process, or a later call, to go on with."""
        self.keep()
        self._close()

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
        """Rename the file to its final name, with the mode of the file it replaces. Raises FileFormatError.

        A folder replaces one that was there when it was begun; one that was made since is an error.
        """
        with self._named():
            if not _is(self.temporary, self.descriptor):
                raise FileNotFoundError(
                    errno.ENOENT, f"{display_path(self.temporary)} was removed or replaced meanwhile"
                )
            if self.is_folder:
                self._publish_folder()
            else:
                self._set_mode(self.descriptor, 0o666)
                os.fsync(self.descriptor)  # a name that survives a power cut must not outlive its contents
                os.replace(self.temporary, self.path)
        self._close()

    def _publish_folder(self) -> None:
        """Rename the folder after moving the replaced one away, and remove that. Raises OSError."""
        descriptor = os.open(self.content, FOLDER)
        try:
            self._set_mode(descriptor, 0o777)
        finally:
            os.close(descriptor)
        sync_folders(self.content)
        if self.replaces:
            old = os.path.join(self.temporary, OLD)
            os.mkdir(old)
            os.rename(self.path, os.path.join(old, os.path.basename(self.path)))
        os.rename(self.content, self.path)
        sync(os.path.dirname(self.path))  # before the old one goes
        with suppress(OSError):
            remove(self.temporary)

    def _set_mode(self, descriptor: int, usual: int) -> None:
        """Set the mode, owner and group of the replaced file; for a new one, the umask's mode."""
        try:
            old = os.stat(self.path)
        except FileNotFoundError:
            os.fchmod(descriptor, usual & ~_umask())
            return
        mode = stat.S_IMODE(old.st_mode) & 0o777
        with suppress(OSError):
            os.fchown(descriptor, old.st_uid, -1)
        try:
            os.fchown(descriptor, -1, old.st_gid)
        except OSError:
            mode &= ~0o070  # what one group may read is not for another
        os.fchmod(descriptor, mode)

    def discard(self) -> None:
        """Remove the unfinished file; do nothing if it is gone or has its final name."""
        if self.descriptor >= 0:
            with suppress(OSError):
                remove(self.temporary)
            self._close()

    def _close(self) -> None:
        with suppress(OSError):
            os.close(self.descriptor)
        self.descriptor = -1
        HELD.discard(self.temporary)


def check_target(what: str, path: str | os.PathLike[str], is_folder: bool = False) -> None:
    """Raise FileFormatError if `path` cannot become a file, or folder."""
    final = real_path(path)
    directory = os.path.dirname(final)
    there = os.path.exists(final)
    why = ""
    if (os.path.isdir(final) and not is_folder) or not os.path.basename(os.fspath(path)):
        why = "is a directory; name a file in it"
    elif os.path.islink(final):
        why = "is a loop of symbolic links"
    elif not os.path.isdir(directory):
        why = f"the directory {display_path(directory)} does not exist"
    elif there and not (os.path.isdir if is_folder else os.path.isfile)(final):
        why = f"exists and is not {'a folder' if is_folder else 'a regular file'}"
    elif there and not os.access(final, os.W_OK):
        why = "exists and is read-only"
    elif not os.access(directory, os.W_OK | os.X_OK):
        why = f"the directory {display_path(directory)} cannot be written to"
    elif len(os.fsencode(os.path.basename(final))) > _longest_name(directory):
        why = f"a name in {display_path(directory)} has at most {_longest_name(directory)} bytes"
    else:
        import tempfile

        try:
            tempfile.TemporaryFile(dir=directory).close()  # root may do anything where no file can be made, as in /proc
        except OSError as error:
            why = f"the directory {display_path(directory)} cannot be written to: {error.strerror}"
    if why:
        raise FileFormatError(f"{what}: {why}")


def real_path(path: str | os.PathLike[str]) -> str:
    """Return a path without links. Raises FileFormatError if it begins in a working directory that is gone."""
    try:
        return os.path.realpath(path)
    except FileNotFoundError:
        raise FileFormatError(f"{display_path(path)}: the working directory was removed; change to another") from None


def temporary_name(final: str, token: str) -> str:
    """Return the name beside `final` under which it is written; shortened where a name may not be that long."""
    directory, name = os.path.split(final)
    room = _longest_name(directory) - LONGEST_TOKEN - len(f"..{SUFFIX}")
    raw = os.fsencode(name)
    if len(raw) > room:
        digest = blake2b(raw, digest_size=8).hexdigest()
        name = raw[: room - len(digest) - 1].decode("utf-8", "ignore") + "~" + digest
    return os.path.join(directory, f".{name}.{token}{SUFFIX}")


def remove_left_behind(final: str) -> None:
    """Remove unfinished files of `final` that ended processes of this user left."""
    if os.path.lexists(final + JOURNAL):  # it is to be gone on with
        return
    directory, pattern = os.path.split(temporary_name(final, "*"))
    start, end = pattern.split("*") if pattern.count("*") == 1 else pattern.rsplit("*", 1)
    for name in os.listdir(directory):
        if name.startswith(start) and name.endswith(end) and TOKEN.fullmatch(name[len(start) : -len(end)]):
            with suppress(OSError):  # held, another user's, on a file system without locks, gone already
                _remove_unheld(os.path.join(directory, name))


def _remove_unheld(name: str) -> None:
    """Remove a file, or folder, of this user that no process holds. Raises OSError otherwise."""
    is_folder = stat.S_ISDIR(os.lstat(name).st_mode)
    descriptor = os.open(name, FOLDER if is_folder else os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if (is_folder or stat.S_ISREG(found.st_mode)) and found.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(name, descriptor):
                remove(name)
    finally:
        os.close(descriptor)


def remove(name: str) -> None:
    """Remove the file, folder or link of this temporary name; links are not followed. Raises OSError.

    The folder that a folder was about to replace gets its name back, unless the name is taken.
    """
    directory, entry = os.path.split(name)
    with ExitStack() as opened:
        parent = _descend(opened, directory or ".", os.O_RDONLY | os.O_DIRECTORY)
        if not stat.S_ISDIR(os.lstat(entry, dir_fd=parent).st_mode):
            os.unlink(entry, dir_fd=parent)
            return
        folder = _descend(opened, entry, FOLDER, parent)
        _restore(opened, directory, entry, parent, folder)
        gone = TEMPORARY.sub(f"{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}", entry)
        # at once for all who write in it, except for files that are just being opened
        os.rename(entry, gone, src_dir_fd=parent, dst_dir_fd=parent)
        if not _is(gone, folder, parent):
            raise FileExistsError(errno.EEXIST, f"{display_path(name)} was replaced meanwhile")
        shutil.rmtree(gone, ignore_errors=True, dir_fd=parent)
        if _is(gone, folder, parent):
            shutil.rmtree(gone, dir_fd=parent)


def _restore(opened: ExitStack, directory: str, entry: str, parent: int, folder: int) -> None:
    """Give a folder that was about to be replaced its name back. Raises OSError if `old` belongs to somebody else.

    Nobody vouches for what lies in `old`: a store that was unpacked from an archive may bring such a folder along. So
    only a real folder is moved, whose name is the one that `entry` is the temporary name of, and only beside `entry`.
    """
    token = TEMPORARY.search(entry)
    if OLD not in os.listdir(folder) or not stat.S_ISDIR(os.lstat(OLD, dir_fd=folder).st_mode):
        return
    old = _descend(opened, OLD, FOLDER, folder)
    if os.fstat(old).st_uid != os.fstat(folder).st_uid:
        raise PermissionError(errno.EPERM, f"{OLD} in {display_path(entry)} belongs to another user")
    for final in os.listdir(old):
        expected = token and os.path.basename(temporary_name(os.path.join(directory, final), token[1]))
        if expected == entry and stat.S_ISDIR(os.lstat(final, dir_fd=old).st_mode):
            with suppress(OSError):  # the new one is there: no folder replaces one that holds something
                os.rename(final, final, src_dir_fd=old, dst_dir_fd=parent)


def _descend(opened: ExitStack, name: str, flags: int, parent: int | None = None) -> int:
    """Return a descriptor, closed with `opened`. Raises OSError."""
    descriptor = os.open(name, flags, dir_fd=parent)
    opened.callback(os.close, descriptor)
    return descriptor


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


def sync_folders(path: str) -> None:
    """Have the names in a folder, and in all in it, on the disk. Raises OSError."""
    for folder, _, _ in os.walk(path):
        sync(folder)


def sync(path: str) -> None:
    """Sync a file's content, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is(name: str, descriptor: int, parent: int | None = None) -> bool:
    """True if the name, in the open folder `parent`, is that of the open file."""
    try:
        return os.path.samestat(os.lstat(name, dir_fd=parent), os.fstat(descriptor))
    except OSError:
        return False


def _umask() -> int:
    """Return the permission bits that this process masks in new files."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def _longest_name(directory: str) -> int:
    """Return bytes of a name in this directory."""
    try:
        return os.pathconf(directory or ".", "PC_NAME_MAX")
    except (OSError, ValueError):
        return 255

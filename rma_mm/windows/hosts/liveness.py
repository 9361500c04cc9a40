"""Detect ranks of the same host that stand still.

Each process has a page of memory, which the others map by way of /proc: what it is in, and beats. From the first mesh
on, a helper thread counts beats, whatever the rank computes; it calls no MPI. While a rank is in a call of this package
its thread looks at the pages of the ranks of its node. One without a beat for the time limit of a mesh ends the job,

- where its process is stopped (SIGSTOP, a debugger), or has ended;
- where it is in a call of this package, and uses no processor time either: it waits for a disk, or for swapped memory.

So a program may compute between two calls for as long as it likes, within a call in C that holds the GIL too. A rank
that runs and will never come is not found: to the others it is a rank that computes.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rma_mm.errors import OptionError, quoted

VARIABLE = "RMA_MM_TIMEOUT"
USUAL, LEAST = 20.0, 1.0  # seconds after which a rank that stands still is lost, where nothing is said, and at least
INTERVAL = 0.5  # seconds between two beats, and two looks, at most
QUIET = 0.6  # seconds without a beat after which the process is looked at
OVERDUE = 1.5  # seconds after which a rank ends because others end after Ctrl-C, whatever its main thread is in
STUCK = 3.0  # seconds that MPI_Abort may take before the process ends itself
HEARD = 0.3  # seconds for mpiexec to read the message, which it loses where the job ends before

PAGE, SHOWN, LINE = 4096, 128, 64  # bytes of a page, those that tell what it is in, and of a line behind them
BEATS, CALLS, BLOCKS, PRODUCT, DOING, ENDING, INTERRUPTED = range(7)
"""Cells of a page: beats; calls and other blocks; product; activity within it; whether a rank said why the job ends;
whether a rank ends after Ctrl-C."""
NAME = slice(64, SHOWN)  # where the name of the call is
ACTIVITIES = (
    "", "meeting all ranks", "multiplying", "get from rank {}", "accumulate to rank {}", "group transfer",
    "waiting for ranks of its node", "barrier", "waiting for all ranks to end",
)
BEGIN, MULTIPLY, GET, ACCUMULATE, GROUP, NODE, BARRIER, END = range(1, len(ACTIVITIES))
REASONS = {
    "T": "it is stopped, as by SIGSTOP", "t": "a debugger has stopped it", "Z": "it has ended", "X": "it has ended",
    "D": "it waits for a disk, or for swapped memory",
}
"""Descriptions of process states in /proc."""
GONE = "TtZX"  # states in which a rank does not continue by itself


def activity(kind: int, rank: int) -> int:
    return kind | rank << 8


def activity_text(value: int) -> str:
    return ACTIVITIES[value & 255].format(value >> 8)


def timeout_of(given: object, environment: Mapping[str, str]) -> float:
    """Return the time limit in seconds: the given one, the environment's, or 20. Raises OptionError."""
    name, value = ("timeout", given) if given is not None else (VARIABLE, environment.get(VARIABLE) or USUAL)
    with suppress(TypeError, ValueError, OverflowError):
        seconds = float(value) if not isinstance(value, bool) else 0.0  # type: ignore[arg-type]
        if LEAST <= seconds < math.inf:
            return seconds
    raise OptionError(f"{name}: got {quoted(value)}; must be a number of seconds, at least {LEAST:g}, as 20")


# -- this process ---------------------------------------------------------------------------------


def _new_page() -> tuple[int, mmap.mmap]:
    """Return the file of a new page, -1 if no other process can map it, and the page."""
    try:
        file = os.memfd_create("rma_mm")
        os.ftruncate(file, PAGE)
        return file, mmap.mmap(file, PAGE)
    except (AttributeError, OSError):
        return -1, mmap.mmap(-1, PAGE)


_FILE, _PAGE = _new_page()
CELLS = memoryview(_PAGE).cast("q")
"""This process's. A store into a cell takes some 30 ns."""


def _address(page: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


def cell_address(cell: int) -> int:
    """Return the address of a cell of this process."""
    return _address(_PAGE) + CELLS.itemsize * cell


class Identity(NamedTuple):
    """Identity of a process and its host."""

    host: str  # its host's name
    sight: tuple[str, ...]
    """Facts shared by processes that see each other in /proc; empty if its page cannot be mapped by others."""
    process: int
    file: int  # of its page

    @staticmethod
    def own(host: str) -> Identity:
        sight: tuple[str, ...] = ()
        with suppress(OSError):
            sight = (*machine(), os.readlink("/proc/self/ns/pid")) if _FILE >= 0 else ()
        return Identity(host, sight, os.getpid(), _FILE)


def by_sight(node_of: Sequence[int], identities: Sequence[Identity]) -> list[int]:
    """Return, by rank, a number shared by the ranks of a node that see each other's processes."""
    seen = [(node, each.sight or each) for node, each in zip(node_of, identities, strict=True)]
    return [seen.index(each) for each in seen]


def machine() -> tuple[str, str]:
    with suppress(OSError):
        return platform.node(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node(), sys.platform


def enter_call(name: bytes) -> None:
    """This rank enters a call of the package, which may be within another."""
    if not CELLS[CALLS]:
        _PAGE[NAME] = name
        CELLS[PRODUCT] = CELLS[DOING] = 0
    CELLS[CALLS] += 1


def leave_call() -> None:
    CELLS[CALLS] -= 1


def call_name(name: str) -> bytes:
    length = SHOWN - NAME.start
    return name.encode()[:length].ljust(length, b"\0")


def is_ending() -> bool:
    return bool(CELLS[ENDING])


def shown() -> bytes:
    return _PAGE[:SHOWN]


def operation(page: bytes) -> str:
    """Describe what a process was last doing, from its page.

    >>> enter_call(call_name("matmul"))
    >>> CELLS[PRODUCT], CELLS[DOING] = 17, activity(GET, 2)
    >>> operation(shown())
    'matmul, product 17, get from rank 2'
    >>> leave_call()
    >>> operation(shown())
    'a computation of its own after matmul, product 17'
    """
    cells = memoryview(page).cast("q")
    call = page[NAME].rstrip(b"\0").decode(errors="replace")
    number = f"product {cells[PRODUCT]}" if cells[PRODUCT] else ""
    doing = activity_text(cells[DOING]) if cells[CALLS] else ""
    words = ", ".join(filter(None, (call, number, doing)))
    return words if cells[CALLS] or not words else f"a computation of its own after {words}"


# -- the others of this host ----------------------------------------------------------------------


class PeerProcess:
    """Another process of this host, as this one sees it."""

    def __init__(self, identity: Identity) -> None:
        """Map the shared page; raise OSError if it cannot be mapped."""
        self.process = identity.process
        self.path = f"/proc/{identity.process}/fd/{identity.file}"
        file = os.open(self.path, os.O_RDWR)
        try:
            self.page = mmap.mmap(file, PAGE)
        finally:
            os.close(file)
        self.cells = memoryview(self.page).cast("q")
        self.address = _address(self.page)
        self.state = ""  # as /proc says; empty while it beats, or where /proc says nothing
        self._beats, self._used, self._looked = -1, -1, 0.0
        self.moved = 0.0  # when it was last seen to run

    def look(self, now: float, is_new: bool) -> None:
        """Has it moved? is_new: this process stood still itself until now."""
        if now == self._looked:
            return
        self._looked = now
        if is_new or self.cells[BEATS] != self._beats:
            self._beats, self.moved, self.state = self.cells[BEATS], now, ""
        elif now - self.moved > QUIET:
            self.state, used = _state_of(self.process)
            if used != self._used:
                self._used, self.moved = used, now

    def is_lost(self, now: float, timeout: float) -> bool:
        """True if it has stood still for so long that it will not come."""
        is_within = self.cells[CALLS] or self.cells[BLOCKS]
        return now - self.moved > timeout and bool(is_within or (self.state and self.state in GONE))


def _state_of(process: int) -> tuple[str, int]:
    """Return the state of a process, and the processor time that it has used; ("", 0) where that cannot be read."""
    try:
        text = Path(f"/proc/{process}/stat").read_bytes()  # its name may be cut inside a character
    except FileNotFoundError:
        return "X", 0
    except OSError:
        return "", 0
    words = text[text.rindex(b")") + 2 :].split()
    return words[0].decode(), int(words[11]) + int(words[12])


class NodeWatch:
    """The ranks of a mesh that this process sees, served from here on until `end`."""

    def __init__(
        self, rank: int, identities: Sequence[Identity], seen: Sequence[int], timeout: float,
        when_lost: Callable[[], str],
    ) -> None:
        self.identities, self.timeout, self.when_lost = identities, timeout, when_lost
        self.near = [other for other, number in enumerate(seen) if number == seen[rank]]
        self.mates: dict[int, PeerProcess] = {}
        for other in self.near:
            if other != rank:
                with suppress(OSError):
                    self.mates[other] = _mate(identities[other])
        _watches.append(self)
        if len(identities) > 1:
            _start()

    def end(self) -> None:
        """Look no longer. Local, and may be repeated."""
        with suppress(ValueError):
            _watches.remove(self)

    def look(self, now: float, is_new: bool) -> None:
        """See who moves, and end the job where a rank is lost that others wait for."""
        for mate in self.mates.values():
            mate.look(now, is_new)
        if CELLS[CALLS] or CELLS[BLOCKS]:
            for rank, mate in self.mates.items():
                if mate.is_lost(now, self.timeout):
                    self._lose(rank, mate)

    def _lose(self, lost: int, mate: PeerProcess) -> None:
        reason = REASONS.get(mate.state, "it neither computes nor beats")
        text = (
            f"rank {lost} on host {self.identities[lost].host} (process {mate.process}) has stood still for "
            f"{self.timeout:g} s: {reason}; it was last in {operation(mate.page[:SHOWN])}"
        )
        is_first = self._is_first(lost)
        for other in self.mates.values():
            other.cells[ENDING] = 1
        end_job(text, self.when_lost, is_first)

    def _is_first(self, lost: int) -> bool:
        """True if no other rank of the node is about to say the same: who says it locks a page of theirs."""
        speaker = self.identities[next(rank for rank in self.near if rank != lost)]
        try:
            file = os.open(f"/proc/{speaker.process}/fd/{speaker.file}", os.O_RDWR)  # held until this process ends
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


class MeetingLine:
    """A line of this process's page, by which ranks of a node tell each other what call they are in.

    `kernels.calls.cells` says what is in its cells.
    """

    def __init__(self) -> None:
        """Raise IndexError if all lines are taken."""
        self.offset = _FREE_LINES.pop()
        self.cells = CELLS[self.offset // CELLS.itemsize : (self.offset + LINE) // CELLS.itemsize]
        self.cells[:] = memoryview(bytes(LINE)).cast("q")
        self.others: list[int] = []
        """Addresses of the lines of the other ranks."""

    @property
    def address(self) -> int:
        return cell_address(self.offset // CELLS.itemsize)

    def enter_in_mpi(self, number: int) -> None:
        """Tell that this rank is in the call of this number, and waits for the others in MPI."""
        self.cells[0] = 2 * number

    def close(self) -> None:
        """Let it be taken again, which the other ranks must no longer look at."""
        _FREE_LINES.append(self.offset)


_FREE_LINES = list(range(SHOWN, PAGE, LINE))


def end_job(text: str, when_lost: Callable[[], str], is_first: bool) -> None:
    """End the job because a rank is lost, with one message, by the rank that `is_first`.

    when_lost: called before; removes what is unfinished, and says what the user will miss.
    """
    last_resort = threading.Timer(STUCK, os._exit, [1])
    last_resort.daemon = True
    with suppress(RuntimeError):  # some versions of Python start no thread at the end of the program
        last_resort.start()
    missing = when_lost()
    if not is_first:
        time.sleep(STUCK)
        os._exit(1)
    os.write(2, f"\nrma_mm: {text}; the job ends{missing and '; ' + missing}\n".encode())
    abort_quietly()


def abort_quietly() -> None:
    """Abort MPI after this rank's last words: without the line that MPI_Abort adds, which says less."""
    from mpi4py import MPI

    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    time.sleep(HEARD)
    MPI.COMM_WORLD.Abort(1)


def announce_interruption() -> None:
    """Have the ranks of this host that do not end by themselves, as in a blocking call of MPI, end all the same."""
    for mate in _mates.values():
        mate.cells[INTERRUPTED] = 1


ON_INTERRUPTION: list[Callable[[], object]] = []
"""Functions that end this process, called by its helper thread."""
_watches: list[NodeWatch] = []
_mates: dict[Identity, PeerProcess] = {}  # processes seen by any mesh: mapping a page again costs nothing
_beating: list[threading.Thread] = []


def _mate(identity: Identity) -> PeerProcess:
    if identity not in _mates:
        _mates[identity] = PeerProcess(identity)
    return _mates[identity]


def _start() -> None:
    if not _beating:
        _beating.append(threading.Thread(target=_beat, name="rma_mm heartbeat", daemon=True))
        _beating[0].start()


def _beat() -> None:
    looked, overdue = time.monotonic(), 0.0
    try:
        while True:
            watches = list(_watches)
            CELLS[BEATS] += 1
            now = time.monotonic()
            overdue = overdue or (CELLS[INTERRUPTED] and now + OVERDUE)
            if overdue and now > overdue:
                for end in ON_INTERRUPTION:
                    end()
            is_new, looked = now - looked > 2 * INTERVAL + QUIET, now
            for watch in watches:
                watch.look(now, is_new)
            time.sleep(min([INTERVAL, *(watch.timeout / 4 for watch in watches)]))
    except BaseException:  # noqa: BLE001 - the others would take this process for lost
        traceback.print_exc()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)

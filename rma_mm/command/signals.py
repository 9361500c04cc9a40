"""Ending at once, and cleanly, on Ctrl-C and SIGTERM.

Python runs signal handlers between two bytecodes of the main thread, which may be seconds away inside a BLAS call,
or never inside an MPI call. So a thread waits for the signal's number on a pipe that the C handler writes to, and
ends the process from there.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from rma_mm.launch import hold_interruptions, meet_to_end, sign_off
from rma_mm.segments import SEGMENTS, held_bytes, remove_segments, stray_segments
from rma_mm.unfinished import HELD, remove
from rma_mm.windows.hosts.liveness import is_ending, machine

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MEETING = 1.0  # seconds for the other ranks to clean up too: when one process has ended, mpiexec kills the rest


class Interruption:
    """Once the ranks have met (`enlist`), SIGINT and SIGTERM end this process with 128 + signal, and first

    - tell the other ranks of this machine, since a signal may have been sent to one of them only;
    - remove the unfinished output and this job's shared memory segments;
    - say so, on rank 0, unless another rank has said why the job ends.

    Until then SIGTERM ends it at once, as MPI_Init holds the GIL, so that no thread could act, and there is little to
    clean; several ranks put SIGINT off (`on_all_ranks`).
    """

    def __init__(self) -> None:
        self.rank = 0
        self.unfinished = ""  # temporary path of what is being written, though another rank may hold it
        self.losing = ""  # what the user will miss, for the message
        self._siblings: list[int] = []
        self._old: dict[int, Any] = {}
        self._reader, self._writer = -1, -1
        self._watching: threading.Thread | None = None
        self._is_under_way = False

    def enlist(self, comm: Any) -> None:
        """Learn the processes of the other ranks of this machine, and start to watch. Collective."""
        self.rank = comm.rank
        here = machine()
        found = comm.allgather((here, os.getpid()))
        self._siblings = [pid for where, pid in found if where == here and pid != os.getpid()]
        if self._old:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in SIGNALS:
                signal.signal(number, _ignore)
            self._watching = threading.Thread(target=self._watch, name="rma_mm interruption", daemon=True)
            self._watching.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def when_lost(self) -> str:
        """Clean up before the job ends because a host is gone; report what will be missing."""
        missing = f"{self.losing} was not written" if self.losing else ""
        self.clean()
        return missing

    def clean(self) -> None:
        """Remove the files and segments of a process that does not reach MPI_Finalize."""
        for name in {self.unfinished, *tuple(HELD)} - {""}:
            with suppress(OSError):
                remove(name)
        remove_segments()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # handlers belong to it
            self._old = {number: signal.getsignal(number) for number in SIGNALS}
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._old:
            return
        if self._siblings:
            hold_interruptions()  # the rest is short, and mpiexec would kill ranks that outlive others
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._writer >= 0:
            signal.set_wakeup_fd(-1)
            os.close(self._writer)  # ends the thread, which closes the other end, or ends the process
        if self._watching is not None:
            self._watching.join()

    def go_first(self) -> None:
        """If a signal is ending this process, wait for that, so that later failures do not hide it."""
        if self._is_under_way and self._watching is not None:
            self._watching.join()

    def _watch(self) -> None:
        number = os.read(self._reader, 1)
        if number:
            self._end(number[0])
        os.close(self._reader)

    def _end(self, number: int) -> None:
        """Runs in the thread, whatever the main thread is doing."""
        self._is_under_way = True
        for sibling in self._siblings:
            with suppress(OSError):
                os.kill(sibling, number)
        is_said = number == signal.SIGINT and not self.losing and "PMI_FD" in os.environ  # by MPICH's mpiexec
        if self.rank == 0 and not is_ending() and not is_said:
            lost = f"; {self.losing} was not written" if self.losing else ""
            behind_echo = "\n" * os.isatty(2)  # of ^C
            with suppress(OSError):
                os.write(2, f"{behind_echo}rma_mm: interrupted by {signal.Signals(number).name}{lost}\n".encode())
        self.clean()
        if self._siblings:
            if meet_to_end(MEETING):
                sign_off()
            self.clean()  # the main thread may have gone on
        os._exit(128 + number)


def cleaning(message: str) -> str:
    """Return advice on removable segments if a message says that shared memory is full; else an empty text."""
    stray = stray_segments() if SEGMENTS.rstrip("/") in message else []
    if not stray:
        return ""
    size = held_bytes(stray)
    return f"\n{size} bytes there are of MPI processes that have ended; to remove them: rm {' '.join(stray)}"


def _ignore(number: int, frame: FrameType | None) -> None:
    """The handler in Python: the thread does the work."""

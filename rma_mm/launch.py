"""A job as its launcher started it, before MPI can be asked, and how a rank ends it that never comes to MPI."""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rma_mm.segments import remove_segments

if TYPE_CHECKING:
    from types import TracebackType

SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which the launchers of MPICH, Open MPI and Slurm say how many ranks they started."""
LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables in which they say how many of them are on this host."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Variables in which they say which rank this is."""
PARTING = 10.0  # seconds for the other ranks of this host to come to an end too, under load
COMING = 4.0  # seconds for them to come to an end after Ctrl-C
PARTED = "rma_mm:"  # begins the name that a process takes while it waits for them; its time in 1/100 s follows
GRACE = 0.3  # seconds from the time of the last of them until all end
INTERRUPTED = 130  # exit code after Ctrl-C, as of shells
TRACEBACK = "RMA_MM_TRACEBACK"
"""Variable by which the tracebacks of all ranks are printed."""


def launched_ranks() -> int:
    return max(1, _number(SIZES))


def launcher_rank() -> int:
    return _number(RANKS)


def on_all_ranks(main: Callable[[], int]) -> int:
    """Run a command and return its exit code; an error before MPI has connected the ranks ends the job.

    Ctrl-C ends a single process at once, without a traceback. With several it is put off until MPI has connected them
    and the command handles it (`Interruption.enlist`). A standard stream that is closed is opened on the null device:
    else the next file would get its number, and what C libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, end_interrupted)
    atexit.register(hold_interruptions)  # what follows is short, and says nothing
    atexit.register(gc.freeze)  # else Python searches all objects for reference cycles as it ends: 0.02 s a rank
    try:
        with interruptions_held() if launched_ranks() > 1 else nullcontext():
            _load_numpy()
            return main()
    except Exception:  # noqa: BLE001 - whatever it is, the other ranks wait
        traceback.print_exc()
        return part(1)


def _load_numpy() -> None:
    """Import NumPy, whose BLAS starts no threads meanwhile, unless the environment says how many.

    By itself it starts as many as there are cores, in each rank, which takes up to 0.05 s; `set_threads` starts those
    that are used.
    """
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        return
    os.environ[name] = os.environ.get("OMP_NUM_THREADS", "1")
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[name]


def end_interrupted(*_: object) -> NoReturn:
    """End this process after Ctrl-C, as a handler of signals too: mpiexec says by itself that it was interrupted.

    MPI_Finalize would wait for calls that other ranks have left. Ranks of a host that end together end quietly; if some
    do not come, or there is no launcher, the process ends by the signal.
    """
    remove_segments()
    started = _number(SIZES)
    if started > 1 and meet_to_end(COMING):
        sign_off()
    elif started != 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(INTERRUPTED)


def hold_interruptions() -> set[int]:
    """Put Ctrl-C off; return the signals that this thread put off before.

    While ranks start, some would end, and others wait for them in MPI_Init until mpiexec kills them, and says so.
    """
    return signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


@contextmanager
def interruptions_held() -> Iterator[None]:
    """Put Ctrl-C off until the end of a `with` block."""
    before = hold_interruptions()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Interruptions:
    are_hushed = False


def hush_interruptions() -> None:
    """Let Ctrl-C end a rank of several without a traceback, also while modules are imported and MPI is not started.

    A KeyboardInterrupt that Python drops, as it arises in a `__del__`, is raised again a moment later. Does nothing if
    repeated.
    """
    if _Interruptions.are_hushed or launched_ranks() == 1 or os.environ.get(TRACEBACK, "") not in ("", "0"):
        return
    _Interruptions.are_hushed = True
    report, report_dropped = sys.excepthook, sys.unraisablehook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt) and not hasattr(sys, "ps1"):
            end_interrupted()
        report(kind, error, trace)

    def repeat(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report_dropped(dropped)
            return
        try:
            threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGINT]).start()
        except KeyboardInterrupt:  # a second one, from mpiexec
            repeat(dropped)

    sys.excepthook, sys.unraisablehook = end, repeat


def part(code: int, message: str = "", is_alike: bool = False) -> int:
    """Return an exit code once every other rank ends in this way too; if one does not, end the job by a signal.

    Without MPI a rank cannot tell the others that it fails. They would wait for it in MPI_Init, and mpiexec with them:
    that takes an exit for an end like any other, but not a signal. Ranks on other hosts are not seen from here, so with
    several hosts it is always the signal. message: why, said before the signal. is_alike: True if no rank can reach
    MPI_Init, so that none waits and there is no need of a signal.
    """
    if launched_ranks() == 1:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    if (_number(LOCAL_SIZES) == launched_ranks() and meet_to_end(PARTING)) or is_alike:
        return code
    if message:
        os.write(2, f"{message}\n".encode())
        time.sleep(0.1)  # mpiexec loses what it has not read when the job ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    return code


def meet_to_end(seconds: float) -> bool:
    """Return at the same moment on all ranks of this host that call this; False if some do not within some seconds.

    mpiexec kills the ranks that outlive another one, and says so at length. Ranks that have ended count as here.
    """
    own = int(time.monotonic() * 100)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"{PARTED}{own % 10**8}")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = [_parting_time(process) for process in _siblings()]
        if None not in found:
            latest = max([own % 10**8, *(when or 0 for when in found)])
            time.sleep(max(0.0, (latest - time.monotonic() * 100 % 10**8) / 100 + GRACE))
            return True
        time.sleep(0.05)
    return False


def sign_off() -> None:
    """Tell MPICH's launcher that this rank ends: it then neither kills the other ranks nor prints a banner.

    It is the message that MPI_Finalize sends (PMI-1), which would wait for the other ranks. Exit next, on all ranks.
    """
    with suppress(OSError, ValueError):
        connection = int(os.environ.get("PMI_FD", ""))
        os.write(connection, b"cmd=finalize\n")
        select.select([connection], [], [], 1.0)


def _number(names: tuple[str, ...]) -> int:
    found = (os.environ[name] for name in names if os.environ.get(name, "").isdecimal())
    return int(next(found, "0"))


def _siblings() -> list[Path]:
    """Return the other processes that this one's parent has started: the ranks of this host."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if process.name != str(os.getpid()) and _fields(process)[1] == str(os.getppid()):
                found.append(process)
    return found


def _parting_time(process: Path) -> int | None:
    """Return the time in the name of a process that waits for the others, 0 if it has ended; else None."""
    with suppress(OSError, ValueError):
        if _fields(process)[0] in "ZX":
            return 0
        name = (process / "comm").read_text().strip()
        return int(name.removeprefix(PARTED)) if name.startswith(PARTED) else None
    return 0


def _fields(process: Path) -> list[str]:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()

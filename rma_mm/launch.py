"""A job as its launcher started it, before MPI can be asked, and how a rank ends it that never comes to MPI."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
"""Variables in which the launchers of MPICH and Open MPI say how many ranks they started."""
LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables in which they say how many of them are on this host."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # variables in which launchers say which rank this is
PARTING = 10.0  # seconds for the other ranks of this host to come to an end too, under load
PARTED = "rma_mm: ending"  # the name that a process takes while it waits for them (15 characters at most)


def launched_ranks() -> int:
    return max(1, _number(SIZES))


def launcher_rank() -> int:
    return _number(RANKS)


def on_all_ranks(main: Callable[[], int]) -> int:
    """Run a command and return its exit code; an error before MPI has connected the ranks ends the job.

    Ctrl-C ends the process at once, without a traceback, until the command itself handles it. A standard stream that is
    closed is opened on the null device: else the next file would get its number, and what C libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return main()
    except Exception:  # noqa: BLE001 - whatever it is, the other ranks wait
        traceback.print_exc()
        return part(1)


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
    with suppress(OSError):
        Path("/proc/self/comm").write_text(PARTED)
    deadline = time.monotonic() + PARTING
    while time.monotonic() < deadline and _number(LOCAL_SIZES) == launched_ranks():
        if all(_has_parted(process) for process in _siblings()):
            time.sleep(0.2)  # for the others to see the same of this one
            return code
        time.sleep(0.05)
    if is_alike:
        return code
    if message:
        os.write(2, f"{message}\n".encode())
        time.sleep(0.1)  # mpiexec loses what it has not read when the job ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    return code


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


def _has_parted(process: Path) -> bool:
    """Return True if a process has ended, or is about to."""
    with suppress(OSError, ValueError):
        return _fields(process)[0] in "ZX" or (process / "comm").read_text().strip() == PARTED
    return True


def _fields(process: Path) -> list[str]:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()

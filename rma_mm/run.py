"""`mpiexec -n P python -m rma_mm.run [A.npy B.npy] [-o C.npy] [options]`: multiply two matrices on all ranks."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rma_mm.command.signals import Interruption

if TYPE_CHECKING:
    from mpi4py import MPI

DONE, REFUSED = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, the same on every rank. Collective over COMM_WORLD."""
    from rma_mm.command.launcher import LauncherError, connect, launcher_rank

    with suppress(OSError, ValueError, AttributeError):  # no standard error to speak on
        faulthandler.enable()  # a bus error, as from a full /dev/shm, is named, and where it was
    with Interruption() as interruption, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflow in a user's matrices is theirs to know
        try:
            comm = connect()
        except LauncherError as error:
            if launcher_rank() == 0:
                sys.stderr.write(f"rma_mm: {error}\n")
            return REFUSED
        interruption.enlist(comm)
        try:
            return _run(sys.argv[1:] if argv is None else argv, comm, interruption)
        except Exception:  # the other ranks wait in a collective: nothing but the end can follow
            abort(comm, interruption)
            raise


def _run(argv: Sequence[str], comm: MPI.Intracomm, interruption: Interruption) -> int:
    """Parse on every rank, then list, help or multiply."""
    from rma_mm.command import arguments
    from rma_mm.command.job import Job, complain
    from rma_mm.errors import RmaError
    from rma_mm.runtime.ranks.agreement import agree

    options: arguments.RunOptions | None = None
    problem: Exception | None = None
    try:
        options = arguments.parse(argv)
    except RmaError as error:
        problem = error
    try:
        agree(comm, "command line", {"arguments": " ".join(argv)}, problem)
    except RmaError as error:
        complain(comm.rank, str(error))
        return REFUSED
    assert options is not None
    if options.list or options.help:
        _say(comm.rank, arguments.help_text() if options.help else _algorithms())
        return DONE
    return Job(options, comm, interruption).run()


def _algorithms() -> str:
    """One algorithm a line, its name first."""
    from rma_mm.algorithms import ALGORITHMS

    width = max(map(len, ALGORITHMS))
    return "".join(f"{name:<{width}}  {row.summary} ({row.source})\n" for name, row in ALGORITHMS.items())


def _say(rank: int, text: str) -> None:
    if rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()


def abort(comm: MPI.Intracomm, interruption: Interruption) -> None:
    """End the job from this rank, after its traceback."""
    if comm.rank:
        time.sleep(0.3)  # where all ranks fail alike, rank 0 is the one to be heard
    traceback.print_exc()
    sys.stderr.flush()
    sys.stdout.flush()
    interruption.clean()
    time.sleep(0.1)  # mpiexec loses what it has not read when the job ends
    comm.Abort(1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

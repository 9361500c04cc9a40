"""Bodies that misbehave, for `tests/mpi/test_harness.py`: pytest does not collect this file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from mpi4py import MPI

from tests.launch import parallel


@parallel()
def case_good(comm: MPI.Comm) -> None:
    """Passes."""
    assert comm.allreduce(1) == comm.size


@parallel()
def case_deadlock(comm: MPI.Comm) -> None:
    """Rank 0 stays out of a barrier, all others wait in it."""
    if comm.rank:
        comm.Barrier()


@parallel()
def case_deadlock_with_child(comm: MPI.Comm, path: str) -> None:
    """All ranks hang, and rank 0 has a child in a session of its own."""
    if comm.rank == 0:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(path, "w") as file:
            file.write(str(child.pid))
    time.sleep(600)


@parallel()
def case_failure_then_deadlock(comm: MPI.Comm) -> None:
    """Rank 1 raises while the others wait for it."""
    if comm.rank == 1:
        raise ValueError("the real cause")
    comm.Barrier()


@parallel()
def case_one_rank_fails(comm: MPI.Comm) -> None:
    """Only the last rank fails; its locals are worth seeing."""
    measured = comm.rank * 10
    comm.Barrier()
    assert measured < (comm.size - 1) * 10


@parallel()
def case_segfault(comm: MPI.Comm) -> None:
    """Rank 1 dies, the others wait for it."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    comm.Barrier()


@parallel()
def case_abort(comm: MPI.Comm) -> None:
    """Rank 1 ends the job."""
    if comm.rank == 1:
        print("about to abort", flush=True)
        comm.Abort(7)
    comm.Barrier()


@parallel()
def case_exit(comm: MPI.Comm) -> None:
    """sys.exit inside a test is a failure, not an end."""
    sys.exit(3)


@parallel()
def case_skip(comm: MPI.Comm) -> None:
    """Skips everywhere."""
    pytest.skip("not here")


@parallel()
def case_some_skip(comm: MPI.Comm) -> None:
    """Skips on rank 0 only."""
    if comm.rank == 0:
        pytest.skip("not here")


@parallel()
def case_early_leaver(comm: MPI.Intracomm) -> None:
    """Rank 0's body ends at once; rank 1 needs rank 0's progress to take from an emulated window."""
    memory = np.full(1 << 16, comm.rank, dtype=float)
    window = MPI.Win.Create(memory, comm=comm)
    got = np.empty_like(memory)
    if comm.rank == 1:
        window.Lock(0)
        window.Get(got, 0)
        window.Unlock(0)
        assert not got.any()
    _KEPT.append((memory, window))


_KEPT: list[tuple[np.ndarray, MPI.Win]] = []

"""Ranks that stand still end the job with one message; ranks that compute, or sleep, between calls do not."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import rma_mm
from rma_mm import Mesh
from rma_mm.command.options.run import parse
from rma_mm.errors import DisagreementError, OptionError
from rma_mm.launch import RANKS
from rma_mm.windows.hosts.liveness import Identity
from tests.launch import parallel
from tests.mpi.test_command_line import wait_for_ranks
from tests.processes import OPEN_MPI_SAYS, Mpiexec, job_environment, mpirun
from tests.thorough import nightly, thorough, usually

pytestmark = pytest.mark.skipif(not Identity.own("").sight, reason="processes do not see each other")

STOPPED = r"^rma_mm: rank {} on host \S+ \(process \d+\) has stood still for 1 s: it is stopped, as by SIGSTOP; it was"


QUIET = {"OMPI_MCA_osc": "^ucx"}
"""Without this component, which some releases of Open MPI report as an error as windows are made."""


def one_message(stderr: str) -> str:
    lines = [line for line in OPEN_MPI_SAYS.sub("", stderr).splitlines() if line]
    assert len(lines) == 1, stderr
    return lines[0]


@nightly
@pytest.mark.parametrize(("ranks", "stopped"), usually(1, [(2, 0), (4, 1), (4, 0)], rest=nightly))
def test_a_command_with_a_stopped_rank(tmp_path: Path, ranks: int, stopped: int) -> None:
    """In the midst of its products: exit code 1 within the limit and 5 s, nothing under the output's name."""
    environment = job_environment({})
    line = "-m rma_mm.run --shape 3000,3000,3000 --repeat 1000 --warmup 0 -o C.npy --quiet --timeout 1"
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "log", "wb") as log:
        job = Mpiexec(ranks, line.split(), environment, cwd=tmp_path, stdout=out, stderr=log)
    try:
        pids = wait_for_ranks(environment, tmp_path)
        begun = time.monotonic()
        os.kill(next(pid for pid in pids if rank_of(pid) == stopped), signal.SIGSTOP)
        assert job.wait(20) == 1
        assert time.monotonic() - begun < 6
    finally:
        job.kill()
    said = one_message((tmp_path / "log").read_text())
    assert re.match(STOPPED.format(stopped) + " last in ", said)
    assert said.endswith("; the job ends; C.npy was not written")
    assert sorted(os.listdir(tmp_path)) == ["log", "out"]


def rank_of(pid: int) -> int:
    """The rank of a process in its job."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    return int(next(variables[name] for name in RANKS if name in variables))


PROGRAM = """
import os, signal, sys, time
if sys.argv[2] == "unseen":
    del os.memfd_create
import numpy as np
from mpi4py import MPI
import rma_mm
comm = MPI.COMM_WORLD
stopped, within = int(sys.argv[1]), sys.argv[2] != "between"
mesh = rma_mm.Mesh((comm.size,), comm)
mesh.when_lost = lambda: "the answer is lost"
A = rma_mm.DistMatrix.from_numpy(np.ones((64, 64)), mesh)
def stop(*_):
    if comm.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
with rma_mm.plan(A, A, mesh) as plan:
    plan.execute(A, A)
    if within:
        plan.execute(A, A, progress=stop)
    stop()
    plan.execute(A, A)
    print("went on")
"""


CASES = [(1, "within"), (0, "between"), (0, "within"), (3, "between"), (2, "unseen")]


@pytest.mark.parametrize(("stopped", "where"), usually(1, CASES, rest=nightly))
def test_a_program_with_a_stopped_rank(tmp_path: Path, stopped: int, where: str) -> None:
    """In a product, and before one: found by those who wait, who say what it was last in.

    Where processes cannot see each other: in a product, by beats that go through MPI.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    begun = time.monotonic()
    done = mpirun(4, [str(program), str(stopped), where], variables={"RMA_MM_TIMEOUT": "1"} | QUIET)
    assert (done.returncode, done.stdout) == (1, "")
    assert time.monotonic() - begun < 15
    said = one_message(done.stderr)
    if where == "unseen":
        assert re.match(rf"^rma_mm: nothing was heard of rank {stopped} on host \S+ \(process \d+\) for 1 s by", said)
        return
    assert re.match(STOPPED.format(stopped), said), said
    between = "a computation of its own after Plan.execute, product 1"
    last = "Plan.execute, product 2, multiplying" if where == "within" else between
    assert said.endswith(f"it was last in {last}; the job ends; the answer is lost")


ENDING = """
import os, signal
from mpi4py import MPI
import numpy as np
import rma_mm
mesh = rma_mm.Mesh((2,))
rma_mm.matmul(np.eye(8), np.eye(8), mesh)
if mesh.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@thorough
def test_a_rank_that_is_stopped_before_the_end(tmp_path: Path) -> None:
    """Those who have come to the end of the program wait for it, and find it."""
    program = tmp_path / "program.py"
    program.write_text(ENDING)
    done = mpirun(2, [str(program)], variables={"RMA_MM_TIMEOUT": "1"} | QUIET)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.match(STOPPED.format(1), one_message(done.stderr))


@thorough
@parallel(ranks=(4,), env=("node",))
def test_who_computes_between_calls_is_no_hang(comm) -> None:
    """For more than the limit, while others wait: asleep, in Python, in C with the GIL and without the processor."""
    long, one = 2.2, np.eye(4)
    with Mesh((comm.size,), comm, timeout=1) as mesh:
        begun = time.monotonic()
        if comm.rank == 1:
            ctypes.PyDLL(None).usleep(int(1e6 * long))  # holds the GIL
        elif comm.rank == 2:
            while time.monotonic() < begun + long:
                pass
        elif comm.rank == 3:
            time.sleep(long)
        rma_mm.matmul(one, one, mesh)
        comm.Barrier()
        assert time.monotonic() > begun + 2


@nightly
@parallel(ranks=(2,), env=("node",))
def test_a_call_that_holds_the_gil_within_a_product_is_no_hang(comm) -> None:
    """As it computes: its helper thread cannot beat, and the others see that processor time goes by."""
    size, seconds = 2**21, 0.0
    while seconds < 2.2:
        size, begun = 2 * size, time.monotonic()
        pow(3, size)
        seconds = time.monotonic() - begun
    with Mesh((comm.size,), comm, timeout=1) as mesh, rma_mm.plan(np.eye(4), np.eye(4), mesh) as plan:
        plan.execute(np.eye(4), np.eye(4), progress=lambda *_: comm.rank == 1 and pow(3, size))


@parallel(ranks=(2,), env=("node",))
def test_limits_are_the_same_on_all_ranks(comm) -> None:
    with Mesh((2,), comm, timeout=7) as mesh:
        assert mesh.timeout == 7
    for wrong in (0, -3.0, float("nan"), "soon"):
        with pytest.raises(OptionError, match=r"^timeout: got .*; must be a number of seconds, at least 1, as 20"):
            Mesh((2,), comm, timeout=wrong)
    with pytest.raises(DisagreementError, match="timeout"):
        Mesh((2,), comm, timeout=5 + comm.rank)
    for value, kind in ((str(6 + comm.rank), DisagreementError), ("none", OptionError)):
        with mock.patch.dict(os.environ, RMA_MM_TIMEOUT=value), pytest.raises(kind, match="RMA_MM_TIMEOUT: "):
            Mesh((2,), comm)


@pytest.mark.parametrize("given", usually(1, ["0", "nan", "soon"]))
def test_commands_refuse_other_limits(given: str) -> None:
    with pytest.raises(OptionError, match=r"^argument --timeout: got '.*'; must be a number of seconds, at least 1"):
        parse(["--timeout", given])
    assert parse(["--timeout", "2.5"]).timeout == 2.5

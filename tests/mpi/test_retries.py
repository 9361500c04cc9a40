"""Transfers that fail: tried again where that is right, else the same error on all ranks."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import WindowError
from rma_mm.flavours import CREATED, Flavour
from rma_mm.geometry.span import Span
from rma_mm.runtime.watching import retries
from rma_mm.runtime.watching.retries import retry
from rma_mm.runtime.watching.tally import Tally
from rma_mm.windows import open_window
from rma_mm.windows.allocated import AllocatedWindow
from rma_mm.windows.base import NotBegunError, Patch
from tests.launch import parallel
from tests.mpi.test_flavours import registered
from tests.processes import is_open_mpi, mpirun
from tests.thorough import nightly, thorough, usually

CALLS = ("Rget", "Raccumulate", "Rget_accumulate")


class Faults:
    """What goes wrong on this rank: how often, and in which way."""

    left = 0
    how = ""
    """A call of MPI that raises, or "Test": a get that fails under way; or an error that a get's start raises."""
    only = ""
    """The call that is meant."""


class Broken:
    """The request of a get that never arrives: it fails once, and is none from then on, as MPI's."""

    has_failed = False

    def Test(self) -> bool:
        if not self.has_failed:
            self.has_failed = True
            raise MPI.Exception(MPI.ERR_OTHER)
        return True


class FaultyWin:
    """MPI's window, of which some calls fail."""

    def __init__(self, win: MPI.Win) -> None:
        self.win = win

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.win, name)
        return self.failing(name, call) if name in CALLS else call

    def failing(self, name: str, call: Any) -> Any:
        def made(*arguments: Any) -> Any:
            if Faults.left and Faults.only == name and Faults.how in ("raise", "Test"):
                Faults.left -= 1
                if Faults.how == "Test":
                    return Broken()
                raise MPI.Exception(MPI.ERR_OTHER)
            return call(*arguments)

        return made


class FaultyTransfer:
    """A get whose start, or wait, raises what other flavours may raise."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.done, self.close = inner, inner.done, inner.close
        self.is_under_way = False

    def start(self) -> None:
        if Faults.left and Faults.how == "start":
            Faults.left -= 1
            raise ConnectionResetError("the other side has gone")
        self.inner.start()
        self.is_under_way = True

    def wait(self) -> None:
        self.inner.wait()
        if Faults.left and Faults.how == "wait" and self.is_under_way:
            Faults.left -= 1
            self.is_under_way = False
            raise WindowError("half of it came")
        self.is_under_way = False


class FaultyWindow(AllocatedWindow):
    """Memory that only MPI reaches, by calls that may fail."""

    flavour = "faulty"

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._win = FaultyWin(self._win)  # type: ignore[assignment]
        self._bases = {self._rank: self._bases[self._rank]}

    def get(self, *arguments: Any) -> Any:
        made = super().get(*arguments)
        return FaultyTransfer(made) if arguments[0] != self._rank and Faults.how in ("start", "wait") else made


FAULTY = Flavour(name="faulty", window=f"{__name__}:FaultyWindow", like=CREATED)

CASES = (
    ("stationary_c", "Rget", "raise"), ("stationary_c", "Rget", "Test"), ("stationary_c", "", "start"),
    ("stationary_c", "", "wait"), ("stationary_a", "Raccumulate", "raise"), ("queue", "Rget_accumulate", "raise"),
)


def product(comm: MPI.Intracomm, algorithm: str, how: str, only: str, count: int) -> tuple[np.ndarray, int, int]:
    """A product with so many faults: C, how many faults are left, and retries."""
    rng = np.random.default_rng(1)
    with Mesh((comm.size,), comm, window="faulty") as mesh:
        a, b = (DistMatrix.from_numpy(rng.random((48, 48)), mesh) for _ in "AB")
        Faults.how, Faults.only = how, only  # as gets are prepared
        with rma_mm.plan(a, b, mesh, algorithm=algorithm) as plan:
            plan.prepare(a, b)
            Faults.left = count
            c = plan.execute(a, b)
        left, Faults.left, Faults.how = Faults.left, 0, ""
        return c.to_numpy(), left, mesh.metrics.tally.retries


@parallel(ranks=(2,), env=("node",))
def test_what_fails_twice_is_done_at_the_third_time(comm) -> None:
    """The result is that without faults, to the bit."""
    with registered(FAULTY), mock.patch.object(retries, "PAUSES", (0.01,) * 3):
        for algorithm, only, how in CASES:
            wanted, *_ = product(comm, algorithm, "", "", 0)
            got, left, times = product(comm, algorithm, how, only, 2)
            assert (left, times) == (0, 2), (algorithm, only, how)
            assert np.array_equal(got, wanted), (algorithm, only, how)


@parallel(ranks=(2,), env=("node",))
def test_what_is_tried_again_is_checked_when_it_has_come(comm) -> None:
    """With RMA_MM_CHECK=1 a get that failed, and came in the end, is not found wrong."""
    with registered(FAULTY), mock.patch.dict(os.environ, RMA_MM_CHECK="1"):
        _, left, times = product(comm, "stationary_c", "Test", "Rget", 1)
        assert (left, times) == (0, 1)


@parallel(ranks=(2,), env=("node",))
def test_a_failure_is_that_of_its_own_transfer(comm) -> None:
    """Also where MPI tells of it while another transfer to the same rank begins, which is none the worse for it."""
    with registered(FAULTY):
        window = open_window("faulty", comm, 64)
        window.local.view(np.int64)[:] = 10 * comm.rank + np.arange(8)
        window.sync()
        comm.Barrier()
        row, got = (Span.range(0, 1), Span.range(0, 4)), np.zeros((2, 1, 4), np.int64)
        gets = [window.get(1 - comm.rank, Patch(32 * n, (4, 1), *row), got[n], *row) for n in range(2)]
        Faults.how, Faults.only, Faults.left = "Test", "Rget", 1
        for each in gets:
            each.start()
        assert not Faults.left
        with pytest.raises(WindowError, match=r"^faulty: "):
            gets[0].wait()
        gets[1].wait()
        gets[0].wait()  # nothing is under way
        gets[0].start()
        gets[0].wait()
        assert np.array_equal(got.reshape(8), 10 * (1 - comm.rank) + np.arange(8))
        window.close()


@pytest.mark.parametrize(("fault", "repeats"), [(OSError, True), (OSError, False), (NotBegunError, False)])
def test_how_often(fault: type[Exception], repeats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had not begun, and gets, three times within the seconds that are given."""
    times = 3 * (repeats or fault is NotBegunError)
    monkeypatch.setattr(retries, "PAUSES", (0.0, 0.0, 0.0))
    tally = Tally()

    def attempt() -> None:
        raise fault("again")

    with pytest.raises(WindowError, match=r"^get: failed 4 times: again$" if times else "^get: failed, and cannot be"):
        retry(fault("first"), attempt, "get", tally, repeats)
    assert tally.retries == times
    monkeypatch.setattr(retries, "PAUSES", (0.0, 9.0))
    with pytest.raises(WindowError, match="^get: failed 2 times: again" if times else "cannot be repeated: first"):
        retry(fault("first"), attempt, "get", tally, repeats)


def end(comm: MPI.Intracomm) -> None:
    """End the ranks of a program with exit status 5. mpiexec returns the status of the rank that goes first."""
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(1)  # mpiexec drops what it has not yet read
        comm.Abort(5)
    time.sleep(30)  # until mpiexec ends this rank


PROGRAM = """
import sys
from mpi4py import MPI
from tests.mpi.test_retries import FAULTY, Faults, end, product
from rma_mm.errors import DisagreementError
from rma_mm.flavours import register
import rma_mm
comm = MPI.COMM_WORLD
register(FAULTY)
algorithm, only, how, rank = sys.argv[1:]
try:
    product(comm, algorithm, how, only, 1000 if rank in ("all", str(comm.rank)) else 0)
except Exception as error:
    said = comm.gather(f"{type(error).__name__}: {error}")
    if comm.rank == 0:
        print(*said, sep="\\n", flush=True)
    comm.Barrier()
    try:
        rma_mm.Mesh((comm.size,), comm)
    except DisagreementError as error:
        assert "a product failed" in str(error)
        print("ended", flush=True)
        end(comm)
"""
FAILURES = (
    ("stationary_a Raccumulate Test 1", "failed, and cannot be repeated: faulty: "),
    ("stationary_c Rget raise all", "get from rank 1: failed 4 times: faulty: "),
    ("stationary_c Rget raise 1", "failed 4 times: faulty: "),
    ("queue Rget_accumulate Test 1", "failed, and cannot be repeated"),
)


@pytest.mark.parametrize(("case", "words"), usually(1, FAILURES, rest=nightly))
def test_what_keeps_failing_is_the_same_error_on_all_ranks(tmp_path: Path, case: str, words: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = mpirun(3, [str(program), *case.split()], timeout=30)
    assert done.returncode == 5 and done.stdout.count("ended") == 3, done
    said = [line for line in done.stdout.replace("ended", "").splitlines() if line.startswith("WindowError: ")]
    assert len(said) == 3, done
    assert len(set(said)) == 1, said
    assert words in said[0]
    assert said[0].endswith(" (rank 1)") == case.endswith("1")


FETCHED_TOGETHER = """
import numpy as np
from mpi4py import MPI
import rma_mm
from rma_mm.errors import WindowError
from rma_mm.windows.base import NotBegunError
from rma_mm.windows.mpi import MpiWindow
from tests.mpi.test_retries import end
comm = MPI.COMM_WORLD
def fails(*_):
    raise NotBegunError("the network is gone")
with rma_mm.Mesh((4, 1), comm) as mesh:
    A, B = (rma_mm.DistMatrix.from_numpy(np.ones((64, 64)), mesh) for _ in "AB")
    with rma_mm.plan(A, B, mesh, layout="P('i', 'j')", algorithm="stationary_c") as plan:
        plan.execute(A, B)
        assert plan.node_scratch is not None and mesh.num_nodes == 2
        if comm.rank == 1:
            MpiWindow.issue = fails
        try:
            plan.execute(A, B)
        except WindowError as error:
            said = comm.gather(f"said {error}")
            if comm.rank == 0:
                print(*said, sep="\\n", flush=True)
            end(comm)
"""


@thorough
@pytest.mark.skipif(is_open_mpi(), reason="other names for pretended nodes")
def test_what_a_helper_thread_fetches_fails_for_all(tmp_path: Path) -> None:
    """It is begun where the frame is free, by whichever thread sees that."""
    program = tmp_path / "program.py"
    program.write_text(FETCHED_TOGETHER)
    done = mpirun(4, [str(program)], variables={"MPIR_CVAR_NUM_CLIQUES": "2"}, timeout=30)
    assert done.returncode == 5, done
    said = [line for line in done.stdout.splitlines() if line.startswith("said ")]
    assert len(said) == 4 and len(set(said)) == 1, done
    assert re.fullmatch(r"said get from rank \d: failed 4 times: the network is gone \(rank 1\)", said.pop())


AT_THE_END = """
import os, sys, time
import numpy as np
from mpi4py import MPI
import rma_mm
from rma_mm.errors import DisagreementError
comm = MPI.COMM_WORLD
mesh = rma_mm.Mesh((2, 1), comm)
A = rma_mm.DistMatrix.from_numpy(np.ones((8, 8)), mesh)
plan = rma_mm.plan(A, A, mesh)
plan.execute(A, A)
if comm.rank == 1:
    executable = plan._known.sets[0].executable
    leave = executable.leave
    def interrupted():
        leave()
        raise KeyboardInterrupt
    executable.leave = interrupted
try:
    plan.execute(A, A)
    plan.execute(A, A)
except KeyboardInterrupt:
    time.sleep(60)
except DisagreementError as error:
    print(error, flush=True)
    time.sleep(1)  # mpiexec drops what it has not yet read
    comm.Abort(5)
"""


@thorough
def test_who_left_when_the_product_was_over_is_missed_at_the_next(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(AT_THE_END)
    done = mpirun(2, [str(program)], timeout=20)
    assert done.returncode == 5, done
    assert done.stdout.splitlines()[:1] == ["rank 1 aborted during a product"]

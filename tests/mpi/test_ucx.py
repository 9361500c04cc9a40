"""Windows over UCX: owners take no part, and what is absent or forbidden is one message."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from rma_mm import DistMatrix, Mesh
from rma_mm.geometry.span import Region
from rma_mm.windows import Window, libucp, open_window
from rma_mm.windows.base import Patch
from rma_mm.windows.waiting import barrier
from tests.launch import parallel
from tests.processes import has_ucx, is_open_mpi, mpirun

ROWS, COLS = 300, 700
pytestmark = pytest.mark.skipif(not has_ucx(), reason="there is no library of UCX here")


def while_the_owner_calls_nothing(comm: MPI.Intracomm, folder: Path, act: Callable[[], None]) -> None:
    """Rank 0 waits for a file, and calls neither MPI nor UCX until then; rank 1 makes it after `act`."""
    done = Path(comm.bcast(str(folder))) / "done"
    barrier(comm)
    if comm.rank == 0:
        while not done.exists():
            time.sleep(1e-3)
    else:
        act()
        done.touch()
    barrier(comm)


def exercise(window: Window, array: np.ndarray) -> None:
    """A get of strided memory of rank 0, an accumulate into it, and a ticket behind it."""
    box = Region.box((10, 290), (3, 600))
    patch = Patch(0, (COLS, 1), *box)
    found = np.zeros((ROWS, COLS), array.dtype)
    for transfer in (window.get(0, patch, found, *box), window.accumulate(0, patch, np.ones_like(found), *box)):
        transfer.start()
        transfer.wait()
        transfer.close()
    window.flush()
    assert (found[box.selector()] == array[box.selector()]).all()
    assert [window.fetch_add(0, array.nbytes, 3) for _ in range(2)] == [0, 3]


@parallel(ranks=(2,), env=("node", "ucx_tcp"))
@pytest.mark.parametrize("flavour", ["ucx", "ucx_arrays"])
def test_owners_take_no_part(comm: MPI.Intracomm, flavour: str, tmp_path: Path) -> None:
    """A listener serves where UCX does so in software: no transfer waits for what its owner is at."""
    array = np.arange(ROWS * COLS, dtype=np.float64).reshape(ROWS, COLS)
    window = open_window(flavour, comm, array.nbytes + 8)
    own = window.view(comm.rank, 0, (ROWS, COLS), (COLS, 1), np.float64)
    own[...] = array
    window.local[array.nbytes :] = 0
    barrier(comm)
    while_the_owner_calls_nothing(comm, tmp_path, lambda: exercise(window, array))
    if comm.rank == 0:
        assert (own[10:290, 3:600] == array[10:290, 3:600] + 1).all()
        own[10:290, 3:600] -= 1
        assert (own == array).all()
    window.close()


@parallel(ranks=(2,), env=("node", "cliques"))
def test_callers_arrays_are_read_while_their_owners_are_away(comm: MPI.Intracomm, tmp_path: Path) -> None:
    with Mesh((2,), comm) as mesh:
        mine = np.full((ROWS, COLS), comm.rank + 1.0)
        D = DistMatrix.from_local(mine, (2 * ROWS, COLS), mesh, "i, *")
        assert (D.block.window.flavour, D.in_place) == ("ucx_arrays", False)
        found, whole = np.zeros((ROWS, COLS)), Region.whole((ROWS, COLS))

        def get() -> None:
            transfer = D.block.window.get(0, D.block.patch(0, whole), found, *whole)
            transfer.start()
            transfer.wait()
            assert (found == 1).all()

        while_the_owner_calls_nothing(comm, tmp_path, get)


@parallel(ranks=(3,), env=("node", "ucx_tcp"))
def test_accumulates_under_way_are_complete_when_a_window_closes(comm: MPI.Intracomm) -> None:
    """All ranks add many times to rank 0, and wait for none of it."""
    window = open_window("ucx_arrays", comm, 8 * 16)
    window.local[:] = 0
    barrier(comm)
    box, ones = Region.box((0, 1), (0, 16)), np.ones((1, 16), np.int64)
    sums = [window.accumulate(0, Patch(0, (16, 1), *box), ones, *box) for _ in range(20)]
    for transfer in sums:
        transfer.start()
    window.flush()
    barrier(comm)
    if comm.rank == 0:
        assert (window.local.view(np.int64) == 20 * comm.size).all()
    window.close()


@parallel(ranks=(2,), env=("node",))
def test_a_context_of_ucx_py_is_shared(comm: MPI.Intracomm) -> None:
    api = libucp.ucx_py()
    if api is None:
        pytest.skip("ucx-py is not installed, or its libucp does not go with MPI's (docs/reference/windows.md)")
    shared = libucp.start()._shared
    assert shared is not None
    assert isinstance(shared[0], api.UCXContext)


# -- what is not there ----------------------------------------------------------------------------

OWN = """
import numpy as np
from rma_mm import DistMatrix, Mesh, matmul
with Mesh((2,)) as mesh:
    A = DistMatrix.from_local(np.ones((8, 16)), (16, 16), mesh, "i, *")
    assert (matmul(A, A, mesh, algorithm="stationary_a").to_numpy() == 16).all()
    if mesh.rank == 0:
        print(A.block.window.flavour, "|", *mesh.fallbacks)
"""
NAMED = """
import sys
from rma_mm.run import main
sys.exit(main("--shape 30,20,10 --window {} --quiet".split()))
"""
NO_LIBRARY = "from rma_mm.windows import libucp as l; l.in_process = l.candidates = lambda: []; l.ucx_py = str"
TOO_OLD = "from rma_mm.windows import libucp; libucp.OLDEST = (1, 99)"
TWO = "from rma_mm.windows import libucp; libucp.in_process = lambda: ['/a/libucp.so.0', '/b/libucp.so.0']"
FORBIDDEN = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # so that others may not attach, without SYS_PTRACE"
WITHOUT_UCX = {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_CH4_CMA_ENABLE": "0"}
"""MPICH itself uses UCX and attaches; here it is to do neither."""

CASES = [
    pytest.param("ucx", NO_LIBRARY, {}, "no libucp here; pip install mpich, or libucx-cu12", id="missing"),
    pytest.param("ucx", TOO_OLD, {}, "one from 1.99 to 1.x serves", id="too old"),
    pytest.param("ucx", TWO, {}, "two libraries of UCX are in this process, /a/libucp.so.0 and /b", id="two"),
    pytest.param("ucx", "", {"UCX_TLS": "nonsense"}, "UCX_TLS is nonsense: unset it, or name", id="no transport"),
    pytest.param("ucx", "", {"UCX_TLS": "self"}, "UCX reaches no other process", id="no other process"),
    pytest.param("ucx_arrays", FORBIDDEN, {}, "cross memory attach: it is forbidden here", id="no attach"),
]


@pytest.mark.skipif(is_open_mpi(), reason="variables of MPICH keep it from using UCX itself")
@pytest.mark.parametrize(("window", "fault", "variables", "says"), CASES)
def test_what_is_absent_is_one_message_by_name_and_else_replaced(
    window: str, fault: str, variables: dict[str, str], says: str, tmp_path: Path
) -> None:
    python: list[str] = []
    if fault == FORBIDDEN:
        if os.geteuid() == 0 and shutil.which("setpriv") is None:
            pytest.skip("root may attach to every process, and there is no setpriv that would take it away")
        python = [*["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"] * (os.geteuid() == 0)]
    by_name, by_itself = tmp_path / "by_name.py", tmp_path / "by_itself.py"
    by_name.write_text(f"{fault}\n{NAMED.format(window)}")
    by_itself.write_text(f"{fault}\n{OWN}")
    for program, code in ((by_name, 2), (by_itself, 0)):
        words = [*python, sys.executable, str(program)]
        line = ["-c", f"import os; os.execvp({words[0]!r}, {words!r})"]
        done = mpirun(2, line, variables=WITHOUT_UCX | variables)
        assert done.returncode == code, done
        if program == by_name:
            assert done.stderr.count("rma_mm:") == 1, done
            assert says in done.stderr
            assert done.stdout == ""
        else:
            assert done.stdout.startswith("created | window: created in place of ucx_arrays: "), done
            assert says in done.stdout


WORLDS = """
import sys
import numpy as np
from mpi4py import MPI
from rma_mm import DistMatrix, Mesh, matmul
parent = MPI.Comm.Get_parent()
if parent == MPI.COMM_NULL:
    comm = MPI.COMM_SELF.Spawn(sys.executable, args=[__file__], maxprocs=2).Merge(False)
else:
    comm = parent.Merge(True)
x = np.arange(30.0 * 30).reshape(30, 30) % 7
with Mesh((3,), comm, window="ucx") as mesh:
    A = DistMatrix.from_numpy(x, mesh, "i, *")
    B = DistMatrix.from_local(A.tile.copy(), x.shape, mesh, "i, *")
    for algorithm in ("stationary_c", "stationary_a", "queue"):
        assert (matmul(A, B, mesh, algorithm=algorithm).to_numpy() == x @ x).all()
    if parent == MPI.COMM_NULL:
        print(A.block.window.flavour, B.block.window.flavour)
"""


@pytest.mark.skipif(is_open_mpi(), reason="how it starts further ranks depends on where")
def test_it_serves_ranks_of_two_worlds_of_mpi(tmp_path: Path) -> None:
    """Ranks that were started apart, which share no memory of MPI's."""
    program = tmp_path / "worlds.py"
    program.write_text(WORLDS)
    done = mpirun(1, [str(program)])
    assert (done.returncode, done.stdout) == (0, "ucx ucx_arrays\n"), done

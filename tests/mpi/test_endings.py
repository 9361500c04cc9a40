"""Endings of users' programs: an error is printed once, one rank's error with the rank, and Ctrl-C prints no more."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import Mpiexec, is_open_mpi, job_environment, mpirun
from tests.thorough import usually

BEGIN = """\
import numpy as np
import rma_mm
mesh = rma_mm.Mesh()
a = np.ones((8, 8))
"""
STARTS = [["-m", "mpi4py"], []]


def ended(tmp_path, body, start=(), ranks=4, begin=BEGIN, **variables):
    (tmp_path / "product.py").write_text(begin + body)
    return mpirun(ranks, [*start, "product.py"], cwd=tmp_path, variables=variables, timeout=60)


@pytest.mark.parametrize(("start", "body", "says"), usually(3, [
    (STARTS[0], 'rma_mm.matmul(a, a, mesh, algorithm="canon")', "product.py:5: AlgorithmError: algorithm: got 'canon'"),
    (STARTS[1], "rma_mm.matmul(a, a, mesh, algoritm='cannon')", "product.py:5: TypeError: matmul() got an unexpected"),
    (STARTS[0], "rma_mm.load('none.npy', mesh)", "product.py:5: MissingFileError: none.npy: cannot be read: "),
    (STARTS[1], 'rma_mm.matmul(a, a, mesh, layout="P(i")', "product.py:5: LayoutError"),
    (STARTS[0], "rma_mm.matmul(a, b, mesh)", "product.py:5: NameError: name 'b' is not defined"),
    (STARTS[0], "a @ a[:, :3].T", "product.py:5: ValueError: matmul"),
]))
def test_an_error_of_all_ranks_is_printed_once(tmp_path, start, body, says):
    done = ended(tmp_path, body, start)
    assert done.returncode == 1, done
    lines = done.stderr.splitlines()
    assert len(lines) <= 3, done.stderr
    assert lines[0].startswith(says), done.stderr
    assert done.stderr.count("Error") == 1


def test_a_mesh_that_cannot_be_is_an_error_like_any(tmp_path):
    done = ended(tmp_path, "rma_mm.Mesh((9, 9))", ["-m", "mpi4py"], begin="import rma_mm\n")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done
    assert "product.py:2: MeshError: mesh 9x9: needs 81 ranks, and there are 4; start more" in done.stderr


@pytest.mark.parametrize("start", STARTS)
def test_a_misspelt_name_before_the_first_mesh(tmp_path, start):
    done = ended(tmp_path, "rma_mm.Mehs()\n", start, begin="import rma_mm\n")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done
    assert done.stderr.startswith("product.py:2: AttributeError: module 'rma_mm' has no attribute 'Mehs'"), done
    body = "if rma_mm.launch.launcher_rank() == 2:\n    rma_mm.Mehs()\nrma_mm.Mesh()"
    done = ended(tmp_path, body, start, begin="import rma_mm.launch\n")
    assert done.returncode and done.stderr.count("has no attribute 'Mehs'") == 1, done
    assert done.stderr.startswith("rank 2: product.py:3: AttributeError"), done


@pytest.mark.parametrize("start", usually(1, STARTS))
def test_an_error_of_one_rank_names_it(tmp_path, start):
    done = ended(tmp_path, "if mesh.rank == 2:\n    1 / 0\nrma_mm.matmul(a, a, mesh)\n", start)
    assert done.returncode == 1, done
    assert "rma_mm: rank 2 of 4 raised\nTraceback" in done.stderr, done.stderr
    assert done.stderr.count("Traceback") == 1 and "runpy" not in done.stderr
    assert re.search(r"^ranks 0, 1, 3: product.py:7: DisagreementError: .*ZeroDivisionError", done.stderr, re.MULTILINE)
    assert len(done.stderr.splitlines()) <= 8, done.stderr  # one for MPI_Abort: rank 2 cannot know that the others end


def test_an_error_that_rank_0_does_not_have(tmp_path):
    """Rank 0 computes on: each of the others waits for it, and prints what it has."""
    body = "import time\nif mesh.rank == 0:\n    time.sleep(5)\nelse:\n    raise KeyError(mesh.rank)\n"
    done = ended(tmp_path, body, ["-m", "mpi4py"])
    assert done.returncode, done
    for rank in (1, 2, 3):
        assert f"rma_mm: rank {rank} of 4 raised" in done.stderr, done.stderr
        assert f"KeyError: {rank}" in done.stderr


@pytest.mark.parametrize("key", ["'same'", "mesh.rank"])
def test_errors_of_a_mesh_on_some_ranks_end_those_beside_it(tmp_path, key):
    begin = "import rma_mm\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\nhalf = world.Split(world.rank // 2)\n"
    body = f"if world.rank < 2:\n    mesh = rma_mm.Mesh((2,), half)\n    raise KeyError({key})\nworld.Barrier()\n"
    done = ended(tmp_path, body, ["-m", "mpi4py"], begin=begin)
    assert done.returncode and "KeyError" in done.stderr, done


def test_tracebacks_of_all_ranks_are_there_for_the_asking(tmp_path):
    done = ended(tmp_path, 'rma_mm.matmul(a, a, mesh, algorithm="canon")', RMA_MM_TRACEBACK="1")
    assert done.stderr.count("Traceback (most") == 4, done.stderr
    assert done.stderr.count("did you mean") == 4  # once a rank


def test_without_mpiexec_the_command_is_named(tmp_path):
    (tmp_path / "product.py").write_text("import rma_mm\nrma_mm.Mesh((2, 2))\n")
    call = [sys.executable, "product.py"]
    done = subprocess.run(call, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "product.py:2: MeshError: mesh 2x2: needs 4 ranks, and there are 1; start 4 with "
        "mpiexec -n 4 python -m mpi4py product.py, or use a smaller mesh\n"
    )


def test_hooks_and_handlers_of_a_program_stay(tmp_path):
    """On one rank Python prints what it always does; a hook that comes later is not replaced."""
    body = "rma_mm.Mesh(1, mesh.comm)\n1 / 0\n"
    done = ended(tmp_path, body, ranks=1)
    assert done.stderr.startswith("Traceback (most") and "product.py\", line 6" in done.stderr, done.stderr
    body = "import sys\nsys.excepthook = lambda *_: print('mine')\nrma_mm.Mesh()\n1 / 0\n"
    assert ended(tmp_path, body, ranks=2).stdout.count("mine") == 2
    body = "try:\n    rma_mm.load('none.npy')\nexcept FileNotFoundError as error:\n    print('caught')"
    assert ended(tmp_path, body, ranks=2).stdout.count("caught") == 2


BODIES = {
    "products": "while True:\n    rma_mm.matmul(big, big, mesh)\n",
    "waiting": "import time\nif mesh.rank:\n    rma_mm.matmul(a, a, mesh)\nelse:\n    time.sleep(60)\n",
    "a blocking call of MPI": "import time\nif mesh.rank:\n    time.sleep(60)\nmesh.comm.Barrier()\n",
    "own code": "import time\nwhile True:\n    time.sleep(0.01)\n",
    "a __del__": "import time\nclass Slow:\n    def __del__(self):\n        time.sleep(0.3)\n"
    "while True:\n    Slow()\n    time.sleep(0.3)\n",
    "a __del__, twice": "import os, signal, threading, time\nstart = threading.Timer.start\n"
    "def again(timer):\n    threading.Timer.start = start\n    os.kill(os.getpid(), signal.SIGINT)\n    start(timer)\n"
    "threading.Timer.start = again\nclass Slow:\n    def __del__(self):\n        time.sleep(9)\n"
    "Slow()\ntime.sleep(60)\n",
    "before a mesh": "import time, rma_mm\nrma_mm.matmul\nprint('go', flush=True)\ntime.sleep(60)\n",
}


STARTING = """\
import sys, time
from rma_mm.launch import launcher_rank, on_all_ranks

def main():
    if launcher_rank() == 0:
        print("go", flush=True)
        time.sleep(2)
    from rma_mm.command.frame import on_ranks
    return on_ranks("run", ["--shape", "9,9,9"])

sys.exit(on_all_ranks(main))
"""


def interrupted(tmp_path, program, start=(), ranks=4):
    """Send Ctrl-C half a second after some ranks have printed "go"; return what else the job prints."""
    (tmp_path / "product.py").write_text(program)
    with open(tmp_path / "log", "w+b") as log:
        job = Mpiexec(4, [*start, "product.py"], job_environment({}), cwd=tmp_path, stdout=log, stderr=log)
        try:
            limit = time.monotonic() + 60
            while (tmp_path / "log").read_text().count("go") < ranks and time.monotonic() < limit:
                time.sleep(0.1)
            time.sleep(0.5)
            job.remember_segments()
            os.killpg(job.process.pid, signal.SIGINT)
            begun = time.monotonic()
            assert job.wait(10) is not None
            assert time.monotonic() - begun < 5
            left = [str(path) for path in job.segments if path.exists()]
        finally:
            job.kill()
    assert left == []
    return [line for line in (tmp_path / "log").read_text().replace("go", "").splitlines() if line]


@pytest.mark.skipif(is_open_mpi(), reason="its mpiexec says other things")
@pytest.mark.parametrize("start", usually(1, STARTS))
@pytest.mark.parametrize("body", BODIES)
def test_ctrl_c(tmp_path, start, body):
    """Two lines, and those are of mpiexec."""
    begin = "" if "before" in body else BEGIN + "big = np.ones((900, 900))\nprint('go', flush=True)\n"
    lines = interrupted(tmp_path, begin + BODIES[body], start)
    assert len(lines) <= 2 and all(line.startswith("[mpiexec@") for line in lines), lines


@pytest.mark.skipif(is_open_mpi(), reason="its mpiexec says other things")
def test_ctrl_c_while_ranks_of_a_command_wait_for_another_in_mpi_init(tmp_path):
    lines = interrupted(tmp_path, STARTING, ranks=1)
    assert len(lines) <= 2 and all(line.startswith("[mpiexec@") for line in lines), lines

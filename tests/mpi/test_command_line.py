"""The command line: as users start it, by mpiexec, once for each way to end; and on ranks that have started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

from bench.processes import marked
from rma_mm.algorithms import list_algorithms
from rma_mm.command.frame import Frame
from tests.doors import Ended, command
from tests.launch import ENVS, parallel
from tests.processes import MARKER, Mpiexec, is_open_mpi, job_environment, mpirun
from tests.thorough import thorough, usually

KEYS = [
    "shape", "dtype", "ranks", "nodes", "mesh", "algorithm", "layouts", "movement", "window", "kernel", "threads",
    "fallbacks", "seconds", "gflops", "predicted_seconds", "words", "messages", "peak_bytes", "reproducible", "speeds",
    "verified", "residual", "semiring", "epilogue", "verified_rows", "verified_how", "files",
    "exposed",
]
PRETENDED = ENVS["cliques"]
"""Two nodes."""
Done = subprocess.CompletedProcess[str] | Ended


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with A.npy (101 × 67), B.npy (67 × 53, column-major) and C0.npy (101 × 53)."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "A.npy", rng.standard_normal((101, 67)).astype(np.float32))
    np.save(tmp_path / "B.npy", np.asfortranarray(rng.standard_normal((67, 53)).astype(np.float32)))
    np.save(tmp_path / "C0.npy", rng.standard_normal((101, 53)).astype(np.float32))
    return tmp_path


def run(ranks: int, line: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`mpiexec -n ranks python -m rma_mm.run line…`."""
    return mpirun(ranks, ["-m", "rma_mm.run", *line.split()], variables=variables, cwd=cwd)


def refused(done: Done, *words: str) -> None:
    """Exit code 2, one short message on standard error, nothing else."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) <= 6, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def refused_in_a_line(done: Done, *words: str) -> None:
    """As `refused`, and the message is one line."""
    refused(done, *words)
    assert done.stderr.count("\n") == 1, done.stderr


def check_main_job(here: Path, done: Done, ranks: int, nodes: int) -> None:
    """Two files of odd, different, indivisible shapes and orders: read, multiplied, verified, written, reported."""
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    a, b, c = (np.load(here / f"{name}.npy") for name in "ABC")
    assert c.dtype == np.float32
    np.testing.assert_allclose(c, a @ b, atol=2e-5)
    report = json.loads((here / "r.json").read_text())
    assert sorted(report) == sorted(KEYS)
    assert report["shape"] == [101, 53, 67]
    assert (report["ranks"], report["nodes"]) == (ranks, nodes)
    assert (report["verified"], len(report["seconds"])) == (True, 3)
    assert report["words"]["per_rank_max"] > 0
    assert (report["exposed"] is None) == ("between nodes" not in done.stdout)
    if nodes == 1:
        assert report["exposed"] is None
    for word in ("stationary_c" if report["algorithm"] == "stationary_c" else "algorithm", "GF/s", "moved", "memory"):
        assert word in done.stdout
    assert done.stdout.count("GF/s") == 1
    assert sorted(os.listdir(here)) == ["A.npy", "B.npy", "C.npy", "C0.npy", "r.json"]


MAIN_JOB = "A.npy --json r.json B.npy -o C.npy --verify --repeat 3"


def test_the_main_job(here: Path) -> None:
    check_main_job(here, run(3, MAIN_JOB, here), 3, 1)


SELDOM = (
    "numba", "scipy", "statistics", "tomllib", "concurrent.futures", "zipfile", "socket",
    "rma_mm.runtime.verification.check", "rma_mm.runtime.reports", "rma_mm.runtime.products.batched",
    "rma_mm.runtime.files.containers.hdf5", "rma_mm.runtime.files.containers.safetensors",
    "rma_mm.runtime.files.containers.zarr_store",
)
"""What a product of two small .npy files does not need, so that it does not take its time to start."""


def test_a_plain_command_imports_what_it_needs(here: Path) -> None:
    program = (
        "import runpy, sys\nsys.argv = ['run', 'A.npy', 'B.npy', '-o', 'C.npy', '--quiet']\ntry:\n"
        "    runpy.run_module('rma_mm.run', run_name='__main__')\nfinally:\n"
        f"    print(*sorted(set({SELDOM!r}) & set(sys.modules)))"
    )
    done = mpirun(2, ["-c", program], cwd=here)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@parallel(ranks=(6,), env=("node",))
def test_the_main_job_on_ranks_that_have_started(comm: MPI.Intracomm, here: Path) -> None:
    check_main_job(here, command(comm, MAIN_JOB, here), 6, 1)


@parallel(ranks=(4,), env=("cliques",))
def test_the_main_job_on_nodes(comm: MPI.Intracomm, here: Path) -> None:
    check_main_job(here, command(comm, MAIN_JOB, here), 4, 2)


@parallel(ranks=(4,), env=("node",))
def test_scalars_transposes_and_the_old_c(comm: MPI.Intracomm, here: Path) -> None:
    """C0 is restored before each repetition; negative complex literals are words of their own; --quiet is silent."""
    a, b, c0 = (np.load(here / f"{name}.npy") for name in ("A", "B", "C0"))
    if comm.rank == 0:
        np.save(here / "At.npy", (a - 1j * a).T.astype(np.complex64))
    done = command(
        comm,
        "--quiet --transpose-a --conjugate-a At.npy B.npy --alpha -1-2j --beta -0.5 --c C0.npy -o C.npy --repeat 2 "
        "--warmup 2 --verify --mesh 2x2 --layout-a j,i --layout-c i:cyclic(3),j",
        here,
    )
    assert done == (0, "", "")
    c = np.load(here / "C.npy")
    assert c.dtype == np.complex64
    np.testing.assert_allclose(c, (-1 - 2j) * ((a + 1j * a) @ b) - 0.5 * c0, atol=1e-4)


def test_list(tmp_path: Path) -> None:
    """One algorithm a line, its name first, said once."""
    done = run(3, "--list", tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert [line.split()[0] for line in done.stdout.splitlines()] == list_algorithms()


@parallel(ranks=(3,), env=("node",))
def test_generated_matrices_are_verified(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """Without files; more ranks than the mesh; the report on standard output is nothing but JSON."""
    done = command(comm, "--shape 70,0,40 --mesh 2 --json - --dtype int8 --warmup 0", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sorted(report) == sorted(KEYS)
    assert (report["mesh"], report["dtype"], report["gflops"], report["verified"]) == ([2], "int8", 0, True)


@parallel(ranks=(4,), env=("node",))
def test_the_same_matrices_on_any_mesh(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """For a seed."""
    if comm.rank == 0:
        line = "--shape 37,41,43 --seed 5 --dtype int32 -o 1.npy --quiet"
        assert command(MPI.COMM_SELF, line, tmp_path).returncode == 0
    line = "--shape 37,41,43 --seed 5 --dtype int32 -o 2.npy --quiet --mesh 2x2 --layout-a j,i --transpose-b"
    assert command(comm, line, tmp_path).returncode == 0
    assert (np.load(tmp_path / "1.npy") == np.load(tmp_path / "2.npy")).all()


@parallel(ranks=(2,), env=("node",))
def test_dry_run(comm: MPI.Intracomm, here: Path) -> None:
    """The plan and its rivals are printed; nothing is multiplied or written."""
    done = command(comm, "A.npy B.npy -o C.npy --dry-run --explain --json r.json", here)
    assert done.returncode == 0
    for name in list_algorithms():
        assert name in done.stdout
    assert sorted(os.listdir(here)) == ["A.npy", "B.npy", "C0.npy"]


@parallel(ranks=(2,), env=("node",))
def test_what_any_rank_says_is_heard(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """Of those that have started: otherwise the tests here would not notice."""
    with mock.patch.object(Frame, "is_first", True):
        bad = command(comm, "--frobnicate", tmp_path)
    assert (bad.stdout, bad.stderr.count("rma_mm: ")) == ("", 2)


MISSING = "missing.npy B.npy"
BAD = {
    MISSING: ["missing.npy", "No such file"],
    "A.npy A.npy": ["(101, 67)", "C would be (101, 67)"],
    "A.npy B.npy --mesh 3x2": ["3x2", "6", "2"],
    "A.npy B.npy --algorithm magic": ["magic", "stationary_c", "queue"],
    "A.npy B.npy --layout-a i,q": ["'q'", "i, j"],
    "A.npy B.npy --memory-limit 10KiB": ["10240", "more"],
    "A.npy B.npy -o missing/C.npy": ["missing", "does not exist"],
    "A.npy B.npy -o C.npy --metrics missing/m.prom": ["--metrics missing/m.prom", "does not exist"],
    "A.npy B.npy --window glass": ["glass", "shared, allocated, created"],
    "A.npy B.npy --alpha 1j": ["alpha", "float32", "complex"],
    "A.npy B.npy --beta 1 --c A.npy": ["A.npy", "(101, 53)"],
}


@pytest.mark.parametrize("line", [MISSING])
def test_bad_input(here: Path, line: str) -> None:
    """One clear message on rank 0, exit code 2, nothing written."""
    before = sorted(os.listdir(here))
    refused(run(2, line, here), *BAD[line])
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize("line", [line for line in BAD if line != MISSING])
@parallel(ranks=(2,), env=("node",))
def test_any_bad_input(comm: MPI.Intracomm, here: Path, line: str) -> None:
    before = sorted(os.listdir(here))
    refused(command(comm, line, here), *BAD[line])
    assert sorted(os.listdir(here)) == before


SPOILED = """
import sys
from rma_mm.runtime.products import plan
original = plan.Plan.execute
def spoiled(self, *arguments, **options):
    c = original(self, *arguments, **options)
    if {when}:
        {fault}
    return c
plan.Plan.execute = spoiled
from rma_mm import run
sys.exit(run.main(sys.argv[1:]))
"""


def spoiled(when: str, fault: str, line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line with a product that goes wrong."""
    return mpirun(3, ["-c", SPOILED.format(when=when, fault=fault), *line.split()], cwd=cwd)


def test_wrong_result(here: Path) -> None:
    """Exit code 4, said so, and no output; a file that was there stays."""
    np.save(here / "C.npy", np.ones((1, 1)))
    done = spoiled("self.mesh.rank == 1 and c.tile.size", "c.tile[0, 0] += 1", "A.npy B.npy -o C.npy --verify", here)
    assert done.returncode == 4
    assert "the result is wrong" in done.stderr
    assert np.load(here / "C.npy").shape == (1, 1)
    assert sorted(os.listdir(here)) == ["A.npy", "B.npy", "C.npy", "C0.npy"]


def test_exception_on_one_rank(here: Path) -> None:
    """It prints, aborts, and nobody hangs; no unfinished output is left."""
    start = time.monotonic()
    done = spoiled("self.mesh.rank == 2", "raise ZeroDivisionError('of mine')", "A.npy B.npy -o C.npy", here)
    assert done.returncode == 1
    assert "ZeroDivisionError: of mine" in done.stderr
    assert time.monotonic() - start < 20
    assert sorted(os.listdir(here)) == ["A.npy", "B.npy", "C0.npy"]


def segments(pids: list[int]) -> set[str]:
    """Files in /dev/shm that the processes map."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line.split(maxsplit=5)[-1] for line in lines if " /dev/shm/" in line and not line.endswith("(deleted)")}


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", usually(1, ["Ctrl-C", "TERM to mpiexec", "TERM to one rank"]))
def test_interrupted(tmp_path: Path, how: str) -> None:
    """In the midst of a long multiply: ends within 5 s, no rank, output or segment is left."""
    environment = job_environment({"RMA_MM_WINDOW": "allocated"} if how == "Ctrl-C" else {})
    line = ["-m", "rma_mm.run", "--shape", "6000,6000,6000", "--repeat", "1000", "--warmup", "0", "-o", "C.npy"]
    with open(tmp_path / "log", "wb") as log:
        job = Mpiexec(3, line, environment, cwd=tmp_path, stdout=log, stderr=log).process
    try:
        pids = wait_for_ranks(environment, tmp_path)
        used = segments(pids)
        start = time.monotonic()
        if how == "Ctrl-C":
            os.killpg(job.pid, signal.SIGINT)  # as a terminal does
        else:
            os.kill(job.pid if how.endswith("mpiexec") else pids[1], signal.SIGTERM)
        job.wait(10)
        assert time.monotonic() - start < 5
    finally:
        job.kill()
    time.sleep(0.2)
    assert not any(Path(f"/proc/{pid}/maps").exists() and Path(f"/proc/{pid}/maps").read_bytes() for pid in pids)
    assert {name for name in used if Path(name).exists()} == set()
    assert os.listdir(tmp_path) == ["log"]
    if how == "TERM to one rank" or not is_open_mpi():  # whose mpiexec drops what ranks say once it is interrupted
        said = (tmp_path / "log").read_text()
        assert "interrupted by SIG" in said
        assert "C.npy was not written" in said


def wait_for_ranks(environment: dict[str, str], where: Path) -> list[int]:
    """The processes of the ranks, once they multiply: the unfinished output is there and matrices are made."""
    marker = f"{MARKER}={environment[MARKER]}".encode()
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        time.sleep(0.1)
        if any(name.endswith(".partial") for name in os.listdir(where)):
            time.sleep(1.5)
            return sorted(filter(is_rank, marked(marker)))
    raise AssertionError((where / "log").read_text())


def is_rank(pid: int) -> bool:
    """Whether a process of the job is a rank and not mpiexec, or a proxy of it, which names the ranks' command."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"rma_mm.run" in words and b"-n" not in words


def test_one_json_value_is_never_nan() -> None:
    """What is not finite is null."""
    from rma_mm.command.jobs.report import _known

    values: list[Any] = [float("nan"), float("inf"), 1.5, "x"]
    assert [_known(value) for value in values] == [None, None, 1.5, "x"]

"""Hosts that grant too little: one message before MPI or the system ends the job without one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rma_mm.windows.hosts import shm_limits
from tests.processes import ROOT, find_mpiexec, is_open_mpi, job_environment, mpirun
from tests.thorough import usually

pytest.importorskip("mpi4py", exc_type=ImportError)

NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount another /dev/shm"
)
LIBRARY = "import rma_mm; rma_mm.Mesh((2,))"


def small(size: str, *program: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks of a program where /dev/shm has that size."""
    inner = ["sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]
    words = [find_mpiexec(), "-n", "2", sys.executable, *program]
    return subprocess.run(
        ["unshare", "--mount", *inner, *words],
        env=job_environment({}), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )


@NEEDS_ROOT
@pytest.mark.skipif(is_open_mpi(), reason="Open MPI starts with less")
@pytest.mark.parametrize("size", usually(1, ["64k", "1m", "16m"]))
def test_too_small_a_dev_shm_is_named_before_mpi_starts(size: str) -> None:
    done = small(size, "-m", "rma_mm.run", "--shape", "8,8,8")
    assert done.returncode == 2, done
    assert done.stderr.count("/dev/shm: MPI needs about") == 1, done.stderr
    assert "--shm-size" in done.stderr
    if size == "64k":
        assert "MeshError: /dev/shm: MPI needs" in small(size, "-c", LIBRARY).stderr


@NEEDS_ROOT
@pytest.mark.skipif(is_open_mpi(), reason="Open MPI starts with less")
def test_what_is_enough_starts() -> None:
    done = small("12m", "-m", "rma_mm.run", "--shape", "8,8,8", "--quiet")
    assert done.returncode == 0, done


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user of whom nothing runs")
def test_a_user_who_may_start_no_thread_is_told() -> None:
    program = (
        "import os, resource; from rma_mm.windows.hosts.shm_limits import thread_problem as problem\n"
        "assert not problem();"
        "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)); os.setuid(54321); print(problem())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "ulimit -u is 1" in done.stdout


def test_what_the_host_or_a_control_group_leaves(tmp_path: Path) -> None:
    """The least of all: the host's free memory, caches counted, and limits less what is used of them."""
    groups, mount, meminfo = tmp_path / "cgroup", tmp_path / "mount", tmp_path / "meminfo"
    assert shm_limits.memory_free(tmp_path / "none", mount)[0] > 2**20
    meminfo.write_text("MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:     200 kB\nSwapFree:   50 kB\n")
    whole = (250 * 1024, "the host has free")
    (mount / "job" / "step").mkdir(parents=True)
    (mount / "memory" / "old").mkdir(parents=True)
    groups.write_text("4:cpu,memory:/old\n0::/job/step\n")
    (mount / "job" / "step" / "memory.max").write_text("max\n")
    (mount / "memory" / "old" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert shm_limits.memory_free(groups, mount, meminfo) == whole
    (mount / "memory" / "old" / "memory.limit_in_bytes").write_text("70000\n")
    assert shm_limits.memory_free(groups, mount, meminfo)[0] == 70000
    (mount / "memory" / "old" / "memory.usage_in_bytes").write_text("30000\n")
    assert shm_limits.memory_free(groups, mount, meminfo)[0] == 40000
    (mount / "memory" / "old" / "memory.stat").write_text("cache 9\ntotal_inactive_file 20000\n")
    assert shm_limits.memory_free(groups, mount, meminfo)[0] == 60000
    (mount / "job" / "memory.max").write_text("61000\n")
    (mount / "job" / "memory.current").write_text("5000\n")
    assert shm_limits.memory_free(groups, mount, meminfo) == (
        56000,
        f"the control group's {mount}/job/memory.max leaves",
    )


@pytest.mark.parametrize(
    "words", [["100000,100000,100000"], ["9,90000,90000,90000"], ["30,200000,200000", "--memory-limit", "900GiB"]]
)
def test_a_product_that_does_not_fit_is_refused(words) -> None:
    """Before anything is made, with what is missing."""
    done = mpirun(2, ["-m", "rma_mm.run", "--shape", *words], timeout=60)
    assert (done.returncode, done.stdout) == (2, ""), done
    told = re.search(r"the (?:product|matrices).* needs? (\d+) bytes.*, and .* (\d+), (\d+) too few;", done.stderr)
    assert told, done
    needed, free, missing = map(int, told.groups())
    assert needed - free == missing
    assert needed > 9e10

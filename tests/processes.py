"""Start programs under mpiexec, and make sure that all their processes end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

from bench.processes import ROOT, clean_environment, kill_marked, marked, mpiexec_of
from rma_mm.errors import AbsentError
from rma_mm.windows import libucp

MARKER = "RMA_MM_TEST_JOB"
"""Environment variable that every process of a job inherits; mpiexec's ranks leave its process group."""

OPEN_MPI_SAYS = re.compile(
    r"^-{60,}\n(?:prterun detected that one or more processes exited with non-zero status,"
    r"|MPI_ABORT was invoked on rank .*|prterun has exited due to process rank .*)\n(?:.*\n)*?-{60,}\n\0?"
    r"|^\[.*\] plm:ssh: Warning: setpgid.*\n|^\[.*\] PMIX ERROR: PMIX_ERR_UNREACH.*\n|^\[warn\] Epoll MOD.*\n",
    re.MULTILINE,
)
"""What Open MPI's launcher adds to standard error: at any exit code but 0, for a second node, and in a hurry."""

NAMESPACES = (("unshare", "--uts"), ("unshare", "--map-root-user", "--user", "--uts"))
"""Ways to give a process a host name of its own: root's, and anybody's where the kernel lets them."""

SLEEPY = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "30"}
"""Ranks of MPICH that wait sleep for a moment, after 30 looks and not 1000, instead of yielding only: there are more of
them than cores, and what yields still spins. A barrier of four ranks on two busy cores takes a tenth of the time."""

DIRECTORY = "RMA_MM_TEST_DIRECTORY"
"""Environment variable: the directory of a job of `tests.jobs`, with its socket and stack dumps."""


START_SECONDS = 0.2
"""In which a Python starts and imports NumPy on a machine to itself, roughly."""

PATIENCE = 8.0
"""The most that a time limit is stretched on a busy machine."""


class Limit:
    """A time limit for a machine to itself: where it passes, it is stretched by as much as a start takes longer now."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.stretch = seconds, 0.0
        self.begun = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds until it has passed; below 0 once it has."""
        spent = time.monotonic() - self.begun
        if spent > self.seconds and not self.stretch:
            self.stretch = slowness()
        return self.seconds * (self.stretch or 1.0) - spent


def slowness() -> float:
    """How many times as long as on a machine to itself a process takes to start just now, from 1 to PATIENCE."""
    begun = time.monotonic()
    with suppress(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", "import numpy"], timeout=PATIENCE * START_SECONDS, check=True)
    return min(PATIENCE, max(1.0, (time.monotonic() - begun) / START_SECONDS))


def find_mpiexec() -> str:
    """The mpiexec beside this interpreter, else the one on PATH.

    Raises FileNotFoundError, naming the extra that brings one.
    """
    found = mpiexec_of(sys.executable)
    if found is None:
        raise FileNotFoundError(
            f"no mpiexec beside {sys.executable} nor on PATH: install one with pip install '.[mpich]'"
        )
    return found


@cache
def is_open_mpi() -> bool:
    """Whether `find_mpiexec` is Open MPI's; False where there is none."""
    try:
        said = subprocess.run([find_mpiexec(), "--version"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return False
    return "Open MPI" in said.stdout


@cache
def namespace() -> tuple[str, ...] | None:
    """The first of NAMESPACES that this machine grants, None where it grants none."""
    for command in NAMESPACES:
        with suppress(FileNotFoundError):
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
                return command
    return None


def has_ucx() -> bool:
    """Return whether there is a library of UCX for windows."""
    try:
        libucp.loaded()
    except AbsentError:
        return False
    return True


def can_pretend_nodes() -> bool:
    """Whether jobs can be given several nodes on this machine: always with MPICH, which has variables for it."""
    return not is_open_mpi() or namespace() is not None


def pretended_nodes(ranks: int, variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """What Open MPI needs for the nodes that MPICH's `variables` pretend: mpiexec's arguments, and more variables.

    Hosts that share nothing but the network interface lo, with the ranks dealt out as MPICH deals them.
    """
    count = ranks if variables.get("MPIR_CVAR_NOLOCAL") == "1" else int(variables.get("MPIR_CVAR_NUM_CLIQUES", "1"))
    command = namespace() if count > 1 and is_open_mpi() else None
    if command is None:
        return [], {}
    hosts = ",".join(f"node{n}" for n in range(count))
    return ["--host", hosts, "--map-by", "node:oversubscribe"], {
        "PRTE_MCA_plm_ssh_agent": " ".join([*command, sys.executable, "-m", "tests.pretended_host"]),
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # each host believes that it has the cores to itself
    }


def job_environment(variables: Mapping[str, str], controlled: Sequence[str] = ()) -> dict[str, str]:
    """The caller's environment without the `controlled` names, with `variables` and a fresh marker."""
    return {
        **clean_environment(controlled),
        "PYTHONFAULTHANDLER": "1",
        **SLEEPY,
        "RMA_MM_PROGRESS": "off",  # standard error holds errors alone, however slow the machine is
        **variables,
        MARKER: uuid.uuid4().hex,
    }


class Mpiexec:
    """One mpiexec with its ranks, in a session of its own, its output in files."""

    def __init__(
        self,
        ranks: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        cwd: Path,
        stdout: IO[bytes],
        stderr: IO[bytes] | int,
    ) -> None:
        self.segments: set[Path] = set()
        self.marker = f"{MARKER}={environment[MARKER]}".encode()
        nodes, more = pretended_nodes(ranks, environment)
        self.process = subprocess.Popen(
            [find_mpiexec(), "-n", str(ranks), *nodes, sys.executable, *arguments],
            cwd=cwd,
            env={**environment, **more},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None where the job still runs after `seconds`, or as much longer as the machine is busy."""
        limit = Limit(seconds)
        while (left := limit.left) > 0:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(left)
        return self.process.poll()

    def remember_segments(self) -> None:
        """Note the shared memory files of the ranks that live now, for `kill` to remove."""
        for process in marked(self.marker):
            self.segments |= _shared_segments(process)

    def kill(self) -> None:
        """End every process of the job, at once, and remove what only MPI_Finalize would have removed."""
        self.remember_segments()
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        kill_marked(self.marker)
        self.process.wait()
        for segment in self.segments:
            with suppress(OSError):
                segment.unlink()


def _shared_segments(process: int) -> set[Path]:
    """Files under /dev/shm that `process` maps: killed ranks leave their bootstrap segment behind."""
    with suppress(OSError):
        maps = Path(f"/proc/{process}/maps").read_text()
        names = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if " /dev/shm/" in line)
        return {Path(name) for name in names if not name.endswith("(deleted)")}
    return set()


def mpirun(
    ranks: int,
    arguments: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    timeout: float = 60,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run `mpiexec -n ranks python arguments…` once: for command lines, whose exit code and output are the test.

    Standard error is that of the ranks: without what Open MPI's launcher adds at any exit code but 0.
    Raises subprocess.TimeoutExpired after `timeout` seconds, longer on a busy machine, with every process ended.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        environment = job_environment(variables or {})
        job = Mpiexec(ranks, arguments, environment, cwd=cwd, stdout=stdout, stderr=stderr)
        try:
            code = job.wait(timeout)
        finally:
            job.kill()
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    if code is None:
        raise subprocess.TimeoutExpired(list(arguments), timeout, texts[0], texts[1])
    return subprocess.CompletedProcess(list(arguments), code, texts[0], OPEN_MPI_SAYS.sub("", texts[1]))

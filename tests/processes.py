"""Start programs under mpiexec, and make sure that all their processes end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
"""The checkout: the code under test is always the one beside these tests, installed or not."""

MARKER = "RMA_MM_TEST_JOB"
"""Environment variable that every process of a job inherits; mpiexec's ranks leave its process group."""

OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
"""Open MPI's names for --allow-run-as-root, --oversubscribe and --bind-to none; MPICH ignores them."""

DIRECTORY = "RMA_MM_TEST_DIRECTORY"
"""Environment variable: the directory of a job of `tests.jobs`, with its socket and stack dumps."""

LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "HYDRA_", "HYDI_", "OMPI_COMM_WORLD_")
"""Left by an outer mpiexec; with them a new job would believe to be a rank of that one."""


def find_mpiexec() -> str:
    """The mpiexec beside this interpreter, else the one on PATH.

    Raises FileNotFoundError, naming the extra that brings one.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(
            f"no mpiexec beside {sys.executable} nor on PATH: install one with pip install '.[mpich]'"
        )
    return found


def job_environment(variables: Mapping[str, str], controlled: Sequence[str] = ()) -> dict[str, str]:
    """The caller's environment without the `controlled` names, with `variables` and a fresh marker."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in controlled and not name.startswith(LAUNCHER_PREFIXES)
    }
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **OPEN_MPI,
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
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
        self.process = subprocess.Popen(
            [find_mpiexec(), "-n", str(ranks), sys.executable, *arguments],
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None where the job still runs after `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def remember_segments(self) -> None:
        """Note the shared memory files of the ranks that live now, for `kill` to remove."""
        for process in _marked(self.marker):
            self.segments |= _shared_segments(process)

    def kill(self) -> None:
        """End every process of the job, at once, and remove what only MPI_Finalize would have removed."""
        self.remember_segments()
        processes = _marked(self.marker)
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        while processes:
            for process in processes:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            self.wait(0.02)
            processes = _marked(self.marker)
        self.process.wait()
        for segment in self.segments:
            with suppress(OSError):
                segment.unlink()


def _marked(marker: bytes) -> list[int]:
    """Ids of the living processes whose environment holds `marker` (none where there is no /proc)."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
    return found


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

    Raises subprocess.TimeoutExpired after `timeout` seconds, with every process ended.
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
    return subprocess.CompletedProcess(list(arguments), code, *texts)

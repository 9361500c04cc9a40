"""Jobs under mpiexec, started by benchmarks and tests: their launcher, their environment, and their certain end."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, from which every process of a job imports."""

OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
"""Open MPI's names for --allow-run-as-root, --oversubscribe and --bind-to none; MPICH ignores them."""

LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "HYDRA_", "HYDI_", "OMPI_COMM_WORLD_")
"""Left by an outer mpiexec; with them a new job would believe to be a rank of that one."""

LOOK = 0.02
"""Seconds between two looks at whether killed processes are gone."""


def mpiexec_of(python: str) -> str | None:
    """The mpiexec beside an interpreter, else the one on PATH, else None."""
    beside = Path(python).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def clean_environment(without: Container[str] = ()) -> dict[str, str]:
    """This process's environment for a new job: no trace of an outer mpiexec, and the checkout to import from.

    without: names of variables that are left out.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in without and not name.startswith(LAUNCHER_PREFIXES)
    }
    paths = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return OPEN_MPI | kept | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def marked(marker: bytes) -> list[int]:
    """Ids of the living processes whose environment holds `marker`, NAME=value (none where there is no /proc)."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
    return found


def kill_marked(marker: bytes) -> None:
    """Kill the processes whose environment holds `marker`, and return when none of them lives any more.

    mpiexec's ranks leave its process group, and children of theirs may too; what they inherit stays.
    """
    while left := marked(marker):
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(LOOK)

"""Launchers that do not fit the MPI library: every rank would believe that it is alone, or MPI would abort."""

from __future__ import annotations

import os
import shlex
import sys
import warnings

from rma_mm.errors import MeshError
from rma_mm.launch import interruptions_held, launched_ranks

SLURM = "SLURM_STEP_NUM_TASKS"  # set by srun for what it starts
CLASH = ("PMI_SIZE", "PMIX_NAMESPACE")
"""Variables of which MPICH 5.0 takes one at most: it aborts in MPI_Init if both are there (pmodels/mpich#7957)."""


class LonelyRankError(MeshError):
    """Several ranks were started, and each sees itself alone, or MPI would abort. The same on all of them."""


def lonely_problem(world_size: int, library: str) -> str:
    """Return why this rank sees fewer ranks than were started, with the command that works; empty if it does not.

    library: the name of the MPI library, as MPI_Get_library_version tells it.
    """
    started = launched_ranks()
    if started == 1 or world_size > 1:
        return ""
    is_open_mpi = "Open MPI" in library
    if SLURM in os.environ and not any(name in os.environ for name in ("HYDI_CONTROL_FD", "OMPI_COMM_WORLD_SIZE")):
        kind = "pmix" if is_open_mpi else "pmi2"
        return (
            f"srun: it started {started} tasks, but this Python's MPI ({library}) was not told, so every rank would be "
            f"alone; use srun --mpi={kind} -n {started}, or, inside salloc or sbatch, {matching_mpiexec()} -n {started}"
        )
    return (
        f"mpiexec: it started {started} ranks, but belongs to another MPI than this Python's ({library}), so every "
        f"rank would be alone; use {matching_mpiexec()}"
    )


def clash_problem(text: str) -> str:
    """Return why MPICH would abort in MPI_Init, with the remedy; empty if it would not.

    text: of MPI_Get_library_version, which is known before MPI is initialised.
    """
    library = library_name(text)
    if "MPICH" not in library or not os.environ.get(CLASH[1]):
        return ""
    if not os.environ.get(CLASH[0]):
        ranks = launched_ranks()
        return "" if "pmix" in text.lower() else (
            f"srun: it speaks PMIx, which this MPI ({library}) was built without; use srun --mpi=pmi2 -n {ranks}, or, "
            f"inside salloc or sbatch, {matching_mpiexec()} -n {ranks}"
        )
    command = shlex.join([matching_mpiexec(), "-n", os.environ[CLASH[0]]])
    return (
        f"environment: {' and '.join(CLASH)} are both set, of which this MPI ({library}) accepts one only; start with "
        f"env -u {CLASH[1]} {command}"
    )


def is_strange(library: str) -> bool:
    """True if the launcher of one library started this process, which loads the other.

    MPICH dies if Open MPI's launcher started it, and Open MPI complains at length under MPICH's.
    """
    return ("HYDI_CONTROL_FD" if "Open MPI" in library else "OMPI_COMM_WORLD_SIZE") in os.environ


def require_start() -> None:
    """Load MPI and start it, unless it is loaded. Raises LonelyRankError where it would abort."""
    if "mpi4py.MPI" in sys.modules or launched_ranks() == 1:
        return
    import mpi4py

    wanted = mpi4py.rc.initialize
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    with interruptions_held(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mpi4py suspects another launcher too, on every rank
        from mpi4py import MPI

        text = MPI.Get_library_version()
        library = library_name(text)
        problem = clash_problem(text) or (lonely_problem(1, library) if is_strange(library) else "")
        if problem:
            raise LonelyRankError(problem)
        if wanted:
            level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
            MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))


def check_launcher() -> None:
    """Raise LonelyRankError if several ranks were started and MPI sees one."""
    from mpi4py import MPI

    if problem := lonely_problem(MPI.COMM_WORLD.Get_size(), library_name(MPI.Get_library_version())):
        raise LonelyRankError(problem)


def library_name(text: str) -> str:
    """Return the name and version of an MPI library in one line."""
    return " ".join(text.strip("\0").split("\n")[0].split(",")[0].split())


def start_command(ranks: int) -> str:
    """Return the command that starts this program on some ranks."""
    return shlex.join(["mpiexec", "-n", str(ranks), "python", "-m", "mpi4py", sys.argv[0] or "PROGRAM.py"])


def matching_mpiexec() -> str:
    """Return the path of the launcher that fits: beside this Python if MPI came with pip."""
    return own_mpiexec() or "the mpiexec installed with that library"


def own_mpiexec() -> str | None:
    """Return the path of the launcher beside this Python; None if there is none."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else None

"""Finding MPI, and noticing a launcher that belongs to another one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rma_mm.errors import RmaError
from rma_mm.launch import launched_ranks
from rma_mm.runtime.ranks.launchers import clash_problem, is_strange, library_name, lonely_problem
from rma_mm.windows.hosts.shm_limits import segment_problem, thread_problem

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

UCX_DEVICES = Path("/sys/class/infiniband")  # where Linux lists the network devices that UCX drives


class LauncherError(RmaError):
    """No MPI library, one that did not start these ranks, or a host that grants too little to start."""

    is_alike = False  # true if every rank is refused, whatever its host


class StrangerError(LauncherError):
    """An MPI library that did not start these ranks."""

    is_alike = True


def connect() -> Intracomm:
    """COMM_WORLD, with MPI initialised.

    Raises LauncherError if there is no MPI library, the launcher is of another one, or this host grants too little.
    """
    if problem := thread_problem():  # before anything starts some: BLAS would hang
        raise LauncherError(problem)
    return _world(_library())


def _world(MPI: ModuleType) -> Intracomm:
    """COMM_WORLD, with MPI initialised. Raises LauncherError if the launcher is another library's."""
    started, name = launched_ranks(), library_name(MPI.Get_library_version())
    if not MPI.Is_initialized() and not (started > 1 and is_strange(name)):
        if problem := clash_problem(MPI.Get_library_version()):
            raise StrangerError(problem)
        if problem := segment_problem():
            raise LauncherError(problem)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mpi4py suspects it too, on every rank
            MPI.Init_thread()
    if problem := lonely_problem(MPI.COMM_WORLD.Get_size() if MPI.Is_initialized() else 1, name):
        raise StrangerError(problem)
    world: Intracomm = MPI.COMM_WORLD
    return world


def _library() -> ModuleType:
    """mpi4py.MPI, not initialised yet. Raises LauncherError if there is no MPI library."""
    _hush_ucx()
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LauncherError(
            f"no MPI library was found ({reason}); install one with pip install 'rma_mm[mpich]', "
            f"or load your site's MPI"
        ) from None
    return MPI


def _hush_ucx() -> None:
    """Open MPI 5.0: with no device for UCX, each rank calls that an error on standard error at its first window."""
    if not (UCX_DEVICES.is_dir() and any(UCX_DEVICES.iterdir())):
        os.environ.setdefault("OMPI_MCA_opal_common_ucx_verbose", "-1")

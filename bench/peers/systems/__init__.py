"""One module a system: how it holds A and B, multiplies them once, and shows its parts of C."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from bench.peers.cases import Case
from bench.peers.operands import Piece


@dataclass(frozen=True)
class Task:
    """What a process is to do."""

    case: Case
    ranks: int
    """Processes that multiply together; those that a system starts itself included."""
    rank: int
    threads: int
    """BLAS threads of each process."""
    directory: str
    """Empty, the same for all processes of the job."""
    port: int
    """Free when the job was started."""


class System(Protocol):
    """A product, ready to be computed as often as wanted. Made from a `Task`; A and B are then held each once."""

    facts: dict[str, Any]
    """What to report of it: versions, the BLAS it runs, its grid."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def multiply(self) -> None:
        """C = A · B; on return this rank's part is complete."""

    def pieces(self) -> Iterable[Piece]:
        """This rank's parts of C; over all ranks each element is there once."""


class OverMPI:
    """What systems on MPI share."""

    def __init__(self, task: Task) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        if self.comm.size != task.ranks:
            raise RuntimeError(f"{task.ranks} ranks were started, MPI knows of {self.comm.size}: wrong mpiexec?")
        self.case, self.task = task.case, task
        self.rank, self.ranks = self.comm.rank, self.comm.size

    def barrier(self) -> None:
        """Wait for all ranks, without taking the core of one that still multiplies."""
        from rma_mm.windows.waiting import barrier

        barrier(self.comm)


class Alone:
    """What systems share whose processes, if there are several, all follow this one."""

    def barrier(self) -> None:
        """Nobody else to wait for."""


def mpi_library() -> str:
    """The first words of MPI's description of itself."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split())

"""Memory that MPI allocates for one-sided access, where it can choose the best kind."""

from __future__ import annotations

from mpi4py import MPI

from rma_mm.flavours import ALLOCATED
from rma_mm.windows.base import window_bytes
from rma_mm.windows.mpi import Exposed, MpiWindow
from rma_mm.windows.ranks import exposed_sizes


class AllocatedWindow(MpiWindow):
    """Memory from MPI_Win_allocate; no rank reaches another's directly.

    MPICH could say where the memory of a rank of the same node is; Open MPI refuses MPI_Win_shared_query here.
    """

    flavour = ALLOCATED.name

    @classmethod
    def exposed(cls, comm: MPI.Intracomm, memory: int, nodes: tuple[int, ...], info: MPI.Info) -> Exposed:
        """New memory of the given number of bytes. Raises WindowError on every rank when one passes a negative size."""
        sizes = exposed_sizes(comm, memory)
        window = MPI.Win.Allocate(memory, 1, info, comm)
        return Exposed(window, {comm.rank: window_bytes(window.tomemory(), memory)}, sizes, owner=window)

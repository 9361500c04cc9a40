"""Memory that MPI allocates for one-sided access, where it can choose the best kind."""

from __future__ import annotations

from mpi4py import MPI

from rma_mm.flavours import ALLOCATED
from rma_mm.windows.mpi import CHUNK_BYTES, MpiWindow, exposed_sizes, node_map, window_bytes, window_info


class AllocatedWindow(MpiWindow):
    """Memory from MPI_Win_allocate; no rank reaches another's directly.

    MPICH could say where the memory of a rank of the same node is; Open MPI refuses MPI_Win_shared_query here.
    """

    flavour = ALLOCATED.name

    def __init__(
        self,
        comm: MPI.Intracomm,
        nbytes: int,
        *,
        node_of: tuple[int, ...] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Expose `nbytes` bytes of new memory. Collective over `comm`.

        Raises WindowError on every rank when one passes a negative size.
        """
        nodes = node_map(comm) if node_of is None else node_of
        sizes = exposed_sizes(comm, nbytes)
        info = window_info()
        window = MPI.Win.Allocate(nbytes, 1, info, comm)
        info.Free()
        bases = {comm.rank: window_bytes(window.tomemory(), nbytes)}
        super().__init__(comm, window, bases, sizes, nodes, chunk_bytes, owner=window)

"""The caller's own array, exposed as it stands."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from numpy.typing import NDArray

from rma_mm.flavours import CREATED
from rma_mm.windows.mpi import Exposed, MpiWindow
from rma_mm.windows.ranks import exposed_sizes
from rma_mm.windows.reach import array_problem, exposed_bytes, given_array, spanned_bytes


class CreatedWindow(MpiWindow):
    """A window over existing memory: no copy, but emulated in software unless the network does RDMA.

    So it is on one node too, in MPICH and in Open MPI (whose osc/sm serves memory of its own only): a get waits until
    its target calls MPI, and an accumulate was 20 to 80 times slower than into allocated memory.
    """

    flavour = CREATED.name

    @classmethod
    def exposed(
        cls, comm: MPI.Intracomm, memory: int | NDArray[Any], nodes: tuple[int, ...], info: MPI.Info
    ) -> Exposed:
        """Return the bytes that an array spans, its first element at byte 0; it is kept alive until `close`.

        A number stands for that many bytes of new memory. Raises WindowError on every rank when one passes an array
        with a negative stride, or of objects.
        """
        array = given_array(memory)
        nbytes = memory if isinstance(memory, int) else spanned_bytes(array)
        sizes = exposed_sizes(comm, nbytes, array_problem(array))
        spanned = exposed_bytes(array)
        window = MPI.Win.Create(MPI.buffer.fromaddress(spanned.ctypes.data, spanned.size), 1, info, comm)
        return Exposed(window, {comm.rank: spanned}, sizes)

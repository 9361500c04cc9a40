"""The caller's own array, exposed as it stands."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from rma_mm.flavours import CREATED
from rma_mm.windows.base import aligned_bytes
from rma_mm.windows.mpi import Exposed, MpiWindow
from rma_mm.windows.ranks import exposed_sizes


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
        """The bytes that an array spans, its first element at byte 0; it is kept alive until `close`.

        A number stands for that many bytes of new memory. Raises WindowError on every rank when one passes an array
        with a negative stride, or of objects.
        """
        array = aligned_bytes(max(0, memory)) if isinstance(memory, int) else memory
        nbytes = memory if isinstance(memory, int) else _spanned(array)
        sizes = exposed_sizes(comm, nbytes, _problem(array))
        spanned = _exposed(array)
        window = MPI.Win.Create(MPI.buffer.fromaddress(spanned.ctypes.data, spanned.size), 1, info, comm)
        return Exposed(window, {comm.rank: spanned}, sizes)


def _problem(array: NDArray[Any]) -> str | None:
    """Why the array cannot be exposed, or None."""
    if array.dtype.hasobject:
        return f"an array of dtype {array.dtype} holds references; only numbers can be exposed"
    strides = [stride for stride, extent in zip(array.strides, array.shape, strict=True) if extent > 1]
    if array.size and any(stride < 0 or stride % array.itemsize for stride in strides):
        return (
            f"an array of shape {array.shape} with byte strides {array.strides} cannot be exposed; strides must be "
            f"multiples of its item size {array.itemsize} and not negative; copy it first"
        )
    return None


def _spanned(array: NDArray[Any]) -> int:
    """Bytes from the first element of an array to the end of its last."""
    low, high = byte_bounds(array) if array.size else (0, 0)
    return int(high - low)


def _exposed(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes that an array spans, gaps included, without a copy; keeps the array's memory alive."""
    nbytes = _spanned(array)
    if nbytes == 0:
        return np.empty(0, np.uint8)
    first = array[(slice(0, 1),) * array.ndim].reshape(-1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (nbytes,), (1,), writeable=array.flags.writeable)

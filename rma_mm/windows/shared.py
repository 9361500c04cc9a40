"""One segment of memory per node: its ranks load and store it in place, others reach it through MPI."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from rma_mm.errors import MemoryLimitError
from rma_mm.flavours import SHARED
from rma_mm.windows.base import aligned_bytes, window_bytes
from rma_mm.windows.hosts.huge_pages import Remapped
from rma_mm.windows.hosts.shm_limits import SEGMENTS, free_segment_bytes
from rma_mm.windows.mpi import Exposed, MpiWindow
from rma_mm.windows.ranks import exposed_sizes

PAGE = 4096  # bytes of a page


class SharedWindow(MpiWindow):
    """Memory of one shared segment per node, and one MPI window over it on all ranks.

    Where all ranks are on one node, the window that allocated the segment serves every call (it adds 2 to 15
    times faster than a window created over the segment, which is what accumulates from other nodes need).
    """

    flavour = SHARED.name

    @classmethod
    def exposed(cls, comm: MPI.Intracomm, memory: int, nodes: tuple[int, ...], info: MPI.Info) -> Exposed:
        """New memory of the given number of bytes.

        Raises MemoryLimitError on every rank when a node's shared memory is too small, WindowError on every rank when
        one passes a negative size or MPI refuses.
        """
        sizes = exposed_sizes(comm, memory)
        _require_space(comm, sizes, nodes)
        mates = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank]]
        node = MPI.Intracomm(comm.Split(nodes[comm.rank], comm.rank))
        segment: MPI.Win | None = None
        remapped: Remapped | None = None
        problem: str | None = None
        bases = {}
        if len(mates) == 1:
            bases = {comm.rank: aligned_bytes(memory)}
        else:
            try:
                segment, bases, remapped = _segment(node, sizes, mates, info)
            except MPI.Exception as error:
                problem = f"MPI cannot allocate shared memory ({error}); use the window 'allocated'"
        exposed_sizes(comm, memory, problem)
        if segment is not None and len(mates) == comm.size:
            return Exposed(segment, bases, sizes, owner=segment, node=node, remapped=remapped)
        window = MPI.Win.Create(bases[comm.rank], 1, info, comm)
        return Exposed(window, bases, sizes, () if segment is None else (segment,), segment, node, remapped)


def _segment(
    node: MPI.Intracomm, sizes: tuple[int, ...], mates: list[int], info: MPI.Info
) -> tuple[MPI.Win, dict[int, NDArray[np.uint8]], Remapped]:
    """Return the node's shared segment, and the part of each of its ranks (`mates`). Collective over `node`."""
    segment = MPI.Win.Allocate_shared(sizes[mates[node.rank]], 1, info, node)
    parts = {rank: window_bytes(segment.Shared_query(at)[0], sizes[rank]) for at, rank in enumerate(mates)}
    remapped = Remapped()
    bases = {rank: remapped.shown(part) for rank, part in parts.items()}
    own = bases[mates[node.rank]]
    remapped.collapse(own)
    own[::PAGE] = 0  # pages are only promised until touched: take them now, on this rank's side of the machine
    return segment, bases, remapped


def _require_space(comm: MPI.Intracomm, sizes: tuple[int, ...], nodes: tuple[int, ...]) -> None:
    """Raise MemoryLimitError on every rank when a node cannot hold its ranks' bytes. Collective over `comm`.

    Without this, touching the memory would end the process by SIGBUS.
    """
    free = comm.allgather(free_segment_bytes())
    for node in dict.fromkeys(nodes):
        mates = [rank for rank, each in enumerate(nodes) if each == node]
        space = min((free[rank] for rank in mates if free[rank] is not None), default=None)
        needed = sum(-(-sizes[rank] // PAGE) * PAGE for rank in mates)
        if len(mates) > 1 and space is not None and needed > space:
            raise MemoryLimitError(
                f"shared window: node {node} (ranks {mates}) needs {needed} bytes of {SEGMENTS}, {space} are free, "
                f"{needed - space} are missing; enlarge {SEGMENTS}, or use the window 'allocated'"
            )

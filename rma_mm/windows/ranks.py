"""Facts that the ranks of a communicator tell each other before they open a window."""

from __future__ import annotations

from mpi4py import MPI

from rma_mm.errors import WindowError


def node_map(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the node number of each rank, numbered by first appearance. Collective over `comm`.

    Ranks are on one node when MPI says that they can share memory, which a launcher may pretend otherwise.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = comm.allgather(node.bcast(comm.rank))
    node.Free()
    numbers = {leader: number for number, leader in enumerate(dict.fromkeys(leaders))}
    return tuple(numbers[leader] for leader in leaders)


def exposed_sizes(comm: MPI.Intracomm, nbytes: int, problem: str | None = None) -> tuple[int, ...]:
    """Bytes that each rank exposes. Raises WindowError on every rank when one has a problem. Collective over `comm`."""
    if problem is None and nbytes < 0:
        problem = f"nbytes is {nbytes}; it must be 0 or more"
    told = comm.allgather((nbytes, problem))
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]
    if problems:
        raise WindowError("; ".join(problems))
    return tuple(size for size, _ in told)

"""The command that multiplies: its job, once all ranks are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rma_mm.command.frame import Frame
from rma_mm.command.jobs.job import Job
from rma_mm.command.options.run import RunOptions, load_algorithms
from rma_mm.errors import RmaError
from rma_mm.runtime.files.external import allowing
from rma_mm.runtime.files.opened import extents_of, open_array
from rma_mm.runtime.ranks.agreement import agreed

if TYPE_CHECKING:
    from mpi4py import MPI


def run(options: RunOptions, frame: Frame) -> int:
    """Multiply, and return the exit code. Raises RmaError."""
    if options.algorithms:
        with agreed(frame.comm, "--algorithms"):
            load_algorithms(options.algorithms)
    with allowing(options.allow_external):
        if is_batch(options, frame.comm):
            from rma_mm.command.jobs.batch_job import BatchJob  # seldom needed

            return BatchJob(options, frame).run()
        return Job(options, frame, multiply_in_blocks).run()


def is_batch(options: RunOptions, comm: MPI.Intracomm) -> bool:
    """True if batches are asked for: by a shape of four numbers or more, or by files of them. Collective."""
    found = len(options.shape) > 3
    if comm.rank == 0 and options.files:
        try:
            found = any(len(extents_of(open_array(path, options.dtype, options.format))) > 2 for path in options.files)
        except RmaError:
            found = False  # as the job of two matrices will say
    return bool(comm.bcast(found))


def multiply_in_blocks(*job: Any) -> int:
    """Multiply where C does not fit in memory, as `Job.larger` says."""
    from rma_mm.command.jobs.in_blocks import InBlocks  # seldom needed

    return InBlocks(*job).run()

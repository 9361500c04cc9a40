"""The command that multiplies: its job, once all ranks are there."""

from __future__ import annotations

from typing import Any

from rma_mm.command.frame import Frame
from rma_mm.command.jobs.batch_job import BatchJob, is_batch
from rma_mm.command.jobs.job import Job
from rma_mm.command.options.run import RunOptions, load_algorithms
from rma_mm.runtime.files.external import allowing
from rma_mm.runtime.ranks.agreement import agreed


def run(options: RunOptions, frame: Frame) -> int:
    """Multiply, and return the exit code. Raises RmaError."""
    if options.algorithms:
        with agreed(frame.comm, "--algorithms"):
            load_algorithms(options.algorithms)
    with allowing(options.allow_external):
        if is_batch(options, frame.comm):
            return BatchJob(options, frame).run()
        return Job(options, frame, multiply_in_blocks).run()


def multiply_in_blocks(*job: Any) -> int:
    """Multiply where C does not fit in memory, as `Job.larger` says."""
    from rma_mm.command.jobs.in_blocks import InBlocks  # seldom needed

    return InBlocks(*job).run()

"""The command that multiplies: its options, the list of algorithms, or its job."""

from __future__ import annotations

from rma_mm.algorithms import ALGORITHMS
from rma_mm.command.arguments import RunOptions, help_text, parse
from rma_mm.command.frame import Frame
from rma_mm.flavours import FLAVOURS
from rma_mm.runtime.files.external import allowing
from rma_mm.windows import absent

__all__ = ["parse", "run", "text"]


def text(options: RunOptions) -> str:
    """Return what `--help`, `--list` and `--list-windows` print: a line for each algorithm, or flavour."""
    if options.help:
        return help_text()
    if options.list_windows:
        width = max(map(len, FLAVOURS))
        return "\n".join(f"{name:<{width}}  {each.summary}{_absence(name)}" for name, each in FLAVOURS.items())
    width = max(map(len, ALGORITHMS))
    lines = (f"{name:<{width}}  {algorithm.summary} ({algorithm.source})" for name, algorithm in ALGORITHMS.items())
    return "\n".join(lines) if options.list else ""


def _absence(name: str) -> str:
    reason = absent(name)
    return f"; absent here: {reason}" if reason else ""


def run(options: RunOptions, frame: Frame) -> int:
    from rma_mm.command.batch_job import BatchJob, is_batch
    from rma_mm.command.in_blocks import InBlocks
    from rma_mm.command.job import Job

    with allowing(options.allow_external):
        if is_batch(options, frame.comm):
            return BatchJob(options, frame).run()
        return Job(options, frame, lambda *job: InBlocks(*job).run()).run()

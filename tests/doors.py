"""Command lines on ranks that have started already: a door's `main(argv)`, and what it said.

A process each would show one thing more: that exit code and words come through mpiexec, whole and once.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from mpi4py import MPI

from rma_mm.kernels.threads import get_threads, using_threads
from tests.processes import DIRECTORY

UCX_UNUSED = re.compile(r"^\[.*osc_ucx_component\.c:\d+ .*\n\s*\n?", re.MULTILINE)
"""What Open MPI says, where it does not take UCX for a window after it took it for others."""


class Ended(NamedTuple):
    """What became of a command line."""

    returncode: int
    stdout: str
    """What the ranks wrote, in their order."""
    stderr: str


def command(comm: MPI.Intracomm, line: str, cwd: Path, door: str = "run") -> Ended:
    """What `mpiexec -n P python -m rma_mm.door line…` ends with on the ranks of `comm`, the same on all. Collective."""
    main = import_module(f"rma_mm.{door}").main
    comm.barrier()  # none is still looking at what is in the directory
    with ExitStack() as around:
        around.enter_context(chdir(cwd))
        around.enter_context(using_threads(get_threads()))
        around.enter_context(mock.patch("rma_mm.command.launcher.connect", return_value=comm))
        files = [around.enter_context(_kept(descriptor)) for descriptor in (1, 2)]
        code = main(line.split())
    texts = [file.read_text(errors="replace") for file in files]
    for file in files:
        file.unlink()
    codes, *said = zip(*comm.allgather((code, *texts)), strict=True)
    assert len(set(codes)) == 1, codes
    stdout, stderr = map("".join, said)
    return Ended(code, stdout, UCX_UNUSED.sub("", stderr))


@contextmanager
def _kept(descriptor: int) -> Iterator[Path]:
    """A file with all that this process writes meanwhile; part of the job's output, should the job end."""
    file = Path(os.environ[DIRECTORY]) / f"output.{os.getpid()}.{descriptor}"
    _flush()
    before = os.dup(descriptor)
    with open(file, "wb") as opened:
        os.dup2(opened.fileno(), descriptor)
    try:
        yield file
    finally:
        _flush()
        os.dup2(before, descriptor)
        os.close(before)


def _flush() -> None:
    """Write out what Python and C have kept so far."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)

"""The commands, and the help of `rma-mm` itself."""

from __future__ import annotations

from rma_mm.classes import dataclass


@dataclass(frozen=True)
class Command:
    summary: str
    needs_ranks: bool = False
    """True if it starts MPI."""


COMMANDS = {
    "run": Command("multiply matrices in files, or generated ones", needs_ranks=True),
    "calibrate": Command("measure this machine, by which plans are chosen", needs_ranks=True),
    "simulate": Command("estimate a product on a machine that you describe"),
    "doctor": Command("check MPI, shared memory, BLAS and the rest of this installation"),
    "cache": Command("show or delete what is kept between jobs"),
    "completion": Command("print a completion script for bash or zsh"),
}

USAGE = """\
usage: rma-mm COMMAND [options]
       mpiexec -n P rma-mm COMMAND [options]

Distributed matrix multiplication by one-sided communication.

commands:
{commands}

options:
  --version   print the version
  -h, --help  print this help; rma-mm COMMAND --help describes a command

examples:
  mpiexec -n 4 rma-mm run                                 multiply two random matrices, and verify
  mpiexec -n 4 rma-mm run A.npy B.npy -o C.npy --verify   multiply two files into a third one
  rma-mm doctor                                           check this installation

exit codes:
  0  done
  1  failed at run time
  2  wrong arguments or input
  4  the result failed verification

`python -m rma_mm COMMAND` is the same."""


def help_text() -> str:
    """Return the help of `rma-mm` without a command."""
    width = max(map(len, COMMANDS))
    return USAGE.format(commands="\n".join(f"  {name:<{width}}  {each.summary}" for name, each in COMMANDS.items()))

"""Options of `rma-mm doctor`, and its help."""

from __future__ import annotations

from collections.abc import Sequence

from rma_mm.classes import dataclass
from rma_mm.command.options.parser import Parser

PROGRAM = "rma-mm doctor"
ABOUT = (
    "Check this installation: MPI and its launcher, shared memory, windows (tried on two ranks), BLAS and cores, "
    "memory, caches, calibration, optional packages. Each line is ok, a note, or a fault, with the remedy. Under "
    "mpiexec it checks the job as it is started there; it also works without MPI."
)
EPILOG = """\
examples:
  rma-mm doctor                  check this installation
  mpiexec -n 4 rma-mm doctor     check a job of 4 ranks
  srun -n 4 rma-mm doctor        check what Slurm starts

exit codes:
  0  no fault
  1  at least one fault
  2  wrong arguments"""


@dataclass(frozen=True)
class DoctorOptions:
    json: str | None  # a file, or - for standard output; None for lines of text
    help: bool


def parser() -> Parser:
    """Return the parser of this command."""
    made = Parser(PROGRAM, f"[mpiexec -n P] {PROGRAM} [--json [FILE]]", ABOUT, EPILOG)
    add = made.group("options")
    add("--json", nargs="?", const="-", metavar="FILE", help="write the findings; - or nothing for standard output")
    add("-h", "--help", action="store_true", help="print this help")
    return made


def parse(argv: Sequence[str]) -> DoctorOptions:
    return DoctorOptions(**vars(parser().parse_args(argv)))


def text(options: DoctorOptions) -> str:
    return parser().format_help() if options.help else ""

"""Options of `rma-mm cache`, and its help."""

from __future__ import annotations

from collections.abc import Sequence

from rma_mm.classes import dataclass
from rma_mm.command.options.parser import Parser

PROGRAM = "rma-mm cache"
ABOUT = (
    "Show or delete what is kept between jobs: compiled kernels, their measured speed, and calibrations of this "
    "machine. All of it is made anew when it is needed. Segments of shared memory that killed jobs left are deleted "
    "too."
)
EPILOG = """\
examples:
  rma-mm cache dir      print the folder
  rma-mm cache clean    delete what is in it

environment:
  RMA_MM_CACHE          the folder, ~/.cache/rma_mm if not set

exit codes:
  0  done
  1  the folder cannot be changed
  2  wrong arguments"""


@dataclass(frozen=True)
class CacheOptions:
    action: str  # "dir" or "clean"
    help: bool


def parser() -> Parser:
    """Return the parser of this command."""
    made = Parser(PROGRAM, f"{PROGRAM} dir|clean", ABOUT, EPILOG)
    add = made.group("options")
    add("action", nargs="?", choices=["dir", "clean"], default="dir", help="print the folder (dir), or delete its "
        "contents")
    add("-h", "--help", action="store_true", help="print this help")
    return made


def parse(argv: Sequence[str]) -> CacheOptions:
    return CacheOptions(**vars(parser().parse_args(argv)))


def text(options: CacheOptions) -> str:
    return parser().format_help() if options.help else ""

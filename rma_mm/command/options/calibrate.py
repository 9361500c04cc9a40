"""Options of `rma-mm calibrate`, and its help."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from rma_mm.classes import dataclass
from rma_mm.command.options.parser import MOST_THREADS, PROGRESS, Parser, check_plot, count
from rma_mm.errors import quoted
from rma_mm.flavours import FLAVOURS

PROGRAM = "rma-mm calibrate"
SECONDS, TO_PARTS = 14.0, 0.55
"""Default seconds of a calibration, and the fraction of them that goes to single parts; the rest goes to whole
products.
"""
MOST_SECONDS = 1e6
ABOUT = (
    "Measure this machine for the planner, store the figures, and show them. First each figure is measured by itself; "
    "then whole products are run, to which the figures are fitted. The stored figures hold for jobs with as many ranks "
    "in the same places and as many threads. With --kernels, BLAS and generated code are compared for all types and "
    'classes of shapes, of which kernel="auto" takes the faster one; else each is when a large product first needs it.'
)
EPILOG = """\
examples:
  mpiexec -n 4 rma-mm calibrate --seconds 30    measure for longer
  rma-mm calibrate --show                       print what is stored

exit codes:
  0  done
  1  failed at run time
  2  wrong arguments"""


@dataclass(frozen=True)
class CalibrateOptions:
    seconds: float
    flavours: tuple[str, ...]
    threads: int | None
    json: str | None
    plot: str | None
    kernels: bool
    show: bool
    forget: bool
    progress: str | None
    help: bool


def parser() -> Parser:
    """Return the parser of this command."""
    made = Parser(PROGRAM, f"mpiexec -n P {PROGRAM} [options]", ABOUT, EPILOG)
    add = made.group("options")
    add("--seconds", type=_seconds, default=SECONDS, metavar="S", help=f"seconds to measure ({SECONDS:g})")
    add("--flavours", type=_flavours, default=tuple(FLAVOURS), metavar="A,B", help=f"windows to measure "
        f"({','.join(FLAVOURS)})")
    threads = count(1, MOST_THREADS)
    add("--threads", type=threads, metavar="N", help="BLAS threads of a rank (cores of a node / its ranks)")
    add("--json", metavar="FILE", help="write the machine, for RMA_MM_MACHINE")
    add("--plot", metavar="FILE", help="draw the time of all transfers against their size; needs matplotlib")
    add("--kernels", action="store_true", help="also compare BLAS with generated code; takes a minute")
    add("--show", action="store_true", help="print the stored figures without measuring")
    add("--forget", action="store_true", help="delete the stored figures without measuring")
    add("--progress", choices=PROGRESS, help="report progress: a bar on a terminal, else lines (RMA_MM_PROGRESS, auto)")
    add("-h", "--help", action="store_true", help="print this help")
    return made


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= MOST_SECONDS:
        rule = f"it takes a number of seconds above 0, at most {MOST_SECONDS:g}"
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, {rule}")
    return found


def _flavours(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= set(FLAVOURS):
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; must be some of {','.join(FLAVOURS)}")
    return names


def parse(argv: Sequence[str]) -> CalibrateOptions:
    """Return the options. Raises OptionError, also for a plot that cannot be drawn here."""
    options = CalibrateOptions(**vars(parser().parse_args(argv)))
    check_plot(options.plot)
    return options


def text(options: CalibrateOptions) -> str:
    return parser().format_help() if options.help else ""

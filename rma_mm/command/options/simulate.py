"""Options of `rma-mm simulate`, and its help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rma_mm.classes import dataclass
from rma_mm.command.options.parser import DIGITS, Parser, check_plot, count, dtype, mesh, shape, size
from rma_mm.errors import OptionError, quoted

PROGRAM = "rma-mm simulate"
SIMULATED = 512  # ranks of which all operations are simulated, at most
EXAMPLES = ("plain", "heterogeneous")  # machines that --example prints
ABOUT = (
    "Estimate a product on a described machine, without running it. Prints, for every algorithm and up to millions of "
    "ranks: seconds, and the fraction of them that multiply-adds alone need; the words that the busiest rank sends and "
    "receives, and their lower bound; messages of a rank on average; memory of the fullest rank. Consecutive ranks "
    "share a node. Without --mesh, each algorithm is estimated on a few grids of two and three axes that suit the "
    "shape, and shown on the best one."
)
EPILOG = """\
examples:
  rma-mm simulate --shape 20000,20000,20000 --ranks 64 --ranks-per-node 8
  rma-mm simulate --example > machine.toml
  rma-mm simulate --machine machine.toml --shape 9000,9000,9000 --strong 1,8,64,512

exit codes:
  0  done
  1  a file could not be written
  2  wrong arguments"""


@dataclass(frozen=True)
class SimulateOptions:
    """The command line. Names are those of the flags."""

    machine: str
    shape: tuple[int, int, int] | None
    dtype: str
    ranks: int | None
    mesh: tuple[int, ...] | None
    nodes: int | None
    ranks_per_node: int | None
    algorithm: str
    layout_a: str | None
    layout_b: str | None
    layout_c: str | None
    memory_limit: int | None  # bytes
    strong: tuple[int, ...] | None
    weak: tuple[int, ...] | None
    plot: str | None
    timeline: str | None
    json: str | None
    example: str
    help: bool


def parser() -> Parser:
    """Return the parser of this command."""
    made = Parser(PROGRAM, f"{PROGRAM} --shape M,N,K [options]", ABOUT, EPILOG)
    add = made.group("options")
    add("--machine", default="typical", metavar="FILE", help="TOML (see --example), what rma-mm calibrate --json "
        "writes, or typical (typical)")
    add("--shape", type=shape, metavar="M,N,K", help="size of the product; with --weak, on the fewest ranks")
    add("--dtype", type=dtype, default="float32", metavar="T", help="element type of A, B and C (float32)")
    add("--ranks", type=count(1), metavar="P", help="number of ranks (all of the machine)")
    add("--mesh", type=mesh, metavar="8x8[x4]", help="ranks along each axis (chosen)")
    add("--nodes", type=count(1), metavar="N", help="nodes of the machine (as in its file)")
    add("--ranks-per-node", type=count(1), metavar="N", help="ranks of a node (as in its file)")
    add("--algorithm", default="auto", metavar="NAME", help="a name from rma-mm run --list, or NAME:FORM (all)")
    for name in "abc":
        add(f"--layout-{name}", metavar="T", help=f"placement of {name.upper()}, as i,j (chosen)")
    add("--memory-limit", type=size, metavar="2GiB", help="memory of a rank (as in the machine's file)")
    add("--strong", type=_ranks, metavar="1,4,16", help="the same product on each of these numbers of ranks")
    add("--weak", type=_ranks, metavar="1,8,64", help="products that grow with the ranks: m*n*k of a rank is constant")
    add("--plot", metavar="FILE", help="draw the curve of --strong or --weak; needs matplotlib")
    add("--timeline", metavar="FILE", help="simulate the fastest algorithm, or --algorithm, operation by operation, "
        f"and write a timeline of up to {SIMULATED} ranks for ui.perfetto.dev")
    add("--json", metavar="FILE", help="write all figures")
    add("--example", default="", nargs="?", const="plain", choices=EXAMPLES, metavar="heterogeneous",
        help="print a machine description to start from, or one with two kinds of nodes")
    add("-h", "--help", action="store_true", help="print this help")
    return made


def _ranks(text: str) -> tuple[int, ...]:
    found = tuple(int(word) for word in text.split(",") if word.strip().isdecimal() and len(word) < DIGITS)
    if len(found) != text.count(",") + 1 or sorted({*found, 0}) != [0, *found]:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs growing numbers of ranks, as 1,4,16")
    return found


def parse(argv: Sequence[str]) -> SimulateOptions:
    """Return the options. Raises OptionError, also for a plot that cannot be drawn."""
    options = SimulateOptions(**vars(parser().parse_args(argv)))
    if options.help or options.example:
        return options
    if options.shape is None:
        raise OptionError("--shape: is missing; give M,N,K, as 10000,10000,10000")
    given = [f"--{name}" for name in ("ranks", "mesh", "strong", "weak") if getattr(options, name) is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)}: each sets the number of ranks; use only one of them")
    if options.timeline and (options.strong or options.weak):
        raise OptionError("--timeline: needs one number of ranks; use --ranks or --mesh")
    if options.plot and not (options.strong or options.weak):
        raise OptionError("--plot: needs --strong or --weak")
    check_plot(options.plot)
    return options


def text(options: SimulateOptions) -> str:
    if options.help:
        return parser().format_help()
    if not options.example:
        return ""
    from rma_mm.policy.model.machine_file import EXAMPLE, HETEROGENEOUS

    return dict(zip(EXAMPLES, (EXAMPLE, HETEROGENEOUS), strict=True))[options.example]

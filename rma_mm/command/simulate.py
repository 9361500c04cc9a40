"""Estimate a product on a described machine, without running it. Needs no MPI.

Prints, for every algorithm and up to millions of ranks: seconds, and the fraction of them that multiply-adds alone
need; the words that the busiest rank sends and receives, and their lower bound; messages of a rank on average; memory
of the fullest rank. Consecutive ranks share a node. Without --mesh, each algorithm is estimated on a few grids of two
and three axes that suit the shape, and shown on the best one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from math import prod
from typing import Any

from rma_mm.algorithms import find_algorithm
from rma_mm.command.arguments import DIGITS, Parser, check_plot, count, dtype, mesh, shape, size
from rma_mm.command.frame import DONE, Frame
from rma_mm.command.timeline import SIMULATED, predicted_records, simulated_by, timeline
from rma_mm.elements.dtypes import accumulator, parse_dtype
from rma_mm.errors import OptionError, display_path, quoted
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.policy.model.machine import Machine
from rma_mm.policy.model.machine_file import EXAMPLE, HETEROGENEOUS, TYPICALLY, Description, read_machine
from rma_mm.policy.planner.sweep import Price, SweepProblem, draw, price_table, prices, strong, sweep_table, weak
from rma_mm.unfinished import write_whole

PROGRAM = "python -m rma_mm.simulate"
EXAMPLES = {"plain": EXAMPLE, "heterogeneous": HETEROGENEOUS}  # what `--example` prints


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


def _parser() -> Parser:
    assert __doc__ is not None
    about = __doc__.partition("\n\n")[2]
    usage = f"{PROGRAM} --shape M,N,K [options]"
    parser = Parser(prog=PROGRAM, usage=usage, description=about, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--machine", default="typical", metavar="FILE", help="TOML (see --example), what rma_mm.calibrate --json "
        "writes, or typical (typical)")
    add("--shape", type=shape, metavar="M,N,K", help="size of the product; with --weak, on the fewest ranks")
    add("--dtype", type=dtype, default="float32", metavar="T", help="element type of A, B and C (float32)")
    add("--ranks", type=count(1), metavar="P", help="number of ranks (all of the machine)")
    add("--mesh", type=mesh, metavar="8x8[x4]", help="ranks along each axis (chosen)")
    add("--nodes", type=count(1), metavar="N", help="nodes of the machine (as in its file)")
    add("--ranks-per-node", type=count(1), metavar="N", help="ranks of a node (as in its file)")
    add("--algorithm", default="auto", metavar="NAME", help="a name from rma_mm.run --list, or NAME:FORM (all)")
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
    return parser


def _ranks(text: str) -> tuple[int, ...]:
    found = tuple(int(word) for word in text.split(",") if word.strip().isdecimal() and len(word) < DIGITS)
    if len(found) != text.count(",") + 1 or sorted({*found, 0}) != [0, *found]:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs growing numbers of ranks, as 1,4,16")
    return found


def parse(argv: Sequence[str]) -> SimulateOptions:
    """Return the options. Raises OptionError, also for a plot that cannot be drawn."""
    options = SimulateOptions(**vars(_parser().parse_args(argv)))
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
    return _parser().format_help() if options.help else EXAMPLES.get(options.example, "")


def run(options: SimulateOptions, frame: Frame) -> int:
    """Print the table, and write the requested files. Raises RmaError."""
    found = [prices(question) for question in questions(options)]
    first = found[-1][0].question
    shape = "x".join(map(str, options.shape or ()))
    title = f"{shape} {options.dtype} on {first.cost_model.machine.name}, {first.per_node} ranks a node"
    kind = "strong scaling: " if options.strong else "weak scaling from " if options.weak else f"{first.ranks} ranks: "
    frame.say(kind + title, sweep_table(found) if options.strong or options.weak else price_table(found[0]))
    made: dict[str, str | bytes] = {}
    if options.json:
        made["json"] = json.dumps(_document(options, found), indent=1, allow_nan=False) + "\n"
    if options.plot:
        picture = BytesIO()
        draw(found, picture, options.plot.rpartition(".")[2], kind + title)
        made["plot"] = picture.getvalue()
    if options.timeline:
        made["timeline"] = json.dumps(_timeline(found[0][0])) + "\n"
    frame.has_begun = True
    for name, content in made.items():
        path = getattr(options, name)
        write_whole(f"--{name} {display_path(path)}", path, content)
    return DONE


def questions(options: SimulateOptions) -> list[SweepProblem]:
    """Return the problems to be priced: one, or one for each number of ranks. Raises RmaError."""
    assert options.shape is not None
    known = TYPICALLY if options.machine == "typical" else read_machine(options.machine)
    known = known.of(options.nodes, options.ranks_per_node)
    if known.ranks_per_node is None:
        raise OptionError(f"--ranks-per-node: is missing; {options.machine} does not give the ranks of a node")
    if options.algorithm != "auto":
        find_algorithm(options.algorithm)
    machine = replace(known.machine, rooms=()) if options.memory_limit else known.machine
    question = SweepProblem(
        options.shape, _most(options, known), _cost_model(machine, options.dtype), known.ranks_per_node,
        options.mesh, options.algorithm, (options.layout_a, options.layout_b, options.layout_c),
        options.memory_limit or known.machine.memory,
    )
    if options.strong:
        return strong(question, options.strong)
    return weak(question, options.weak) if options.weak else [question]


def _most(options: SimulateOptions, known: Description) -> int:
    """Return the number of ranks, or the largest of several. Raises OptionError if the machine has fewer."""
    assert known.ranks_per_node is not None
    there = known.nodes * known.ranks_per_node if known.nodes else None
    sizes = [*(options.strong or options.weak or ()), prod(options.mesh) if options.mesh else options.ranks]
    wanted = max((size for size in sizes if size is not None), default=there)
    if wanted is None:
        raise OptionError(f"--ranks: is missing, and {options.machine} does not give the number of nodes")
    if there is not None and wanted > there:
        raise OptionError(
            f"ranks: got {wanted}; {options.machine} has {there}, {known.nodes} nodes of {known.ranks_per_node}: "
            f"change that with --nodes and --ranks-per-node"
        )
    return wanted


def _cost_model(machine: Machine, dtype: str) -> CostModel:
    """Return the cost model of products of this type. Raises OptionError if nothing is known of it."""
    element = parse_dtype(dtype)
    summed = accumulator(element)
    kernels = [name for name in machine.kernels if name.split()[0] == summed.name]
    if not kernels:
        known = ", ".join(dict.fromkeys(name.split()[0] for name in machine.kernels))
        raise OptionError(f"--dtype: got {dtype}; {machine.name} has no figures for it, only for {known}")
    return CostModel(machine, summed.name, kernels[0].split()[-1], element.itemsize, summed.itemsize)


def _document(options: SimulateOptions, found: list[list[Price]]) -> dict[str, Any]:
    first = found[-1][0].question
    return {
        "machine": first.cost_model.machine.as_json(), "dtype": options.dtype, "ranks_per_node": first.per_node,
        "prices": [price.as_json() for each in found for price in each],
    }


def _timeline(price: Price) -> dict[str, Any]:
    """Return the predicted timeline of a product, in the format of Chrome traces. Raises OptionError."""
    ranks = price.question.ranks
    if ranks > SIMULATED:
        raise OptionError(f"--timeline: got {ranks} ranks; every operation is simulated of up to {SIMULATED}")
    if price.why_not:
        raise OptionError(f"--timeline: {price.algorithm}: {price.why_not}")
    simulated = simulated_by(price.schedule(), price.question.cost_model)
    mesh = price.request.mesh
    facts = {"algorithm": price.algorithm, "seconds": simulated.seconds, "priced": price.seconds} | price.as_json()
    return timeline(predicted_records(simulated, ranks), mesh, mesh.node_of_rank, facts)

"""Parse the command line of `rma_mm.run`. No MPI here: every rank parses, rank 0 reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any, NoReturn

from rma_mm.elements.dtypes import parse_dtype
from rma_mm.elements.semiring import PLUS_TIMES, SEMIRINGS
from rma_mm.errors import QUOTED, OptionError, RmaError, brief, display_path, quoted, truncate
from rma_mm.flavours import DEFAULT, FLAVOURS
from rma_mm.geometry.extents import parse_bytes, too_large
from rma_mm.geometry.mesh import AXIS_NAMES
from rma_mm.geometry.shares import speeds_problem
from rma_mm.kernels.epilogue.activations import ACTIVATIONS
from rma_mm.kernels.epilogue.epilogue import SIDES
from rma_mm.policy.planner.preference import PREFERENCES
from rma_mm.runtime.files.formats import named_in
from rma_mm.runtime.files.names import Name
from rma_mm.unfinished import real_path
from rma_mm.windows.hosts.liveness import USUAL, timeout_of
from rma_mm.windows.hosts.liveness import VARIABLE as TIMEOUT

PROGRAM = "python -m rma_mm.run"
DEFAULT_SHAPE = (2048, 2048, 2048)
DEFAULT_DTYPE = "float32"
SCALARS = ("--alpha", "--beta")
MOST, MOST_RANKS, DIGITS = 2**62, 2**31, 32
"""Limits: the largest whole number or number of bytes, the largest number of ranks, the most digits that are read."""
MOST_TIMES, MOST_THREADS = 10**9, 2**16


@dataclass(frozen=True)
class RunOptions:
    """The command line, checked for what can be checked without ranks and files. Names are those of the flags."""

    files: tuple[str, ...]  # A.npy and B.npy, or none for generated matrices
    output: str | None
    format: str | None  # format of all matrix files; by default their names tell
    allow_external: bool  # true to read files that the files of the operands name
    chunks: tuple[int, int] | None
    shards: tuple[int, int] | None
    compress: str | None
    shape: tuple[int, ...]  # (M, N, K) of generated matrices; (…, M, K, N) of batches
    dtype: str | None
    compute_dtype: str | None
    semiring: str
    mesh: tuple[int, ...] | None
    algorithm: str
    prefer: str | None
    layout_a: str | None
    layout_b: str | None
    layout_c: str | None
    transpose_a: bool
    transpose_b: bool
    conjugate_a: bool
    conjugate_b: bool
    symmetric: bool
    alpha: complex
    beta: complex
    bias: str | None  # A vector in a file
    bias_per: str | None
    activation: str | None
    result_dtype: str | None
    c: str | None
    memory_limit: int | None  # bytes
    resume: bool  # true to go on with what a job that was ended has written of C
    repeat: int
    warmup: int | None  # None for one, or for none where operands stay in their files
    window: str | None
    kernel: str
    threads: int | None
    speeds: tuple[float, ...] | None
    timeout: float | None  # seconds
    verify: bool
    explain: str
    frontier: bool
    picture: str | None
    dry_run: bool
    json: str | None
    trace: str | None
    metrics: str | None
    list: bool
    list_windows: bool
    quiet: bool
    verbose: bool
    seed: int
    help: bool

    @property
    def is_symmetric(self) -> bool:
        """True if C is: as is said, or as one file times its own transpose is, where nothing else enters."""
        alone = self.beta == 0 and self.bias is None and self.transpose_a != self.transpose_b
        return self.symmetric or (alone and len({real_path(file) for file in self.files}) == 1)

    @property
    def saving(self) -> dict[str, Any]:
        return {"format": self.format, "chunks": self.chunks, "shards": self.shards, "compress": self.compress}

    @property
    def is_checked(self) -> bool:
        return self.verify or not self.files


def parse(argv: Sequence[str]) -> RunOptions:
    """Return the options in `argv`. Raises OptionError, naming the argument, what was got and what fits."""
    parsed = vars(_parser().parse_intermixed_args(_joined(argv)))
    shape = parsed.pop("shape")
    options = RunOptions(files=tuple(parsed.pop("files")), shape=shape or DEFAULT_SHAPE, **parsed)
    if options.list or options.list_windows or options.help:
        return options
    if len(options.files) not in (0, 2):
        raise OptionError(
            f"files: got {len(options.files)} ({truncate(', '.join(options.files))}); name two, A.npy and B.npy, "
            f"or none to multiply generated matrices"
        )
    if options.resume and not (options.files and options.output):
        raise OptionError("--resume: needs the same A, B and -o FILE as the interrupted job")
    if options.files and shape:
        raise OptionError(
            f"--shape: got {shape} together with files, which have their own shapes; leave one of them out"
        )
    m, n, k = options.shape if len(options.shape) == 3 else (options.shape[i] for i in (-3, -1, -2))
    count = prod(options.shape[:-3])
    for name, extents in (("A", (count * m, k)), ("B", (count * k, n)), ("C", (count * m, n))):
        if reason := too_large(extents):
            raise OptionError(f"--shape: got {options.shape}, so that {name} is {extents}; {reason}")
    if options.output is None and (unused := [key for key in ("chunks", "shards", "compress") if vars(options)[key]]):
        raise OptionError(f"--{unused[0]}: needs --output FILE")
    if (options.bias is None) != (options.bias_per is None):
        fix = "say --bias-per column or --bias-per row" if options.bias else "name a file with --bias, or leave it out"
        raise OptionError(f"--bias: got {truncate(options.bias)} with --bias-per {options.bias_per}; {fix}")
    if options.beta != 0 and options.c is None:
        raise OptionError(f"--beta: got {options.beta} without a matrix to scale; name it with --c C0.npy")
    if options.symmetric and not options.files:
        raise OptionError(
            "--symmetric: the product of generated matrices is not symmetric; name two files, or leave it out"
        )
    _require_own_names(options)
    return options


def _require_own_names(options: RunOptions) -> None:
    """Raise OptionError if the result would be written over an input, or a report over a matrix or a report."""
    o = options
    inputs = (*(("an operand", file) for file in o.files), ("--c", o.c), ("--bias", o.bias))
    reports = ("--json", o.json), ("--picture", o.picture), ("--trace", o.trace), ("--metrics", o.metrics)
    taken: list[tuple[str, str, str]] = []
    for what, text in (*inputs, ("--output", o.output), *reports):
        if text is None or "\0" in text or (text == "-" and what.startswith("--")):
            continue
        is_report = (what, text) in reports
        name = Name(text, text) if is_report else named_in(text, o.format)[0]
        file, inner = real_path(name.path), name.inner.strip("/")
        same = [other for path, matrix, other in taken if path == file and (is_report or inner in ("", matrix))]
        if same and (what, text) not in inputs:
            raise OptionError(f"{what}: got {display_path(text)}, which is the file of {same[-1]} too; name another")
        taken.append((file, inner, what))


def help_text() -> str:
    return _parser().format_help()


class Parser(argparse.ArgumentParser):
    """argparse, but errors are raised and not printed."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{brief(message, QUOTED)}; {self.prog} --help lists the arguments")


def check_plot(path: str | None) -> None:
    """Raise OptionError if a plot is wanted and cannot be drawn here."""
    if path and find_spec("matplotlib") is None:
        raise OptionError("--plot: needs matplotlib, which is not installed: pip install matplotlib, or use --json")


def _joined(argv: Sequence[str]) -> list[str]:
    """Return `argv` with values joined to their flags: argparse would take -1-2j for a flag."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] in SCALARS and word.startswith("-") and _is_number(word):
            words[-1] += f"={word}"
        else:
            words.append("--explain=best" if word == "--explain" else word)
    return words


def _is_number(word: str) -> bool:
    try:
        complex(word)
    except ValueError:
        return False
    return True


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        usage=f"mpiexec -n P {PROGRAM} [A.npy B.npy] [-o C.npy] [options]",
        description="Multiply matrices on all ranks of the job: C = alpha · op(A) @ op(B) + beta · C0. Without files, "
        "multiply generated matrices and verify the result.",
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("files", nargs="*", metavar="A.npy B.npy", help="the operands: files of matrices or batches")
    add("-o", "--output", metavar="C.npy", help="file of the result")
    _add_files(add)
    _add_problem(add)
    _add_method(add)
    add("--repeat", type=count(1, MOST_TIMES), default=1, metavar="N", help="timed products (1)")
    add("--warmup", type=count(0, MOST_TIMES), metavar="N", help="untimed products before these (1; 0 if operands "
        "stay in files)")
    add("--verify", action="store_true", help="check the written result against the inputs, which are read "
        "again; products of generated matrices are always checked")
    add(
        "--explain", default="", choices=["best", "all"], metavar="[=all]",
        help="print the candidates and why each lost; all: every candidate, with its placements",
    )
    add("--frontier", action="store_true", help="print the plans of T10 that no other beats in both memory and words")
    add("--picture", metavar="FILE", help="draw the schedule: as an HTML page if FILE ends in .html, else as text; - "
        "prints it")
    add("--dry-run", action="store_true", help="print the plan without multiplying or writing")
    add("--json", metavar="FILE", help="write the report; - for standard output")
    add("--trace", metavar="FILE", help="write a timeline of every rank in the timed products, for "
        "ui.perfetto.dev; - for standard output")
    add("--metrics", metavar="FILE", help="write counters of time and traffic for Prometheus, at most every 5 s")
    add("--list", action="store_true", help="print the algorithms")
    add("--list-windows", action="store_true", help="print the ways to expose memory, and which are absent here")
    add("--quiet", action="store_true", help="print nothing on success")
    add("--verbose", action="store_true", help="also report which errors the check would find")
    add("-h", "--help", action="store_true", help="print this help")
    return parser


def _add_files(add: Any) -> None:
    """Add the flags of file formats."""
    add("--format", metavar="NAME", help="format of the files, if their suffixes do not tell it, as h5 or zarr")
    add("--allow-external", action="store_true", help="read files that the operands' files refer to: HDF5's "
        "external data and virtual datasets, links in a Zarr store, tensors in other folders")
    add("--chunks", type=extents, metavar="R,C", help="rows and columns of a chunk of C")
    add("--shards", type=extents, metavar="R,C", help="rows and columns of a file of chunks of C")
    add("--compress", choices=["zstd", "none"], help="compression of C's chunks")


def _add_problem(add: Any) -> None:
    """Add the flags of the product."""
    add("--shape", type=shape, metavar="M,N,K", help="size of generated matrices (2048,2048,2048), or of batches: "
        "BATCH,M,N,K")
    add("--dtype", type=dtype, metavar="T", help="type of generated matrices (float32); bfloat16 for files that hold "
        "|V2")
    add("--compute-dtype", type=dtype, metavar="T", help="element type of the product (by NumPy's rules)")
    add("--semiring", choices=list(SEMIRINGS), default=PLUS_TIMES.name, help="operations that replace + and ×")
    add("--transpose-a", action="store_true", help="transpose A")
    add("--transpose-b", action="store_true", help="transpose B")
    add("--conjugate-a", action="store_true", help="conjugate A")
    add("--conjugate-b", action="store_true", help="conjugate B")
    add("--symmetric", action="store_true", help="C and C0 are symmetric, so multiply half of C; implied if one "
        "file is given twice and transposed once")
    add("--alpha", type=_scalar, default=1, metavar="X", help="factor of the product, a Python number (1)")
    add("--beta", type=_scalar, default=0, metavar="X", help="factor of C0 (0); needs --c")
    add("--c", metavar="C0.npy", help="the matrix C0")
    add("--bias", metavar="b.npy", help="vector added to C; needs --bias-per")
    add("--bias-per", choices=SIDES, help="the bias has one value for each column, or for each row, of C")
    add("--activation", choices=list(ACTIVATIONS), help="function applied to C at the end; gelu is the exact form, "
        "with erf")
    add("--result-dtype", type=dtype, metavar="T", help="element type of the stored C, rounded once")
    add("--seed", type=count(0), default=0, metavar="S", help="seed of generated matrices (0)")


def _add_method(add: Any) -> None:
    """Add the flags of the method."""
    add("--mesh", type=mesh, metavar="2x3[x2]", help="ranks along each axis (chosen)")
    add("--algorithm", default="auto", metavar="NAME", help="a name from --list, or NAME:FORM (auto)")
    add("--prefer", choices=PREFERENCES, help="two-sided: exclude gets and accumulates (RMA_MM_PREFER, auto)")
    for name in "abc":
        add(f"--layout-{name}", metavar="T", help=f"placement of {name.upper()}, as i,j or \"P('i', 'j')\"")
    add("--memory-limit", type=size, metavar="2GiB", help="memory of a rank for operands, result and scratch")
    add("--resume", action="store_true", help="continue an interrupted job from the blocks it has written")
    *names, last = FLAVOURS
    known = f"{', '.join(names)} or {last} (RMA_MM_WINDOW, {DEFAULT.name})"
    add("--window", metavar="NAME", help=f"way to expose memory: {known}")
    add("--kernel", default="auto", metavar="NAME", help="local products: blas, numba or auto")
    add("--threads", type=count(1, MOST_THREADS), metavar="N", help="BLAS threads of a rank")
    add("--speeds", type=speeds, metavar="4,2,1", help="relative speed of each rank, by which work is divided (as "
        "calibrated)")
    add("--timeout", type=timeout, metavar="SECONDS", help="end the job if a rank stands still for this long "
        f"({TIMEOUT}, {USUAL:g})")


# -- what a flag takes: text in, a value out, or ArgumentTypeError with the rule -------------------


def count(least: int, most: int = MOST) -> Callable[[str], int]:
    return lambda text: _whole(text, least, most, f"a whole number of at least {least}")


def _whole(text: str, least: int, most: int, rule: str, within: str | None = None) -> int:
    """A whole number, alone or `within` several. Raises ArgumentTypeError, which says the rule and the limits."""
    if not text.strip().isdecimal() or (len(text) < DIGITS and int(text) < least):
        raise argparse.ArgumentTypeError(f"got {quoted(text if within is None else within)}; needs {rule}")
    if len(text) >= DIGITS or int(text) > most:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; must be at most {most}")
    return int(text)


def shape(text: str) -> tuple[int, ...]:
    """M, N and K; of batches their extents first."""
    rule = "three whole numbers M,N,K, as 100,200,300, or for batches BATCH,M,N,K, as 12,512,64,512"
    words = text.split(",")
    if len(words) < 3:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs {rule}")
    return tuple(_whole(word, 0, MOST, rule, text) for word in words)


def extents(text: str) -> tuple[int, int]:
    rule = "two whole numbers of at least 1, as 1024,1024"
    words = text.split(",")
    if len(words) != 2:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs {rule}")
    rows, cols = (_whole(word, 1, MOST, rule, text) for word in words)
    return rows, cols


def mesh(text: str) -> tuple[int, ...]:
    rule = f"one to {len(AXIS_NAMES)} sizes, as 4, 2x3 or 2x3x2"
    words = text.split("x")
    if not 1 <= len(words) <= len(AXIS_NAMES):
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs {rule}")
    return tuple(_whole(word, 1, MOST_RANKS, rule, text) for word in words)


def speeds(text: str) -> tuple[float, ...]:
    rule = "it takes a number for each rank, above 0, as 4,2,1"
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, {rule}") from None
    if speeds_problem(found):
        raise argparse.ArgumentTypeError(f"got {quoted(text)}, {rule}")
    return found


def timeout(text: str) -> float:
    """Return the seconds for which a rank may make no progress."""
    try:
        return timeout_of(text, {})
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("timeout: ")) from None


def dtype(text: str) -> str:
    """Return the name of an element type."""
    try:
        return parse_dtype(text).name
    except RmaError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _scalar(text: str) -> complex:
    """Return the number as int, float or complex, whichever holds it exactly."""
    for kind in (int, float, complex):
        try:
            number: complex = kind(text)
            complex(number)
        except ValueError:
            continue
        except OverflowError:
            raise argparse.ArgumentTypeError(f"got {quoted(text)}; must be at most 1.8e308") from None
        return number
    raise argparse.ArgumentTypeError(f"got {quoted(text)}; needs a Python number, as 2, -0.5 or -1-2j")


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {quoted(text)}; {error}") from None

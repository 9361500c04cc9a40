"""Options of `rma-mm run`. No MPI here: every rank parses, rank 0 reports."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

from rma_mm.classes import dataclass
from rma_mm.command.options.parser import (
    MOST_THREADS,
    MOST_TIMES,
    PROGRESS,
    Parser,
    count,
    dtype,
    extents,
    mesh,
    scalar,
    shape,
    size,
    speeds,
    timeout,
)
from rma_mm.elements.pointwise import ACTIVATIONS, SIDES
from rma_mm.elements.semiring import PLUS_TIMES, SEMIRINGS
from rma_mm.errors import OptionError, display_path, truncate
from rma_mm.flavours import DEFAULT, FLAVOURS
from rma_mm.geometry.extents import too_large
from rma_mm.policy.planner.preference import PREFERENCES
from rma_mm.unfinished import real_path
from rma_mm.windows.hosts.liveness import USUAL
from rma_mm.windows.hosts.liveness import VARIABLE as TIMEOUT

PROGRAM = "rma-mm run"
DEFAULT_SHAPE = (2048, 2048, 2048)
DEFAULT_DTYPE = "float32"
SCALARS = ("--alpha", "--beta")


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
    algorithms: str | None  # a Python file that registers algorithms of the user's
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
    warmup: int | None  # None for one, or for none where only the result is wanted or operands stay in their files
    window: str | None
    kernel: str
    fast: int
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
    report: str | None
    metrics: str | None
    list: bool
    list_windows: bool
    progress: str | None
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
    def is_measurement(self) -> bool:
        """True if the time of the product is wanted, and not only C."""
        return self.output is None or self.repeat > 1 or self.warmup is not None

    def work_ahead(self, work: int) -> float:
        """Return the multiply-adds to come; infinity, for which any measurement pays, where figures are wanted."""
        explained = (self.explain, self.frontier, self.picture, self.dry_run, self.trace, self.report)
        return inf if self.is_measurement or any(explained) else work

    def untimed(self, is_streamed: bool) -> int:
        """Return how many products come before those that are timed. is_streamed: whether operands stay in files."""
        return int(self.is_measurement and not is_streamed) if self.warmup is None else self.warmup

    @property
    def measures_blas(self) -> bool:
        """True if the rate of the local BLAS is reported beside the product's."""
        return self.is_measurement and not self.quiet

    @property
    def saving(self) -> dict[str, Any]:
        return {"format": self.format, "chunks": self.chunks, "shards": self.shards, "compress": self.compress}

    @property
    def is_checked(self) -> bool:
        return self.verify or not self.files


def parse(argv: Sequence[str]) -> RunOptions:
    """Return the options in `argv`. Raises OptionError, naming the argument, what was got and what fits."""
    parsed = vars(parser().parse_intermixed_args(_joined(argv)))
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
    batch = prod(options.shape[:-3])
    for name, whole in (("A", (batch * m, k)), ("B", (batch * k, n)), ("C", (batch * m, n))):
        if reason := too_large(whole):
            raise OptionError(f"--shape: got {options.shape}, so that {name} is {whole}; {reason}")
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
    from rma_mm.runtime.files.formats import named_in  # which take a while to load
    from rma_mm.runtime.files.names import Name

    o = options
    inputs = (*(("an operand", file) for file in o.files), ("--c", o.c), ("--bias", o.bias))
    flags = ("json", "picture", "trace", "report", "metrics")
    reports = [(f"--{flag}", getattr(o, flag)) for flag in flags]
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


def text(options: RunOptions) -> str:
    """Return what `--help`, `--list` and `--list-windows` print: a line for each algorithm, or flavour."""
    if options.help:
        return parser().format_help()
    if options.list_windows:
        width = max(map(len, FLAVOURS))
        reasons = {name: _absence(name) for name in FLAVOURS}
        return "\n".join(
            f"{name:<{width}}  {each.summary}" + f"; absent here: {reasons[name]}" * bool(reasons[name])
            for name, each in FLAVOURS.items()
        )
    if not options.list:
        return ""
    from rma_mm.algorithms import ALGORITHMS

    if options.algorithms:
        load_algorithms(options.algorithms)
    width = max(map(len, ALGORITHMS))
    lines = (f"{name:<{width}}  {algorithm.summary} ({algorithm.source})" for name, algorithm in ALGORITHMS.items())
    return "\n".join(lines)


def _absence(name: str) -> str:
    """Return why windows of a flavour are unavailable here; empty if they are available."""
    try:
        from rma_mm.windows import absent

        return absent(name)
    except (ImportError, RuntimeError):
        return "no MPI library was found; pip install 'rma_mm[mpich]'"


def load_algorithms(path: str) -> None:
    """Run a Python file of the user's, which calls `rma_mm.register`. Raises OptionError that names its error."""
    import runpy

    from rma_mm.algorithms import REGISTERED

    before = set(REGISTERED)
    try:
        runpy.run_path(path, run_name="rma_mm_algorithms")
    except Exception as error:
        raise OptionError(f"--algorithms: {display_path(path)}: {type(error).__name__}: {error}") from error
    if set(REGISTERED) == before:
        raise OptionError(
            f"--algorithms: {display_path(path)}: registers none; it must call rma_mm.register(algorithm), as "
            f"docs/reference/algorithms/index.md shows"
        )


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


EPILOG = """\
examples:
  mpiexec -n 4 rma-mm run                                  multiply random matrices, and verify
  mpiexec -n 4 rma-mm run A.npy B.npy -o C.npy --verify    multiply two files into a third one
  mpiexec -n 4 rma-mm run d.h5::/A 'B.npy[:9, :]' -o C.h5  a matrix in HDF5, a part of a matrix
  mpiexec -n 4 rma-mm run --shape 4000,300,900 --explain   why an algorithm was chosen
  rma-mm run --list                                        names for --algorithm

exit codes:
  0  done
  1  failed at run time
  2  wrong arguments or input
  4  the result failed verification

`python -m rma_mm run` is the same command."""


def parser() -> Parser:
    """Return the parser of this command."""
    made = Parser(
        PROGRAM, f"mpiexec -n P {PROGRAM} [A.npy B.npy] [-o C.npy] [options]",
        "Multiply matrices on all ranks of the job: C = alpha · op(A) @ op(B) + beta · C0. Without files, multiply "
        "generated matrices and verify the result.", EPILOG,
    )
    _add_files(made.group("files"))
    _add_problem(made.group("the product"))
    _add_method(made.group("how it is multiplied"))
    _add_reports(made.group("what is printed and written"))
    return made


def _add_files(add: Any) -> None:
    add("files", nargs="*", metavar="A.npy B.npy", help="the operands: files of matrices or batches")
    add("-o", "--output", metavar="C.npy", help="file of the result")
    add("--format", metavar="NAME", help="format of the files, if their suffixes do not tell it, as h5 or zarr")
    add("--allow-external", action="store_true", help="read files that the operands' files refer to: HDF5's "
        "external data and virtual datasets, links in a Zarr store, tensors in other folders")
    add("--chunks", type=extents, metavar="R,C", help="rows and columns of a chunk of C")
    add("--shards", type=extents, metavar="R,C", help="rows and columns of a file of chunks of C")
    add("--compress", choices=["zstd", "none"], help="compression of C's chunks")
    add("--resume", action="store_true", help="continue an interrupted job from the blocks it has written")


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
    add("--alpha", type=scalar, default=1, metavar="X", help="factor of the product, a Python number (1)")
    add("--beta", type=scalar, default=0, metavar="X", help="factor of C0 (0); needs --c")
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
    add("--algorithms", metavar="FILE.py", help="run a Python file first that registers your own algorithms")
    add("--prefer", choices=PREFERENCES, help="two-sided: exclude gets and accumulates (RMA_MM_PREFER, auto)")
    for name in "abc":
        add(f"--layout-{name}", metavar="T", help=f"placement of {name.upper()}, as i,j or \"P('i', 'j')\"")
    add("--memory-limit", type=size, metavar="2GiB", help="memory of a rank for operands, result and scratch")
    *names, last = FLAVOURS
    known = f"{', '.join(names)} or {last} (RMA_MM_WINDOW, {DEFAULT.name})"
    add("--window", metavar="NAME", help=f"way to expose memory: {known}")
    add("--kernel", default="auto", metavar="NAME", help="local products: blas, numba or auto")
    add("--fast", type=int, choices=(0, 1, 2), default=0, help="how often Strassen's algorithm may cut a "
        "local product (0)")
    add("--threads", type=count(1, MOST_THREADS), metavar="N", help="BLAS threads of a rank")
    add("--speeds", type=speeds, metavar="4,2,1", help="relative speed of each rank, by which work is divided (as "
        "calibrated)")
    add("--timeout", type=timeout, metavar="SECONDS", help="end the job if a rank stands still for this long "
        f"({TIMEOUT}, {USUAL:g})")


def _add_reports(add: Any) -> None:
    """Add the flags of what is measured, checked and reported."""
    add("--repeat", type=count(1, MOST_TIMES), default=1, metavar="N", help="timed products (1)")
    add("--warmup", type=count(0, MOST_TIMES), metavar="N", help="untimed products before these (1; 0 if C is "
        "written and not repeated, or operands stay in files)")
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
    add("--report", metavar="FILE.html", help="write a page with timeline, traffic, prediction and decision "
        "(needs rma_mm[report])")
    add("--metrics", metavar="FILE", help="write counters of time and traffic for Prometheus, at most every 5 s")
    add("--list", action="store_true", help="print the algorithms")
    add("--list-windows", action="store_true", help="print the ways to expose memory, and which are absent here")
    add("--progress", choices=PROGRESS, help="report progress: a bar on a terminal, else lines (RMA_MM_PROGRESS, auto)")
    add("--quiet", action="store_true", help="print nothing on success")
    add("--verbose", action="store_true", help="also report which errors the check would find")
    add("-h", "--help", action="store_true", help="print this help")

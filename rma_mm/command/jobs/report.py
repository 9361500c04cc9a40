"""Report a run: a progress bar while it multiplies, then lines for people and JSON for programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.command.frame import Frame
from rma_mm.elements.dtypes import BLAS_TYPES, accumulator
from rma_mm.elements.semiring import PLUS_TIMES, SEMIRINGS
from rma_mm.errors import count_of, display_path
from rma_mm.kernels.choice.rates import calls_a_second
from rma_mm.kernels.choice.speed import square
from rma_mm.kernels.gemm.form import FAST
from rma_mm.kernels.threads import using_threads
from rma_mm.policy.planner.preference import TWO_SIDED
from rma_mm.runtime.execution.footprint import merged
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.watching.exposed import exposed_share, exposed_text
from rma_mm.unfinished import check_target, write_whole
from rma_mm.windows.waiting import barrier

if TYPE_CHECKING:
    from rma_mm.runtime.verification.check import Verdict

PROBE_SECONDS = (0.002, 0.06)
"""Least and most seconds of one measurement of the local BLAS, which else takes as long as the product."""
PROBES = 4  # number of such measurements: another program may take the cores for a moment
PROBE_SIZES = (64, 1024)  # rows of the smallest and largest square block it is measured on


class Read(Protocol):
    """Progress of reading the input files."""

    @property
    def nbytes(self) -> int:
        """Return the bytes moved so far."""

    @property
    def seconds(self) -> float:
        """Return the seconds that these bytes took."""


@dataclass
class Transferred:
    """Bytes of matrices that all ranks read from files, or wrote, and the seconds that this rank took with its own."""

    bytes: int = 0
    seconds: float = 0.0

    @contextmanager
    def timed(self, matrices: Iterable[int]) -> Iterator[None]:
        """Count the seconds of a block that moves matrices of the given number of bytes; none if there are none."""
        self.bytes = sum(matrices)
        start = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - start if self.bytes else 0.0

    def all_ranks(self, mesh: Mesh) -> dict[str, float | None]:
        """Return what `--json` reports, with the seconds of the slowest rank. Collective."""
        slowest = max(mesh.comm.allgather(self.seconds))
        return {"bytes": self.bytes, "seconds": slowest, "bytes_per_second": self.bytes / slowest if slowest else None}


@dataclass
class Streamed:
    """Bytes that a rank read of files during one product, and the seconds of that product."""

    files: Sequence[Read]
    seconds: float
    multiplying: float  # seconds of it in local products

    def all_ranks(self, mesh: Mesh) -> dict[str, float | None]:
        """Return bytes of all ranks, with the seconds and the hidden share of the one that read longest. Collective."""
        reading = sum(file.seconds for file in self.files)
        exposed = min(reading, max(0.0, self.seconds - self.multiplying))
        told = mesh.comm.allgather((reading, exposed, sum(file.nbytes for file in self.files)))
        (longest, shown, _), nbytes = max(told), sum(each for *_, each in told)
        return {
            "bytes": nbytes, "seconds": longest, "bytes_per_second": nbytes / longest if longest else None,
            "hidden": 1 - shown / longest if longest else None,
        }


@dataclass(frozen=True)
class Facts:
    """All that is reported of a run, the same on every rank."""

    json: dict[str, Any]  # the JSON report
    blas_gflops: float | None  # rate of the local BLAS on all ranks at once, GFLOP/s; None if it was not measured

    def lines(self, verbose: bool = False) -> list[str]:
        """Return the result, a fact on each line, as it follows `plan_lines`.

        verbose: True to add which errors the check of the result finds.
        """
        j = self.json
        seconds = j["seconds"]
        timing = f"{min(seconds):.4g} s"
        if len(seconds) > 1:
            timing += f" (median of {len(seconds)}: {np.median(seconds):.4g} s)"
        share = f", {100 * j['gflops'] / self.blas_gflops:.0f} % of the local BLAS rate" if self.blas_gflops else ""
        words = j["words"]
        checked = "not requested"
        if j["verified"] is not None:
            most = f"; largest error {j['residual']:.2g} of its tolerance" if j["residual"] else ""
            how = j["verified_how"] if verbose else j["verified_how"].partition("; ")[0]
            checked = f"right: {how}{most}"
        rows = [
            *((name, f"{j['layouts'][name]}, {j['movement'][name]}") for name in "ABC"),
            ("by", f"window {j['window']}, kernel {j['kernel']}"),
            ("time", f"{timing}, {j['gflops']:.4g} GF/s{share}"),
            ("moved", f"{words['intra_node']} words in nodes, {words['inter_node']} between, {j['messages']} messages"
                      + exposed_text(j["exposed"])),
            *(("files", _transfer(how, x)) for how, x in j["files"].items() if x["bytes"]),
            ("memory", f"{in_bytes(j['peak_bytes'])} on the fullest rank"),
            ("verified", checked),
            *(("instead", text) for text in j["fallbacks"]),
        ]
        return in_rows(rows)


def plan_lines(plan: Plan, mesh: Mesh, shape: tuple[int, int, int]) -> list[str]:
    """Return the plan, a fact on each line, as it is printed before the product runs."""
    m, n, k = shape
    nodes, grid, speeds = mesh.num_nodes, mesh.grid, plan.choice.request.speeds
    each = count_of(mesh.threads, "thread")
    note = SEMIRINGS[plan.spec.semiring.name].note
    order = "" if plan.reproducible else "; sums have no fixed order"
    return in_rows([
        ("product", f"C({m}, {n}) = A({m}, {k}) @ B({k}, {n}) {note}in {plan.c_dtype.name}"),
        *([("epilogue", plan.epilogue)] if plan.epilogue else []),
        ("ranks", f"{count_of(mesh.size, 'rank')} on {count_of(nodes, 'node')}, mesh {grid}, {each} each"),
        *([("speeds", f"{', '.join(f'{x:.2f}' for x in speeds)} of their mean")] if speeds else []),
        ("algorithm", f"{plan.algorithm}: {plan.why}{order}"),
    ])


def _transfer(how: str, moved: Mapping[str, Any]) -> str:
    """Return in words what was read or written, and how fast."""
    rate = f"{in_bytes(moved['bytes'])} {how} in {moved['seconds']:.4g} s, {in_bytes(int(moved['bytes_per_second']))}/s"
    return rate + (f", {100 * moved['hidden']:.0f} % of it behind the product" if "hidden" in moved else "")


def in_rows(facts: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name:<10} {text}" for name, text in facts]


def gather_facts(
    plan: Plan, mesh: Mesh, shape: tuple[int, int, int], seconds: list[float], verdict: Verdict | None,
    moved: Mapping[str, Mapping[str, float | None]], *, kernel: str, measure_blas: bool,
) -> Facts:
    """Collect the facts of a run from all ranks. `kernel`: the one asked for. Collective."""
    words, by = plan.words, plan.prepared.kernels
    mine = (words.words_intra, words.words_inter, words.messages, plan.movement, list(mesh.fallbacks), by)
    intra, inter, messages, movements, fallbacks, kernels = zip(*mesh.comm.allgather(mine), strict=True)
    noted = list(dict.fromkeys(text for texts in fallbacks for text in texts))
    used = "+".join(sorted(set().union(*kernels))) or plan.kernel
    if kernel != "auto" and kernel not in used.split("+"):
        noted.append(f"kernel {used}, since {kernel} is not available")
    if plan.spec.options.fast and FAST.keys().isdisjoint(used.split("+")):
        noted.append(f"kernel {used}: local products are not large enough for Strassen's algorithm, or of other types")
    movement = merged(movements)
    in_place = [name for name in "ABC" if "view" in movement[name].split("+")]
    if in_place and (plan.spec.options.prefer or mesh.prefer) == TWO_SIDED:
        noted.append(f"messages between nodes alone: ranks of a node read {' and '.join(in_place)} in place")
    m, n, k = shape
    flops = (8 if plan.spec.product_dtype.kind == "c" else 2) * m * n * k
    report = {
        "shape": [m, n, k],
        "dtype": plan.c_dtype.name,
        "semiring": plan.spec.semiring.name,
        "epilogue": plan.epilogue,
        "ranks": mesh.size,
        "nodes": mesh.num_nodes,
        "mesh": list(mesh.grid.dims),
        "algorithm": plan.algorithm,
        "layouts": {name: str(plan.layouts[name]) for name in "ABC"},
        "movement": movement,
        "window": mesh.window_flavour,
        "kernel": used,
        "threads": mesh.threads,
        "speeds": list(plan.choice.request.speeds),
        "fallbacks": noted,
        "seconds": seconds,
        "gflops": flops / min(seconds) / 1e9,
        "predicted_seconds": plan.predicted_seconds,
        "words": {
            "intra_node": sum(intra),
            "inter_node": sum(inter),
            "per_rank_max": max(map(sum, zip(intra, inter, strict=True))),
        },
        "messages": sum(messages),
        "exposed": exposed_share(plan),
        "files": dict(moved),
        "peak_bytes": plan.peak_bytes,
        "reproducible": plan.reproducible,
        "verified": None if verdict is None else verdict.ok,
        "residual": None if verdict is None else verdict.residual,
        "verified_rows": None if verdict is None else verdict.rows,
        "verified_how": None if verdict is None else "; ".join(filter(None, (verdict.how, verdict.odds))),
    }
    rate = None
    if measure_blas and plan.spec.semiring == PLUS_TIMES:
        rate = blas_rate(mesh, shape, plan.spec.accum_dtype, min(seconds))
    return Facts({name: _known(value) for name, value in report.items()}, rate)


def blas_rate(mesh: Mesh, shape: tuple[int, int, int], dtype: np.dtype[Any], seconds: float) -> float | None:
    """GF/s of the local BLAS on square blocks of about a rank's share, all ranks of the mesh at once. Collective.

    None for types that no BLAS multiplies. seconds: what the product took, the same on all ranks.
    """
    working = accumulator(dtype)
    if working not in BLAS_TYPES:
        return None
    share = (math.prod(shape) / mesh.grid.size) ** (1 / 3)
    size = max(PROBE_SIZES[0], min(PROBE_SIZES[1], int(share)))
    best, wanted = 0.0, min(PROBE_SECONDS[1], max(PROBE_SECONDS[0], seconds))
    with using_threads(mesh.threads):
        product = square(size, working, "blas")
        product()
        for _ in range(PROBES):
            barrier(mesh.comm)
            mine = calls_a_second(product, wanted) if mesh.is_member else 0.0
            best = max(best, sum(mesh.comm.allgather(mine)))
    return best * (8 if working.kind == "c" else 2) * size**3 / 1e9


def check_report(flag: str, path: str | None) -> None:
    """Raise FileFormatError if a report could not be written."""
    if path not in (None, "-"):
        assert path is not None
        check_target(f"{flag} {display_path(path)}", path)


def write_json(
    frame: Frame, flag: str, path: str | None, document: dict[str, Any], indent: int | None = 1
) -> None:
    """Write the facts of a flag as JSON, completely or not at all. Raises FileFormatError. On one rank."""
    if path is None:
        return
    text = json.dumps(document, indent=indent, allow_nan=False)
    if path == "-":
        frame.say(text)
    else:
        write_whole(f"{flag} {display_path(path)}", path, text + "\n")


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_so_far(files: Sequence[Read], written: Callable[[], int] | None = None) -> str:
    """Return what this rank has read of files that stay where they are, and all ranks have written, for a report."""
    moved = {"read": sum(file.nbytes for file in files)} if files else {}
    moved |= {"written": written()} if written else {}
    return ", ".join(f"{in_bytes(nbytes)} {how}" for how, nbytes in moved.items())


def in_bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"

"""`[mpiexec -n P] python -m bench.kernels`: generated kernels against OpenBLAS, NumPy and the core's peak.

On one core, or on each rank's at once: each multiplies its own operands, and rates are those of the slowest times P.

For each type and shape the kernels take turns; medians. Results are checked first, exactly. "peak" is what the
innermost kernel reaches on data that never leave the first-level cache. NumPy without BLAS is slow: it is measured up
to 1024³. `--set avx2` measures what a processor with these instructions alone would run, on one that has more. Of few
rows "of reading" is the time in which the other operand is read once, by the time of the product.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from llvmlite import binding
from mpi4py import MPI
from numba import types
from numpy.typing import NDArray

from bench import measure
from rma_mm.elements.dtypes import BFLOAT16, BLAS_TYPES, accumulator, parse_dtype
from rma_mm.elements.semiring import PLUS_TIMES, SEMIRINGS, Semiring
from rma_mm.kernels import bind
from rma_mm.kernels.compiling import compiled
from rma_mm.kernels.gemm.cpu import host
from rma_mm.kernels.gemm.form import Form, form_of
from rma_mm.kernels.gemm.memory import BYTES, SumType, configure, release, tile
from rma_mm.kernels.threads import set_threads

SHAPES: dict[str, tuple[int, int, int]] = {
    **{f"{n}³": (n, n, n) for n in (64, 128, 256, 512, 1024, 2048, 4096)},
    "1021³": (1021, 1021, 1021),
    "1023×997×1031": (1023, 997, 1031),
    "tall 16384×256×256": (16384, 256, 256),
    "wide 256×16384×256": (256, 16384, 256),
    "deep 256×256×16384": (256, 256, 16384),
    "few 8×4096×14336": (8, 4096, 14336),
    "few, columns": (8, 4096, 14336),
}
"""Name → (m, n, k). Of few rows, the other operand is stored by rows or by columns."""
BASIC = "+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+avx,+f16c,+bmi,+bmi2,+lzcnt,+avx2,+fma"
WIDE = "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"
SETS = {
    "avx2": ("haswell", BASIC, "Haswell"),
    "avxvnni": ("alderlake", f"{BASIC},+avxvnni", "Haswell"),
    "avx512": ("skylake-avx512", f"{BASIC},{WIDE}", "SkylakeX"),
    "avx512vnni": ("cascadelake", f"{BASIC},{WIDE},+avx512vnni", "SkylakeX"),
}
FORCED = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "OPENBLAS_CORETYPE"
"""Instructions of processors, as these variables name them."""
SECONDS = 0.02
"""At least so long takes one sample: small products are repeated."""
SLOW = 1 << 30
"""Multiply-adds up to which NumPy is measured where it has no BLAS."""
RANKS = MPI.COMM_WORLD


@dataclass(frozen=True)
class Kind:
    """A type, or pair of types, and what is done in place of + and ×."""

    name: str
    operand: np.dtype[Any]
    result: np.dtype[Any]
    semiring: Semiring = PLUS_TIMES


def kinds() -> dict[str, Kind]:
    """Everything that is measured, by name."""
    names = ["float32", "float64", "complex64", "complex128", "float16", "int8", "int16", "int32", "int64", "bool"]
    found = [Kind(name, np.dtype(name), np.dtype(name)) for name in names]
    if BFLOAT16 is not None:
        found.append(Kind("bfloat16", BFLOAT16, BFLOAT16))
    found += [Kind(f"{a}→int32", parse_dtype(a), np.dtype("int32")) for a in ("int8", "uint8")]
    for name, semiring in SEMIRINGS.items():
        dtype = np.dtype("float32" if "f" in semiring.kinds else "bool")
        if semiring != PLUS_TIMES:
            found.append(Kind(f"{name} {dtype.name}", dtype, dtype, semiring))
    return {kind.name: kind for kind in found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = measure.Parser(__doc__)
    parser.add_argument("--kind", nargs="+", choices=list(kinds()), default=list(kinds()), metavar="TYPE", help="(all)")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="NAME", help="(all)")
    parser.add_argument("--repeat", type=int, default=5, help="samples of each kernel (5)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates there (needs matplotlib)")
    parser.add_argument("--set", choices=SETS, help="the instructions to use (all that this processor has)")
    options = parser.parse_args(arguments)
    forced = dict(zip(FORCED, SETS[options.set], strict=True)) if options.set else {}
    wanted = SETS[options.set][1].replace("+", "").split(",") if options.set else []
    has = binding.get_host_cpu_features()
    if lacking := [name for name in wanted if not has.get(name)]:
        parser.error(f"--set {options.set}: this processor has no {', '.join(lacking)}")
    if not forced.items() <= os.environ.items():  # libraries look at what the processor has when they are loaded
        if RANKS.size > 1:
            given = " ".join(f"{name}={value}" for name, value in forced.items())
            parser.error(f"--set {options.set}: of several ranks it is set before mpiexec: {given}")
        again = [sys.executable, "-m", "bench.kernels", *(sys.argv[1:] if arguments is None else arguments)]
        return subprocess.run(again, env=os.environ | forced, check=False).returncode
    set_threads(1)
    results = [
        measured(kinds()[kind], shape, options.repeat) for kind in options.kind for shape in options.shape
    ]
    head = ["type", "m×n×k", "GF/s", "of peak", "OpenBLAS", "ratio", "NumPy", "times NumPy"]
    head += ["of reading", "samples apart"]
    rows = [
        [r["kind"], r["shape"], r["gflops"]["numba"], r["of_peak"], r["gflops"].get("blas"), r["of_blas"],
         r["gflops"].get("numpy"), r["of_numpy"], r["of_reading"], r["spread"]]
        for r in results
    ]
    if RANKS.rank == 0:
        measure.publish(options.json, "kernels", measure.machine(), ["", *measure.table(head, rows)], results=results)
    if RANKS.rank == 0 and options.plot:
        plotted(results, options.plot)
    return 0 if all(result["right"] for result in results) else measure.WRONG


# -- one type and shape ------------------------------------------------------------------------------


def measured(kind: Kind, shape: str, repeat: int) -> dict[str, Any]:
    """Samples of all kernels, in turn, and their ratios."""
    m, n, k = SHAPES[shape]
    a, b = operand((m, k), kind.operand), operand((k, n), kind.operand)
    b = np.asfortranarray(b) if shape.endswith("columns") else b
    c = np.empty((m, n), kind.result)
    calls = {"numba": bind(a, b, c, kernel="numba", semiring=kind.semiring)}
    if accumulator(kind.result) in BLAS_TYPES and kind.semiring == PLUS_TIMES:
        calls["blas"] = bind(a, b, np.empty_like(c), kernel="blas")
    others: dict[str, Callable[[], object]] = dict(calls)
    has_blas = kind.result in BLAS_TYPES and kind.semiring == PLUS_TIMES
    if not has_blas and m * n * k <= SLOW:
        others["numpy"] = by_numpy(kind, a, b)
    if shape.startswith("few"):
        others["reading"] = np.ones(b.nbytes // 8, np.int64).sum
    calls["numba"]()
    right = RANKS.allreduce(is_right(kind, a, b, c), MPI.LAND)
    samples = {name: [] for name in others}
    for _ in range(repeat):
        for name, call in others.items():
            if name != "numpy":
                call()  # behind seconds of NumPy the first one takes several times as long
            samples[name].append(seconds(call))
    work = RANKS.size * 2e-9 * m * n * k * (4 if kind.result.kind == "c" else 1)
    gflops = {name: work / median(found) for name, found in samples.items() if name != "reading"}
    reading = samples.get("reading")
    form = form_of(kind.semiring, kind.operand, kind.operand, accumulator(kind.result), host())
    ours, most = gflops["numba"], RANKS.size * peak(form)
    return {
        "kind": kind.name, "shape": shape, "right": right, "samples": samples, "gflops": gflops,
        "peak": most, "of_peak": ours / most,
        "of_blas": ours / gflops["blas"] if "blas" in gflops else None,
        "of_numpy": ours / gflops["numpy"] if "numpy" in gflops else None,
        "of_reading": median(reading) / median(samples["numba"]) if reading else None,
        "spread": max(samples["numba"]) / min(samples["numba"]),
    }


def operand(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Small whole numbers, whose sums are exact."""
    values = measure.whole_numbers(*(x.astype(np.int64) for x in np.ogrid[: shape[0], : shape[1]])) % 3
    return (values == 1 if dtype.kind == "b" else values).astype(dtype)


def by_numpy(kind: Kind, a: NDArray[Any], b: NDArray[Any]) -> Callable[[], object]:
    """What a user of NumPy would write: matmul, or all terms by broadcasting."""
    if kind.semiring == PLUS_TIMES and kind.operand == kind.result:
        return lambda: np.matmul(a, b)
    if kind.semiring == PLUS_TIMES:
        return lambda: np.matmul(a, b, dtype=kind.result)

    return lambda: kind.semiring.add.reduce(kind.semiring.multiply(a[:, :, None], b[None]), axis=1)


def is_right(kind: Kind, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> bool:
    """Whether some rows of the result are exactly what they should be."""
    rows = np.linspace(0, len(a) - 1, 5).astype(int)
    if kind.semiring == PLUS_TIMES:
        wide = a[rows].astype(np.complex128) @ b.astype(np.complex128)
        expected = wide if kind.result.kind == "c" else wide.real
        return bool((c[rows] == (expected != 0 if kind.result.kind == "b" else expected.astype(kind.result))).all())
    terms = (kind.semiring.add.reduce(kind.semiring.multiply(row[:, None], b), axis=0) for row in a[rows])
    return bool((c[rows] == np.array(list(terms))).all())


def seconds(call: Callable[[], object]) -> float:
    """Of one call on the slowest rank: repeated, where it is over at once."""
    RANKS.Barrier()
    count, start = 0, time.perf_counter()
    while not count or time.perf_counter() - start < SECONDS:
        call()
        count += 1
    return RANKS.allreduce((time.perf_counter() - start) / count, MPI.MAX)


# -- the peak ----------------------------------------------------------------------------------------


def repeated(sums, a, b, out, stride, depth, count):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The innermost kernel, again and again."""
    configure(sums)
    for _ in range(count):
        tile(sums, a, b, out, stride, depth, 0)
    release(sums)


@cache
def peak(form: Form) -> float:
    """10⁹ operations a second of the innermost kernel in the first-level cache; the best of some samples."""
    step = form.columns * form.group * form.panel_bytes("b")
    size, cells, count = types.int64, min(64, (1 << 14) // step), 2000
    kinds_of = (SumType(form, form.total), BYTES, BYTES, BYTES, size, size, size)
    address, whole = ctypes.c_void_p, ctypes.c_int64
    facts = form, repeated.__code__.co_code
    call = compiled("repeated", facts, (address,) * 4 + (whole,) * 3, lambda: (repeated, kinds_of))
    panels = [np.zeros(1 << 16, np.uint8) for _ in range(3)]
    stride = form.columns * form.planes * np.dtype(form.total).itemsize
    given = (None, *(panel.ctypes.data for panel in panels), stride, cells, count)
    took = min(seconds(lambda: call(*given)) for _ in range(5))
    work = 2e-9 * form.rows * form.columns * cells * form.group * count * (4 if form.planes == 2 else 1)
    return work / took


def plotted(results: list[dict[str, Any]], file: Path) -> None:
    """Rates of the squares over their size, one line a type."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    squares = {f"{n}³": n for n in (64, 128, 256, 512, 1024, 2048, 4096)}
    figure, axes = pyplot.subplots(figsize=(9, 6))
    for kind in dict.fromkeys(r["kind"] for r in results):
        some = [r for r in results if r["kind"] == kind and r["shape"] in squares]
        for kernel, style in (("numba", "-o"), ("blas", ":")):
            points = [(squares[r["shape"]], r["gflops"][kernel]) for r in some if kernel in r["gflops"]]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=f"{kind}{' OpenBLAS' * (kernel == 'blas')}")
    axes.set(xscale="log", yscale="log", xlabel="m = n = k", ylabel="10⁹ operations a second, one core")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())

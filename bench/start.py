"""`python -m bench.start`: seconds that importing the package takes, and a small product on the command line.

Imports: each sample is a fresh process, which has imported numpy and mpi4py.MPI when the clock starts. "all of a run"
is every module that `python -m rma_mm.run` of a small product loads. Bar: under 0.3 s, and Numba not loaded.

Commands: a sample is one of `mpiexec -n P python -m rma_mm.run A.npy B.npy -o C.npy` with matrices of 64 × 64, less one
of a program that imports numpy and mpi4py.MPI and meets the other ranks, started before it. Bars: 0.4 s on 2 ranks,
0.8 s on 4.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import measure
from bench.processes import clean_environment, mpiexec_of

BAR = 0.3
"""Seconds that imports may take."""

COMMAND_BARS = {2: 0.4, 4: 0.8}
"""Seconds that a 64³ product may take beyond MPI's own start, by the number of ranks."""

SIZE = 64
PRODUCT = ("-m", "rma_mm.run", "A.npy", "B.npy", "-o", "C.npy")
MPI_ALONE = ("-c", "import numpy; from mpi4py import MPI; MPI.COMM_WORLD.Barrier()")
"""What Python runs on each rank."""

CLOCK = """
import importlib, json, sys, time
import mpi4py.MPI, numpy
start = time.perf_counter()
for name in json.loads(sys.argv[1]):
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()) if name == "rma_mm" else ():
        getattr(module, public)
print(json.dumps([time.perf_counter() - start, "numba" in sys.modules]))
"""
"""Prints the seconds that the modules named in the first argument take, and whether Numba came along."""

LOADED = """
import json, sys
import mpi4py.MPI, numpy
before = set(sys.modules)
from rma_mm.run import main
code = main(["--shape", "64,64,64", "--quiet"])
after = [name for name in sys.modules if name not in before]
print(json.dumps([name for name in after if name.partition(".")[0] == "rma_mm" or not name.startswith("_")]))
sys.exit(code)
"""
"""Prints the modules that a run loads, in order."""


def main() -> int:
    """Measure and report."""
    parser = measure.Parser(__doc__)
    parser.add_argument("--repeat", type=int, default=9, help="samples of each kind (9)")
    options = parser.parse_args()
    cases = {
        "rma_mm, all public names": ["rma_mm"],
        "rma_mm and rma_mm.run": ["rma_mm", "rma_mm.run"],
        "all of a run": output(LOADED),
    }
    taken: dict[str, list[tuple[float, bool]]] = {name: [] for name in cases}
    started: dict[int, list[tuple[float, float]]] = {ranks: [] for ranks in COMMAND_BARS}
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        for name in "AB":
            np.save(Path(folder, f"{name}.npy"), measure.whole_matrix((SIZE, SIZE), "float32"))
        for turn in range(-1, options.repeat):  # the first fills the caches, of bytecode and of files
            for name, modules in cases.items():
                seconds, numba = output(CLOCK, json.dumps(modules))
                if turn >= 0:
                    taken[name].append((seconds, numba))
            for ranks, samples in started.items():
                pair = command_seconds(ranks, MPI_ALONE, folder), command_seconds(ranks, PRODUCT, folder)
                if turn >= 0:
                    samples.append(pair)
    results = [summary(name, len(cases[name]), samples) for name, samples in taken.items()]
    rows = [[r["imports"], r["modules"], r["seconds"], max(r["samples"]), r["numba"], r["met"]] for r in results]
    head = ["imports", "modules named", "median s", "slowest s", "numba", f"met: under {BAR} s, no numba"]
    commands = [beyond_start(ranks, samples) for ranks, samples in started.items()]
    columns = ("start", "product", "seconds", "bar", "met")
    lines = [[f"{SIZE}³ on {each['ranks']} ranks", *(each[name] for name in columns)] for each in commands]
    titles = ["command", "MPI alone s", "product s", "median s beyond", "bar", "met"]
    tables = ["", *measure.table(head, rows), "", *measure.table(titles, lines)]
    measure.publish(options.json, "start", measure.machine(), tables, results=results, commands=commands)
    return 0


def summary(name: str, modules: int, samples: list[tuple[float, bool]]) -> dict[str, Any]:
    """The record of one kind of import."""
    seconds, numba = [took for took, _ in samples], any(came for _, came in samples)
    middle = median(seconds)
    return {
        "imports": name,
        "modules": modules,
        "seconds": middle,
        "numba": "loaded" if numba else "not loaded",
        "met": middle < BAR and not numba,
        "samples": seconds,
    }


def beyond_start(ranks: int, samples: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The record of a command. samples: seconds of MPI's start alone and of the product after it."""
    seconds = median(product - start for start, product in samples)
    return {
        "ranks": ranks,
        "start": median(start for start, _ in samples),
        "product": median(product for _, product in samples),
        "seconds": seconds,
        "bar": COMMAND_BARS[ranks],
        "met": seconds <= COMMAND_BARS[ranks],
        "samples": samples,
    }


def command_seconds(ranks: int, program: Sequence[str], folder: str) -> float:
    """Seconds of a Python program on so many ranks, from mpiexec's start to its end. Raises CalledProcessError."""
    line = [mpiexec_of(sys.executable) or "mpiexec", "-n", str(ranks), sys.executable, *program]
    start = time.perf_counter()
    subprocess.run(line, check=True, cwd=folder, env=clean_environment(), stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def output(program: str, *arguments: str) -> Any:
    """What a fresh Python prints, as JSON. Raises CalledProcessError where it fails."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.imports`: seconds that importing the package takes on top of numpy and mpi4py.

Each sample is a fresh process, which has imported numpy and mpi4py.MPI when the clock starts. "all of a run" is every
module that `python -m rma_mm.run` of a small product had loaded in the end. Bar: under 0.5 s, and Numba not loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

from bench import measure

BAR = 0.5
"""Seconds."""

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
    parser.add_argument("--repeat", type=int, default=9, help="processes measured of each kind (9)")
    options = parser.parse_args()
    cases = {
        "rma_mm, all public names": ["rma_mm"],
        "rma_mm and rma_mm.run": ["rma_mm", "rma_mm.run"],
        "all of a run": output(LOADED),
    }
    taken: dict[str, list[tuple[float, bool]]] = {name: [] for name in cases}
    for turn in range(-1, options.repeat):  # the first fills the caches, of bytecode and of files
        for name, modules in cases.items():
            seconds, numba = output(CLOCK, json.dumps(modules))
            if turn >= 0:
                taken[name].append((seconds, numba))
    results = [summary(name, len(cases[name]), samples) for name, samples in taken.items()]
    rows = [[r["imports"], r["modules"], r["seconds"], max(r["samples"]), r["numba"], r["met"]] for r in results]
    head = ["imports", "modules named", "median s", "slowest s", "numba", f"met: under {BAR} s, no numba"]
    measure.publish(options.json, "imports", measure.machine(), ["", *measure.table(head, rows)], results=results)
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


def output(program: str, *arguments: str) -> Any:
    """What a fresh Python prints, as JSON. Raises CalledProcessError where it fails."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())

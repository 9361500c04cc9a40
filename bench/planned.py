"""`python -m bench.planned [--count 200] [--seed 0]`: print every figure of the planner for random requests.

Each request is a command line of `rma_mm.simulate`: a random shape, type, number of ranks, nodes, memory limit and
placements. A line gives the command line and all figures of its --json, so that two checkouts estimate alike if and
only if their output is equal byte for byte. Needs no MPI.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path
from random import Random

from rma_mm.simulate import main as simulate

DTYPES = ("float32", "float64", "complex64")
PLACEMENTS = ("i,j", "(i,j),*", "*,(i,j)", "j,i")


def request(random: Random) -> list[str]:
    """Return a random command line."""
    shape = ",".join(str(int(2 ** random.uniform(0, 15))) for _ in "mnk")
    argv = ["--shape", shape, "--dtype", random.choice(DTYPES)]
    argv += ["--ranks-per-node", str(random.choice((1, 2, 4, 8, 36)))]
    if random.random() < 0.3:
        argv += ["--mesh", f"{random.randint(1, 8)}x{random.randint(1, 8)}"]
        for x in "abc":
            if random.random() < 0.3:
                argv += [f"--layout-{x}", random.choice(PLACEMENTS)]
    else:
        argv += ["--ranks", str(int(2 ** random.uniform(0, 8)))]
    if random.random() < 0.3:
        argv += ["--memory-limit", f"{random.choice((1, 16, 256))}MiB"]
    return argv


def figures(argv: list[str]) -> object:
    """Return what the command answers: its figures, or its exit code and message."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            try:
                code: object = simulate([*argv, "--json", str(path)])
            except SystemExit as error:
                code = error.code
        return json.loads(path.read_text()) if path.exists() else [code, said.getvalue()]


def main() -> None:
    """Print a line for each request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = Random(options.seed)
    for _ in range(options.count):
        argv = request(random)
        print(json.dumps([argv, figures(argv)]))


if __name__ == "__main__":
    main()

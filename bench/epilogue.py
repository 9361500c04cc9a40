"""`python -m bench.epilogue`: what a bias and an activation add to a product on one core.

"Fused" is what `rma_mm.kernels.bind` with a closing takes beyond the bare product, as plans do it; "its pass" is the
part of it that does not multiply, timed by itself behind a product, which tells more than the difference of two long
times; "NumPy" are separate passes by NumPy over all of C behind the product. Bar: bias and GELU, fused, cost less than
5 % of a 2048³ product in float32. Seconds are processor time of the thread, so that what else runs on the machine
disturbs less; cases take turns; medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import measure
from rma_mm.kernels import bind
from rma_mm.kernels.epilogue.activations import activate
from rma_mm.kernels.epilogue.epilogue import EpilogueTile
from rma_mm.kernels.threads import set_threads

if TYPE_CHECKING:
    from mpi4py import MPI

BAR = 0.05
"""Of the product's time."""
ACTIVATIONS = (None, "relu", "gelu")

Case = tuple[Callable[[], object], Callable[[], object]]
"""What goes before, and what is timed."""


def main(comm: MPI.Intracomm) -> int:
    """Measure and report, on the first rank; `WRONG` where fused and separate results differ."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--size", type=int, default=2048, help="rows and columns (2048)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"], help="element types (float32 float64)")
    parser.add_argument("--repeat", type=int, default=7, help="rounds (7)")
    options = parser.parse_args()
    if comm.rank:
        return 0
    set_threads(1)
    results = [measured(np.dtype(name), options.size, options.repeat) for name in options.dtypes]
    where = measure.machine()
    rows = [row for result in results for row in rows_of(result)]
    seconds = results[0]["seconds"]
    met = seconds["fused bias, gelu"] < (1 + BAR) * seconds["product"]
    right = all(result["right"] for result in results)
    head = ["case", "product ms", "fused +ms", "+%", "its pass ms", "%", "NumPy +ms", "+%"]
    lines = [
        "",
        *measure.table(head, rows),
        f"bar: bias and GELU under {BAR:.0%} in {results[0]['dtype']}, met: {measure.text(met)}",
        f"results agree: {measure.text(right)}",
    ]
    measure.publish(options.json, "epilogue", where, lines, results=results, bar=BAR, met=met)
    return 0 if right else measure.WRONG


def measured(dtype: np.dtype[Any], n: int, repeat: int) -> dict[str, Any]:
    """Seconds of a product, of it with each epilogue, and of the epilogue's own part behind a product."""
    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((n, n), (n, n), n))
    c = np.empty((n, n), dtype)
    product = bind(a, b, c)
    cases: dict[str, Case] = {"product": (nothing, product)}
    right = True
    for activation in ACTIVATIONS:
        name = f"bias, {activation}" if activation else "bias"
        tile = EpilogueTile(c, bias, "column", activation, True)
        fused, passes = bind(a, b, c, tile=tile), partial(activate, c, bias, activation)
        fused()
        found = c.copy()
        product()
        passes()
        right = right and bool(np.allclose(found, c, rtol=1e-4, atol=1e-4))
        cases |= {
            f"fused {name}": (nothing, fused),
            f"pass {name}": (product, tile.bound(c)),
            f"NumPy {name}": (product, passes),
        }
    samples = in_turn(cases, repeat)
    return {"dtype": dtype.name, "size": n, "right": right, "seconds": measure.medians(samples), "samples": samples}


def in_turn(cases: Mapping[str, Case], repeat: int) -> dict[str, list[float]]:
    """Seconds of the thread for each case, each round starting with another one; the first round is not counted."""
    names = list(cases)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, repeat):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            before, timed = cases[name]
            before()
            start = time.thread_time()
            timed()
            took = time.thread_time() - start
            if turn >= 0:
                samples[name].append(took)
    return samples


def nothing() -> None:
    """What goes before most cases."""


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    """Lines of the table."""
    seconds = result["seconds"]
    alone = seconds["product"]
    rows: list[list[object]] = []
    for name in [case.removeprefix("fused ") for case in seconds if case.startswith("fused ")]:
        cells = [seconds[f"fused {name}"] - alone, seconds[f"pass {name}"], seconds[f"NumPy {name}"]]
        rows.append(
            [f"{result['dtype']} {name}", 1e3 * alone, *(x for cell in cells for x in (1e3 * cell, 100 * cell / alone))]
        )
    return rows


if __name__ == "__main__":
    measure.run(main)

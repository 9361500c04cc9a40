"""`mpiexec -n P python -m bench.chain`: an MLP's forward and backward pass, placed jointly, greedily and in blocks.

    H = X W1,  Y = H W2,  dH = dY W2ᵀ,  dW2 = Hᵀ dY,  dW1 = Xᵀ dH

"joint" is `plan_chain`; "greedy" places every product in turn on what is best for it alone; "blocks" has all results
in blocks, where matrices lie when nothing is said. Inputs lie in blocks, or in columns (each rank holds some features
of all rows), and are converted within the time where that is chosen; "free" ones lie where each contender wants them.
Results are held against NumPy's, exactly.

Greedy choice loses where an input that two products read lies badly for both, and moving it costs much. So it is with
`MPIR_CVAR_NUM_CLIQUES=4 mpiexec -n 4 python -m bench.chain --inputs columns` (four pretended nodes): each product takes
what it needs of X and dY by itself, where joint choice brings both to rows once, or lets H lie for what follows.
"""

from __future__ import annotations

from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import rma_mm
from bench import measure
from rma_mm.policy.planner.candidates import single_layouts

if TYPE_CHECKING:
    from mpi4py import MPI

STEPS = ("H = X @ W1", "Y = H @ W2", "dH = dY @ W2.T", "dW2 = H.T @ dY", "dW1 = X.T @ dH")
RESULTS = tuple(step.split()[0] for step in STEPS)
CONTENDERS = ("joint", "greedy", "blocks")
INPUTS = ("blocks", "columns", "free")


def main(comm: MPI.Intracomm) -> int:
    """Measure and report; `WRONG` where a result is."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--rows", type=int, default=131072, help="rows of X, the batch (131072)")
    parser.add_argument("--width", type=int, default=64, help="columns of X and Y (64)")
    parser.add_argument("--hidden", type=int, default=64, help="columns of H (64)")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=INPUTS, help="where they lie (all three)")
    parser.add_argument("--mesh", help="as 2x2; the squarest when not given")
    parser.add_argument("--window", choices=measure.WINDOWS, help="RMA_MM_WINDOW, or shared")
    parser.add_argument("--repeat", type=int, default=9, help="samples of each case (9)")
    options = parser.parse_args()
    grid = measure.grid(options.mesh) if options.mesh else squarest(comm.size)
    shapes = shapes_of(options.rows, options.width, options.hidden)
    with rma_mm.Mesh(grid, comm, window=options.window) as mesh:
        where = measure.machine(comm, mesh.window_flavour) | {"mesh": str(mesh.shape), "nodes": mesh.nodes}
        results = [measured(mesh, shapes, options.dtype, inputs, options.repeat) for inputs in options.inputs]
    if comm.rank == 0:
        lines = [line for result in results for line in ["", *lines_of(result)]]
        shape = (options.rows, options.width, options.hidden)
        measure.publish(options.json, "chain", where, lines, shape=shape, dtype=options.dtype, results=results)
    return 0 if all(result["right"] for result in results) else measure.WRONG


def squarest(size: int) -> tuple[int, int]:
    """The grid of so many ranks whose sides differ least."""
    rows = max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size)
    return size // rows, rows


def shapes_of(rows: int, width: int, hidden: int) -> dict[str, tuple[int, int]]:
    """Shapes of the inputs."""
    return {"X": (rows, width), "W1": (width, hidden), "W2": (hidden, width), "dY": (rows, width)}


def elements(shift: int, rows: NDArray[np.int64], cols: NDArray[np.int64]) -> NDArray[np.int64]:
    """−1, 0 and 1, in no pattern: products of products of them are exact in float32 up to rows · hidden = 2²⁴."""
    return measure.whole_numbers(rows + shift, cols) % 3 - 1


def measured(
    mesh: rma_mm.Mesh, shapes: dict[str, tuple[int, int]], dtype: str, inputs: str, repeat: int
) -> dict[str, Any]:
    """All samples with inputs of one kind, and what follows from them. Collective."""
    contenders = {name: Contender(mesh, name, shapes, dtype, inputs) for name in CONTENDERS}
    right = {name: contender.is_right() for name, contender in contenders.items()}
    cases = {name: partial(contender.chain.execute, **contender.inputs) for name, contender in contenders.items()}
    samples = measure.interleaved(mesh.comm, cases, repeat)
    seconds = measure.medians(samples)
    found = {
        "inputs": inputs,
        "right": all(right.values()),
        "samples": samples,
        "seconds": seconds,
        "predicted": {name: contender.chain.predicted_seconds for name, contender in contenders.items()},
        "conversions": {name: len(contender.chain.answer.conversions) for name, contender in contenders.items()},
        "chains": {name: str(contender.chain) for name, contender in contenders.items()},
        "gain": seconds["greedy"] / seconds["joint"],
        "gain_blocks": seconds["blocks"] / seconds["joint"],
    }
    for contender in contenders.values():
        contender.close()
    return found


class Contender:
    """A chain, and the inputs that it takes. Collective to make."""

    def __init__(
        self, mesh: rma_mm.Mesh, name: str, shapes: dict[str, tuple[int, int]], dtype: str, inputs: str
    ) -> None:
        self.mesh = mesh
        blocks, *_, columns = single_layouts(mesh.shape)
        layouts = {"blocks": dict.fromkeys(shapes, blocks), "columns": dict.fromkeys(shapes, columns), "free": {}}[
            inputs
        ]
        if name == "blocks":
            layouts = dict.fromkeys(shapes, blocks) | layouts | dict.fromkeys(RESULTS, blocks)
        known: dict[str, Any] = {x: (shape, dtype) for x, shape in shapes.items()}
        self.chain = rma_mm.plan_chain(STEPS, mesh, layouts=layouts, joint=name == "joint", **known)
        self.inputs = {
            x: rma_mm.DistMatrix.from_function(shape, partial(elements, 1000 * n), mesh, self.chain.layouts[x], dtype)
            for n, (x, shape) in enumerate(shapes.items())
        }

    def is_right(self) -> bool:
        """Whether all outputs are exactly NumPy's. Collective."""
        found = {name: x.to_numpy(root=0) for name, x in self.chain.execute(**self.inputs).items()}
        x, w1, w2, dy = (matrix.to_numpy(root=0) for matrix in self.inputs.values())
        verdict = None
        measure.rest(self.mesh.comm)
        if self.mesh.rank == 0:
            h, dh = x @ w1, dy @ w2.T
            wanted = {"Y": h @ w2, "dW2": h.T @ dy, "dW1": x.T @ dh}
            verdict = found.keys() == wanted.keys() and all(
                np.array_equal(found[name], wanted[name]) for name in wanted
            )
        measure.rest(self.mesh.comm)
        return bool(self.mesh.comm.bcast(verdict))

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local."""
        self.chain.close()
        for matrix in self.inputs.values():
            matrix.close()


def lines_of(result: dict[str, Any]) -> list[str]:
    """The table of one kind of inputs, and the chains behind it."""
    rows = [
        [name, took, result["predicted"][name], result["conversions"][name], *extremes(result["samples"][name])]
        for name, took in result["seconds"].items()
    ]
    head = [f"{result['inputs']} inputs", "median s", "predicted s", "conversions", "fastest s", "slowest s"]
    return [
        *measure.table(head, rows),
        f"greedy takes {result['gain']:.3f} times as long as joint, blocks {result['gain_blocks']:.3f} times",
        f"results exactly numpy's: {measure.text(result['right'])}",
        *(line for pair in starmap(_titled, result["chains"].items()) for line in ["", *pair]),
    ]


def _titled(name: str, chain: str) -> list[str]:
    return [f"{name}:", *chain.splitlines()]


def extremes(samples: list[float]) -> tuple[float, float]:
    """The fastest and the slowest."""
    return min(samples), max(samples)


if __name__ == "__main__":
    measure.run(main)

"""`mpiexec -n P python -m bench.chain`: an MLP's forward and backward pass, placed jointly, greedily and in blocks.

    H = X W1,  Y = H W2,  dH = dY W2ᵀ,  dW2 = Hᵀ dY,  dW1 = Xᵀ dH

"joint" is `plan_chain`; "greedy" places every product in turn on what is best for it alone; "blocks" has all results
in blocks, where matrices lie when nothing is said. Inputs lie in blocks, or in columns (each rank holds some features
of all rows), and are converted within the time where that is chosen; "free" ones lie where each contender wants them.
Results are held against NumPy's, exactly.

Greedy choice loses where an input that two products read lies badly for both, and moving it costs much. So it is with
`MPIR_CVAR_NUM_CLIQUES=4 mpiexec -n 4 python -m bench.chain --inputs columns` (four pretended nodes): each product takes
what it needs of X and dY by itself, where joint choice brings both to rows once, or lets H lie for what follows.

"--steps mlp" has bias, GELU and a residual, forward and backward. "apart" is every step of it by itself, one after the
other, each on what is best for it alone where its inputs lie. Between two hosts joint is to take at most 0.8 of that,
or 1.1 times the longer of two limits: "multiply", its local products alone, and "wire", its words between nodes alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import rma_mm
from bench import measure
from bench.trust.programs import by_numpy
from rma_mm.kernels.threads import using_threads
from rma_mm.policy.planner.candidates import single_layouts
from rma_mm.schedule.ops import Multiply
from rma_mm.windows.waiting import wait_until

STEPS = {
    "plain": ("H = X @ W1", "Y = H @ W2", "dH = dY @ W2.T", "dW2 = H.T @ dY", "dW1 = X.T @ dH"),
    "mlp": (
        "Z = X @ W1 + b1", "H = gelu(Z)", "Y = H @ W2 + X", "dW2 = H.T @ dY", "dZ = (dY @ W2.T) * gelu'(Z)",
        "dW1 = X.T @ dZ", "db1 = sum(dZ, 0)", "dX = dZ @ W1.T + dY",
    ),
}
CONTENDERS = {"plain": ("joint", "greedy", "blocks"), "mlp": ("joint", "apart")}
INPUTS = ("blocks", "columns", "free")
LIMITS = ("multiply", "wire")


def main(comm: MPI.Intracomm) -> int:
    """Measure and report; `WRONG` where a result is."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--rows", type=int, default=131072, help="rows of X, the batch (131072)")
    parser.add_argument("--width", type=int, default=64, help="columns of X and Y (64)")
    parser.add_argument("--hidden", type=int, default=64, help="columns of H (64)")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=INPUTS, help="where they lie (all three)")
    parser.add_argument("--steps", choices=STEPS, default="plain", help="what is done (plain)")
    parser.add_argument("--mesh", help="as 2x2; the squarest when not given")
    parser.add_argument("--window", choices=measure.WINDOWS, help="RMA_MM_WINDOW, or shared")
    parser.add_argument("--repeat", type=int, default=9, help="samples of each case (9)")
    options = parser.parse_args()
    grid = measure.grid(options.mesh) if options.mesh else squarest(comm.size)
    shapes = shapes_of(options.rows, options.width, options.hidden, options.steps)
    with rma_mm.Mesh(grid, comm, window=options.window) as mesh:
        where = measure.machine(comm, mesh.window_flavour) | {"mesh": str(mesh.grid), "nodes": mesh.num_nodes}
        asked = options.steps, shapes, options.dtype
        results = [measured(mesh, *asked, inputs, options.repeat) for inputs in options.inputs]
    if comm.rank == 0:
        lines = [line for result in results for line in ["", *lines_of(result)]]
        shape = (options.rows, options.width, options.hidden)
        facts = {"shape": shape, "dtype": options.dtype, "steps": options.steps}
        measure.publish(options.json, "chain", where, lines, results=results, **facts)
    return 0 if all(result["right"] for result in results) else measure.WRONG


def squarest(size: int) -> tuple[int, int]:
    """The grid of so many ranks whose sides differ least."""
    rows = max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size)
    return size // rows, rows


def shapes_of(rows: int, width: int, hidden: int, steps: str = "plain") -> dict[str, tuple[int, int]]:
    """Shapes of the inputs."""
    bias = {"b1": (1, hidden)} if steps == "mlp" else {}
    return {"X": (rows, width), "W1": (width, hidden), "W2": (hidden, width), "dY": (rows, width)} | bias


def elements(shift: int, rows: NDArray[np.int64], cols: NDArray[np.int64]) -> NDArray[np.int64]:
    """−1, 0 and 1, in no pattern: products of products of them are exact in float32 up to rows · hidden = 2²⁴."""
    return measure.whole_numbers(rows + shift, cols) % 3 - 1


def measured(
    mesh: rma_mm.Mesh, steps: str, shapes: dict[str, tuple[int, int]], dtype: str, inputs: str, repeat: int
) -> dict[str, Any]:
    """All samples with inputs of one kind, and what follows from them. Collective."""
    contenders = {
        name: (Apart if name == "apart" else Contender)(mesh, name, steps, shapes, dtype, inputs)
        for name in CONTENDERS[steps]
    }
    right = {name: contender.is_right() for name, contender in contenders.items()}
    cases = {name: contender.run for name, contender in contenders.items()}
    cases |= contenders["joint"].limits()
    samples = measure.interleaved(mesh.comm, cases, repeat)
    seconds = measure.medians(samples)
    found = {
        "inputs": inputs,
        "right": all(right.values()),
        "samples": {name: samples[name] for name in contenders},
        "seconds": {name: seconds[name] for name in contenders},
        "limits": {name: seconds[name] for name in LIMITS},
        "predicted": {name: contender.predicted for name, contender in contenders.items()},
        "conversions": {name: contender.conversions for name, contender in contenders.items()},
        "chains": {name: str(contender) for name, contender in contenders.items()},
    }
    gains = {"greedy": "gain", "blocks": "gain_blocks", "apart": "gain_apart"}
    found |= {gains[name]: seconds[name] / seconds["joint"] for name in seconds if name in gains}
    found["ratio_limit"] = seconds["joint"] / max(found["limits"].values())
    for contender in contenders.values():
        contender.close()
    return found


class Contender:
    """A chain, and the inputs that it takes. Collective to make."""

    def __init__(
        self, mesh: rma_mm.Mesh, name: str, steps: str, shapes: dict[str, tuple[int, int]], dtype: str, inputs: str
    ) -> None:
        self.mesh, self.steps, self.shapes, self.dtype = mesh, STEPS[steps], shapes, dtype
        blocks, *_, columns = single_layouts(mesh.grid)
        layouts = {"blocks": dict.fromkeys(shapes, blocks), "columns": dict.fromkeys(shapes, columns), "free": {}}[
            inputs
        ]
        self.chains = self.planned(name, layouts, blocks)

    def planned(self, name: str, layouts: dict[str, Any], blocks: Any) -> list[rma_mm.ChainPlan]:
        """The chains that do it; the inputs are made on the way. Collective."""
        if name == "blocks":
            layouts = dict.fromkeys(self.shapes, blocks) | layouts
            layouts |= dict.fromkeys((step.split()[0] for step in self.steps), blocks)
        known: dict[str, Any] = {x: (shape, self.dtype) for x, shape in self.shapes.items()}
        chain = rma_mm.plan_chain(self.steps, self.mesh, layouts=layouts, joint=name == "joint", **known)
        self.inputs = {x: self.input(x, chain.layouts[x]) for x in self.shapes}
        return [chain]

    def input(self, name: str, layout: Any) -> rma_mm.DistMatrix:
        """An input, placed. Collective."""
        number = list(self.shapes).index(name)
        f = partial(elements, 1000 * number)
        return rma_mm.DistMatrix.from_function(self.shapes[name], f, self.mesh, layout, self.dtype)

    def run(self) -> dict[str, rma_mm.DistMatrix]:
        """Do it once: the outputs. Collective."""
        return self.chains[0].execute(**self.inputs)

    @property
    def predicted(self) -> float | None:
        """Seconds that were predicted."""
        known = [chain.predicted_seconds for chain in self.chains]
        return None if None in known else sum(filter(None, known))

    @property
    def conversions(self) -> int:
        """Matrices that are brought to another placement."""
        return sum(len(chain.answer.conversions) for chain in self.chains)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.chains))

    def is_right(self) -> bool:
        """Whether all outputs are NumPy's: exactly, where all numbers are whole. Collective."""
        found = {name: x.to_numpy(root=0) for name, x in self.run().items()}
        inputs = {name: matrix.to_numpy(root=0) for name, matrix in self.inputs.items()}
        verdict = None
        measure.rest(self.mesh.comm)
        if self.mesh.rank == 0:
            wanted = by_numpy(list(self.steps), inputs)
            is_whole = not any("gelu" in step for step in self.steps)
            verdict = all(is_like(x, wanted[name], is_whole) for name, x in found.items())
        measure.rest(self.mesh.comm)
        return bool(self.mesh.comm.bcast(verdict))

    def limits(self) -> dict[str, Callable[[], object]]:
        """What it cannot be faster than: its local products alone, and its words between nodes alone, after one run."""
        comm, plans = self.mesh.comm, [plan for chain in self.chains for plan in chain.plans]
        products = [op for plan in plans for op in plan.schedule.program(self.mesh.rank) if isinstance(op, Multiply)]
        operands = [[np.ones(ref.region.shape, self.dtype) for ref in (op.a, op.b, op.c)] for op in products]
        words = comm.allreduce(sum(plan.words.words_inter for plan in plans), max)
        out, back = np.zeros((2, words * np.dtype(self.dtype).itemsize), np.uint8)
        ring = [(comm.rank + step * comm.size // 2) % comm.size for step in (1, -1)]

        def multiply() -> None:
            with using_threads(self.mesh.threads):
                for a, b, c in operands:
                    np.matmul(a, b, out=c)

        def wire() -> None:
            requests = [comm.Irecv(back, ring[1]), comm.Isend(out, ring[0])] if words else []
            wait_until(lambda: MPI.Request.Testall(requests))

        return {"multiply": multiply, "wire": wire}

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local."""
        for chain in self.chains:
            chain.close()
        for matrix in self.inputs.values():
            matrix.close()


class Apart(Contender):
    """Every step by itself, one after the other."""

    def planned(self, name: str, layouts: dict[str, Any], blocks: Any) -> list[rma_mm.ChainPlan]:
        """A chain for each step, on what those before it made. Collective."""
        self.inputs = {x: self.input(x, layouts.get(x, blocks)) for x in self.shapes}
        there, chains = dict(self.inputs), []
        self.reads = [set(re.findall(r"\w+", step.split("=")[1])) for step in self.steps]
        for step, reads in zip(self.steps, self.reads, strict=True):
            chains.append(rma_mm.plan_chain(step, self.mesh, **{x: there[x] for x in there if x in reads}))
            there |= chains[-1].outputs
        return chains

    def run(self) -> dict[str, rma_mm.DistMatrix]:
        """Do it once. Collective."""
        there, made = dict(self.inputs), {}
        for chain, reads in zip(self.chains, self.reads, strict=True):
            made |= chain.execute(**{x: there[x] for x in there if x in reads})
            there |= made
        return made


def is_like(found: NDArray[Any], wanted: NDArray[Any], is_whole: bool) -> bool:
    """Whether two results are equal, or equal to rounding."""
    close = 0.0 if is_whole else 1e-4 * float(abs(wanted).max(initial=1))
    return found.shape == wanted.shape and bool(np.all(abs(found - wanted) <= close))


def lines_of(result: dict[str, Any]) -> list[str]:
    """The table of one kind of inputs, and the chains behind it."""
    rows = [
        [name, took, result["predicted"][name], result["conversions"][name], *extremes(result["samples"][name])]
        for name, took in result["seconds"].items()
    ]
    head = [f"{result['inputs']} inputs", "median s", "predicted s", "conversions", "fastest s", "slowest s"]
    limits, ratio = result["limits"], result["ratio_limit"]
    alone = ", ".join(f"{name} {1e3 * seconds:.4g} ms" for name, seconds in limits.items())
    return [
        *measure.table(head, rows),
        f"alone: {alone}; 1.1 times the longer is {1.1e3 * max(limits.values()):.4g} ms",
        f"joint takes {ratio:.3f} times the longer",
        *(f"joint takes {result['seconds']['joint'] / took:.3f} times as long as apart"
          for name, took in result["seconds"].items() if name == "apart"),
        *(f"{name} takes {took / result['seconds']['joint']:.3f} times as long as joint"
          for name, took in result["seconds"].items() if name not in ("joint", "apart")),
        f"results numpy's: {measure.text(result['right'])}",
        *(line for pair in starmap(_titled, result["chains"].items()) for line in ["", *pair]),
    ]


def _titled(name: str, chain: str) -> list[str]:
    return [f"{name}:", *chain.splitlines()]


def extremes(samples: list[float]) -> tuple[float, float]:
    """The fastest and the slowest."""
    return min(samples), max(samples)


if __name__ == "__main__":
    measure.run(main)

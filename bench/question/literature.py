"""The literature's own experiments, on one node: `python -m bench.question --settings survey depth ffn` runs them.

"survey": one large product by each textbook algorithm on 8, 9 and 18 ranks. "depth": 2.5-D and Tesseract, whose meshes
have from one to as many layers as ranks. "ffn": a feed-forward network on ranks of different speed, beside the usual
way, in which each rank has an equal part of the weights and results are summed by an all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure
from bench.peers.operands import elements
from bench.policy.cases import Case
from bench.policy.worker import main
from rma_mm.errors import RmaError
from rma_mm.kernels.threads import using_threads
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.products.prices import best_grid
from rma_mm.windows.waiting import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

MESHES = {8: ("2x4", "2x2x2", "2x2x2"), 9: ("3x3", "3x3x1", "3x3x1"), 18: ("3x6", "3x3x2", "3x3x2")}
"""By ranks: of two-dimensional, of 3-D and of 2.5-D algorithms."""
DEPTHS = ("4x4x1", "4x2x2", "2x2x4", "2x1x8", "1x1x16")
"""Meshes of 16 ranks whose layers are as square as can be."""
ALONE, AUTO = "multiply alone", "auto"
ROUNDS = {"survey": 3, "depth": 7, "ffn": 15}
Way = tuple[str, str, str]
"""What it is called in the table, its algorithm, and its mesh."""


def ways(case: Case) -> Iterator[Way]:
    """The products that an experiment compares."""
    if case.kind == "survey":
        flat, cube, layered = MESHES[case.ranks]
        yield "Cannon", "cannon", flat
        yield "SUMMA", "summa_c", flat
        yield "3-D", "agarwal_3d", cube
        yield "2.5-D", "solomonik_25d", layered
        yield "pull", "stationary_c", flat
        yield AUTO, AUTO, ""
    else:
        for mesh in DEPTHS:
            yield "2.5-D", "solomonik_25d", mesh
            yield "Tesseract", "tesseract", mesh


class Product:
    """A product on operands that are placed as its plan wants them. Collective to make."""

    def __init__(self, case: Case, comm: MPI.Intracomm, way: Way, stack: ExitStack) -> None:
        self.label, name, grid = way
        dims = measure.grid(grid) if grid else best_grid(comm, case.shape, case.dtype)
        self.mesh = stack.enter_context(rma_mm.Mesh(dims, comm))
        given = [Operand(case.extent(x), np.dtype(case.dtype)) for x in "AB"]
        self.plan = rma_mm.plan(*given, self.mesh, algorithm=name)
        stack.callback(self.plan.close)
        self.plan.adapt = False  # another plan in the midst of it would be timed, and making it
        places = self.plan.layouts
        self.operands = [
            *(rma_mm.DistMatrix.from_function(case.extent(x), elements(x), self.mesh, places[x], case.dtype)
              for x in "AB"),
            rma_mm.DistMatrix.empty(case.extent("C"), self.mesh, places["C"], case.dtype),
        ]
        for each in self.operands:
            stack.callback(each.close)

    def run(self) -> None:
        """Multiply. Collective."""
        a, b, c = self.operands
        self.plan.execute(a, b, out=c)

    def facts(self) -> dict[str, Any]:
        """Multiply once and check the result; what was counted then. Collective."""
        self.run()
        right, comm = rma_mm.verify(*self.operands).ok, self.mesh.comm
        words = self.plan.words
        moved, messages = (
            sum(comm.allgather(x)) for x in (words.words_intra + words.words_inter, words.messages)
        )
        return {
            "name": self.label, "algorithm": self.plan.algorithm, "mesh": str(self.mesh.grid), "right": bool(right),
            "words": moved, "priced_words": self.plan.choice.chosen.traffic.words, "messages": messages,
            "peak_bytes": max(comm.allgather(self.plan.peak_bytes)), "predicted": self.plan.predicted_seconds,
        }


def alone(case: Case, ranks: int) -> Callable[[], object]:
    """Return the local products of all ranks alone: one of each rank, on memory of its own."""
    m, n, k = case.shape
    rows, cols = measure.grid(MESHES[ranks][0]) if ranks in MESHES else (4, 4)
    a, b, c = (np.ones(shape, case.dtype) for shape in ((m // rows, k), (k, n // cols), (m // rows, n // cols)))

    def multiply() -> None:
        with using_threads(1):
            np.matmul(a, b, out=c)

    return multiply


def products(case: Case, comm: MPI.Intracomm, stack: ExitStack) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What an experiment's products moved, and how each is repeated. Collective."""
    made = [Product(case, comm, way, stack) for way in ways(case)]
    entries = [each.facts() for each in made]
    calls: dict[str, Any] = {f"{x['name']} on {x['mesh']}": each.run for x, each in zip(entries, made, strict=True)}
    return entries, calls | {ALONE: alone(case, comm.size)}


# -- the feed-forward network ---------------------------------------------------------------------


class AllReduce:
    """x·W1 with a part of its columns, ReLU, and that times a part of the rows of W2, summed over all ranks."""

    def __init__(self, case: Case, comm: MPI.Intracomm, name: str, speeds: tuple[float, ...]) -> None:
        tokens, inside, outside = case.shape
        ends = np.rint(np.cumsum([0.0, *speeds]) / sum(speeds) * inside).astype(int)
        mine = np.arange(ends[comm.rank], ends[comm.rank + 1])
        self.name, self.comm = name, comm
        self.x, self.up, self.down = (
            weights(number, rows, cols).astype(case.dtype) for number, (rows, cols) in enumerate((
                np.ix_(range(tokens), range(outside)), np.ix_(range(outside), mine), np.ix_(mine, range(outside)),
            ))
        )
        self.hidden = np.empty((tokens, len(mine)), case.dtype)
        self.part, self.y = np.empty((2, tokens, outside), case.dtype)

    def run(self) -> None:
        """Do it once. Collective."""
        with using_threads(1):
            np.maximum(np.matmul(self.x, self.up, out=self.hidden), 0, out=self.hidden)
            np.matmul(self.hidden, self.down, out=self.part)
        request = self.comm.Iallreduce(self.part, self.y)
        wait_until(request.Test)

    def facts(self) -> dict[str, Any]:
        """Run once; the words that a ring moves."""
        self.run()
        return {"name": self.name, "words": 2 * (self.comm.size - 1) * self.y.size, "checked": self.y}


class Chain:
    """The same as a chain, on a mesh that knows how fast its ranks are. Collective to make."""

    def __init__(
        self, case: Case, comm: MPI.Intracomm, name: str, layouts: dict[str, str], stack: ExitStack
    ) -> None:
        tokens, inside, outside = case.shape
        self.name, self.mesh = name, stack.enter_context(rma_mm.Mesh(comm.size, comm, speeds=case.speeds))
        shapes = {"X": (tokens, outside), "W1": (outside, inside), "W2": (inside, outside)}
        known: dict[str, Any] = {x: (shape, case.dtype) for x, shape in shapes.items()}
        self.chain = rma_mm.plan_chain(["H = relu(X @ W1)", "Y = H @ W2"], self.mesh, layouts=layouts, **known)
        stack.callback(self.chain.close)
        self.inputs = {
            x: rma_mm.DistMatrix.from_function(
                shape, partial(weights, number), self.mesh, self.chain.layouts[x], case.dtype
            )
            for number, (x, shape) in enumerate(shapes.items())
        }

    def run(self) -> dict[str, rma_mm.DistMatrix]:
        """Do it once. Collective."""
        return self.chain.execute(**self.inputs)

    def facts(self) -> dict[str, Any]:
        """Run once; the words that were counted. Collective."""
        y = self.run()["Y"]
        counts = [plan.words for plan in self.chain.plans]
        words = sum(self.mesh.comm.allgather(sum(x.words_intra + x.words_inter for x in counts)))
        return {
            "name": self.name, "words": words, "checked": y.to_numpy(), "predicted": self.chain.predicted_seconds,
            "layouts": {x: str(layout) for x, layout in self.chain.layouts.items()},
        }


def weights(shift: int, rows: Any, cols: Any) -> Any:
    """−1, 0 and 1, whose products of products are exact in float32."""
    return measure.whole_numbers(rows + 1009 * shift, cols) % 3 - 1


def ffn(case: Case, comm: MPI.Intracomm, stack: ExitStack) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the networks moved, and how each is repeated. Collective."""
    assert case.speeds is not None
    whole = {"X": "*,*", "Y": "*,*"}
    made = [
        AllReduce(case, comm, "all-reduce, equal parts", (1.0,) * comm.size),
        AllReduce(case, comm, "all-reduce, parts by speed", case.speeds),
        Chain(case, comm, "chain, x and y on every rank", whole, stack),
        Chain(case, comm, "chain, all placements free", {}, stack),
    ]
    entries = [each.facts() for each in made]
    first = entries[0]["checked"]
    for entry in entries:
        entry["right"] = bool(np.array_equal(entry.pop("checked"), first))
    return entries, {each.name: each.run for each in made}


def measured(case: Case, comm: MPI.Intracomm, _: object) -> dict[str, Any]:
    """The record of an experiment. Collective."""
    start, facts = time.monotonic(), {"case": case.title, "kind": case.kind, "shape": list(case.shape)}
    with ExitStack() as stack:
        try:
            entries, calls = (ffn if case.kind == "ffn" else products)(case, comm, stack)
            samples = measure.interleaved(comm, calls, ROUNDS[case.kind], 0)
        except RmaError as error:  # the same one on every rank
            return {**facts, "error": f"{type(error).__name__}: {error}", "took": time.monotonic() - start}
    for entry, found in zip(entries, samples.values(), strict=False):
        entry["samples"] = found
    limit = {"limit": samples[ALONE]} if ALONE in samples else {}
    said = f"{len(entries)} ways"
    return {**facts, "ranks": comm.size, "entries": entries, **limit, "said": said, "took": time.monotonic() - start}


if __name__ == "__main__":
    measure.run(partial(main, measured=measured))

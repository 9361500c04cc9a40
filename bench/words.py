"""`mpiexec -n P python -m bench.words`: words that the transports counted against the interpreter's count.

Every algorithm on several placements, meshes and windows; the interpreter runs the same schedule on virtual ranks, the
queue with the tickets that real ranks drew. Bar: exactly equal on every rank, and on even blocks with C stationary
equal to algorithms.md §3 rows 9 and 20. (MPIR_CVAR_NUM_CLIQUES=2 or MPIR_CVAR_NOLOCAL=1 makes words cross nodes.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import rma_mm
from bench import measure
from rma_mm.errors import MemoryLimitError
from rma_mm.geometry.mesh import MeshShape, grids
from rma_mm.geometry.notation import parse_layout
from rma_mm.policy.planner.candidates import Request, candidates
from rma_mm.runtime.execution.operands import Operand
from rma_mm.schedule.interpret import Outcome, interpret

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm import DistMatrix, Plan

EVEN, ODD = (48, 24, 96), (37, 29, 53)
"""(m, n, k): one that every mesh of up to 24 ranks of such factors divides, and one that none does."""

@dataclass(frozen=True)
class Case:
    """One product."""

    algorithm: str
    placement: str
    """What the layouts are called here."""
    layouts: tuple[str, str, str] | None
    """Of A, B and C; None for those that the algorithm chooses."""
    shape: tuple[int, int, int]
    """(m, n, k)."""


def main(comm: MPI.Intracomm) -> int:
    """Count and report; `WRONG` where a product or a count was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--windows", nargs="+", default=measure.WINDOWS, choices=measure.WINDOWS)
    parser.add_argument("--algorithms", nargs="+", default=rma_mm.list_algorithms(), help="all")
    parser.add_argument("--mesh", help="as 2x3; all of two and three axes when not given")
    options = parser.parse_args()
    where = measure.machine(comm, ", ".join(options.windows))
    results = []
    for window in options.windows:
        all_grids = [*grids(comm.size, 2), *grids(comm.size, 3)]
        for grid in [measure.grid(options.mesh)] if options.mesh else all_grids:
            with rma_mm.Mesh(grid, comm, window=window) as mesh:
                where["nodes"] = mesh.num_nodes
                found = [result for case in cases(grid, options.algorithms) for result in counted(case, mesh)]
            results += [{"window": window, "mesh": list(grid), **result} for result in found]
    if comm.rank == 0:
        met = all(result["met"] for result in results)
        measure.publish(options.json, "words", where, lines_of(results), met=met, results=results)
    return 0 if comm.bcast(all(result["met"] for result in results)) else measure.WRONG


# -- what is multiplied ---------------------------------------------------------------------------


def cases(grid: tuple[int, ...], algorithms: list[str]) -> Iterator[Case]:
    """Every algorithm on the placements that it chooses, and on two axes on all that it takes."""
    for algorithm in algorithms:
        for shape, what in ((EVEN, "even"), (ODD, "odd")):
            yield from taken(Case(algorithm, f"its own, {what}", None, shape), grid)
        for name, layouts in placements(grid).items() if len(grid) == 2 else ():
            yield from taken(Case(algorithm, name, layouts, EVEN if name == "even blocks" else ODD), grid)


def taken(case: Case, grid: tuple[int, ...]) -> Iterator[Case]:
    """The case, where its algorithm takes the mesh and the placements."""
    mesh = MeshShape(grid)
    texts = case.layouts or (None, None, None)
    a, b, c = (parse_layout(text, mesh) if text else None for text in texts)
    if not candidates(Request(case.shape, mesh, (a, b, c), algorithm=case.algorithm))[0].rejected:
        yield case


def placements(grid: tuple[int, ...]) -> dict[str, tuple[str, str, str]]:
    """Layouts of A, B and C on a mesh of two axes, all kinds that there are."""
    rows, cols = (", ".join(str(n + 1) for n in range(extent)) for extent in grid)
    blocks = ("P('i', 'j')",) * 3
    return {
        "even blocks": blocks,
        "odd blocks": blocks,
        "mismatched": ("P('j', 'i')", "P(('i', 'j'), None)", "P(None, ('j', 'i'))"),
        "cyclic": ("P('i:cyclic(3)', 'j:cyclic(2)')", "P('i:cyclic(5)', 'j')", "P('i', 'j:cyclic(4)')"),
        "uneven": (f"P('i:weights({rows})', 'j')", f"P('i', 'j:weights({cols})')", f"P('i:weights({rows})', 'j')"),
        "skewed": ("P('i', 'j:skew(i)')", "P('i:skew(j)', 'j')", "P('i', 'j')"),
        "replicated A, B": ("P('i', None)", "P(None, 'j')", "P('i', 'j')"),
        "replicated C": ("P('i', 'j')", "P('i', 'j')", "P('i', None)"),
        "pinned": ("P('i', None, j=0)", "P(None, 'j', i=0)", "P('i', 'j')"),
        "partial": ("P('i', None, j=sum)", "P('i', 'j')", "P('i', 'j')"),
    }


# -- counting -------------------------------------------------------------------------------------


def counted(case: Case, mesh: rma_mm.Mesh) -> list[dict[str, Any]]:
    """What ranks and interpreter counted, on rank 0: by the plan for the case, and by a leaner one. Collective.

    The leaner one has narrower panels or fetches less ahead, as far as memory depends on that.
    """
    m, n, k = case.shape
    texts = case.layouts or (None, None, None)
    places = [parse_layout(text, mesh.grid) if text else None for text in texts]
    shapes = ((m, k), (k, n))
    operands = [Operand(shape, np.dtype("float64"), place) for shape, place in zip(shapes, places, strict=False)]
    plan = rma_mm.plan(*operands, mesh, layout=places[2], algorithm=case.algorithm)
    a, b = (
        rma_mm.DistMatrix.from_function(shape, measure.whole_numbers, mesh, plan.layouts[x], dtype="float64")
        for x, shape in zip("AB", shapes, strict=True)
    )
    plans = [plan]
    with suppress(MemoryLimitError):
        limit, place = plan.peak_bytes - 1, plan.layouts["C"]
        plans.append(rma_mm.plan(a, b, mesh, layout=place, algorithm=case.algorithm, memory_limit=limit))
    return [result for each in plans if (result := executed(case, each, a, b))]


def executed(case: Case, plan: Plan, a: DistMatrix, b: DistMatrix) -> dict[str, Any] | None:
    """The record of one plan, on rank 0. Collective."""
    plan.execute(a, b)
    c = plan.execute(a, b)  # once more: tickets go on counting
    whole, x, y = c.to_numpy(), a.to_numpy(), b.to_numpy()
    assert whole is not None and x is not None and y is not None
    w = plan.words
    mine = (a.tile, b.tile, c.tile, (w.words_intra, w.words_inter, w.messages), plan.claims)
    gathered = plan.mesh.comm.gather(mine)
    if gathered is None:
        return None
    a_tiles, b_tiles, c_tiles, words, claims = zip(*gathered, strict=True)
    outcome = interpret(
        plan.schedule,
        {"A": list(a_tiles), "B": list(b_tiles)},
        claims=dict(enumerate(claims)) if plan.schedule.pool else None,
    )
    right = np.array_equal(whole, x @ y) and all(map(np.array_equal, c_tiles, outcome.tiles))
    return compared(case, plan, list(words), outcome, right)


def compared(
    case: Case, plan: Plan, words: list[tuple[int, int, int]], outcome: Outcome, right: bool
) -> dict[str, Any]:
    """The record of one product. words: within nodes, between nodes, and messages, by rank."""
    closed = closed_form(case, plan.mesh)
    ranks = [intra + inter for intra, inter, _ in words]
    inter = sum(inter for _, inter, _ in words)
    equal = ranks == outcome.words and inter == outcome.words_between_nodes
    return {
        **asdict(case),
        "panels": asdict(plan.choice.tuning),
        "words": ranks,
        "interpreted": outcome.words,
        "between_nodes": inter,
        "interpreted_between_nodes": outcome.words_between_nodes,
        "closed_form": closed,
        "messages": sum(messages for *_, messages in words),
        "right": right,
        "met": right and equal and (closed is None or set(ranks) == {closed}),
    }


def closed_form(case: Case, mesh: rma_mm.Mesh) -> int | None:
    """Words of each rank by algorithms.md §3, rows 9 and 20; None where they say nothing."""
    if case.placement != "even blocks" or case.algorithm not in ("stationary_c", "srumma"):
        return None
    (m, n, k), (rows, cols) = case.shape, mesh.grid.dims
    if m % rows or n % cols or k % rows or k % cols:
        return None
    return m * k // rows * (cols - 1) // cols + k * n // cols * (rows - 1) // rows


def lines_of(results: list[dict[str, Any]]) -> list[str]:
    """A table by window and algorithm, and every case that differs."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["window"], result["algorithm"]].append(result)
    rows = []
    for (window, algorithm), found in groups.items():
        total, between = (sum(map(sum, (r["words"] for r in found))), sum(r["between_nodes"] for r in found))
        closed = sum(r["closed_form"] is not None for r in found)
        rows.append([f"{window} {algorithm}", len(found), total, between, closed, sum(r["met"] for r in found)])
    differ = [result for result in results if not result["met"]]
    head = ["window, algorithm", "plans", "words", "between nodes", "with a closed form", "equal"]
    verdict = f"bar: all equal, met: {measure.text(not differ)}"
    return ["", *measure.table(head, rows), *(f"differs: {result}" for result in differ), verdict]


if __name__ == "__main__":
    measure.run(main)

"""`mpiexec -n 2 python -m bench.gram`: A · Aᵀ, of which half is multiplied, against the general product of the same.

Both are timed in turn on rows of A and C. The words of each row that multiplies half are counted and held against its
closed form. Beside it the relationship matrix of 20 000 rows of 5 000 int8, summed exactly in int32. Results are
checked first. Bars: at most 0.58 of the general product's time, 1.05 of the closed form's words, and 15 s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import rma_mm
from bench import measure
from rma_mm import DistMatrix, Mesh, Plan
from rma_mm.policy.planner.candidates import SYMMETRIC
from rma_mm.schedule.lowering.difference_cover import pairs

if TYPE_CHECKING:
    from mpi4py import MPI

RATIO, WORDS, SECONDS = 0.58, 1.05, 15.0
"""Bars: of the general product's time, of the closed form's words, and of the relationship matrix."""


def main(comm: MPI.Intracomm) -> int:
    """Measure and report; `WRONG` where a product was."""
    parser = measure.Parser(__doc__, comm.rank)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of A (4096)")
    parser.add_argument("--dtype", nargs="+", default=["float64", "float32"], help="its types (float64 float32)")
    parser.add_argument("--relations", default="20000,5000", help="rows and columns of int8 (20000,5000)")
    parser.add_argument("--repeat", type=int, default=7, help="samples of each case (7)")
    options = parser.parse_args()
    m, k = map(int, options.relations.split(","))
    with Mesh((comm.size,), comm) as mesh:
        results = [compared(mesh, options.size, dtype, options.repeat) for dtype in options.dtype]
        named = [counted(mesh, options.size, name) for name in SYMMETRIC]
        relations = related(mesh, m, k)
        where = measure.machine(comm, mesh.window_flavour)
    is_right = all(result["right"] for result in (*results, *named, relations))
    if comm.rank == 0:
        head = ["type", "general ms", "gram ms", "ratio", "row", "right", "met"]
        names = ["dtype", "general_ms", "gram_ms", "ratio", "row", "right", "met"]
        words = ["row", "words", "closed_form", "of_closed_form", "right", "met"]
        lines = [
            *measure.table(head, [[result[name] for name in names] for result in results]),
            *measure.table([name.replace("_", " ") for name in words], [[each[x] for x in words] for each in named]),
            f"{m} x {k} int8 -> int32: {relations['seconds']:.2f} s by {relations['row']}, bar met: {relations['met']}",
            f"bars: {RATIO} of the general product, {WORDS} of the closed form, {SECONDS} s",
            f"all results right: {measure.text(is_right)}",
        ]
        measure.publish(options.json, "gram", where, lines, results=results, named=named, relations=relations)
    return 0 if is_right else measure.WRONG


def compared(mesh: Mesh, size: int, dtype: str, repeat: int) -> dict[str, Any]:
    """A square matrix times its transpose, both ways. Collective."""
    A = DistMatrix.from_function((size, size), measure.whole_numbers, mesh, "i", dtype)
    plans = {name: rma_mm.plan(A, A.T, mesh, layout="i", symmetric=known)
             for name, known in (("general", False), ("gram", None))}
    found = {name: plan.execute(A, A.T) for name, plan in plans.items()}
    is_right = is_same(mesh, found["general"], found["gram"]) and rma_mm.verify(A, A.T, found["gram"]).ok
    cases: dict[str, Callable[[], object]] = {name: partial(plan.execute, A, A.T) for name, plan in plans.items()}
    samples = measure.interleaved(mesh.comm, cases, repeat)
    general, gram = (median(samples[name]) for name in ("general", "gram"))
    return {
        "dtype": dtype, "general_ms": 1e3 * general, "gram_ms": 1e3 * gram, "ratio": gram / general,
        "row": plans["gram"].algorithm, "right": is_right, "met": gram <= RATIO * general, "samples": samples,
    }


def counted(mesh: Mesh, size: int, name: str) -> dict[str, Any]:
    """The words of a square matrix times its transpose by a row that multiplies half. Collective."""
    A = DistMatrix.from_function((size, size), measure.whole_numbers, mesh, "i", "float32")
    plan: Plan = rma_mm.plan(A, A.T, mesh, layout="i", algorithm=name)
    is_right = rma_mm.verify(A, A.T, plan.execute(A, A.T)).ok
    words = sum(mesh.comm.allgather(plan.words.words_intra + plan.words.words_inter))
    closed = dict(zip(SYMMETRIC, (by_owners, in_triangles, in_summands), strict=True))[name](size, size, mesh.size)
    share = words / closed if closed else 1.0
    return {
        "row": name, "words": words, "closed_form": closed, "of_closed_form": share, "right": is_right,
        "met": share <= WORDS,
    }


def by_owners(m: int, k: int, ranks: int) -> float:
    """Words of A · Aᵀ on rows of A and C: each pair of ranks fetches the rows of one for a block that one computes.

    Of an even number of ranks those opposite each other share theirs, for which half of the rows come twice. Then the
    other mirrors the block.
    """
    return m * k * ((ranks - 1) / 2 + (ranks % 2 == 0) / 4) + m * m * (ranks - 1) / (2 * ranks)


def in_triangles(m: int, k: int, ranks: int) -> float:
    """The same in triangle blocks: each rank has its own rows and those of few others, which it fetches once.

    What only opposite ranks have, who share it, one of them takes half of. A rank pushes what it makes of others' rows
    of C; then each mirrors the other half.
    """
    met = pairs(ranks)
    whole = {0, *(x for one, other in met if 2 * ((other - one) % ranks) != ranks for x in (one, other))}
    halved = {x for pair in met for x in pair} - whole
    pushed = sum(
        0.5 if 2 * (lower - upper) == ranks else 1.0
        for rank in range(ranks)
        for upper, lower in [sorted((rank + x) % ranks for x in pair) for pair in met]
        if lower != rank
    )
    of_a = len(whole) - 1 + 0.75 * len(halved)
    return m * k * of_a + m * m * (pushed / ranks**2 + (ranks - 1) / (2 * ranks))


def in_summands(m: int, k: int, ranks: int) -> float:
    """The same where each rank has all rows of A for its share of k, and pushes what it makes of others' rows of C.

    Of C those are what lies below the squares of m/P rows on the diagonal, and these squares.
    """
    return m * k * (ranks - 1) / ranks + m * m * (ranks - 1) * (1 / 2 + 1 / ranks)


def is_same(mesh: Mesh, one: DistMatrix, other: DistMatrix) -> bool:
    """Whether two matrices placed alike hold the same. Collective."""
    return all(mesh.comm.allgather(bool((one.tile == other.tile).all())))


def related(mesh: Mesh, m: int, k: int) -> dict[str, Any]:
    """The relationship matrix of m rows. Collective."""
    A = DistMatrix.from_function((m, k), measure.whole_numbers, mesh, "i", "int8")
    plan: Plan = rma_mm.plan(A, A.T, mesh, layout="i", compute_dtype="int32")
    C = plan.execute(A, A.T)
    is_right = rma_mm.verify(A, A.T, C, compute_dtype="int32").ok
    samples = measure.interleaved(mesh.comm, {"gram": partial(plan.execute, A, A.T)}, 3, warmup=0)["gram"]
    return {
        "seconds": median(samples), "samples": samples, "row": plan.algorithm, "right": is_right,
        "met": median(samples) <= SECONDS,
    }


if __name__ == "__main__":
    measure.run(main)

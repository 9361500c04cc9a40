"""Products whose collective goes on while they multiply, in pieces round a ring.

    gather_gemm              goes round   by        C and work     gemm_scatter   C is scattered by
    :a (as it is)            A  m→i       rows      n→i            :rows          rows, m→i (as it is)
    :a,columns               A  k→i       columns   n→i            :columns       columns, n→i
    :b                       B  n→i       columns   m→i
    :b,rows                  B  k→i       rows      m→i            A and B are k→i

Without a form it is that one whose placements are given, and of those the one that moves least. A transposed operand
counts as what it is multiplied as: rows of Aᵀ are columns of A. The form `:pull` does the same by one-sided transfers.

Source: NVIDIA's cuBLASMp (AG+GEMM and GEMM+RS, 2024), after S. Wang et al., "Overlap communication with dependent
computation via decomposition in large deep learning models" (ASPLOS 2023). Block counts, shapes and transposes are
free here. Its two worked examples on 4 ranks multiply D = AᵀB. With A (2 × 8) and B (2 × 4) cut by columns B goes
round, and D (8 × 4) is cut by rows; with A (8 × 2) and B (8 × 4) cut by rows the sums of D (2 × 4) do, to its columns:

    >>> from rma_mm.geometry.mesh import MeshShape
    >>> from rma_mm.schedule.lowering.lower import lower
    >>> from rma_mm.schedule.algorithm import PlacedProblem
    >>> def first(algorithm, m, n, k):
    ...     mesh = MeshShape((4,))
    ...     problem = PlacedProblem((m, n, k), mesh, algorithm.placements(mesh))
    ...     return lower(algorithm, problem).program(0)
    >>> for op in first(GATHERS["b"], 8, 4, 2)[:3]:
    ...     print(op)
    [B0]@0[0:2, 1:2] := shift from 1, B@0[0:2, 0:1] to 3
    C@0[0:2, 0:1] := A@0[0:2, 0:2] @ B@0[0:2, 0:1]
    [B1]@0[0:2, 2:3] := shift from 1, [B0]@0[0:2, 1:2] to 3
    >>> for op in first(SCATTERS["columns"], 2, 4, 8)[2:5]:
    ...     print(op)
    [C0]@0[0:2, 1:2] := A@0[0:2, 0:2] @ B@0[0:2, 1:2]
    [C1]@0[0:2, 2:3] := shift from 1, [C0]@0[0:2, 1:2] to 3
    [C1]@0[0:2, 2:3] += A@0[0:2, 0:2] @ B@0[0:2, 2:3]
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

from rma_mm.algorithms.from_table import algorithm_from_table, best_placed
from rma_mm.schedule.algorithm import Algorithm, Problem, in_pieces

_ring = partial(algorithm_from_table, source="cuBLASMp 2024; Wang et al. 2023", axes=1, granularity=in_pieces(2))
_of_a = partial(_ring, b="n→i", c="n→i", work="n→i", grouped="A")
_of_b = partial(_ring, a="m→i", c="m→i", work="m→i", grouped="B")
_of_c = partial(_ring, a="k→i", b="k→i", work="k→i", grouped="C", end_at_owner=True, result="reduce")

GATHERS = {
    "a": _of_a(
        "gather_gemm", a="m→i", over="m",
        summary="rows of A go round a ring, each block multiplied as it passes; C by columns",
    ),
    "b": _of_b(
        "gather_gemm:b", b="n→i", over="n",
        summary="columns of B go round a ring, each block multiplied as it passes; C by rows",
    ),
    "a,columns": _of_a(
        "gather_gemm:a,columns", a="k→i", over="k",
        summary="columns of A go round a ring, each block multiplied as it passes; C by columns",
    ),
    "b,rows": _of_b(
        "gather_gemm:b,rows", b="k→i", over="k",
        summary="rows of B go round a ring, each block multiplied as it passes; C by rows",
    ),
}
SCATTERS = {
    "rows": _of_c(
        "gemm_scatter", c="m→i", over="m",
        summary="k is shared out; sums of C go round a ring, each rank adding its part, to the owners of its rows",
    ),
    "columns": _of_c(
        "gemm_scatter:columns", c="n→i", over="n",
        summary="k is shared out; sums of C go round a ring, each rank adding its part, to the owners of its columns",
    ),
}


def _by_placement(forms: dict[str, Algorithm]) -> Algorithm:
    """Return the algorithm that is whichever of `forms` suits the placements, or else the one that moves less."""
    first = next(iter(forms.values()))

    def fit(problem: Problem) -> Algorithm:
        algorithms = sorted(forms.values(), key=lambda algorithm: prod(problem.extent(algorithm.grouped)))
        return replace(best_placed(algorithms, problem), name=first.name)

    def form(text: str) -> Algorithm | str:
        name, _, pull = text.rpartition(":") if text.endswith(":pull") else (text, "", "")
        found = row if name == "pull" else forms.get(name)
        if found is None:
            names = ", ".join(f":{each}" for each in (*forms, "pull"))
            return f"{first.name} has the forms {names} (one-sided), and :pull behind each of the others"
        return found.pulled if "pull" in (name, pull) else found

    row = replace(first, specialize=fit, form=form)
    return row


GATHER_GEMM = _by_placement(GATHERS)
GEMM_SCATTER = _by_placement(SCATTERS)

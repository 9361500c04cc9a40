"""Operands that lie by rows or by columns, transposed or not: what is gathered, scattered and moved, and what it gives.

cuBLASMp's two worked examples are those of its documentation, on 4 ranks, in the extents that they have there.
"""

from __future__ import annotations

import numpy as np

import rma_mm
from rma_mm import DistMatrix, Mesh
from tests.closed_forms import FORMS
from tests.launch import parallel
from tests.thorough import thorough

ROWS, COLUMNS = "P('i', None)", "P(None, 'i')"

EXAMPLES = [
    # all-gather, then multiply: B goes round
    ("gather_gemm", ":b", (2, 8), (2, 4), COLUMNS, ROWS),
    # multiply, then reduce-scatter: sums of D do
    ("gemm_scatter", ":columns", (8, 2), (8, 4), ROWS, COLUMNS),
]
"""(name, form, shape of A, shape of B, placement of both, placement of D = AᵀB)."""


@parallel(ranks=(4,), env=("node", "nolocal"))
def test_the_two_worked_examples_of_cublasmp(comm):
    with Mesh((4,), comm) as mesh:
        for name, form, shape_a, shape_b, given, wanted in EXAMPLES:
            a, b = (np.arange(float(m * n)).reshape(m, n) - m for m, n in (shape_a, shape_b))
            A, B = (DistMatrix.from_numpy(x, mesh, given) for x in (a, b))
            for chosen in (name, name + form):
                with rma_mm.plan(A, B, mesh, layout=wanted, algorithm=chosen, transpose_a=True) as plan:
                    assert np.array_equal(plan.execute(A, B).to_numpy(), a.T @ b), chosen
                    assert plan.movement == {"A": "here", "B": "here", "C": "here"} | (
                        {"B": "shift"} if form == ":b" else {"C": "shift"}
                    )
                    words = comm.allgather(plan.words.words_intra + plan.words.words_inter)
                    m, n, k = *plan.c_shape, shape_a[0]
                    assert words == FORMS[name + form].words((4,), (m, n, k)) == [6] * 4, chosen


SHAPE = (14, 11, 17)
GRIDS = {4: [(2, 2), (4, 1)], 6: [(2, 3)]}
DEALT = "i:cyclic(3), j:cyclic(2)"
BY_GROUPS = {**dict.fromkeys(("summa_c", "summa_a", "summa_b", "pumma", "cannon"), "i, j"), "pblas": DEALT}
"""Rows that move nothing one-sided, where ranks are nodes → where A, B and C lie as they are stored."""
ROWS_OF_TWO_AXES = BY_GROUPS | {"stationary_c": DEALT, "auto": "i, j"}


def stored(rng, turned):
    """A and B of complex whole numbers, as they are stored."""
    m, n, k = SHAPE
    shapes = ((k, m) if "A" in turned else (m, k)), ((n, k) if "B" in turned else (k, n))
    return [rng.integers(-4, 5, shape) + 1j * rng.integers(-4, 5, shape) for shape in shapes]


def as_multiplied(x, is_turned, is_conjugated):
    """op(x)."""
    x = x.T if is_turned else x
    return x.conj() if is_conjugated else x


@thorough
@parallel(ranks=tuple(GRIDS), env=("nolocal",))
def test_operands_that_lie_transposed_on_the_same_grid(comm):
    """Every row in every orientation, conjugated or not; those that move by groups move nothing else."""
    rng, trouble = np.random.default_rng(0), []
    for grid in GRIDS[comm.size]:
        with Mesh(grid, comm) as mesh:
            for at, (name, place) in enumerate(ROWS_OF_TWO_AXES.items()):
                for number, turned in enumerate(("", "A", "B", "AB")):
                    a, b = stored(rng, turned)
                    conjugated = ("", "A", "B", "AB")[(at + number) % 4]
                    A, B = (DistMatrix.from_numpy(x, mesh, place) for x in (a, b))
                    flags = {f"transpose_{x.lower()}": x in turned for x in "AB"}
                    flags |= {f"conjugate_{x.lower()}": x in conjugated for x in "AB"}
                    with rma_mm.plan(A, B, mesh, layout=place, algorithm=name, **flags) as plan:
                        got = plan.execute(A, B).to_numpy()
                        ways = set(plan.movement["A"].split("+") + plan.movement["B"].split("+"))
                    left, right = (as_multiplied(x, y in turned, y in conjugated) for x, y in ((a, "A"), (b, "B")))
                    if not np.array_equal(got, left @ right):
                        trouble.append(f"{name} on {grid}, transposed {turned}, conjugated {conjugated}: wrong")
                    if name in BY_GROUPS and not ways <= {"here", "broadcast", "all-gather", "shift"}:
                        trouble.append(f"{name} on {grid}, transposed {turned}: {ways}")
    assert not trouble, "\n".join(trouble)

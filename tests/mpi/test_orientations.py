"""Operands that lie by rows or by columns, transposed or not: what is gathered, scattered and moved, and what it gives.

cuBLASMp's two worked examples are those of its documentation, on 4 ranks, in the extents that they have there.
"""

from __future__ import annotations

import numpy as np

import rma_mm
from rma_mm import DistMatrix, Mesh
from tests.closed_forms import FORMS
from tests.launch import parallel

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

"""Cannon's algorithm: every rank multiplies the two blocks that it has, and passes them on.

          k →                 A moves left, B moves up; before the first turn
        A00 A01 A02           row i of A stands i places further, column j of B j places:
        A11 A12 A10
        A22 A20 A21           rank (i, j) starts with A(i, i+j) and B(i+j, j).

Source: L. E. Cannon, "A cellular computer to implement the Kalman filter algorithm" (1969). There the mesh is square
and its blocks are even. Here rank (i, j) starts at s(i, j) = (i·K/R + j·K/C) mod K and holds windows of k from there,
K/C wide of A and K/R of B, so that any mesh and any shape will do: where the windows differ in width, the wider one
stays for several turns.
"""

from rma_mm.algorithms.from_table import algorithm_from_table

CANNON = algorithm_from_table(
    "cannon",
    "Cannon 1969",
    "2-D blocks, skewed; A is shifted along rows of the mesh and B along columns",
    axes=2,
    a="m→i, k→j:skew(i)",
    b="k→i:skew(j), n→j",
    c="m→i, n→j",
    work="m→i, n→j",
    over="k",
    grouped="AB",
    # blocks that lie plain, or transposed on the same grid, are skewed first
    accepts_transposed="AB",
    also_accepts={"A": "m→i, k→j", "B": "k→i, n→j"},
    staged_to={"A": "m→i, k→j:skew(i)", "B": "k→i:skew(j), n→j"},
)

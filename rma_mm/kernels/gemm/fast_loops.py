"""Loops of products with fewer multiplications: sums of submatrices are formed where these are packed.

Each product is added to submatrices of c as soon as a tile of it is done, so that no matrix of sums is stored. Written
for Numba and compiled for each form, as `loops` is.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import numba

from rma_mm.kernels.gemm.form import ADDS, OVERWRITES, SCALARS, SCALES
from rma_mm.kernels.gemm.loops import merge, pack
from rma_mm.kernels.gemm.memory import moved, number, spread_tile, subroutine, tile

_compiled = subroutine()


@_compiled
def spread(sums, tiles, place, targets, row, col, rows, columns, mode, later, plain, scalars):
    """Add a tile at the edge to submatrices of c."""
    for t in range(number(targets, 0)):
        target = moved(targets, 8 + 24 * t)
        adds, sign = number(target, 16) | later, number(target, 8)
        by = moved(scalars, 0 if sign > 0 else 2 * sums.parts * sums.total)
        merge(
            sums, tiles, sums.columns * sums.parts * sums.total, moved(place, number(target, 0)), row, col, rows,
            columns, ADDS if adds else mode, plain and sign > 0, by,
        )


@_compiled
def block(
    sums, panel_a, panel_b, sliver_a, sliver_b, c, targets, row, col, rows, columns, cells, mode, later, plain,
    scalars, spare,
):
    """All tiles of one packed panel of a and one of b."""
    for j in range(0, columns, sums.columns):
        b = moved(panel_b, (j // sums.columns) * sliver_b)
        n = min(sums.columns, columns - j)
        for i in range(0, rows, sums.rows):
            a = moved(panel_a, (i // sums.rows) * sliver_a)
            m = min(sums.rows, rows - i)
            place = moved(c, i * row + j * col)
            whole = m == sums.rows and n == sums.columns and col == sums.item * sums.parts
            if whole and plain and mode != SCALES:
                spread_tile(sums, a, b, place, targets, row, cells, later)
            else:
                tile(sums, a, b, spare, sums.columns * sums.parts * sums.total, cells, OVERWRITES)
                spread(sums, spare, place, targets, row, col, m, n, mode, later, plain, scalars)


def multiply_fast(
    sums, left, right,
    a, a_row, a_col, a_flips, b, b_row, b_col, b_flips, c, c_row, c_col, count, a_step, b_step, c_step,
    m, n, k, mode, plain, scalars, block_m, block_n, block_k, panel_a, panel_b, spare,
):
    """As `loops.multiply`, once, of matrices whose submatrices have m, n and k rows and columns.

    Behind the scalars, which are followed by those with the opposite alpha, there is `fast.table`.
    """
    table = moved(scalars, SCALARS)
    operand = 16 * sums.terms - 8  # bytes of an operand in the table
    for p in range(0, k, block_k):
        depth, later = min(block_k, k - p), max(p, numba.int64(mode == ADDS))
        cells = (depth + sums.group - 1) // sums.group
        sliver_a = cells * left.cell * left.width * left.parts
        sliver_b = cells * right.cell * right.width * right.parts
        for j in range(0, n, block_n):
            columns = min(block_n, n - j)
            for r in range(number(table, 0)):
                of_a = moved(table, 8 + r * (2 * operand + 8 + 24 * sums.terms))
                of_b, targets = moved(of_a, operand), moved(of_a, 2 * operand)
                here = moved(b, number(of_b, 0) + p * b_row + j * b_col)
                pack(right, here, moved(of_b, 8), b_col, b_row, b_flips, columns, depth, panel_b)
                for i in range(0, m, block_m):
                    rows = min(block_m, m - i)
                    here = moved(a, number(of_a, 0) + i * a_row + p * a_col)
                    pack(left, here, moved(of_a, 8), a_row, a_col, a_flips, rows, depth, panel_a)
                    block(
                        sums, panel_a, panel_b, sliver_a, sliver_b, moved(c, i * c_row + j * c_col), targets, c_row,
                        c_col, rows, columns, cells, mode, later, plain, scalars, spare,
                    )

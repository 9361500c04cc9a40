"""Products of few rows by a long matrix that is read once, where it lies: packing it would take longer than the rest.

Rows of a are packed, and sums are kept, in the caches. Written for Numba and compiled for each form, as `loops` is.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from rma_mm.kernels.gemm.blocks import ONE, SHIFT
from rma_mm.kernels.gemm.form import ACROSS, ADDS, ALONG, MANY_STEPS
from rma_mm.kernels.gemm.loops import clear, merge
from rma_mm.kernels.gemm.memory import (
    configure,
    fill,
    load_sum,
    moved,
    put,
    read,
    release,
    subroutine,
    tile_across,
    tile_along,
)

_compiled = subroutine()


@_compiled
def copy_bytes(source, target, size):
    for at in range(size):
        target[at] = source[at]


@_compiled
def pack_rows(sums, left, source, row, along, rows, depth, packed):
    """Pack rows of a in slivers; the elements that a step takes lie side by side, and zeros behind the last."""
    sliver = (depth + sums.grain - 1) // sums.grain * sums.grain * sums.rows
    clear(packed, (rows + sums.rows - 1) // sums.rows * sliver // left.group * left.cell)
    for i in range(rows):
        first = i // sums.rows * sliver + i % sums.rows * sums.beside
        for p in range(0, depth, left.group):
            q = p % sums.beside
            at = first + (p - q) * sums.rows + q % sums.halves * sums.lanes + q // sums.halves
            cell = read(left, source, source, i * row + p * along, along, depth - p)
            fill(left, packed, at // left.group * left.cell, cell)


@subroutine(only=lambda sums: sums.form.in_place == ACROSS)
def pass_across(sums, side, packed, sliver, b, row, col, columns, depth, slivers, out, line, spare):
    """Add the products of rows of b to the sums.

    What is asked for during many steps lies row by row, during few steps below the tile itself: either is faster so.
    """
    width, is_few = sums.columns * side.item, sums.steps < MANY_STEPS
    whole, rest = columns // sums.columns, columns % sums.columns * side.item
    tiles = whole + min(1, rest)
    inverse, jump = (ONE, row - width) if is_few else (ONE // tiles + 1, row - tiles * width)
    share = (ONE + slivers - 1) // slivers
    for p in range(0, depth, sums.steps):
        some, rows = min(sums.steps, depth - p), moved(b, p * row)
        a, ahead = moved(packed, p * sums.rows // side.group * side.cell), moved(rows, sums.steps * row)
        steps = (some + sums.grain - 1) // sums.grain
        for t in range(tiles):
            here, step = moved(rows, t * width), row
            if t == whole or some % sums.grain > 0:
                if sums.grain > 1:  # a step takes what lies beside as well, or below
                    clear(spare, steps * sums.grain * width)
                for s in range(some):
                    copy_bytes(moved(here, s * row), moved(spare, s * width), rest if t == whole else width)
                here, step = spare, width
            first, asked = (0, moved(ahead, t * width)) if is_few else (t * sums.steps, ahead)
            for g in range(slivers):
                place = moved(out, g * sums.rows * line + t * sums.columns * sums.total)
                mine = first + g * some // slivers
                tile_across(
                    sums, side, moved(a, g * sliver), here, step, place, line, steps, asked, mine, inverse, jump, share
                )


@subroutine(only=lambda sums: sums.form.in_place == ALONG)
def pass_along(sums, side, packed, sliver, b, row, col, columns, depth, slivers, out, line, spare):
    """Add the products of columns of b to the sums."""
    whole, width = depth // sums.grain, sums.grain * side.item
    rest = (depth - whole * sums.grain) * side.item
    last = whole * sums.rows * sums.grain // side.group * side.cell
    for j in range(0, columns - columns % sums.vectors, sums.vectors):
        here = moved(b, j * col)
        for g in range(slivers):
            place = moved(out, g * sums.rows * line + j * sums.total)
            tile_along(sums, side, moved(packed, g * sliver), here, col, place, line, whole)
        if rest > 0:
            clear(spare, sums.vectors * width)
            for v in range(sums.vectors):
                copy_bytes(moved(here, v * col + whole * width), moved(spare, v * width), rest)
            for g in range(slivers):
                place = moved(out, g * sums.rows * line + j * sums.total)
                tile_along(sums, side, moved(packed, g * sliver + last), spare, width, place, line, 1)
    tile = moved(spare, sums.vectors * width)
    for j in range(columns - columns % sums.vectors, columns):  # one by one
        here = moved(b, j * col)
        clear(spare, width)
        copy_bytes(moved(here, whole * width), spare, rest)
        for g in range(slivers):
            clear(tile, sums.rows * sums.vectors * sums.total)
            a, across = moved(packed, g * sliver), sums.vectors * sums.total
            tile_along(sums, side, a, here, 0, tile, across, whole)
            tile_along(sums, side, moved(a, last), spare, 0, tile, across, min(1, rest))
            for i in range(sums.rows):
                at = (g * sums.rows + i) * line + j * sums.total
                put(sums, out, at, load_sum(sums, out, at) + load_sum(sums, tile, i * across))


def multiply_few(
    sums, left, right,
    a, a_row, a_col, a_flips, b, b_row, b_col, b_flips, c, c_row, c_col, count, a_step, b_step, c_step,
    m, n, k, mode, plain, scalars, block_m, block_n, block_k, packed, out, spare,
):
    """As `loops.multiply`: C = alpha · a @ b + beta · c, of real numbers."""
    line, slivers = block_n * sums.total + SHIFT, block_m // sums.rows
    configure(sums)
    for q in range(count):
        for j in range(0, n, block_n):
            columns = min(block_n, n - j)
            for p in range(0, k, block_k):
                clear(out, block_m * line)
                depth = min(block_k, k - p)
                sliver = (depth + sums.grain - 1) // sums.grain * sums.grain * sums.rows // left.group * left.cell
                pack_rows(sums, left, moved(a, q * a_step + p * a_col), a_row, a_col, m, depth, packed)
                here = moved(b, q * b_step + p * b_row + j * b_col)
                pass_across(sums, right, packed, sliver, here, b_row, b_col, columns, depth, slivers, out, line, spare)
                pass_along(sums, right, packed, sliver, here, b_row, b_col, columns, depth, slivers, out, line, spare)
                place = moved(c, q * c_step + j * c_col)
                merge(sums, out, line, place, c_row, c_col, m, columns, mode if p == 0 else ADDS, plain, scalars)
    release(sums)

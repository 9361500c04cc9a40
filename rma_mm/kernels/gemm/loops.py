"""The loops around the innermost kernel: blocks of k, n and m that stay in the caches, packed into slivers.

After Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), but for one thing: there a
sliver of b stays in the first level. Here it streams from the second, as the panel of a does, so that more is summed
before c is touched; the panel of b stays in the third. Written for Numba and compiled for each form: the arguments
`sums`, `left`, `right` and `side` say which, and hold nothing. Strides and offsets are in bytes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import numba
import numpy as np

from rma_mm.kernels.gemm.form import ADDS, OVERWRITES, SCALARS, SCALES, STREAMS
from rma_mm.kernels.gemm.memory import (
    combined,
    configure,
    copy,
    element,
    fence,
    fill,
    half,
    load_sum,
    moved,
    narrow_tile,
    number,
    put,
    read,
    release,
    set_word,
    short_tile,
    stored,
    subroutine,
    tile,
    times,
    transpose,
    turn,
    turns,
    whole_tile,
    word,
)

_compiled, _inlined = subroutine(), subroutine(inlined=True)

RUN = 8
"""Steps that are packed of one sliver before the next: source and target are then read and written in long runs. More
rows of the source than lines of a cache's set would drive each other out where they lie a multiple of a page apart."""


@_inlined
def copy_cells(side, source, others, across, along, flips, here, left, target):
    """One step of a sliver: `here` cells, side by side. others: see `memory.read`."""
    for j in range(here):
        value = read(side, source, others, j * across, along, left)
        if flips:
            value = -value
        fill(side, target, j * side.cell, value)


@_inlined
def copy_line(side, source, others, along, flips, steps, stride, target):
    """One cell of each of some whole steps of a sliver, `stride` apart."""
    for g in range(steps):
        value = read(side, source, others, g * side.group * along, along, side.group)
        if flips:
            value = -value
        fill(side, target, g * stride, value)


@subroutine(only=turns)
def turn_rest(side, first, steps, stride, target):
    """Store row by row what was not from the beginning."""
    for g in range(first, steps, side.steps):
        turn(side, moved(target, g * stride))


@_compiled
def copy_sliver(side, source, others, across, along, flips, here, depth, stride, target):
    """Fill one plane of a sliver, or all of it."""
    steps, first = depth // side.group, 0
    if across == side.item:
        for g in range(steps):
            line, place = moved(source, g * side.group * along), moved(target, g * stride)
            if side.square != 0 and here == side.width:
                copy(side, line, others, along, place)
            elif here == side.width:
                copy_cells(side, line, others, side.item, along, flips, side.width, side.group, place)
            else:
                copy_cells(side, line, others, side.item, along, flips, here, side.group, place)
    elif along == side.item:
        if side.square != 0 and here == side.width:
            first = steps // side.square * side.square
            for g in range(0, first, side.square):
                transpose(side, moved(source, g * side.cell), others, across, moved(target, g * stride))
        for g in range(first, steps, RUN):
            line, place = moved(source, g * side.group * side.item), moved(target, g * stride)
            some = min(RUN, steps - g)
            for j in range(here):
                cells = moved(place, j * side.cell)
                copy_line(side, moved(line, j * across), others, side.item, flips, some, stride, cells)
    else:
        for j in range(here):
            cells = moved(target, j * side.cell)
            copy_line(side, moved(source, j * across), others, along, flips, steps, stride, cells)
    if steps * side.group < depth:
        line = moved(source, steps * side.group * along)
        rest = depth - steps * side.group
        copy_cells(side, line, others, across, along, flips, here, rest, moved(target, steps * stride))
    turn_rest(side, first, (depth + side.group - 1) // side.group, stride, target)


@subroutine(only=lambda side: side.form.planes == 2)
def copy_imaginary(side, source, others, across, along, flips, here, depth, stride, target):
    """Fill the plane of a sliver that holds imaginary parts."""
    copy_sliver(side, source, others, across, along, flips, here, depth, stride, target)


@_compiled
def clear(target, size):
    """Zero `size` bytes, rounded up to whole words."""
    for at in range(0, size, 4):
        set_word(target, at, 0)


@subroutine(only=lambda side: side.operand == "b" and side.form.correction != 0)
def correct(side, source, across, along, here, depth, head):
    """Write the corrections of a sliver before it: the sum of each column, times a constant."""
    clear(head, side.head)
    for p in range(depth):
        for j in range(here):
            set_word(head, 4 * j, word(head, 4 * j) + element(side, source, p * along + j * across))
    for j in range(here):
        set_word(head, 4 * j, word(head, 4 * j) * side.correction)


@numba.njit(inline="always")
def steps_of(side, depth):
    """Return how many steps of `side.group` elements a sliver has: as many as whole instructions take."""
    unit = side.group * side.steps
    return (depth + unit - 1) // unit * side.steps


@_compiled
def pack(side, source, others, across, along, flips, extent, depth, panel):
    """Pack `extent` × `depth` elements into slivers of `side.width`, padded with zeros.

    others: see `memory.read`. across, along: from one element to the next within a step, and from step to step.
    flips: conjugate.
    """
    stride = side.cell * side.width * side.parts
    sliver = side.head + steps_of(side, depth) * stride
    run = max(side.steps, RUN // side.terms) * side.group if across == side.item else depth
    for begin in range(0, depth, run):
        some = min(run, depth - begin)
        for first in range(0, extent, side.width):
            here = min(side.width, extent - first)
            head = moved(panel, (first // side.width) * sliver)
            source_here = moved(source, first * across + begin * along)
            body = moved(head, side.head + begin // side.group * stride)
            if here < side.width or steps_of(side, some) > (some + side.group - 1) // side.group:
                clear(body, steps_of(side, some) * stride)
            copy_sliver(side, source_here, others, across, along, False, here, some, stride, body)
            part, plane = moved(source_here, side.part), moved(body, side.width * side.cell)
            copy_imaginary(side, part, others, across, along, flips, here, some, stride, plane)
            if begin == 0:
                correct(side, source_here, across, along, here, depth, head)


@subroutine(inlined=True, only=lambda sums: sums.form.planes == 1)
def merge_real(sums, spare, c, step, columns, mode, plain, scalars):
    """Add one row of a tile to one row of c."""
    for j in range(columns):
        value = load_sum(sums, spare, j * sums.total)
        if not plain:
            value = times(sums, load_sum(sums, scalars, 0), value)
        if mode == ADDS:
            value = combined(sums, stored(sums, c, j * step), value)
        elif mode == SCALES:
            value = combined(sums, times(sums, load_sum(sums, scalars, sums.total), stored(sums, c, j * step)), value)
        put(sums, c, j * step, value)


@numba.njit(inline="always")
def scaled(sums, scalars, re, im):
    by_re, by_im = load_sum(sums, scalars, 0), load_sum(sums, scalars, sums.total)
    return by_re * re - by_im * im, by_re * im + by_im * re


@subroutine(inlined=True, only=lambda sums: sums.form.planes == 2)
def merge_complex(sums, spare, c, step, columns, mode, plain, scalars):
    """Add one row of a complex tile to one row of c."""
    for j in range(columns):
        re = load_sum(sums, spare, 2 * j * sums.total)
        im = load_sum(sums, spare, (2 * j + 1) * sums.total)
        if not plain:
            re, im = scaled(sums, scalars, re, im)
        if mode != OVERWRITES:
            old_re, old_im = stored(sums, c, j * step), stored(sums, c, j * step + sums.item)
            if mode == SCALES:
                old_re, old_im = scaled(sums, moved(scalars, 2 * sums.total), old_re, old_im)
            re, im = combined(sums, old_re, re), combined(sums, old_im, im)
        put(sums, c, j * step, re)
        put(sums, c, j * step + sums.item, im)


@_compiled
def merge(sums, spare, width, c, row, col, rows, columns, mode, plain, scalars):
    """Add the sums in `spare`, `width` bytes from row to row, to `rows` × `columns` elements of c."""
    for i in range(rows):
        line, place = moved(spare, i * width), moved(c, i * row)
        merge_complex(sums, line, place, col, columns, mode, plain, scalars)
        if col == sums.item:
            merge_real(sums, line, place, sums.item, columns, mode, plain, scalars)
        else:
            merge_real(sums, line, place, col, columns, mode, plain, scalars)


@subroutine(only=lambda sums: sums.form.terms == 1)
def merge_once(sums, spare, width, c, targets, row, col, rows, columns, mode, plain, scalars):
    """Add the sums in `spare` to c."""
    merge(sums, spare, width, c, row, col, rows, columns, mode, plain, scalars)


@subroutine(only=lambda sums: sums.form.terms > 1)
def merge_each(sums, spare, width, c, targets, row, col, rows, columns, mode, plain, scalars):
    """Add the sums in `spare` to several submatrices of c, or subtract them: see `fast.table`."""
    for t in range(number(targets, 0)):
        target = moved(targets, 8 + 24 * t)
        place, sign, how = moved(c, number(target, 0)), number(target, 8), ADDS if number(target, 16) else mode
        by = moved(scalars, 0 if sign > 0 else 2 * sums.parts * sums.total)
        merge(sums, spare, width, place, row, col, rows, columns, how, plain and sign > 0, by)


@_compiled
def block(
    sums, panel_a, panel_b, sliver_a, sliver_b, c, targets, row, col, rows, columns, cells, mode, plain, scalars, spare
):
    """All tiles of one packed panel of a and one of b."""
    width = sums.columns * sums.parts * sums.total
    for j in range(0, columns, sums.columns):
        b = moved(panel_b, (j // sums.columns) * sliver_b)
        n = min(sums.columns, columns - j)
        for i in range(0, rows, sums.rows):
            a = moved(panel_a, (i // sums.rows) * sliver_a)
            m = min(sums.rows, rows - i)
            place = moved(c, i * row + j * col)
            whole = m == sums.rows and n == sums.columns and col == sums.item * sums.parts
            if sums.direct and whole and plain and mode != SCALES:
                whole_tile(sums, a, b, place, targets, row, cells, mode)
            else:
                if n <= sums.lanes:
                    narrow_tile(sums, a, b, spare, width, cells, OVERWRITES)
                elif m <= sums.short:
                    short_tile(sums, a, b, spare, width, cells, OVERWRITES)
                else:
                    tile(sums, a, b, spare, width, cells, OVERWRITES)
                merge_once(sums, spare, width, place, targets, row, col, m, n, mode, plain, scalars)
                merge_each(sums, spare, width, place, targets, row, col, m, n, mode, plain, scalars)


def multiply(
    sums, left, right,
    a, a_row, a_col, a_flips, b, b_row, b_col, b_flips, c, c_row, c_col, count, a_step, b_step, c_step,
    m, n, k, mode, plain, scalars, block_m, block_n, block_k, panel_a, panel_b, spare,
):
    """C = alpha · a @ b + beta · c in the semiring of the form; `scalars` holds alpha and beta.

    It is done `count` times; from one product to the next it is `a_step`, `b_step` and `c_step`. If the form has more
    terms than one, m, n and k are the extents of submatrices, and the scalars are followed by those with the opposite
    alpha, and by `fast.table`.
    """
    configure(sums)
    for q in range(count):
        one(
            sums, left, right, moved(a, q * a_step), a_row, a_col, a_flips, moved(b, q * b_step), b_row, b_col, b_flips,
            moved(c, q * c_step), c_row, c_col, m, n, k, mode, plain, scalars, block_m, block_n, block_k,
            panel_a, panel_b, spare,
        )
    release(sums)
    if mode == STREAMS:
        fence()


@_inlined
def one(
    sums, left, right,
    a, a_row, a_col, a_flips, b, b_row, b_col, b_flips, c, c_row, c_col,
    m, n, k, mode, plain, scalars, block_m, block_n, block_k, panel_a, panel_b, spare,
):
    table, operand = moved(scalars, SCALARS), 16 * sums.terms - 8  # bytes of an operand in the table
    products = number(table, 0) if sums.terms > 1 else 1
    for p in range(0, k, block_k):
        depth, how = min(block_k, k - p), mode if p == 0 else ADDS
        cells = (depth + sums.group - 1) // sums.group
        sliver_a = cells * left.steps * left.cell * left.width * left.parts
        sliver_b = right.head + cells * right.steps * right.cell * right.width * right.parts
        for j in range(0, n, block_n):
            columns = min(block_n, n - j)
            for r in range(products):
                of_a = moved(table, 8 + r * (2 * operand + 8 + 24 * sums.terms))
                of_b, targets = moved(of_a, operand), moved(of_a, 2 * operand)
                first_a, first_b = (number(of_a, 0), number(of_b, 0)) if sums.terms > 1 else (0, 0)
                here = moved(b, first_b + p * b_row + j * b_col)
                pack(right, here, moved(of_b, 8), b_col, b_row, b_flips, columns, depth, panel_b)
                for i in range(0, m, block_m):
                    rows = min(block_m, m - i)
                    here = moved(a, first_a + i * a_row + p * a_col)
                    if sums.terms > 1 or rows < m or j == 0:
                        pack(left, here, moved(of_a, 8), a_row, a_col, a_flips, rows, depth, panel_a)
                    block(
                        sums, panel_a, panel_b, sliver_a, sliver_b, moved(c, i * c_row + j * c_col), targets, c_row,
                        c_col, rows, columns, cells, how, plain, scalars, spare,
                    )


def least_exponents(source, step, row, col, count, rows, columns, out):
    """Set `out` to the least exponent of nonzero elements, as bfloat16 stores it; 256 if all are zero."""
    least = numba.uint16(0xFFFF)
    for q in range(count):
        for i in range(rows):
            line = moved(source, q * step + i * row)
            if col == 2:
                least = least_bits(line, 2, columns, least)
            else:
                least = least_bits(line, col, columns, least)
    set_word(out, 0, 256 if least == 0xFFFF else (numba.int32(least) + 1) >> 7)


@numba.njit(inline="always")
def least_bits(line, col, columns, least):
    """Return the least of the bits of elements without their signs, minus 1, so that those of zeros are the most."""
    for j in range(columns):
        least = min(least, numba.uint16((half(line, j * col) & numba.uint16(0x7FFF)) - numba.uint16(1)))
    return least


def specials(side, source, step, row, col, count, rows, columns, out):
    """Set `out` to the special values in matrices, added up: 1 for NaN, 2 for infinity, 4 for minus infinity."""
    nan = above = below = numba.int32(0)
    for q in range(count):
        for i in range(rows):
            for j in range(columns):
                value = read(side, source, out, q * step + i * row + j * col, 0, 1)
                nan |= numba.int32(np.isnan(value))
                above |= numba.int32(value == np.inf)
                below |= numba.int32(value == -np.inf)
    set_word(out, 0, nan + 2 * above + 4 * below)

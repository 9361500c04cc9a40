"""The half of a symmetric product that lies on and below the diagonal, and the whole from it.

It is multiplied by BLAS's syrk and herk, or block by block; then mirrored in tiles, or zeros go above the diagonal.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BLAS_TYPES
from rma_mm.kernels.blas import LETTER, Library, leading, library, scalar_of
from rma_mm.kernels.elementwise import pieces
from rma_mm.kernels.product import LocalOperands, Product

NARROW = 128
"""Rows of a square on the diagonal up to which it is done as a whole: thinner products run far below the full rate."""
TILE_BYTES = 64 << 10
"""Bytes of a box that are transposed at once, from a dense copy: lines a power of two apart share few cache sets."""
LEAST = 32  # rows and columns of that, at least
_ROW_MAJOR, _LOWER = 101, 122
_AS_IT_IS, _TRANSPOSED, _CONJ_TRANSPOSED = 111, 112, 113


def triangle(problem: LocalOperands) -> Iterator[LocalOperands]:
    """Yield the blocks of a product on and below the diagonal: the one below it, and by halves the two squares left."""
    extent = problem.c.shape[0]
    if extent <= NARROW:
        yield problem
        return
    upper, lower = slice(0, extent // 2), slice(extent // 2, extent)
    yield from triangle(_part(problem, upper, upper))
    yield _part(problem, lower, upper)
    yield from triangle(_part(problem, lower, lower))


def _part(problem: LocalOperands, rows: slice, cols: slice) -> LocalOperands:
    return replace(problem, a=problem.a[rows], b=problem.b[:, cols], c=problem.c[rows, cols])


def bind_syrk(problem: LocalOperands) -> Product | None:
    """Return one call of BLAS for a matrix times its own transpose; None if BLAS cannot do it."""
    lib, a, b, c = library(), problem.a, problem.b, problem.c
    is_own = (a.ctypes.data, a.shape, a.strides, a.dtype) == (b.ctypes.data, b.T.shape, b.T.strides, b.dtype)
    if lib is None or not is_own or a.dtype != c.dtype or c.dtype not in BLAS_TYPES or 0 in (*a.shape, problem.alpha):
        return None
    is_hermitian = problem.conj_a != problem.conj_b
    if is_hermitian and (problem.alpha.imag or problem.beta.imag):
        return None
    code, ld_a = _AS_IT_IS, leading(a, True)
    if ld_a is None:
        code, ld_a = _CONJ_TRANSPOSED if is_hermitian else _TRANSPOSED, leading(a, False)
    ld_c = leading(c, True)
    name = f"cblas_{LETTER[c.dtype.char]}{'herk' if is_hermitian else 'syrk'}"
    function = lib.function(name)
    fits = problem.conj_b == (code == _AS_IT_IS) if is_hermitian else not problem.conj_a
    if function is None or ld_a is None or ld_c is None or not fits or max(*a.shape, ld_a, ld_c) > lib.most:
        return None
    return Product.by("blas", problem, function, *_arguments(lib, problem, code, ld_a, ld_c))


def _arguments(lib: Library, problem: LocalOperands, code: int, ld_a: int, ld_c: int) -> tuple[object, ...]:
    """Return the arguments of cblas_?syrk, or of cblas_?herk for real scalars."""
    a, c = problem.a, problem.c
    is_hermitian = problem.conj_a != problem.conj_b
    of_scalars = np.empty(0, c.dtype).real.dtype if is_hermitian else c.dtype
    n, k, lda, ldc = (lib.integer(x) for x in (*a.shape, ld_a, ld_c))
    alpha, beta = (scalar_of(x.real if is_hermitian else x, of_scalars) for x in (problem.alpha, problem.beta))
    codes = map(ctypes.c_int, (_ROW_MAJOR, _LOWER, code))
    first, third = (ctypes.c_void_p(x.ctypes.data) for x in (a, c))
    return (*codes, n, k, alpha, first, lda, beta, third, ldc)


def transpose_into(image: NDArray[Any], box: NDArray[Any], conjugates: bool) -> None:
    """Copy `box`, which has the shape of `image` and lies transposed in memory, in tiles; conjugated where asked."""
    for part in pieces(image, TILE_BYTES, LEAST) if image.ndim == 2 else [...]:
        dense = np.ascontiguousarray(box[part].T).T
        if conjugates:
            np.conjugate(dense, out=image[part])
        else:
            np.copyto(image[part], dense)


def mirror_within(square: NDArray[Any], conjugates: bool) -> None:
    """Make the upper triangle of a square the mirror image of the lower; of a Hermitian one the diagonal is real."""
    if len(square) > NARROW:
        middle = len(square) // 2
        upper, lower = slice(0, middle), slice(middle, None)
        mirror_within(square[upper, upper], conjugates)
        transpose_into(square[upper, lower], square[lower, upper].T, conjugates)
        mirror_within(square[lower, lower], conjugates)
        return
    below = np.conjugate(square) if conjugates else square.copy()
    np.copyto(square, below.T, where=np.triu(np.ones(square.shape, bool), 1))
    if conjugates and square.dtype.kind == "c":
        np.fill_diagonal(square, below.diagonal().real)


def clear_beyond(c: NDArray[Any], lines: Sequence[int], first: Sequence[int], columns: NDArray[np.int64]) -> None:
    """Zeros in these lines of `c` in its `columns` from the given number on, which are ascending."""
    is_dense = len(columns) > 0 and columns[-1] - columns[0] + 1 == len(columns)
    for line, begin in zip(lines, first, strict=True):
        if begin < len(columns):
            c[line, slice(columns[begin], columns[-1] + 1) if is_dense else columns[begin:]] = 0

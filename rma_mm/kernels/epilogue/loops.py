"""The compiled loop of `activations`. Importing this needs Numba."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from rma_mm.kernels.compiling import Source
from rma_mm.kernels.epilogue.normal import Exponential, Normal

Array = NDArray[Any]


def _fma(context: Any, x: Any, y: Any, z: Any) -> Any:
    return x(x, y, z), lambda context, builder, signature, arguments: builder.fma(*arguments)


fma: Any = intrinsic(_fma)  # x · y + z, rounded once


def _power(context: Any, x: Any) -> Any:
    bits = {32: 23, 64: 52}[x.bitwidth]

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (number,) = arguments
        integer = ir.IntType(x.bitwidth)
        shifted = builder.shl(builder.bitcast(number, integer), ir.Constant(integer, bits))
        return builder.bitcast(shifted, number.type)

    return x(x), emit


power: Any = intrinsic(_power)  # 2ⁿ, of `Exponential.magic` + n


def source(dtype: np.dtype[Any], normal: Normal) -> Source:
    """Return `loop`, and Numba's types of its arguments."""
    size, number = types.int64, {4: types.float32, 8: types.float64}[dtype.itemsize]
    element = types.CPointer(number)
    return loop(dtype, normal), (element, size, size, size, element, element, size)


def loop(dtype: np.dtype[Any], normal: Normal) -> Callable[[Array, int, int, int, Array, Array, int], None]:
    """Return the loop over `columns` elements of each row of `c`, rows being `ld` elements apart; flat arrays.

    Written for a compiler, which makes vectors of it. Its min and max keep NaN if that comes first, as Python's do.
    """
    top, below = np.array(normal.top, dtype), np.array(normal.below, dtype)
    zero, half, one, edge, least = (dtype.type(x) for x in (0, 0.5, 1, normal.edge, -normal.edge))
    highest = len(top) - 1
    exponential, reach, root = Exponential.of(dtype), dtype.type(normal.reach), dtype.type(1 / sqrt(2 * pi))
    series, magic = np.array(exponential.series, dtype), dtype.type(exponential.magic)
    per_two, high, low = (dtype.type(x) for x in (exponential.per_two, -exponential.high, -exponential.low))
    last = len(series) - 1

    def close(c: Array, rows: int, ld: int, columns: int, per_column: Array, per_row: Array, activation: int) -> None:
        for i in range(rows):
            begin, shift = i * ld, per_row[i]
            if activation == 0:
                for j in range(columns):
                    c[begin + j] = c[begin + j] + per_column[j] + shift
            elif activation == 1:
                for j in range(columns):
                    c[begin + j] = max(c[begin + j] + per_column[j] + shift, zero)
            else:
                for j in range(columns):
                    x = c[begin + j] + per_column[j] + shift
                    inside = min(max(x, least), edge)
                    square = inside * inside
                    p, q = top[highest], below[highest]
                    for n in range(highest):
                        p = fma(p, square, top[highest - 1 - n])
                        q = fma(q, square, below[highest - 1 - n])
                    phi = fma(inside, p / q, half)
                    phi = one if x >= edge else phi
                    phi = zero if x <= least else phi
                    if activation == 2:
                        c[begin + j] = max(x, least) * phi  # −∞ · 0 is NaN
                        continue
                    inside = min(max(x, -reach), reach)
                    y = inside * inside * -half
                    shifted = fma(y, per_two, magic)
                    whole = shifted - magic
                    rest = fma(whole, low, fma(whole, high, y))
                    e = series[last]
                    for n in range(last):
                        e = fma(e, rest, series[last - 1 - n])
                    c[begin + j] = fma(inside * root, e * power(shifted), phi)

    return close

"""Bias, ReLU and GELU, added and applied in place: compiled loops for float32 and float64, NumPy for every type.

GELU is x · Φ(x), where Φ is the normal distribution, 1/2 · (1 + erf(x/√2)). Between −edge and edge Φ(x) is
1/2 + x · P(x²)/Q(x²); beyond, it is 0 or 1 to less than half a unit roundoff. P and Q were fitted to
erf(x/√2)/(2x) in 90 digits: Loeb's linearised least squares at 60 (float64: 120) Chebyshev nodes of (0, edge), whose
weights were multiplied by the last error (Lawson) in each of 25 rounds, so that the error of x · P/Q is nearly level:
at most 7.2e-9 for float32, and 1.1e-17 for float64. No coefficient is negative: nothing cancels in P and Q.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache, partial
from math import pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.blas import leading
from rma_mm.kernels.compiling import Source, compiled, works
from rma_mm.kernels.epilogue.normal import NORMAL

Array = NDArray[Any]

_CODES = {None: 0, "relu": 1, "gelu": 2, "gelu'": 3}  # how compiled code knows them


# -- by NumPy -------------------------------------------------------------------------------------


def activate(c: Array, bias: Array | None, activation: str | None) -> None:
    """Add `bias`, which is broadcast, to `c` in place, and apply the activation, or gelu', GELU's derivative.

    For pieces that stay in the cache.
    """
    with np.errstate(all="ignore"):  # overflow, NaN and wrap-around are results here
        if bias is not None:
            np.add(c, bias, out=c)
        if activation == "relu":
            np.maximum(c, 0, out=c)
        elif activation == "gelu":
            _gelu(c)
        elif activation == "gelu'":
            _gelu_slope(c)


def _gelu(c: Array) -> None:
    phi = normal_distribution(c)
    np.maximum(c, -NORMAL[c.dtype].edge, out=c)  # −∞ · 0 is NaN
    c *= phi


def _gelu_slope(c: Array) -> None:
    """Φ(x) + x · φ(x): to rounding, 1 and 0 if Φ is."""
    phi, reach = normal_distribution(c), NORMAL[c.dtype].reach
    inside = np.clip(c, -reach, reach)
    np.exp(inside * inside * -0.5, out=c)
    c *= inside
    c *= c.dtype.type(1 / sqrt(2 * pi))
    c += phi


def normal_distribution(x: Array) -> Array:
    normal = NORMAL[x.dtype]
    inside = np.clip(x, -normal.edge, normal.edge)
    square = inside * inside
    phi = _polynomial(normal.top, square)
    phi /= _polynomial(normal.below, square)
    phi *= inside
    phi += 0.5
    phi[x >= normal.edge] = 1
    phi[x <= -normal.edge] = 0
    return phi


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    total = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total *= x
        total += coefficient
    return total


# -- compiled -------------------------------------------------------------------------------------


def bind_compiled(c: Array, bias: Array | None, per: str | None, activation: str | None) -> Callable[[], None] | None:
    """Return bias and activation of a whole tile as one compiled call, or None if there is no such code."""
    ld = leading(c, True)
    compiled = compiled_loop(c.dtype) if c.dtype in NORMAL and ld is not None and c.size else None
    if compiled is None or ld is None:
        return None
    rows, columns = c.shape
    per_column, per_row = _zeros(columns, c.dtype), _zeros(rows, c.dtype)
    if bias is not None:
        per_column, per_row = (bias, per_row) if per == "column" else (per_column, bias)
    kept = tuple(np.ascontiguousarray(x) for x in (per_column, per_row))
    addresses = [x.ctypes.data for x in (c, *kept)]
    return _Call(compiled, addresses[0], rows, ld, columns, *addresses[1:], _CODES[activation]).keeping(c, *kept)


@lru_cache(maxsize=8)
def _zeros(count: int, dtype: np.dtype[Any]) -> Array:
    return np.zeros(count, dtype)


class _Call(partial[None]):
    kept: tuple[Array, ...]  # what lies at its addresses

    def keeping(self, *arrays: Array) -> _Call:
        self.kept = arrays
        return self


@cache
def compiled_loop(dtype: np.dtype[Any]) -> Callable[..., None] | None:
    """Return the compiled loop for `dtype`, compiled now; None if nothing can be compiled."""
    if not works():
        return None

    def source() -> Source:
        from rma_mm.kernels.epilogue import loops

        return loops.source(dtype, NORMAL[dtype])

    integer, address = ctypes.c_int64, ctypes.c_void_p
    return compiled("activations", dtype.name, (address, *(integer,) * 3, address, address, integer), source)

"""Local work without a product: scaling, casting, and checking the scalars alpha and beta."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator
from numbers import Complex, Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16, accumulator, check_dtype, rank
from rma_mm.errors import DtypeError, quoted

STEP_BYTES = 64 << 10  # bytes of an array that one NumPy pass covers before the next pass begins


def scale(c: NDArray[Any], beta: Any) -> None:
    """Multiply `c` in place by `beta`; beta = 0 fills `c` with zeros, NaN included.

    Raises: DtypeError if `beta` has no value in the type of `c`.
    """
    factor = scalar(beta, c.dtype, "beta")
    if factor == 0:
        c.fill(0)
    elif factor != 1:
        # the 16-bit floats are scaled in float32 and rounded once
        with np.errstate(all="ignore"):
            np.multiply(c, factor, out=c, dtype=factor.dtype, casting="unsafe")


def cast(src: NDArray[Any], dst: NDArray[Any]) -> None:
    """Copy `src` into `dst` (same shape, two dimensions), rounding each element once; integers wrap around.

    Raises: DtypeError if an imaginary part or a fraction would be dropped.
    """
    check_cast(src.dtype, dst.dtype, "src", "dst")
    is_rounded_twice = dst.dtype == BFLOAT16 and src.itemsize > 2 and src.dtype != np.float32  # over float32
    with np.errstate(all="ignore"):
        if not is_rounded_twice:
            np.copyto(dst, src, casting="unsafe")
            return
        for at in pieces(src, STEP_BYTES):
            np.copyto(dst[at], _odd(src[at]), casting="unsafe")


def _odd(x: NDArray[Any]) -> NDArray[np.float32]:
    """`x` in float32, where it does not fit with an odd last bit: a second rounding then goes the right way."""
    if x.dtype.kind in "iu" and x.itemsize == 8:  # of what float64 cannot hold, one bit stands for the last ten
        low = (x & 1023) != 0
        x = np.where(np.abs(x.astype(np.float64)) < 2.0**53, x, (x >> 10 | low) << 10)
    wide = x.astype(np.float64)
    held = wide.astype(np.float32)
    outside = np.abs(held) > np.abs(wide)
    bits = held.view(np.int32)
    bits -= outside  # one step towards 0; of infinity, to the largest number
    bits |= (held != wide) & ~np.isnan(wide)
    return held


def pieces(c: NDArray[Any], nbytes: int, least: int = 1) -> Iterator[tuple[slice, slice]]:
    """`c` in parts of about `nbytes`: whole rows, and where `least` rows are more than that, parts of their columns."""
    (m, n), most = c.shape, max(1, nbytes // c.itemsize)
    if not (m and n):
        return
    height = min(m, max(least, most // n))
    down, across = max(1, round(m / height)), max(1, round(n / max(least, most // height)))
    for rows in _cuts(m, down):
        for cols in _cuts(n, across):
            yield rows, cols


def _cuts(extent: int, count: int) -> list[slice]:
    return [slice(extent * i // count, extent * (i + 1) // count) for i in range(count)]


def check_cast(src: np.dtype[Any], dst: np.dtype[Any], src_name: str, dst_name: str) -> None:
    """Refuse a cast down the ladder bool, integer, real, complex. Raises: DtypeError naming both types."""
    if rank(check_dtype(src, f"{src_name}'s dtype")) > rank(check_dtype(dst, f"{dst_name}'s dtype")):
        raise DtypeError(
            f"{src_name} is {src.name} and {dst_name} is {dst.name}: values go up the ladder bool, integer, real, "
            f"complex, never down; make {dst_name} {src.name} or convert {src_name} with .astype({dst.name!r})"
        )


def scalar(value: Any, dtype: np.dtype[Any], name: str) -> np.generic[Any]:
    """`value` as a number of the type in which `dtype` is summed (float32 for float16 and bfloat16).

    Fractions are rounded; NaN and infinities pass in the float types. Raises: DtypeError naming the argument `name`
    where that type cannot hold `value`: an integer type a fraction or what is out of its range, a float type what
    would become infinite, or 0.

    >>> scalar(2 + 0j, np.dtype("int8"), "alpha")
    np.int8(2)
    """
    level = rank(check_dtype(dtype))
    number = _number(value, dtype, name)
    if level < 3 and isinstance(number, complex):
        raise _refusal(value, dtype, name, "a complex number needs a complex type", "a real value, or complex64")
    if level < 2:
        return _whole(number, dtype, name)
    working = accumulator(dtype)
    with np.errstate(all="ignore"):
        held: np.generic[Any] = _floating(number, working)
    finite = isinstance(number, int) or cmath.isfinite(number)
    if finite and not np.isfinite(held):
        raise _refusal(value, dtype, name, f"finite values end at {np.finfo(working).max:.3g}", "float64")
    if number != 0 and held == 0:
        least = np.finfo(working).smallest_subnormal
        raise _refusal(value, dtype, name, f"values other than 0 begin at {least:.3g}", "float64")
    return held


def _floating(number: Any, working: np.dtype[Any]) -> Any:
    """`number` rounded to the float type `working`; an integer beyond every float becomes infinite."""
    try:
        return working.type(number)
    except OverflowError:
        return working.type(math.inf)


def _number(value: Any, dtype: np.dtype[Any], name: str) -> Any:
    """Return a Python int, float or complex equal to `value`; complex only where the imaginary part is not zero."""
    is_numpy = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    plain = value.item() if is_numpy else value
    if isinstance(plain, Integral):  # bool is one
        return int(plain)
    if isinstance(plain, Real):
        return _nearest(plain)
    if isinstance(plain, Complex):
        number = complex(plain)
        return number if number.imag != 0 else number.real
    raise _refusal(value, dtype, name, "a scalar must be one number", "an int, float or complex")


def _nearest(number: Real) -> Any:
    """Return the float nearest to a real number; of a whole one beyond every float, itself."""
    try:
        return float(number)
    except OverflowError:  # no float, but a fraction of large integers
        return int(number)  # type: ignore[call-overload]  # rounded towards 0: far beyond every type


def _whole(number: Any, dtype: np.dtype[Any], name: str) -> np.generic[Any]:
    """`number` in an integer type or bool."""
    if not isinstance(number, int) and not number.is_integer():
        raise _refusal(number, dtype, name, "it holds whole numbers only", "a whole number, or float64 matrices")
    low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    if not low <= number <= high:
        raise _refusal(number, dtype, name, f"it holds {low} to {high}", "a value in that range, or a wider dtype")
    held: np.generic[Any] = dtype.type(int(number))
    return held


def _refusal(value: Any, dtype: np.dtype[Any], name: str, rule: str, fix: str) -> DtypeError:
    said = "a whole number of very many digits" if _is_long(value) else quoted(value)
    return DtypeError(f"{name} is {said}, which {dtype.name} cannot represent: {rule}; use {fix}")


def _is_long(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > 256

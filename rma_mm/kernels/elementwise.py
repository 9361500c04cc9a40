"""Local work without a product: scaling, casting, and checking the scalars alpha and beta."""

from __future__ import annotations

import cmath
import math
from numbers import Complex, Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import DtypeError
from rma_mm.kernels.dtypes import accumulator, check_dtype, rank


def scale(c: NDArray[Any], beta: Any) -> None:
    """Multiply `c` in place by `beta`; beta = 0 fills with zeros whatever `c` held, NaN included.

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
    """Copy `src` into `dst` (same shape), rounding each element once; integers wrap around.

    Into bfloat16 that holds from float32 and narrower types; ml_dtypes takes wider ones through float32.

    Raises: DtypeError where an imaginary part or a fraction would be dropped.
    """
    check_cast(src.dtype, dst.dtype, "src", "dst")
    with np.errstate(all="ignore"):
        np.copyto(dst, src, casting="unsafe")


def check_cast(src: np.dtype[Any], dst: np.dtype[Any], src_name: str, dst_name: str) -> None:
    """Refuse a cast down the ladder bool, integer, real, complex.

    Raises: DtypeError naming both types.
    """
    if rank(check_dtype(src, f"{src_name}'s dtype")) > rank(check_dtype(dst, f"{dst_name}'s dtype")):
        raise DtypeError(
            f"{src_name} is {src.name} and {dst_name} is {dst.name}: values go up the ladder bool, integer, real, "
            f"complex, never down; make {dst_name} {src.name} or convert {src_name} with .astype({dst.name!r})"
        )


def scalar(value: Any, dtype: np.dtype[Any], name: str) -> np.generic[Any]:
    """`value` as a number of the type in which `dtype` is summed (float32 for float16 and bfloat16).

    NaN and infinities pass in the float types. Raises: DtypeError naming the argument `name` where `dtype`
    cannot hold `value`.

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
    return held


def _floating(number: Any, working: np.dtype[Any]) -> Any:
    """`number` rounded to the float type `working`; an integer beyond every float becomes infinite."""
    try:
        return working.type(number)
    except OverflowError:
        return working.type(math.inf)


def _number(value: Any, dtype: np.dtype[Any], name: str) -> Any:
    """A Python int, float or complex equal to `value`; complex only where the imaginary part is not zero."""
    is_numpy = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    plain = value.item() if is_numpy else value
    if isinstance(plain, Integral):  # bool is one
        return int(plain)
    if isinstance(plain, Real):
        return float(plain)
    if isinstance(plain, Complex):
        number = complex(plain)
        return number if number.imag != 0 else number.real
    raise _refusal(value, dtype, name, "a scalar must be one number", "an int, float or complex")


def _whole(number: Any, dtype: np.dtype[Any], name: str) -> np.generic[Any]:
    """`number` in an integer type or bool."""
    if not math.isfinite(number) or number != int(number):
        raise _refusal(number, dtype, name, "it holds whole numbers only", "a whole number, or float64 matrices")
    low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    if not low <= number <= high:
        raise _refusal(number, dtype, name, f"it holds {low} to {high}", "a value in that range, or a wider dtype")
    held: np.generic[Any] = dtype.type(int(number))
    return held


def _refusal(value: Any, dtype: np.dtype[Any], name: str, rule: str, fix: str) -> DtypeError:
    return DtypeError(f"{name} is {value!r}, which {dtype.name} cannot represent: {rule}; use {fix}")

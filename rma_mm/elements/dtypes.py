"""Element types: which ones are supported, what a product of two of them is, and what it is summed in.

`result_dtype` and `accumulator` alone decide; docs/reference/types.md says what they decide, as a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rma_mm.errors import DtypeError, nearest

try:
    from ml_dtypes import bfloat16 as _bfloat16

    BFLOAT16: np.dtype[Any] | None = np.dtype(_bfloat16)
    """NumPy's view of bfloat16, or None if ml_dtypes is not installed."""
except ImportError:  # pragma: no cover - an ordinary dependency, but nothing else needs it
    BFLOAT16 = None

_HALF = (np.dtype(np.float16),) + ((BFLOAT16,) if BFLOAT16 is not None else ())

BLAS_TYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(t) for t in (np.float32, np.float64, np.complex64, np.complex128)
)
"""The types that a BLAS library multiplies."""

SUPPORTED: tuple[np.dtype[Any], ...] = (
    *_HALF,
    *BLAS_TYPES,
    *(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    np.dtype(np.bool_),
)
"""Every element type a matrix may have, in native byte order."""


def supported_names(dtypes: tuple[np.dtype[Any], ...] = SUPPORTED) -> str:
    return ", ".join(dtype.name for dtype in dtypes)


def check_dtype(dtype: np.dtype[Any], name: str = "dtype") -> np.dtype[Any]:
    """`dtype` itself if it is supported.

    Raises: DtypeError for objects, strings, dates and records, and for foreign byte order.
    """
    if dtype in SUPPORTED:
        return dtype
    native = dtype.newbyteorder("=")
    if native in SUPPORTED:
        raise DtypeError(
            f"{name} is {dtype.str}, {native.name} in foreign byte order; elements must be in this machine's order: "
            f"convert with .astype({native.name!r})"
        )
    raise DtypeError(f"{name} is {dtype}; supported element types are {supported_names()}")


def parse_dtype(text: str) -> np.dtype[Any]:
    """Return the element type called `text`, such as "float32" or "bfloat16".

    Raises: DtypeError listing the valid names.
    """
    for dtype in SUPPORTED:
        if dtype.name == text.strip().lower():
            return dtype
    hint = nearest(text, [dtype.name for dtype in SUPPORTED])
    raise DtypeError(f"dtype {text!r} is not an element type; {hint}use one of {supported_names()}")


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """`dtype` as one of the supported element types; also by the names that NumPy lacks. Raises DtypeError."""
    try:
        return check_dtype(np.dtype(dtype))
    except TypeError:
        return parse_dtype(str(dtype))


def result_dtype(a: np.dtype[Any], b: np.dtype[Any], compute: np.dtype[Any] | None = None) -> np.dtype[Any]:
    """Return the element type of A @ B: NumPy's promotion, or `compute` where both operands are cast into it safely.

    Raises: DtypeError for unsupported types, types without a common one, and a narrowing `compute`.

    >>> result_dtype(np.dtype("int8"), np.dtype("int8"), np.dtype("int32"))
    dtype('int32')
    """
    check_dtype(a, "a's dtype")
    check_dtype(b, "b's dtype")
    if compute is not None:
        return _widened(a, b, check_dtype(compute, "compute_dtype"))
    try:
        common = np.result_type(a, b)
    except TypeError:
        raise DtypeError(
            f"a is {a.name} and b is {b.name}, which have no common element type: name compute_dtype, one of "
            f"{supported_names(_holding(a, b))}, or convert one of them with .astype(...)"
        ) from None
    return check_dtype(common, "the common dtype of a and b")


def _widened(a: np.dtype[Any], b: np.dtype[Any], compute: np.dtype[Any]) -> np.dtype[Any]:
    """`compute`, if a and b may be cast into it."""
    wide = _holding(a, b)
    if compute in wide:
        return compute
    raise DtypeError(
        f"compute_dtype {compute.name} cannot hold every value of a ({a.name}) and b ({b.name}); "
        f"use one of {supported_names(wide)}, or convert the operands with .astype({compute.name!r})"
    )


def _holding(a: np.dtype[Any], b: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    return tuple(x for x in SUPPORTED if np.can_cast(a, x, "safe") and np.can_cast(b, x, "safe"))


def is_half(dtype: np.dtype[Any]) -> bool:
    return dtype in _HALF


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if is_half(dtype) else dtype


def rank(dtype: np.dtype[Any]) -> int:
    return 2 if dtype in _HALF else {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}[dtype.kind]

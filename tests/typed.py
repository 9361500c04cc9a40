"""Products of mixed types: numbers that show in which type they were multiplied and summed, and what must come of them.

All are whole numbers, so large that the type of the sums just holds every product and every sum: in a narrower type,
or by way of one, they come out otherwise. What must come of them is computed with Python's own integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16, accumulator, is_half

Array = NDArray[Any]
Exact = tuple[Array, Array]
"""Real and imaginary part of a matrix, of Python's numbers."""

PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53}
"""Bits of the significand, by type (of one part, where numbers are complex)."""
ROOM = {24: (18, 9), 53: (46, 23)}
"""By the precision of the sums: bits of a wide operand beside a narrow one, and of either where both are alike."""
ROLES = (("wide", "narrow"), ("narrow", "wide"), ("even", "even"))
"""Which of two operands takes what room there is."""


def numbers(rng: np.random.Generator, dtype: np.dtype[Any], summed: np.dtype[Any], shape: Any, role: str) -> Array:
    """A matrix of `dtype` for a product that is summed in `summed`."""
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if summed.kind in "iu" and role != "narrow":  # they wrap around
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    if dtype.kind in "iu" and dtype.itemsize == 8 and role == "wide":
        return _beyond_floats(rng, dtype, shape)
    bits = 2 if role == "narrow" else ROOM.get(PRECISION.get(summed.name, 0), (30, 30))[role == "even"]
    bits = min(bits, PRECISION.get(dtype.name, 8 * dtype.itemsize - (dtype.kind == "i")))
    low = 0 if dtype.kind == "u" else 1 - 2**bits
    made = rng.integers(low, 2**bits, shape)
    if dtype.kind == "c":
        return (made + 1j * rng.integers(low, 2**bits, shape)).astype(dtype)
    return made.astype(dtype)


def _beyond_floats(rng: np.random.Generator, dtype: np.dtype[Any], shape: Any) -> Array:
    """Integers of 64 bits that float64 rounds, to what leaves it room to sum: multiples of 2^16, and one more."""
    high = rng.integers(-(2**46), 2**46, shape) * 2**16
    if dtype.kind == "i":
        return high + np.where(np.abs(high) > 2**60, 1, 0)
    made: Array = high.astype(np.uint64) + np.uint64(2**63)
    return made + np.uint64(1)


def exact(x: Array) -> Exact:
    """The numbers themselves."""
    whole = np.frompyfunc(int, 1, 1)
    if x.dtype.kind == "c":
        return whole(x.real.astype(np.float64)), whole(x.imag.astype(np.float64))
    plain = x if x.dtype.kind in "iub" else x.astype(np.float64)
    real = np.empty(x.shape, object)
    real[...] = whole(plain)
    return real, np.zeros(x.shape, object)


def times(a: Exact, b: Exact) -> Exact:
    """a @ b."""
    return a[0].dot(b[0]) - a[1].dot(b[1]), a[0].dot(b[1]) + a[1].dot(b[0])


def scaled(factor: Any, x: Exact) -> Exact:
    """factor · x, exactly."""
    value = complex(factor) if isinstance(factor, complex | np.complexfloating) else None
    if value is None:
        whole = Fraction(int(factor)) if not isinstance(factor, float | np.floating) else Fraction(float(factor))
        return whole * x[0], whole * x[1]
    re, im = Fraction(value.real), Fraction(value.imag)
    return re * x[0] - im * x[1], re * x[1] + im * x[0]


def wrapped(x: Array, dtype: np.dtype[Any]) -> Array:
    """Whole numbers modulo 2^w, in an integer type; in bool, whether they are other than 0."""
    if dtype.kind == "b":
        return (x != 0).astype(np.bool_)
    size = 8 * dtype.itemsize
    return np.vectorize(lambda v: int(v) % 2**size, otypes=[np.uint64])(x).astype(f"u{dtype.itemsize}").view(dtype)


def total(summands: list[Array], dtype: np.dtype[Any]) -> Array:
    """What a matrix is that is given in summands: their sum in the type in which its own type is summed."""
    if dtype.kind in "iub":
        return wrapped(sum(exact(x)[0] for x in summands), dtype)
    working = accumulator(dtype)
    return np.sum([x.astype(working) for x in summands], axis=0, dtype=working)


@dataclass
class Wanted:
    """What C must be: exactly, or within what a few roundings in the type of the sums may do."""

    summed: np.dtype[Any]
    stored: np.dtype[Any]
    value: Exact
    """Before C is rounded."""
    size: Array
    """Sums of magnitudes."""
    is_exact: bool
    loose: Any = field(default=None)
    """A type in which summands of C are rounded each, where C is given in such."""

    def faults(self, c: Array) -> Array:
        """Where `c` is something else."""
        if self.summed.kind in "iub":
            whole = wrapped(self.value[0], self.summed)
            if is_half(self.stored):
                return c.astype(np.float64) != rounded(exact(whole)[0], self.stored)
            with np.errstate(all="ignore"):
                return c != whole.astype(self.stored)
        wrong = np.zeros(c.shape, bool)
        parts = (c.real, c.imag) if c.dtype.kind == "c" else (c,)
        for got, value in zip(parts, self.value, strict=False):
            wrong |= self._differs(got.astype(np.float64), value)
        return wrong

    def _differs(self, got: Array, value: Array) -> Array:
        final = rounded(value, self.stored)
        if self.is_exact and self.loose is None:
            return ~(got == final)
        size = self.size.astype(np.float64)
        with np.errstate(all="ignore"):
            lost = 4 * 2.0 ** -PRECISION[self.summed.name] * size + 2.0 ** -PRECISION[self.stored.name] * np.abs(final)
            if self.loose is not None:
                lost = lost + 4 * 2.0 ** -PRECISION[self.stored.name] * size
            near = np.abs(got - value.astype(np.float64)) <= lost
            return ~(near | (got == final) | (size + lost > _largest(self.stored)))


def _largest(dtype: np.dtype[Any]) -> float:
    if dtype == BFLOAT16:
        return 3.38e38
    return float(np.finfo(dtype).max) * 0.99


def rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """Exact numbers rounded once into a float type (one part of it, where it is complex), as float64."""
    if dtype.kind == "c":
        dtype = np.dtype(f"f{dtype.itemsize // 2}")
    if dtype.kind not in "fV":
        return x.astype(np.float64)
    keep = PRECISION[dtype.name]
    out = np.empty(x.shape)
    for at, value in np.ndenumerate(x):
        out[at] = _to_bits(Fraction(value), keep)
    if dtype == np.float64 or dtype == BFLOAT16:
        return out
    with np.errstate(all="ignore"):
        return out.astype(dtype).astype(np.float64)


def _to_bits(value: Fraction, keep: int) -> float:
    """The nearest number of so many bits, ties to even."""
    if not value:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length() - keep
    scaled_up = size / Fraction(2) ** exponent
    while scaled_up >= 2**keep:
        exponent += 1
        scaled_up /= 2
    while scaled_up < 2 ** (keep - 1):
        exponent -= 1
        scaled_up *= 2
    return float((1 if value > 0 else -1) * Fraction(round(scaled_up)) * Fraction(2) ** exponent)


def product(
    a: Array, b: Array, summed: np.dtype[Any], stored: np.dtype[Any], alpha: Any = 1, beta: Any = 0,
    before: Array | None = None, is_exact: bool = True,
) -> Wanted:
    """alpha · a @ b + beta · before as it is defined: both operands cast into the type of the sums first.

    alpha, beta: in the type of the sums.
    """
    with np.errstate(all="ignore"):
        left, right = (exact(x.astype(summed)) for x in (a, b))
    value = scaled(alpha, times(left, right))
    magnitudes = [abs(x[0]) + abs(x[1]) for x in (left, right)]
    size = magnitudes[0].dot(magnitudes[1]) * abs(complex(alpha))
    if before is not None and beta != 0:
        old = scaled(beta, exact(before.astype(summed)))
        value = value[0] + old[0], value[1] + old[1]
        size = size + abs(old[0]) + abs(old[1])
    if summed.kind == "b":
        value = (value[0] > 0).astype(object), value[1]
    return Wanted(summed, stored, value, size, is_exact)


def by_semiring(a: Array, b: Array, summed: np.dtype[Any], stored: np.dtype[Any], semiring: Any) -> Array:
    """⊕ over k of a ⊗ b, in the type of the sums, rounded once."""
    with np.errstate(all="ignore"):
        terms = semiring.multiply(a.astype(summed)[:, :, None], b.astype(summed)[None, :, :])
        return semiring.add.reduce(terms, axis=1).astype(stored)

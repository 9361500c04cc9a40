"""Semirings that the package does not know, each registered by one call as a user would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rma_mm.elements.reduction import Reduction, zero
from rma_mm.elements.semiring import SEMIRINGS, Distributes, register_semiring

TYPES = {"union": "uint32", "xor_and": "int32", "parity": "bool", "min_max": "float64", "gcd_lcm": "uint32"}
"""What each of them multiplies in the tests."""


SEMIRINGS_OF_OURS = (
    ("union", np.bitwise_or, np.bitwise_and, "u", Distributes.ALWAYS),
    ("xor_and", np.bitwise_xor, np.bitwise_and, "iu", Distributes.ALWAYS),
    ("parity", np.logical_xor, np.logical_and, "b", Distributes.ALWAYS),
    ("min_max", np.minimum, np.maximum, "iuf", Distributes.ALWAYS),
    ("gcd_lcm", Reduction(np.gcd, zero), np.lcm, "u"),  # which MPI cannot accumulate
)
OWN = {name: kinds for name, _, _, kinds, *_ in SEMIRINGS_OF_OURS}
"""Name → kinds of element types that it takes."""


@contextmanager
def registered() -> Iterator[None]:
    """They are known meanwhile."""
    before = dict(SEMIRINGS)
    try:
        for given in SEMIRINGS_OF_OURS:
            register_semiring(*given)  # type: ignore[arg-type]
        yield
    finally:
        SEMIRINGS.clear()
        SEMIRINGS.update(before)


def elements(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Elements for one of them of which sums still tell something."""
    dtype = np.dtype(TYPES[name])
    if dtype.kind == "b":
        return rng.random(shape) < 0.4
    if name == "union":
        return np.uint32(1) << rng.integers(0, 32, shape).astype(np.uint32) | np.uint32(1) << np.uint32(31)
    if name == "gcd_lcm":
        return rng.choice([2, 3, 4, 6, 9, 12, 25, 49], shape).astype(dtype)
    x = rng.integers(-99, 99, shape).astype(dtype)
    if dtype.kind == "f":
        x[rng.random(shape) < 0.02] = np.nan
    return x


def spoilt(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """The same with one wrong element."""
    wrong = x.copy()
    at = tuple(rng.integers(extent) for extent in x.shape)
    if x.dtype.kind == "f":
        wrong[at] = 1 if np.isnan(x[at]) else x[at] - 1
    else:
        wrong[at] ^= x.dtype.type(1)
    return wrong

"""How often a test is run: each time, or only where `-m thorough` or `-m nightly` asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

COVERING = ("stationary_c", "stationary_a", "queue", "cannon", "summa_a", "gemm_scatter", "solomonik_25d")
"""Algorithms that stand for all where what is tested knows none: each way to move A, B and C, each order of work."""
thorough = pytest.mark.thorough
"""A test that repeats what others test, on more. `.ci/run` runs it."""
nightly = pytest.mark.nightly
"""A long one, or a further repetition. `.ci/nightly` runs it."""


def usually(
    count: int, cases: Iterable[Any], several: bool = True, rest: pytest.MarkDecorator = thorough
) -> list[Any]:
    """Cases for `parametrize`: the first `count` are run each time, the rest as marked. several: tuples are several
    arguments.
    """
    every = list(cases)
    others = [case if isinstance(case, tuple) and several else (case,) for case in every[count:]]
    return [*every[:count], *(pytest.param(*case, marks=rest) for case in others)]


def covering(names: Iterable[str]) -> list[Any]:
    """Algorithms for `parametrize`: those of COVERING are run each time, the others at night."""
    return [name if name in COVERING else pytest.param(name, marks=nightly) for name in names]

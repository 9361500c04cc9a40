"""What is run each time, and what only where `-m thorough` asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough
"""A test that repeats what others test, on more."""


def usually(count: int, cases: Iterable[Any], several: bool = True) -> list[Any]:
    """Cases for `parametrize`, of which the first `count` are run each time. several: tuples are several arguments."""
    every = list(cases)
    rest = [case if isinstance(case, tuple) and several else (case,) for case in every[count:]]
    return [*every[:count], *(pytest.param(*case, marks=thorough) for case in rest)]

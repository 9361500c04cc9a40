"""What is run each time, and what only where `-m thorough` asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough
"""A test that repeats what others test, on more."""


def usually(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`, of which the first `count` are run each time."""
    every = list(cases)
    rest = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=thorough) for case in every[count:]]
    return [*every[:count], *rest]

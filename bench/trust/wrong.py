"""What every trial raises, and when."""

from __future__ import annotations

from typing import Any

import numpy as np


class Wrong(Exception):
    """A result that is not NumPy's."""


def expect(wanted: Any, found: Any, said: str) -> None:
    """Raise Wrong unless both are of one type and shape, and equal in every element."""
    if np.shape(found) != np.shape(wanted) or found.dtype != wanted.dtype or not np.array_equal(found, wanted):
        raise Wrong(f"{said}: got {found!r} in place of {wanted!r}")

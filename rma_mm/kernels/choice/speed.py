"""Measure how fast this process multiplies, within a moment."""

from __future__ import annotations

from typing import Any

import numpy as np

from rma_mm.kernels.choice.rates import calls_a_second
from rma_mm.kernels.local import bind
from rma_mm.kernels.product import Product
from rma_mm.kernels.threads import using_threads

SIZE, SECONDS, TIMES = 384, 0.03, 5
"""Side of the square that is multiplied, for how long, and how often: another process may have the core."""


def square(side: int, dtype: Any = np.float32, kernel: str = "auto") -> Product:
    a, b, c = (np.ones((side, side), dtype) for _ in range(3))
    return bind(a, b, c, kernel=kernel)


def multiplies_a_second(threads: int) -> float:
    """Products of float32 squares a second, with so many BLAS threads."""
    with using_threads(threads):
        product = square(SIZE)
        product()
        return max(calls_a_second(product, SECONDS) for _ in range(TIMES))

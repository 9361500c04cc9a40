"""How fast this process multiplies, in a moment."""

from __future__ import annotations

import numpy as np

from rma_mm.kernels.choice.rates import calls_a_second
from rma_mm.kernels.local import bind
from rma_mm.kernels.threads import get_threads, set_threads

SIZE, SECONDS, TIMES = 384, 0.03, 5
"""Side of the square that is multiplied, for how long, and how often: another process may have the core."""


def multiplies_a_second(threads: int) -> float:
    """Products of float32 squares a second, with so many BLAS threads."""
    before = get_threads()
    set_threads(threads)
    a, b, c = (np.ones((SIZE, SIZE), np.float32) for _ in range(3))
    product = bind(a, b, c)
    product()
    best = max(calls_a_second(product, SECONDS) for _ in range(TIMES))
    set_threads(before)
    return best

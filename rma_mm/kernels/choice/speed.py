"""How fast this process multiplies, in a moment."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from rma_mm.kernels.threads import get_threads, set_threads

SIZE, SECONDS, TIMES = 384, 0.03, 5
"""Side of the square that is multiplied, for how long, and how often: another process may have the core."""


def multiplies_a_second(threads: int) -> float:
    """Products of float32 squares a second, with so many BLAS threads."""
    from rma_mm.kernels import bind

    before = get_threads()
    set_threads(threads)
    a, b, c = (np.ones((SIZE, SIZE), np.float32) for _ in range(3))
    product = bind(a, b, c)
    product()
    best = max(calls_a_second(product, SECONDS) for _ in range(TIMES))
    set_threads(before)
    return best


def calls_a_second(product: Callable[[], None], seconds: float) -> float:
    """Calls a second, over about so many seconds."""
    count, start = 0, time.perf_counter()
    while not count or time.perf_counter() - start < seconds:
        product()
        count += 1
    return count / (time.perf_counter() - start)

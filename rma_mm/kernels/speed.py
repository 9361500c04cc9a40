"""How fast this process multiplies, in a moment."""

from __future__ import annotations

import time

import numpy as np

from . import bind
from .threads import get_threads, set_threads

SIZE, SECONDS = 384, 0.05
"""Side of the square that is multiplied, and for how long."""


def multiplies_a_second(threads: int) -> float:
    """Products of float32 squares a second, with so many BLAS threads."""
    before = get_threads()
    set_threads(threads)
    a, b, c = (np.ones((SIZE, SIZE), np.float32) for _ in range(3))
    product = bind(a, b, c)
    product()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        product()
        count += 1
    seconds = time.perf_counter() - start
    set_threads(before)
    return count / seconds

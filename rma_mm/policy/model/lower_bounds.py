"""How few words a product can move: what any algorithm has to touch, less what a rank holds anyway.

Sources: D. Irony, S. Toledo and A. Tiskin, "Communication lower bounds for distributed-memory matrix multiplication"
(2004); J. Demmel et al., "Communication-optimal parallel recursive rectangular matrix multiplication" (2013);
H. Al Daas, G. Ballard, L. Grigori, S. Kumar and K. Rouse, "Tight memory-independent parallel matrix multiplication
communication lower bounds" (2022).
"""

from __future__ import annotations

from math import sqrt


def touched(shape: tuple[int, int, int], ranks: int, memory: float | None = None) -> float:
    """Words of A, B and C that the busiest of `ranks` touches at least, `memory` of them at a time."""
    d3, d2, d1 = sorted(shape)
    if not d3:
        return 0.0
    work = d1 * d2 * d3 / ranks
    if ranks <= d1 / d2:
        least = (d1 * d2 + d1 * d3) / ranks + d2 * d3
    elif ranks <= d1 * d2 / d3**2:
        least = d1 * d2 / ranks + 2 * sqrt(d1 * d2 * d3**2 / ranks)
    else:
        least = 3 * work ** (2 / 3)
    if memory is not None and 0 < memory < work ** (2 / 3):
        least = max(least, 2 * work / sqrt(memory) + memory)
    return least


def least_words(shape: tuple[int, int, int], ranks: int, memory: float | None = None) -> float:
    """Words that the busiest rank moves at least, of operands and a result that are held once, in equal shares."""
    m, n, k = shape
    return max(0.0, touched(shape, ranks, memory) - (m * k + k * n + m * n) / ranks)

"""Lower bounds on the words that a product moves: what any algorithm must touch, less what a rank holds anyway.

Sources: D. Irony, S. Toledo and A. Tiskin, "Communication lower bounds for distributed-memory matrix multiplication"
(2004); J. Demmel et al., "Communication-optimal parallel recursive rectangular matrix multiplication" (2013);
H. Al Daas, G. Ballard, L. Grigori, S. Kumar and K. Rouse, "Tight memory-independent parallel matrix multiplication
communication lower bounds" (2022). Of files: J.-W. Hong and H. T. Kung, "I/O complexity: the red-blue pebble game"
(1981), with the constant of T. M. Smith, B. Lowery, J. Langou and R. A. van de Geijn, "A tight I/O lower bound for
matrix multiplication" (2019).
"""

from __future__ import annotations

from math import sqrt


def touched(shape: tuple[int, int, int], ranks: int, memory: float | None = None) -> float:
    """Return words of A, B and C that the busiest of `ranks` touches at least, `memory` of them at a time."""
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


def least_read(shape: tuple[int, int, int], files: str, memory: float | None = None) -> float:
    """Return the least words that must be read of operands in files, with `memory` words in memory at a time."""
    m, n, k = shape
    once = float(m * k * ("A" in files) + k * n * ("B" in files))
    if memory is None or memory <= 0 or files != "AB":
        return once
    return max(once, 2 * m * n * k / sqrt(memory) - 2 * memory)

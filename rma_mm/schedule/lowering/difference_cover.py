"""Cyclic designs: blocks of rows shared out so that every two blocks meet on some rank, and each rank has few of them.

A set D of residues modulo P whose differences are all residues gives rank p the blocks p + d. It has √P of them at
least; as many as q + 1 if P = q² + q + 1 and there is a projective plane of order q (Singer 1938).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isqrt

SEARCHED = 64
"""Residues up to which small sets are searched for; of more, one of √2 times as many as there might be does."""
TRIES = 3000  # sets that are looked at of each size

Pair = tuple[int, int]


@lru_cache(maxsize=256)
def pairs(count: int) -> tuple[Pair, ...]:
    """Return few residues, two of which differ by each of 1…count // 2.

    Rank p so has the pair of blocks (p + one, p + other); all ranks together have every pair once, but those that
    differ by half of an even count twice.
    """
    cover = difference_cover(count)
    found: dict[int, Pair] = {}
    for one in cover:
        for other in cover:
            found.setdefault((other - one) % count, (one, other))
    return tuple(found[difference] for difference in range(1, count // 2 + 1))


def difference_cover(count: int) -> tuple[int, ...]:
    """Return residues modulo `count`, 0 first, whose differences are all residues: few, if not always fewest.

    >>> difference_cover(7), difference_cover(12)
    ((0, 1, 3), (0, 1, 3, 7))
    """
    simple = _ruler(count)
    least = next(size for size in range(1, count + 1) if size * (size - 1) + 1 >= count)
    searched = (_Search(count, size).cover for size in range(least, len(simple)) if count <= SEARCHED)
    return next(filter(None, searched), simple)


def _ruler(count: int) -> tuple[int, ...]:
    step = max(1, isqrt(count // 2))
    return (*range(min(step, count)), *range(2 * step - 1, count // 2 + step, step))


class _Search:
    """The first cover of a size, residues ascending, unless it takes too many tries."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size, self.tries = count, size, 0
        self.cover = next(self.grown((0, 1), 0b11 | 1 << (count - 1)), None) if count > 1 else (0,)

    def grown(self, chosen: tuple[int, ...], covered: int) -> Iterator[tuple[int, ...]]:
        """Yield covers that begin with the chosen residues. covered: the differences by then, as bits."""
        missing = self.count - covered.bit_count()
        if not missing:
            yield chosen
        self.tries += 1
        if missing > self.size * (self.size - 1) - len(chosen) * (len(chosen) - 1) or len(chosen) == self.size:
            return
        for x in range(chosen[-1] + 1, self.count):
            if self.tries > TRIES:
                return
            new = covered
            for y in chosen:
                new |= 1 << (x - y) | 1 << (self.count - x + y)
            yield from self.grown((*chosen, x), new)

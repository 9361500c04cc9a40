"""The products that are measured, and the bars of each."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

DEFAULT_RANKS = (2, 4)
"""Numbers of ranks of a case that names none."""


@dataclass(frozen=True)
class Case:
    """One product: C (m, n) = A (m, k) · B (k, n)."""

    name: str
    m: int
    n: int
    k: int
    dtype: str = "float32"
    ranks: tuple[int, ...] = DEFAULT_RANKS
    full: tuple[int, ...] = ()
    """Further numbers of ranks, measured with --full."""
    share: float | None = None
    """Bar: the least share of all-core NumPy's speed."""
    ratio: float = 1.02
    """Bar: the most of rma_mm's time over the best peer's."""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def nbytes(self) -> int:
        """Bytes of A, B and C together."""
        words = self.m * self.k + self.k * self.n + self.m * self.n
        return words * np.dtype(self.dtype).itemsize

    @classmethod
    def parsed(cls, text: str) -> Case:
        """A case written as M,N,K or M,N,K,dtype. Raises ValueError."""
        shape, dtype = text.split(",")[:3], (text.split(",")[3:] or ["float32"])[0]
        m, n, k = map(int, shape)
        if min(m, n, k) < 1 or dtype not in ("float32", "float64"):
            raise ValueError(f"case {text!r}: M,N,K must be 1 or more, and the type float32 or float64")
        return cls(f"{m}x{n}x{k}" + ("" if dtype == "float32" else f" {dtype}"), m, n, k, dtype)


CASES = {
    case.name: case
    for case in (
        Case("4096", 4096, 4096, 4096, share=0.98),
        Case("4096 float64", 4096, 4096, 4096, "float64", share=0.98),
        Case("5760x6144x3840", 5760, 6144, 3840, ranks=(4, 8, 9), share=0.98),
        Case("11520x12288x7680", 11520, 12288, 7680, ranks=(4,), full=(8, 9), share=0.98),
        Case("tall", 65536, 512, 512, share=0.95),
        Case("wide", 512, 65536, 512),
        Case("k-dominant", 512, 512, 65536, share=0.95),
        Case("16384x256x4096", 16384, 256, 4096, share=0.95),
        Case("256", 256, 256, 256, ratio=1.25),
        Case("512", 512, 512, 512),
        Case("1024", 1024, 1024, 1024, share=0.92),
        Case("mlp 2048: 768 to 3072", 2048, 3072, 768),
        Case("mlp 2048: 3072 to 768", 2048, 768, 3072),
        Case("mlp 4096: 4096 to 16384", 4096, 16384, 4096, share=0.98),
    )
}
"""Name → case. M, N, K of an MLP are tokens, features out, features in."""


def grid_of(case: Case, ranks: int, k_parts: Container[int] | None = None) -> tuple[int, int, int]:
    """Ranks along m, n, k such that the busiest rank receives least when operands and result are held once.

    `k_parts`: into how many parts k may be split; any when None.
    """
    grids = [grid for grid in product(range(1, ranks + 1), repeat=3) if prod(grid) == ranks]
    grids = [grid for grid in grids if k_parts is None or grid[2] in k_parts]
    return min(grids, key=lambda grid: (received(case, grid), grid[2], max(grid) - min(grid)))


def received(case: Case, grid: tuple[int, ...]) -> float:
    """Elements that a rank of this grid receives: parts of A along n, of B along m, sums of C along k."""
    p, q, r = grid
    a, b, c = case.m * case.k / (p * r), case.k * case.n / (q * r), case.m * case.n / (p * q)
    return a * (1 - 1 / q) + b * (1 - 1 / p) + c * (1 - 1 / r)


def bounds(extent: int, parts: int) -> list[int]:
    """Where `parts` nearly equal parts of an extent begin, and its end.

    >>> bounds(10, 3)
    [0, 4, 7, 10]
    """
    whole, rest = divmod(extent, parts)
    return [at * whole + min(at, rest) for at in range(parts + 1)]


def share_of(extent: int, parts: int, index: int) -> slice:
    """The `index`th of nearly equal parts of an extent."""
    cuts = bounds(extent, parts)
    return slice(cuts[index], cuts[index + 1])

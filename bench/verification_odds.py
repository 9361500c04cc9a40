"""`python -m bench.verification_odds`: how small an error does the verification find in a large product?

One process. In a product of which rows are sampled, one element of every row is put off by some standard deviations of
the product's own rounding errors. A row counts as found if it looks worse than right rows do that are computed again
anyway: so every row is a trial, and no product is verified as a whole. Prints how many of them passed, and from how
their scores are distributed (mean and deviation) at what size one in a million would.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from bench.verification import FAMILIES, Array, Matrix, multiplied, operand
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.verification.check import product_of
from rma_mm.runtime.verification.epilogue import EpilogueProduct
from rma_mm.runtime.verification.floats import scan_values
from rma_mm.runtime.verification.rows import suspicious_rows
from rma_mm.runtime.verification.sketch import suspicion

SIZES = (10, 20, 30, 40, 50)
"""Standard deviations."""
EXACT = 128
"""Rows of which rounding errors are measured."""
ODDS = 1e-6


@dataclass
class Trial:
    """A right product and what its rounding does."""

    a: Array
    b: Array
    c: Array
    deviation: Array
    """(n,): root of the mean square of the rounding errors in a column of this norm."""
    largest: float
    """The largest of them, in these units."""

    def scores(self, c: Array, seed: int) -> Array:
        """How wrong each row looks."""
        closed = EpilogueProduct(
            Matrix(self.a), Matrix(self.b), Matrix(c), None, 1, 0, (False, False), Epilogue(), c.dtype
        )
        p = product_of(closed)
        return suspicion(p, scan_values(p), seed)


def trial(rng: np.random.Generator, name: str, family: str, sizes: tuple[int, int, int]) -> Trial:
    """A product by one of the kernels."""
    dtype = parse_dtype(name)
    m, n, k = sizes
    a, b = operand(rng, family, (m, k), dtype), operand(rng, family, (k, n), dtype)
    c = multiplied(a, b, dtype, None, {}, "auto")
    wide = np.clongdouble if dtype.kind == "c" else np.longdouble
    if dtype.itemsize <= 4 or dtype.name == "complex64":
        wide = np.complex128 if dtype.kind == "c" else np.float64
    rows = np.sort(rng.choice(m, EXACT, replace=False))
    error = np.abs(c[rows].astype(wide) - a[rows].astype(wide) @ b.astype(wide)).astype(float)
    norms = np.sqrt((np.abs(b.astype(wide)) ** 2).sum(axis=0)).astype(float)  # of b's columns: errors grow with them
    deviation = norms * float(np.sqrt(((error / norms) ** 2).mean()))
    return Trial(a, b, c, deviation, float((error / deviation).max()))


def spoiled(rng: np.random.Generator, t: Trial, size: float) -> Array:
    """One element of every row off by `size` standard deviations more than it was, up or down."""
    c = t.c.copy()
    rows, cols = np.arange(len(c)), rng.integers(0, c.shape[1], len(c))
    wide = np.complex128 if c.dtype.kind == "c" else np.float64
    sign = rng.choice([-1.0, 1.0], len(c))
    c[rows, cols] = (c[rows, cols].astype(wide) + sign * size * t.deviation[cols]).astype(c.dtype)
    return c


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.verification_odds", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs=3, default=[2048, 2048, 2048], metavar=("M", "N", "K"))
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64", "bfloat16", "complex64"])
    parser.add_argument("--family", nargs="+", default=["uniform"], choices=list(FAMILIES))
    parser.add_argument("--draws", type=int, default=4, help="of random signs, each with one trial a row (4)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    m, n, k = options.sizes
    heads = (f"{f'{size} dev':>8}" for size in SIZES)
    print(f"{'type':<11}{'family':<11}{'trials':>7}", *heads, f"{'1e-6 at':>9}{'largest':>9}  (deviations)")
    for name in options.dtype:
        for family in options.family:
            rng = np.random.default_rng(options.seed)
            t = trial(rng, name, family, (m, n, k))
            passed = np.zeros(len(SIZES), int)
            needed = 0.0
            for seed in range(options.draws):
                bar = np.sort(t.scores(t.c, seed))[-suspicious_rows(m, n, k)]
                for i, size in enumerate(SIZES):
                    scores = t.scores(spoiled(rng, t, size), seed)
                    passed[i] += int((scores <= bar).sum())
                tail = bar - NormalDist().inv_cdf(ODDS) * scores.std()
                needed = max(needed, SIZES[-1] * tail / scores.mean())
            print(f"{name:<11}{family:<11}{m * options.draws:>7}", *(f"{count:>8}" for count in passed),
                f"{needed:>9.1f}{t.largest:>9.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

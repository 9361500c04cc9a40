"""`python -m bench.verification`: does the verification blame right products, and does it find wrong ones?

One process. Right products of every type, family of values and shape are checked (`--clean` of each type), and so are
`--faults` wrong ones of each type and kind of fault. An element that is off by 10 roundings is off by ten times the
largest rounding error of its product, in the unit in which its row and column are measured. Prints for every type the
right products blamed, the largest error in units of what is allowed, and the wrong products that passed of each kind.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rma_mm.elements.dtypes import SUPPORTED, accumulator, parse_dtype
from rma_mm.elements.semiring import PLUS_TIMES, Semiring
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.kernels import bind
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.verification.check import Verdict, verify

Array = np.ndarray[Any, Any]
SHAPES = [(1, 1), (1, 40), (40, 1), (2, 33), (33, 40), (64, 64), (300, 20), (20, 300), (100, 100)]
INNER = [1, 2, 7, 64, 300, 1024, 4096]
LARGE = [(64, 64, 65536), (600, 700, 900), (1, 64, 65536)]
LARGE_SHARE = 0.002
"""Of the products, so many are large."""


class Alone:
    """The part of a communicator that verification uses, of one rank."""

    size = 1

    def allgather(self, item: Any) -> list[Any]:
        return [item]

    def bcast(self, item: Any, root: int = 0) -> Any:
        return item

    def Allreduce(self, send: Array, out: Array, op: Any = None) -> None:
        out[...] = send


@dataclass
class Mesh:
    """A mesh of one rank."""

    comm: Any
    rank: int
    shape: MeshShape


MESH = Mesh(Alone(), 0, MeshShape((1,)))


class Matrix:
    """A matrix on one rank."""

    def __init__(self, x: Array) -> None:
        self.mesh, self.shape, self.dtype, self.tile = MESH, x.shape, x.dtype, x
        self.layout: Layout = parse_layout("*,*", MESH.shape)
        self.region = self.layout.region(x.shape, MESH.shape, 0)


@dataclass
class Case:
    """A product that is right, and what was asked for."""

    a: Array
    b: Array
    c: Array
    before: Array | None
    options: dict[str, Any]
    family: str

    def check(self, c: Array, seed: int) -> Verdict:
        """The verdict on `c` in the place of C."""
        old = None if self.before is None else Matrix(self.before)
        return verify(Matrix(self.a), Matrix(self.b), Matrix(c), before=old, seed=seed, **self.options)


# -- operands -------------------------------------------------------------------------------------


def uniform(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """In [−1, 1)."""
    return rng.uniform(-1, 1, shape)


def graded(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Rows and columns whose sizes differ by up to 2^16."""
    down, across = (np.exp2(rng.integers(-8, 8, size)) for size in shape)
    return uniform(rng, shape) * down[:, None] * across


def cancelling(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """One half the other's negative, along both axes: sums grow large and come back to little."""
    x = rng.uniform(0, 1, shape)
    x[shape[0] // 2 :] *= -1
    x[:, shape[1] // 2 :] *= -1
    return x


FAMILIES: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "uniform": uniform,
    "positive": lambda rng, shape: rng.uniform(0, 1, shape),
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "wide": lambda rng, shape: uniform(rng, shape) * np.exp2(rng.integers(-7, 7, shape)),
    "sparse": lambda rng, shape: uniform(rng, shape) * (rng.random(shape) < 0.05),
    "constant": lambda rng, shape: np.full(shape, rng.uniform(-1, 1)),
    "graded": graded,
    "zeros": lambda rng, shape: np.zeros(shape),
    "cancelling": cancelling,
    "tiny": lambda rng, shape: uniform(rng, shape) * 2.0**-13,
    "subnormal": lambda rng, shape: uniform(rng, shape) * 2.0**-70,
    "whole": lambda rng, shape: rng.integers(-8, 9, shape).astype(float),
}
"""How the values of an operand are drawn."""


def operand(rng: np.random.Generator, family: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """A matrix of this family."""
    if dtype.kind == "b":
        return rng.random(shape) < rng.choice([0.02, 0.1, 0.5])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    draw = FAMILIES[family]
    x = draw(rng, shape)
    return (x + 1j * draw(rng, shape) if dtype.kind == "c" else x).astype(dtype)


def drawn(rng: np.random.Generator, dtype: np.dtype[Any]) -> Case:
    """A right product, by one of the kernels."""
    m, n = SHAPES[rng.integers(len(SHAPES))]
    k = INNER[rng.integers(len(INNER))]
    if rng.random() < LARGE_SHARE and dtype.kind not in "iu":
        m, n, k = LARGE[rng.integers(len(LARGE))]
    family = list(FAMILIES)[rng.integers(len(FAMILIES))]
    a, b = operand(rng, family, (m, k), dtype), operand(rng, family, (k, n), dtype)
    if dtype.name in ("float32", "float64") and rng.random() < 0.1:
        a = operand(rng, family, (m, k), parse_dtype(["float16", "int16"][rng.integers(2)]))
    options: dict[str, Any] = {}
    before = None
    if dtype.kind in "fc" or dtype.name == "bfloat16":
        if rng.random() < 0.3:
            options["alpha"] = float(rng.choice([-1.0, 0.3, 3.7, 1e-3]))
        if rng.random() < 0.3:
            options["beta"] = float(rng.choice([1.0, -0.7]))
            before = operand(rng, family, (m, n), dtype)
        if rng.random() < 0.2 and dtype.kind != "c":
            bias = operand(rng, family, (1, n), dtype)[0]
            activation = [None, "relu", "gelu"][rng.integers(3)]
            options |= {"epilogue": Epilogue(bias, "column", activation), "product": dtype}
    kernel = ["auto", "numpy"][rng.integers(2)]
    return Case(a, b, multiplied(a, b, dtype, before, options, kernel), before, options, family)


def multiplied(
    a: Array, b: Array, dtype: np.dtype[Any], before: Array | None, options: dict[str, Any], kernel: str
) -> Array:
    """The product in one to four steps along k, as distributed algorithms make it."""
    working = accumulator(dtype)
    c = np.zeros((a.shape[0], b.shape[1]), working)
    alpha, beta = options.get("alpha", 1), options.get("beta", 0)
    if before is not None:
        c[...] = before
    semiring: Semiring = options.get("semiring", PLUS_TIMES)
    k = a.shape[1]
    steps = 1 if k < 512 else 1 + k % 3
    for step in range(steps):
        some = slice(k * step // steps, k * (step + 1) // steps)
        factor = beta if step == 0 else 1
        bind(a[:, some], b[some], c, alpha, factor, kernel=kernel, semiring=semiring)()
    epilogue: Epilogue | None = options.get("epilogue")
    if epilogue is not None:
        from rma_mm.kernels.epilogue.activations import activate

        activate(c, epilogue.bias.astype(working), epilogue.activation)
    with np.errstate(all="ignore"):
        return c.astype(dtype)


# -- faults ---------------------------------------------------------------------------------------


def somewhere(rng: np.random.Generator, c: Array) -> tuple[int, int]:
    """An element of C that is not among its smallest."""
    size = np.abs(c.astype(np.complex128))
    at = np.argwhere(size >= np.median(size))
    row, col = at[rng.integers(len(at))]
    return int(row), int(col)


def off_by_ten(rng: np.random.Generator, case: Case, c: Array) -> None:
    """One element off by ten times the largest rounding error of the product."""
    at = somewhere(rng, c)
    if c.dtype.kind == "b":
        c[at] ^= True
        return
    if c.dtype.kind in "iu":
        with np.errstate(all="ignore"):
            c[at] += c.dtype.type(1)
        return
    wide = np.clongdouble if c.dtype.kind == "c" else np.longdouble
    exact = case.a.astype(wide) @ case.b.astype(wide)
    error = np.abs(case.c.astype(wide) - exact).max()
    unit = float(np.spacing(np.abs(case.c[at].astype(np.float32 if c.dtype.itemsize < 4 else c.real.dtype)).max()))
    if c.dtype.name == "bfloat16":
        unit *= 2.0**16
    if c.dtype == np.float16:
        unit *= 2.0**13
    c[at] = (exact[at] + 10 * max(float(error), unit / 2)).astype(c.dtype)


def negated(rng: np.random.Generator, case: Case, c: Array) -> None:
    """One element's sign."""
    at = somewhere(rng, c)
    c[at] = ~c[at] if c.dtype.kind == "b" else -c[at] if c[at] != 0 else 1


def no_tile(rng: np.random.Generator, case: Case, c: Array) -> None:
    """A tile of zeros."""
    c[: len(c) // 2, : c.shape[1] // 2] = 0


def half_of_k(rng: np.random.Generator, case: Case, c: Array) -> None:
    """The second half of k is missing."""
    half = case.a.shape[1] // 2
    c[...] = multiplied(case.a[:, :half], case.b[:half], c.dtype, None, {}, "auto")


def rows_swapped(rng: np.random.Generator, case: Case, c: Array) -> None:
    """Two rows in each other's place."""
    c[[0, -1]] = c[[-1, 0]]


def cols_swapped(rng: np.random.Generator, case: Case, c: Array) -> None:
    """Two neighbouring columns in each other's place."""
    c[:, [4, 5]] = c[:, [5, 4]]


def high_bit(rng: np.random.Generator, case: Case, c: Array) -> None:
    """A flipped bit of an exponent, or of an integer."""
    at = somewhere(rng, c)
    if c.dtype.kind == "b":
        c[at] ^= True
        return
    raw = c[at[0], at[1] : at[1] + 1].view(np.uint8)
    raw[-1] ^= np.uint8(1 << (5 if c.dtype.kind not in "iu" else int(rng.integers(8))))


def tile_turned(rng: np.random.Generator, case: Case, c: Array) -> None:
    """A transposed tile."""
    c[:32, :32] = c[:32, :32].T.copy()


FAULTS = {
    "10 x": off_by_ten,
    "negated": negated,
    "tile": no_tile,
    "half k": half_of_k,
    "rows": rows_swapped,
    "columns": cols_swapped,
    "bit": high_bit,
    "turned": tile_turned,
}
"""What is done to a right product."""


def spoiled(rng: np.random.Generator, dtype: np.dtype[Any], fault: str, large: bool) -> bool:
    """Whether one wrong product is found."""
    if large and dtype.kind not in "iu":  # not all rows of this one are computed again
        m, n, k = 1500, 1400, 600
    else:
        m, n, k = [(64, 64, 300), (100, 120, 300), (33, 40, 1024), (64, 64, 4096)][rng.integers(4)]
    family = ["uniform", "positive", "normal"][rng.integers(3)]
    a, b = operand(rng, family, (m, k), dtype), operand(rng, family, (k, n), dtype)
    case = Case(a, b, multiplied(a, b, dtype, None, {}, "auto"), None, {}, family)
    while True:
        wrong = case.c.copy()
        FAULTS[fault](rng, case, wrong)
        if not np.array_equal(wrong, case.c):
            return not case.check(wrong, int(rng.integers(2**31))).ok
        if fault not in ("10 x", "negated", "bit"):
            return True  # nothing was changed


# -- the command ----------------------------------------------------------------------------------


def clean(rng: np.random.Generator, dtype: np.dtype[Any], count: int) -> tuple[int, float, str]:
    """Right products blamed, the largest error in units of what is allowed, and its family."""
    blamed, worst, where = 0, 0.0, ""
    with np.errstate(all="ignore"):
        for _ in range(count):
            state = rng.bit_generator.state["state"]
            case = drawn(rng, dtype)
            verdict = case.check(case.c, int(rng.integers(2**31)))
            if not verdict.ok:
                blamed += 1
                sizes = (*case.c.shape, case.a.shape[1])
                print(f"  blamed: {dtype.name} {case.family} {sizes} {case.options}: {verdict.reason} ({state})")
            elif (verdict.residual or 0) > worst:
                worst, where = verdict.residual or 0, f"{case.family} k={case.a.shape[1]}"
    return blamed, worst, where


def main() -> int:
    """Print the table; 1 where a right product was blamed or a gross fault passed."""
    parser = argparse.ArgumentParser(prog="bench.verification", description=__doc__)
    parser.add_argument("--clean", type=int, default=1000, help="right products of each type (1000)")
    parser.add_argument("--faults", type=int, default=20, help="wrong ones of each type and kind (20)")
    parser.add_argument("--large", action="store_true", help="plant faults in products of which some rows are sampled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", nargs="+", default=[dtype.name for dtype in SUPPORTED])
    options = parser.parse_args()
    heads = (f"{name:>8}" for name in FAULTS)
    print(f"{'type':<11}{'right':>8}{'blamed':>8}{'largest':>9}  {'of':<18}", *heads, "seconds")
    failed = False
    for name in options.dtype:
        dtype, rng, start = parse_dtype(name), np.random.default_rng(options.seed), time.perf_counter()
        blamed, worst, where = clean(rng, dtype, options.clean)
        passed = {
            fault: sum(not spoiled(rng, dtype, fault, options.large) for _ in range(options.faults)) for fault in FAULTS
        }
        failed |= bool(blamed or any(passed.values()))
        took = time.perf_counter() - start
        print(f"{name:<11}{options.clean:>8}{blamed:>8}{worst:>9.3f}  {where:<18}",
            *(f"{count:>8}" for count in passed.values()), f"{took:.0f}", flush=True)
    print(f"of each kind of fault {options.faults} of each type; the columns say how many passed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

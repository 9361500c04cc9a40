"""The plans that T10 chooses among: how many ranks share out each dimension, and how long the rings are.

Source: Y. Liu et al. (T10, SOSP 2024); see `t10`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import nsmallest
from itertools import product

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape, divisors, grids
from rma_mm.schedule.algorithm import Problem

PRICED, RINGED = 64, 12
"""Number of F_ops whose plans are priced, those that move least (all of them up to 64 ranks), and of rings among
them.
"""
MANY = 64  # ranks beyond which fewer plans are priced, in proportion, as each price takes longer
BRIEFLY = 4  # number of F_ops that are priced when T10 competes with the other algorithms, which wait for it
LENGTHS = 8  # about so many lengths of a ring, at most
PIECES = (2, 4)  # into how many pieces the longest part is cut by the paces that are priced beside a whole part


@dataclass(frozen=True)
class Point:
    ranks: tuple[int, int, int]  # f_op: ranks along m, n and k
    rings: tuple[int, int, int]  # lengths of the rings of A (along n), B (along m) and C (along k)
    pace: int | None = None  # indices of k that move at a time; a whole part where not given

    def __str__(self) -> str:
        text = f"{','.join(map(str, self.ranks))}/{','.join(map(str, self.rings))}"
        return text + (f"/{self.pace}" if self.pace else "")

    @property
    def fault(self) -> str:
        """Say why the rings do not come out whole; empty if they do."""
        m, n, k = self.ranks
        for x, ring, count, dim in zip("ABC", self.rings, (n, m, k), "nmk", strict=True):
            if count % ring:
                return f"{x}'s ring of {ring} does not divide the {count} ranks along {dim}"
        return ""

    @property
    def grid(self) -> MeshShape:
        """Every dimension's ranks as rings (a, b, c) and copies (m, n, k); axes of one rank are left out."""
        (m, n, k), (a, b, c) = self.ranks, self.rings
        axes = {"m": m // b, "b": b, "n": n // a, "a": a, "k": k // c, "c": c}
        kept = {name: size for name, size in axes.items() if size > 1} or {"m": 1}
        return MeshShape(tuple(kept.values()), tuple(kept))

    def layouts(self) -> tuple[Layout, Layout, Layout]:
        """Return the placements of A, B and C at rest."""
        grid = self.grid
        k, m, n = (self._cut(axes) for axes in (("k", "c"), ("m", "b"), ("n", "a")))
        a = Layout((m, k + self._cut("a", skew="b")), grid=grid)
        b = Layout((k + self._cut("b", skew="a"), n), grid=grid)
        pins = (("k", 0),) if "k" in grid.names else ()
        return a, b, Layout((m, n + self._cut("c")), pins, grid=grid)

    def work(self) -> Layout:
        cuts = [self._cut(axes) for axes in (("m", "b"), ("n", "a"), ("k", "c"))]
        return Layout(tuple(cuts), grid=self.grid)

    def _cut(self, axes: tuple[str, ...] | str, skew: str = "") -> Split:
        names = self.grid.names
        shifted = (skew,) if skew in names else ()
        return tuple(Level((axis,), skew=shifted) for axis in axes if axis in names)

    def elements_held(self, shape: tuple[int, int, int]) -> int:
        """Elements of A, B and C that the fullest rank holds at rest, and of C's summand where k is shared out."""
        m, n, k = self._part(shape)
        a, b, c = self.rings
        return -(-m * k // a) + -(-k * n // b) + -(-m * n // c) + (m * n if self.ranks[2] > 1 else 0)

    def moved(self, shape: tuple[int, int, int]) -> int:
        """Return words that the busiest rank receives of A and B, and sends of C, while it multiplies."""
        m, n, k = self._part(shape)
        a, b, _ = self.rings
        q = self.ranks[2]
        return m * k * (a - 1) // a + k * n * (b - 1) // b + m * n * (q - 1) // q

    def placing(self, shape: tuple[int, int, int]) -> int:
        """Return words that a rank receives to make the copies, from placements that hold each element once."""
        m, n, k = self._part(shape)
        copies = (self.ranks[1] // self.rings[0], self.ranks[0] // self.rings[1])
        parts = (m * k // self.rings[0], k * n // self.rings[1])
        return sum(part * (count - 1) // count for part, count in zip(parts, copies, strict=True))

    def fits(self, shape: tuple[int, int, int], memory: int | None) -> bool:
        return memory is None or self.elements_held(shape) <= memory

    def longest(self, k: int) -> int:
        return max(-(-k // (self.ranks[2] * ring)) for ring in self.rings[:2])

    def pieces(self, k: int) -> int:
        return -(-self.longest(k) // self.pace) if self.pace else 1

    def paced(self, shape: tuple[int, int, int]) -> list[Point]:
        """Return the same plan at finer paces, where it rotates."""
        longest = self.longest(shape[2])
        paces = [-(-longest // pieces) for pieces in PIECES] if max(self.rings[:2]) > 1 else []
        return [replace(self, pace=pace) for pace in dict.fromkeys(paces) if pace < longest]

    def factors(self, shape: tuple[int, int, int]) -> dict[str, tuple[tuple[int, int], ...]]:
        """T10's f_s, f_t and rp of A, B and C, for their rows and columns each.

        Parts in space; parts in time of each of those; and the pace, how many indices are multiplied between two
        rotations (0 for none, as of a sum that leaves when it is complete). A and B rotate at one pace, at most the
        smaller of their parts; here the larger part goes on as a whole once all of it has been multiplied.
        """
        (m, n, k), (a, b, c) = self.ranks, self.rings
        parts = [-(-shape[2] // (k * ring * self.pieces(shape[2]))) for ring in (a, b) if ring > 1]
        pace_a, pace_b = (min(parts) if ring > 1 else 0 for ring in (a, b))
        pace_c = -(-shape[1] // (n * c)) if self.sums_rotate else 0
        return {
            "A": ((m, k), (1, a), (0, pace_a)),
            "B": ((k, n), (b, 1), (pace_b, 0)),
            "C": ((m, n), (1, c), (0, pace_c)),
        }

    @property
    def sums_rotate(self) -> bool:
        return max(self.rings[:2]) == 1 and 1 < self.rings[2] == self.ranks[2]

    def _part(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        m, n, k = (-(-extent // ranks) for extent, ranks in zip(shape, self.ranks, strict=True))
        return m, n, k


def points(size: int) -> Iterator[Point]:
    """Yield every plan for `size` ranks: factors of it, and divisors of those."""
    for m, n, k in grids(size, 3):
        for a, b, c in product(divisors(n), divisors(m), divisors(k)):
            yield Point((m, n, k), (a, b, c))


def frontier(shape: tuple[int, int, int], size: int) -> list[Point]:
    """Return the plans that none beats in both memory and words moved, the leanest first."""
    best: list[Point] = []
    ordered = sorted(points(size), key=lambda p: (p.elements_held(shape), p.moved(shape), p.placing(shape)))
    for point in ordered:
        if not best or point.moved(shape) < best[-1].moved(shape):
            best.append(point)
    return best


def best_point(problem: Problem, seconds: Callable[[Point], float]) -> Point | str:
    """Return the plan that takes least of those that fit (or why none does); of equals the one that moves least.

    Not all are priced: of each F_op the plan that moves least, and the one that copies all; of the fastest of these the
    rings of A, then B, then C, and then finer paces. If other algorithms compete, and on very many ranks, only a few
    plans are, which move least.
    """
    shape, memory = problem.shape, problem.memory
    by_words = least_moving(shape, problem.mesh.size, memory)
    if isinstance(by_words, str):
        return by_words
    part = MANY / max(MANY, problem.mesh.size)
    if not problem.is_named or part * PRICED < BRIEFLY:
        return min(by_words[:BRIEFLY], key=seconds)
    ways = [(point, replace(point, rings=(1, 1, 1))) for point in by_words[: int(PRICED * part)]]
    fitting = [min((p for p in each if p.fits(shape, memory)), key=seconds) for each in ways]
    fastest = nsmallest(max(1, int(RINGED * part)), fitting, key=seconds)
    found = [_ringed(point, problem, seconds) for point in fastest]
    return min((paced for point in found for paced in (point, *point.paced(shape))), key=seconds)


def _ringed(point: Point, problem: Problem, seconds: Callable[[Point], float]) -> Point:
    """Return the plan with other rings, each chosen by what it takes beside the others."""
    m, n, k = point.ranks
    for at, count in enumerate((n, m, k)):
        lengths = divisors(count)[:: max(1, len(divisors(count)) // LENGTHS)]
        others = [[ring] for ring in point.rings]
        rings = product(*others[:at], [*lengths, count], *others[at + 1 :])
        tried = [replace(point, rings=(a, b, c)) for a, b, c in rings]
        point = min([point, *(p for p in tried if p.fits(problem.shape, problem.memory))], key=seconds)
    return point


@lru_cache(maxsize=256)
def least_moving(shape: tuple[int, int, int], size: int, memory: int | None = None) -> list[Point] | str:
    """Return for each F_op the plan that moves least, copies included, sorted by words moved and then by memory.

    Copies included, of those that fit (or why none does), the one that moves least first; of equals the leanest.
    memory: elements of A, B and C that a rank may hold.
    """
    leanest = [Point((m, n, k), (n, m, k)) for m, n, k in grids(size, 3)]
    fitting = [point for point in leanest if point.fits(shape, memory)]
    if not fitting:
        return f"needs {min(point.elements_held(shape) for point in leanest)} elements a rank, and {memory} may be held"

    def by_words(p: Point) -> tuple[int, int, int, str]:
        return p.moved(shape) + p.placing(shape), p.elements_held(shape), p.ranks[2], str(p)

    return sorted((min(_promising(shape, each.ranks, memory), key=by_words) for each in fitting), key=by_words)


def _promising(shape: tuple[int, int, int], ranks: tuple[int, int, int], memory: int | None) -> list[Point]:
    """Return the plans of one F_op that fit and may be the best.

    What an operand moves and holds depends on its own ring only, so the best rings are chosen apart, unless memory is
    short. C's ring saves memory and moves nothing.
    """

    def figures(*rings: int) -> tuple[int, int]:
        point = Point(ranks, (rings[0], rings[1], rings[2]))
        return point.moved(shape) + point.placing(shape), point.elements_held(shape)

    m, n, k = ranks
    of_a, of_b = {a: figures(a, 1, 1) for a in divisors(n)}, {b: figures(1, b, 1) for b in divisors(m)}
    of_c = {c: figures(1, 1, c) for c in divisors(k)}
    a, b, c = ([ring for ring in found if found[ring] == min(found.values())] for found in (of_a, of_b, of_c))
    if memory is not None and figures(a[0], b[0], c[0])[1] > memory:
        a, b = list(of_a), list(of_b)
    found = [Point(ranks, rings) for rings in product(a, b, c)]
    return [point for point in found if point.fits(shape, memory)]

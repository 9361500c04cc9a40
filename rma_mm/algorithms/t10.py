"""T10's compute-shift plans: operands that are needed by several ranks rotate among them instead of being copied.

    F_op = (m, n, k)     how many ranks share out each dimension; m·n·k = P
    a | n, b | m, c | k  into how many parts A, B and C are split in time: the length of their rings

A lacks n, so the n ranks along that dimension need the same part of A. In rings of `a` ranks each holds one part and
passes it on; n/a rings hold copies. `a = 1` copies (fast, large), `a = n` holds each element once (slow, small). B
likewise along m; C's parts along k are summed to `c` owners. With F_op = (p, p, 1) and rings of p this is Cannon.

Source: Y. Liu et al., "Scaling deep learning computation over the inter-core connected intelligence processor with
T10" (SOSP 2024). The form `:m,n,k/a,b,c` (or `…/pace`) names a plan; parts are circular windows of k, so rings need
not divide one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from math import prod
from typing import Literal

from ..geometry.layout import Layout, Level, Split
from ..geometry.mesh import MeshShape, grids
from ..schedule.row import Problem, Row, Setting, same_place
from .survey import whole_numbers


@dataclass(frozen=True)
class Point:
    """One compute-shift plan."""

    ranks: tuple[int, int, int]
    """F_op: ranks along m, n and k."""
    rings: tuple[int, int, int]
    """Lengths of the rings of A (along n), B (along m) and C (along k)."""
    pace: int | None = None
    """Indices of k that move at a time; a whole part where not given."""

    def __str__(self) -> str:
        text = f"{','.join(map(str, self.ranks))}/{','.join(map(str, self.rings))}"
        return text + (f"/{self.pace}" if self.pace else "")

    @property
    def fault(self) -> str:
        """Why the rings do not come out whole; empty where they do."""
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
        """Where A, B and C rest."""
        grid = self.grid
        k, m, n = (self._cut(axes) for axes in (("k", "c"), ("m", "b"), ("n", "a")))
        a = Layout((m, k + self._cut("a", skew="b")), grid=grid)
        b = Layout((k + self._cut("b", skew="a"), n), grid=grid)
        pins = (("k", 0),) if "k" in grid.names else ()
        return a, b, Layout((m, n + self._cut("c")), pins, grid=grid)

    def work(self) -> Layout:
        """Who multiplies what."""
        cuts = [self._cut(axes) for axes in (("m", "b"), ("n", "a"), ("k", "c"))]
        return Layout(tuple(cuts), grid=self.grid)

    def _cut(self, axes: tuple[str, ...] | str, skew: str = "") -> Split:
        names = self.grid.names
        shifted = (skew,) if skew in names else ()
        return tuple(Level((axis,), skew=shifted) for axis in axes if axis in names)

    def held(self, shape: tuple[int, int, int]) -> int:
        """Elements of A, B and C that the fullest rank holds at rest, and of C's summand where k is shared out."""
        m, n, k = self._part(shape)
        a, b, c = self.rings
        return -(-m * k // a) + -(-k * n // b) + -(-m * n // c) + (m * n if self.ranks[2] > 1 else 0)

    def moved(self, shape: tuple[int, int, int]) -> int:
        """Words that the busiest rank receives of A and B, and sends of C, while it multiplies."""
        m, n, k = self._part(shape)
        a, b, _ = self.rings
        q = self.ranks[2]
        return m * k * (a - 1) // a + k * n * (b - 1) // b + m * n * (q - 1) // q

    def placing(self, shape: tuple[int, int, int]) -> int:
        """Words that a rank receives to make the copies, from placements that hold each element once."""
        m, n, k = self._part(shape)
        copies = (self.ranks[1] // self.rings[0], self.ranks[0] // self.rings[1])
        parts = (m * k // self.rings[0], k * n // self.rings[1])
        return sum(part * (count - 1) // count for part, count in zip(parts, copies, strict=True))

    def _part(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        m, n, k = (-(-extent // ranks) for extent, ranks in zip(shape, self.ranks, strict=True))
        return m, n, k


def points(size: int) -> Iterator[Point]:
    """Every plan for `size` ranks: factors of it, and divisors of those."""
    for ranks in grids(size, 3):
        m, n, k = ranks
        for rings in product(*([d for d in range(1, count + 1) if count % d == 0] for count in (n, m, k))):
            yield Point((m, n, k), (rings[0], rings[1], rings[2]))


def frontier(shape: tuple[int, int, int], size: int) -> list[Point]:
    """The plans that none beats in both memory and words moved, the leanest first."""
    best: list[Point] = []
    ordered = sorted(points(size), key=lambda p: (p.held(shape), p.moved(shape), p.placing(shape)))
    for point in ordered:
        if not best or point.moved(shape) < best[-1].moved(shape):
            best.append(point)
    return best


def best_point(setting: Setting) -> Point | str:
    """The plan that moves least, copies included, of those that fit; of equals the leanest."""
    return _best(setting.shape, setting.mesh.size, setting.memory)


@lru_cache(maxsize=256)
def _best(shape: tuple[int, int, int], size: int, memory: int | None) -> Point | str:
    found = list(points(size))
    fitting = [p for p in found if memory is None or p.held(shape) <= memory]
    if not fitting:
        return f"needs {min(p.held(shape) for p in found)} elements a rank, and {memory} may be held"
    return min(fitting, key=lambda p: (p.moved(shape) + p.placing(shape), p.held(shape), p.ranks[2], str(p)))


def row_of(point: Point, setting: Setting) -> Row:
    """The row of a plan. Operands that are placed otherwise are brought to where it wants them."""
    a, b, c = point.layouts()
    wanted = [None if given else layout for layout, given in zip((a, b, c), setting.layouts, strict=True)]
    longest = max(-(-setting.shape[2] // (point.ranks[2] * ring)) for ring in point.rings[:2])
    rotates = max(point.rings[:2]) > 1
    over: Literal["k", "n"] = "k" if rotates or point.rings[2] == 1 or point.rings[2] < point.ranks[2] else "n"
    ring_axes = ("a", "b") if over == "k" else ("c",)
    by = tuple(axis for axis in ring_axes if axis in point.grid.names)
    return replace(
        T10_ROTATE,
        placements=lambda _: (wanted[0], wanted[1], wanted[2]), work=lambda _: point.work(),
        over=over, order="rotated" if by else "plain", by=by, own_last=over == "n",
        result="here" if point.ranks[2] == 1 and wanted[2] else "reduce",
        stage=partial(_brought, (a, b)), pieces=-(-longest // point.pace) if point.pace else 1, fit=None, form=None,
    )  # fmt: skip


def _brought(wanted: tuple[Layout, Layout], problem: Problem) -> tuple[Layout | None, Layout | None]:
    staged = [
        None if same_place(problem.layout(x), layout, problem.extent(x), problem.mesh) else layout
        for x, layout in zip("AB", wanted, strict=True)
    ]
    return staged[0], staged[1]


def _fit(setting: Setting) -> Row | str:
    point = best_point(setting)
    return point if isinstance(point, str) else row_of(point, setting)


def _form(text: str) -> Row | str:
    """The row of the plan that `text` names."""
    parts = text.split("/")
    ranks, rings = (whole_numbers(part, 3) for part in [*parts, "", ""][:2])
    pace = whole_numbers(parts[2], 1) if len(parts) == 3 else [0]
    if not ranks or not rings or not pace or len(parts) > 3:
        return "t10_rotate takes F_op and the rings of A, B and C, as t10_rotate:2,2,1/2,2,1, and a pace, as …/64"
    point = Point((ranks[0], ranks[1], ranks[2]), (rings[0], rings[1], rings[2]), pace[0] or None)

    def fit(setting: Setting) -> Row | str:
        size = setting.mesh.size
        best = best_point(replace(setting, memory=None))
        if prod(point.ranks) != size:
            return f"F_op {point.ranks} is for {prod(point.ranks)} ranks, and there are {size}; {best} would fit"
        if point.fault:
            return f"{point.fault}; {best} would fit"
        return replace(row_of(point, setting), name=f"t10_rotate:{text}")

    return replace(T10_ROTATE, name=f"t10_rotate:{text}", fit=fit, form=None)


T10_ROTATE = Row(
    name="t10_rotate",
    source="Liu et al. 2024 (T10)",
    summary="compute-shift: operands rotate in rings of any length, from all copied to each element once",
    work=lambda problem: Layout(((), (), ())),
    over="k",
    grouped="ABC",
    fit=_fit,
    form=_form,
)

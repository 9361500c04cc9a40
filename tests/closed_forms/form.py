"""A closed form, in the letters of algorithms.md §3: what each rank of a product moves."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from rma_mm.algorithms.from_table import place
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.schedule.algorithm import PlacedProblem

Grid = tuple[int, ...]
Extents = tuple[int, int, int]
"""(m, n, k)."""


@dataclass(frozen=True)
class Seat:
    """One rank of a product, in the letters of the formulas; where the mesh has fewer axes, C and D are 1."""

    i: int
    j: int
    l: int  # noqa: E741
    R: int
    C: int
    D: int
    M: int
    N: int
    K: int

    @property
    def P(self) -> int:
        return self.R * self.C * self.D

    @property
    def a(self) -> int:
        return self.M * self.K

    @property
    def b(self) -> int:
        return self.K * self.N

    @property
    def c(self) -> int:
        return self.M * self.N

    @property
    def K_i(self) -> range:
        return part(self.K, self.i, self.R)

    @property
    def K_j(self) -> range:
        return part(self.K, self.j, self.C)

    @property
    def K_l(self) -> range:
        return part(self.K, self.l, self.D)


def part(extent: int, n: int, count: int) -> range:
    """The nth of `count` even parts."""
    return range(extent * n // count, extent * (n + 1) // count)


def common(one: range, other: range) -> int:
    """|one ∩ other|."""
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def parts_in(r: Seat, count: int, needed: range) -> int:
    """How many of `count` parts of k meet `needed`."""
    return sum(common(part(r.K, n, count), needed) > 0 for n in range(count))


Figure = Callable[[Seat], int]


@dataclass(frozen=True)
class Form:
    """An algorithm on certain placements, with what each rank moves."""

    label: str
    """How tests call it."""
    name: str
    """The algorithm, as on the command line."""
    axes: int
    """Axes of the mesh; those for one axis take the ranks of any mesh as one ring."""
    placed: tuple[str, str, str]
    """A, B and C in the words of algorithms.md §2."""
    words_of: Figure
    messages_of: Figure
    viewed_of: Figure | None = None
    """Messages where A and B of node-mates are read in place, and all ranks share a node; None for the same."""

    def words(self, mesh: Grid, shape: Extents) -> list[int]:
        """Words that each rank moves."""
        return [self.words_of(seat) for seat in self.seats(mesh, shape)]

    def messages(self, mesh: Grid, shape: Extents, in_place: str = "") -> list[int]:
        """Messages of each rank. in_place: "" for none read in place, "AB" for both, all ranks on one node."""
        figure = self.viewed_of if in_place and self.viewed_of else self.messages_of
        return [figure(seat) for seat in self.seats(mesh, shape)]

    def seats(self, mesh: Grid, shape: Extents) -> Iterator[Seat]:
        """The ranks of a mesh in order."""
        rows, cols, layers = (*((prod(mesh),) if self.axes == 1 else mesh), 1, 1)[:3]
        for i, j, l in product(range(rows), range(cols), range(layers)):  # noqa: E741
            yield Seat(i, j, l, rows, cols, layers, *shape)

    def layouts(self, mesh: MeshShape) -> tuple[Layout, Layout, Layout]:
        """The placements of A, B and C."""
        a, b, c = (
            place(text, dims, mesh, self.axes) for text, dims in zip(self.placed, ("mk", "kn", "mn"), strict=True)
        )
        return a, b, c

    def problem(self, mesh: MeshShape, shape: Extents, in_place: str = "") -> PlacedProblem:
        """The product on those placements."""
        return PlacedProblem(shape, mesh, self.layouts(mesh), in_place=in_place)


def none(_: Seat) -> int:
    """Nothing."""
    return 0


def even_shape(mesh: Grid, *factors: int) -> Extents:
    """(m, n, k) in blocks that are even however a mesh cuts them: `factors`, or 2, 3 and 4, indices for each rank."""
    m, n, k = (factor * prod(mesh) for factor in factors or (2, 3, 4))
    return m, n, k

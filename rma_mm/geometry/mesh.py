"""A mesh of ranks: a grid with named axes, and the node on which each rank lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import product
from math import isqrt, prod

from rma_mm.classes import dataclass
from rma_mm.errors import MeshError, Renamed

AXIS_NAMES = ("i", "j", "l", "p", "q", "r")  # default names of the axes of a mesh


class _Nodes(tuple[int, ...]):
    """The node of each rank: a tuple, but its hash is computed once, for there may be a million ranks."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=64)
def _one_node(ranks: int) -> _Nodes:
    return _Nodes((0,) * ranks)


@dataclass(frozen=True)
class MeshShape:
    """Ranks 0…size − 1 on a row-major grid with named axes.

    >>> mesh = MeshShape((2, 3))
    >>> mesh.coords(4), mesh.rank({"i": 1, "j": 2})
    ({'i': 1, 'j': 1}, 5)
    """

    dims: tuple[int, ...]
    """Ranks along each axis."""
    names: tuple[str, ...] = ()
    """Axis names, in the order of `dims`; those of `AXIS_NAMES` when not given."""
    node_of_rank: tuple[int, ...] = ()
    """The node of each rank; all on node 0 when not given."""

    shape, nodes = Renamed("dims"), Renamed("node_of_rank")

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(int(n) for n in self.dims))
        if not self.dims or min(self.dims) < 1:
            raise MeshError(f"mesh shape: got {self.dims}; every axis needs at least one rank, as (2, 3)")
        if not self.names and len(self.dims) > len(AXIS_NAMES):
            named = f"up to {len(AXIS_NAMES)} have names of their own, {', '.join(AXIS_NAMES)}"
            raise MeshError(f"mesh names: got none for {len(self.dims)} axes; {named}; for more pass names")
        names = tuple(self.names) or AXIS_NAMES[: len(self.dims)]
        if len(names) != len(self.dims) or len(set(names)) != len(names):
            raise MeshError(f"mesh names: got {names} for the shape {self.dims}; every axis needs one name of its own")
        for name in names:
            if not (name.isidentifier() and name.isascii()) or name in ("None", "sum"):
                raise MeshError(f"mesh names: got {name!r}; names are ASCII identifiers, not None or sum")
        object.__setattr__(self, "names", names)
        given = self.node_of_rank
        nodes = given if isinstance(given, _Nodes) else tuple(given) or _one_node(prod(self.dims))
        if len(nodes) < prod(self.dims):
            raise MeshError(f"mesh nodes: got {len(nodes)} nodes for {prod(self.dims)} ranks; each rank needs one")
        is_ready = isinstance(nodes, _Nodes) and len(nodes) == prod(self.dims)
        object.__setattr__(self, "node_of_rank", nodes if is_ready else _Nodes(nodes[: prod(self.dims)]))

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.names, self.node_of_rank))

    def __hash__(self) -> int:
        return self._hash  # meshes are looked up all the time, and there may be many nodes

    def __reduce__(self) -> tuple[type[MeshShape], tuple[object, ...]]:
        return MeshShape, (self.dims, self.names, self.node_of_rank)  # in another process texts have other hashes

    @property
    def size(self) -> int:
        """Number of ranks on the grid."""
        return prod(self.dims)

    @property
    def ranks(self) -> range:
        """All ranks of the grid."""
        return range(self.size)

    @cached_property
    def is_one_node(self) -> bool:
        """True if all ranks live on one node."""
        return len(set(self.node_of_rank)) == 1

    def axis_size(self, name: str) -> int:
        """Return ranks along the axis `name`."""
        return self.dims[self.names.index(name)]

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis name."""
        coords = {}
        for name, extent in zip(reversed(self.names), reversed(self.dims), strict=True):
            rank, coords[name] = divmod(rank, extent)
        return {name: coords[name] for name in self.names}

    def index(self, axes: tuple[str, ...], coords: Mapping[str, int]) -> tuple[int, int]:
        """Return the combined coordinate along some axes, row-major, and how many of them there are."""
        index, count = 0, 1
        for axis in axes:
            size = self.axis_size(axis)
            index, count = index * size + coords[axis], count * size
        return index, count

    def rank(self, coords: Mapping[str, int]) -> int:
        """Return the rank at these coordinates."""
        rank = 0
        for name, extent in zip(self.names, self.dims, strict=True):
            rank = rank * extent + coords[name]
        return rank

    def along(self, axes: tuple[str, ...], coords: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Yield all coordinates that differ from `coords` along `axes` only, row-major in the order of `axes`."""
        for values in product(*(range(self.axis_size(a)) for a in axes)):
            yield {**coords, **dict(zip(axes, values, strict=True))}

    def __iter__(self) -> Iterator[int]:
        return iter(self.dims)

    def __len__(self) -> int:
        return len(self.dims)

    def __getitem__(self, axis: int) -> int:
        return self.dims[axis]

    def __str__(self) -> str:
        return "x".join(map(str, self.dims))


@lru_cache(maxsize=256)
def regrouped(grid: MeshShape, nodes: tuple[int, ...]) -> MeshShape:
    return replace(grid, node_of_rank=nodes)


def near_square(count: int) -> tuple[int, int]:
    """Return `count` as a product of two factors that are as near to each other as they can be, the smaller one first.

    >>> near_square(12), near_square(7)
    ((3, 4), (1, 7))
    """
    small = max(n for n in divisors(count) if n * n <= count)
    return small, count // small


def grids(count: int, dims: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `count` as an ordered product of `dims` factors, smaller first factors first."""
    if dims == 1:
        yield (count,)
        return
    for first in divisors(count):
        for rest in grids(count // first, dims - 1):
            yield (first, *rest)


@lru_cache(maxsize=1024)
def divisors(count: int) -> tuple[int, ...]:
    small = [n for n in range(1, isqrt(count) + 1) if count % n == 0]
    return (*small, *(count // n for n in reversed(small) if n * n != count))

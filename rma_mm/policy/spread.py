"""How what ranks want of a matrix is spread over its owners: their own, their node's, other nodes'. All ranks at once.

Everything is a product of lengths along rows and columns, so it is worked out for the few different spans of each
dimension and then looked up for every rank. On meshes of more than `LIMIT` ranks about as many stand for all: those of
whole nodes, drawn evenly from all parts of the mesh, and of the nodes at its corners.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..geometry.layout import Layout
from ..geometry.mesh import MeshShape
from .marks import Common, Figures, Marks, Numbers, marks

LIMIT = 1024
"""Ranks up to which all are looked at; of more, about so many."""
MATES = 64
"""Ranks of a node up to which all are looked at; of more, so many."""
NODES = 16
"""Nodes that are looked at, at least."""


@dataclass(frozen=True, eq=False)
class Spread:
    """Where ranks find what they want; one figure for each rank that is looked at."""

    own: Figures
    """Words that a rank has itself."""
    node: Figures
    """Words on other ranks of its node."""
    between: Figures
    """Words on other nodes."""
    cuts: tuple[Figures, Figures]
    """Owners that share out what it wants, along rows and along columns."""
    turns: tuple[Figures, Figures]
    """How often the owner changes along rows and along columns, where owners hold scattered blocks."""
    run: float
    """Words that lie together, on average, at the owner and where they are wanted."""

    @property
    def foreign(self) -> Figures:
        """Words of other ranks."""
        return self.node + self.between


@dataclass(eq=False)
class Crowd:
    """The ranks of a mesh that are looked at: all of them, or all (of many, some) of those on a few nodes."""

    mesh: MeshShape
    people: Numbers
    """The ranks that are looked at."""
    weights: Figures
    """How many ranks each of these stands for."""
    mates: Numbers | None
    """For each of these the people on its node, itself included, −1 where there are no more; None on a single node."""
    nodes: Numbers
    """The node of each that is looked at."""
    populations: Figures
    """How many ranks there are on the node of each."""
    node_count: int
    _coords: dict[MeshShape, dict[str, Numbers]] = field(default_factory=dict)
    _marks: dict[object, Marks] = field(default_factory=dict)
    _common: dict[tuple[int, int], Common] = field(default_factory=dict)
    _spreads: dict[object, Spread] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many are looked at."""
        return len(self.people)

    def coords(self, grid: MeshShape) -> dict[str, Numbers]:
        """Coordinates of the people on a grid over the first ranks; those beyond it count as its first rank."""
        if grid not in self._coords:
            inside = np.where(self.people < grid.size, self.people, 0)
            self._coords[grid] = dict(zip(grid.names, np.unravel_index(inside, grid.shape), strict=True))
        return self._coords[grid]

    def holds(self, layout: Layout) -> NDArray[np.bool_]:
        """Which people a placement gives anything."""
        grid = layout.mesh(self.mesh)
        found = self.people < grid.size
        for axis, coordinate in layout.pins:
            found &= self.coords(grid)[axis] == coordinate
        return found

    def marks(self, layout: Layout, dim: int, extent: int) -> Marks:
        """What each of the people holds of one dimension of a placement, pins apart."""
        split, grid = layout.splits[dim], layout.mesh(self.mesh)
        key = (split, grid.shape, grid.names, extent)
        if key not in self._marks:
            self._marks[key] = marks(layout, dim, extent, grid, self.coords(grid), self.count)
        return self._marks[key]

    def common(self, wanted: Marks, held: Marks) -> Common:
        """What spans of the one have in common with those of the other."""
        key = id(wanted), id(held)
        if key not in self._common:
            self._kept += [wanted, held]
            self._common[key] = Common.of(wanted, held)
        return self._common[key]

    def spread(self, layout: Layout, shape: tuple[int, int], wanted: tuple[Marks, Marks], is_any: Any = None) -> Spread:
        """Where the boxes `wanted` of a matrix lie, placed by `layout`. is_any: who wants anything; all by default."""
        key = (layout, shape, id(wanted[0]), id(wanted[1]), None if is_any is None else is_any.tobytes())
        if key not in self._spreads:
            self._kept += wanted
            self._spreads[key] = self._spread(layout, shape, wanted, is_any)
        return self._spreads[key]

    def _spread(self, layout: Layout, shape: tuple[int, int], wanted: tuple[Marks, Marks], is_any: Any) -> Spread:
        held = [self.marks(layout, dim, extent) for dim, extent in enumerate(shape)]
        common = [self.common(want, have) for want, have in zip(wanted, held, strict=True)]
        size = wanted[0].each * wanted[1].each
        size = size if is_any is None else size * is_any
        own = common[0].at(wanted[0].of, held[0].of) * common[1].at(wanted[1].of, held[1].of)
        own = np.minimum(own * self.holds(layout), size)
        cuts = tuple(np.maximum(1.0, each.parts())[each.wanted.of] for each in common)
        turns = tuple(np.maximum(cut, want.each / have.run) for cut, want, have in zip(cuts, wanted, held, strict=True))
        run = min(wanted[1].run, held[1].run)
        if wanted[1].run == held[1].run:  # rows of the whole width lie one after the other
            run *= min(wanted[0].run, held[0].run)
        if self.mates is None:
            return Spread(own, size - own, np.zeros_like(own), cuts, turns, run)  # type: ignore[arg-type]
        near = own + self._near(layout, common) * (size > 0)
        near = np.maximum(np.minimum(near, size), own)
        return Spread(own, near - own, size - near, cuts, turns, run)  # type: ignore[arg-type]

    def _near(self, layout: Layout, common: list[Common]) -> Figures:
        """Words that some other rank of the same node holds, each counted once, and not what one has itself."""
        assert self.mates is not None
        mates = self.mates
        is_there = (mates >= 0) & self.holds(layout)[mates]
        alone = set(layout.skew_axes) & set(layout.replicated_axes(self.mesh))  # replicas with other windows
        for axis in alone | set(layout.partial):  # or with other summands
            at = self.coords(layout.mesh(self.mesh))[axis]
            is_there &= at[mates] == at[:, None]
        rows, cols = (each.held for each in common)
        held = rows.of * cols.count + cols.of
        mine = np.where(self.holds(layout), held, -1)[:, None]
        keys = np.sort(np.where(is_there, held[mates], -1), axis=1)
        there = (keys >= 0) & (keys != mine)
        there[:, 1:] &= keys[:, 1:] != keys[:, :-1]  # of replicas one
        found = np.divmod(np.maximum(keys, 0), cols.count)
        words = [each.at(each.wanted.of[:, None], have) for each, have in zip(common, found, strict=True)]
        return np.asarray((words[0] * words[1] * there).sum(axis=1) * self._unseen)

    @property
    def _unseen(self) -> Figures:
        """For each of a rank's node-mates that is looked at, how many there are."""
        assert self.mates is not None
        return np.asarray(np.maximum(1, self.populations - 1) / np.maximum(1, (self.mates >= 0).sum(axis=1) - 1))

    def alike(self, wanted: tuple[Marks, Marks], is_any: NDArray[np.bool_]) -> Figures:
        """How many ranks of its node, a rank among them, want the same box."""
        if self.mates is None:
            return np.ones(self.count)
        keys = np.where(is_any, wanted[0].of * wanted[1].count + wanted[1].of, -1)
        same = (self.mates >= 0) & (keys[self.mates] == keys[:, None])
        return np.asarray(np.maximum(1.0, 1 + (same.sum(axis=1) - 1) * self._unseen))

    def mean(self, figures: Figures) -> float:
        """The mean over all ranks of the mesh."""
        return float(figures @ self.weights / self.mesh.size)

    def by_node(self, figures: Figures, nodes_together: int = 1) -> float:
        """The largest sum over the ranks of a node, or of several in a row; of few ranks of one large node, the mean's.

        Of a large mesh the largest of the nodes that are looked at.
        """
        if self.count == self.mesh.size:
            return float(np.bincount(self.nodes // nodes_together, weights=figures).max())
        if self.mates is None:
            return self.mean(figures) * self.mesh.size
        _, of, seen = np.unique(self.nodes, return_inverse=True, return_counts=True)
        sums = np.bincount(of, weights=figures * self.populations / seen[of])
        return float(sums.max()) * min(nodes_together, self.node_count)


@lru_cache(maxsize=64)
def crowd(mesh: MeshShape) -> Crowd:
    """The ranks of a mesh that prices look at."""
    nodes = np.fromiter(mesh.nodes, np.int64, mesh.size)
    sizes = np.bincount(nodes)
    count = int((sizes > 0).sum())
    people, weights = np.arange(mesh.size), np.ones(mesh.size)
    if mesh.size > LIMIT and count == 1:
        people, weights = _some(mesh, LIMIT)
    elif mesh.size > LIMIT:
        usual = min(MATES, int(np.median(sizes[sizes > 0])))
        people, weights = _with_mates(nodes, *_some(mesh, max(NODES, LIMIT // usual)))
    on = nodes[people]
    mates = None if count == 1 else _mates(on)
    return Crowd(mesh, people, weights, mates, on, sizes[on].astype(float), count)


def _some(mesh: MeshShape, about: int) -> tuple[Numbers, Figures]:
    """Ranks, and how many others each stands for: one of every cell of the mesh, and those at its corners for none.

    Where they lie in their cells follows a sequence that keeps step with nothing, such as every fourth rank's tile.
    """
    cells = _cells(mesh, about)
    where = np.indices(cells).reshape(len(cells), -1)
    numbers = np.arange(1, where.shape[1] + 1)
    ranks, weights = np.zeros_like(numbers), np.ones(len(numbers))
    for extent, count, at, step in zip(mesh.shape, cells, where, _steps(len(cells)), strict=True):
        low, high = at * extent // count, (at + 1) * extent // count
        ranks = ranks * extent + low + ((numbers * step + 0.5) % 1 * (high - low)).astype(np.int64)
        weights *= high - low
    ends = product(*(sorted({0, extent - 1}) for extent in mesh.shape))
    corners = np.setdiff1d([np.ravel_multi_index(at, mesh.shape) for at in ends], ranks)
    return np.concatenate([ranks, corners]), np.concatenate([weights, np.zeros(len(corners))])


def _steps(dims: int) -> list[float]:
    """Steps of an evenly spread sequence of points (M. Roberts 2018): powers of 1/x, where x^(dims + 1) = x + 1."""
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (dims + 1))
    return [root**-n for n in range(1, dims + 1)]


def _cells(mesh: MeshShape, about: int) -> tuple[int, ...]:
    """Into how many cells each axis is cut, so that there are about so many, with sides about as long."""
    counts = [1] * len(mesh.shape)
    while prod(counts) < min(about, mesh.size):
        widest = max(range(len(counts)), key=lambda axis: mesh.shape[axis] / counts[axis])
        counts[widest] += 1
    return tuple(counts)


def _with_mates(nodes: Numbers, ranks: Numbers, weights: Figures) -> tuple[Numbers, Figures]:
    """All ranks of the nodes of these, or `MATES` of each, and how many others each stands for."""
    drawn, of = np.unique(nodes[ranks], return_inverse=True)
    stands = np.bincount(of, weights=weights)
    order = np.argsort(nodes, kind="stable")
    begins, ends = (np.searchsorted(nodes, drawn, side, sorter=order) for side in ("left", "right"))
    people = []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        people.append(order[np.unique(np.linspace(begin, end - 1, MATES).astype(int))])
    return np.concatenate(people), np.concatenate([
        np.full(len(found), each / len(found)) for found, each in zip(people, stands, strict=True)
    ])  # fmt: skip


def _mates(on: Numbers) -> Numbers:
    """For each of those that live on these nodes who lives there too, −1 where there are no more."""
    _, of, seen = np.unique(on, return_inverse=True, return_counts=True)
    order = np.argsort(of, kind="stable")
    begins = np.cumsum(seen) - seen
    numbers = np.arange(seen.max())
    found = order[np.minimum(begins[:, None] + numbers, len(on) - 1)]
    return np.asarray(np.where(numbers < seen[:, None], found, -1)[of])


def together(one: Figures, other: Figures) -> Figures:
    """Pieces into which two even cuts of the same indices, into so many parts each, cut them together."""
    whole = np.gcd(one.astype(np.int64), other.astype(np.int64))
    return np.asarray(one + other - whole)

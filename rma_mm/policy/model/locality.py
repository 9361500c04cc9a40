"""Split the words that ranks need of a matrix into their own, those of their node, and those of other nodes.

All ranks are computed at once. Everything is a product of lengths along rows and columns, so it is computed for the
few different spans of each dimension and then looked up for every rank. On meshes of more than `LIMIT` ranks about as
many stand for all: those of whole nodes, which are drawn evenly from all parts of the mesh, or lie at its corners, or
astride its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import lru_cache, wraps
from itertools import product
from math import inf, prod
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Split
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.joint_cuts import Joint, joint
from rma_mm.policy.model.spans import DimSpans, Figures, Numbers, SpanOverlap, dim_spans

LIMIT = 1024  # ranks up to which all are looked at; of more, about so many
NODES = 16  # nodes that are looked at, at least
PAIRS = 2**18  # ranks that are looked at, times those of their nodes: of large nodes not all are looked at
MATES = 1024  # ranks of a node whose holdings matter to the others; of larger nodes so many stand for all
FAR = 10.0  # distance of another node, relative to a rank of the same node
ROUNDS = 8  # rounds in which weights settle
WHOLE = 1e12  # words that lie together where all that moves at once does
ALIKE = 0.02  # by what share of its columns a panel may differ from those that an owner has, on average over ranks


Method = TypeVar("Method", bound=Callable[..., Any])


def _once(method: Method) -> Method:
    """Return a method of a sample whose results are kept with it: placements share spans and spreads."""

    @wraps(method)
    def found(self: RankSample, *args: object) -> object:
        key = method, *args
        result = self.known.get(key)
        if result is None:
            result = self.known[key] = method(self, *args)
        return result

    return cast(Method, found)


@dataclass(frozen=True, eq=False)
class Spread:
    """Sources of the words that ranks need; one figure for each sampled rank."""

    own: Figures  # words that a rank has itself
    node: Figures  # words on other ranks of its node
    between: Figures  # words on other nodes
    cuts: tuple[Figures, Figures]  # owners that share out what it wants, along rows and along columns
    owner_changes: tuple[Figures, Figures]
    """Number of changes of owner along rows and along columns, if owners hold scattered blocks."""
    run: float  # words that lie together, on average, at the owner and where they are wanted
    columns: tuple[float, float] = (1.0, 0.0)  # columns that are wanted in one run, and that an owner has, on average

    @property
    def foreign(self) -> Figures:
        return self.node + self.between

    def contiguous(self, width: float = inf) -> float:
        """Return how many words lie together where they go between nodes, `width` columns at a time, at most.

        All of them where that is as many columns as an owner has: neither its memory nor their new place has others.
        """
        wanted, has = self.columns
        wanted = min(wanted, width)
        return WHOLE if abs(wanted - has) <= ALIKE * has else max(1.0, min(self.run, wanted))


@dataclass(eq=False)
class RankSample:
    """The ranks of a mesh that are looked at, and their node-mates."""

    mesh: MeshShape
    ranks: Numbers  # ranks whose holdings matter: those that are looked at first, then others of their nodes
    count: int  # how many of them are looked at
    weights: Figures  # how many ranks each of these stands for
    node_mates: Numbers | None
    """The ranks on the node of each of these, itself included, padded with −1; None on a single node."""
    nodes: Numbers  # the node of each that is looked at
    populations: Figures  # number of ranks on the node of each sampled rank
    stands: Figures  # how many ranks of its node each stands for
    node_count: int
    known: dict[object, Any] = field(default_factory=dict)

    @_once
    def coords(self, grid: MeshShape) -> dict[str, Numbers]:
        """Return these ranks' coordinates on a grid over the mesh's first ranks; later ones count as its first."""
        inside = np.where(self.ranks < grid.size, self.ranks, 0)
        return dict(zip(grid.names, np.unravel_index(inside, grid.dims), strict=True))

    def holds(self, layout: Layout) -> NDArray[np.bool_]:
        """Return which of the ranks hold elements under a placement."""
        grid = layout.mesh(self.mesh)
        found = self.ranks < grid.size
        for axis, coordinate in layout.pins:
            found &= self.coords(grid)[axis] == coordinate
        return found

    def spans(self, layout: Layout, dim: int, extent: int) -> DimSpans:
        return self._spans(layout.splits[dim], extent, layout.mesh(self.mesh))

    @_once
    def _spans(self, split: Split, extent: int, grid: MeshShape) -> DimSpans:
        return dim_spans(Layout((split,)), 0, extent, grid, self.coords(grid), len(self.ranks))

    def parts(self, layout: Layout, shape: tuple[int, int]) -> tuple[DimSpans, DimSpans]:
        return self.spans(layout, 0, shape[0]), self.spans(layout, 1, shape[1])

    def words(self, layout: Layout, shape: tuple[int, int]) -> Figures:
        """Return the elements of the sampled ranks' parts, ignoring pins."""
        rows, cols = self.parts(layout, shape)
        return rows.each[: self.count] * cols.each[: self.count]

    def elements_held(self, layout: Layout, shape: tuple[int, int]) -> Figures:
        return self.words(layout, shape) * self.holds(layout)[: self.count]

    @_once
    def overlap(self, wanted: DimSpans, held: DimSpans) -> SpanOverlap:
        return SpanOverlap.of(wanted, held)

    @_once
    def joint(self, wanted: DimSpans, helds: tuple[DimSpans, ...], least: int) -> Joint:
        return joint(wanted, helds, [self.overlap(wanted, held).parts() for held in helds], least)

    def spread(
        self, layout: Layout, shape: tuple[int, int], wanted: tuple[DimSpans, DimSpans], who: NDArray[np.bool_]
    ) -> Spread:
        return self._spread(layout, shape, wanted, who.tobytes())

    @_once
    def _spread(self, layout: Layout, shape: tuple[int, int], wanted: tuple[DimSpans, DimSpans], who: bytes) -> Spread:
        held = self.parts(layout, shape)
        common = [self.overlap(want, have) for want, have in zip(wanted, held, strict=True)]
        each = [want.each[: self.count] for want in wanted]
        size = each[0] * each[1] * np.frombuffer(who, np.bool_)[: self.count]
        mine = [pair.at(pair.wanted.of[: self.count], pair.held.of[: self.count]) for pair in common]
        own = np.minimum(mine[0] * mine[1] * self.holds(layout)[: self.count], size)
        cuts = tuple(np.maximum(1.0, pair.parts())[pair.wanted.of[: self.count]] for pair in common)
        turns = tuple(np.maximum(cut, want / have.run) for cut, want, have in zip(cuts, each, held, strict=True))
        run, cols = common[1].run, common[1]
        has = float(cols.held.lengths.mean())
        columns = (has if cols.wanted is cols.held else cols.wanted.run), has
        if self.node_mates is None:
            return Spread(own, size - own, np.zeros_like(own), cuts, turns, run, columns)  # type: ignore[arg-type]
        near = own + self._near(layout, common) * (size > 0)
        near = np.maximum(np.minimum(near, size), own)
        return Spread(own, near - own, size - near, cuts, turns, run, columns)  # type: ignore[arg-type]

    def _near(self, layout: Layout, common: list[SpanOverlap]) -> Figures:
        """Return the words that another rank of the same node holds, each counted once, without a rank's own."""
        assert self.node_mates is not None
        node_mates = self.node_mates
        is_there = (node_mates >= 0) & self.holds(layout)[node_mates]
        alone = set(layout.skew_axes) & set(layout.replicated_axes(self.mesh))  # replicas with other windows
        for axis in alone | set(layout.partial):  # or with other summands
            at = self.coords(layout.mesh(self.mesh))[axis]
            is_there &= at[node_mates] == at[: self.count, None]
        rows, cols = (pair.held for pair in common)
        held = rows.of * cols.count + cols.of
        mine = np.where(self.holds(layout), held, -1)[: self.count, None]
        keys = np.sort(np.where(is_there, held[node_mates], -1), axis=1)
        there = (keys >= 0) & (keys != mine)
        there[:, 1:] &= keys[:, 1:] != keys[:, :-1]  # of replicas one
        found = np.divmod(np.maximum(keys, 0), cols.count)
        words = [pair.at(pair.wanted.of[: self.count, None], have) for pair, have in zip(common, found, strict=True)]
        return np.asarray((words[0] * words[1] * there).sum(axis=1) * self._unseen)

    @property
    def _unseen(self) -> Figures:
        """Return how many ranks of its node each sampled neighbour stands for."""
        assert self.node_mates is not None
        return np.asarray(np.maximum(1, self.populations - 1) / np.maximum(1, (self.node_mates >= 0).sum(axis=1) - 1))

    def alike(self, wanted: tuple[DimSpans, DimSpans], is_any: NDArray[np.bool_]) -> Figures:
        """Return the number of ranks of its node, the rank included, that need the same box."""
        if self.node_mates is None:
            return np.ones(self.count)
        keys = np.where(is_any, wanted[0].of * wanted[1].count + wanted[1].of, -1)
        same = (self.node_mates >= 0) & (keys[self.node_mates] == keys[: self.count, None])
        return np.asarray(np.maximum(1.0, 1 + (same.sum(axis=1) - 1) * self._unseen))

    @_once
    def distance(self, spread: Spread) -> float:
        return self.mean(FAR * spread.between + spread.node)

    def mean(self, figures: Figures) -> float:
        return float(figures @ self.weights / self.mesh.size)

    def by_node(self, figures: Figures, nodes_together: int = 1) -> float:
        """The largest sum over the ranks of a node, or of several in a row; of a large mesh, of a node looked at.

        The average node's where not all ranks of a node are looked at, for the largest would be so by chance.
        """
        if self.count == self.mesh.size:
            return float(np.bincount(self.nodes // nodes_together, weights=figures).max())
        _, of = np.unique(self.nodes, return_inverse=True)
        sums = np.bincount(of, weights=figures * self.stands)
        found = np.average(sums, weights=np.bincount(of, self.weights)) if self.stands.max() > 1 else sums.max()
        return float(found) * min(nodes_together, self.node_count)


@lru_cache(maxsize=64)
def rank_sample(mesh: MeshShape) -> RankSample:
    """Return the ranks of a mesh that prices look at."""
    nodes = np.fromiter(mesh.node_of_rank, np.int64, mesh.size)
    sizes = np.bincount(nodes)
    count = int((sizes > 0).sum())
    ranks, weights = np.arange(mesh.size), np.ones(mesh.size)
    stands = weights
    if mesh.size > LIMIT and count == 1:
        ranks, weights = _some(mesh, LIMIT)
        stands = weights
    elif mesh.size > LIMIT:
        usual = int(np.median(sizes[sizes > 0]))
        ranks, weights, stands = _with_mates(mesh, nodes, *_some(mesh, max(NODES, LIMIT // usual)))
    looked = len(weights)
    weights = _fair(mesh, ranks[:looked], weights) if mesh.size > LIMIT else weights
    on = nodes[ranks]
    node_mates = None if count == 1 else _mates(on)[:looked]
    on, populations = on[:looked], sizes[on[:looked]].astype(float)
    return RankSample(mesh, ranks, looked, weights, node_mates, on, populations, stands, count)


def _some(mesh: MeshShape, about: int) -> tuple[Numbers, Figures]:
    """Return sampled ranks with the number of ranks that each represents: one per cell of the mesh, plus its corners.

    Where they lie in their cells follows a sequence that keeps step with nothing, such as every fourth rank's tile.
    """
    cells = _cells(mesh, about)
    where = np.indices(cells).reshape(len(cells), -1)
    numbers = np.arange(1, where.shape[1] + 1)
    ranks, weights = np.zeros_like(numbers), np.ones(len(numbers))
    for extent, count, at, step in zip(mesh.dims, cells, where, _steps(len(cells)), strict=True):
        low, high = at * extent // count, (at + 1) * extent // count
        ranks = ranks * extent + low + ((numbers * step + 0.5) % 1 * (high - low)).astype(np.int64)
        weights *= high - low
    ends = product(*(sorted({0, extent - 1}) for extent in mesh.dims))
    corners = np.setdiff1d([np.ravel_multi_index(at, mesh.dims) for at in ends], ranks)
    return np.concatenate([ranks, corners]), np.concatenate([weights, np.zeros(len(corners))])


def _fair(mesh: MeshShape, ranks: Numbers, weights: Figures) -> Figures:
    """Return the weights changed so that as many ranks lie at each end of every axis as do, and between the ends."""
    weights = np.where(weights > 0, weights, 1.0)
    coords = np.unravel_index(ranks, mesh.dims)
    for _ in range(ROUNDS):
        for at, extent in zip(coords, mesh.dims, strict=True):
            for layer, count in ((at == 0, 1), (at == extent - 1, 1), ((at > 0) & (at < extent - 1), extent - 2)):
                if count > 0 and layer.any():
                    weights[layer] *= mesh.size / extent * count / weights[layer].sum()
    return np.asarray(weights * (mesh.size / weights.sum()))


def _steps(dims: int) -> list[float]:
    """Steps of an evenly spread sequence of points (M. Roberts 2018): powers of 1/x, where x^(dims + 1) = x + 1."""
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (dims + 1))
    return [root**-n for n in range(1, dims + 1)]


def _cells(mesh: MeshShape, about: int) -> tuple[int, ...]:
    """Return into how many cells each axis is cut, for `about` cells with sides of about equal length."""
    counts = [1] * len(mesh.dims)
    while prod(counts) < min(about, mesh.size):
        widest = max(range(len(counts)), key=lambda axis: mesh.dims[axis] / counts[axis])
        counts[widest] += 1
    return tuple(counts)


def _astride(mesh: MeshShape, nodes: Numbers) -> Numbers:
    """Ranks on nodes with the fewest on one side of where a row, or a layer, of the mesh ends, who find least there.

    None if nodes are not of consecutive ranks.
    """
    found: list[int] = []
    if np.any(np.diff(nodes) < 0):
        return np.array(found, np.int64)
    for axis in range(1, len(mesh.dims)):
        stride = prod(mesh.dims[axis:])
        edges = np.arange(stride, mesh.size, stride)
        edges = edges[nodes[edges - 1] == nodes[edges]]
        before = edges - np.searchsorted(nodes, nodes[edges])
        after = np.searchsorted(nodes, nodes[edges], "right") - edges
        found += [int(edges[sides.argmin()]) for sides in (before, after) if len(edges)]
    return np.array(found, np.int64)


def _with_mates(mesh: MeshShape, nodes: Numbers, ranks: Numbers, weights: Figures) -> tuple[Numbers, Figures, Figures]:
    """Ranks of the nodes of these, then more of these nodes; how many the former stand for, in all and on their nodes.

    The first and the last of a node, and those that are given, stand for themselves alone on it.
    """
    astride = _astride(mesh, nodes)
    ranks, weights = np.append(ranks, astride), np.append(weights, np.zeros(len(astride)))
    drawn, of = np.unique(nodes[ranks], return_inverse=True)
    order = np.argsort(nodes, kind="stable")
    begins, ends = (np.searchsorted(nodes, drawn, side, sorter=order) for side in ("left", "right"))
    few = int(max(NODES, PAIRS / np.median(ends - begins) / len(drawn)))
    looked, others, stands, whole = [], [], [], np.bincount(of, weights=weights)
    for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        single = np.union1d(order[[begin, end - 1]], ranks[of == number])
        several = np.setdiff1d(order[begin + _drawn(end - begin, few)], single)
        looked.append(np.append(single, several))
        others.append(np.setdiff1d(order[begin + _drawn(end - begin, MATES)], looked[-1]))
        rest = (end - begin - len(single)) / max(1, len(several))
        stands.append(np.append(np.ones(len(single)), np.full(len(several), rest)))
    shares = [found / found.sum() * each for found, each in zip(stands, whole, strict=True)]
    return np.concatenate([*looked, *others]), np.concatenate(shares), np.concatenate(stands)


def _drawn(count: int, most: int) -> Numbers:
    """Return all numbers below `count`, or so many, one of each stretch."""
    if count <= most:
        return np.arange(count)
    numbers = np.arange(most)
    low, high = numbers * count // most, (numbers + 1) * count // most
    return np.asarray(low + (numbers * _steps(1)[0] % 1 * (high - low)).astype(np.int64))


def _mates(on: Numbers) -> Numbers:
    """Return the ranks on the same node as each of these ranks, padded with −1."""
    _, of, seen = np.unique(on, return_inverse=True, return_counts=True)
    order = np.argsort(of, kind="stable")
    begins = np.cumsum(seen) - seen
    numbers = np.arange(seen.max())
    found = order[np.minimum(begins[:, None] + numbers, len(on) - 1)]
    return np.asarray(np.where(numbers < seen[:, None], found, -1)[of])

"""Which ranks act together so that what several ranks of a node need, or add to, crosses to another node once.

Two steps do what a group of ranks does in one: ranks in the same place on their nodes act together, and those of a
node. On a node with fewer ranks they take the places of several. The words on the wire are divided by the ranks of the
group on each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape

LEAST = 2**14  # words of a matrix from which on less traffic between nodes is worth one more meeting
Numbers = NDArray[np.int64]


def is_worth(mesh: MeshShape, shape: tuple[int, int]) -> bool:
    """True if what crosses nodes of a matrix is so much that less of it is worth one more meeting."""
    return shape[0] * shape[1] >= LEAST and not mesh.is_one_node


def can_share(mesh: MeshShape, shape: tuple[int, int], source: Layout, target: Layout) -> bool:
    """True if ranks of a node are to hold the same part of a large matrix, and there are other nodes.

    Not if a replica's own place says which parts of the source it takes.
    """
    if not is_worth(mesh, shape) or set(source.skew_axes) & set(source.replicated_axes(mesh)):
        return False
    return _has_replicas(mesh, target)


@lru_cache(maxsize=16)
def replicas(mesh: MeshShape, target: Layout) -> list[tuple[int, ...]]:
    """Return for each rank those of its node that hold what it holds, itself included; itself if that is nothing."""
    held = _held(mesh, target).tolist()
    alike: dict[int, list[int]] = {}
    for rank, part in enumerate(held):
        alike.setdefault(part, []).append(rank)
    return [tuple(alike[part]) if part >= 0 else (rank,) for rank, part in enumerate(held)]


@lru_cache(maxsize=64)
def crosses(mesh: MeshShape, grid: MeshShape, axes: tuple[str, ...]) -> bool:
    """True if some group along `axes` of a grid has ranks on several nodes, and several on one of them."""
    count = max(mesh.node_of_rank) + 1
    lines = _along(grid, [axis for axis in grid.names if axis not in axes]) * count + _nodes(mesh)[: grid.size]
    found, ranks = np.unique(lines, return_counts=True)
    _, group, nodes = np.unique(found // count, return_inverse=True, return_counts=True)
    return bool(np.any((ranks > 1) & (nodes[group] > 1)))


class Crossing(NamedTuple):
    """The smaller groups that do what a group does in two steps, each word crossing to a node once."""

    across: tuple[tuple[int, ...], ...]
    """For each place among a node's ranks of the group: those in it, one of each node, who move what is theirs."""
    near: tuple[int, ...]  # those of one rank's node
    places: dict[int, int]  # the place of each rank of the larger group

    def mate(self, rank: int) -> int:
        """Return who on this node moves what is a rank's: itself, or the one in its place."""
        return self.near[self.places[rank] % len(self.near)]


def crossing(mesh: MeshShape, group: Sequence[int], rank: int) -> Crossing | None:
    """Return how the group of a rank crosses to other nodes; None if one step does not cross more often."""
    by_node: dict[int, list[int]] = {}
    for each in group:
        by_node.setdefault(mesh.node_of_rank[each], []).append(each)
    most = max(map(len, by_node.values()), default=1)
    if len(by_node) == 1 or most == 1:
        return None
    across = tuple(tuple(ranks[place % len(ranks)] for ranks in by_node.values()) for place in range(most))
    places = {each: n for ranks in by_node.values() for n, each in enumerate(ranks)}
    return Crossing(across, tuple(by_node[mesh.node_of_rank[rank]]), places)


@lru_cache(maxsize=256)
def _has_replicas(mesh: MeshShape, target: Layout) -> bool:
    """True if `replicas` has more than one rank for some; where there are many ranks that is found faster."""
    if not target.replicated_axes(mesh):
        return False
    held = _held(mesh, target)
    held = held[held >= 0]
    return len(np.unique(held)) < len(held)


def _held(mesh: MeshShape, target: Layout) -> Numbers:
    """Return a number for each rank, the same for those of a node that hold the same part; −1 for nothing."""
    grid, free = target.mesh(mesh), set(target.replicated_axes(mesh)) - set(target.skew_axes)
    part = _along(grid, [axis for axis in grid.names if axis not in free])
    for axis, coordinate in target.pins:
        part = np.where(_along(grid, [axis]) == coordinate, part, -1)
    held = np.full(mesh.size, -1)
    held[: grid.size] = np.where(part >= 0, part * mesh.size + _nodes(mesh)[: grid.size], -1)
    return held


def _along(grid: MeshShape, axes: Sequence[str]) -> Numbers:
    """Return a number for each rank of a grid that tells its coordinates along some axes."""
    ranks, found = np.arange(grid.size), np.zeros(grid.size, np.int64)
    for axis, at in zip(grid.names, np.unravel_index(ranks, grid.dims), strict=True):
        found = found * grid.axis_size(axis) + at if axis in axes else found
    return found


@lru_cache(maxsize=4)
def _nodes(mesh: MeshShape) -> Numbers:
    return np.fromiter(mesh.node_of_rank, np.int64, mesh.size)

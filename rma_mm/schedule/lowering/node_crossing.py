"""Which ranks act together so that what several ranks of a node need, or add to, crosses to another node once.

Two steps do what a group of ranks does in one: ranks in the same place on their nodes act together, and those of a
node. The words on the wire are divided by the ranks of the group on each node.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape

LEAST = 2**14  # words of a matrix from which on less traffic between nodes is worth one more meeting


def is_worth(mesh: MeshShape, shape: tuple[int, int]) -> bool:
    """True if what crosses nodes of a matrix is so much that less of it is worth one more meeting."""
    return shape[0] * shape[1] >= LEAST and not mesh.is_one_node


def can_share(mesh: MeshShape, shape: tuple[int, int], source: Layout, target: Layout) -> bool:
    """True if ranks of a node are to hold the same part of a large matrix, and there are other nodes.

    Not if a replica's own place says which parts of the source it takes.
    """
    is_alike = not set(source.skew_axes) & set(source.replicated_axes(mesh))
    return is_worth(mesh, shape) and is_alike and any(len(group) > 1 for group in replicas(mesh, target))


@lru_cache(maxsize=16)
def replicas(mesh: MeshShape, target: Layout) -> list[tuple[int, ...]]:
    """Return for each rank those of its node that hold what it holds, itself included; itself if that is nothing."""
    free = set(target.replicated_axes(mesh)) - set(target.skew_axes)

    def held(rank: int) -> object:
        at = target.coords(mesh, rank)
        if at is None or not target.holds(at):
            return rank  # it holds nothing
        return mesh.node_of_rank[rank], tuple(at[axis] for axis in at if axis not in free)

    alike: dict[object, list[int]] = {}
    for rank in mesh.ranks:
        alike.setdefault(held(rank), []).append(rank)
    return [tuple(alike[held(rank)]) for rank in mesh.ranks]


class Crossing(NamedTuple):
    """The two groups of a rank that do what a larger group does, each word crossing to a node once."""

    across: tuple[int, ...]  # those in the same place among the group's ranks of their nodes
    near: tuple[int, ...]  # those of the same node
    place: int  # that place


@lru_cache(maxsize=16)
def crossings(mesh: MeshShape, grid: MeshShape, axes: tuple[str, ...]) -> dict[int, Crossing]:
    """Return how each rank's group along `axes` of a grid crosses to other nodes.

    Empty unless every group has several nodes, and several ranks on each of them, as many on all.
    """
    groups: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank in grid.ranks:
        line = tuple(at for axis, at in grid.coords(rank).items() if axis not in axes)
        groups.setdefault(line, {}).setdefault(mesh.node_of_rank[rank], []).append(rank)
    sizes = [(len(group), len(near)) for group in groups.values() for near in group.values()]
    if len(set(sizes)) > 1 or 1 in sizes[0]:
        return {}
    found: dict[int, Crossing] = {}
    for group in groups.values():
        for across in zip(*group.values(), strict=True):
            for rank, near in zip(across, group.values(), strict=True):
                found[rank] = Crossing(across, tuple(near), near.index(rank))
    return found

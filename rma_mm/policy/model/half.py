"""Workload of an algorithm that multiplies half of a symmetric C: the boxes of each rank, and their mirror images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rma_mm.policy.model.panels import WorkBoxes
from rma_mm.policy.model.spans import Figures
from rma_mm.policy.model.traffic import LocalWork, Phase, TrafficItem
from rma_mm.schedule.symmetry import multiplied


def half_of(boxes: WorkBoxes, work: LocalWork) -> LocalWork:
    """Return the products that ranks need of the boxes that enclose them."""
    assert boxes.halves is not None
    mine = [boxes.halves.multiplied(rank) for rank in _ranks(boxes)]
    area = np.array([sum(multiplied(box, box[0] == box[1]) for box in each) for each in mine], float)
    (m, n, k), (_, _, cut_k) = work.extents, work.pieces
    share = np.sqrt(area / np.maximum(1.0, m * n))
    side = np.sqrt(np.maximum(1.0, [len(each) for each in mine]))
    columns = work.columns if boxes.decisions.is_here else n * share / side
    return replace(work, extents=(m * share, n * share, k), pieces=(side, side, cut_k), columns=columns)


def pushed_halves(boxes: WorkBoxes) -> TrafficItem:
    """Return the traffic of products in triangle blocks to C's owners."""
    halves, given = boxes.halves, boxes.decisions.problem
    assert halves is not None
    found = [
        [
            (owner, part.size)
            for box in (halves.multiplied(rank) if has_work else ())
            for owner, part in given.target.overlapping(halves.shape, given.mesh, box, rank)
        ]
        for rank, has_work in zip(_ranks(boxes), boxes.has_work.tolist(), strict=False)
    ]
    own, near, far, _ = _by_link(boxes, found)
    calls, run = np.array([float(len(each)) for each in found]), max(1.0, halves.shape[1] / given.mesh.size)
    return TrafficItem("C", "accumulate", own, near, far, calls, run=run)


def mirroring(boxes: WorkBoxes) -> Phase:
    """Return the phase in which each owner fetches the mirror images of its blocks and transposes them."""
    halves = boxes.halves
    assert halves is not None
    found = [[(owner, box.size) for owner, box in halves.mirrored(rank)] for rank in _ranks(boxes)]
    own, near, far, calls = _by_link(boxes, found)
    moved = TrafficItem("C", "get", 0 * own, near, far, calls)
    return Phase([moved] if calls.any() else [], opened=own + near + far)


def _ranks(boxes: WorkBoxes) -> list[int]:
    ranks: list[int] = boxes.sample.ranks[: boxes.sample.count].tolist()
    return ranks


def _by_link(boxes: WorkBoxes, found: Iterable[list[tuple[int, int]]]) -> tuple[Figures, ...]:
    """(own words, words of the node, of other nodes, transfers with other ranks), of (owner, words) of each rank."""
    nodes, rows = boxes.sample.mesh.node_of_rank, []
    for rank, parts in zip(_ranks(boxes), found, strict=True):
        own = sum(size for owner, size in parts if owner == rank)
        near = sum(size for owner, size in parts if nodes[owner] == nodes[rank]) - own
        far = sum(size for _, size in parts) - near - own
        rows.append((own, near, far, sum(owner != rank for owner, _ in parts)))
    return tuple(np.array(rows, float).reshape(-1, 4).T)

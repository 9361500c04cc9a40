"""What a row takes that multiplies half of a symmetric C: the boxes of each rank, and their mirror images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rma_mm.policy.model.panels import WorkBoxes
from rma_mm.policy.model.traffic import LocalWork, Moved, Phase
from rma_mm.schedule.symmetry import multiplied


def half_of(boxes: WorkBoxes, work: LocalWork) -> LocalWork:
    """Of the boxes that hold what ranks multiply, no more than that, in as many products."""
    assert boxes.halves is not None
    mine = [boxes.halves.computed(rank) for rank in boxes.sample.ranks[: boxes.sample.count].tolist()]
    area = np.array([sum(multiplied(box, box[0] == box[1]) for box in each) for each in mine], float)
    (m, n, k), (_, _, cut_k) = work.extents, work.pieces
    share = np.sqrt(area / np.maximum(1.0, m * n))
    side = np.sqrt(np.maximum(1.0, [len(each) for each in mine]))
    return replace(work, extents=(m * share, n * share, k), pieces=(side, side, cut_k))


def mirroring(boxes: WorkBoxes) -> Phase:
    """What is multiplied by other ranks comes to where its mirror image lies, and all is transposed there."""
    halves, sample = boxes.halves, boxes.sample
    assert halves is not None
    rows = []
    for rank in sample.ranks[: sample.count].tolist():
        nodes = sample.mesh.nodes
        found = [(owner, box.size) for owner, box in halves.mirrored(rank)]
        foreign = [(owner, size) for owner, size in found if owner != rank]
        near = sum(size for owner, size in foreign if nodes[owner] == nodes[rank])
        far = sum(size for _, size in foreign) - near
        rows.append((near, far, len(foreign), sum(size for _, size in found)))
    near_words, far_words, calls, mirrored = np.array(rows, float).reshape(-1, 4).T
    moved = Moved("C", "get", np.zeros(sample.count), near_words, far_words, calls)
    return Phase([moved] if calls.any() else [], opened=mirrored)

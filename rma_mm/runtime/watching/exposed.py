"""Exposed communication: what a product between nodes takes beyond its multiplies."""

from __future__ import annotations

from typing import Any

import numpy as np


def exposed_share(plan: Any) -> float | None:
    """Return the share of the wire's time between nodes that adds to the last product. Collective.

    That is what the product took beyond its multiplies, by the time in which what enters the busiest node crosses a
    wire that does nothing else. None on one node, and on a machine that was not measured.
    """
    mesh, model = plan.mesh, plan.choice.request.cost_model
    last = mesh.metrics.last
    mine = (last.seconds, last.multiply) if last is not None else (0.0, 0.0)
    told = mesh.comm.allgather((*mine, plan.words.words_inter))
    seconds, multiplying, words = map(np.array, zip(*told, strict=True))
    entering: float = max(words[np.equal(mesh.node_of, node)].sum() for node in set(mesh.node_of))
    wire: float = model.machine.cost("between", "get").beta * model.itemsize * entering
    if not wire or last is None or plan.predicted_seconds is None:
        return None
    late: float = seconds.max() - multiplying.max()
    return max(0.0, late) / wire


def exposed_text(share: float | None) -> str:
    """Return what follows the count of words; nothing if the share is not known."""
    return "" if share is None else f"; {100 * share:.0f} % of their time between nodes is not behind multiplies"

"""Prove, on all ranks together, that a schedule is right before it runs."""

from __future__ import annotations

import numpy as np

from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.verify.proof import conclude, nothing
from rma_mm.schedule.verify.rank_evidence import evidence
from rma_mm.windows.waiting import reduced

REMEMBERED = 4096  # redistributions of a mesh that need no second proof


def prove(mesh: Mesh, schedule: Schedule, what: str) -> None:
    """Show with all ranks that the schedule is right (`schedule.verify.proof`). Collective; raises ScheduleError."""
    brought = nothing()
    with agreed(mesh.comm, what):
        if mesh.is_member:
            brought = evidence(schedule, mesh.rank)
    sums, latest = np.array(brought.sums, np.uint64), np.array(brought.latest, np.int64)
    reduced(mesh.comm, sums, "SUM")
    reduced(mesh.comm, latest, "MAX")
    conclude(schedule, sums.tolist(), latest.tolist())


def prove_once(mesh: Mesh, schedule: Schedule, what: str, key: object) -> None:
    """Prove a schedule as `prove` does, but each only once; `key`, the same on all ranks, tells them apart."""
    if key in mesh.proved:
        return
    prove(mesh, schedule, what)
    if len(mesh.proved) >= REMEMBERED:
        mesh.proved.clear()
    mesh.proved.add(key)

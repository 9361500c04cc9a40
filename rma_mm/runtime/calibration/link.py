"""Does the network still have the bandwidth that was measured? Jobs with the same ranks may run on another one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from rma_mm.policy.model.machine import Machine
from rma_mm.runtime.calibration.site import Site
from rma_mm.windows.waiting import barrier, reduced, wait

if TYPE_CHECKING:
    from mpi4py import MPI

SECONDS, LEAST, MOST = 0.02, 2**16, 2**23
"""Seconds that a transfer should last; bytes that it has at least and at most."""
TIMES = 6
"""Transfers; the first uses up what a link lets through at once. Others who are at work here only make them longer."""
CHANGED = 3.0  # the ratio of measured to predicted seconds, or its inverse, from which a link counts as changed


def has_changed(comm: MPI.Intracomm, site: Site, machine: Machine) -> bool:
    """Return whether transfers between nodes take much longer, or less, than the machine says. Collective."""
    cost, groups = machine.cost("between", "shift"), site.groups("between")
    nbytes = int(min(MOST, max(LEAST, SECONDS / max(cost.beta, 1e-12))))
    group = next((group for group in groups if site.rank in group), ())
    sent, received = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    own, took = comm.Dup(), np.zeros(TIMES)
    for at in range(TIMES):
        barrier(own)
        begin = time.perf_counter()
        if group:
            me = group.index(site.rank)
            arriving, leaving = own.Irecv(received, group[me - 1]), own.Isend(sent, group[(me + 1) % len(group)])
            wait(arriving)
            wait(leaving)
        took[at] = time.perf_counter() - begin
    reduced(own, took, "MAX")
    own.Free()
    ranks = {rank: 1.0 for each in groups for rank in each}
    transfers, volume = site.wire_load(ranks, ranks)
    usual = cost.seconds(volume * nbytes, transfers)
    return bool(took[1:].min() > CHANGED * usual or np.median(took[1:]) < usual / CHANGED)

"""Measure the speeds of ranks while all of them multiply; their shares of a product follow these."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from rma_mm.geometry.shares import relative
from rma_mm.kernels.choice.speed import multiplies_a_second
from rma_mm.runtime.calibration.site import Site
from rma_mm.windows.waiting import barrier, reduced

if TYPE_CHECKING:
    from mpi4py import MPI

SCATTER = 0.1  # largest difference between two rounds, for any rank, at which their speeds are trusted
ROUNDS = 5  # rounds at most
SPINS, SPIN, ENOUGH = 6, 0.01, 0.75
"""Times and seconds for which ranks spin to see the processors they get; the share from which they have all."""
Speeds = tuple[float, ...]


def with_processors(comm: MPI.Intracomm, site: Site) -> Site:
    """Return the site with as many cores a host as its ranks get at once, where that is fewer. Collective.

    Hosts may have less than the system shows: containers and virtual machines share processors with others.
    """
    hosts, got = np.array(site.host_of), np.zeros((SPINS, comm.size))
    for at in range(SPINS):
        barrier(comm)
        begin, before = time.perf_counter(), time.process_time()
        while time.perf_counter() - begin < SPIN:
            pass
        got[at, comm.rank] = (time.process_time() - before) / SPIN
    reduced(comm, got, "SUM")
    most = [float(got[:, hosts == host].sum(axis=1).max()) for host in np.unique(hosts)]
    wanted = [min(site.slots, int((hosts == host).sum())) for host in np.unique(hosts)]
    if all(found >= ENOUGH * ranks for found, ranks in zip(most, wanted, strict=True)):
        return site
    return replace(site, cores=site.threads * max(1, round(min(most))))


def round_of(comm: MPI.Intracomm, site: Site) -> Speeds:
    """Measure the speed of each rank while all multiply. Collective.

    Of ranks that share processors the mean: who of them has one at the moment says nothing of the next. Where all do,
    nothing has to be measured.
    """
    if len(set(site.pool_of)) == 1:
        return (1.0,) * comm.size
    barrier(comm)
    measured = comm.allgather(multiplies_a_second(site.threads))
    pools = defaultdict(list)
    for pool, speed in zip(site.pool_of, measured, strict=True):
        pools[pool].append(speed)
    return tuple(fmean(pools[pool]) for pool in site.pool_of)


def steady_speeds(rounds: Sequence[Speeds]) -> Speeds | None:
    """Speeds over their mean, of two rounds that agree on each rank; none where ranks hardly differ.

    None if no two rounds agree: then they are not to be believed.
    """
    for one, other in combinations(rounds, 2):
        if all(abs(x - y) <= SCATTER * max(x, y) for x, y in zip(one, other, strict=True)):
            return _mean(one, other)
    return None


def _mean(one: Sequence[float], other: Sequence[float]) -> Speeds:
    """Return the mean of two rounds, over that of all ranks; none where ranks hardly differ."""
    found = relative([(x + y) / 2 for x, y in zip(one, other, strict=True)])
    return tuple(round(speed, 3) for speed in found)


def averaged(comm: MPI.Intracomm, site: Site, kept: Speeds) -> Speeds:
    """Return an earlier job's speeds, averaged with those of now: a passing slowness fades. Collective.

    None where they then hardly differ.
    """
    now = round_of(comm, site)
    usual = fmean(now)
    return _mean(kept, [speed / usual for speed in now])


def measured(comm: MPI.Intracomm, site: Site, first: Speeds) -> Speeds | None:
    """`steady_speeds`, after a first round some time ago and as many more as it takes, up to ROUNDS. Collective."""
    rounds = [first]
    while len(rounds) < ROUNDS and (len(rounds) == 1 or steady_speeds(rounds) is None):
        rounds.append(round_of(comm, site))
    return steady_speeds(rounds)

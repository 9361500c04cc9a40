"""How fast ranks multiply while all of them do: what their shares of a product are made by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

from rma_mm.geometry.shares import relative
from rma_mm.kernels.choice.speed import multiplies_a_second
from rma_mm.runtime.calibration.site import Site
from rma_mm.windows.waiting import barrier

if TYPE_CHECKING:
    from mpi4py import MPI

SCATTER = 0.1
"""How far two rounds may be apart, of any rank, for their speeds to be believed."""
ROUNDS = 5
"""Rounds at most."""
Speeds = tuple[float, ...]


def round_of(comm: MPI.Intracomm, site: Site) -> Speeds:
    """How fast each rank multiplies, all at once. Collective.

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


def settled(rounds: Sequence[Speeds]) -> Speeds | None:
    """Speeds over their mean, of two rounds that agree on each rank; none where ranks hardly differ.

    None where no two rounds agree: then they are not to be believed.
    """
    for one, other in combinations(rounds, 2):
        if all(abs(x - y) <= SCATTER * max(x, y) for x, y in zip(one, other, strict=True)):
            found = relative([(x + y) / 2 for x, y in zip(one, other, strict=True)])
            return tuple(round(speed, 3) for speed in found)
    return None


def measured(comm: MPI.Intracomm, site: Site, first: Speeds) -> Speeds | None:
    """`settled`, after a first round some time ago and as many more as it takes, up to ROUNDS. Collective."""
    rounds = [first]
    while len(rounds) < ROUNDS and (len(rounds) == 1 or settled(rounds) is None):
        rounds.append(round_of(comm, site))
    return settled(rounds)

"""A rank that becomes slow on real ranks: products that are repeated follow with its share, and come back."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import rma_mm
from rma_mm.geometry.shares import relative
from rma_mm.policy.model.machine import COLLECTIVES, FLAVOURS, ONE_SIDED, Cost, Kernel, Machine
from rma_mm.runtime.calibration.lookup import VARIABLE
from rma_mm.runtime.products import prices
from rma_mm.runtime.products.matmul import PlanCache
from rma_mm.runtime.watching import slowness
from rma_mm.runtime.watching.slowness import SEEN
from tests.launch import parallel
from tests.thorough import thorough

N = 240
USUAL = 0.06
"""Seconds in which a rank sleeps for a whole product's work."""
MOST = 120
"""Products in which a share follows, or comes back."""


def multiplying() -> Machine:
    """A machine on which multiplies take most of the time."""
    moves = dict.fromkeys([*(f"{x}.{move}" for x in FLAVOURS for move in ONE_SIDED), *COLLECTIVES], Cost(1e-5, 1e-9))
    costs = {"own": {"copy": Cost(1e-9, 1e-15)}, "node": moves, "between": moves}
    kernels = {"float64 blas": Kernel(1e-9, 1e-8)}
    return Machine("multiplying", costs, kernels, 64, operation=0, meeting=1e-9)


class Slowed:
    """A rank whose multiplies take so many seconds of a whole product's work each, by sleeping."""

    def __init__(self, mesh: rma_mm.Mesh) -> None:
        self.seconds, self.tally, self.during = USUAL, mesh.metrics.tally, mesh.progress.during
        self.share, self.calls, self.of_last = 1 / mesh.size, 0, 1
        mesh.progress.during = self

    def __call__(self, work) -> None:
        self.during(work)
        self.calls += 1
        time.sleep(self.seconds * self.share / self.of_last)

    def product(self, run):
        """Run a product; its multiplies sleep by the share that this rank had of the last."""
        before, self.calls = self.tally.work, 0
        found = run()
        self.share, self.of_last = (self.tally.work - before) / N**3, self.calls
        return found


@contextmanager
def unhindered(comm, measured: bool) -> Iterator[rma_mm.Mesh]:
    """A mesh of that machine; only where that was `measured` products can be late."""
    path = Path(tempfile.gettempdir()) / f"machine.{comm.bcast(os.getpid())}.json"
    if comm.rank == 0:
        path.write_text(json.dumps(replace(multiplying(), measured=measured).as_json()))
    comm.barrier()
    with mock.patch.dict(os.environ, {VARIABLE: str(path)}), rma_mm.Mesh((3,), comm) as mesh:
        yield mesh
    if comm.rank == 0:
        path.unlink()


@thorough
@parallel(ranks=(3,), env=("node",))
def test_its_share_shrinks_while_it_is_slow(comm):
    """Of a product whose placements are open; when it is as fast as before, the first plan goes on."""
    a, b = (np.arange(float(N * N)).reshape(N, N) % n - 3 for n in (7, 5))
    lasting = mock.patch.object(slowness, "LASTING", 0.15)
    with lasting, unhindered(comm, measured=False) as mesh:
        rank, relief, plans, done = Slowed(mesh), mesh.metrics.relief, PlanCache.of(mesh).plans, []

        def repeat(times: float, products: int, until: int | None = None) -> tuple[list[float], object]:
            """Products in which rank 1 is so slow, up to one that is done with its share shrunk by `until` steps."""
            rank.seconds = times * USUAL if comm.rank == 1 else USUAL
            for _ in range(products):
                steps = relief.steps
                C = rank.product(lambda: rma_mm.matmul(a, b, mesh))
                assert comm.allgather(steps) == [(0, steps[1], 0)] * 3
                done.append(next(reversed(plans.values())))
                if steps[1] == until:
                    break
            assert until in (None, steps[1])
            assert np.array_equal(C.to_numpy(), a @ b)
            return comm.allgather(rank.share), done[-1]

        before = repeat(1.0, SEEN + 5)
        shares, slow = repeat(2.2, MOST, until=3)
        assert shares[1] < 0.6 * shares[0] and shares[0] == shares[2]
        assert slow is not before[1] and repeat(1.0, MOST, until=0) == before
        assert mesh.metrics.tally.plan_changes == sum(one is not other for one, other in pairwise(done))
        assert len(plans) == len(set(done)) == 4
        named, follows = mesh.fallbacks
        assert named.startswith("rank 1 on host") and "its multiplies take" in named
        assert follows.startswith("rank 1 on host") and "its share of the work shrinks" in follows


@parallel(ranks=(3,), env=("node", "nolocal"))
def test_what_is_placed_stays_and_who_multiplies_follows(comm):
    """Plans on given placements go over to rows that need not share out work by them, where that pays; and back."""
    a, b = (np.arange(400.0 * 400).reshape(400, 400) % n - 3 for n in (7, 5))
    with unhindered(comm, measured=True) as mesh:
        A, B = (rma_mm.DistMatrix.from_numpy(x, mesh, "i, None") for x in (a, b))
        free, ordered, kept = plans = [
            rma_mm.plan(A, B, mesh, layout="i, None", deterministic=order) for order in (False, True, False)
        ]
        kept.adapt = False
        before = [(plan.algorithm, plan.layouts) for plan in plans]
        for steps, changes in (((0, 0, 0), 0), ((0, 3, 0), 1), ((0, 0, 0), 2)):
            mesh.metrics.relief.steps = steps  # as if rank 1 had become slow, and fast again
            for plan in plans:
                for _ in range(2):
                    C = plan.execute(A, B)
                assert np.array_equal(C.to_numpy(), a @ b)
            assert (free.algorithm == before[0][0]) == (not any(steps))
            assert "ranks have become slow" in free.why or not any(steps)
            assert mesh.metrics.tally.plan_changes == changes
            assert [(plan.algorithm, plan.layouts) for plan in (ordered, kept)] == before[1:]
            assert free.layouts == before[0][1]
            again = rma_mm.plan(A, B, mesh, layout="i, None", deterministic=True)
            # whose bits are those of before
            assert again.choice.request.cost_model == ordered.choice.request.cost_model
        assert len(mesh.fallbacks) == 1 and "rank 1 on host" in mesh.fallbacks[0]


def test_the_scatter_of_speeds_does_not_hide_a_slow_rank():
    """Speeds that count as equal are equal, of which a slow rank has less; else its own is less."""
    assert prices._with(None, (1.0, 1.1, 0.95), (1.0, 0.8, 1.0)).speeds_of(3) == relative((1.0, 0.8, 1.0)) != ()
    assert prices._with(None, (4.0, 2.0, 2.0), (1.0, 0.5, 1.0)).speeds_of(3) == pytest.approx(relative((4.0, 1.0, 2.0)))
    assert prices._with(None, None, ()).speeds == ()

"""Products that take longer than predicted, on real ranks: they change to groups, say so, and stay right."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

import rma_mm
from rma_mm.policy.model.machine import FLAVOURS, ONE_SIDED, TOGETHER, Cost, Kernel, Machine
from rma_mm.policy.planner.adaptation import LOOKS
from rma_mm.runtime.calibration.lookup import VARIABLE
from rma_mm.runtime.products.plan_cache import PlanCache
from tests.launch import parallel


def too_fast() -> Machine:
    """A machine that no product can keep up with, on which pulls are better than what groups do."""
    pulls = {f"{flavour}.{move}": Cost(1e-9, 1e-15) for flavour in FLAVOURS for move in ONE_SIDED}
    moves = pulls | dict.fromkeys(TOGETHER, Cost(1e-6, 1e-10))
    costs = {"own": {"copy": Cost(1e-9, 1e-15)}, "node": moves, "between": moves}
    kernels = {"float64 blas": Kernel(1e-9, 1e-18)}
    return Machine("too fast", costs, kernels, 64, operation=0, meeting=1e-9, piece=0, packed=0, measured=True)


@parallel(ranks=(2, 4, 6), env=("node",))
def test_a_late_product_changes_to_groups(comm):
    path = Path(tempfile.gettempdir()) / f"machine.{comm.bcast(os.getpid())}.json"
    if comm.rank == 0:
        path.write_text(json.dumps(too_fast().as_json()))
    a, b = (np.arange(48.0 * 48).reshape(48, 48) % n - 3 for n in (7, 5))
    grid = (2, comm.size // 2)
    with mock.patch.dict(os.environ, {VARIABLE: str(path)}), rma_mm.Mesh(grid, comm, window="allocated") as mesh:
        A, B = (rma_mm.DistMatrix.from_numpy(x, mesh, "i, j") for x in (a, b))
        kinds, algorithms = [], []
        for _ in range(3 * LOOKS + 9):
            C = rma_mm.matmul(A, B, mesh, layout="i, j")
            assert np.array_equal(C.to_numpy(), a @ b)
            plan = next(iter(PlanCache.of(mesh).plans.values()))
            kinds.append(plan.settled.chosen.kind)
            algorithms.append(plan.algorithm)
        changes = sum(one != other for one, other in pairwise(algorithms))
        assert kinds[0] == "one-sided"
        assert "two-sided" in kinds
        assert 1 <= changes <= 2
        assert len(mesh.fallbacks) == changes
        assert "times the seconds predicted" in mesh.fallbacks[0]
        assert comm.allgather(algorithms) == [algorithms] * comm.size
        assert plan.predicted_seconds > 0
    if comm.rank == 0:
        path.unlink()


@parallel(ranks=(2, 4), env=("node",))
def test_nothing_changes_where_nothing_was_measured(comm):
    with rma_mm.Mesh((2, comm.size // 2), comm, window="allocated") as mesh:
        A = rma_mm.DistMatrix.from_numpy(np.eye(32), mesh, "i, j")
        for _ in range(3 * LOOKS):
            rma_mm.matmul(A, A, mesh)
        assert not mesh.fallbacks
        assert next(iter(PlanCache.of(mesh).plans.values())).predicted_seconds is None

"""Products that take longer than predicted, on real ranks: they change to groups, say so, and stay right."""

from __future__ import annotations

import json
import os
import tempfile
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
from rma_mm.errors import DisagreementError, WindowError
from rma_mm.policy.model.machine import COLLECTIVES, FLAVOURS, ONE_SIDED, Cost, Kernel, Machine
from rma_mm.policy.planner import adaptation
from rma_mm.policy.planner.adaptation import LATE, LOOKS
from rma_mm.runtime.calibration.lookup import VARIABLE
from rma_mm.runtime.products import plan as plans
from rma_mm.runtime.products.adaptation import Adaptation, late_note
from rma_mm.runtime.products.matmul import PlanCache
from rma_mm.runtime.ranks.metrics import ProductWatch
from tests.launch import parallel


def too_fast() -> Machine:
    """A machine that no product can keep up with, on which pulls are better than what groups do."""
    pulls = {f"{flavour}.{move}": Cost(1e-9, 1e-15) for flavour in FLAVOURS for move in ONE_SIDED}
    moves = pulls | dict.fromkeys(COLLECTIVES, Cost(1e-6, 1e-10))
    costs = {"own": {"copy": Cost(1e-9, 1e-15)}, "node": moves, "between": moves}
    kernels = {"float64 blas": Kernel(1e-9, 1e-18)}
    return Machine("too fast", costs, kernels, 64, operation=0, meeting=1e-9, piece=0, packed=0, measured=True)


@contextmanager
def late(comm) -> Iterator[rma_mm.Mesh]:
    """A mesh on which every product is late, even one of 40 microseconds."""
    path = Path(tempfile.gettempdir()) / f"machine.{comm.bcast(os.getpid())}.json"
    if comm.rank == 0:
        path.write_text(json.dumps(too_fast().as_json()))
    grid = (2, comm.size // 2)
    found = mock.patch.dict(os.environ, {VARIABLE: str(path)})
    with found, mock.patch.object(adaptation, "SLACK", 0), rma_mm.Mesh(grid, comm, window="allocated") as mesh:
        yield mesh
    if comm.rank == 0:
        path.unlink()


@parallel(ranks=(2, 4, 6), env=("node",))
def test_a_late_product_changes_to_groups(comm):
    a, b = (np.arange(48.0 * 48).reshape(48, 48) % n - 3 for n in (7, 5))
    with late(comm) as mesh:
        A, B = (rma_mm.DistMatrix.from_numpy(x, mesh, "i, j") for x in (a, b))
        kinds, algorithms = [], []
        for _ in range(3 * LOOKS + 9):
            C = rma_mm.matmul(A, B, mesh, layout="i, j")
            assert np.array_equal(C.to_numpy(), a @ b)
            plan = next(iter(PlanCache.of(mesh).plans.values()))
            kinds.append(plan.choice.chosen.kind)
            algorithms.append(plan.algorithm)
        changes = sum(one != other for one, other in pairwise(algorithms))
        assert kinds[0] == "one-sided"
        assert "two-sided" in kinds
        assert 1 <= changes <= 2
        assert len(mesh.fallbacks) == changes
        assert "times the seconds predicted" in mesh.fallbacks[0]
        assert comm.allgather(algorithms) == [algorithms] * comm.size
        assert plan.predicted_seconds > 0


@parallel(ranks=(4,), env=("node",))
def test_advice_is_given_where_seconds_are_at_stake(comm):
    """Never advise an algorithm that multiplies all of a symmetric C."""
    a = np.arange(48.0 * 48).reshape(48, 48) % 7 - 3
    with late(comm) as mesh:
        A = rma_mm.DistMatrix.from_numpy(a, mesh, "i, j")
        plan = rma_mm.plan(A, A, mesh, layout="i, j")
        predicted = plan.predicted_seconds
        two_sided = [each.algorithm.name for each in plan.choice.candidates if each.kind == "two-sided"]
        assert late_note(plan.choice, [0.01 + predicted, 3.0]) == ""
        note = late_note(plan.choice, [2.0, 3.0])
        assert f"try {two_sided[0]}" in note and "times the seconds predicted" in note
        assert late_note(plan.choice, [LATE * predicted]) == ""
        half = rma_mm.plan(A, A, mesh, layout="i, j", transpose_b=True, symmetric=True).choice
        halves = [
            each for each in half.candidates if each.algorithm.half and each.kind == "one-sided" and not each.rejected
        ]
        assert late_note(replace(half, chosen=halves[0]), [2.0]) == ""


@parallel(ranks=(4,), env=("node",))
def test_plans_and_chains_change_over_where_they_may(comm):
    """On the same placements; what they tell is of what is in force. With adapt=False they stay as they are."""
    a, b = (np.arange(48.0 * 48).reshape(48, 48) % n - 3 for n in (7, 5))
    with late(comm) as mesh:
        A, B = (rma_mm.DistMatrix.from_numpy(x, mesh, "i, j") for x in (a, b))
        arrays, placed, kept, named, poor = plans = [
            rma_mm.plan(a, b, mesh, layout="i, j"),
            *(rma_mm.plan(A, B, mesh, layout="i, j", algorithm=name) for name in ("auto", "auto", "stationary_c")),
            rma_mm.plan(A, B, mesh, layout="i, j", memory_limit=rma_mm.plan(A, B, mesh, layout="i, j").peak_bytes),
        ]
        steps, options = ["C = A @ B", "D = C @ A"], {"A": A, "B": B, "layouts": {"C": "i, j", "D": "i, j"}}
        chain, limited = (rma_mm.plan_chain(steps, mesh, memory_limit=limit, **options) for limit in (None, 10**6))
        taken = [plan.peak_bytes for plan in limited.plans]
        assert [plan.options.memory_limit for plan in limited.plans] == taken
        kept.adapt = False
        before = [(plan.layouts, plan.algorithm) for plan in plans]
        seen = {plan: [] for plan in [*plans, *chain.plans, *limited.plans]}
        for _ in range(2 * LOOKS + 6):
            for plan in plans:
                operands = (a, b) if plan is arrays else (A, B)
                assert np.array_equal(plan.execute(*operands).to_numpy(), a @ b)
            for each in (chain, limited):
                assert np.array_equal(each.execute(A=A, B=B)["D"].to_numpy(), a @ b @ a)
            assert all(plan.peak_bytes <= most for plan, most in zip(limited.plans, taken, strict=True))
            for plan, names in seen.items():
                names.append(plan.algorithm)
        assert [plan.layouts for plan in plans] == [layouts for layouts, _ in before]
        changes = {plan: sum(one != other for one, other in pairwise(names)) for plan, names in seen.items()}
        assert all(1 <= changes[plan] <= 2 for plan in (arrays, placed, *chain.plans)), changes
        assert changes[kept] == changes[named] == 0 and poor.peak_bytes <= poor.options.memory_limit
        assert sum("times the seconds predicted" in note for note in mesh.fallbacks) == sum(changes.values())
        assert mesh.metrics.tally.plan_changes == sum(changes.values())
        for plan, text in ((placed, placed.explain()), *((each, str(chain)) for each in chain.plans)):
            assert plan.algorithm in text and plan.choice.chosen.algorithm.name == plan.algorithm
        placed.adapt = comm.rank == 0
        with pytest.raises(DisagreementError, match="adapt: "):
            placed.execute(A, B)


@parallel(ranks=(4,), env=("node",))
def test_deterministic_products_keep_their_plans_and_bits(comm):
    """However late they are, and whichever rank becomes slow."""
    a, b = np.random.default_rng(0).standard_normal((2, 150, 150))
    with late(comm) as mesh:
        A, B = (rma_mm.DistMatrix.from_numpy(x, mesh, "i, j") for x in (a, b))
        plan, seen = rma_mm.plan(A, B, mesh, layout="i, j", deterministic=True), set()
        for n in range(2 * LOOKS + 3):
            mesh.metrics.relief.steps = (0, 3 * (n > LOOKS), 0, 0)
            made = plan.execute(A, B), rma_mm.matmul(A, B, mesh, deterministic=True)
            seen.add((plan.algorithm, str(made[1].layout), *(C.to_numpy().tobytes() for C in made)))
        assert len(seen) == 1 and not mesh.fallbacks


@parallel(ranks=(2,), env=("nolocal",))
def test_a_slow_rank_is_not_the_fault_of_transfers(comm):
    """Products in which a rank multiplied slowly say nothing of the plan."""
    with late(comm) as mesh:
        A = rma_mm.DistMatrix.from_numpy(np.eye(48), mesh, "i, j")
        plan, watch = rma_mm.plan(A, A, mesh, layout="i, j"), ProductWatch(mesh.metrics, "these")
        adaptation, watch.last_seconds = Adaptation(mesh, plan.choice), 1.0
        for watch.exchanges, watch.was_slow in enumerate([True] * 3 * LOOKS + [False] * LOOKS, 1):
            assert adaptation.next(plan.choice, watch) is None
        watch.exchanges += 1
        assert adaptation.next(plan.choice, watch).chosen.kind == "two-sided"


@parallel(ranks=(2,), env=("nolocal",))
def test_after_calls_that_fail_ranks_still_agree_on_when_to_change(comm):
    """One rank was in another call before each execution; and where the other plan cannot be made, this one goes on."""
    a = np.arange(48.0 * 48).reshape(48, 48) % 7
    with late(comm) as mesh:
        A = rma_mm.DistMatrix.from_numpy(a, mesh, "i, j")
        whole, hindered = (rma_mm.plan(A, A, mesh, layout="i, j") for _ in range(2))
        for _ in range(2 * LOOKS + 3):
            with pytest.raises(DisagreementError, match="different calls"):
                rma_mm.matmul(A, A, mesh) if comm.rank else whole.execute(A, A)
            assert np.array_equal(whole.execute(A, A).to_numpy(), a @ a)
        assert "times the seconds predicted" in mesh.fallbacks[0]
        made, first = plans.Prepared, hindered.algorithm
        for _ in range(9 * LOOKS):  # products in which a rank was slow do not count
            if not hindered.adapt:
                break
            failing = [WindowError("no memory"), *[mock.DEFAULT] * 9]
            with mock.patch.object(plans, "Prepared", wraps=made, side_effect=failing):
                assert np.array_equal(hindered.execute(A, A).to_numpy(), a @ a)
        assert hindered.algorithm == first and not hindered.adapt
        assert f"no memory; {first} goes on" in mesh.fallbacks[-1]


@parallel(ranks=(2, 4), env=("node",))
def test_nothing_changes_where_nothing_was_measured(comm):
    with rma_mm.Mesh((2, comm.size // 2), comm, window="allocated") as mesh:
        A = rma_mm.DistMatrix.from_numpy(np.eye(32), mesh, "i, j")
        for _ in range(3 * LOOKS):
            rma_mm.matmul(A, A, mesh)
        assert not mesh.fallbacks
        assert next(iter(PlanCache.of(mesh).plans.values())).predicted_seconds is None

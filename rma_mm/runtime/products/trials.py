"""Whole products that a calibration is tried on, and its figures put right by (`policy.model.fit`)."""

from __future__ import annotations

import time
from contextlib import ExitStack
from math import ceil

import numpy as np

from rma_mm.errors import AlgorithmError
from rma_mm.geometry.mesh import grids
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.policy.model.fit import Factors, TimedProduct, fit_corrections, scaled
from rma_mm.policy.model.machine import Machine
from rma_mm.policy.model.volumes import workload_of
from rma_mm.policy.planner.candidates import placed_problem
from rma_mm.policy.planner.preference import AUTO
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.products.choosing import request_of
from rma_mm.runtime.products.make_plan import make_plan
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows.waiting import barrier, reduced

SHAPES = ((1000, 900, 800), (330, 330, 330), (280, 360, 5000), (1700, 1300, 90), (2200, 260, 480))
"""m, n, k, as far as there is time."""
ALGORITHMS = (
    "stationary_c", "stationary_a", "srumma", "summa_c", "cannon", "row_parallel", "gemm_scatter:pull", "cosma",
)
"""Algorithms that together move operands in every way there is."""
ROUNDS, WARM = 8, 3  # number of timed repetitions, and of those that warm up
SAMPLE, MOST = 5e-3, 20
"""Seconds that a sample takes at least: so many products, but no more than MOST, are timed together."""


def tried(mesh: Mesh, machine: Machine, seconds: float) -> tuple[Machine, Factors]:
    """Return the machine with its figures put right by whole products, and by how much. Collective; alike on all ranks.

    seconds: after which no products of another shape are begun.
    """
    deadline = time.perf_counter() + seconds
    grid = min(grids(mesh.size, 2), key=lambda grid: abs(grid[0] - grid[1]))
    timed: list[TimedProduct] = []
    with Mesh(grid, mesh.comm, threads=mesh.threads) as square:
        for shape in SHAPES:
            timed += _timed(square, machine, shape)
            if mesh.comm.bcast(time.perf_counter() > deadline):
                break
    factors = mesh.comm.bcast(fit_corrections(machine, timed) if mesh.comm.rank == 0 else None)
    return scaled(machine, factors), factors


def _timed(mesh: Mesh, machine: Machine, shape: tuple[int, int, int]) -> list[TimedProduct]:
    """Products of one shape, in turn, so that each finds the caches as another left them."""
    m, n, k = shape
    a, b = (Operand(extent, np.dtype(np.float32)) for extent in ((m, k), (k, n)))
    with ExitStack() as stack:
        plans: list[Plan] = []
        for name in ALGORITHMS:
            try:
                plans.append(make_plan(a, b, mesh, algorithm=name, kernel="blas", prefer=AUTO))
            except AlgorithmError:  # it does not run on this mesh, as all ranks find
                continue
            stack.callback(plans[-1].close)
        operands = [_operands(plan, stack) for plan in plans]
        times, rounds = 1, []
        for _ in range(ROUNDS):
            rounds.append([_seconds(plan, each, times) for plan, each in zip(plans, operands, strict=True)])
            times = min(MOST, ceil(SAMPLE / min(rounds[-1])))
        took = np.quantile(rounds[WARM:], 0.25, axis=0)  # others who are at work here only make it longer
        return [_trial(plan, machine, each) for plan, each in zip(plans, took.tolist(), strict=True)]


def _operands(plan: Plan, stack: ExitStack) -> list[DistMatrix]:
    """A, B and C where the plan wants them."""
    found = []
    for name in "ABC":
        operand = plan.choice.operands[name]
        assert operand.layout is not None
        matrix = DistMatrix.allocated(plan.mesh, operand.shape, operand.dtype, operand.layout)
        matrix.tile.fill(1)
        stack.callback(matrix.close)
        found.append(matrix)
    return found


def _seconds(plan: Plan, operands: list[DistMatrix], times: int) -> float:
    """Return the seconds of a product on the slowest rank, over so many in a row."""
    comm, (a, b, c) = plan.mesh.comm, operands
    barrier(comm)
    begin = time.perf_counter()
    for _ in range(times):
        plan.execute(a, b, out=c)
    took = np.array([(time.perf_counter() - begin) / times])
    reduced(comm, took, "MAX")
    return float(took[0])


def _trial(plan: Plan, machine: Machine, seconds: float) -> TimedProduct:
    mesh, chosen = plan.mesh, plan.choice.chosen
    flavours = tuple((x, mesh.window_flavour) for x in "ABC")
    cost_model = CostModel(machine, plan.spec.accum_dtype.name, plan.kernel, 4, 4, flavours)
    assert chosen.layouts is not None
    problem = placed_problem(request_of(mesh, plan.spec, cost_model), chosen.layouts, chosen.copied)
    return TimedProduct(workload_of(chosen.algorithm, problem, plan.choice.tuning.width), cost_model, seconds)

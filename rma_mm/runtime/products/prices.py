"""Build the cost model of a product on a mesh: the measured machine, and the windows of its transfers.

Where an algorithm is named, nothing is measured for it; what was measured before is used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from rma_mm.algorithms import REGISTERED
from rma_mm.elements.dtypes import accumulator
from rma_mm.elements.semiring import PLUS_TIMES, Semiring, find_semiring
from rma_mm.errors import OptionError, quoted
from rma_mm.flavours import find_flavour
from rma_mm.geometry.shares import relative, speeds_problem
from rma_mm.kernels import choose_kernel
from rma_mm.kernels.choice.choice import priced, work_ahead
from rma_mm.kernels.gemm.form import are_bytes
from rma_mm.kernels.threads import threads_per_rank, using_threads
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.policy.model.machine import TYPICAL, Machine
from rma_mm.policy.planner.candidates import Each, Request, default_mesh, needs_pricing
from rma_mm.policy.planner.preference import preferred
from rma_mm.runtime.calibration import machine_of
from rma_mm.runtime.execution.operands import Operand, Operands
from rma_mm.runtime.ranks.agreement import agree, agreed, distribute_tasks
from rma_mm.runtime.ranks.mesh import Mesh, environment, ranks_beside, window_name
from rma_mm.windows.ranks import node_map
from rma_mm.windows.waiting import largest

MEASURED_FROM = 2**37
"""m·n·k of all that will be multiplied from which measuring the ranks of a node, of about 2 s, pays."""
PRICED_FROM = 2**32  # the same of pricing every algorithm, of some tenths of a second


def cost_model_of(mesh: Mesh, operands: Operands) -> CostModel:
    """Return the cost model of a product whose kernel is chosen.

    Collective; measures the machine if needed. Raises MachineError for an invalid RMA_MM_MACHINE.
    """
    options = operands.options
    dtype, kernel = _multiplied(operands.operand_dtype, operands.accum_dtype), priced(operands.kernel)
    each = zip("ABC", (operands.a, operands.b, operands.c), strict=True)
    flavours = tuple((x, flavour_of(mesh, operand)) for x, operand in each)
    machine = machine_of(
        mesh.comm, mesh.node_of, threads=mesh.threads, dtype=dtype, kernel=kernel,
        may_measure=_may_measure(mesh.size, mesh.node_of, options.algorithm, operands.semiring),
        flavours=tuple(sorted({flavour for _, flavour in flavours})),
    )
    sizes = [operands.dtype(x).itemsize for x in "AB"]
    factors = () if options.deterministic else mesh.metrics.relief.factors  # other shares may give other bits
    machine = _with(machine, mesh.speeds, factors)
    reading = max(operands.a.reading, operands.b.reading)
    return CostModel(machine, dtype, kernel, max(sizes), operands.accum_dtype.itemsize, flavours, reading)


def _multiplied(operands: np.dtype[Any] | None, summed: np.dtype[Any]) -> str:
    """Return the type whose local products are priced: of operands that kernels take as they are, else of the sums."""
    if operands is None:
        return summed.name
    return operands.name if accumulator(operands) == summed or are_bytes(operands, operands, summed) else summed.name


def _may_measure(size: int, node_of: Sequence[int], algorithm: str, semiring: Semiring) -> bool:
    """True if ranks are measured for a product, where they were not yet."""
    pays = len(set(node_of)) > 1 or work_ahead() >= MEASURED_FROM
    return algorithm == "auto" and size > 1 and semiring.is_arithmetic and pays


def _with(machine: Machine | None, speeds: tuple[float, ...] | None, factors: tuple[float, ...] = ()) -> Machine:
    """Return the machine, or a typical one, with the ranks' speeds and slowdowns.

    factors: of each rank of the grid, what is left of its speed; empty if all of it is.
    """
    machine = machine or TYPICAL
    if speeds is not None:
        machine = replace(machine, speeds=relative(speeds))
    if factors:  # of speeds as slices are cut by them: what they scatter by must not hide that a rank is slow
        usual = machine.speeds_of(len(factors)) or (1.0,) * len(factors)
        machine = replace(machine, speeds=tuple(speed * left for speed, left in zip(usual, factors, strict=True)))
    return machine


def best_grid(
    comm: MPI.Intracomm, shape: tuple[int, int, int], dtype: DTypeLike, algorithm: str = "auto",
    threads: int | None = None, prefer: str | None = None, speeds: tuple[float, ...] | None = None,
    window: str | None = None, kernel: str = "auto", semiring: str = PLUS_TIMES.name,
) -> tuple[int, ...]:
    """Return the grid of all ranks on which a product of two matrices of this type is fastest. Collective.

    dtype: of both operands. speeds: of all ranks, where they are not those of the machine. window: as of `Mesh`.
    kernel, semiring: as of `make_plan`. Measures the machine where that is still to be done, no algorithm is named, and
    the semiring is that of numbers. Ranks share the pricing of candidates, and remember it for a plan on that grid.
    Raises AlgorithmError, MachineError, OptionError, WindowError.
    """
    agree(comm, "mesh", environment() | {"registered": REGISTERED})
    node_of = node_map(comm)
    threads = threads_per_rank(ranks_beside(comm, node_of), threads)
    dtype = np.dtype(dtype)
    summed = accumulator(dtype)
    with agreed(
        comm, "mesh", shape=shape, algorithm=algorithm, speeds=speeds, window=window, kernel=kernel, semiring=semiring
    ):
        with using_threads(threads):
            ring = find_semiring(semiring)
            kernel = priced(choose_kernel(kernel, summed, *shape, ring, dtype))
        if speeds is not None and (wrong := speeds_problem(speeds, comm.size)):
            raise OptionError(f"speeds: got {quoted(speeds)}; {wrong}")
        flavour = find_flavour(window_name(window))
        prefer = prefer or preferred(os.environ)
    kernel = comm.bcast(kernel)
    machine = machine_of(
        comm, node_of, threads=threads, dtype=dtype.name, kernel=kernel,
        may_measure=_may_measure(comm.size, node_of, algorithm, ring), flavours=(flavour.name,),
    )
    flavours = tuple((x, flavour.name) for x in "ABC")
    cost_model = CostModel(_with(machine, speeds), dtype.name, kernel, dtype.itemsize, summed.itemsize, flavours)
    ours = flavour.loads_on_node
    return default_mesh(
        comm.size, shape, node_of, partial(priced_by, comm), algorithm=algorithm, cost_model=cost_model, prefer=prefer,
        in_place="AB" * ours, fetches_together=ours and len(set(node_of)) > 1, is_brief=is_brief(),
    )


def is_brief() -> bool:
    """True if pricing every algorithm takes longer than all that will be multiplied."""
    return work_ahead() < PRICED_FROM


def priced_by(comm: MPI.Intracomm, request: Request) -> Each | None:
    """Return how candidates are priced: distributed over the ranks, or None if all ranks remember the result.

    Collective. So all ranks choose by the same figures, also where their processors round differently.
    """
    if comm.size == 1 or not any(largest(comm, [needs_pricing(request)])):
        return None
    return partial(distribute_tasks, comm, "plan")


def flavour_of(mesh: Mesh, operand: Operand) -> str:
    """Return the windows that transfers of an operand go through: a caller's own array is exposed as it lies."""
    if operand.window and operand.in_place is not None:
        return operand.window
    flavour = mesh.granted(mesh.flavour)
    is_own = operand.in_place is False and not operand.chunks and flavour.loads_on_node
    return (mesh.granted(flavour.for_arrays) if is_own else flavour).name


def is_known(cost_model: CostModel, operands: Operands) -> bool:
    """True if this cost model's seconds are those of this machine."""
    machine = cost_model.machine
    return machine.measured and operands.semiring.is_arithmetic and machine.has(cost_model.dtype, cost_model.kernel)

"""Matrices moved from one placement to another, and to NumPy, through schedules of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import accumulator
from rma_mm.errors import MeshError
from rma_mm.geometry.layout import Layout, everywhere
from rma_mm.kernels.elementwise import cast
from rma_mm.runtime.execution.addressing import Memory
from rma_mm.runtime.execution.binding import Scalars
from rma_mm.runtime.execution.executor import Executable
from rma_mm.runtime.execution.proving import prove_once
from rma_mm.runtime.matrices.arguments import pinned
from rma_mm.runtime.matrices.stored import Stored
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.verification.checked_product import checked_move
from rma_mm.schedule.lowering.redistribute import redistribution
from rma_mm.schedule.schedule import STAGE

RELAY = 2**28
"""Bytes of one message to ranks beyond the grid."""


def move(source: Stored, layout: Layout, result: NDArray[Any], block: Block | None, flipped: bool) -> None:
    """Fill `result`, this rank's part of `source` as placed by `layout` (on `block`, if others read it).

    Collective. The caller has just agreed: what owners stored before that is there for every reader.
    """
    mesh = source.mesh
    schedule = redistribution(mesh.shape, source.shape, source.layout, layout)
    prove_once(mesh, schedule, "redistribute", (source.shape, source.layout, layout))
    homes = {"A": source.block} | ({"C": block} if block else {})
    stage = None
    if "A" + STAGE in schedule.homes:
        stage = staged(source)
        homes["A" + STAGE] = stage.block
    # a sum of 16-bit floats arrives in float32 and is rounded once
    arrived = result if stage is None or stage.dtype == result.dtype else np.empty(result.shape, stage.dtype)
    flips = frozenset(name for name, is_so in (("A", source.flipped), ("C", flipped)) if is_so)
    executable = Executable(schedule, mesh, Memory(homes, arrived, transposed=flips), Scalars())
    with checked_move(source, layout, result):
        executable.run()
        executable.close()
        if arrived is not result:
            cast(arrived, result)


def staged(source: Stored) -> Stored:
    """Memory for a partial matrix, summed: each element once, in the type it is summed in. Collective."""
    mesh = source.mesh
    return Stored.allocated(mesh, source.shape, accumulator(source.dtype), source.layout.single(mesh.shape))


def collected(source: Stored, root: int | None) -> NDArray[Any] | None:
    """The whole matrix on every rank of the communicator, or on `root`. Collective."""
    mesh = source.mesh
    with agreed(mesh.comm, "to_numpy", root=root) as facts:
        facts["matrix"] = source.facts
        source.block.window.sync()
        if root is not None and not 0 <= root < mesh.size:
            raise MeshError(f"root: got {root}; there are the ranks 0 to {mesh.size - 1}")
    layout = everywhere() if root is None else pinned(mesh, root if root < mesh.shape.size else 0)
    wanted = mesh.is_member and bool(layout.holds(mesh.shape.coords(mesh.rank)))
    whole = np.empty(source.shape if wanted else (0, 0), source.dtype)
    move(source, layout, whole, None, False)
    return _relayed(mesh, whole, source, root)


def _relayed(mesh: Mesh, whole: NDArray[Any], source: Stored, root: int | None) -> NDArray[Any] | None:
    """Hand the collected matrix on to ranks beyond the grid that want it."""
    outside = [rank for rank in range(mesh.shape.size, mesh.size) if root in (None, rank)]
    if mesh.rank in outside:
        whole = np.empty(source.shape, source.dtype)
    raw = whole.reshape(-1).view(np.uint8)
    for rank in outside:
        for start in range(0, source.shape[0] * source.shape[1] * source.dtype.itemsize, RELAY):
            if mesh.rank == 0:
                mesh.comm.Send(raw[start : start + RELAY], rank)
            elif mesh.rank == rank:
                mesh.comm.Recv(raw[start : start + RELAY], 0)
    return whole if root is None or mesh.rank == root else None

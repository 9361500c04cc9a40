"""Matrices moved from one placement to another, and to NumPy, through schedules of their own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import accumulator
from rma_mm.geometry.layout import Layout, everywhere
from rma_mm.runtime.execution.addressing import COPIED, Memory
from rma_mm.runtime.execution.binding import Scalars
from rma_mm.runtime.execution.executor import Executable
from rma_mm.runtime.execution.proving import prove_once
from rma_mm.runtime.execution.unpacking import landing_size
from rma_mm.runtime.matrices.arguments import checked_root, pinned
from rma_mm.runtime.matrices.stored import Shape, Stored
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.verification.checked_product import checked_move
from rma_mm.schedule.lowering.node_crossing import can_share
from rma_mm.schedule.lowering.redistribute import redistribution
from rma_mm.schedule.ops import Accumulate, Copy
from rma_mm.schedule.schedule import STAGE, remembered
from rma_mm.windows import Window

LANDING = f"{COPIED}C"  # the scratch for what does not come straight to its place
BOUND = 8  # sources that are kept bound
STAGED = 2**22
"""Bytes of a matrix up to which ranks of a node that all collect it do so in windows, beside the copy that each gets:
windows on memory of their own take milliseconds to open."""
RELAY = 2**28  # bytes of one message to ranks beyond the grid


def move(source: Stored, layout: Layout, result: NDArray[Any], block: Block | None = None) -> None:
    """Fill `result`, this rank's part of `source` as placed by `layout` (on `block`, if others read it).

    Collective. The caller has just agreed: what owners stored before that is there for every reader.
    """
    redistributions = Redistribution(source.mesh, source.shape, source.dtype, source.layout, layout, result, block)
    redistributions.run(source)
    redistributions.close()


class Redistribution:
    """Matrices of one placement brought to another, again and again, into the same memory: prepared once for each."""

    def __init__(
        self, mesh: Mesh, shape: Shape, dtype: np.dtype[Any], source: Layout, target: Layout, result: NDArray[Any],
        block: Block | None,
    ) -> None:
        """result, block: as of `move`. Collective."""
        self.mesh, self.target, self.result = mesh, target, result
        facts = shape, source, target, block is not None
        self.schedule = remembered(redistribution(mesh.grid, *facts))
        prove_once(mesh, self.schedule, "redistribute", facts)
        self.blocks = {"C": block} if block else {}
        arrives = accumulator(dtype) if source.partial else dtype
        if source.partial:  # each element once, in the type it is summed in
            self.blocks["A" + STAGE] = Stored.allocated(mesh, shape, arrives, source.single(mesh.grid)).block
        self.frames = {LANDING: np.empty(0, arrives)}
        self.is_cast = arrives != dtype
        self.bound: OrderedDict[tuple[object, ...], Executable] = OrderedDict()
        mesh.prepared.add(self)  # whatever has `close` and `forget`

    def run(self, source: Stored) -> None:
        """Move. Collective; the caller has just agreed: what owners stored before is there for every reader."""
        with checked_move(source, self.target, self.result):
            self.executable(source).run()

    def executable(self, source: Stored) -> Executable:
        """Return the operations on this source, bound when first wanted. Local."""
        key = (*source.block.key, source.flipped)
        if key not in self.bound:
            if len(self.bound) >= BOUND:
                self.bound.popitem(last=False)[1].close()
            homes = {"A": source.block.unheld(), **self.blocks}
            self._make_landing(homes)
            memory = Memory(homes, self.result, transposed=frozenset("A" * source.flipped), frames=self.frames)
            self.bound[key] = Executable(self.schedule, self.mesh, memory, Scalars())
        self.bound.move_to_end(key)
        return self.bound[key]

    def _make_landing(self, homes: dict[str, Block]) -> None:
        """Allocate memory for data from these homes that cannot go directly to its place."""

        def in_reach(op: Copy) -> bool:
            return homes[str(op.src.buffer)].window.reaches(op.src.rank)

        size = landing_size(self.mesh, self.schedule, in_reach, self.is_cast)
        if size > self.frames[LANDING].size:
            self.frames[LANDING] = np.empty(size, self.frames[LANDING].dtype)

    def forget(self, window: Window) -> None:
        """Drop operations bound to a window that will be closed."""
        for key in [key for key, executable in self.bound.items() if window in executable.windows]:
            self.bound.pop(key).close()

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local, and may be repeated."""
        for executable in self.bound.values():
            executable.close()
        self.bound.clear()
        self.blocks.clear()
        self.frames.clear()
        self.result = np.empty((0, 0), self.result.dtype)  # a view would keep the memory


def scratch_bytes(mesh: Mesh, shape: Shape, dtype: np.dtype[Any], source: Layout, target: Layout) -> int:
    """Return bytes that this rank takes for a `Redistribution` beside its part of the result."""
    schedule = redistribution(mesh.grid, shape, source, target)
    arrives = accumulator(dtype) if source.partial else dtype
    loads = mesh.granted(mesh.flavour).loads_on_node
    near = {rank for rank, node in enumerate(mesh.node_of) if loads and node == mesh.node_of[mesh.rank]} | {mesh.rank}
    count = landing_size(mesh, schedule, lambda op: op.src.rank in near, arrives != dtype)
    if source.partial:
        count += schedule.home("A" + STAGE, mesh.rank).size
    if arrives != dtype and mesh.is_member and any(isinstance(op, Accumulate) for op in schedule.program(mesh.rank)):
        count += schedule.home("A", mesh.rank).size  # summands are cast before they are pushed
    return int(count) * arrives.itemsize


def collected(source: Stored, root: int | None) -> NDArray[Any] | None:
    """Return the whole matrix on every rank of the communicator, or on `root`. Collective."""
    mesh = source.mesh
    with agreed(mesh.comm, "to_numpy", root=root) as facts:
        facts["matrix"] = source.facts
        source.block.window.sync()
        root = None if root is None else checked_root(root, mesh.size, "the mesh's communicator")
    layout = everywhere() if root is None else pinned(mesh, root if root < mesh.grid.size else 0)
    wanted = mesh.is_member and bool(layout.holds(mesh.grid.coords(mesh.rank)))
    is_shared = can_share(mesh.grid, source.shape, source.layout, layout)
    if is_shared and source.shape[0] * source.shape[1] * source.dtype.itemsize <= STAGED:
        made = Stored.allocated(mesh, source.shape, source.dtype, layout)
        move(source, layout, made.tile, made.block)
        return _relayed(mesh, made.tile.copy(), source, root)
    whole = np.empty(source.shape if wanted else (0, 0), source.dtype)
    move(source, layout, whole, Stored.adopted(mesh, whole) if is_shared else None)
    return _relayed(mesh, whole, source, root)


def _relayed(mesh: Mesh, whole: NDArray[Any], source: Stored, root: int | None) -> NDArray[Any] | None:
    """Hand the collected matrix on to ranks beyond the grid that want it."""
    outside = [rank for rank in range(mesh.grid.size, mesh.size) if root in (None, rank)]
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

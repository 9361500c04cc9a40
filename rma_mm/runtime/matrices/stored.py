"""The memory and the placement of a matrix, as redistribution sees it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import ClosedError
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region
from rma_mm.runtime.calibration.lookup import machine_of
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh

Shape = tuple[int, int]
LARGE = 2**20  # bytes of the gets by which windows are compared


class Stored:
    """A matrix of `shape` (rows, columns) placed on `mesh` by `layout`, each rank holding one dense local array."""

    def __init__(
        self, mesh: Mesh, shape: Shape, dtype: np.dtype[Any], layout: Layout, block: Block, flipped: bool = False
    ) -> None:
        self.mesh, self.shape, self.dtype, self.layout = mesh, shape, dtype, layout
        self._block: Block | None = block
        self.flipped = flipped
        """True if the memory holds the transposed matrix."""

    @classmethod
    def allocated(cls, mesh: Mesh, shape: Shape, dtype: np.dtype[Any], layout: Layout) -> Self:
        """Return a matrix on new memory of the arena, everything agreed already. Collective."""
        shapes = [layout.region(shape, mesh.grid, rank).shape for rank in range(mesh.size)]
        block = mesh.arena.allocate([(rows, cols) for rows, cols in shapes], dtype)
        return cls(mesh, shape, dtype, layout, block)

    @staticmethod
    def adopted(mesh: Mesh, array: NDArray[Any]) -> Block:
        """A block on the caller's own array, without a copy, in the windows that are quickest for it. Collective.

        Those are by their facts, where the machine's figures, if there are any, do not know all that there are.
        """
        able = mesh.granted(mesh.flavour).all_for_arrays
        if len(able) > 1:
            machine = machine_of(mesh.comm, mesh.node_of, threads=mesh.threads, dtype="float32", kernel="blas",
                                 may_measure=False, flavours=tuple(each.name for each in able))
            link = "node" if mesh.num_nodes == 1 else "between"
            names = {f"{each.name}.get busy" for each in able}
            if machine is not None and mesh.size > 1 and names <= set(machine.costs[link]):
                able.sort(key=lambda each: machine.cost(link, "get", each.name, busy=True).seconds(LARGE))
        return mesh.arena.adopt(array, able[0])

    @property
    def block_or_none(self) -> Block | None:
        """The memory under the matrix; None after `close`."""
        return self._block

    @property
    def block(self) -> Block:
        """The memory under the matrix. Raises ClosedError after `close`."""
        if self._block is None:
            raise ClosedError(f"matrix of shape {self.shape}: it is closed; make a new one")
        self.mesh.require_open()
        return self._block

    @property
    def is_closed(self) -> bool:
        """True if it was given back."""
        return self._block is None

    @property
    def region(self) -> Region:
        """The global indices that this rank holds."""
        return self.layout.region(self.shape, self.mesh.grid, self.mesh.rank)

    @property
    def tile(self) -> NDArray[Any]:
        """This rank's part as one writable array of shape `region.shape`, indices ascending."""
        local = self.block.local
        return local.T if self.flipped else local

    @property
    def T(self) -> Self:
        """The transposed matrix, on the same memory."""
        return type(self)(self.mesh, self.shape[::-1], self.dtype, self.layout.T, self.block, not self.flipped)

    @property
    def facts(self) -> tuple[object, ...]:
        """Return the facts that all ranks must agree on when they name this matrix."""
        return (self.block.serial, self.flipped)

    @property
    def identity(self) -> object:
        """Return what tells this matrix from all others: its memory, and how that is read. A closed one has none."""
        block = self._block
        return object() if block is None else (self.mesh, block.serial, self.flipped, self.shape, self.layout)

    @property
    def in_place(self) -> bool:
        """True if node-mates can multiply out of this matrix's memory: not where it is the caller's own."""
        return FLAVOURS[self.block.window.flavour].loads_on_node

    def close(self) -> None:
        """Release the memory, which is free once every rank has done so. Local; may be repeated."""
        self._block = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def identity_of(x: object) -> object:
    """Return the identity of a matrix; None for None, and equal to nothing for all else."""
    return None if x is None else getattr(x, "identity", None) or object()

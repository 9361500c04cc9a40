"""What a matrix on a mesh is to those who move it: memory, and the placement of what lies there."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import ClosedError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh

Shape = tuple[int, int]


class Stored:
    """A matrix of `shape` (rows, columns) placed on `mesh` by `layout`, each rank holding one dense local array."""

    def __init__(
        self, mesh: Mesh, shape: Shape, dtype: np.dtype[Any], layout: Layout, block: Block, flipped: bool = False
    ) -> None:
        self.mesh, self.shape, self.dtype, self.layout = mesh, shape, dtype, layout
        self._block: Block | None = block
        self.flipped = flipped
        """Whether the memory holds the transposed matrix."""

    @classmethod
    def allocated(cls, mesh: Mesh, shape: Shape, dtype: np.dtype[Any], layout: Layout) -> Self:
        """A matrix on new memory of the arena, everything agreed already. Collective."""
        shapes = [layout.region(shape, mesh.shape, rank).shape for rank in range(mesh.size)]
        block = mesh.arena.allocate([(rows, cols) for rows, cols in shapes], dtype)
        return cls(mesh, shape, dtype, layout, block)

    @property
    def held(self) -> Block | None:
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
        """Whether it was given back."""
        return self._block is None

    @property
    def region(self) -> Region:
        """The global indices that this rank holds."""
        return self.layout.region(self.shape, self.mesh.shape, self.mesh.rank)

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
        """What all ranks must agree on when they name this matrix."""
        return (self.block.serial, self.flipped)

    @property
    def in_place(self) -> bool:
        """Whether node-mates can multiply out of this matrix's memory: not where it is the caller's own."""
        return self.block.window.loads_on_node

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local, and may be repeated."""
        self._block = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""What the cases of `tests/conformance.py` are made of: the world they run in, tiles, buffers and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.span import EMPTY, Span
from rma_mm.windows.base import Counters, Patch, Window

Array = NDArray[Any]


def reset(counters: Counters) -> None:
    """Let them count from zero again, also for transfers that were prepared before."""
    counters.words_intra = counters.words_inter = counters.messages = counters.messages_inter = 0


class World(Protocol):
    """The ranks that run a case together."""

    rank: int
    size: int
    node_of: tuple[int, ...]

    def barrier(self) -> None: ...

    def open(self, nbytes: int, chunk_bytes: int | None = None) -> Window: ...


@dataclass(frozen=True)
class Tile:
    """A dense local array of every rank, at the same place in the memory that each exposes."""

    shape: tuple[int, int]
    dtype: Any = np.float32
    order: str = "C"
    offset: int = 64

    @property
    def nbytes(self) -> int:
        return self.offset + self.shape[0] * self.shape[1] * np.dtype(self.dtype).itemsize

    @property
    def strides(self) -> tuple[int, int]:
        return (self.shape[1], 1) if self.order == "C" else (1, self.shape[0])

    def patch(self, rows: Span, cols: Span) -> Patch:
        return Patch(self.offset, self.strides, rows, cols)

    def whole(self) -> tuple[Span, Span]:
        return Span.range(0, self.shape[0]), Span.range(0, self.shape[1])

    def local(self, world: World, window: Window) -> Array:
        own = window.view(world.rank, self.offset, self.shape, self.strides, self.dtype)
        assert own is not None
        return own

    def values(self, rank: int) -> Array:
        """What each rank's array holds at first: small whole numbers, different everywhere and on each rank."""
        count = self.shape[0] * self.shape[1]
        return ((np.arange(count) * 7 + rank * 13) % 97).astype(self.dtype).reshape(self.shape)


def settle(world: World, window: Window) -> None:
    """Make every rank's stores visible to all."""
    window.sync()
    world.barrier()
    window.sync()


def filled(world: World, tile: Tile, chunk_bytes: int | None = None) -> Window:
    """A window that holds `tile.values` of each rank."""
    window = world.open(tile.nbytes, chunk_bytes)
    tile.local(world, window)[...] = tile.values(world.rank)
    settle(world, window)
    return window


def buffer(shape: tuple[int, int], dtype: Any, order: str) -> Array:
    """A C- or F-ordered array, or ("S") one whose rows are further apart than they are long."""
    if order == "S":
        return np.zeros((shape[0], shape[1] + 5), dtype)[:, 2 : 2 + shape[1]]
    return np.zeros(shape, dtype, "F" if order == "F" else "C")


SPANS = {
    "all": (Span.range(0, 24), Span.range(0, 30)),
    "rows": (Span.range(3, 11), Span.range(0, 30)),
    "cols": (Span.range(0, 24), Span.range(7, 20)),
    "row": (Span.range(5, 6), Span.range(2, 29)),
    "col": (Span.range(1, 24), Span.range(29, 30)),
    "cyclic": (Span.cyclic(24, 3, 2, 1), Span.cyclic(30, 4, 3, 0)),
    "cyclic rows": (Span.cyclic(24, 3, 2, 1), Span.range(0, 30)),
    "wrapped": (Span.window(24, 20, 9), Span.window(30, 25, 11)),
    "ragged": (Span([(0, 1), (4, 7), (9, 11)]), Span([(1, 4), (6, 7), (20, 30)])),
    "nothing": (Span.range(2, 9), EMPTY),
}
"""Positions in a 24 x 30 array."""

"""A matrix brought to another placement again and again, into the same memory: prepared once.

Every rank pulls what its new part needs. What does not come to lie in one stretch is fetched as it lies at its owner,
into scratch, and put into place here: MPI takes up to five times as long to scatter it on the way.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import accumulator
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.span import Region
from rma_mm.runtime.execution.addressing import Memory
from rma_mm.runtime.execution.binding import Scalars
from rma_mm.runtime.execution.executor import Executable
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.verification.checked_product import checked_move
from rma_mm.schedule.lowering.redistribute import pieces, summed
from rma_mm.schedule.schedule import STAGE, Home, Schedule, held
from rma_mm.windows import Transfer, Window
from rma_mm.windows.waiting import barrier

BOUND = 8
"""Sources that a conversion keeps bound."""


@dataclass(frozen=True, eq=False)
class CopiedPart:
    """What one owner has of a rank's new part."""

    owner: int
    there: Region
    """Positions at its owner."""
    here: Region
    """Positions in the new part."""
    scratch: NDArray[Any] | None
    """Where it arrives, if not in its place."""


class Conversion:
    """Fills `made` with matrices of its shape and type that are placed by `source`. Collective to make."""

    def __init__(self, source: Layout, made: DistMatrix) -> None:
        mesh = self.mesh = made.mesh
        self.source, self.made, self.tile = source, made, made.tile
        dtype = accumulator(made.dtype) if source.partial else made.dtype
        self.single = source.single(mesh.shape) if source.partial else source
        self.stage = DistMatrix.allocated(mesh, made.shape, dtype, self.single) if source.partial else None
        """Where summands are added up."""
        found = _pieces(mesh, made.shape, source, made.layout)
        home = made.region
        self.is_zero = not found and home.size > 0
        """Whether another rank holds what there is of a sum."""
        self.parts = []
        for owner, part in found:
            there = held(self.single, made.shape, mesh.shape, owner).locate(part)
            is_apart = dtype != made.dtype or not (_reaches(mesh, owner) or _is_strip(home, part))
            between = np.empty(part.shape, dtype) if is_apart else None
            self.parts.append(CopiedPart(owner, there, home.locate(part), between))
        self.summing: OrderedDict[tuple[object, ...], Executable] = OrderedDict()
        self.bound: OrderedDict[tuple[object, ...], list[Transfer]] = OrderedDict()
        mesh.prepared.add(self)  # whatever has `close` and `forget`

    def run(self, source: DistMatrix) -> None:
        """Convert. Collective; the caller has just agreed: what owners stored before is there for every reader."""
        with checked_move(source, self.made.layout, self.tile):
            self._run(source)

    def _run(self, source: DistMatrix) -> None:
        if self.stage is not None:
            self._sum(source)
            source = self.stage
        key: tuple[object, ...] = (*source.block.key, source.flipped)
        if key not in self.bound:
            if len(self.bound) >= BOUND:
                _close(self.bound.popitem(last=False)[1])
            self.bound[key] = [self._transfer(part, source) for part in self.parts]
        self.bound.move_to_end(key)
        windows = {source.block.window, self.made.block.window}
        for window in windows:
            window.sync()
        if self.is_zero:
            self.tile[...] = 0
        with self.mesh.progress:
            self._fetch(self.bound[key])
            for window in windows:
                window.sync()
            barrier(self.mesh.comm)

    def _fetch(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            transfer.start()
        for part, transfer in zip(self.parts, transfers, strict=True):
            transfer.wait()
            if part.scratch is not None:
                with np.errstate(all="ignore"):  # a sum of 16-bit floats is rounded here, once
                    self.tile[part.here.selector()] = part.scratch

    def _transfer(self, part: CopiedPart, source: DistMatrix) -> Transfer:
        """The get of a part, in the orientation in which its owner stores it."""
        origin, here, there = self.tile, part.here, part.there
        if part.scratch is not None:
            origin, here = part.scratch, Region.whole(part.scratch.shape)
        if source.flipped:
            origin, here, there = origin.T, here.T, there.T
        return source.block.window.get(part.owner, source.block.patch(part.owner, there), origin, *here)

    def _sum(self, source: DistMatrix) -> None:
        """Add up the summands of a partial source. Collective."""
        assert self.stage is not None
        key: tuple[object, ...] = (*source.block.key, source.flipped)
        if key not in self.summing:
            if len(self.summing) >= BOUND:
                self.summing.popitem(last=False)[1].close()
            self.summing[key] = self._summing(source, self.stage.block)
        self.summing.move_to_end(key)
        self.summing[key].run()

    def _summing(self, source: DistMatrix, stage: Block) -> Executable:
        mesh, shape = self.mesh.shape, self.made.shape
        homes = {"A": Home(shape, self.source), "A" + STAGE: Home(shape, self.single)}
        schedule = Schedule(mesh, homes, lambda rank: list(summed(mesh, shape, "A", self.source, rank)))
        blocks = {"A": source.block.unheld(), "A" + STAGE: stage}
        memory = Memory(blocks, self.tile, transposed=frozenset("A" * source.flipped))
        return Executable(schedule, self.mesh, memory, Scalars())

    def forget(self, window: Window) -> None:
        """Drop what is bound to a window that is about to be closed."""
        for key in [key for key in self.bound if window in (key[0], self.made.block.window)]:
            _close(self.bound.pop(key))
        for key in [key for key, executable in self.summing.items() if window in executable.windows]:
            self.summing.pop(key).close()

    def close(self) -> None:
        """Give the memory back, once all ranks have. Local, and may be repeated."""
        for transfers in self.bound.values():
            _close(transfers)
        for executable in self.summing.values():
            executable.close()
        self.bound.clear()
        self.summing.clear()
        self.parts.clear()
        self.stage, self.tile = None, np.empty((0, 0), self.made.dtype)  # a view would keep the memory


def scratch_bytes(mesh: Mesh, shape: tuple[int, int], dtype: np.dtype[Any], source: Layout, target: Layout) -> int:
    """Bytes that this rank takes for a conversion beside its part of the result."""
    home = held(target, shape, mesh.shape, mesh.rank)
    arrived = accumulator(dtype) if source.partial else dtype
    stage = held(source.single(mesh.shape), shape, mesh.shape, mesh.rank).size if source.partial else 0
    apart = sum(
        part.size for owner, part in _pieces(mesh, shape, source, target)
        if arrived != dtype or not (_reaches(mesh, owner) or _is_strip(home, part))
    )  # fmt: skip
    return int(stage + apart) * arrived.itemsize


def _pieces(mesh: Mesh, shape: tuple[int, int], source: Layout, target: Layout) -> list[tuple[int, Region]]:
    """Owners of what this rank is to hold, and what each gives; of a sum one summand is all, the others zero."""
    home = held(target, shape, mesh.shape, mesh.rank)
    coords = target.coords(mesh.shape, mesh.rank) or {}
    if not home or any(coords.get(axis) for axis in target.partial):
        return []
    return pieces(mesh.shape, shape, source.single(mesh.shape) if source.partial else source, home, mesh.rank)


def _reaches(mesh: Mesh, owner: int) -> bool:
    """Whether this rank can load what `owner` holds, which copies as fast into scattered places."""
    if owner == mesh.rank:
        return True
    return mesh.flavour.loads_on_node and mesh.node_of[owner] == mesh.node_of[mesh.rank]


def _is_strip(home: Region, part: Region) -> bool:
    """Whether a part of a dense, row-major array lies in one stretch."""
    rows, cols = home.locate(part)
    return rows.is_contiguous and cols.is_contiguous and (len(rows) == 1 or len(cols) == len(home[1]))


def _close(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.close()

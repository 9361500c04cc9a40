"""Matrices as cases want them: the NumPy array, and the distributed matrix made of it in the way that was drawn."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import finfo
from numpy.typing import NDArray

import rma_mm
from bench.trust.cases import Given
from bench.trust.library_files import formats, write_anew
from rma_mm import DistMatrix, Mesh
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.geometry.layout import Layout
from rma_mm.runtime.files.opened import Opened

Array = NDArray[Any]


def elements(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Small whole numbers, so that every order of summation gives the same result."""
    kind = parse_dtype(dtype)
    least = 0 if kind.kind in "ub" else -2
    x = rng.integers(least, 2 if kind.kind == "b" else 3, shape)
    if kind.kind == "c":
        return (x + 1j * rng.integers(-2, 3, shape)).astype(kind)
    return x.astype(kind)


def spoil(rng: np.random.Generator, x: Array) -> Array:
    """The same, with NaN and infinities in some places where its type has them."""
    if x.dtype.kind in "iub":
        return x
    wild = rng.choice(np.array([np.nan, np.inf, -np.inf]), x.shape)
    return np.where(rng.random(x.shape) < 0.05, wild, x).astype(x.dtype)


def enlarge(rng: np.random.Generator, x: Array, result: np.dtype[Any], is_c: bool) -> Array:
    """Floating-point numbers that bring C within 2^16 of the largest of its type; integers that wrap around in it."""
    if x.dtype.kind in "iu" and result.kind in "iu":
        return rng.integers(np.iinfo(x.dtype).min, np.iinfo(x.dtype).max, x.shape, x.dtype, endpoint=True)
    if x.dtype.kind in "iub" or result.itemsize == 2:
        return x
    most = finfo(result).maxexp - 16
    return (x * 2.0 ** (most if is_c else min(finfo(x.dtype).maxexp - 4, most // 2))).astype(x.dtype)


def garbage(dtype: np.dtype[Any]) -> Any:
    """What C holds before it is overwritten: NaN where there is one."""
    return dtype.type(True if dtype.kind == "b" else 113 if dtype.kind in "iu" else np.nan)


def summands(layout: Layout | None, mesh: Mesh) -> int:
    """How many a matrix in this placement comes in."""
    return prod(layout.mesh(mesh.grid).axis_size(axis) for axis in layout.partial) if layout else 1


class Maker:
    """Makes matrices of one case; collective throughout."""

    def __init__(self, mesh: Mesh, directory: Path, *, text: bool, root: int) -> None:
        self.mesh, self.directory, self.text = mesh, directory, text
        self.root = root % mesh.grid.size
        self.files = 0

    def place(self, layout: Layout | None) -> Layout | str | None:
        """A placement as it is passed."""
        return str(layout) if self.text and layout is not None else layout

    def make(self, given: Given, x: Array, rng: np.random.Generator) -> tuple[Any, Array]:
        """What is passed for a matrix with the elements `x` (as stored), and what it then is."""
        if given.source == "array":
            return np.array(x, order=given.order), x
        if given.source == "opened":
            return self._opened(given, x), x
        made = getattr(self, "_" + given.source)(given, x, rng)
        return (made.T, x.T) if given.turned else (made, x)

    def _from_numpy(self, given: Given, x: Array, _: np.random.Generator) -> DistMatrix:
        return DistMatrix.from_numpy(np.array(x, order=given.order), self.mesh, self.place(given.layout))

    def _root(self, given: Given, x: Array, _: np.random.Generator) -> DistMatrix:
        mine = np.array(x, order=given.order) if self.mesh.rank == self.root else None
        return DistMatrix.from_numpy(mine, self.mesh, self.place(given.layout), root=self.root)

    def _function(self, given: Given, x: Array, _: np.random.Generator) -> DistMatrix:
        return DistMatrix.from_function(
            given.shape, lambda rows, cols: x[rows, cols], self.mesh, self.place(given.layout), dtype=x.dtype
        )

    def _moved(self, given: Given, x: Array, _: np.random.Generator) -> DistMatrix:
        made = DistMatrix.from_numpy(np.array(x, order=given.order), self.mesh, self.place(given.before))
        return made.redistribute(self.place(given.layout))

    def _file(self, given: Given, x: Array, _: np.random.Generator) -> DistMatrix:
        path = self.directory / f"in{self.files}.npy"
        self.files = (self.files + 1) % 3
        is_half = given.dtype == "bfloat16"
        if self.mesh.rank == 0:
            np.save(path, np.array(x.view("V2") if is_half else x, order=given.order))
        self.mesh.comm.Barrier()
        made = rma_mm.load(path, self.mesh, self.place(given.layout), dtype="bfloat16" if is_half else None)
        self.mesh.comm.Barrier()
        return made

    def _opened(self, given: Given, x: Array) -> Opened:
        path, is_half = self.directory / f"open{self.files}", given.dtype == "bfloat16"
        self.files = (self.files + 1) % 6
        has_chunks = given.order == "chunks" and not is_half and x.size > 0 and ".h5" in formats()
        path = path.with_suffix(".h5" if has_chunks else ".npy")
        if self.mesh.rank == 0:
            if has_chunks:
                write_anew(path, "x", x, (3, 4), 3, "C")
            else:
                np.save(path, np.array(x.view("V2") if is_half else x, order="F" if given.order == "F" else "C"))
        self.mesh.comm.Barrier()
        return rma_mm.open(path, dtype="bfloat16" if is_half else None)

    def _local(self, given: Given, x: Array, rng: np.random.Generator) -> DistMatrix:
        """On the caller's own array; where it comes in summands, on random ones that add up."""
        layout = given.layout
        assert layout is not None
        grid, rank = layout.mesh(self.mesh.grid), self.mesh.rank
        coords, number = layout.coords(self.mesh.grid, rank) or {}, 0
        for axis in layout.partial:
            number = number * grid.axis_size(axis) + coords.get(axis, 0)
        others = [elements(rng, x.shape, given.dtype) for _ in range(summands(layout, self.mesh) - 1)]
        if x.dtype.kind == "b":
            others = [x & other for other in others]
        with np.errstate(all="ignore"):
            mine = [*others, x if x.dtype.kind == "b" else x - sum(others, np.zeros_like(x))][number]
        region = layout.region(given.shape, self.mesh.grid, rank)
        part = strided(mine[region.selector()], given.order)
        is_none = not part.size and bool(x.size) and number % 2 == 0
        return DistMatrix.from_local(None if is_none else part, given.shape, self.mesh, self.place(layout))


def strided(x: Array, order: str) -> Array:
    """A copy of `x` that lies so in memory."""
    rows, cols = x.shape
    is_turned = order.endswith("F")
    tall, wide = (cols, rows) if is_turned else (rows, cols)
    if order == "offset":
        space = np.full((tall + 3, wide + 4), garbage(x.dtype), x.dtype)[1 : tall + 1, 2 : wide + 2]
    elif order.startswith("padded"):
        space = np.full((tall, wide + 3), garbage(x.dtype), x.dtype)[:, :wide]
    elif order.startswith("stepped"):
        space = np.full((2 * tall, wide + 1), garbage(x.dtype), x.dtype)[::2, :wide]
    else:
        space = np.empty((tall, wide), x.dtype)
    made: Array = space.T if is_turned else space
    made[...] = x
    return made

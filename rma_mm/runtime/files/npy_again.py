"""`.npy` files read once more, to check a product against what the disk holds, by another way than the first time.

NumPy's own reader of headers, and whole rows, or columns, in the order of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import truncate
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.sieve import from_disk

READERS: dict[tuple[int, int], Callable[[Any], Any]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


@dataclass(frozen=True)
class NpyAgain:
    """A matrix in a `.npy` file. Its calls raise OSError and ValueError."""

    path: str
    shape: tuple[int, int]  # rows and columns
    dtype: np.dtype[Any]  # element type once read; |V2 is taken for bfloat16
    fortran_order: bool  # true if columns are contiguous
    stored: np.dtype[Any]  # element type in the file

    @staticmethod
    def open(path: str) -> NpyAgain:
        with open(path, "rb") as file:
            stored, turned, shape = _header(file)
        if len(shape) != 2:
            raise ValueError(f"it holds {truncate(shape)}, which is no matrix")
        held = BFLOAT16 if stored == "V2" and BFLOAT16 is not None else stored.newbyteorder("=")
        return NpyAgain(path, (shape[0], shape[1]), held, turned, stored)

    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (region.shape) with the part in `region`: the rows, or columns, that it lies in are read whole."""
        if not region:
            return
        if self.fortran_order:
            region, out = region.T, out.T
        lines = Span.range(region[0].start, region[0].stop)
        whole = Region((lines, Span.range(0, self.shape[not self.fortran_order])))
        is_here = region == whole and out.flags.c_contiguous and self.stored in (out.dtype, np.dtype("V2"))
        raw = out.view(self.stored) if is_here else np.empty(whole.shape, self.stored)
        with open(self.path, "rb", buffering=0) as file:
            if _header(file) != (self.stored, self.fortran_order, self.shape):
                raise ValueError("it changed meanwhile")
            from_disk(file.fileno())
            file.seek(lines.start * len(whole[1]) * self.stored.itemsize, os.SEEK_CUR)
            _fill(file, raw.reshape(-1).view(np.uint8).data)
        if not is_here:
            out[...] = _typed(raw, self.dtype)[whole.locate(region).selector()]


def reread_vector(path: str, like: NDArray[Any]) -> NDArray[Any]:
    """Return the vector in a file, of the type and length of `like`. Raises OSError, ValueError."""
    with open(path, "rb") as file:
        stored, _, shape = _header(file)
        if shape != like.shape:
            raise ValueError(f"it now holds {truncate(shape)}, before {like.shape}")
        found = np.fromfile(file, stored, prod(shape))
    return _typed(found, like.dtype)


def _typed(raw: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    return raw.view(dtype) if raw.dtype.kind == "V" else raw.astype(dtype, copy=False)


def _header(file: Any) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    """(element type, whether columns are contiguous, shape); the file stands at its first element then."""
    version = npy.read_magic(file)
    # 3.0 differs from 2.0 in how names of fields are written, of which a matrix has none
    shape, turned, stored = READERS[(2, 0) if version == (3, 0) else version](file)
    return stored, turned, shape


def _fill(file: Any, rest: memoryview) -> None:
    while rest:
        count = file.readinto(rest[: 2**30])
        if not count:
            raise OSError(f"it ends {len(rest)} bytes early")
        rest = rest[count:]

"""Arrays in Zarr stores, read by each rank for itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

from numpy.typing import NDArray

from rma_mm.errors import FileFormatError, named
from rma_mm.geometry.extents import as_matrix
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.containers.chunked import ChunkedFile
from rma_mm.runtime.files.containers.zarr_node import ZarrNode, array_of, name_of, open_folder, zarr_errors
from rma_mm.runtime.files.formats import Shape, check_extents, check_shape, element_type

BLOSC_HEAD = 16
"""Bytes with which chunks of Blosc begin; the last four are the size of the chunk."""


@dataclass(frozen=True)
class ZarrArray(ChunkedFile):
    """An array in a store that has been looked at: a `Source`."""

    node: ZarrNode
    unit: Shape
    """Rows and columns of the part that is a file: a shard, or chunk."""

    @contextmanager
    def reader(self) -> Iterator[Any]:
        """A block with the array. Errors inside are FileFormatError."""
        with zarr_errors(self.name):
            yield _Reader(self, open_folder(self.node.folder, "r"))

    @property
    def name(self) -> str:
        """Store and array, for messages."""
        return name_of(self.path, self.inner)

    def again(self) -> ZarrArray:
        """The same, opened once more."""
        return look(self.path, self.inner, None, not self.array)


@dataclass(frozen=True)
class _Reader:
    """Parts of an array, of which the files are there as a whole: the package does not see each that is not."""

    source: ZarrArray
    array: Any

    def __getitem__(self, box: Any) -> NDArray[Any]:
        spans = [(x.start, x.stop) for x in (box if isinstance(box, tuple) else (slice(0, 1), box))]
        for at in units_of(Region.box(*spans), self.source.unit):
            self._check(file_of(self.array, at[len(spans) - self.array.ndim :]))
        part: NDArray[Any] = self.array[box]
        return part

    def _check(self, file: str) -> None:
        """Raise FileFormatError where a file is cut off: a shard without a byte, or what Blosc reads beyond its end."""
        try:
            with open(file, "rb") as held:
                head, size = held.read(BLOSC_HEAD), os.fstat(held.fileno()).st_size
        except FileNotFoundError:
            return  # all of it is the fill value
        is_short = self.source.node.is_blosc and int.from_bytes(head[-4:], "little") > size
        if is_short or not size:
            raise FileFormatError(f"{self.source.name}: is truncated: {named(file)} has {size} bytes")


def look(store: str, inner: str, said: Any, is_matrix: bool) -> ZarrArray:
    """An array of a store, as `open_matrix` says. Raises FileFormatError."""
    node, name = array_of(store, inner), name_of(store, inner)
    if node.is_pickled:
        raise FileFormatError(f"{name}: holds pickled objects, which are never loaded")
    with zarr_errors(name):
        array = open_folder(node.folder, "r")
        dtype = element_type(name, array.dtype, said)
        shape, chunks, unit = (tuple(map(int, x)) for x in (array.shape, array.chunks, array.shards or array.chunks))
    node.version.check()
    check_shape(name, shape, is_matrix or len(shape) > 2)
    check_extents(name, shape)
    is_vector = len(shape) == 1
    rows_and_cols = as_matrix(shape), as_matrix(chunks), as_matrix(unit)
    return ZarrArray(
        store, inner, rows_and_cols[0], dtype, None if is_vector else rows_and_cols[2], rows_and_cols[1], node.version,
        node, rows_and_cols[2], array=shape if is_vector else (),
    )  # fmt: skip


def units_of(region: Region, unit: Shape) -> Iterator[tuple[int, ...]]:
    """Which units, counted along rows and columns, a region has elements of."""
    if not region:
        return
    pairs = zip(region, unit, strict=True)
    yield from product(*(sorted({at for a, b in span.runs for at in range(a // n, -(-b // n))}) for span, n in pairs))


def file_of(array: Any, at: tuple[int, ...]) -> str:
    """The file of a unit."""
    key: str = array.metadata.encode_chunk_key(at)
    return os.path.join(array.store.root, key)

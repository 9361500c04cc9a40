"""Arrays in Zarr stores, read by each rank for itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.errors import FileFormatError, display_path, truncate
from rma_mm.geometry.extents import as_matrix
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.containers.chunked import ChunkedFile
from rma_mm.runtime.files.containers.expansion import check_chunk_size, check_expansion, pread
from rma_mm.runtime.files.containers.zarr_node import ZarrNode, array_of, name_of, open_folder, zarr_errors
from rma_mm.runtime.files.external import allowing, check_unlinked, is_allowed
from rma_mm.runtime.files.formats import Shape, check_extents, check_shape, element_type
from rma_mm.runtime.files.version import opened

BLOSC_HEAD = 16  # bytes with which chunks of Blosc begin; the last four are the size of the chunk
INDEX_ENTRY, CHECKSUM = 16, 4  # bytes that say where a chunk lies in its shard, and of the sum behind all of them
MISSING = 2**64 - 1  # the entry in the index of a shard for a chunk that is not there


@dataclass(frozen=True)
class ZarrArray(ChunkedFile):
    """An array in a store that has been looked at: a `Source`."""

    node: ZarrNode
    unit: Shape  # rows and columns of the part that is a file: a shard, or chunk
    opened: Any = field(repr=False, compare=False)  # as the package reads it
    allow_external: bool  # true if links in the store are followed

    @contextmanager
    def reader(self) -> Iterator[Any]:
        """A block with the array. Errors inside are FileFormatError."""
        with zarr_errors(self.name), allowing(self.allow_external):
            yield _Reader(self, self.opened)

    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` with the part in `region`; plain chunks are decoded here, in half of the zarr package's time."""
        with self.reader() as held:
            is_plain = not self.array and held.array.dtype == self.dtype
            decode = self.node.decode if is_plain else None
            if decode is not None:
                self.version.check()
                self._decode(decode, held, region, out)
                self.version.check()
                return
        super().read(region, out)

    def _decode(self, decode: Callable[[bytes], Any], held: _Reader, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` with the part in `region`, file by file."""
        for at in units_of(region, self.unit):
            unit = Region(Span.range(n * each, n * each + each) for n, each in zip(at, self.unit, strict=True))
            inside, raw = unit & region, held.content(file_of(held.array, at), is_read=True)
            if raw is None:
                out[region.locate(inside).selector()] = held.array.fill_value or 0
            else:
                elements = np.frombuffer(decode(raw), self.dtype).reshape(self.unit)
                out[region.locate(inside).selector()] = elements[unit.locate(inside).selector()]

    @property
    def name(self) -> str:
        return name_of(self.path, self.inner)

    def again(self) -> ZarrArray:
        with allowing(self.allow_external):
            return look(self.path, self.inner, None, not self.array)


@dataclass(frozen=True)
class _Reader:
    """Parts of an array, of which the files are there as a whole: the package does not see each that is not."""

    source: ZarrArray
    array: Any

    def __getitem__(self, box: Any) -> NDArray[Any]:
        spans = [(x.start, x.stop) for x in (box if isinstance(box, tuple) else (slice(0, 1), box))]
        for at in units_of(Region.box(*spans), self.source.unit):
            self.content(file_of(self.array, at[len(spans) - self.array.ndim :]), is_read=False)
        part: NDArray[Any] = self.array[box]
        return part

    def content(self, file: str, is_read: bool) -> bytes | None:
        """Check a chunk's file, and return its bytes if `is_read`; None if there is no such file.

        Raises FileFormatError for one that must not be decoded: it is cut off (an empty shard, or what Blosc reads
        beyond its end), lies outside the store, is no regular file, or unpacks to far more than its elements take.
        """
        source = self.source
        check_unlinked(source.name, source.path, file)
        try:
            with opened(file) as descriptor:
                size, raw = os.fstat(descriptor).st_size, pread(descriptor)
                is_short = source.node.is_blosc and int.from_bytes(raw(0, BLOSC_HEAD)[-4:], "little") > size
                if is_short or not size:
                    raise FileFormatError(f"{source.name}: is truncated: {display_path(file)} has {size} bytes")
                codec = "".join(source.node.compressors)
                in_shards = source.node.shard is not None and codec in source.node.compressors_in_shards
                unit, chunk = (prod(extents) * source.dtype.itemsize for extents in (source.unit, source.step))
                check_expansion(source.name, "" if in_shards else codec, raw, size, unit)
                for start, count in self._index(raw, size) if in_shards else ():
                    check_expansion(source.name, codec, pread(descriptor, start), count, chunk)
                return raw(0, size) if is_read else None
        except (FileNotFoundError, NotADirectoryError):
            return None  # all of it is the fill value

    def _index(self, raw: Callable[[int, int], bytes], size: int) -> Iterator[tuple[int, int]]:
        """Give (first byte, bytes) of each chunk in a shard. Raises FileFormatError if the shard is cut off."""
        said = self.source.node.shard or {}
        entries = prod(-(-whole // part) for whole, part in zip(self.source.unit, self.source.step, strict=True))
        names = [x.get("name") for x in said.get("index_codecs", []) if isinstance(x, dict)]
        total = INDEX_ENTRY * entries + CHECKSUM * names.count("crc32c")
        if total > size or not {*names} <= {"bytes", "crc32c"}:
            raise FileFormatError(f"{self.source.name}: is truncated, or has a damaged index of chunks")
        at = 0 if said.get("index_location") == "start" else size - total
        big = any(x.get("configuration", {}).get("endian") == "big" for x in said["index_codecs"] if "name" in x)
        index = np.frombuffer(raw(at, INDEX_ENTRY * entries), ">u8" if big else "<u8").reshape(-1, 2)
        for start, count in index.tolist():
            if start != MISSING:
                if start + count > size:
                    raise FileFormatError(f"{self.source.name}: is truncated: a shard ends within a chunk")
                yield start, count


def look(store: str, inner: str, said: Any, is_matrix: bool) -> ZarrArray:
    """Return an array of a store, as `open_matrix` says. Raises FileFormatError."""
    node, name = array_of(store, inner), name_of(store, inner)
    node.check(name)
    with zarr_errors(name):
        array = open_folder(node.folder, "r")
        dtype = element_type(name, array.dtype, said)
        shape, chunks, unit = (tuple(map(int, x)) for x in (array.shape, array.chunks, array.shards or array.chunks))
    node.version.check()
    check_shape(name, shape, is_matrix or len(shape) > 2)
    check_extents(name, shape)
    if any(n < 1 for n in (*chunks, *unit)):
        raise FileFormatError(f"{name}: is damaged: it has chunks of {truncate(chunks)} in files of {truncate(unit)}")
    check_chunk_size(name, prod(chunks) * dtype.itemsize, prod(shape) * dtype.itemsize)
    is_vector = len(shape) == 1
    rows_and_cols = as_matrix(shape), as_matrix(chunks), as_matrix(unit)
    return ZarrArray(
        store, inner, rows_and_cols[0], dtype, None if is_vector else rows_and_cols[2], rows_and_cols[1], node.version,
        node, rows_and_cols[2], array, is_allowed(), array=shape if is_vector else (),
    )


def units_of(region: Region, unit: Shape) -> Iterator[tuple[int, ...]]:
    """Return the units, counted along rows and columns, that a region touches."""
    if not region:
        return
    pairs = zip(region, unit, strict=True)
    yield from product(*(sorted({at for a, b in span.runs for at in range(a // n, -(-b // n))}) for span, n in pairs))


def file_of(array: Any, at: tuple[int, ...]) -> str:
    key: str = array.metadata.encode_chunk_key(at)
    return os.path.join(array.store.root, key)

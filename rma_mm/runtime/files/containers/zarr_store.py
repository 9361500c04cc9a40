"""Zarr stores as a format of files: arrays in them, looked at and written.

The zarr package reads and writes chunks, each rank those that are its own. A shard is a file that holds several chunks
and is written as a whole: two ranks that write parts of one would lose each other's without a word, and so with chunks.
So each unit, shard or chunk, is written by one rank, and one of which that rank has a part is refused.

What is written is a folder of its own beside its place, where no reader of the store finds it, and renamed when it is
whole: a store; or an array, with the groups around it that are new, in a store that is there. Where it replaces an
array, a crash at the moment of renaming leaves none of that name, and both in the temporary folder, from where the next
writer of that name puts the old one back (`rma_mm.unfinished`).
"""

from __future__ import annotations

import os
from dataclasses import field
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import FileFormatError, OptionError, ShapeError, display_path
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.containers.added import in_the_making
from rma_mm.runtime.files.containers.chunked import cuts_none
from rma_mm.runtime.files.containers.zarr_node import ZarrNode, library, name_of, open_folder, place_of, zarr_errors
from rma_mm.runtime.files.containers.zarr_source import ZarrArray, file_of, look, units_of
from rma_mm.runtime.files.formats import Path, Shape, unwritable
from rma_mm.runtime.files.names import joined
from rma_mm.runtime.files.version import Version
from rma_mm.unfinished import NEW, Unfinished, sync

CHUNK = 2**22  # bytes of a chunk, at most, where the user does not say how large it is
MOST = 2**31 - 1  # bytes of a chunk that compressors take


@dataclass(frozen=True)
class ZarrSink:
    """An array in the making: a `Sink`."""

    path: str  # store and array
    temporary: str
    shape: Shape
    dtype: np.dtype[Any]
    unit: Shape  # rows and columns of what is written as a whole: a shard, or chunk
    inner: str  # the array's name in what gets the final name
    held: Unfinished | None = field(compare=False, repr=False)  # the folder, on the rank that made it
    before: Version | None = field(compare=False)  # the metadata of the array that it replaces

    def check(self) -> None:
        """Raise FileFormatError if this rank cannot write, say because its node does not see the directory."""
        if ZarrNode.of(self._folder) is None or not os.access(self._folder, os.W_OK | os.X_OK):
            raise unwritable(self.path, "it does not see the folder, or may not write in it")
        library(self.path)

    def write(self, region: Region, tile: NDArray[Any]) -> None:
        """Write `tile` (region.shape) as the part of the matrix in `region`, down to the disk.

        Raises FileFormatError; ShapeError if the region has a part of a unit, of which the rest would be lost.
        """
        if not cuts_none(region, self.shape, self.unit):
            raise ShapeError(f"output {display_path(self.path)}: {region} cuts a chunk of {self.unit}")
        if not region:
            return
        with zarr_errors(f"output {display_path(self.path)}"):
            array = open_folder(self._folder, "r+")
            for box in region.run_boxes():
                array[box.selector()] = tile[region.locate(box).selector()]
            for at in units_of(region, self.unit):
                sync(file_of(array, at))  # each rank: what is kept back may be kept by its own node

    def source(self) -> ZarrArray:
        """Return the written array. Raises FileFormatError."""
        return look(os.path.join(self.temporary, NEW), self.inner, None, is_matrix=True)

    def publish(self) -> None:
        """Give it its final name. Raises FileFormatError if a chunk is missing, or its place has changed."""
        assert self.held is not None
        with zarr_errors(f"output {display_path(self.path)}"):
            array = open_folder(self._folder, "r")
            files = (file_of(array, at) for at in units_of(Region.whole(self.shape), self.unit))
            missing = sum(not os.path.exists(file) for file in files)
        if missing:
            raise FileFormatError(
                f"output {display_path(self.path)}: {missing} of its chunks are not on the disk"
            )
        if self.before is not None:
            self.before.check()
        elif os.path.lexists(self.held.path):
            place = display_path(self.held.path)
            raise FileFormatError(
                f"output {display_path(self.path)}: another program has made {place} meanwhile; try again"
            )
        self.held.publish()

    def discard(self) -> None:
        """Remove what was written, on the rank that made it; nothing happens elsewhere, or once it is published."""
        if self.held is not None:
            self.held.discard()

    @property
    def _folder(self) -> str:
        return os.path.join(self.temporary, NEW, self.inner)


def open_matrix(path: Path, dtype: Any = None) -> ZarrArray:
    """Return a matrix in a store, its type and place checked; no element is read. Raises FileFormatError."""
    return look(*place_of(path), dtype, is_matrix=True)


def open_array(path: Path, dtype: Any = None) -> ZarrArray:
    return look(*place_of(path), dtype, is_matrix=False)


def create(
    path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: Shape | None = None, shards: Shape | None = None,
    compress: str = "zstd",
) -> ZarrSink:
    """Return an array in a new store, or added to an existing one, maybe replacing another.

    Raises FileFormatError, OptionError.
    """
    store, inner = place_of(path)
    what = f"output {name_of(store, inner)}"
    if dtype == BFLOAT16:
        raise FileFormatError(f"{what}: Zarr has no bfloat16; use .safetensors or .npy, or another --result-dtype")
    if len(shape) != 2:
        raise FileFormatError(f"{what}: only matrices are written there, not arrays of shape {shape}; use .npy")
    chunks, unit = _grid((shape[0], shape[1]), dtype.itemsize, chunks, shards)
    library(store)
    spot = _Destination.of(what, store, inner)
    if shards and spot.format == 2:
        raise OptionError(f"shards: {what} is in a store of Zarr format 2, which has none; leave them out")
    with in_the_making(what, spot.folder, is_folder=True) as held:
        now = _Destination.of(what, store, inner)  # what a crash left may be back in its place
        if now != spot:
            raise FileFormatError(f"{what}: another program has changed {display_path(spot.folder)}; try again")
        with zarr_errors(what):
            _make(held.content, spot, shape, dtype, chunks, unit if shards else None, compress)
    name, rows_cols = joined(store, inner), (shape[0], shape[1])
    return ZarrSink(name, held.temporary, rows_cols, dtype, unit, spot.rest, held, now.before)


@dataclass(frozen=True)
class _Destination:
    """The place of an array to be written."""

    folder: str  # what is made, or replaced
    rest: str  # the array's name in that
    format: int  # the Zarr format of what is around it
    before: Version | None = field(compare=False)  # the metadata of the array that is replaced

    @staticmethod
    def of(what: str, store: str, inner: str) -> _Destination:
        """Return the store for a new array of this name. Raise FileFormatError if there can be none."""
        folder, words, form, before = store, inner.split("/") if inner else [], 3, None
        while os.path.lexists(folder):
            if folder != store and os.path.islink(folder):
                raise FileFormatError(
                    f"{what}: {display_path(folder)} is a symbolic link; nothing is written through one"
                )
            node = ZarrNode.of(folder)
            if node is None:
                raise FileFormatError(
                    f"{what}: {display_path(folder)} is there, and no array or group of Zarr; name another"
                )
            if not node.is_array and not words:
                raise FileFormatError(f"{what}: is a group in that store; name a matrix in it")
            if not words:
                before = node.version
                break
            if node.is_array:
                raise FileFormatError(f"{what}: {display_path(folder)} is an array, which holds no others")
            if node.is_consolidated:
                raise FileFormatError(
                    f"{what}: {display_path(folder)} has consolidated metadata, "
                    f"which would become wrong; name another store"
                )
            folder, form = os.path.join(folder, words.pop(0)), node.format
        return _Destination(folder, "/".join(words), form, before)


def _make(
    folder: str, spot: _Destination, shape: tuple[int, ...], dtype: Any, chunks: Shape, shards: Shape | None,
    compress: str,
) -> None:
    """An array without elements, the groups around it, all on the disk. Raises what the package raises."""
    import numcodecs
    import zarr

    packed = numcodecs.Zstd() if spot.format == 2 else zarr.codecs.ZstdCodec()
    zarr.create_array(
        folder, name=spot.rest or None, shape=shape, dtype=dtype, chunks=chunks, shards=shards, fill_value=0,
        compressors=packed if compress == "zstd" else None, zarr_format=spot.format,
    )
    for inside, _, files in os.walk(folder):
        for file in files:
            sync(os.path.join(inside, file))


def _grid(shape: Shape, itemsize: int, chunks: Shape | None, shards: Shape | None) -> tuple[Shape, Shape]:
    """Return (chunks, unit of writing), none larger than the matrix needs. Raises OptionError.

    >>> _grid((9, 1000), 8, (4, 4), (8, 16)), _grid((5000, 5000), 8, None, None), _grid((7, 3), 8, (100, 2), None)
    (((4, 4), (8, 16)), ((512, 512), (512, 512)), ((7, 2), (7, 2)))
    """
    if shards and not chunks:
        raise OptionError(f"shards: got {shards} without chunks; give chunks that divide them, as {shards}")
    if shards and chunks and any(all_ % one for all_, one in zip(shards, chunks, strict=True)):
        raise OptionError(
            f"shards: got {shards} with chunks of {chunks}; rows and columns of a shard must be multiples of a chunk's"
        )
    said = chunks or _usual(shape, itemsize)
    rows, cols = (min(one, max(1, extent)) for one, extent in zip(said, shape, strict=True))
    if rows * cols * itemsize > MOST:
        raise OptionError(f"chunks: got {said}, {rows * cols * itemsize} bytes; a chunk has at most {MOST}")
    counts = [all_ // one for all_, one in zip(shards or said, said, strict=True)]
    units = [
        min(count, -(-max(1, extent) // one)) * one
        for count, extent, one in zip(counts, shape, (rows, cols), strict=True)
    ]
    return (rows, cols), (units[0], units[1])


def _usual(shape: Shape, itemsize: int) -> Shape:
    """Chunks of at most `CHUNK` bytes, square, or longer where the matrix is narrow."""
    most = CHUNK // itemsize
    side = 2 ** (isqrt(most).bit_length() - 1)
    short = max(1, min(side, *shape))
    long = side if short == side else 2 ** ((most // short).bit_length() - 1)
    return (short, long) if shape[0] <= shape[1] else (long, short)

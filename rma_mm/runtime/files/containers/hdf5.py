"""Matrices in HDF5 files: datasets, read by each rank for itself, and written by all ranks at once.

A dataset whose elements lie dense in the file is read without the HDF5 library, once that has told where; others, in
chunks say, are read through it. What is written lies dense: the library, which is serial, makes room for it and fills
nothing in, and then ranks write their parts there.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import FileFormatError, display_path
from rma_mm.geometry.extents import as_matrix
from rma_mm.runtime.files.containers.added import AddedSink, in_the_making
from rma_mm.runtime.files.containers.chunked import ChunkedFile
from rma_mm.runtime.files.containers.expansion import (
    check_chunk_size,
    check_compressors,
    check_expansion,
    limit_of,
)
from rma_mm.runtime.files.containers.hdf5_file import (
    MOST_FILES,
    check_no_links,
    check_sources,
    library,
    library_errors,
    library_file,
    resolved,
)
from rma_mm.runtime.files.dense import DenseFile
from rma_mm.runtime.files.external import allowing, is_allowed
from rma_mm.runtime.files.formats import Path, check_extents, check_shape, element_type
from rma_mm.runtime.files.names import joined, no_matrix, split
from rma_mm.runtime.files.version import Version, examined
from rma_mm.unfinished import Unfinished

DEFAULT_NAME = "C"  # the dataset that is written where none is named
CONTIGUOUS = 1  # HDF5's code of a dataset whose elements lie together (H5D_CONTIGUOUS)
DEFLATE, SHUFFLE = 1, 2  # filters that most files use
BOUNDED = {SHUFFLE: "shuffle", 3: "fletcher32", 5: "nbit", 6: "scaleoffset"}
"""The library's filters that make little more of what they get."""
CODECS = {DEFLATE: "zlib", 32001: "blosc", 32015: "zstd"}
"""Filters whose chunks begin as in other formats (`expansion`)."""


@dataclass(frozen=True)
class Dataset(ChunkedFile):
    """A dataset that is read through the library: a `Source`."""

    codec: str = ""  # the filter that can make much of little, by the name that `expansion` gives it
    allow_external: bool = False  # true if other files that the file names are read

    @contextmanager
    def reader(self) -> Iterator[Any]:
        """A block with the dataset. Errors inside are FileFormatError."""
        with library_file(self.path) as file:
            dataset = file[self.inner]
            yield _Checked(dataset, self) if self.codec else dataset

    def again(self) -> Dataset:
        return by_library(self.path, self.inner, self.array, self.allow_external)


@dataclass(frozen=True)
class _Checked:
    """Parts of a dataset in which no chunk unpacks to far more than its elements need.

    Those of deflate, alone or after shuffle, are unpacked here: the library has no limit to it, and to count their
    bytes first would take as long again.
    """

    dataset: Any
    source: Dataset

    def __getitem__(self, box: Any) -> NDArray[Any]:
        data, chunk = self.dataset, self.dataset.chunks
        cuts = box if isinstance(box, tuple) else (box,)
        filters = _filters(data)
        is_own = filters in ([DEFLATE], [SHUFFLE, DEFLATE])
        out = np.empty([cut.stop - cut.start for cut in cuts], data.dtype) if is_own else None
        for at in product(*(range(cut.start // n * n, cut.stop, n) for cut, n in zip(cuts, chunk, strict=True))):
            found = data.id.get_chunk_info_by_coord(at)
            is_there = found.byte_offset is not None
            if is_there and (out is None or found.size > limit_of(self._bytes)):
                self._check(at, found.size)
            if out is None:
                continue
            part = self._unpacked(at, len(filters)) if is_there else np.full(chunk, data.fillvalue, data.dtype)
            spans = [(max(c.start, o), min(c.stop, o + n)) for c, o, n in zip(cuts, at, chunk, strict=True)]
            to = tuple(slice(a - c.start, b - c.start) for (a, b), c in zip(spans, cuts, strict=True))
            out[to] = part[tuple(slice(a - o, b - o) for (a, b), o in zip(spans, at, strict=True))]
        if out is not None:
            return out
        whole: NDArray[Any] = data[box]
        return whole

    @property
    def _name(self) -> str:
        return display_path(joined(self.source.path, self.source.inner))

    @property
    def _bytes(self) -> int:
        nbytes: int = prod(self.dataset.chunks) * self.dataset.dtype.itemsize
        return nbytes

    def _unpacked(self, at: tuple[int, ...], filters: int) -> NDArray[Any]:
        """A chunk. Raises FileFormatError for one that is damaged, or longer than its elements."""
        skipped, raw = self.dataset.id.read_direct_chunk(at)
        if not skipped >> filters - 1 & 1:
            stream = zlib.decompressobj()
            try:
                raw = stream.decompress(raw, self._bytes + 1)
            except zlib.error as error:
                raise FileFormatError(f"{self._name}: has a damaged chunk at {at}: {error}") from None
        if len(raw) != self._bytes:
            raise FileFormatError(f"{self._name}: has a damaged chunk at {at}: it is not one of {self._bytes} bytes")
        found: NDArray[Any] = np.frombuffer(raw, np.uint8)
        if filters > 1 and not skipped & 1:
            found = _unshuffled(found, self.dataset.dtype.itemsize)
        part: NDArray[Any] = found.view(self.dataset.dtype).reshape(self.dataset.chunks)
        return part

    def _check(self, at: tuple[int, ...], size: int) -> None:
        """Raise FileFormatError for a chunk that unpacks to too much; it is read only if it could."""

        @cache
        def raw() -> Any:
            return self.dataset.id.read_direct_chunk(at)[1]

        part = lambda offset, count: raw()[offset : offset + count]  # noqa: E731
        check_expansion(self._name, self.source.codec, part, size, self._bytes)


def _unshuffled(raw: NDArray[np.uint8], itemsize: int) -> NDArray[Any]:
    """Return elements whose first bytes lie together in `raw`, and so on with the next.

    >>> _unshuffled(np.frombuffer(b"acebdf", np.uint8), 2).tobytes()
    b'abcdef'
    """
    planes = raw.reshape(itemsize, -1)
    if itemsize not in (2, 4, 8):
        return planes.T.copy().reshape(-1)
    # by shifts, which is faster than to copy bytes one by one
    whole: NDArray[Any] = planes[-1].astype(f"<u{itemsize}")
    for plane in planes[-2::-1]:
        whole <<= 8
        whole |= plane
    return whole


@dataclass(frozen=True)
class DenseDataset(DenseFile):
    """A dataset whose elements lie dense in the file."""

    inner: str = ""
    allow_external: bool = False

    def again(self) -> Dataset:
        return by_library(self.path, self.inner, self.array, self.allow_external)


@dataclass(frozen=True)
class Hdf5Sink(AddedSink):
    def source(self) -> Any:
        """Return the written dataset. Raises FileFormatError."""
        return open_dataset(joined(self.temporary, self.inner))


def open_array(path: Path, dtype: Any = None) -> Any:
    return open_dataset(path, dtype, is_matrix=False)


def open_dataset(path: Path, dtype: Any = None, is_matrix: bool = True, is_dense: bool = True) -> Any:
    """A dataset, its type and place checked; no element is read. The only matrix in the file where none is named.

    is_dense: read it without the library where it lies dense. Raises FileFormatError.
    """
    file, inner = _followed(*split(path))
    with examined(file, ".h5") as (_, version), library_file(file) as held:
        dataset = held[inner]
        name = display_path(joined(file, inner))
        check_sources(name, dataset, file)
        native = element_type(name, dataset.dtype, dtype)
        stored: np.dtype[Any] = np.dtype(dataset.dtype.str)
        shape = _shape(name, dataset, is_matrix)
        offset = dataset.id.get_offset()
        is_there = dataset.id.get_storage_size() == prod(shape) * stored.itemsize > 0
        is_together = dataset.id.get_create_plist().get_layout() == CONTIGUOUS and not dataset.external
        chunks, codec = dataset.chunks, _codec(name, dataset)
    array = shape if len(shape) != 2 else ()
    flat = as_matrix(shape)
    check_extents(name, shape)
    if is_dense and is_together and is_there and offset is not None:
        made = DenseDataset(file, flat, native, False, offset, stored, version, inner, is_allowed(), array=array)
        made.check_size()
        return made
    if len(shape) > 2:
        raise FileFormatError(f"{name}: is an array of {len(shape)} dimensions in chunks; save it without, or use .npy")
    check_chunk_size(name, prod(chunks or (0,)) * native.itemsize, prod(shape) * native.itemsize)
    step = (1, *(chunks or (1,)))[-2:]
    kept = None if array else chunks
    return Dataset(file, inner, flat, native, kept, step, version, codec, is_allowed(), array=array)


def by_library(file: str, inner: str, array: tuple[int, ...], allow_external: bool) -> Dataset:
    """Return a dataset that is read through the library, wherever it lies. Raises FileFormatError."""
    with allowing(allow_external):
        made: Dataset = open_dataset(joined(file, inner), is_matrix=not array, is_dense=False)
    return made


def create(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Hdf5Sink:
    """Return a dataset in a new file, or added to an existing one, maybe replacing another. FileFormatError.

    The file that is there is copied first, and stays as it is until the whole is renamed.
    """
    file, inner = split(path)
    inner = inner or DEFAULT_NAME
    what = f"output {display_path(joined(file, inner))}"
    if dtype == BFLOAT16:
        raise FileFormatError(f"{what}: HDF5 has no bfloat16; use .safetensors or .npy, or another --result-dtype")
    library(file)
    with in_the_making(what, file) as held:
        before = Version.of(held.path)
        if before is not None:
            shutil.copyfile(file, held.temporary)
        offset = _reserved(held, what, inner, shape, dtype, is_new=before is None)
        end = offset + prod(shape) * dtype.itemsize
        held.reserve(b"", max(end, os.path.getsize(held.temporary)))
    return Hdf5Sink(held.path, held.temporary, as_matrix(shape), dtype, dtype, offset, held, inner, before)


def _reserved(held: Unfinished, what: str, inner: str, shape: tuple[int, ...], dtype: Any, is_new: bool) -> int:
    """Return the offset of the elements of a new dataset that nobody has filled in. Raises OSError, FileFormatError."""
    import h5py

    with library_errors(what), h5py.File(held.temporary, "w" if is_new else "r+", locking=False) as file:
        check_no_links(what, file, inner)
        if isinstance(file.get(inner), h5py.Group):
            raise FileFormatError(f"{what}: is a group in that file; name a matrix inside it")
        if inner in file:
            del file[inner]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        links.set_create_intermediate_group(True)
        kind, space = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple(shape)
        made = h5py.h5d.create(file.id, inner.encode(), kind, space, dcpl=plist, lcpl=links)
        return int(made.get_offset() or 0)


def _followed(file: str, inner: str) -> tuple[str, str]:
    """(file, dataset in it) behind the links of a name; of the only matrix in the file if none is named.

    Raises FileFormatError, which lists the matrices there are, and for links to other files unless they are allowed.
    """
    for _ in range(MOST_FILES):
        with examined(file, ".h5"), library_file(file) as held:
            import h5py

            inner = inner or _only(held, file)
            place = resolved(display_path(joined(file, inner)), held, file, inner)
            if place is None or place[0] == file:
                found = None if place is None else held[place[1]]
                if place and isinstance(found, h5py.Dataset):
                    return place
                raise no_matrix(file, inner, _matrices(held), "a group" if found is not None else "not there")
        file, inner = place
    raise FileFormatError(f"{display_path(file)}: is reached by more than {MOST_FILES} links from file to file")


def _only(held: Any, file: str) -> str:
    """Return the name of the only matrix in a file. Raises FileFormatError."""
    names = _matrices(held)
    if len(names) != 1:
        raise no_matrix(file, "", names)
    return next(iter(names))


def _matrices(held: Any) -> dict[str, str]:
    """Return the matrices in a file: name → shape and type."""
    import h5py

    found: dict[str, str] = {}

    def look(name: str, x: Any) -> None:
        if isinstance(x, h5py.Dataset):
            kind = x.dtype.name if x.dtype.kind != "O" else "objects"
            if x.is_virtual:  # its shape may be that of other files
                found[f"/{name}"] = f"virtual, of {kind}"
            elif x.shape is not None and len(x.shape) == 2:
                found[f"/{name}"] = f"{x.shape} of {kind}"

    held.visititems(look)
    return found


def _shape(name: str, dataset: Any, is_matrix: bool) -> tuple[int, ...]:
    """Return the shape, if it is that of a matrix, or of an array where one will do. Raises FileFormatError."""
    shape: tuple[int, ...] | None = dataset.shape
    if shape is None:
        raise FileFormatError(f"{name}: has no elements; a matrix is needed")
    check_shape(name, shape, is_matrix)
    return shape


def _codec(name: str, dataset: Any) -> str:
    """The filter of a dataset's chunks that can make much of little; empty without. Raises FileFormatError for two."""
    codecs = [CODECS.get(kind, f"filter {kind}") for kind in _filters(dataset) if kind not in BOUNDED]
    check_compressors(name, codecs)
    return "".join(codecs)


def _filters(dataset: Any) -> list[int]:
    """Return the numbers of the filters that a dataset's chunks went through, in this order."""
    plist = dataset.id.get_create_plist()
    return [plist.get_filter(n)[0] for n in range(plist.get_nfilters())]

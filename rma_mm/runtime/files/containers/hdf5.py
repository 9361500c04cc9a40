"""Matrices in HDF5 files: datasets, read by each rank for itself, and written by all ranks at once.

A dataset whose elements lie dense in the file is read without the HDF5 library, once that has told where; others, in
chunks say, are read through it. What is written lies dense: the library, which is serial, makes room for it and fills
nothing in, and then ranks write their parts there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import FileFormatError, named
from rma_mm.geometry.extents import as_matrix
from rma_mm.runtime.files.containers.added import AddedSink, in_the_making
from rma_mm.runtime.files.containers.chunked import ChunkedFile
from rma_mm.runtime.files.containers.packages import package, refused_by
from rma_mm.runtime.files.dense import DenseFile
from rma_mm.runtime.files.formats import Format, Path, check_extents, check_shape, element_type, register_format
from rma_mm.runtime.files.names import joined, no_matrix, split
from rma_mm.runtime.files.version import Version, examined
from rma_mm.unfinished import SUFFIX, Unfinished

DEFAULT_NAME = "C"
"""The dataset that is written where none is named."""
CONTIGUOUS = 1
"""What the library calls a dataset whose elements lie together (H5D_CONTIGUOUS)."""


@dataclass(frozen=True)
class Dataset(ChunkedFile):
    """A dataset that is read through the library: a `Source`."""

    @contextmanager
    def reader(self) -> Iterator[Any]:
        """A block with the dataset. Errors inside are FileFormatError."""
        with _file(self.path) as file:
            yield file[self.inner]

    def again(self) -> Dataset:
        """The same once more."""
        return by_library(self.path, self.inner, self.array)


@dataclass(frozen=True)
class DenseDataset(DenseFile):
    """A dataset whose elements lie dense in the file."""

    inner: str = ""

    def again(self) -> Dataset:
        """The same through the library."""
        return by_library(self.path, self.inner, self.array)


@dataclass(frozen=True)
class Hdf5Sink(AddedSink):
    """A dataset in the making."""

    def source(self) -> Any:
        """What has been written. Raises FileFormatError."""
        return open_dataset(joined(self.temporary, self.inner))


def open_array(path: Path, dtype: Any = None) -> Any:
    """As `open_dataset`, for any number of dimensions but none where elements lie dense, and for vectors."""
    return open_dataset(path, dtype, is_matrix=False)


def open_dataset(path: Path, dtype: Any = None, is_matrix: bool = True, is_dense: bool = True) -> Any:
    """A dataset, its type and place checked; no element is read. The only matrix in the file where none is named.

    is_dense: read it without the library where it lies dense. Raises FileFormatError.
    """
    file, inner = split(path)
    with examined(file, ".h5") as (_, version), _file(file) as held:
        inner = inner or _only(held, file)
        dataset = _found(held, file, inner)
        name = named(joined(file, inner))
        native = element_type(name, dataset.dtype, dtype)
        stored: np.dtype[Any] = np.dtype(dataset.dtype.str)
        shape = _shape(name, dataset, is_matrix)
        offset = dataset.id.get_offset()
        is_there = dataset.id.get_storage_size() == prod(shape) * stored.itemsize > 0
        is_together = dataset.id.get_create_plist().get_layout() == CONTIGUOUS and not dataset.external
        _check_virtual(name, dataset, file)
        chunks = dataset.chunks
    array = shape if len(shape) != 2 else ()
    flat = as_matrix(shape)
    check_extents(name, shape)
    if is_dense and is_together and is_there and offset is not None:
        made = DenseDataset(file, flat, native, False, offset, stored, version, inner, array=array)
        made.check_size()
        return made
    if len(shape) > 2:
        raise FileFormatError(f"{name}: is an array of {len(shape)} dimensions in chunks; save it without, or use .npy")
    step = (1, *(chunks or (1,)))[-2:]
    return Dataset(file, inner, flat, native, None if array else chunks, step, version, array=array)


def by_library(file: str, inner: str, array: tuple[int, ...]) -> Dataset:
    """A dataset that is read through the library, wherever it lies. Raises FileFormatError."""
    made: Dataset = open_dataset(joined(file, inner), is_matrix=not array, is_dense=False)
    return made


def create(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Hdf5Sink:
    """A dataset in a new file, or added to the one that is there, where it replaces one of its name. FileFormatError.

    The file that is there is copied first, and stays as it is until the whole is renamed.
    """
    file, inner = split(path)
    inner = inner or DEFAULT_NAME
    what = f"output {named(joined(file, inner))}"
    if dtype == BFLOAT16:
        raise FileFormatError(f"{what}: HDF5 has no bfloat16; use .safetensors or .npy, or another --result-dtype")
    _library(file)
    with in_the_making(what, file) as held:
        before = Version.of(held.path)
        if before is not None:
            shutil.copyfile(file, held.temporary)
        offset = _reserved(held, what, inner, shape, dtype, is_new=before is None)
        end = offset + prod(shape) * dtype.itemsize
        held.reserve(b"", max(end, os.path.getsize(held.temporary)))
    return Hdf5Sink(held.path, held.temporary, as_matrix(shape), dtype, dtype, offset, held, inner, before)


def _reserved(held: Unfinished, what: str, inner: str, shape: tuple[int, ...], dtype: Any, is_new: bool) -> int:
    """Where the elements of a new dataset begin, which nobody has filled in. Raises OSError, FileFormatError."""
    import h5py

    with _errors(what), h5py.File(held.temporary, "w" if is_new else "r+", locking=False) as file:
        if isinstance(file.get(inner), h5py.Group):
            raise FileFormatError(f"{what}: is a group in that file; name a matrix in it")
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


@contextmanager
def _file(path: str) -> Iterator[Any]:
    """The file by the library, for reading. Raises FileFormatError, for what goes wrong inside too."""
    library = _library(path)
    locking = False if path.endswith(SUFFIX) else "best-effort"  # of what is in the making, this job holds the lock
    with _errors(named(path)), library.File(path, "r", locking=locking) as file:
        yield file


def _library(path: str) -> Any:
    """h5py. Raises FileFormatError where it is not installed."""
    return package("h5py", "hdf5", path)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """The library's errors as FileFormatError."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, FileFormatError):
            raise
        if "unable to lock file" in str(error):
            fix = "close it there, or say HDF5_USE_FILE_LOCKING=FALSE if nobody writes to it"
            raise FileFormatError(f"{what}: is locked by a program that writes to it; {fix}") from None
        raise refused_by("HDF5", what, error) from None


def _found(held: Any, file: str, inner: str) -> Any:
    """The dataset of a name. Raises FileFormatError, which lists those there are."""
    import h5py

    try:
        found = held.get(inner)
    except (KeyError, OSError, RuntimeError):  # a link that leads nowhere
        found = None
    if isinstance(found, h5py.Dataset):
        return found
    kind = "a group" if isinstance(found, h5py.Group) else "not there"
    raise no_matrix(file, inner, _matrices(held), kind)


def _only(held: Any, file: str) -> str:
    """The name of the only matrix in a file. Raises FileFormatError."""
    names = _matrices(held)
    if len(names) != 1:
        raise no_matrix(file, "", names)
    return next(iter(names))


def _matrices(held: Any) -> dict[str, str]:
    """The matrices in a file: name → shape and type."""
    import h5py

    found: dict[str, str] = {}

    def look(name: str, x: Any) -> None:
        if isinstance(x, h5py.Dataset) and x.shape is not None and len(x.shape) == 2:
            found[f"/{name}"] = f"{x.shape} of {x.dtype.name if x.dtype.kind != 'O' else 'objects'}"

    held.visititems(look)
    return found


def _shape(name: str, dataset: Any, is_matrix: bool) -> tuple[int, ...]:
    """The shape, if it is that of a matrix, or of an array where one will do. Raises FileFormatError."""
    shape: tuple[int, ...] | None = dataset.shape
    if shape is None:
        raise FileFormatError(f"{name}: has no elements; a matrix is needed")
    check_shape(name, shape, is_matrix)
    return shape


def _check_virtual(name: str, dataset: Any, file: str) -> None:
    """Raise FileFormatError where a file behind a virtual dataset is gone: the library gives fill values for it."""
    if not dataset.is_virtual:
        return
    for source in dataset.virtual_sources():
        path = os.path.join(os.path.dirname(os.path.abspath(file)), source.file_name)
        if source.file_name != "." and "%" not in source.file_name and not os.path.exists(path):
            raise FileFormatError(f"{name}: is put together from files of which {named(path)} is not there")


register_format(Format((".h5", ".hdf5", ".hdf"), open_dataset, create, open_array, holds_many=True))

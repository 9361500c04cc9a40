"""Matrices in safetensors files: dense tensors by rows behind a header of JSON, and indices that name several files.

The form is that of https://github.com/huggingface/safetensors: eight bytes of the header's length, little-endian, the
header, and the elements of all tensors without a gap. It is read and written here; the package of that name reads a
second time what is checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import FileFormatError, cut, named, quoted
from rma_mm.geometry.extents import as_matrix
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.containers.added import AddedSink, in_the_making
from rma_mm.runtime.files.dense import DenseFile
from rma_mm.runtime.files.formats import Format, Path, Readable, Sink, check_shape, register_format
from rma_mm.runtime.files.names import SEPARATOR, listed, split
from rma_mm.runtime.files.version import Version, identity_of, opened
from rma_mm.unfinished import Unfinished, write_at

TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "C64": np.dtype("<c8"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("bool"), "BF16": np.dtype("V2"),
}  # fmt: skip
"""What the header calls each type of elements, as they lie in the file."""
LONGEST_HEADER = 100_000_000
"""Bytes of a header at most, as the package has it."""
METADATA = "__metadata__"
"""What the header says beside the tensors, under this name."""
DEFAULT_NAME = "C"
"""The tensor that is written where none is named."""
BLOCK = 2**24
"""Bytes of other tensors that are copied at a time."""


@dataclass(frozen=True)
class Header:
    """What is in a file."""

    tensors: Mapping[str, Mapping[str, Any]]
    """Name → dtype, shape and data_offsets, as they stand there; in the order of the elements."""
    metadata: Mapping[str, str] | None
    start: int
    """Bytes before the first element."""
    version: Version

    @property
    def matrices(self) -> dict[str, str]:
        """The matrices among the tensors: name → shape and type."""
        return {
            name: f"{tuple(x['shape'])} of {x['dtype']}" for name, x in self.tensors.items() if len(x["shape"]) == 2
        }


@dataclass(frozen=True)
class Tensor(DenseFile):
    """A tensor in a file."""

    inner: str = ""

    def again(self) -> Readable:
        """The same by the package, where it is installed."""
        try:
            import safetensors  # noqa: F401
        except ImportError:
            return self
        return ByPackage(self)


@dataclass(frozen=True)
class ByPackage:
    """A tensor that the package reads. Its calls raise OSError and ValueError too."""

    first: Tensor

    def __post_init__(self) -> None:
        with self._file() as file:
            found = tuple(file.get_slice(self.first.inner).get_shape())
        if found != (self.first.array or self.first.shape):
            raise ValueError(f"it holds {cut(found)}, and held {self.first.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.first.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self.first.dtype

    fortran_order = False

    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (region.shape) with the part in `region`, of which whole rows are read."""
        if not region:
            return
        rows = Span.range(region[0].start, region[0].stop)
        with self._file() as file:
            tensor = file.get_slice(self.first.inner)
            whole = tensor[rows.start : rows.stop] if not self.first.array else tensor[:].reshape(self.shape)
        inside = Region((region[0] if self.first.array else rows.locate(region[0]), region[1]))
        out[...] = whole[inside.selector()]

    def _file(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.first.path, "np")
        except SafetensorError as error:
            raise ValueError(str(error)) from None


@dataclass(frozen=True)
class SafetensorsSink(AddedSink):
    """A tensor in the making."""

    def source(self) -> Tensor:
        """What has been written. Raises FileFormatError."""
        return open_tensor(f"{self.temporary}{SEPARATOR}{self.inner}")


def open_array(path: Path, dtype: Any = None) -> Tensor:
    """As `open_tensor`, for any number of dimensions but none."""
    return open_tensor(path, dtype, is_matrix=False)


def open_tensor(path: Path, dtype: Any = None, is_matrix: bool = True) -> Tensor:
    """A tensor, its header checked; no element is read. The only matrix in the file where none is named.

    Raises FileFormatError.
    """
    file, inner = split(path)
    header = read_header(file)
    if not inner and len(header.matrices) != 1:
        how = f"{named(file)}{SEPARATOR}NAME"
        raise FileFormatError(f"{named(file)}: say which matrix, as {how}; the file holds {listed(header.matrices)}")
    inner = inner or next(iter(header.matrices))
    if inner not in header.tensors:
        raise FileFormatError(f"{named(file)}: {cut(inner)} is not there; the file holds {listed(header.matrices)}")
    found = header.tensors[inner]
    name, shape = named(f"{file}{SEPARATOR}{inner}"), tuple(found["shape"])
    if found["dtype"] not in TYPES:
        raise FileFormatError(f"{name}: holds {cut(found['dtype'])}; types that are read are {', '.join(TYPES)}")
    check_shape(name, shape, is_matrix)
    stored = TYPES[found["dtype"]]
    native = stored.newbyteorder("=") if stored != TYPES["BF16"] else BFLOAT16
    if native is None:
        raise FileFormatError(f"{name}: holds bfloat16; pip install ml_dtypes to read it")
    if dtype is not None and np.dtype(dtype) != native:
        raise FileFormatError(f"{name}: holds {native.name}, but {np.dtype(dtype).name} was asked for; leave it out")
    array, offset = shape if len(shape) != 2 else (), header.start + found["data_offsets"][0]
    made = Tensor(file, as_matrix(shape), native, False, offset, stored, header.version, inner, array=array)
    made.check_size()
    return made


def read_header(path: str) -> Header:
    """What is in a file, checked in full. Raises FileFormatError."""
    name = named(path)
    try:
        with opened(path, ".safetensors") as descriptor:
            found = os.fstat(descriptor)
            size = found.st_size
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if size < 8 or not 0 < length <= min(LONGEST_HEADER, size - 8):
                what = "is empty" if not size else f"is no safetensors file, or truncated: it has {size} bytes"
                raise FileFormatError(f"{name}: {what}")
            text = os.pread(descriptor, length, 8)
    except OSError as error:
        raise FileFormatError(f"{name}: cannot be read: {error.strerror}") from None
    try:
        said = json.loads(text)
        metadata = said.pop(METADATA, None)
        tensors = dict(sorted(said.items(), key=lambda item: tuple(item[1]["data_offsets"])))
        end = 0
        for tensor, x in tensors.items():
            end = _checked(tensor, x, end)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{name}: has a damaged header: {cut(error)}") from None
    if 8 + length + end != size:
        raise FileFormatError(
            f"{name}: is truncated, or no safetensors file: its header tells of {8 + length + end} bytes, it has {size}"
        )
    return Header(tensors, metadata, 8 + length, Version(path, identity_of(found)))


def _checked(name: str, x: Any, end: int) -> int:
    """Where the elements of a tensor end, which begin where those before it end. Raises ValueError, TypeError."""
    (begin, stop), shape, dtype = x["data_offsets"], x["shape"], x["dtype"]
    if not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, begin, stop))):
        raise ValueError(f"{quoted(name)} has the shape {cut(shape)} at {begin}, {stop}")
    if begin != end or stop < begin or not isinstance(dtype, str):
        raise ValueError(f"{quoted(name)} lies at {begin} to {stop}, where {end} is its place")
    if dtype in TYPES and stop - begin != prod(shape) * TYPES[dtype].itemsize:
        raise ValueError(f"{quoted(name)} has {stop - begin} bytes for {cut(shape)} of {dtype}")
    return int(stop)


def create(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> SafetensorsSink:
    """A tensor in a new file, or added to the one that is there, where it replaces one of its name. FileFormatError.

    The tensors that are there are copied, and the file stays as it is until the whole is renamed.
    """
    file, inner = split(path)
    inner = inner or DEFAULT_NAME
    what = f"output {named(f'{file}{SEPARATOR}{inner}')}"
    kind = next((key for key, x in TYPES.items() if x.newbyteorder("=") == dtype), "BF16" if dtype == BFLOAT16 else "")
    if not kind or inner == METADATA:
        why = f"safetensors has no {dtype.name}; use .npy, or another --result-dtype" if not kind else "is no name"
        raise FileFormatError(f"{what}: {why}")
    there = os.path.lexists(file)
    with in_the_making(what, file) as held:
        old = read_header(file) if there else None
        kept = {name: dict(x) for name, x in (old.tensors if old else {}).items() if name != inner}
        size = prod(shape) * TYPES[kind].itemsize
        said, end = _placed({**kept, inner: {"dtype": kind, "shape": list(shape), "data_offsets": [0, size]}})
        head = _header(said, old.metadata if old else None)
        held.reserve(head, len(head) + end)
        if old:
            _copy(old, kept, said, held, len(head))
    offset, version = len(head) + said[inner]["data_offsets"][0], old.version if old else None
    rows_cols = as_matrix(shape)
    return SafetensorsSink(held.path, held.temporary, rows_cols, dtype, TYPES[kind], offset, held, inner, version)


def _placed(tensors: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], int]:
    """Tensors with where they are to lie, and where they end: large elements first, so that each is aligned."""
    order = sorted(tensors, key=lambda name: (-getattr(TYPES.get(tensors[name]["dtype"]), "itemsize", 1), name))
    placed, end = {}, 0
    for name in order:
        begin, stop = tensors[name]["data_offsets"]
        placed[name] = {**tensors[name], "data_offsets": [end, end + stop - begin]}
        end += stop - begin
    return placed, end


def _header(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> bytes:
    """All bytes before the elements, which begin at a multiple of 8."""
    said = {METADATA: metadata} if metadata is not None else {}
    text = json.dumps({**said, **tensors}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _copy(old: Header, kept: Mapping[str, Any], said: Mapping[str, Any], held: Unfinished, start: int) -> None:
    """Copy the tensors that stay. Raises OSError, FileFormatError."""
    with opened(old.version.path) as descriptor:
        old.version.check(descriptor)
        for name, x in kept.items():
            source, target = old.start + x["data_offsets"][0], start + said[name]["data_offsets"][0]
            count = x["data_offsets"][1] - x["data_offsets"][0]
            for at in range(0, count, BLOCK):
                part = os.pread(descriptor, min(BLOCK, count - at), source + at)
                write_at(held.descriptor, part, target + at)
        old.version.check(descriptor)


def open_indexed(path: Path, dtype: Any = None, is_matrix: bool = True) -> Tensor:
    """A tensor in one of several files, which an index beside them names. Raises FileFormatError."""
    index, inner = split(path)
    name = named(index)
    try:
        with opened(index, ".json") as descriptor:
            said = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        files = dict(said["weight_map"])
    except OSError as error:
        raise FileFormatError(f"{name}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FileFormatError(f"{name}: is no index of tensors: {cut(error)}") from None
    if inner not in files:
        what = f"{cut(inner)} is not there" if inner else f"say which matrix, as {name}{SEPARATOR}NAME"
        raise FileFormatError(f"{name}: {what}; the index holds {listed({x: str(file) for x, file in files.items()})}")
    file = files[inner]
    if not isinstance(file, str) or os.path.basename(file) != file:
        raise FileFormatError(f"{name}: {cut(inner)} is said to be in {quoted(file)}, which is no file beside it")
    beside = os.path.join(os.path.dirname(index), file)
    return open_tensor(f"{beside}{SEPARATOR}{inner}", dtype, is_matrix)


def open_indexed_array(path: Path, dtype: Any = None) -> Tensor:
    """As `open_indexed`, for any number of dimensions but none."""
    return open_indexed(path, dtype, is_matrix=False)


def refuse(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Sink:
    """Raises FileFormatError: an index is not written."""
    raise FileFormatError(f"output {named(path)}: is an index of files; write to a .safetensors file")


register_format(Format((".safetensors",), open_tensor, create, open_array, holds_many=True))
register_format(Format((".safetensors.index.json",), open_indexed, refuse, open_indexed_array, holds_many=True))

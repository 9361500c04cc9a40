"""Matrices in safetensors files: dense tensors by rows behind a header of JSON, and indices that name several files.

The form is that of https://github.com/huggingface/safetensors: eight bytes of the header's length, little-endian, the
header, and the elements of all tensors without a gap. It is read and written here; the package of that name reads a
second time what is checked.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.errors import FileFormatError, display_path, quoted, truncate
from rma_mm.geometry.extents import as_matrix
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.containers.added import AddedSink, in_the_making
from rma_mm.runtime.files.dense import DenseFile
from rma_mm.runtime.files.external import external, is_allowed
from rma_mm.runtime.files.formats import (
    Path,
    Readable,
    Shape,
    Sink,
    check_extents,
    check_said,
    check_shape,
)
from rma_mm.runtime.files.names import joined, no_matrix, split
from rma_mm.runtime.files.sieve import from_disk
from rma_mm.runtime.files.version import Version, examined, opened
from rma_mm.unfinished import Unfinished, write_at

TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "C64": np.dtype("<c8"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("bool"), **({"BF16": np.dtype("V2")} if BFLOAT16 is not None else {}),
}
"""Element types by their names in the header, in the file's byte order."""
LONGEST_HEADER = 2**23
"""Bytes of a header, or of an index, at most: some 80,000 tensors. The package takes 100 MB, and much memory for it."""
MOST_DIMENSIONS = 64  # dimensions of a tensor at most
METADATA = "__metadata__"  # key of the header's metadata
DEFAULT_NAME = "C"  # the tensor that is written where none is named
FIRST = (0, 8)  # the first version of the package that reads files again
BLOCK = 2**24  # bytes that are copied at a time, or read through the package


@dataclass(frozen=True)
class Header:
    tensors: Mapping[str, Mapping[str, Any]]
    """Name → dtype, shape and data_offsets, as they stand there; in the order of the elements."""
    metadata: Mapping[str, str] | None
    start: int  # bytes before the first element
    version: Version

    @property
    def matrices(self) -> dict[str, str]:
        return {
            name: f"{tuple(x['shape'])} of {x['dtype']}" for name, x in self.tensors.items() if len(x["shape"]) == 2
        }


@dataclass(frozen=True)
class Tensor(DenseFile):
    inner: str = ""
    index: Version | None = None  # the index that named the file, where one did

    @property
    def facts(self) -> Mapping[str, object]:
        return {**super().facts, "tensor": self.inner, "file": self.path}

    def check(self) -> None:
        """Raise FileFormatError if the file, or the index, is no longer the one that was opened."""
        super().check()
        if self.index is not None:
            self.index.check()

    def again(self) -> Readable:
        """Return the same tensor read by the package if it is installed, else again by this code."""
        self.check()
        made = replace(open_array(joined(self.path, self.inner)), index=self.index)
        return ByPackage(made) if _has_package() and not made.array else made


class ByPackage:
    """A matrix in a file that the package reads. Its calls raise OSError and ValueError too."""

    fortran_order = False

    def __init__(self, file: Tensor) -> None:
        self.file = file
        with self._opened() as tensor:
            self.shape: Shape = tuple(tensor.get_shape())
            self.dtype: np.dtype[Any] = _native(tensor.get_dtype())

    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (region.shape) with the part in `region`, which comes from the disk."""
        for box in region.run_boxes():
            at = region.locate(box)
            most = max(1, BLOCK // (len(box[1]) * self.dtype.itemsize))
            with self._opened() as tensor:
                for rows, lines in zip(box[0].pieces(most), at[0].pieces(most), strict=True):
                    out[Region((lines, at[1])).selector()] = tensor[Region((rows, box[1])).selector()]

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The tensor, of which slices are read; not from a map of the file."""
        from safetensors import SafetensorError, safe_open

        with opened(self.file.path) as descriptor:
            self.file.version.check(descriptor)
            from_disk(descriptor, self.file.offset, prod(self.file.shape) * self.file.stored.itemsize)
        try:
            with safe_open(self.file.path, "np", backend="pread") as held:
                yield held.get_slice(self.file.inner)
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        self.file.check()


@dataclass(frozen=True)
class SafetensorsSink(AddedSink):
    def source(self) -> Tensor:
        """Return the written tensor. Raises FileFormatError."""
        return open_tensor(joined(self.temporary, self.inner))


def open_array(path: Path, dtype: Any = None) -> Tensor:
    return open_tensor(path, dtype, is_matrix=False)


def open_tensor(path: Path, dtype: Any = None, is_matrix: bool = True) -> Tensor:
    """Return a tensor, its header checked; no element is read. The only matrix in the file where none is named.

    Raises FileFormatError.
    """
    file, inner = split(path)
    header = read_header(file)
    inner = inner or _only(file, header, is_matrix)
    if inner not in header.tensors:
        raise no_matrix(file, inner, header.matrices)
    found = header.tensors[inner]
    name, shape = display_path(joined(file, inner)), tuple(found["shape"])
    if found["dtype"] not in TYPES:
        raise FileFormatError(f"{name}: holds {truncate(found['dtype'])}; types that are read are {', '.join(TYPES)}")
    check_shape(name, shape, is_matrix)
    check_extents(name, shape)
    stored, native = TYPES[found["dtype"]], _native(found["dtype"])
    check_said(name, native, dtype)
    array, offset = shape if len(shape) != 2 else (), header.start + found["data_offsets"][0]
    return Tensor(file, as_matrix(shape), native, False, offset, stored, header.version, inner, array=array)


def _native(kind: str) -> np.dtype[Any]:
    return BFLOAT16 if kind == "BF16" and BFLOAT16 is not None else TYPES[kind].newbyteorder("=")


def _only(file: str, header: Header, is_matrix: bool) -> str:
    """Return the name of the only matrix, or else of the only array where one will do. Raises FileFormatError."""
    found = list(header.matrices)
    if not found and not is_matrix:
        found = [name for name, x in header.tensors.items() if x["shape"]]
    if len(found) != 1:
        raise no_matrix(file, "", header.matrices)
    return found[0]


def read_header(path: str) -> Header:
    """Return the header of a file, checked in full. Raises FileFormatError."""
    name = display_path(path)
    with examined(path, ".safetensors") as (descriptor, version):
        size = version.size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if size < 8 or not 0 < length <= size - 8:
            what = "is empty" if not size else f"is no safetensors file, or truncated: it has {size} bytes"
            raise FileFormatError(f"{name}: {what}")
        if length > LONGEST_HEADER:
            raise FileFormatError(f"{name}: has a header of {length} bytes; at most {LONGEST_HEADER} are read")
        text = os.pread(descriptor, length, 8)
    try:
        said = _parsed(text)
        metadata = said.pop(METADATA, None)
        beside = {} if metadata is None else metadata
        for texts in (said, beside, beside.values()):
            "".join(texts).encode()  # half of a surrogate pair can be neither written nor printed
        tensors = dict(sorted(said.items(), key=lambda item: tuple(item[1]["data_offsets"])))
        end = 0
        for tensor, x in tensors.items():
            end = _checked(tensor, x, end)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{name}: has a damaged header: {truncate(error)}") from None
    if 8 + length + end != size:
        raise FileFormatError(
            f"{name}: is truncated, or no safetensors file: its header tells of {8 + length + end} bytes, it has {size}"
        )
    return Header(tensors, metadata, 8 + length, version)


def _parsed(text: bytes) -> Any:
    """JSON in UTF-8, in which no key of an object stands twice. Raises ValueError, RecursionError."""

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ValueError(f"{quoted(twice)} stands there twice")
        return found

    return json.loads(text.decode(), object_pairs_hook=made)


def _has_package() -> bool:
    """True if the package is installed and reads bfloat16 into NumPy's arrays."""
    try:
        from safetensors import __version__
    except ImportError:
        return False
    return tuple(int(n) for n in __version__.split(".")[:2]) >= FIRST


def _checked(name: str, x: Any, end: int) -> int:
    """Return the end of a tensor's elements, which must begin at `end` of those before.

    Raises ValueError, TypeError.
    """
    (begin, stop), shape, dtype = x["data_offsets"], x["shape"], x["dtype"]
    is_shape = isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS
    if not (is_shape and all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, stop))):
        raise ValueError(f"{quoted(name)} has the shape {truncate(shape)} at {begin}, {stop}")
    if begin != end or stop < begin or not isinstance(dtype, str):
        raise ValueError(f"{quoted(name)} lies at {begin} to {stop}, where {end} is its place")
    if dtype in TYPES and stop - begin != prod(shape) * TYPES[dtype].itemsize:
        raise ValueError(f"{quoted(name)} has {stop - begin} bytes for {truncate(shape)} of {dtype}")
    return int(stop)


def create(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> SafetensorsSink:
    """Return a tensor in a new file, or added to an existing one, maybe replacing another. FileFormatError.

    The tensors that are there are copied, and the file stays as it is until the whole is renamed.
    """
    file, inner = split(path)
    inner = inner or DEFAULT_NAME
    what = f"output {display_path(joined(file, inner))}"
    kind = next((key for key in TYPES if _native(key) == dtype), "")
    if not kind:
        raise FileFormatError(f"{what}: safetensors has no {dtype.name}; use .npy, or another --result-dtype")
    if inner == METADATA or not _is_text(inner):
        raise FileFormatError(f"{what}: {quoted(inner)} is no name of a tensor; use another")
    with in_the_making(what, file) as held:
        old = read_header(held.path) if os.path.exists(held.path) else None
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


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # a part of a name that is not in UTF-8 on the command line
        return False
    return True


def _placed(tensors: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return tensors with their offsets and the end: large elements first, so that each is aligned."""
    order = sorted(tensors, key=lambda name: (-getattr(TYPES.get(tensors[name]["dtype"]), "itemsize", 1), name))
    placed, end = {}, 0
    for name in order:
        begin, stop = tensors[name]["data_offsets"]
        placed[name] = {**tensors[name], "data_offsets": [end, end + stop - begin]}
        end += stop - begin
    return placed, end


def _header(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> bytes:
    """Return all bytes before the elements, which begin at a multiple of 8."""
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
    """Return a tensor in one of several files that an index lists. Raises FileFormatError."""
    index, inner = split(path)
    files, version = read_index(index)
    if inner not in files:
        raise no_matrix(index, inner, {x: str(file) for x, file in files.items()}, holder="index")
    return replace(open_tensor(joined(file_in(index, files[inner]), inner), dtype, is_matrix), index=version)


def read_index(index: str) -> tuple[dict[str, Any], Version]:
    """Return the file of each tensor as an index has it, unchecked, and the index's version. Raises FileFormatError."""
    name = display_path(index)
    with examined(index, ".json") as (descriptor, version):
        if version.size > LONGEST_HEADER:
            raise FileFormatError(f"{name}: has {version.size} bytes; at most {LONGEST_HEADER} of an index are read")
        text = os.pread(descriptor, version.size, 0)
    try:
        return dict(_parsed(text)["weight_map"]), version
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FileFormatError(f"{name}: is no index of tensors: {truncate(error)}") from None


def file_in(index: str, file: Any) -> str:
    """The path of a file that an index names. Raises FileFormatError; also, unless allowed, outside its folder."""
    if not isinstance(file, str) or os.path.basename(file) in ("", ".", "..") or "\0" in file:
        raise FileFormatError(f"{display_path(index)}: names {quoted(file)}, which is no file beside it")
    if os.path.basename(file) != file and not is_allowed():
        raise external(display_path(index), "names the file", file)
    return os.path.join(os.path.dirname(index), file)


def open_indexed_array(path: Path, dtype: Any = None) -> Tensor:
    return open_indexed(path, dtype, is_matrix=False)


def refuse(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Sink:
    """Refuse to write an index of several files, with FileFormatError."""
    raise FileFormatError(f"output {display_path(path)}: is an index of files; write to a .safetensors file")

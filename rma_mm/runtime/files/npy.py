"""`.npy` files: their headers, checked before anything is read, and their place in the registry of formats."""

from __future__ import annotations

import ast
import io
import os
import re
import struct
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED, as_dtype, supported_names
from rma_mm.errors import FileFormatError, display_path, quoted, truncate
from rma_mm.geometry.extents import as_matrix
from rma_mm.runtime.files.dense import DenseFile, DenseSink
from rma_mm.runtime.files.formats import Format, Readable, Source, check_said, check_shape, register_format
from rma_mm.runtime.files.npy_again import NpyAgain
from rma_mm.runtime.files.version import examined

MAGIC = b"\x93NUMPY"  # the first bytes of every .npy file
LONGEST_HEADER = 1 << 16  # bytes of header that are looked at; a matrix needs about 100


@dataclass(frozen=True)
class NpyFile(DenseFile):
    """A matrix in a `.npy` file whose header has been checked against the file's size."""

    def again(self) -> Readable:
        return NpyAgain.open(self.path)


@dataclass(frozen=True)
class NpySink(DenseSink):
    """A `.npy` file in the making."""

    @staticmethod
    def create(path: str | os.PathLike[str], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NpySink:
        """Reserve the whole file under a temporary name; an array is written as the matrix that it is kept as.

        Raises FileFormatError.
        """
        stored = np.dtype("V2") if dtype == BFLOAT16 else np.dtype(dtype)
        return NpySink.reserve(path, as_matrix(shape), dtype, stored, _header(shape, stored))

    def source(self) -> Source:
        """Return the written matrix. Raises FileFormatError."""
        return read_header(self.temporary, "bfloat16" if self.dtype == BFLOAT16 else None)


def read_array(path: str | os.PathLike[str], dtype_override: Any = None) -> NpyFile:
    return read_header(path, dtype_override, is_matrix=False)


def read_header(path: str | os.PathLike[str], dtype_override: Any = None, is_matrix: bool = True) -> NpyFile:
    """Return the header of the matrix in `path`, checked; no element is read and nothing is ever unpickled.

    `dtype_override` is what the user says the file holds: bfloat16 makes |V2 readable, other types must be the
    file's own. Raises FileFormatError for anything that is not a matrix of a supported type.
    """
    given = os.fspath(path)
    name = display_path(given)
    with examined(given, ".npy") as (descriptor, version):
        head = os.pread(descriptor, LONGEST_HEADER, 0)
    header, offset = _parsed(name, head, version.size)
    stored = _stored_type(name, header["descr"])
    dtype = _element_type(name, stored, None if dtype_override is None else as_dtype(dtype_override))
    shape, turned = _shape(name, header["shape"], is_matrix), header["fortran_order"]
    if len(shape) == 2:
        file = NpyFile(given, (shape[0], shape[1]), dtype, turned, offset, stored, version)
    else:
        flat = as_matrix(shape[::-1] if turned else shape)
        file = NpyFile(given, flat, dtype, False, offset, stored, version, array=shape, is_reversed=turned)
    file.check_size()
    return file


def _parsed(name: str, head: bytes, size: int) -> tuple[dict[str, Any], int]:
    """Return the header as a dict, and the offset of the first element."""
    if not head:
        raise FileFormatError(f"{name}: is empty; a .npy file is needed")
    if not head.startswith(MAGIC):
        hint = ""
        if head.startswith(b"PK"):
            hint = " (it looks like an .npz archive: save the matrix with np.save)"
        elif head.startswith(b"\x80"):
            hint = " (it looks like a pickle, which is never loaded: save the matrix with np.save)"
        elif len(head) < len(MAGIC) and MAGIC.startswith(head):
            hint = f" (it is truncated after {size} bytes)"
        raise FileFormatError(f"{name}: is not a .npy file{hint}")
    major = head[6] if len(head) > 6 else 1
    if major not in (1, 2, 3):
        raise FileFormatError(f"{name}: has .npy format version {major}; versions 1 to 3 can be read")
    start = 10 if major == 1 else 12
    length = struct.unpack("<H" if major == 1 else "<I", head[8:start])[0] if len(head) >= start else size
    if start + length > size:
        raise FileFormatError(f"{name}: is truncated: the file ends within its header, after {size} bytes")
    if start + length > len(head):
        raise FileFormatError(f"{name}: has a header of {length} bytes; that of a matrix is far below {LONGEST_HEADER}")
    text = head[start : start + length].decode("utf-8" if major == 3 else "latin-1", "replace")
    try:
        header = ast.literal_eval(re.sub(r"(\d)L\b", r"\1", text).strip())  # Python 2 wrote 10L
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        header = None
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise FileFormatError(f"{name}: has a damaged .npy header; save the matrix again with np.save")
    if type(header["fortran_order"]) is not bool:
        raise FileFormatError(
            f"{name}: has a damaged .npy header: fortran_order is {quoted(header['fortran_order'])}, not True or False"
        )
    return header, start + length


def _stored_type(name: str, descr: Any) -> np.dtype[Any]:
    if not isinstance(descr, str):
        raise FileFormatError(
            f"{name}: holds records ({truncate(descr)}); a matrix of plain numbers is needed: save one field, x['name']"
        )
    try:
        return np.dtype(descr)
    except (TypeError, ValueError):
        raise FileFormatError(f"{name}: has a damaged .npy header: {quoted(descr)} is no element type") from None


def _element_type(name: str, stored: np.dtype[Any], said: np.dtype[Any] | None) -> np.dtype[Any]:
    """Return the element type in memory for the stored type, given the user's `dtype`."""
    if stored.hasobject:
        raise FileFormatError(f"{name}: holds pickled objects, which are never loaded; save it with .astype(float)")
    if stored == np.dtype("V2") and BFLOAT16 is not None:
        if said == BFLOAT16:
            return BFLOAT16
        raise FileFormatError(f"{name}: holds |V2, two raw bytes an element; if that is bfloat16, say --dtype bfloat16")
    native = stored.newbyteorder("=")
    if native not in SUPPORTED:
        raise FileFormatError(f"{name}: holds {truncate(stored)}; supported element types are {supported_names()}")
    check_said(name, native, said)
    return native


def _shape(name: str, shape: Any, is_matrix: bool) -> tuple[int, ...]:
    """Return the shape in a header, if it is that of a matrix, or of an array where one will do."""
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise FileFormatError(f"{name}: has a damaged .npy header: {truncate(shape)} is no shape")
    check_shape(name, shape, is_matrix)
    return shape


def _header(shape: tuple[int, ...], stored: np.dtype[Any]) -> bytes:
    """Return a .npy header of format version 1.0, padded as NumPy pads."""
    text = io.BytesIO()
    fields = {"descr": stored.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(text, fields)
    return text.getvalue()


register_format(Format((".npy", ""), read_header, NpySink.create, read_array, sink=NpySink))

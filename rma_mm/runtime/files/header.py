"""The header of a `.npy` file, checked before anything is read."""

from __future__ import annotations

import ast
import os
import re
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED, supported_names
from rma_mm.errors import FileFormatError, cut, named, quoted
from rma_mm.geometry.extents import too_large
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.sieve import read_region
from rma_mm.runtime.files.version import Version, identity_of, opened

MAGIC = b"\x93NUMPY"
"""The first bytes of every .npy file."""
LONGEST_HEADER = 1 << 16
"""Bytes of header that are looked at; a matrix needs about 100."""


@dataclass(frozen=True)
class NpyFile:
    """A matrix in a `.npy` file whose header has been checked against the file's size."""

    path: str
    """As the user gave it."""
    shape: tuple[int, int]
    """Rows and columns."""
    dtype: np.dtype[Any]
    """Element type once read: in native byte order, bfloat16 for |V2."""
    fortran_order: bool
    """Whether columns are contiguous."""
    offset: int
    """Bytes before the first element."""
    stored: np.dtype[Any]
    """Element type in the file, in the file's byte order."""
    version: Version
    """The file as of when its header was read."""

    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (region.shape, `dtype`) with the part of the matrix in `region`; the file is never mapped.

        Raises FileFormatError where the file changed since its header was read.
        """
        if not region:
            return
        try:
            with opened(self.path) as descriptor:
                self.version.check(descriptor)
                stored = BFLOAT16 if self.dtype == BFLOAT16 else self.stored
                turned = self.fortran_order
                given = (self.shape[::-1], region.T, out.T) if turned else (self.shape, region, out)
                read_region(descriptor, self.offset, stored, *given)
                self.version.check(descriptor)
        except OSError as error:
            raise FileFormatError(f"{named(self.path)}: cannot be read any more: {error}") from None


def read_header(path: str | os.PathLike[str], dtype_override: Any = None) -> NpyFile:
    """The header of the matrix in `path`, checked; no element is read and nothing is ever unpickled.

    `dtype_override` is what the user says the file holds: bfloat16 makes |V2 readable, other types must be the
    file's own. Raises FileFormatError for anything that is not a matrix of a supported type.
    """
    given = os.fspath(path)
    name = named(given)
    try:
        with opened(given) as descriptor:
            found = os.fstat(descriptor)
            head = os.pread(descriptor, LONGEST_HEADER, 0)
    except OSError as error:
        raise FileFormatError(f"{name}: cannot be read: {error.strerror}") from None
    size = found.st_size
    header, offset = _parsed(name, head, size)
    stored = _stored_type(name, header["descr"])
    dtype = _element_type(name, stored, None if dtype_override is None else np.dtype(dtype_override))
    shape = _matrix_shape(name, header["shape"])
    needed = offset + prod(shape) * stored.itemsize
    if size < needed:
        raise FileFormatError(
            f"{name}: is truncated: {cut(shape)} of {dtype.name} needs {cut(needed)} bytes with its header, "
            f"the file has {size}"
        )
    version = Version(given, identity_of(found))
    if reason := too_large(shape):
        raise FileFormatError(f"{name}: has shape {cut(shape)}; {reason}")
    return NpyFile(given, shape, dtype, header["fortran_order"], offset, stored, version)


def _parsed(name: str, head: bytes, size: int) -> tuple[dict[str, Any], int]:
    """The header as a dict, and the offset of the first element."""
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
    """The element type that a header's descr names."""
    if not isinstance(descr, str):
        raise FileFormatError(
            f"{name}: holds records ({cut(descr)}); a matrix of plain numbers is needed: save one field, x['name']"
        )
    try:
        return np.dtype(descr)
    except (TypeError, ValueError):
        raise FileFormatError(f"{name}: has a damaged .npy header: {quoted(descr)} is no element type") from None


def _element_type(name: str, stored: np.dtype[Any], said: np.dtype[Any] | None) -> np.dtype[Any]:
    """The element type in memory for what is stored, given what the user said it is."""
    if stored.hasobject:
        raise FileFormatError(f"{name}: holds pickled objects, which are never loaded; save it with .astype(float)")
    if stored == np.dtype("V2") and BFLOAT16 is not None:
        if said == BFLOAT16:
            return BFLOAT16
        raise FileFormatError(f"{name}: holds |V2, two raw bytes an element; if that is bfloat16, say --dtype bfloat16")
    native = stored.newbyteorder("=")
    if native not in SUPPORTED:
        raise FileFormatError(f"{name}: holds {cut(stored)}; supported element types are {supported_names()}")
    if said is not None and said not in (native, BFLOAT16):
        raise FileFormatError(
            f"{name}: holds {native.name}, but {said.name} was asked for; leave --dtype out, "
            f"or compute in another type with --compute-dtype"
        )
    return native


def _matrix_shape(name: str, shape: Any) -> tuple[int, int]:
    """The shape in a header, if it is that of a matrix."""
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise FileFormatError(f"{name}: has a damaged .npy header: {cut(shape)} is no shape")
    if len(shape) != 2:
        fix = "x[:, None] makes a column of it" if len(shape) == 1 else "reshape it to (rows, columns)"
        raise FileFormatError(f"{name}: has shape {cut(shape)}, {len(shape)} dimensions; a matrix has 2: {fix}")
    return shape

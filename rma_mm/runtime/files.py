"""`.npy` files: headers checked before anything is read, tiles read by their owners, output written beside its name.

Reading and writing go through memory maps that live only as long as the call, so that mapped pages do not pile up.
"""

from __future__ import annotations

import ast
import io
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import FileFormatError
from rma_mm.geometry.span import Region
from rma_mm.kernels.dtypes import BFLOAT16, SUPPORTED, supported_names
from rma_mm.runtime.agreement import agree_error

if TYPE_CHECKING:
    from mpi4py import MPI

MAGIC = b"\x93NUMPY"
"""The first bytes of every .npy file."""
LONGEST_HEADER = 1 << 16
"""Bytes of header that are looked at; a matrix needs about 100."""
SMALL_BOX = 256
"""Elements below which a box of a many-run region is not worth a slice of its own."""


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

    def read(self, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (region.shape, `dtype`) with the part of the matrix in `region`, reading no other rows or columns.

        Raises FileFormatError where the file changed since its header was read.
        """
        if not region:
            return
        try:
            with open(self.path, "rb") as file, _mapped(file, self, mmap.ACCESS_READ) as memory:
                for part, at in _boxes(region):
                    out[at] = _matrix(memory, self)[part]
        except (OSError, ValueError) as error:
            raise FileFormatError(f"{self.path}: cannot be read any more ({error}); it was changed meanwhile") from None


def read_header(path: str | os.PathLike[str], dtype_override: Any = None) -> NpyFile:
    """The header of the matrix in `path`, checked; no element is read and nothing is ever unpickled.

    `dtype_override` is what the user says the file holds: bfloat16 makes |V2 readable, other types must be the
    file's own. Raises FileFormatError for anything that is not a matrix of a supported type.
    """
    name = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(name).st_mode):
            kind = "a directory" if os.path.isdir(name) else "not a regular file"
            raise FileFormatError(f"{name}: is {kind}; a .npy file is needed")
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(LONGEST_HEADER)
    except OSError as error:
        raise FileFormatError(f"{name}: cannot be read: {error.strerror}") from None
    header, offset = _parsed(name, head, size)
    stored = _stored_type(name, header["descr"])
    dtype = _element_type(name, stored, None if dtype_override is None else np.dtype(dtype_override))
    shape = _matrix_shape(name, header["shape"])
    needed = offset + prod(shape) * stored.itemsize
    if size < needed:
        raise FileFormatError(
            f"{name}: is truncated: {shape} of {dtype.name} needs {needed} bytes with its header, the file has {size}"
        )
    return NpyFile(name, shape, dtype, bool(header["fortran_order"]), offset, stored)


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
    return header, start + length


def _stored_type(name: str, descr: Any) -> np.dtype[Any]:
    """The element type that a header's descr names."""
    if not isinstance(descr, str):
        raise FileFormatError(
            f"{name}: holds records ({str(descr)[:80]}); a matrix of plain numbers is needed: save one field, x['name']"
        )
    try:
        return np.dtype(descr)
    except (TypeError, ValueError):
        raise FileFormatError(f"{name}: has a damaged .npy header: {descr[:80]!r} is no element type") from None


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
        raise FileFormatError(f"{name}: holds {stored}; supported element types are {supported_names()}")
    if said is not None and said not in (native, BFLOAT16):
        raise FileFormatError(
            f"{name}: holds {native.name}, but {said.name} was asked for; leave --dtype out, "
            f"or compute in another type with --compute-dtype"
        )
    return native


def _matrix_shape(name: str, shape: Any) -> tuple[int, int]:
    """The shape in a header, if it is that of a matrix."""
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise FileFormatError(f"{name}: has a damaged .npy header: {str(shape)[:80]} is no shape")
    if len(shape) != 2:
        fix = "x[:, None] makes a column of it" if len(shape) == 1 else "reshape it to (rows, columns)"
        raise FileFormatError(f"{name}: has shape {shape}, {len(shape)} dimensions; a matrix has 2: {fix}")
    return shape


@dataclass(frozen=True)
class NpyOutput:
    """A `.npy` file in the making: written beside its final name, renamed when whole.

    All ranks `begin` it, each writes its own part, all `finish` it; `collective` is the three as a context. On one
    rank alone: `create`, `write`, then `publish` or `discard`.
    """

    path: str
    """The final name, links followed."""
    temporary: str
    """Where the parts go until then."""
    shape: tuple[int, int]
    """Rows and columns."""
    stored: np.dtype[Any]
    """Element type in the file: |V2 for bfloat16."""
    offset: int
    """Bytes before the first element."""
    fortran_order: bool = False
    """Always False: rows are contiguous."""

    @staticmethod
    def create(path: str | os.PathLike[str], shape: tuple[int, int], dtype: np.dtype[Any]) -> NpyOutput:
        """Reserve the whole file under a temporary name, so that what can fail fails before the multiplication.

        Raises FileFormatError naming the path and why it cannot be written.
        """
        final = os.path.realpath(path)
        _check_target(os.fspath(path), final)
        stored = np.dtype("V2") if dtype == BFLOAT16 else np.dtype(dtype)
        header = _header(shape, stored)
        temporary = NpyOutput.unfinished(path)
        size = len(header) + prod(shape) * stored.itemsize
        try:
            _reserve(temporary, header, size)
        except OSError as error:
            raise FileFormatError(f"output {os.fspath(path)}: cannot write {size} bytes: {error.strerror}") from None
        return NpyOutput(final, temporary, shape, stored, len(header))

    @staticmethod
    def begin(
        comm: MPI.Intracomm, path: str | os.PathLike[str], shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> NpyOutput:
        """`create` on rank 0, the same value on all ranks. Collective. Raises FileFormatError on every rank."""
        made: NpyOutput | str = ""
        error: Exception | None = None
        try:
            made = NpyOutput.create(path, shape, dtype) if comm.rank == 0 else ""
        except FileFormatError as caught:
            made = str(caught)
        made = comm.bcast(made, 0)
        if isinstance(made, str):
            raise FileFormatError(made)
        try:
            made.check()
        except FileFormatError as caught:
            error = caught
        made._agree(comm, error)
        return made

    def finish(self, comm: MPI.Intracomm, error: Exception | None = None) -> None:
        """Publish the file if no rank brings an error, else remove it and raise that on every rank. Collective."""
        self._agree(comm, error)
        try:
            if comm.rank == 0:
                self.publish()
        except FileFormatError as caught:
            error = caught
        self._agree(comm, error)

    @staticmethod
    @contextmanager
    def collective(
        comm: MPI.Intracomm, path: str | os.PathLike[str], shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> Iterator[NpyOutput]:
        """An output that is published at the end of the block, or removed if it fails on any rank. Collective."""
        output = NpyOutput.begin(comm, path, shape, dtype)
        error: Exception | None = None
        try:
            yield output
        except Exception as caught:  # noqa: BLE001 - raised again, on every rank
            error = caught
        output.finish(comm, error)

    def _agree(self, comm: MPI.Intracomm, error: Exception | None) -> None:
        """Raise on every rank where one brings an error, with nothing left on the disk. Collective."""
        try:
            agree_error(comm, error)
        except Exception:
            if comm.rank == 0:
                self.discard()
            raise

    @staticmethod
    def unfinished(path: str | os.PathLike[str]) -> str:
        """The name under which this process would write `path` until it is whole."""
        directory, name = os.path.split(os.path.realpath(path))
        return os.path.join(directory, f".{name}.{os.getpid()}.partial")

    def check(self) -> None:
        """Raise FileFormatError where this rank cannot write, say because its node does not see the directory."""
        try:
            with open(self.temporary, "r+b"):
                pass
        except OSError as error:
            raise FileFormatError(
                f"output {self.path}: a rank on {os.uname().nodename} cannot write there: {error.strerror}; "
                f"all nodes must see the directory"
            ) from None

    def write(self, region: Region, tile: NDArray[Any]) -> None:
        """Write `tile` (region.shape) as the part of the matrix in `region`. Raises FileFormatError."""
        if not region:
            return
        try:
            with open(self.temporary, "r+b") as file, _mapped(file, self, mmap.ACCESS_WRITE) as memory:
                for part, at in _boxes(region):
                    _matrix(memory, self)[part] = tile[at].view(self.stored)
        except (OSError, ValueError) as error:
            raise FileFormatError(f"output {self.path}: {error}") from None

    def publish(self) -> None:
        """Give the file its final name; every rank has written. Raises FileFormatError. On one rank."""
        try:
            with open(self.temporary, "r+b") as file:
                os.fsync(file.fileno())  # a name that survives a power cut must not outlive its contents
            os.replace(self.temporary, self.path)
        except OSError as error:
            self.discard()
            raise FileFormatError(f"output {self.path}: {error.strerror}") from None

    def discard(self) -> None:
        """Remove what was written; nothing happens where it is gone or has its final name."""
        with suppress(OSError):
            os.unlink(self.temporary)


def _check_target(shown: str, final: str) -> None:
    """Raise FileFormatError where `final` cannot become a file."""
    directory = os.path.dirname(final)
    why = ""
    if os.path.isdir(final) or not os.path.basename(shown):
        why = "is a directory; name a file in it"
    elif not os.path.isdir(directory):
        why = f"the directory {directory} does not exist"
    elif os.path.exists(final) and not os.path.isfile(final):
        why = "exists and is not a regular file"
    elif os.path.exists(final) and not os.access(final, os.W_OK):
        why = "exists and is read-only"
    elif not os.access(directory, os.W_OK | os.X_OK):
        why = f"the directory {directory} cannot be written to"
    if why:
        raise FileFormatError(f"output {shown}: {why}")


def _header(shape: tuple[int, int], stored: np.dtype[Any]) -> bytes:
    """A .npy header of format version 1.0, padded as NumPy pads."""
    text = io.BytesIO()
    fields = {"descr": stored.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(text, fields)
    return text.getvalue()


def _reserve(temporary: str, header: bytes, size: int) -> None:
    """Make a new file of `size` bytes on disk that begins with `header`; nothing is left where that fails."""
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # of a process killed long ago that had our number
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(descriptor, header)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # a full disk found now is no SIGBUS later
        else:  # pragma: no cover - macOS
            os.truncate(descriptor, size)
    except OSError:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def _mapped(file: Any, matrix: NpyFile | NpyOutput, access: int) -> mmap.mmap:
    """The bytes of the file up to the last element."""
    length = matrix.offset + prod(matrix.shape) * matrix.stored.itemsize
    return mmap.mmap(file.fileno(), length, access=access)


def _matrix(memory: mmap.mmap, matrix: NpyFile | NpyOutput) -> NDArray[Any]:
    """The matrix in the mapped bytes. A temporary of the statement that uses it: a map with views cannot be closed."""
    whole: NDArray[Any] = np.ndarray(
        matrix.shape, matrix.stored, memory, matrix.offset, order="F" if matrix.fortran_order else "C"
    )
    if isinstance(matrix, NpyFile) and matrix.dtype == BFLOAT16:
        return whole.view(BFLOAT16)
    return whole


def _boxes(region: Region) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Pairs of indices (into the matrix, into the packed tile) that cover `region`."""
    count = prod(len(span.runs) for span in region)
    if count > 1 and region.size < SMALL_BOX * count:
        return [(region.selector(), (slice(None), slice(None)))]
    return [(box.selector(), region.locate(box).selector()) for box in region.run_boxes()]

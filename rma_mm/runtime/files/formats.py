"""The formats of files that matrices are read from and written to: a registry, and what a format has to offer.

A format is chosen by the suffix of a file's name, or by its own name. It deals with one rank's part and with errors of
one rank; who calls when, and that all ranks learn of an error, is seen to by `load`, `runtime.files.output` and the
command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED, as_dtype, supported_names
from rma_mm.errors import FileFormatError, OptionError, display_path, quoted, truncate
from rma_mm.geometry.extents import as_matrix, too_large
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.names import Name

Path = str | os.PathLike[str]
Shape = tuple[int, int]


class Readable(Protocol):
    """A matrix in a file, of which any part can be read."""

    @property
    def shape(self) -> Shape:
        """Rows and columns."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type once read, in native byte order; one of `SUPPORTED`."""

    @property
    def fortran_order(self) -> bool:
        """True if columns lie together in the file rather than rows."""

    def read(self, region: Region, out: NDArray[Any]) -> object:
        """Fill `out` (region.shape, `dtype`, of any strides) with the part in `region`, which may be empty. Local."""


class Source(Readable, Protocol):
    """A file that was opened by its format. All calls are local, and raise FileFormatError.

    It may have `chunks`, (rows, columns) of the pieces that are kept each by itself and read as a whole; all ranks find
    the same.
    """

    @property
    def path(self) -> str:
        """The path as the user gave it."""

    @property
    def facts(self) -> Mapping[str, object]:
        """Return the facts, as shape and dtype, that all ranks must have found alike before any reads elements."""

    def check(self) -> None:
        """Raise where the file is no longer the one that was opened."""

    def again(self) -> Readable:
        """Open the same file again to check a result, with other code if there is any.

        This, and reading it, may also raise OSError and ValueError.
        """


class Sink(Protocol):
    """A file in the making, under another name until it is whole. All calls are local, and raise FileFormatError.

    Rank 0 makes it, and it is pickled to the other ranks, which do no more than `check` and `write`. It may have
    `unit`, (rows, columns) of the pieces, counted from the first element, of which one rank writes each as a whole.
    """

    @property
    def path(self) -> str:
        """The final name."""

    @property
    def temporary(self) -> str:
        """Return the path of the parts until the file is complete; it is removed if the job ends early."""

    def check(self) -> None:
        """Raise where this rank cannot write, say because its node does not see the directory."""

    def write(self, region: Region, tile: NDArray[Any]) -> None:
        """Write `tile` (region.shape, of any strides) as the part of the matrix in `region`, down to the disk."""

    def source(self) -> Source:
        """Return the written matrix, read from the disk before the file gets its final name."""

    def publish(self) -> None:
        """Give the file its final name; every rank has written. On the rank that made it."""

    def discard(self) -> None:
        """Remove what was written, where this rank made it and it is not published. May be repeated."""


@dataclass(frozen=True)
class Format:
    """One way to keep a matrix in a file."""

    suffixes: tuple[str, ...]
    """Suffixes of such files, as ".npy"; an empty one stands for names with an unknown suffix."""
    open: Callable[[Path, Any], Source]
    """(path, what the user says the file holds, or None) → the matrix there, checked. Local; FileFormatError."""
    create: Callable[..., Sink]
    """(path, shape, element type, options by name) → a file with room for all of the matrix. Local; FileFormatError."""
    open_array: Callable[[Path, Any], Source] | None = None
    """Like `open`, for arrays of any number of dimensions, which `create` then makes, too; None if it has none.

    Such a source, and a sink, deals with the matrix that the array is kept as. The source has `array`, the shape in its
    own dimensions, or () for a matrix; and `is_reversed`, whether they lie in reverse order.
    """
    holds_many: bool = False
    """True if a file holds several matrices. The path that `open` and `create` get says which, as data.h5::/group/A
    (`names.split`); `create` adds it to a file that is there, or replaces it."""
    options: tuple[str, ...] = ()
    """The options of `DistMatrix.save` that `create` takes by name: of chunks, shards, compress."""
    sink: Callable[..., Sink] | None = None
    """(fields of what `create` makes) → the same once more, where a job that was ended is gone on with; None if not."""


FORMATS: dict[str, Format] = {}  # every format, by suffix


def register_format(kind: Format) -> None:
    """Add a file format, for `load`, `DistMatrix.save` and the command line.

    Local; every rank must register the same.

    Parameters
    ----------
    kind : Format
        The format, with suffixes of its own.

    Raises
    ------
    OptionError
        If a suffix is invalid or taken.
    """
    for suffix in kind.suffixes:
        if suffix in FORMATS:
            raise OptionError(f"register_format: got the suffix {quoted(suffix)}, which another format has")
        if not re.fullmatch(r"(\.[^./A-Z\s]+)*", suffix):
            raise OptionError(f"register_format: got the suffix {quoted(suffix)}; must be in small letters, as '.npy'")
    FORMATS.update(dict.fromkeys(kind.suffixes, kind))


def format_of(path: Path, kind: str | None = None) -> Format:
    """Return the format of a file by its name: that of the longest suffix which it ends with; or the one called `kind`.

    Raises OptionError if no format is called so.
    """
    if kind is not None:
        if f".{kind}" not in FORMATS:
            known = ", ".join(sorted(suffix[1:] for suffix in FORMATS if suffix))
            raise OptionError(f"format: got {quoted(kind)}; must be one of {known}")
        return FORMATS[f".{kind}"]
    name = os.path.basename(os.fspath(path).rstrip(os.sep)).lower()
    return FORMATS[max((suffix for suffix in FORMATS if name.endswith(suffix)), key=len)]


def named_in(path: Path, kind: str | None = None) -> tuple[Name, Format]:
    """Parse the name that a user gives to a matrix in a file, and find the format of the file.

    Raises FileFormatError, OptionError.
    """
    name = Name.of(path, {suffix for suffix, form in FORMATS.items() if form.holds_many})
    form = format_of(name.path, kind)
    if name.inner and not form.holds_many:
        raise FileFormatError(f"{display_path(name.text)}: such a file holds one matrix; leave ::{name.inner} out")
    return name, form


def element_type(name: str, kind: np.dtype[Any], said: Any) -> np.dtype[Any]:
    """Return the element type in memory for a type that a library reads. Raises FileFormatError.

    said: what the user says that it is, or None.
    """
    if kind.hasobject or kind.names or kind.subdtype or kind.kind in "OSTU" or kind.newbyteorder("=") not in SUPPORTED:
        what = (
            "records" if kind.names else "text or objects" if kind.hasobject or kind.kind in "OSTU" else truncate(kind)
        )
        raise FileFormatError(f"{name}: holds {what}; supported element types are {supported_names()}")
    native = np.dtype(kind.str).newbyteorder("=")
    check_said(name, native, said)
    return native


def check_shape(name: str, shape: tuple[int, ...], is_matrix: bool) -> None:
    """Raise FileFormatError if a shape is not that of a matrix; where one will do, of an array."""
    if len(shape) != 2 and (is_matrix or not shape):
        fix = "x[:, None] makes a column of it" if len(shape) == 1 else "reshape it to (rows, columns)"
        raise FileFormatError(f"{name}: has shape {truncate(shape)}, {len(shape)} dimensions; a matrix has 2: {fix}")


def check_extents(name: str, shape: tuple[int, ...]) -> None:
    """Raise FileFormatError if a matrix, or an array, is larger than any can be."""
    if reason := too_large(as_matrix(shape)):
        raise FileFormatError(f"{name}: has shape {truncate(shape)}; {reason}")


def unwritable(path: str, why: str) -> FileFormatError:
    return FileFormatError(
        f"output {display_path(path)}: a rank on {os.uname().nodename} cannot write there: {why}; "
        f"all nodes must see the directory"
    )


def check_said(name: str, held: np.dtype[Any], said: Any) -> None:
    """Raise FileFormatError if a file holds another element type than its user says; DtypeError if that is none.

    Bfloat16 may be said of any: it is meant for other files, which hold it as |V2.
    """
    if said is not None and as_dtype(said) not in (held, BFLOAT16):
        raise FileFormatError(
            f"{name}: holds {held.name}, but {as_dtype(said).name} was asked for; leave --dtype out, "
            f"or compute in another type with --compute-dtype"
        )


def check_dimensions(path: Path, shape: tuple[int, ...], kind: str | None = None) -> None:
    """Raise FileFormatError if the format of a file keeps matrices alone, and `shape` is none's."""
    if len(shape) != 2 and named_in(path, kind)[1].open_array is None:
        raise FileFormatError(f"{display_path(path)}: its format keeps matrices, not arrays of shape {shape}; use .npy")

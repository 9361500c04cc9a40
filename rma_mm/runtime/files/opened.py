"""A matrix in a file that was opened, or a part of it: what `rma_mm.open` gives."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import ClosedError, ShapeError, display_path
from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.external import allowing
from rma_mm.runtime.files.formats import Path, Readable, Shape, Source, named_in
from rma_mm.runtime.files.names import Name
from rma_mm.unfinished import real_path


class Opened:
    """A matrix in a file, of which any part can be read; no more than its header has been. All calls are local.

    It is a `Source`, of a whole matrix or of the part of one that its name says.
    """

    def __init__(self, source: Source, name: Name) -> None:
        self._source: Source | None = source
        self._name = name
        self.path = name.text
        """The file, the matrix in it and the part, as the user gave them."""
        self._part = _box(name.part or (slice(None),) * 2, source.shape)
        self.shape: Shape = (len(self._part[0]), len(self._part[1]))
        """Rows and columns."""
        self.dtype = source.dtype
        """Element type once read, in native byte order."""
        self.fortran_order = source.fortran_order
        """True if columns lie together in the file rather than rows."""

    @property
    def order(self) -> str:
        """"C" where rows lie together in the file, "F" where columns do."""
        return "F" if self.fortran_order else "C"

    @property
    def chunks(self) -> Shape | None:
        """Rows and columns of the chunks that elements are kept in; None without, or where the part cuts some."""
        rows, cols = self._part
        chunks: Shape | None = getattr(self._live, "chunks", None)
        starts = [span.start if span else 0 for span in (rows, cols)]
        if chunks is None or any(start % step for start, step in zip(starts, chunks, strict=True)):
            return None
        return chunks

    @property
    def facts(self) -> Mapping[str, object]:
        """Return the facts that all ranks must have found alike before one of them reads elements."""
        return {**self._live.facts, "shape": self.shape, "part": str(self._part)}

    def read(self, region: Region | tuple[slice, slice], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read a part of the matrix.

        Parameters
        ----------
        region : Region or tuple of slice
            Rows and columns; slices have steps of 1.
        out : ndarray, optional
            Receives the elements; it has their shape and type. By default a new array.

        Returns
        -------
        ndarray
            The elements.

        Raises
        ------
        FileFormatError
            If the file has changed since it was opened.
        ShapeError
            If the region does not fit.
        """
        wanted = self._region(region)
        if out is None:
            out = np.empty(wanted.shape, self.dtype)
        if not isinstance(out, np.ndarray) or (out.shape, out.dtype) != (wanted.shape, self.dtype):
            got = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
            raise ShapeError(f"out: got {got}; what is read is {self.dtype} of shape {wanted.shape}")
        if not out.flags.writeable:
            raise ShapeError("out: got one that is read-only; what is read is written into it")
        self._live.read(self._within(wanted), out)
        return out

    def part(self, rows: Span, cols: Span) -> Opened:
        """Return some rows and columns of it, contiguous ones, as a matrix in the same file."""
        made = copy(self)
        made._part = self._within(Region((rows, cols)))
        made.shape = len(rows), len(cols)
        return made

    def is_same(self, other: Opened) -> bool:
        """Return True if another is the same part of the same matrix of the same file, and both are open."""
        if self._source is None or other._source is None:
            return False
        mine, others = (
            (real_path(x._name.path), x._name.inner.strip("/"), x._part, x.dtype, x._live.facts) for x in (self, other)
        )
        return self is other or mine == others

    def check(self) -> None:
        """Raise FileFormatError if the file is no longer the one that was opened."""
        self._live.check()

    def again(self) -> Readable:
        """Return the same matrix, opened again to check a result. Raises OSError, ValueError too."""
        return _Again(self, self._live.again())

    def close(self) -> None:
        """Close the file. May be repeated."""
        self._source = None

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{display_path(self.path)}: {self.dtype} of shape {self.shape}>"

    @property
    def _live(self) -> Source:
        if self._source is None:
            raise ClosedError(f"{display_path(self.path)}: it is closed; open it again")
        return self._source

    def _within(self, region: Region) -> Region:
        return Region(own.take(span) if own else span for own, span in zip(self._part, region, strict=True))

    def _region(self, region: Region | tuple[slice, slice]) -> Region:
        """Two slices, or a region, as one within the matrix. Raises ShapeError."""
        if isinstance(region, Region):
            whole = Region.whole(self.shape)
            if len(region) != 2 or not all(span.issubset(all_) for span, all_ in zip(region, whole, strict=True)):
                raise ShapeError(f"region: got {region}; it lies within rows and columns of {self.shape}")
            return region
        with suppress(TypeError, AttributeError, ValueError):
            return _box(region, self.shape)
        raise ShapeError(f"region: got {region!r}; must be two slices in steps of 1, or a Region")


def _box(slices: tuple[slice, slice], shape: Shape) -> Region:
    """The region of two slices. Raises ValueError if one has steps; TypeError, AttributeError for what is none."""
    found = [cut.indices(extent) for cut, extent in zip(slices, shape, strict=True)]
    if any(step != 1 for *_, step in found):
        raise ValueError("it has steps")
    return Region(Span.range(start, stop) for start, stop, _ in found)


class _Again:
    """A matrix, or a part of one, that another reader reads again."""

    def __init__(self, first: Opened, reader: Readable) -> None:
        self._first, self._reader = first, reader
        whole = tuple(reader.shape) == tuple(first._live.shape)
        self.shape: Shape = first.shape if whole else reader.shape  # whoever compares sees that it has become another
        self.dtype: np.dtype[Any] = reader.dtype
        self.fortran_order: bool = reader.fortran_order

    def read(self, region: Region, out: NDArray[Any]) -> None:
        self._reader.read(self._first._within(region), out)


def open(  # noqa: A001
    uri: Path, dtype: Any = None, format: str | None = None, allow_external: bool | None = None,  # noqa: A002
) -> Opened:
    """Open the matrix in a file: check its header and read nothing else. Local.

    Parameters
    ----------
    uri : str or path-like
        A file, a matrix in it, or a part of that: `A.npy`, `data.h5::/group/A`, `data.h5::/group/A[0:1000, :]`.
    dtype : str, optional
        What the file is known to hold: "bfloat16" for `.npy` files that hold it as `|V2`.
    format : str, optional
        The file's format, as "h5", if its name does not end so.
    allow_external : bool, optional
        True to read other files that this one refers to, which is refused by default. Such are external storage,
        external links and virtual datasets of HDF5, and links in a Zarr store. So are files outside the folder of an
        index of tensors.

    Raises
    ------
    FileFormatError
        If the file is no matrix that can be read.

    Examples
    --------
    >>> with open("A.npy") as A:                    # doctest: +SKIP
    ...     A.read((slice(0, 10), slice(None)))
    """
    name, form = named_in(uri, format)
    with allowing(allow_external):
        return Opened(form.open(name.whole, dtype), name)


def open_array(uri: Path, dtype: Any = None, kind: str | None = None, allow_external: bool | None = None) -> Any:
    """Open an array of any number of dimensions, where the format has them, as the format's own `Source`."""
    name, form = named_in(uri, kind)
    if name.part is not None:
        return open(uri, dtype, kind, allow_external)
    with allowing(allow_external):
        return (form.open_array or form.open)(name.whole, dtype)


def extents_of(file: Any) -> tuple[int, ...]:
    """Return the shape of an array in a file, in its own dimensions."""
    shape: tuple[int, ...] = getattr(file, "array", ()) or file.shape
    return shape

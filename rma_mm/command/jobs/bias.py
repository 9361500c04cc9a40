"""The bias of a product, a vector from a file."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16, check_dtype
from rma_mm.errors import FileFormatError, RmaError, display_path, truncate
from rma_mm.geometry.span import Region
from rma_mm.runtime.files.formats import Source, named_in
from rma_mm.runtime.files.npy_again import reread_vector
from rma_mm.runtime.files.opened import extents_of, open_array
from rma_mm.runtime.files.version import Version
from rma_mm.runtime.ranks.agreement import agreed

if TYPE_CHECKING:
    from mpi4py import MPI


def read_bias(comm: MPI.Intracomm, path: str, dtype: str | None, kind: str | None = None) -> NDArray[Any]:
    """The vector in a file that rank 0 reads, on every rank. `dtype`: what files hold, where bfloat16 is |V2 in them.

    kind: the format, where the name does not say it. Collective. Raises FileFormatError on every rank.
    """
    with agreed(comm):
        bias = None if comm.rank else _read(path, dtype, kind)
    shared: NDArray[Any] = comm.bcast(bias)
    return shared


def reread_bias(
    comm: MPI.Intracomm, path: str, bias: NDArray[Any], dtype: str | None, kind: str | None = None
) -> NDArray[Any]:
    """The vector in a file as it is now, read by another rank and by other means than `bias`, which it was. Collective.

    Raises FileFormatError on every rank where it is of another type or length.
    """
    reader = min(1, comm.size - 1)
    with agreed(comm):
        try:
            found = bias if comm.rank != reader else _reread(path, bias, dtype, kind)
        except (OSError, ValueError) as error:
            reason = f"cannot be read again to check the result: {error}"
            raise FileFormatError(f"--bias {display_path(path)}: {reason}") from None
    shared: NDArray[Any] = comm.bcast(found, reader)
    return shared


def watched(path: str, dtype: str | None, kind: str | None = None) -> Version | Source | None:
    """Return an object whose `check` tells if a vector's file has changed, or None if the file cannot be read.

    Local.
    """
    name, form = named_in(path, kind)
    if not form.holds_many:
        return Version.of(name.path)
    with suppress(FileFormatError):  # which `read_bias` raises again
        source: Source = open_array(path, dtype, kind)
        return source
    return None


def _read(path: str, dtype: str | None, kind: str | None) -> NDArray[Any]:
    if not named_in(path, kind)[1].holds_many:
        return _vector(path, dtype)
    try:
        file = open_array(path, dtype, kind)
    except FileFormatError as error:
        raise FileFormatError(f"--bias {error}") from None
    shape = extents_of(file)
    if len(shape) != 1:
        raise FileFormatError(
            f"--bias {display_path(path)}: holds an array of shape {truncate(shape)}; a vector is needed"
        )
    bias: NDArray[Any] = np.empty((1, *shape), file.dtype)
    file.read(Region.whole(bias.shape), bias)
    vector: NDArray[Any] = bias[0]
    return vector


def _reread(path: str, bias: NDArray[Any], dtype: str | None, kind: str | None) -> NDArray[Any]:
    """Return the same vector, by other means where there are any. Raises OSError, ValueError, FileFormatError."""
    if not named_in(path, kind)[1].holds_many:
        return reread_vector(path, bias)
    found = _read(path, dtype, kind)
    if (found.shape, found.dtype) != (bias.shape, bias.dtype):
        raise ValueError(f"it now holds {found.dtype} of shape {found.shape}, before {bias.dtype} of {bias.shape}")
    return found


def _vector(path: str, dtype: str | None) -> NDArray[Any]:
    if not os.path.isfile(path):
        raise FileFormatError(
            f"--bias {display_path(path)}: is not there, or not a regular file; a .npy file is needed"
        )
    try:
        found: Any = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise FileFormatError(f"--bias {display_path(path)}: cannot be read as a .npy file: {error}") from None
    if not isinstance(found, np.ndarray) or found.ndim != 1:
        what = f"an array of shape {truncate(found.shape)}" if isinstance(found, np.ndarray) else "an .npz archive"
        raise FileFormatError(f"--bias {display_path(path)}: holds {what}; a vector is needed, of one dimension")
    if found.dtype == np.dtype("V2") and dtype == "bfloat16" and BFLOAT16 is not None:
        found = found.view(BFLOAT16)
    native = found.dtype.newbyteorder("=")
    try:
        bias: NDArray[Any] = found.astype(check_dtype(native, "its dtype"))
    except RmaError as error:
        raise FileFormatError(f"--bias {display_path(path)}: {error}") from None
    return bias

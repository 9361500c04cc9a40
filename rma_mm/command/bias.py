"""The bias of a product, from a `.npy` file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16, check_dtype
from rma_mm.errors import FileFormatError, RmaError, cut, named
from rma_mm.runtime.files.npy_again import reread_vector
from rma_mm.runtime.ranks.agreement import agreed

if TYPE_CHECKING:
    from mpi4py import MPI


def read_bias(comm: MPI.Intracomm, path: str, dtype: str | None) -> NDArray[Any]:
    """The vector in a file that rank 0 reads, on every rank. `dtype`: what files hold, where bfloat16 is |V2 in them.

    Collective. Raises FileFormatError on every rank.
    """
    with agreed(comm):
        bias = None if comm.rank else _vector(path, dtype)
    shared: NDArray[Any] = comm.bcast(bias)
    return shared


def reread_bias(comm: MPI.Intracomm, path: str, bias: NDArray[Any]) -> NDArray[Any]:
    """The vector in a file as it is now, read by another rank and by other means than `bias`, which it was. Collective.

    Raises FileFormatError on every rank where it is of another type or length.
    """
    reader = min(1, comm.size - 1)
    with agreed(comm):
        try:
            found = reread_vector(path, bias) if comm.rank == reader else bias
        except (OSError, ValueError) as error:
            reason = f"cannot be read again to check the result: {error}"
            raise FileFormatError(f"--bias {named(path)}: {reason}") from None
    shared: NDArray[Any] = comm.bcast(found, reader)
    return shared


def _vector(path: str, dtype: str | None) -> NDArray[Any]:
    if not os.path.isfile(path):
        raise FileFormatError(f"--bias {named(path)}: is not there, or not a regular file; a .npy file is needed")
    try:
        found: Any = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise FileFormatError(f"--bias {named(path)}: cannot be read as a .npy file: {error}") from None
    if not isinstance(found, np.ndarray) or found.ndim != 1:
        what = f"an array of shape {cut(found.shape)}" if isinstance(found, np.ndarray) else "an .npz archive"
        raise FileFormatError(f"--bias {named(path)}: holds {what}; a vector is needed, of one dimension")
    if found.dtype == np.dtype("V2") and dtype == "bfloat16" and BFLOAT16 is not None:
        found = found.view(BFLOAT16)
    native = found.dtype.newbyteorder("=")
    try:
        bias: NDArray[Any] = found.astype(check_dtype(native, "its dtype"))
    except RmaError as error:
        raise FileFormatError(f"--bias {named(path)}: {error}") from None
    return bias

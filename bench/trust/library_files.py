"""Files of matrices as the packages write and read them that others use for such files."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CONTAINERS = {".npy": "numpy", ".safetensors": "numpy", ".h5": "h5py", ".zarr": "zarr"}
"""Suffix → the package without which such files are not read."""


def write_anew(path: Path, inner: str, x: Array, chunks: tuple[int, int], form: int, order: str) -> None:
    """Write the file anew, in chunks, by the package that others use for such files."""
    if path.suffix == ".h5" and x.size:
        import h5py

        with h5py.File(path, "w") as file:
            file.create_dataset(inner, data=x, chunks=tuple(map(min, chunks, x.shape)), compression="gzip")
    elif path.suffix == ".zarr":
        import zarr

        shutil.rmtree(path)
        options = {"order": order} if form == 2 else {}
        made = zarr.create_array(
            path, name=inner or None, shape=x.shape, dtype=x.dtype, chunks=chunks, zarr_format=form, **options
        )
        made[...] = x


def read_by_its_library(path: Path, inner: str) -> Array | None:
    """What stands in the file for the package that others use for it; None where there is none such."""
    if path.suffix == ".h5":
        import h5py

        with h5py.File(path) as file:
            return np.asarray(file[inner][()])
    if path.suffix == ".zarr":
        import zarr

        return np.asarray(zarr.open_array(path, path=inner, mode="r")[...])
    return None


def formats() -> list[str]:
    """Suffixes of formats that can be read here."""
    found = []
    for suffix, package in CONTAINERS.items():
        with suppress(ImportError):
            __import__(package)
            found.append(suffix)
    return found

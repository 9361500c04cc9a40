"""The files of `bench.disk`: how they are made, read at the rate of the disk, and put out of the system's cache."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import measure

STEP = 2**24
"""Bytes that are read, or made, at a time."""
COLD = 0.02
"""The share of a file that is cached at most where it is called cold."""

Write = Callable[[int, NDArray[Any]], None]
"""(first row, rows) → into the file."""


def made(path: Path, shape: tuple[int, int], dtype: str, chunks: tuple[int, int]) -> None:
    """Write the matrix of `measure.whole_numbers` in the format that the name's end says, some rows at a time."""
    write, step = FORMATS[path.suffix[1:]](path, shape, np.dtype(dtype), chunks), chunks[0]
    step = max(step, STEP // (shape[1] * np.dtype(dtype).itemsize) // step * step)
    for start in range(0, shape[0], step):
        write(start, part(start, min(start + step, shape[0]), shape[1], dtype))
    for file in files(path):
        with open(file, "rb") as opened:
            os.fsync(opened)  # what is not on the disk yet stays in the cache


def part(start: int, stop: int, columns: int, dtype: str) -> NDArray[Any]:
    """Some rows of the matrix."""
    rows, cols = np.ogrid[start:stop, :columns]
    return measure.whole_numbers(rows, cols).astype(dtype)


def times(shape: tuple[int, int], x: NDArray[np.float64], is_turned: bool = False) -> NDArray[np.float64]:
    """The matrix, or its transpose, times a vector of whole numbers: exactly."""
    rows, columns = shape
    found = np.zeros(columns if is_turned else rows)
    step = max(1, STEP // 8 // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        panel = part(start, stop, columns, "float64")
        if is_turned:
            found += x[start:stop] @ panel
        else:
            found[start:stop] = panel @ x
    return found


def _npy(path: Path, shape: tuple[int, int], dtype: np.dtype[Any], _: tuple[int, int]) -> Write:
    mapped = np.lib.format.open_memmap(path, "w+", dtype, shape)

    def write(start: int, rows: NDArray[Any]) -> None:
        mapped[start : start + len(rows)] = rows
        mapped.flush()

    return write


def _safetensors(path: Path, shape: tuple[int, int], dtype: np.dtype[Any], _: tuple[int, int]) -> Write:
    nbytes = shape[0] * shape[1] * dtype.itemsize
    said = {"x": {"dtype": f"F{8 * dtype.itemsize}", "shape": shape, "data_offsets": [0, nbytes]}}
    header = json.dumps(said).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header)

    def write(_: int, rows: NDArray[Any]) -> None:
        with path.open("ab") as file:
            file.write(rows.tobytes())

    return write


def _h5(path: Path, shape: tuple[int, int], dtype: np.dtype[Any], chunks: tuple[int, int]) -> Write:
    import h5py

    with h5py.File(path, "w") as file:
        file.create_dataset("x", shape, dtype, chunks=chunks)

    def write(start: int, rows: NDArray[Any]) -> None:
        with h5py.File(path, "r+") as file:
            file["x"][start : start + len(rows)] = rows

    return write


def _zarr(path: Path, shape: tuple[int, int], dtype: np.dtype[Any], chunks: tuple[int, int]) -> Write:
    import zarr

    array = zarr.create_array(path, shape=shape, chunks=chunks, dtype=dtype)

    def write(start: int, rows: NDArray[Any]) -> None:
        array[start : start + len(rows)] = rows

    return write


def _b2nd(path: Path, shape: tuple[int, int], dtype: np.dtype[Any], chunks: tuple[int, int]) -> Write:
    import blosc2

    array = blosc2.zeros(shape, dtype, urlpath=str(path), mode="w", chunks=chunks)

    def write(start: int, rows: NDArray[Any]) -> None:
        array[start : start + len(rows)] = rows

    return write


FORMATS: dict[str, Callable[[Path, tuple[int, int], np.dtype[Any], tuple[int, int]], Write]] = {
    "npy": _npy, "h5": _h5, "zarr": _zarr, "safetensors": _safetensors, "b2nd": _b2nd,
}


# -- the system's cache ---------------------------------------------------------------------------


def files(path: Path) -> list[Path]:
    """The file, or those in a folder."""
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]


def size(path: Path) -> int:
    """Bytes on the disk."""
    return sum(each.stat().st_size for each in files(path))


def seconds_to_read(*paths: Path) -> float:
    """Return the seconds in which one process reads some files from first to last, into memory that it has."""
    buffer = memoryview(bytearray(STEP))
    begun = time.perf_counter()
    for file in (each for path in paths for each in files(path)):
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - begun


def forget(*paths: Path) -> bool:
    """Have some files read from the disk next; whether that is so now. As root of all files, where that helps."""
    every = [each for path in paths for each in files(path)]
    for file in every:
        with open(file, "rb") as opened:
            os.fsync(opened)
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(every) > COLD:
        with suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3")
    return cached(every) <= COLD


def cached(every: list[Path]) -> float:
    """The share of some files that is in memory."""
    found = np.array([_pages(file) for file in every])
    there, pages = found.sum(axis=0)
    return float(there / max(1, pages))


def _pages(file: Path) -> tuple[int, int]:
    """Return the number of a file's pages that are in memory, and of all its pages. Raises OSError."""
    if not (length := file.stat().st_size):
        return 0, 0
    states = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), length, access=mmap.ACCESS_READ) as mapped:
        place = np.frombuffer(mapped, np.uint8)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(place.ctypes.data), ctypes.c_size_t(length), ctypes.c_void_p(states.ctypes.data)
        )
        del place
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int((states & 1).sum()), len(states)

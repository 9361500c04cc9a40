"""Parts of a matrix read from a file by few large reads: what lies between is read too where it is little, and dropped.

Data sieving: Thakur, Gropp and Lusk, Data sieving and collective I/O in ROMIO, 1999, section 3. A file is read and not
mapped, since a map of a file that somebody truncates ends the process by SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.geometry.span import Region, Span
from rma_mm.runtime.files.strided import read_rows

BUFFER = 2**21  # bytes read at a time, about: they stay in a core's cache
GAP = 2**14  # bytes that are sooner read and dropped than left out: as many as are copied in the time of a call


def read_region(
    descriptor: int, offset: int, stored: np.dtype[Any], shape: tuple[int, int], region: Region, out: NDArray[Any]
) -> None:
    """Fill `out` (region.shape) with a part of the row-major matrix of `shape` that begins at `offset` of the file.

    Raises OSError, also where the file ends before.
    """
    pitch = shape[1] * stored.itemsize
    rows, cols = (span.indices for span in region)
    buffer = np.empty(0, np.uint8)
    for left, right in _stretches(region[1], stored.itemsize):
        width = (right - left) * stored.itemsize
        taken, columns = _within(cols, left, right)
        is_apart = pitch - width > GAP
        for top, bottom in region[0].runs if is_apart else _stretches(region[0], pitch):
            begin = offset + top * pitch + left * stored.itemsize
            at, lines = _within(rows, top, bottom)
            place = out[at, taken]
            is_plain = place.shape == (bottom - top, right - left) and place.dtype == stored and _is_by_rows(place)
            if is_plain and (is_apart or width == pitch):
                _read_rows(descriptor, begin, pitch, _as_bytes(place))
                continue
            step = 1 if is_apart else bottom - top
            for row in range(top, bottom, step):
                size = (step - 1) * pitch + width
                if size > buffer.size:
                    buffer = np.empty(size, np.uint8)
                read_at(descriptor, buffer.data[:size], begin + (row - top) * pitch)
                band: NDArray[Any] = np.ndarray((step, right - left), stored, buffer.data, 0, (pitch, stored.itemsize))
                part, of = (slice(row - top, row - top + 1), slice(None)) if is_apart else (slice(None), lines)
                place[part] = band[of][:, columns]


def _is_by_rows(place: NDArray[Any]) -> bool:
    return place.strides[1] == place.itemsize and place.strides[0] >= 0


def _as_bytes(place: NDArray[Any]) -> NDArray[np.uint8]:
    return place.view(np.uint8)


def _read_rows(descriptor: int, begin: int, pitch: int, out: NDArray[np.uint8]) -> None:
    """Fill `out` (rows, bytes) with rows that lie `pitch` bytes apart: at once where they lie together."""
    if out.flags.c_contiguous and out.shape[1] == pitch:
        read_at(descriptor, out.reshape(-1).data, begin)
        return
    for row in range(read_rows(descriptor, begin, pitch, out), len(out)):
        read_at(descriptor, out[row].data, begin + row * pitch)


def _within(indices: NDArray[np.int64], start: int, stop: int) -> tuple[slice, slice | NDArray[np.int64]]:
    """Return which of some ascending indices lie in start…stop − 1, and where in there."""
    first, last = np.searchsorted(indices, (start, stop))
    found = indices[first:last] - start
    is_run = found.size and found[-1] - found[0] == found.size - 1
    return slice(first, last), slice(found[0], found[-1] + 1) if is_run else found


def read_at(descriptor: int, into: memoryview, offset: int) -> None:
    """Fill `into` from the file. Raises OSError, also where the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if not count:
            raise OSError(f"it ends after {offset + done} bytes")
        done += count


def from_disk(descriptor: int, offset: int = 0, length: int = 0) -> None:
    """Have bytes (to the end, where no length is said) come from the disk when next read, and not from memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def _stretches(span: Span, unit: int) -> Iterator[tuple[int, int]]:
    """Runs of a span, near ones joined and long ones cut; an index stands for `unit` bytes."""
    step = max(1, BUFFER // unit)
    joined: list[list[int]] = []
    for start, stop in span.runs:
        if joined and (start - joined[-1][1]) * unit <= GAP and stop - joined[-1][0] <= step:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    for start, stop in joined:
        yield from ((at, min(at + step, stop)) for at in range(start, stop, step))

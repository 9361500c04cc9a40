"""Many short rows of a file, read by few calls of the system.

The file is mapped, and the kernel copies out of the map (process_vm_readv, of the process itself): of a file that
somebody truncates meanwhile it then tells, where a load would end the process by SIGBUS. A call from Python for each
row takes three times as long, and the lock that other threads want.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 64  # rows from which on it is worth while
AT_ONCE = 1024  # rows of a call: what the system takes (IOV_MAX)
BAND = 2**23  # bytes that are mapped at a time: what is mapped counts as the process's own
CACHED = 0.5  # fraction of free memory that a file may occupy when it is read ahead of its use


def read_rows(descriptor: int, begin: int, pitch: int, out: NDArray[np.uint8]) -> int:
    """Fill the first rows of `out` from the file, whose rows lie `pitch` bytes apart; return their number.

    Fewer than all where they are too few to be worth it, or the system does not do it, or says that something is wrong.
    """
    rows, width = map(int, out.shape)
    copy = _copying()
    if rows < LEAST or copy is None or not width:
        return 0
    _announce(descriptor, begin, (rows - 1) * pitch + width)
    step = max(1, BAND // pitch)
    for top in range(0, rows, step):
        some = out[top : top + step]
        at = begin + top * pitch
        first = at % mmap.ALLOCATIONGRANULARITY
        try:
            length = (len(some) - 1) * pitch + width + first
            band = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=at - first)
        except (OSError, ValueError):  # it has become shorter, or lies where nothing can be mapped
            return top
        with band:
            done = _copied(copy, band, first, pitch, some)
        if done < len(some):
            return top + done
    return rows


def _copied(copy: Callable[..., int], band: mmap.mmap, first: int, pitch: int, out: NDArray[np.uint8]) -> int:
    rows, width = out.shape
    source = np.frombuffer(band, np.uint8).ctypes.data + first  # a temporary: a map with views cannot be closed
    numbers = np.arange(rows)
    places = np.empty((2, rows, 2), np.int64)
    places[0, :, 0], places[1, :, 0] = out.ctypes.data + numbers * out.strides[0], source + numbers * pitch
    places[:, :, 1] = width
    own = os.getpid()
    done = 0
    while done < rows:
        count = min(AT_ONCE, rows - done)
        into, of = (each[done:].ctypes.data for each in places)
        if copy(own, into, count, of, count, 0) != count * width:
            break
        done += count
    return done


def _announce(descriptor: int, begin: int, length: int) -> None:
    """Have the disk read all of a stretch of the file in one go where its rows will be wanted piece by piece.

    A disk takes as long for one row as for many that lie together. Not where the file is larger than what is free: its
    parts would be thrown out again before they are used.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if os.fstat(descriptor).st_size <= CACHED * free:
        os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_WILLNEED)


@cache
def _copying() -> Callable[..., int] | None:
    """Return the system's call; None if it has none, or does not let a process use it on itself."""
    try:
        call: Any = ctypes.CDLL(None).process_vm_readv
    except (OSError, AttributeError):
        return None
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
    tried, got = (np.array([number], np.int64) for number in (1, 0))
    into, of = (np.array([[each.ctypes.data, 8]], np.int64) for each in (got, tried))
    works = call(os.getpid(), into.ctypes.data, 1, of.ctypes.data, 1, 0) == 8 and got[0] == 1
    return call if works else None

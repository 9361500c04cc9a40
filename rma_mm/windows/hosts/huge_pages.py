"""Huge pages for shared segments: in pages of 4 KiB, BLAS loses up to a fifth of its speed.

Linux gives private memory huge pages, as NumPy asks for them, but not shared segments: its setting `shmem_enabled` is
`never` by default. MADV_COLLAPSE (Linux 6.1) puts them under a segment all the same, where it is mapped at a multiple
of their size. MPI maps it anywhere, so it is mapped once more.

A huge page takes 0.3 ms where the system has one at hand, less than the pages that it replaces, and 4 ms where it must
first move others. The latter pays for programs that multiply for long.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HUGE = 2**21  # bytes of a huge page of x86-64, and of ARM with pages of 4 KiB
COLLAPSE = 25  # MADV_COLLAPSE
PIECE = 4 * HUGE  # bytes for which one call asks
PATIENCE = 0.002  # seconds for a huge page until small ones are taken instead
WORTH = 40_000_000  # nanoseconds of products that a slow huge page makes faster by what it takes
NOTHING = 0  # PROT_NONE
MAY_MOVE, FIXED = 1, 2  # MREMAP_MAYMOVE, MREMAP_FIXED
NORESERVE = 0x4000  # MAP_NORESERVE
FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class FileMapping(NamedTuple):
    """Addresses of this process that show a file, and where in the file they start."""

    start: int
    end: int
    offset: int


class Remapped:
    """Shared memory that is mapped once more, at addresses at which huge pages fit. `close` unmaps it."""

    def __init__(self) -> None:
        self._moved: dict[FileMapping, int] = {}
        self.rest = np.empty(0, np.uint8)  # what has small pages, although it fits
        self.products = 0  # nanoseconds of products since then

    @cached_property
    def _mapped(self) -> list[FileMapping]:
        return list(_mapped())

    def shown(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the same bytes at an address at which huge pages fit; `memory` itself where there is none."""
        if memory.nbytes < HUGE:
            return memory
        at = memory.ctypes.data
        found = next((each for each in self._mapped if each.start <= at and at + memory.nbytes <= each.end), None)
        if found is None or not (found.start - found.offset) % HUGE:
            return memory
        if found not in self._moved:
            self._moved[found] = _moved(found)
        there = (ctypes.c_uint8 * memory.nbytes).from_address(at + self._moved[found] - found.start)
        return np.ctypeslib.as_array(there)

    def collapse(self, own: NDArray[np.uint8]) -> None:
        """Put huge pages under new memory, as far as the system has them at hand; `note_product` goes on."""
        self.rest = collapse(own, PATIENCE, is_new=True)
        if self.rest.nbytes >= HUGE:
            _waiting.add(self)

    def close(self) -> None:
        _waiting.discard(self)
        for old, new in self._moved.items():
            if new != old.start:
                _libc.munmap(new, old.end - old.start)
        self._moved.clear()


_waiting: weakref.WeakSet[Remapped] = weakref.WeakSet()  # those with a rest


def note_product(nanoseconds: int) -> None:
    """Count a product, and put huge pages under what has small ones once products have taken long enough. Local."""
    for each in list(_waiting) if _waiting else ():
        each.products += nanoseconds
        if each.products > WORTH * (each.rest.nbytes // HUGE):
            collapse(each.rest)
            _waiting.discard(each)


def collapse(memory: NDArray[np.uint8], patience: float = math.inf, is_new: bool = False) -> NDArray[np.uint8]:
    """Put huge pages under memory, where they fit; return the part from which they took more than `patience` seconds.

    is_new: nothing is in the memory yet, and the system has given no pages.
    """
    start = -memory.ctypes.data % HUGE
    while start + HUGE <= memory.nbytes:
        length = min(PIECE, (memory.nbytes - start) // HUGE * HUGE)
        begun = time.perf_counter()
        if is_new:
            memory[start : start + length : HUGE] = 0  # it takes what is there in part
        if _libc.madvise(memory.ctypes.data + start, length, COLLAPSE):
            return memory[:0]  # this system has none
        start += length
        if time.perf_counter() - begun > patience * length / HUGE:
            break
    return memory[start:]


def _moved(old: FileMapping) -> int:
    """Return a second address of shared memory; the first one if it cannot be had."""
    length = old.end - old.start
    reserved = _libc.mmap(None, length + HUGE, NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE, -1, 0)
    if reserved == FAILED:
        return old.start
    new: int = reserved + (old.offset - reserved) % HUGE
    made = _libc.mremap(old.start, 0, length, MAY_MOVE | FIXED, new)  # of no length: the old one stays, too
    if made == FAILED:
        _libc.munmap(reserved, length + HUGE)
        return old.start
    for start, end in ((reserved, new), (new + length, reserved + length + HUGE)):
        if start < end:
            _libc.munmap(start, end - start)
    return new


def _mapped() -> Iterator[FileMapping]:
    """Yield the shared memory that this process maps."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, rights, offset = line.split()[:3]
        if rights.endswith("s"):
            start, end = (int(each, 16) for each in addresses.split("-"))
            yield FileMapping(start, end, int(offset, 16))

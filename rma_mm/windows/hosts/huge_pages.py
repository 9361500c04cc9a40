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
import time
import weakref
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rma_mm.windows.hosts.mappings import SharedMapping, libc, mapped, mapping_of

HUGE = 2**21  # bytes of a huge page of x86-64, and of ARM with pages of 4 KiB
COLLAPSE = 25  # MADV_COLLAPSE
PIECE = 4 * HUGE  # bytes for which one call asks
PATIENCE = 0.002  # seconds for a huge page until small ones are taken instead
WORTH = 40_000_000  # nanoseconds of products that a slow huge page makes faster by what it takes


class Remapped:
    """Shared memory that is mapped once more, at addresses at which huge pages fit. `close` unmaps it."""

    def __init__(self) -> None:
        self._moved: dict[SharedMapping, int] = {}
        self.rest = np.empty(0, np.uint8)  # what has small pages, although it fits
        self.products = 0  # nanoseconds of products since then

    @cached_property
    def _mapped(self) -> list[SharedMapping]:
        return mapped()

    def shown(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the same bytes at an address at which huge pages fit; `memory` itself where there is none."""
        if memory.nbytes < HUGE:
            return memory
        found = mapping_of(memory, self._mapped)
        if found is None or not (found.start - found.offset) % HUGE:
            return memory
        if found not in self._moved:
            self._moved[found] = found.again(HUGE)
        there = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data + self._moved[found] - found.start)
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
                libc.munmap(new, old.size)
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
        if libc.madvise(memory.ctypes.data + start, length, COLLAPSE):
            return memory[:0]  # this system has none
        start += length
        if time.perf_counter() - begun > patience * length / HUGE:
            break
    return memory[start:]

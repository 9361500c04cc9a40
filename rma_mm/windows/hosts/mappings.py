"""Shared memory of this process at further addresses, or at its own ones although MPI unmaps it, where Linux runs."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

NOTHING = 0  # PROT_NONE
MAY_MOVE, FIXED = 1, 2  # MREMAP_MAYMOVE, MREMAP_FIXED
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # the last is MAP_NORESERVE
UNUSED = 0x100000  # MAP_FIXED_NOREPLACE
FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
if hasattr(libc, "mremap"):
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SharedMapping(NamedTuple):
    """Addresses of this process that show shared memory, and where in its file they start."""

    start: int
    end: int
    offset: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def again(self, alignment: int) -> int:
        """Return a second address of the memory, at a multiple of `alignment`; the first one if it cannot be had."""
        reserved = libc.mmap(None, self.size + alignment, NOTHING, RESERVED, -1, 0)
        if reserved == FAILED:
            return self.start
        new: int = reserved + (self.offset - reserved) % alignment
        if libc.mremap(self.start, 0, self.size, MAY_MOVE | FIXED, new) == FAILED:  # of no length: both addresses stay
            libc.munmap(reserved, self.size + alignment)
            return self.start
        for start, end in ((reserved, new), (new + self.size, reserved + self.size + alignment)):
            if start < end:
                libc.munmap(start, end - start)
        return new


def mapped() -> list[SharedMapping]:
    """Return the shared memory that this process maps; nothing where the system does not tell."""
    try:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    places = [(*addresses.split("-"), offset) for addresses, rights, offset, *_ in lines if rights.endswith("s")]
    return [SharedMapping(*(int(each, 16) for each in place)) for place in places]


def mapping_of(memory: NDArray[Any], among: Iterable[SharedMapping]) -> SharedMapping | None:
    at = memory.ctypes.data
    return next((each for each in among if each.start <= at and at + memory.nbytes <= each.end), None)


class Kept:
    """Shared memory that arrays show, and that stays at its addresses although MPI unmaps it: see `put_back`."""

    def __init__(self, memory: Iterable[NDArray[Any]]) -> None:
        shown = [each for each in memory if each.nbytes]
        among = mapped() if shown else []
        found = {mapping_of(each, among) for each in shown}
        self._again = {each: each.again(mmap.PAGESIZE) for each in found if each is not None}
        self.is_whole = None not in found and all(each.start != new for each, new in self._again.items())
        """True if all of it can be kept."""

    def put_back(self) -> None:
        """Map the memory where it was, if nothing is there; else just forget its second address."""
        for old, new in self._again.items():
            if new == old.start:
                continue
            if libc.mmap(old.start, old.size, NOTHING, RESERVED | UNUSED, -1, 0) == old.start:
                libc.mremap(new, old.size, old.size, MAY_MOVE | FIXED, old.start)
            else:
                libc.munmap(new, old.size)
        self._again.clear()

"""Shared memory segments that MPI libraries leave behind when a process does not reach MPI_Finalize."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SEGMENTS = "/dev/shm/"
LIBRARY_PREFIXES = ("mpich", "mpi_", "sm_", "vader", "osc", "open_mpi", "ompi", "ucx_shm", "psm", "fi_")
"""Prefixes that MPI libraries give their shared segments; other mapped files there are not ours to remove."""
PREFIXES = tuple(SEGMENTS + prefix for prefix in LIBRARY_PREFIXES)
SETTLED = 60.0  # seconds after which a segment that nobody maps is nobody's


def mapped_segments(process: str = "self") -> set[str]:
    """Return the shared memory segments of MPI libraries that a process maps."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = {line.split(maxsplit=5)[-1] for line in lines if SEGMENTS in line}
    return {name for name in names if name.startswith(PREFIXES)}


def remove_segments() -> None:
    """Remove the segments that this process maps; its memory stays until it ends."""
    for segment in mapped_segments():
        with suppress(OSError):
            os.unlink(segment)


def stray_segments() -> list[str]:
    """Return this user's MPI segments that no visible process maps: those of killed jobs."""
    mapped = {name for process in Path("/proc").glob("[0-9]*") for name in mapped_segments(process.name)}
    found = []
    for name in glob.glob(SEGMENTS + "*"):
        with suppress(OSError):
            seen = os.lstat(name)
            is_ours = seen.st_uid == os.geteuid() and name.startswith(PREFIXES)
            if is_ours and name not in mapped and time.time() - seen.st_mtime > SETTLED:
                found.append(name)
    return sorted(found)


def held_bytes(names: Iterable[str]) -> int:
    """Return the bytes that segments hold; those removed meanwhile hold none."""
    return sum(os.lstat(name).st_size for name in names if os.path.lexists(name))

"""Limits of this host, checked before use: shared memory, threads, memory. Imports no MPI."""

from __future__ import annotations

import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SEGMENTS = "/dev/shm"  # folder of MPI's shared segments on Linux; if it is absent nothing is checked
LOCAL_RANKS = "MPI_LOCALNRANKS"
"""Environment variable: where MPICH's launcher says how many ranks it started on this host."""
MIB = 2**20
BOOT = 1.1 * MIB
"""Bytes of a segment that MPICH 4 and 5 map for each rank of a host when they start, whatever moves messages."""
UCX_FROM = 15 * MIB
"""Free bytes from which on UCX, MPICH's way to other ranks, takes segments of its own; it needs no more of less."""
UCX_FIRST, UCX_EACH = 17.5 * MIB, 4.2 * MIB
"""Free bytes that the first rank needs then, and each further one: measured with UCX in MPICH 5.0.2, 1 to 8 ranks."""
UNLIMITED = 2**60  # bytes that mean no limit: version 1 of control groups reports about 2⁶³


def free_segment_bytes() -> int | None:
    """Return bytes that shared segments can still take on this node, None if that is unknown."""
    try:
        space = os.statvfs(SEGMENTS)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize


def needed_segment_bytes(ranks: int, free: int) -> int:
    """Return the bytes of shared segments that MPICH needs to start these ranks, with so much free."""
    is_ucx = not (os.environ.get("UCX_TLS") or os.environ.get("MPIR_CVAR_CH4_NETMOD") or free < UCX_FROM)
    return int(max(BOOT * ranks, UCX_FIRST + UCX_EACH * (ranks - 1) if is_ucx else 0))


def segment_problem() -> str:
    """Return why MPICH would end in a bus error at start here, with the remedies; empty if it would not.

    To be asked before MPI is initialised. Nothing is known of other libraries, or without a launcher.
    """
    ranks, free = os.environ.get(LOCAL_RANKS, ""), free_segment_bytes()
    if not ranks.isdecimal() or free is None:
        return ""
    needed = needed_segment_bytes(int(ranks), free)
    if free >= needed:
        return ""
    sparing = ", or start it with UCX_TLS=self,tcp" if free >= BOOT * int(ranks) else ""
    return (
        f"{SEGMENTS}: MPI needs about {needed} bytes there to start {ranks} ranks, and {free} are free; enlarge it "
        f"(docker run --shm-size={-(-needed // MIB) * 4}m, or mount -o remount,size=… {SEGMENTS}){sparing}"
    )


def thread_problem() -> str:
    """Return why no thread can be started here, with the remedy; empty if one can."""
    try:
        thread = threading.Thread(target=str)
        thread.start()
    except RuntimeError:
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        return (
            f"threads: the system lets this user start none (ulimit -u is {most}, or a limit of the control group); "
            f"a rank needs some for MPI and BLAS: raise it"
        )
    thread.join()
    return ""


def memory_free(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup"),
    meminfo: Path = Path("/proc/meminfo"),
) -> tuple[int, str]:
    """Return the bytes that this host's processes can still allocate, and the source of that limit.

    That is what the host has free, swap included, or what a control group leaves of its limit; caches count as free.
    groups, mount, meminfo: where Linux lists the groups of a process, shows them, and says what is free.
    """
    found = [(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the host has")]
    with suppress(OSError):
        told = dict(re.findall(r"^(\w+): +(\d+) kB$", meminfo.read_text(), re.MULTILINE))
        if "MemAvailable" in told:
            found = [(1024 * (int(told["MemAvailable"]) + int(told.get("SwapFree", 0))), "the host has free")]
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds or "memory" in kinds.split(","):
                found += _left(mount / "memory" if kinds else mount, path)
    return min(found)


def _left(root: Path, path: str) -> Iterator[tuple[int, str]]:
    """Yield the free memory of a control group and its parents; in a container, some are invisible."""
    at = root / path.strip("/")
    for folder in (at, *at.parents):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = _number(folder / limit)
            if most is not None and most < UNLIMITED:
                used = _number(folder / usage) or 0
                with suppress(OSError):
                    told = (folder / "memory.stat").read_text()
                    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", told, re.MULTILINE)
                    used -= int(cached[1]) if cached else 0
                yield max(0, most - max(0, used)), f"the control group's {folder / limit} leaves"
        if folder == root:
            break


def _number(file: Path) -> int | None:
    """Return the number in a file; None for another text, as max, and where it cannot be read."""
    with suppress(OSError):
        text = file.read_text().strip()
        return int(text) if re.fullmatch(r"\d+", text) else None
    return None

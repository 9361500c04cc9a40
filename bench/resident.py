"""What a process holds: resident memory, mappings, descriptors and MPI windows, and whether that grows."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bench import measure

if TYPE_CHECKING:
    from rma_mm import Mesh

POINTS = 10
"""How often a process is looked at while something is repeated."""
ALLOWED = 2**18
"""Bytes that resident memory may wander: over 5000 calls 52 bytes a call, less than any handle takes."""
PERIOD = 2e-3
"""Seconds between two looks of a `PrivatePeak`."""


def trim() -> None:
    """Hand freed memory back to the system, so that it cannot hide what is allocated afterwards."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def rollup() -> dict[str, int]:
    """Bytes of this process by kind, as /proc/self/smaps_rollup has them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    words = (line.split() for line in lines)
    return {name.rstrip(":"): 1024 * int(kilobytes) for name, kilobytes, *_ in words}


def private_bytes() -> int:
    """Resident bytes that are not shared memory: this process's own, and its share of files such as libraries."""
    found = rollup()
    return found["Pss_Anon"] + found["Pss_File"]


def shared_bytes() -> int:
    """This process's share of resident shared memory, each page divided among those that have touched it.

    So the sum over the ranks of a node counts a tile once, however many node-mates multiply out of it in place
    (Rss would count it once for each of them).
    """
    return rollup()["Pss_Shmem"]


class PrivatePeak:
    """The most private memory that a block of code holds at any moment, seen by a thread beside it."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PrivatePeak:
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(PERIOD):
            self.peak = max(self.peak, private_bytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.peak = max(self.peak, private_bytes())


def holdings(mesh: Mesh) -> dict[str, int]:
    """What this rank holds now. Local."""
    gc.collect()
    arena = mesh.arena
    windows = {id(slab.window) for slab in arena.slabs}
    windows |= {id(place) for place, _, _ in arena.live.values() if not hasattr(place, "window")}
    return {
        "rss": rollup()["Rss"],
        "mappings": Path("/proc/self/maps").read_bytes().count(b"\n"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
        "slabs": len(arena.slabs),
        "windows": len(windows),
        "blocks": len(arena.live),
    }


def growth(mesh: Mesh, call: Callable[[int], object], count: int, warmup: int) -> dict[str, Any]:
    """Call `call(n)` for `count` numbers after `warmup` more, and see what every rank holds meanwhile. Collective.

    → series: holdings by rank and moment; grew: the most that any rank came to hold; leaks: what that says grows.
    """
    trim()
    for n in range(warmup):
        call(n)
    series = [holdings(mesh)]
    for n in range(count):
        call(n)
        if (n + 1) % max(1, count // POINTS) == 0:
            series.append(holdings(mesh))
    measure.rest(mesh.comm)
    every = mesh.comm.allgather(series)
    grew = {name: max(mine[-1][name] - since(mine, name)[name] for mine in every) for name in series[0]}
    # Python's own free lists hold a few objects more or less; a leak adds some with each call
    allowed = {"rss": ALLOWED, "objects": count // 100 + 20}
    leaks = [name for name, more in grew.items() if more > allowed.get(name, 0)]
    return {"calls": count, "warmup": warmup, "series": every, "grew": grew, "leaks": leaks, "met": not leaks}


def since(series: list[dict[str, int]], name: str) -> dict[str, int]:
    """The moment from which growth counts: the start, but for resident memory the middle.

    Allocators and MPI settle in a few large steps at any time early on, while a leak goes on growing.
    """
    return series[len(series) // 2 if name == "rss" else 0]


def growth_lines(found: dict[str, Any]) -> list[str]:
    """A table of holdings at the start, in the middle and at the end, on the rank where each grew most."""
    rows = []
    for name, more in found["grew"].items():
        mine = next(each for each in found["series"] if each[-1][name] - since(each, name)[name] == more)
        rows.append([name, mine[0][name], mine[len(mine) // 2][name], mine[-1][name], more])
    calls, warmup = found["calls"], found["warmup"]
    head = ["held", f"after {warmup} calls", f"{calls // 2} later", f"{calls} later", "grew"]
    verdict = f"GREW: {', '.join(found['leaks'])}" if found["leaks"] else "nothing grew"
    bar = f"bar: nothing does, but for {ALLOWED} bytes of rss in the second half"
    return [*measure.table(head, rows), f"{verdict} ({bar})"]

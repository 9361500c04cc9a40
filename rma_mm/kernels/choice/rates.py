"""Rates of BLAS and of generated code on this machine: a small table in the user's cache.

A class of shapes is measured when a large product of it is first wanted, or by `rma-mm calibrate --kernels`.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from rma_mm.elements.dtypes import accumulator
from rma_mm.kernels.binders import KERNELS
from rma_mm.kernels.blas import library
from rma_mm.kernels.blocked import Scratch
from rma_mm.kernels.cache import alone, cache_folder, read_own, write_own
from rma_mm.kernels.product import checked
from rma_mm.kernels.threads import get_threads

SMALL, LARGE, LONG, LIMIT = 192, 1024, 2048, 256
"""Extents at which both are measured, and up to which an extent counts as small. Large ones beside a small one are
long, so that operands leave the second cache, as those of products that are compared do. Rows of large ones lie a
multiple of a page apart, as they often do: there kernels differ most."""
FEW, FEWEST = 16, 8  # rows, or columns, of c that are few, and how many are measured
SECONDS, TIMES = 0.01, 5  # for how long each product is repeated, and how often: the median counts
SETTLE = 0.15
"""Seconds before a sample: the threads of OpenBLAS spin for 2²⁸ cycles, or 0.1 s, after their last product."""
FEW_ROWS, THIN = "few", "lls"
CLASSES = (*map("".join, product("sl", repeat=3)), FEW_ROWS)
"""The classes of shapes: which of m, n, k are small and which large, or a c of few rows, or of few columns."""

Rates = dict[str, dict[str, float]]  # class of shapes → kernel → 10⁹ operations a second

_unwritten: dict[str, Rates] = {}


def shape_class(m: int, n: int, k: int) -> str:
    """Return the class that a product belongs to.

    >>> shape_class(4096, 64, 4096), shape_class(8, 4096, 4096)
    ('lsl', 'few')
    """
    if min(m, n) <= FEW:
        return FEW_ROWS
    return "".join("s" if extent <= LIMIT else "l" for extent in (m, n, k))


def extents(name: str) -> tuple[int, int, int]:
    """Return m, n, k of the product that stands for a class."""
    if name == FEW_ROWS:
        return FEWEST, LARGE, LARGE
    large = LONG if "s" in name else LARGE
    m, n, k = (SMALL if x == "s" else large for x in name)
    return m, n, k


def rates(dtype: np.dtype[Any]) -> Rates | None:
    return _table(get_threads()).get(dtype.name)


def measured(dtype: np.dtype[Any], classes: Sequence[str] = CLASSES, again: bool = False) -> Rates:
    """Measure products of this type by both kernels, and keep the figures; unless another process has, or `again`.

    One process of a machine at a time, so that ranks that start together do not measure each other, and agree.
    """
    with alone():
        _table.cache_clear()
        found = rates(dtype) or {}
        wanted = [name for name in classes if again or name not in found]
        if wanted:
            found = found | {name: _measured_class(dtype, name) for name in wanted}
            _keep(_table(get_threads()) | {dtype.name: found})
    return found


def _keep(table: dict[str, Rates]) -> None:
    """Write the figures, under their name once they are complete; where nothing can be written, remember them."""
    folder = cache_folder()
    try:
        if folder is not None:
            write_own(_file(folder, get_threads()), (json.dumps(table, indent=1) + "\n").encode())
    except OSError:  # a full disk, or the folder is gone
        folder = None
    if folder is None:
        _unwritten.update(table)
    _table.cache_clear()


def _measured_class(dtype: np.dtype[Any], name: str) -> dict[str, float]:
    """10⁹ operations a second of one class, by kernel; in turn, so that both see the same machine."""
    m, n, k = extents(name)
    a, b, summed = np.ones((m, k), dtype), np.ones((k, n), dtype), accumulator(dtype)
    c = Scratch().take(m * n * summed.itemsize).view(summed).reshape(m, n)  # begins at a cache line, as in a window
    problem = checked(a, b, c, 1, 0, False, False)
    calls = {kernel: KERNELS[kernel](problem) for kernel in ("blas", "numba")}
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {kernel: [] for kernel in calls}
    for _ in range(TIMES):
        for kernel, call in calls.items():
            time.sleep(SETTLE if get_threads() > 1 and kernel != "blas" else 0)
            samples[kernel].append(calls_a_second(call, SECONDS))
    work = 2e-9 * m * n * k * (4 if dtype.kind == "c" else 1)
    return {kernel: work * float(np.median(found)) for kernel, found in samples.items()}


def calls_a_second(product: Callable[[], None], seconds: float) -> float:
    """Calls a second, over about the given number of seconds."""
    count, start = 0, time.perf_counter()
    while not count or time.perf_counter() - start < seconds:
        product()
        count += 1
    return count / (time.perf_counter() - start)


@cache
def _table(threads: int) -> dict[str, Rates]:
    """Return the rates known for this machine and so many threads, by type.

    They are read once, so that a process does not change its mind.
    """
    folder = cache_folder()
    if folder is None or _unwritten:
        return dict(_unwritten)
    try:
        found = json.loads(read_own(_file(folder, threads)) or b"")
        return {
            str(dtype): {name: {k: float(by[k]) for k in ("blas", "numba")} for name, by in classes.items()}
            for dtype, classes in found.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none yet, or not ours: to be measured again
        return {}


def _file(folder: Path, threads: int) -> Path:
    """Return one file for each processor, BLAS and number of threads."""
    import threadpoolctl

    used = library()
    loaded = (x for x in threadpoolctl.threadpool_info() if used is not None and x["filepath"] == used.path)
    blas: dict[str, Any] = next(loaded, {})
    facts = (processor(), blas.get("internal_api"), blas.get("version"), blas.get("architecture"), threads)
    return folder / ("rates-" + "-".join("".join(filter(str.isalnum, str(fact))) for fact in facts) + ".json")


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2] for line in lines if line.startswith(("model name", "CPU part")))
    return next(named, platform.machine())

"""Set the number of threads of the local BLAS."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from rma_mm.kernels.blas import library

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

GET, SET = "openblas_get_num_threads", "openblas_set_num_threads"

def threads_per_rank(ranks_beside: int, explicit: int | None = None) -> int:
    """Return the threads of one rank: `explicit`, else the environment's, else an equal share of the cores.

    The environment is OPENBLAS_NUM_THREADS, then OMP_NUM_THREADS, as OpenBLAS reads them; the cores are those
    this process may run on. Raises: ValueError unless `explicit` is positive.
    """
    if explicit is not None:
        return _positive(explicit)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        first = os.environ.get(name, "").split(",")[0].strip()  # OpenMP allows a list, one entry a nesting level
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return max(1, len(cores()) // max(1, ranks_beside))


def cores() -> frozenset[int]:
    """Return the cores that this process may run on: launchers may bind ranks to some."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def set_threads(n: int) -> None:
    """Let the local BLAS use `n` threads from now on. Raises: ValueError unless `n` is positive."""
    _positive(n)
    own = own_function(SET)
    if own is not None:
        own(ctypes.c_int(n))
        return
    import threadpoolctl

    threadpoolctl.threadpool_limits(n, user_api="blas")


@contextmanager
def using_threads(n: int) -> Iterator[None]:
    """Let the local products use `n` threads meanwhile."""
    before = get_threads()
    if before != n:
        set_threads(n)
    try:
        yield
    finally:
        if before != n:
            set_threads(before)


def run_concurrently(calls: Sequence[Callable[[], object]]) -> None:
    """Make calls at the same time, the last one here.

    The threads of the others keep off this one's core. In a virtual machine Linux takes a core that rests for one that
    is busy (KVM calls it preempted), and would wake them all on this one.
    """
    pool, threads = _pool(max(len(calls) - 1, 1))
    if hasattr(os, "sched_setaffinity") and (free := cores() - {ctypes.CDLL(None).sched_getcpu()}):
        for thread in threads:
            with suppress(OSError):  # the cores of this process may just have changed
                os.sched_setaffinity(thread, free)
    others = [pool.submit(call) for call in calls[:-1]]
    calls[-1]()
    for other in others:
        other.result()


@cache
def _pool(size: int) -> tuple[ThreadPoolExecutor, list[int]]:
    """Return a pool of threads, and the list of those that it has started, as Linux numbers them."""
    from concurrent.futures import ThreadPoolExecutor

    threads: list[int] = []
    return ThreadPoolExecutor(size, "rma_mm product", lambda: threads.append(threading.get_native_id())), threads


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not come along


def get_threads() -> int:
    """Return the threads the local BLAS uses; 1 if no library says."""
    own = own_function(GET)
    if own is not None:
        return int(own())
    import threadpoolctl

    loaded = (entry for entry in threadpoolctl.threadpool_info() if entry["user_api"] == "blas")
    return max((int(entry["num_threads"]) for entry in loaded), default=1)


@cache
def own_function(name: str) -> Callable[..., Any] | None:
    """Return a function of the BLAS the products call; threadpoolctl would walk all loaded libraries each time."""
    lib = library()
    found = None if lib is None else lib.function(name)
    if found is not None:
        found.restype = ctypes.c_int if name == GET else None  # type: ignore[attr-defined]
    return found


def _positive(n: int) -> int:
    if n < 1:
        raise ValueError(f"threads is {n}; it must be 1 or more")
    return n

"""Dask arrays, on worker processes or on threads."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any
from uuid import uuid4

import dask
import dask.array
import numpy as np
from numpy.typing import NDArray

from bench import measure
from bench.peers.cases import bounds, grid_of
from bench.peers.operands import Piece, part
from bench.peers.systems import Alone, Task


class Blocks(Alone):
    """Rows of A times columns of B, as many of each as there are ranks; or sums of as many parts of k.

    The same product asked for twice has the same keys, and Dask would hand out the blocks of the first. So A goes by
    another name in each product, and the result of the one before is dropped first.
    """

    def __init__(self, task: Task) -> None:
        case, ranks = task.case, task.ranks
        self.case = case
        split = grid_of(case, ranks, k_parts=(1, ranks))[2] > 1
        self.parts = (1, 1, ranks) if split else (ranks, ranks, 1)
        m, n, k = (sizes(extent, parts) for extent, parts in zip((case.m, case.n, case.k), self.parts, strict=True))
        self.a, self.b = self.held("A", (m, k)), self.held("B", (k, n))
        self.c: Any = None
        self.facts = {"dask": dask.__version__, "parts": list(self.parts), "blas": measure.blas_name()}

    def held(self, which: str, sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
        """A or B, computed and kept in blocks."""
        made = dask.array.map_blocks(block, which, self.case.dtype, dtype=self.case.dtype, chunks=sizes)
        return self.kept(made)

    def kept(self, lazy: Any) -> Any:
        """The same with every block computed, where its worker has it."""
        raise NotImplementedError

    def multiply(self) -> None:
        """C = A · B."""
        self.c = None
        renamed = self.a.map_blocks(same, dtype=self.case.dtype, name=f"a-{uuid4().hex}")
        self.c = self.kept(renamed @ self.b)

    def pieces(self) -> Iterable[Piece]:
        """All of C."""
        yield Piece(slice(0, self.case.m), slice(0, self.case.n), np.asarray(self.c.compute()))


def block(which: str, element: str, block_info: Any = None) -> NDArray[Any]:
    """A block of "A" or "B"."""
    rows, cols = (slice(*span) for span in block_info[None]["array-location"])
    return part(which, rows, cols, element)


def same(x: NDArray[Any]) -> NDArray[Any]:
    """The block itself."""
    return x


def sizes(extent: int, parts: int) -> tuple[int, ...]:
    """Lengths of nearly equal parts, empty ones left out."""
    return tuple(hi - lo for lo, hi in pairwise(bounds(extent, parts)) if hi > lo)


class Threaded(Blocks):
    """The threaded scheduler: one process, a thread for every core, one BLAS thread in each."""

    def __init__(self, task: Task) -> None:
        import threadpoolctl

        threadpoolctl.threadpool_limits(1)
        dask.config.set(scheduler="threads", num_workers=measure.machine()["cores"])
        super().__init__(task)

    def kept(self, lazy: Any) -> Any:
        """Blocks in this process."""
        return lazy.persist()


class Distributed(Blocks):
    """A scheduler and as many worker processes as there are ranks."""

    def __init__(self, task: Task) -> None:
        from distributed import Client, LocalCluster, wait

        dask.config.set({"distributed.admin.tick.interval": "1s", "distributed.worker.profile.enabled": False})
        cluster = LocalCluster(
            n_workers=task.ranks, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
        )
        self.client, self.wait = Client(cluster), wait
        super().__init__(task)
        self.facts["workers"] = task.ranks

    def kept(self, lazy: Any) -> Any:
        """Blocks on the workers."""
        kept = lazy.persist()
        self.wait(kept)
        return kept

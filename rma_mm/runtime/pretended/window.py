"""Windows of pretended ranks: the memory of one process, which all of them load from and store to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.reduction import REDUCTIONS
from rma_mm.flavours import Flavour
from rma_mm.geometry.span import Span
from rma_mm.runtime.pretended.comm import PretendedComm
from rma_mm.windows.base import Array, Patch, Transfer, check_addable, check_extent, closed
from rma_mm.windows.ranks import exposed_sizes, node_map
from rma_mm.windows.reach import Reach, array_problem, exposed_bytes, given_array, spanned_bytes

PRETENDED = Flavour(
    name="pretended", window=f"{__name__}:PretendedWindow", loads_on_node=True, needs_progress=False,
    takes_arrays=True, packed_by_mpi=False, library="none: one process", at_most=10**6,
)  # fmt: skip


class PretendedWindow(Reach):
    """An array of each rank. See `base.Window`."""

    flavour = PRETENDED.name

    def __init__(
        self, comm: PretendedComm, memory: int | NDArray[Any], *, node_of: tuple[int, ...] | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        array = given_array(memory)
        node_of, self.comm = node_of or node_map(comm), comm
        nbytes = memory if isinstance(memory, int) else spanned_bytes(array)
        sizes = exposed_sizes(comm, nbytes, array_problem(array))
        self.memory = comm.share(exposed_bytes(array), "window")
        super().__init__(comm.rank, node_of, sizes, dict(enumerate(self.memory)))

    def get(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span) -> Transfer:
        self.check(rank, target, origin, rows, cols, lands=True)
        return self.copy(rank, target, origin, rows, cols)

    def accumulate(self, rank: int, target: Patch, origin: Array, rows: Span, cols: Span, op: str = "SUM") -> Transfer:
        self.check(rank, target, origin, rows, cols)
        check_addable(self.flavour, origin.dtype, op)
        pairs = self.pairs(rank, target, origin, rows, cols)

        def add() -> None:
            self.require_open()
            for mine, theirs in pairs:
                REDUCTIONS[op].add(theirs, mine, out=theirs)
            if pairs:
                self.count(rank, len(rows) * len(cols))

        return Addition(add)

    def fetch_add(self, rank: int, offset: int, value: int) -> int:
        self.require_open()
        check_extent(self.flavour, offset, offset + 8, self._sizes[rank])
        counter = self.memory[rank][offset : offset + 8].view(np.int64)
        before = int(counter[0])
        counter[0] += value
        self.count(rank, 0)
        return before

    def peek(self, rank: int, starts: Sequence[int], out: NDArray[np.uint8]) -> None:
        self.require_open()
        for start, line in zip(starts, out, strict=True):
            line[:] = self.memory[rank][start : start + line.size]

    def flush(self) -> None:
        self.require_open()

    sync = flush

    def close(self, leave_memory: bool = False) -> None:
        if not self.is_closed:
            self.comm.barrier()
            self.forget_memory()
            self.memory = []


class Addition:
    """An accumulate, over when it has begun. See `base.Transfer`."""

    def __init__(self, add: Callable[[], None]) -> None:
        self._add = add

    def start(self) -> None:
        self._add()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once: `start` has added everything."""

    def close(self) -> None:
        self._add = partial(_closed, "transfer")


def _closed(what: str) -> None:
    raise closed(what)

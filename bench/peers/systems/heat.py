"""heat, which splits along one dimension."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import heat
import torch

from bench.peers.cases import received
from bench.peers.operands import Piece, part
from bench.peers.systems import OverMPI, Task, mpi_library


class Heat(OverMPI):
    """`heat.matmul`, split along m or n, whichever moves less, or along k where that is best."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        torch.set_num_threads(task.threads)
        case, ranks = self.case, self.ranks
        splits = {(0, 0): (ranks, 1, 1), (1, 1): (1, ranks, 1), (1, 0): (1, 1, ranks)}
        self.splits = min(splits, key=lambda split: received(case, splits[split]))
        self.a = self.held("A", (case.m, case.k), self.splits[0])
        self.b = self.held("B", (case.k, case.n), self.splits[1])
        self.c: Any = None
        self.facts = {
            "heat": heat.__version__, "torch": torch.__version__, "mpi": mpi_library(),
            "splits": list(self.splits), "threads": torch.get_num_threads(), "result": "a new array",
        }

    def held(self, which: str, extents: tuple[int, int], split: int) -> Any:
        """A or B in equal shares."""
        _, _, (rows, cols) = heat.get_comm().chunk(extents, split)
        return heat.array(torch.from_numpy(part(which, rows, cols, self.case.dtype)), is_split=split, copy=False)

    def multiply(self) -> None:
        """C = A · B."""
        self.c = heat.matmul(self.a, self.b)

    def pieces(self) -> Iterable[Piece]:
        """This rank's share of C."""
        _, _, (rows, cols) = self.c.comm.chunk(self.c.shape, self.c.split)
        yield Piece(rows, cols, self.c.larray.numpy())

"""NumPy in one process with every core: the limit on one node."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bench import measure
from bench.peers.operands import Piece, whole
from bench.peers.systems import Alone, Task


class Solo(Alone):
    """`numpy.matmul` into an array that is there already."""

    def __init__(self, task: Task) -> None:
        self.a, self.b = (whole(which, task.case) for which in "AB")
        self.c = np.empty((task.case.m, task.case.n), task.case.dtype)
        self.facts = {"numpy": np.__version__, "blas": measure.blas_name(), "result": "into an existing array"}

    def multiply(self) -> None:
        """C = A · B."""
        np.matmul(self.a, self.b, out=self.c)

    def pieces(self) -> Iterable[Piece]:
        """All of C."""
        m, n = self.c.shape
        yield Piece(slice(0, m), slice(0, n), self.c)

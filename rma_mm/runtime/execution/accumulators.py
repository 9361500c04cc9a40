"""Sums of C while products are added: opened, joined by contributions, and closed, in any semiring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.semiring import PLUS_TIMES, Semiring
from rma_mm.kernels.elementwise import cast, scale
from rma_mm.kernels.order_keys import from_keys, has_keys, key_type, to_keys
from rma_mm.runtime.execution.addressing import Box
from rma_mm.schedule.ops import Ref
from rma_mm.windows.boxes.copying import paired_views

Array = NDArray[Any]


@dataclass(frozen=True)
class Accumulator:
    """The way in which contributions to C are added."""

    semiring: Semiring = PLUS_TIMES
    pushed: bool = False
    """True if ranks accumulate into each other's C. The least and the greatest floats are then sought among keys,
    which C holds from when it is opened until it is closed: MPI's MIN and MAX lose NaN."""
    through_windows: bool = True  # true if windows add as the semiring does; else each rank adds to its own C alone

    def are_keys(self, home: Ref, dtype: np.dtype[Any]) -> bool:
        return self.pushed and home.buffer == "C" and self.semiring.reduction.order != 0 and has_keys(dtype)

    def reduction(self, home: Ref) -> str:
        return (self.semiring if home.buffer == "C" else PLUS_TIMES).reduction.mpi

    def local_add(self, dst: Box, src: Box) -> Callable[[], None]:
        """Return a call that adds a box to one of this rank's own C."""
        (c, (rows, cols)), (total, (down, across)) = dst, src
        pairs = paired_views(total, (down, across), c, (rows, cols))

        def add() -> None:
            for target, source in pairs:
                self.semiring.add(target, source, out=target)

        return add

    def open(self, c: Array, old: Array | None, beta: Any, keys: bool) -> None:
        """Initialise `c` for sums: `old` times beta (`c` itself if `old` is None), or zero if beta is 0.

        `keys`: what it then holds.
        """
        if old is not None:
            cast(old, c)
        if beta == 0:
            c.fill(self.semiring.identity(c.dtype))
        else:
            scale(c, beta)
        if keys:
            to_keys(c, self.semiring.reduction)

    def close(self, c: Array) -> None:
        from_keys(c, self.semiring.reduction)

    def encode_in_place(self, box: Box) -> Callable[[], None]:
        """Return a call that encodes the floats of a box as sortable integers, in place."""
        array, (rows, cols) = box
        views = [view for view, _ in paired_views(array, (rows, cols), array, (rows, cols))]

        def turn() -> None:
            for view in views:
                to_keys(view, self.semiring.reduction)

        return turn

    def encode_keys(self, x: Array) -> Array:
        return x.view(key_type(x.dtype))

    def join(self, home: Ref) -> Callable[[Array, Array], None]:
        """Return a function that adds a total to a home; it overwrites the total."""

        def join(c: Array, total: Array) -> None:
            if self.are_keys(home, c.dtype):
                to_keys(total, self.semiring.reduction)
                c, total = self.encode_keys(c), self.encode_keys(total)
            self.semiring.add(c, total, out=c)

        return join

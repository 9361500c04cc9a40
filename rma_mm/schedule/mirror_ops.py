"""Operations that complete a symmetric C of which one triangle was multiplied: mirror it, or zero the other one."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.schedule.ops import LocalOp, Multiply, Ref, TransferSpec
from rma_mm.schedule.symmetry import multiplied


@dataclass(frozen=True, slots=True)
class Mirror(LocalOp):
    """c := src transposed, elements of a finished C. Where both are one box on the diagonal, its upper triangle is set.

    src is the rank's own C, or a slot.
    """

    src: Ref
    c: Ref
    conjugates: bool
    step: int
    kind: ClassVar[str] = "mirror"
    is_dense: ClassVar[bool] = False
    ref_fields: ClassVar[tuple[str, ...]] = ("src", "c")

    @property
    def is_diagonal(self) -> bool:
        return self.src == self.c

    def moves(self, rank: int) -> list[TransferSpec]:
        return []

    def __str__(self) -> str:
        return f"{self.c} := {self.src} {'conjugated and ' * self.conjugates}transposed"


@dataclass(frozen=True, slots=True)
class Clear(LocalOp):
    """Zeros above the diagonal of a region of the rank's own finished C."""

    c: Ref
    step: int
    kind: ClassVar[str] = "clear"
    is_dense: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.c} := its lower triangle"


def above(c: Ref) -> NDArray[np.bool_]:
    rows, cols = c.region
    return np.asarray(rows.indices[:, None] < cols.indices[None, :])


def multiply_adds(op: Multiply) -> int:
    return multiplied(op.c.region, op.half) * len(op.a.region[1])

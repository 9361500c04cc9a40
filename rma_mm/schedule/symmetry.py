"""Symmetric results: one triangle of C determines the other."""

from __future__ import annotations

from typing import Literal

from rma_mm.classes import dataclass
from rma_mm.geometry.span import Region

FINISHED = "F"  # the first letter of slots that hold finished parts of C, in its own type
FILLS = ("both", "lower")  # parts of C to be filled: all of it, or its lower triangle, with zeros above the diagonal


@dataclass(frozen=True)
class Symmetry:
    """C equals its transpose, so that one of (m, n, k) and (n, m, k) need be multiplied."""

    conjugates: bool = False  # true if it is the conjugate transpose (Hermitian)
    fill: Literal["both", "lower"] = "both"  # true if C's upper triangle mirrors the lower, or is zero
    is_asked: bool = False  # true if a caller says so, rather than that one matrix is multiplied by its own transpose
    is_own: bool = False  # true if one matrix is multiplied by its own transpose, so that one of the two need be read

    @property
    def word(self) -> str:
        return "Hermitian" if self.conjugates else "symmetric"


def multiplied(c: Region, half: bool) -> int:
    return (c.size + len(c[0])) // 2 if half else c.size

"""Semirings: what is done in place of + and × in a product, C[i, j] = ⊕_k A[i, k] ⊗ B[k, j].

The value of a sum is that of NumPy's ufunc: NaN goes through minimum and maximum, and integers wrap around in +.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rma_mm.errors import DtypeError, OptionError


@dataclass(frozen=True)
class Semiring:
    """A pair of operations, ⊕ and ⊗."""

    name: str
    """What it is called in arguments and reports."""
    add: np.ufunc
    """⊕: associative and commutative."""
    multiply: np.ufunc
    """⊗."""
    reduction: str
    """The reduction of MPI that does what ⊕ does: SUM, MIN, MAX or LOR."""

    @property
    def is_arithmetic(self) -> bool:
        """Whether ⊕ and ⊗ are what + and × are in its types: + of NumPy's bools is or, × is and."""
        return self.reduction in ("SUM", "LOR")

    @property
    def note(self) -> str:
        """What a report adds behind "A @ B" where the product is no ordinary one."""
        return "" if self == PLUS_TIMES else f"by {self.name} "

    @property
    def in_any_order(self) -> bool:
        """Whether a sum has the same bits in whatever order it is formed."""
        return self.reduction != "SUM"

    def identity(self, dtype: np.dtype[Any]) -> Any:
        """What ⊕ leaves every value of `dtype` as it is with, and what a sum of nothing is.

        >>> SEMIRINGS["min_plus"].identity(np.dtype("int8")), SEMIRINGS["max_min"].identity(np.dtype("float32"))
        (np.int8(127), np.float32(-inf))
        """
        if self.is_arithmetic:
            return dtype.type(0)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return dtype.type(limits.max if self.reduction == "MIN" else limits.min)
        return dtype.type(np.inf if self.reduction == "MIN" else -np.inf)


PLUS_TIMES = Semiring("plus_times", np.add, np.multiply, "SUM")
"""The ordinary product."""

SEMIRINGS: dict[str, Semiring] = {
    semiring.name: semiring
    for semiring in (
        PLUS_TIMES,
        Semiring("min_plus", np.minimum, np.add, "MIN"),
        Semiring("max_plus", np.maximum, np.add, "MAX"),
        Semiring("max_min", np.maximum, np.minimum, "MAX"),
        Semiring("or_and", np.logical_or, np.logical_and, "LOR"),
    )
}
"""Every semiring, by name."""


def find_semiring(name: object) -> Semiring:
    """The semiring called `name`. Raises: OptionError listing the names."""
    found = SEMIRINGS.get(name) if isinstance(name, str) else None
    if found is None:
        raise OptionError(f"semiring: got {name!r}; use one of {', '.join(SEMIRINGS)}")
    return found


def check_semiring(semiring: Semiring, dtype: np.dtype[Any], alpha: Any, beta: Any, conjugates: bool) -> None:
    """Refuse what a semiring does not have for a result of type `dtype`: scalars, conjugates, an order.

    Raises: DtypeError, OptionError.
    """
    if semiring == PLUS_TIMES:
        return
    name = semiring.name
    if semiring.reduction == "LOR":
        if dtype.kind != "b":
            raise DtypeError(
                f"semiring {name} is of truth values, and the result would be {dtype.name}: convert both operands "
                "with .astype(bool)"
            )
    elif dtype.kind == "c":
        raise DtypeError(f"semiring {name} needs an order, and {dtype.name} has none: pass real matrices")
    elif dtype.kind == "b":
        raise DtypeError(f"semiring {name} is of numbers, and the result would be bool: use or_and, or .astype('int8')")
    if conjugates:
        raise OptionError(f"conjugate: semiring {name} is of real matrices, which have no conjugate; leave it out")
    if alpha != 1:
        raise OptionError(f"alpha: got {alpha}; semiring {name} has no scalars, so alpha is 1")
    if beta not in (0, 1):
        raise OptionError(f"beta: got {beta}; with semiring {name} beta is 0, or 1 to go on from what C holds")

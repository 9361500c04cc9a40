"""Semirings: what is done instead of + and × in a product, C[i, j] = ⊕_k A[i, k] ⊗ B[k, j].

The value of a sum is that of NumPy's ufunc: NaN goes through minimum and maximum, and integers wrap around in +.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import SUPPORTED, accumulator, is_half, supported_names
from rma_mm.elements.reduction import REDUCTIONS, Reduction
from rma_mm.errors import DtypeError, OptionError

KINDS = "biufc"  # kinds of elements, as NumPy calls them: bool, signed and unsigned integers, real and complex floats


def _kind(dtype: np.dtype[Any]) -> str:
    return "f" if is_half(dtype) else dtype.kind


class Distributes(Enum):
    """True if a ⊗ (b ⊕ c) is (a ⊗ b) ⊕ (a ⊗ c), rounding included: then the ⊕ of some rows of C can be known."""

    NOT_KNOWN = "not known"
    ALWAYS = "always"
    UNLESS_SUMS_WRAP = "unless sums wrap"
    """⊗ is +: where integers do not wrap around, and infinities do not meet that make NaN."""


@dataclass(frozen=True)
class Semiring:
    """A pair of operations, ⊕ and ⊗, and all that is true of them."""

    name: str
    """Name in arguments and reports."""
    reduction: Reduction
    """⊕ on its own."""
    multiply: np.ufunc
    """⊗: commutative."""
    kinds: str
    """The kinds of elements that it is for, of `KINDS`."""
    distributes: Distributes = Distributes.NOT_KNOWN
    """True if ⊗ distributes over ⊕. Where that is not known, a product is verified by the rows computed again alone."""
    is_arithmetic: bool = False
    """True if ⊕ and ⊗ are what + and × are in its types: + of NumPy's bools is or, × is and."""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def add(self) -> np.ufunc:
        """⊕: associative and commutative."""
        return self.reduction.add

    @property
    def types(self) -> tuple[np.dtype[Any], ...]:
        """The element types of the products that it is for."""
        return tuple(dtype for dtype in SUPPORTED if _kind(dtype) in self.kinds)

    @property
    def note(self) -> str:
        """Return the text that a report adds behind "A @ B"; empty for the ordinary product."""
        return "" if self == PLUS_TIMES else f"by {self.name} "

    @property
    def in_any_order(self) -> bool:
        """True if a sum has the same bits in any order."""
        return not (self.reduction.rounds and set("fc") & set(self.kinds))

    def identity(self, dtype: np.dtype[Any]) -> Any:
        """Return the neutral element of ⊕ for `dtype`, which is also the sum of nothing.

        >>> SEMIRINGS["min_plus"].identity(np.dtype("int8")), SEMIRINGS["max_min"].identity(np.dtype("float32"))
        (np.int8(127), np.float32(-inf))
        """
        return self.reduction.identity(dtype)

    def __repr__(self) -> str:
        """Its definition, by which ranks see that they have the same."""
        return f"{self.add.__name__} {self.multiply.__name__} of {self.kinds}, distributes {self.distributes.value}"


SEMIRINGS: dict[str, Semiring] = {}  # every semiring, by name


def register_semiring(
    name: str,
    add: np.ufunc | Reduction,
    multiply: np.ufunc,
    kinds: str,
    distributes: Distributes = Distributes.NOT_KNOWN,
    is_arithmetic: bool = False,
) -> Semiring:
    """Add a semiring, for `semiring=` and `--semiring`.

    Local; every rank must register the same.

    Parameters
    ----------
    name : str
        Its name.
    add : ufunc or Reduction
        ⊕: NumPy's ufunc for a reduction that MPI has, or a `Reduction` unknown to MPI. Ranks cannot accumulate with the
        latter, so algorithms that do are excluded.
    multiply : ufunc
        ⊗.
    kinds : str
        Kinds of element types that it is for, as in `np.dtype.kind`.
    distributes : Distributes
        Whether ⊗ distributes over ⊕ exactly; verification uses it.
    is_arithmetic : bool
        True if the operations are + and ×.

    Returns
    -------
    Semiring
        The new semiring. If no machine code can be made from its ufuncs, NumPy computes the local products.

    Raises
    ------
    OptionError
        If the name is taken, or the operations are not those of a semiring.

    Examples
    --------
    >>> xor_and = register_semiring("xor_and", np.bitwise_xor, np.bitwise_and, "iu", Distributes.ALWAYS)
    >>> xor_and.reduction.mpi, SEMIRINGS.pop("xor_and") == xor_and
    ('BXOR', True)
    """
    if not isinstance(name, str) or not name or name in SEMIRINGS:
        raise OptionError(f"name: got {name!r}; it must be new; taken are {', '.join(SEMIRINGS)}")
    if not kinds or set(kinds) - set(KINDS):
        raise OptionError(f"kinds: got {kinds!r}; they must be some of the letters {KINDS}")
    reduction = add if isinstance(add, Reduction) else _of_mpi(add)
    made = Semiring(name, reduction, multiply, kinds, distributes, is_arithmetic)
    if not (made.in_any_order or is_arithmetic):
        raise OptionError(
            f"add: got {made.add.__name__} for floats: such sums depend on their order, so that no other could verify "
            "them; leave f and c out of kinds"
        )
    if distributes is Distributes.UNLESS_SUMS_WRAP and multiply is not np.add:
        raise OptionError(f"distributes: got {distributes}; this holds only for ⊗ = np.add, and ⊗ is {multiply!r}")
    for dtype in dict.fromkeys(map(accumulator, made.types)):
        _check_laws(made, dtype)
    SEMIRINGS[name] = made
    return made


def _of_mpi(add: np.ufunc) -> Reduction:
    """Return MPI's reduction that equals a ufunc. Raises OptionError."""
    for reduction in REDUCTIONS.values():
        if reduction.add is add:
            return reduction
    known = ", ".join(reduction.add.__name__ for reduction in REDUCTIONS.values())
    raise OptionError(f"add: got {add!r}; use one of {known}, or Reduction(add, identity) for what MPI does not have")


def _check_laws(semiring: Semiring, dtype: np.dtype[Any]) -> None:
    """Raise OptionError if a few elements show that these are no operations of a semiring on this type."""
    add, times = semiring.add, semiring.multiply
    x = np.array([0, 1] if dtype.kind == "b" else [0, 1, 2, 3, 12], dtype)
    y, z = x[:, None], x[:, None, None]
    try:
        with np.errstate(all="ignore"):
            for each in (add, times):
                each(x, x, out=x.copy())
            nothing = np.asarray(semiring.identity(dtype), dtype)
            laws = {
                "x ⊕ the identity is x": (add(x, nothing), x),
                "⊕ is commutative": (add(x, y), add(y, x)),
                "⊕ is associative": (add(x, add(y, z)), add(add(x, y), z)),
                "⊗ is commutative": (times(x, y), times(y, x)),
            }
            if semiring.distributes is not Distributes.NOT_KNOWN:
                laws["⊗ distributes over ⊕"] = times(z, add(x, y)), add(times(z, x), times(z, y))
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"semiring {semiring.name}: its operations do not go with {dtype.name} ({error})") from None
    for law, (left, right) in laws.items():
        if not np.array_equal(left, right):
            raise OptionError(f"semiring {semiring.name}: {law} does not hold for {dtype.name}; see Semiring")


PLUS_TIMES = register_semiring("plus_times", np.add, np.multiply, KINDS, is_arithmetic=True)  # the ordinary product
MIN_PLUS = register_semiring("min_plus", np.minimum, np.add, "iuf", Distributes.UNLESS_SUMS_WRAP)
register_semiring("max_plus", np.maximum, np.add, "iuf", Distributes.UNLESS_SUMS_WRAP)
MAX_MIN = register_semiring("max_min", np.maximum, np.minimum, "iuf", Distributes.ALWAYS)
OR_AND = register_semiring("or_and", np.logical_or, np.logical_and, "b", Distributes.ALWAYS, is_arithmetic=True)


def find_semiring(name: object) -> Semiring:
    """Return the semiring called `name`. Raises: OptionError listing the names."""
    found = SEMIRINGS.get(name) if isinstance(name, str) else None
    if found is None:
        raise OptionError(f"semiring: got {name!r}; use one of {', '.join(SEMIRINGS)}")
    return found


def check_semiring(semiring: Semiring, dtype: np.dtype[Any], alpha: Any, beta: Any, conjugates: bool) -> None:
    """Refuse scalars, conjugates and orders that a semiring does not have for results of type `dtype`.

    Raises: DtypeError, OptionError.
    """
    if semiring == PLUS_TIMES:
        return
    name = semiring.name
    if _kind(dtype) not in semiring.kinds:
        raise DtypeError(_misfit(semiring, dtype))
    if conjugates:
        raise OptionError(f"conjugate: semiring {name} works on real matrices; leave it out")
    if alpha != 1:
        raise OptionError(f"alpha: got {alpha}; semiring {name} has no scalars, so alpha must be 1")
    if beta not in (0, 1):
        raise OptionError(f"beta: got {beta}; with semiring {name} beta must be 0, or 1 to combine with the old C")


def _misfit(semiring: Semiring, dtype: np.dtype[Any]) -> str:
    """Return why a semiring does not work for results of this type, with advice."""
    name = semiring.name
    if semiring.kinds == "b":
        return (
            f"semiring {name} is of truth values, and the result would be {dtype.name}: convert both operands with "
            ".astype(bool)"
        )
    if dtype.kind == "c" and semiring.reduction.order:
        return f"semiring {name} needs an order, and {dtype.name} has none: pass real matrices"
    if dtype.kind == "b" and "i" in semiring.kinds:
        return f"semiring {name} is of numbers, and the result would be bool: use or_and, or .astype('int8')"
    return (
        f"semiring {name} is of {supported_names(semiring.types)}, and the result would be {dtype.name}: convert both "
        "operands with .astype(...)"
    )

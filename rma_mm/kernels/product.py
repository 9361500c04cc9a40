"""Local products: checked operands, and the callable that a kernel makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import check_dtype
from rma_mm.elements.semiring import PLUS_TIMES, Semiring, check_semiring
from rma_mm.errors import LayoutError, ShapeError
from rma_mm.kernels.elementwise import check_cast, scalar


class Product(partial[None]):
    """A prepared local product; calling it does the work. (A partial, since that is the cheapest call.)"""

    kernel: str  # the name of the kernel that does it

    keep: tuple[Any, ...]  # what must live as long as the prepared addresses

    @classmethod
    def by(cls, kernel: str, problem: LocalOperands, call: Callable[..., None], *arguments: Any) -> Product:
        """Return the product by a kernel: `call` of these arguments; keeps the operands."""
        product = cls(call, *arguments)
        product.kernel, product.keep = kernel, (problem,)
        return product


@dataclass(frozen=True, slots=True, eq=False)
class LocalOperands:
    """c = alpha · op(a) @ op(b) + beta · c with every size positive and alpha ≠ 0; or a batch of such products."""

    a: NDArray[Any]  # (m, k), any strides; of a batch (count, m, k)
    b: NDArray[Any]  # (k, n), any strides; of a batch (count, k, n)
    c: NDArray[Any]  # (m, n), any strides, writable; of a batch (count, m, n)
    alpha: np.generic[Any]  # in the type in which c is summed
    beta: np.generic[Any]  # in the type in which c is summed
    conj_a: bool  # true if op conjugates a; False for real types
    conj_b: bool  # true if op conjugates b; False for real types
    semiring: Semiring = PLUS_TIMES
    """Operations used instead of + and ×; for others than these, alpha is 1 and beta 0 or 1."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.c.shape[-2], self.c.shape[-1], self.a.shape[-1]

    @property
    def count(self) -> int:
        return self.c.shape[0] if self.c.ndim == 3 else 1

    def some(self, part: slice) -> LocalOperands:
        return replace(self, a=self.a[part], b=self.b[part], c=self.c[part])


Binder = Callable[[LocalOperands], Product]
"""Type of a kernel: takes operands and returns a prepared product.

Raises DtypeError for a type it does not multiply.
"""


def checked(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], alpha: Any, beta: Any, conj_a: bool, conj_b: bool,
    semiring: Semiring = PLUS_TIMES, dims: int = 2,
) -> LocalOperands:
    """Return the operands of one product, or of a batch of them where `dims` is 3.

    Raises: ShapeError, DtypeError, OptionError, LayoutError if `c` overlaps, ValueError if it is read-only.
    """
    fits = a.ndim == b.ndim == c.ndim == dims and a.shape[:-2] == b.shape[:-2] == c.shape[:-2]
    if not fits or a.shape[-1] != b.shape[-2] or c.shape[-2:] != (a.shape[-2], b.shape[-1]):
        raise ShapeError(
            f"a {a.shape} @ b {b.shape} does not give c {c.shape}: the shapes must be (m, k), (k, n) and (m, n)"
        )
    check_dtype(c.dtype, "c's dtype")
    check_cast(a.dtype, c.dtype, "a", "c")
    check_cast(b.dtype, c.dtype, "b", "c")
    check_semiring(semiring, c.dtype, alpha, beta, conj_a or conj_b)
    check_apart(a, b, c)
    return LocalOperands(
        a, b, c, scalar(alpha, c.dtype, "alpha"), scalar(beta, c.dtype, "beta"), conj_a and a.dtype.kind == "c",
        conj_b and b.dtype.kind == "c", semiring,
    )


def check_apart(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> None:
    """Raises: ValueError if `c` cannot be written, LayoutError if it overlaps an operand."""
    if not c.flags.writeable:
        raise ValueError("c is read-only; a product needs a writable array, c.copy() say")
    for name, x in (("a", a), ("b", b)):
        if _overlap(x, c):
            raise LayoutError(f"c shares memory with {name}, which is read while c is written: pass a copy of {name}")


def _overlap(x: NDArray[Any], c: NDArray[Any]) -> bool:
    """True if two arrays have elements in common. Where that is hard to tell, they are taken to have."""
    if not np.may_share_memory(x, c):
        return False
    try:
        return bool(np.shares_memory(x, c, max_work=10_000))  # type: ignore[arg-type]  # NumPy takes any number
    except np.exceptions.TooHardError:
        return True

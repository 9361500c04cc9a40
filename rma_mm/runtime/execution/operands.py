"""A, B and C of a product before they exist: their types, placements and options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import field, replace
from numbers import Integral
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import accumulator, as_dtype, parse_dtype, result_dtype
from rma_mm.elements.semiring import PLUS_TIMES, Semiring, find_semiring
from rma_mm.errors import OptionError, quoted
from rma_mm.flavours import Flavour
from rma_mm.geometry.extents import parse_bytes
from rma_mm.geometry.layout import Layout
from rma_mm.kernels import choose_kernel
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.kernels.gemm.form import FAST, cuts
from rma_mm.policy.planner.preference import check_preference
from rma_mm.schedule.algorithm import Files
from rma_mm.schedule.schedule import STAGE, Schedule
from rma_mm.schedule.symmetry import FINISHED

FLAGS = ("transpose_a", "transpose_b", "conjugate_a", "conjugate_b", "deterministic")
"""Options of a product that are true or false."""


@dataclass(frozen=True)
class Operand:
    """A matrix, or a batch of them, that is not there yet; its layout may be left to the plan."""

    shape: Any  # (rows, columns); of a batch its own extents before these
    dtype: np.dtype[Any]
    layout: Layout | None = None
    in_place: bool | None = None  # true if node-mates can read its memory; None if it will be the mesh's
    chunks: tuple[int, int] | None = None
    """Rows and columns of the chunks of an operand that stays in a file; None for one in memory."""
    reading: float = field(default=0.0, compare=False)  # seconds in which a byte of it is read from its file
    window: str = ""  # the flavour of the windows that it lies in; empty if that is not known yet


@dataclass(frozen=True)
class ProductOptions:
    """The options of a product, as `matmul` takes them."""

    alpha: Any = 1
    beta: Any = 0
    transpose_a: bool = False
    transpose_b: bool = False
    conjugate_a: bool = False
    conjugate_b: bool = False
    algorithm: str = "auto"
    memory_limit: Any = None  # bytes; text such as "2GiB" until `normalised`
    compute_dtype: Any = None
    deterministic: bool = False
    kernel: str = "auto"
    semiring: str = PLUS_TIMES.name
    epilogue: Epilogue | None = None
    check: Any = False  # true if products are verified as they are done, or only each N-th ("every=N")
    prefer: str | None = None
    """Preferred transfers, one of `policy.planner.preference.PREFERENCES`; None for the mesh's preference."""
    symmetric: Any = None
    """Symmetry that the caller claims for C: True, False, None or "hermitian"; later a `Symmetry` or None."""
    fill: str = "both"  # part of a symmetric C to be filled: "both" or "lower"; later part of the `Symmetry`
    fast: Any = 0  # how often Strassen's algorithm may cut a local product
    arrays: str = ""  # operands that come as NumPy arrays, for which the plan keeps matrices of its own
    folds: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Dimensions among m, n and k of batches that combine several, with their extents; each is cut by itself."""

    def normalised(self) -> ProductOptions:
        """Return the same in one form for all that say the same. Raises DtypeError, OptionError."""
        compute = None if self.compute_dtype is None else as_dtype(self.compute_dtype).name
        flags: dict[str, Any] = {name: self.is_so(name) for name in FLAGS}
        prefer = None if self.prefer is None else check_preference(self.prefer)
        limit = limit_of(self.memory_limit)
        flags |= {"check": self._checked(), "fast": self._checked_fast()}
        return replace(self, compute_dtype=compute, prefer=prefer, memory_limit=limit, **flags)

    def _checked_fast(self) -> int:
        """Return `fast`. Raise OptionError for a bad value, or for what does not go with it."""
        if not isinstance(self.fast, Integral) or int(self.fast) not in range(len(FAST) + 1):
            raise OptionError(f"fast: got {quoted(self.fast)}; must be 0, or how often a product may be cut: 1 or 2")
        if self.fast and self.kernel != "auto":
            raise OptionError(f"fast: got {self.fast} with kernel={self.kernel!r}; leave one of them out")
        if self.fast and self.semiring != PLUS_TIMES.name:
            raise OptionError(f"fast: got {self.fast} with semiring={self.semiring!r}, which cannot subtract; use 0")
        return int(self.fast)

    def _checked(self) -> str:
        """Return how often products are verified, as "every=N"; empty for never. Raise OptionError for a bad value."""
        check = self.check
        if isinstance(check, bool | np.bool_):
            check = "every=1" if check else ""
        if not isinstance(check, str) or not re.fullmatch(r"(every=0*[1-9]\d{,17})?", check):
            raise OptionError(f'check: got {quoted(check)}; must be True, False, or "every=N" for each N-th product')
        return check

    @property
    def checked_every(self) -> int:
        return int(self.check.removeprefix("every=") or 0)

    def is_so(self, name: str) -> bool:
        """Return a flag as a bool. Raises OptionError for what says neither."""
        return flag(name, getattr(self, name))


def limit_of(limit: object) -> int | None:
    """Return a memory limit in bytes; text such as "2GiB" is read. Raises OptionError."""
    if limit is None or (isinstance(limit, Integral) and int(limit) >= 0):
        return None if limit is None else int(limit)
    try:
        return parse_bytes(limit) if isinstance(limit, str) else parse_bytes("")
    except ValueError as error:
        raise OptionError(f"memory_limit: got {quoted(limit)}; {error}") from None


def flag(name: str, value: object) -> bool:
    """An argument that is true or false. Raises OptionError for what is neither, as an array or tensor of several."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"{name}: got {value!r}; must be True or False") from None


@dataclass(frozen=True)
class Operands:
    """A, B and C of a product, in their own orientation, with its options."""

    a: Operand
    b: Operand
    c: Operand
    options: ProductOptions
    kernel: str = ""
    """The local kernel, the same on every rank; chosen for the whole product, so that pieces do not choose another."""

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, cols = self.a.shape
        return (*self.c.shape, rows if self.options.transpose_a else cols)

    @property
    def files(self) -> Files:
        """op(A) and op(B) where they stay in files."""
        o, found = self.options, []
        for x, operand, is_turned in (("A", self.a, o.transpose_a), ("B", self.b, o.transpose_b)):
            if operand.chunks:
                rows, cols = operand.chunks
                found.append((x, (cols, rows) if is_turned else (rows, cols)))
        return tuple(found)

    @property
    def kind(self) -> tuple[object, ...]:
        """Return a key of local products that take the same time for a multiply-add, whatever their placements."""
        o = self.options
        turns = o.transpose_a, o.transpose_b
        return self.shape, *turns, self.a.dtype.name, self.b.dtype.name, self.accum_dtype.name, self.kernel, o.semiring

    @property
    def product_dtype(self) -> np.dtype[Any]:
        """The element type of the product; an epilogue may store C in another. Raises DtypeError."""
        compute = self.options.compute_dtype
        return result_dtype(self.a.dtype, self.b.dtype, parse_dtype(compute) if compute else None)

    @property
    def accum_dtype(self) -> np.dtype[Any]:
        return accumulator(self.product_dtype)

    @property
    def semiring(self) -> Semiring:
        return find_semiring(self.options.semiring)

    @property
    def needs_order(self) -> bool:
        return self.options.deterministic and not self.semiring.in_any_order

    def may_push(self, flavours: Iterable[Flavour]) -> bool:
        return all(flavour.sums(self.semiring.reduction, self.accum_dtype) for flavour in flavours)

    def choose_kernel(self) -> str:
        fast = self.options.fast
        kernel = f"fast{fast}" if fast and cuts(fast, self.shape) else self.options.kernel
        return choose_kernel(kernel, self.accum_dtype, *self.shape, self.semiring, self.operand_dtype)

    @property
    def operand_dtype(self) -> np.dtype[Any] | None:
        return self.a.dtype if self.a.dtype == self.b.dtype else None

    def dtype(self, buffer: str) -> np.dtype[Any]:
        """Element type of a home, or of a scratch frame, by its name: sums are formed in the accumulator's type."""
        if buffer[0] in ("C", FINISHED):
            return self.accum_dtype if buffer[0] == "C" else self.c.dtype
        operand = self.a if buffer[0] == "A" else self.b
        is_summed = buffer.endswith(STAGE) and operand.layout is not None and bool(operand.layout.partial)
        return accumulator(operand.dtype) if is_summed else operand.dtype


def frame_dtype(operands: Operands, schedule: Schedule, frame: str) -> np.dtype[Any]:
    return operands.dtype(frame[0] + STAGE if frame[0] + STAGE in schedule.homes else frame[0])

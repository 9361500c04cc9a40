"""Is the result of a product symmetric? As its operands show, or as the caller says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np

from rma_mm.errors import OptionError, quoted
from rma_mm.runtime.execution.operands import Operands, ProductOptions
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.schedule.symmetry import FILLS, Symmetry

HERMITIAN = "hermitian"  # what says so of a complex C


def with_symmetry(options: ProductOptions, A: object, B: object, *, may_change: bool = False) -> ProductOptions:
    """Return the options with C's known symmetry instead of the claimed one. Raises OptionError.

    One matrix times its own transpose is recognised: of a complex one, with one side conjugated, as Hermitian. Not
    where C's old value enters, or a bias, for these need not be symmetric. may_change: whether other matrices may come
    later, of which a caller says as much.
    """
    said, fill = options.symmetric, options.fill
    if isinstance(said, np.bool_):
        said = bool(said)
    if not (said is None or isinstance(said, bool) or (isinstance(said, str) and said == HERMITIAN)):
        raise OptionError(f'symmetric: got {quoted(said)}; must be True, False, None, or "{HERMITIAN}"')
    if not (isinstance(fill, str) and fill in FILLS):
        raise OptionError(f'fill: got {quoted(fill)}; must be "both", or "lower" for zeros above the diagonal')
    found = own_product(options, A, B) if said is not False else None
    known: Symmetry | None = None
    if said:
        known = Symmetry(said == HERMITIAN, is_asked=True)
        if found is not None and found.conjugates != known.conjugates and _is_complex(A):
            fits = f'"{HERMITIAN}"' if found.conjugates else "True"
            raise OptionError(f"symmetric: got {said!r}; this product is {found.word}, so say {fits}, or nothing")
    elif found is not None and _keeps_it(options, found):
        known = replace(found, is_asked=fill == "lower")
    if known is None and fill == "lower":
        raise OptionError(
            'fill: got "lower"; C is not known to be symmetric: say symmetric=True, or multiply a matrix by its own '
            "transpose"
        )
    if known is not None:
        is_own = found is not None and not (may_change and known.is_asked)
        known = replace(known, fill=cast(Literal["both", "lower"], fill), is_own=is_own)
    return replace(options, symmetric=known, fill="both")


def own_product(options: ProductOptions, A: object, B: object) -> Symmetry | None:
    """Return the symmetry of A · B that its operands imply: None unless one is the other transposed."""
    if not (isinstance(A, DistMatrix) and isinstance(B, DistMatrix)) or A.block is not B.block:
        return None
    if (A.flipped != options.is_so("transpose_a")) == (B.flipped != options.is_so("transpose_b")):
        return None
    return Symmetry(_is_complex(A) and options.is_so("conjugate_a") != options.is_so("conjugate_b"))


def _is_complex(A: object) -> bool:
    return isinstance(A, DistMatrix) and A.dtype.kind == "c"


def _keeps_it(options: ProductOptions, found: Symmetry) -> bool:
    """True if the rest of the product leaves C symmetric, for any old C."""
    is_plain = not np.any(options.beta != 0) and (options.epilogue is None or options.epilogue.bias is None)
    return is_plain and not (found.conjugates and (options.epilogue is not None or not _is_real(options.alpha)))


def _is_real(x: Any) -> bool:
    """True if a scalar is real; other values are refused later."""
    try:
        return complex(x).imag == 0
    except (TypeError, ValueError, OverflowError):
        return False


def checked_symmetry(operands: Operands) -> Operands:
    """Return the operands, of which a Hermitian C of real elements is symmetric.

    Raises OptionError if C cannot be symmetric as it is said to be.
    """
    o, known = operands.options, operands.options.symmetric
    if known is None:
        return operands
    said = f"symmetric: got {HERMITIAN!r}" if known.conjugates else "symmetric: got True"
    if operands.c.shape[0] != operands.c.shape[1]:
        raise OptionError(f"{said}; C would be {operands.c.shape}, and only a square matrix is symmetric")
    if o.epilogue is not None and o.epilogue.bias is not None:
        raise OptionError(f"{said}; a bias per {o.epilogue.per} makes another matrix of C; leave one of them out")
    if known.conjugates:
        for name, value in (("alpha", o.alpha), ("beta", o.beta)):
            if not _is_real(value):
                raise OptionError(f"{said} and {name}={value}; a Hermitian matrix takes real ones")
    conjugates = known.conjugates and operands.product_dtype.kind == "c"
    return replace(operands, options=replace(o, symmetric=replace(known, conjugates=conjugates)))


def check_own(options: ProductOptions, A: DistMatrix, B: DistMatrix) -> None:
    """Raise OptionError if a plan for a matrix and its transpose is given others."""
    known = options.symmetric
    if known is not None and known.is_own and own_product(options, A, B) is None:
        raise OptionError(
            "B: this plan is for a matrix times its own transpose, and B is not A transposed; make one with "
            "symmetric=False, or symmetric=True where A · B is symmetric"
        )

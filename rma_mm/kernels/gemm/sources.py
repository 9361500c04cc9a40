"""The loops that are compiled for a form, with Numba's types of their arguments. Importing this needs Numba."""

from __future__ import annotations

from numba import types

from rma_mm.kernels.compiling import Source
from rma_mm.kernels.gemm.few import multiply_few
from rma_mm.kernels.gemm.form import Form
from rma_mm.kernels.gemm.loops import least_exponents, multiply, specials
from rma_mm.kernels.gemm.memory import BYTES, SideType, SumType


def loops(form: Form, a: str, b: str, c: str) -> Source:
    """Return the loops of products, for operands and a result that are stored as these types."""
    size = types.int64
    return multiply_few if form.in_place else multiply, (
        SumType(form, c), SideType(form, "a", a), SideType(form, "b", b),
        *(BYTES, size, size, size) * 2, BYTES, size, size, *(size,) * 4,
        *(size,) * 5, BYTES, *(size,) * 3, BYTES, BYTES, BYTES,
    )


def scan(form: Form | None, stored: str) -> Source:
    """Return `least_exponents` of bfloat16, or `specials` of elements that a form packs."""
    kinds = BYTES, *(types.int64,) * 6, BYTES
    return (least_exponents, kinds) if form is None else (specials, (SideType(form, "a", stored), *kinds))

"""The form of a generated kernel: the types that it packs, multiplies and sums, and its tiles.

A form is all that tells the kernels of float32, of complex128, of int8 by dot products and of shortest paths apart.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import BFLOAT16, accumulator
from rma_mm.elements.semiring import Semiring
from rma_mm.errors import AlgorithmError
from rma_mm.kernels.gemm.cpu import AMX_BFLOATS, AMX_BYTES, BFLOATS, BYTES, PAIRS, PAIRS_ADDED, STEPS, Cpu

Pair = tuple[str, str]  # ⊕ and ⊗, by the names of NumPy's ufuncs
ARITHMETIC: Pair = ("add", "multiply")
SUMMED = 512  # products of floats that are added up before they join other sums, as in BLAS: longer sums round more
ACROSS, ALONG = "across", "along"
AMX_FROM = 8  # rows of a product, of few, from which on AMX is faster
SAFE = 127 + 127 + 16 - 126
"""Sum of the stored exponents from which products of bfloat16 and their sums are never subnormal."""
SMALLEST = SAFE // 2  # stored exponent of both operands from which on AMX multiplies few rows: 2**-55
MANY_STEPS = 32  # from so many `Form.steps` on, the next rows of b are asked for one after another
FEW = 32  # rows of a product up to which the other operand is read where it lies
OVERWRITES, ADDS, SCALES, STREAMS = range(4)
"""Modes of c: its old value is dropped, the product is added to it, or added to beta · c; or its old value is dropped
and the new one is stored past the caches, so that c is not read before it is written."""
FAST = {"fast1": 1, "fast2": 2}  # kernels that multiply less than by the classical count: how often they cut a product
LEAST = 768, 1024
"""Rows, columns and steps of k in a submatrix of a product that is cut once, and twice, at least; sums of smaller ones
take longer than is saved."""
SCALARS = 64  # bytes of the scalars in front of the table of a fast product
_NUMBERS: tuple[np.ufunc, ...] = (np.add, np.multiply, np.minimum, np.maximum)
_BITS: tuple[np.ufunc, ...] = (np.bitwise_or, np.bitwise_and, np.bitwise_xor)
_OF_TRUTH: dict[np.ufunc, str] = {
    np.add: "bitwise_or", np.maximum: "bitwise_or", np.logical_or: "bitwise_or",
    np.multiply: "bitwise_and", np.minimum: "bitwise_and", np.logical_and: "bitwise_and",
    np.logical_xor: "bitwise_xor",
}
"""Bit operations on bytes of 0 and 1 that replace operations on truth values."""


@dataclass(frozen=True)
class Form:
    """Computation of one kind of product, fixed when a kernel is compiled."""

    add: str  # ⊕, as one of `Pair`
    times: str  # ⊗
    panel_a: str  # type in which a is packed (NumPy's name; bits16 for packed bfloat16)
    panel_b: str  # type in which b is packed
    total: str  # type in which a tile is summed; of one part where numbers are complex
    read_a: str  # conversion of an element of a: as it is, as truth, complex, or from the bits of float16 or bfloat16
    read_b: str  # conversion of an element of b into one of the panel
    rows: int  # rows of a tile
    vectors: int  # vectors of `lanes` columns in a row of a tile
    lanes: int  # sums in one vector
    dot: str = ""  # instruction that takes several steps of k, if one does
    planes: int = 1  # 2 where real and imaginary parts are packed apart
    correction: int = 0
    """Factor of the sum of b's column that is added: an 8-bit operand was moved by 128 to change its sign."""
    no_nan: bool = False
    """True if no term is NaN: the least and the greatest are then found by one instruction instead of four."""
    terms: int = 1
    """Parts into which `fast` cuts each dimension, and submatrices of which a panel may be the sum."""
    in_place: str = ""
    """`ACROSS` if b is read where it lies and elements of a row are neighbours, `ALONG` if those of a column are."""
    steps: int = 1
    """Rows of b that are multiplied at once where it lies, so that sums are loaded and stored once for all of them."""

    @property
    def is_arithmetic(self) -> bool:
        return (self.add, self.times) == ARITHMETIC

    @property
    def group(self) -> int:
        """Steps of k that one instruction takes."""
        return STEPS[self.dot]

    @property
    def is_amx(self) -> bool:
        return self.dot in (AMX_BYTES, AMX_BFLOATS)

    @property
    def neighbours(self) -> int:
        """Steps of k that lie side by side in a panel: as many as fill a word, where an instruction takes several."""
        return 1 if self.group == 1 else 4 // np.dtype(self.panel_b).itemsize

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def short(self) -> int:
        """Rows of the tile for what remains at the lower edge, if that is no more."""
        return self.rows // 2

    @property
    def halves(self) -> int:
        """Vectors of k that one of b holds: two of bfloat16, elements with even numbers and with odd ones."""
        return 2 if self.in_place == ALONG and self.read_b == "bfloat16" else 1

    @property
    def grain(self) -> int:
        """Return how many elements of k a step takes that reads b where it lies."""
        if self.is_amx:
            return self.group
        return self.lanes * self.halves if self.in_place == ALONG else 1

    @property
    def beside(self) -> int:
        """Return how many elements of a packed row of a lie side by side, where b is read where it lies."""
        return self.neighbours if self.is_amx and self.in_place == ALONG else self.grain

    @property
    def summed(self) -> int:
        """Return how many groups of k one sum takes up before it is added to others; 0 where none is rounded."""
        is_rounded = self.is_arithmetic and np.dtype(self.total).kind == "f"
        return SUMMED // self.planes // self.group if is_rounded else 0

    @property
    def head(self) -> int:
        return self.columns * 4 if self.correction else 0

    def panel_bytes(self, operand: str) -> int:
        """Return bytes of one element of a panel, both parts of a complex one."""
        name = self.panel_a if operand == "a" else self.panel_b
        return self.planes * np.dtype(name).itemsize


@cache
def emitted(semiring: Semiring, dtype: np.dtype[Any]) -> Pair | None:
    """Return the machine code of a semiring for this type of element; None if none can be made."""
    pair = semiring.add, semiring.multiply
    if dtype.kind == "c":
        return ARITHMETIC if pair == (np.add, np.multiply) else None
    known: dict[np.ufunc, str] = {each: each.__name__ for each in _BITS} if dtype.kind in "biu" else {}
    known |= _OF_TRUTH if dtype.kind == "b" else {each: each.__name__ for each in _NUMBERS}
    if semiring.add is np.multiply or not all(each in known for each in pair):
        return None
    return known[pair[0]], known[pair[1]]


def form_of(
    semiring: Semiring, a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], cpu: Cpu, safe: bool = True
) -> Form:
    """Return the form for operands of types `a` and `b` and a result that is summed towards type `c`.

    safe: whether the operands hold nothing that the fast instructions get wrong: subnormals, where those for bfloat16
    are meant, and what makes NaN, where the least or the greatest is sought.
    """
    pair = emitted(semiring, c)
    if pair is None:
        raise AlgorithmError(no_code(semiring, c))
    if pair == ARITHMETIC:
        if takes_bytes(a, b, c, cpu):
            if AMX_BYTES in cpu.dots:
                return _amx(AMX_BYTES, a.name, b.name, "int32")
            return _bytes(a.kind, b.kind, cpu) if BYTES in cpu.dots else _pairs(cpu)
        if PAIRS in cpu.dots and a.kind in "iu" and a.itemsize == b.itemsize == c.itemsize == 2:
            return _pairs(cpu)
        is_bfloat = safe and a == b == BFLOAT16 and c == np.float32
        if is_bfloat and AMX_BFLOATS in cpu.dots:
            return _amx(AMX_BFLOATS, "uint16", "uint16", "float32")
        if is_bfloat and BFLOATS in cpu.dots:
            return _tiled(cpu, "float32", pair, "uint16", "uint16", "as it is", "as it is", dot=BFLOATS)
        if c.kind == "c":
            part = "float32" if c.itemsize == 8 else "float64"
            return _tiled(cpu, part, pair, part, part, reading(a), reading(b), planes=2)
    total = _total(pair, c)
    form = _tiled(cpu, total, pair, total, total, reading(a), reading(b))
    is_ordered = not {"minimum", "maximum"}.isdisjoint(pair)
    return replace(form, no_nan=safe and is_ordered and np.dtype(total).kind == "f")


def few_rows(
    m: int, a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], cpu: Cpu, in_place: str, safe: bool = False
) -> Form | None:
    """Return the form of products of m rows, a few, whose b is read where it lies; None for types that have none.

    safe: whether the operands hold no elements, but 0, that are smaller than `SMALLEST`.
    """
    if c not in (np.float32, np.float64) or a != b or accumulator(a) != c:
        return None
    if safe and a == BFLOAT16 and AMX_BFLOATS in cpu.dots and m >= AMX_FROM:
        form = _amx(AMX_BFLOATS, "uint16", "uint16", "float32")
        if in_place == ALONG:
            return replace(form, rows=-(-m // form.lanes) * form.lanes, vectors=2 * form.lanes, in_place=ALONG)
        return replace(form, rows=_equal_parts(m, form.lanes), in_place=ACROSS, steps=2 * form.group)
    tiled = _tiled(cpu, c.name, ARITHMETIC, c.name, c.name, reading(a), reading(b))
    rows = _equal_parts(max(1, m), 4 if in_place == ALONG else cpu.registers // 4)
    if in_place == ALONG:
        vectors = min(tiled.lanes, cpu.registers // (4 if rows < 3 else 8))
        return replace(tiled, rows=rows, vectors=vectors, in_place=ALONG)
    vectors, steps = 2, 64 if b.itemsize < c.itemsize else 24  # best on an Intel Xeon, which fetches lines in pairs
    if cpu.is_zen:
        vectors, steps = min(8, 3 * cpu.registers // 4 // rows), 32 if m * c.itemsize >= 8 * b.itemsize else 8
    return replace(tiled, rows=rows, vectors=vectors, in_place=ACROSS, steps=steps)


def _equal_parts(extent: int, most: int) -> int:
    """Return the size of parts, as few and as equal as can be, that are no larger than the most."""
    return -(-extent // -(-extent // most))


def has_fast(dtype: np.dtype[Any], operands: np.dtype[Any] | None) -> bool:
    """True for a result whose type both operands have, too, and whose elements are multiplied one by one."""
    return operands == dtype and dtype.kind in "fciu" and dtype.itemsize >= 4


def cuts(levels: int, sizes: tuple[int, int, int]) -> int:
    """Return how often a product of this size is cut."""
    while levels and min(sizes) >> levels < LEAST[levels - 1]:
        levels -= 1
    return levels


def no_code(semiring: Semiring, dtype: np.dtype[Any]) -> str:
    what = f"{semiring.add.__name__} and {semiring.multiply.__name__} of {dtype.name}"
    return f"kernel 'numba' has no code for {what}, which are semiring {semiring.name}; use auto or numpy"


def takes_bytes(a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], cpu: Cpu) -> bool:
    """True if an instruction adds products of bytes, or of what they are as 16-bit numbers."""
    return are_bytes(a, b, c) and PAIRS in cpu.dots


def are_bytes(a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any]) -> bool:
    """True if operands are bytes whose sums have 32 bits, or are cut to fewer."""
    return all(x.kind in "iu" and x.itemsize == 1 for x in (a, b)) and c.kind in "iu" and c.itemsize <= 4


def _total(pair: Pair, c: np.dtype[Any]) -> str:
    """Return the type of the sums: the sign does not matter for wrap-around, but does for an order."""
    if c.kind == "b":
        return "uint8"
    if c.kind in "iu" and pair == ARITHMETIC:
        return f"int{8 * max(2, c.itemsize)}"  # no machine multiplies bytes
    return accumulator(c).name


def _bytes(a: str, b: str, cpu: Cpu) -> Form:
    """Dot products of bytes take one operand without sign and one with: a is moved by 128 where that does not fit."""
    unsigned_a = a == "u" if a != b else a == "i"
    moved = "as it is" if a != b else "moved by 128"
    correction = 0 if a != b else -128 if a == "i" else 128
    panels = ("uint8", "int8") if unsigned_a else ("int8", "uint8")
    return _tiled(cpu, "int32", ARITHMETIC, *panels, moved, "as it is", correction=correction, dot=BYTES)


def _pairs(cpu: Cpu) -> Form:
    """Return the form for products of two neighbours as signed 16-bit numbers.

    Sums are exact of bytes, and in their lower 16 bits of whatever has 16.
    """
    dot = PAIRS_ADDED if PAIRS_ADDED in cpu.dots else PAIRS
    return _tiled(cpu, "int32", ARITHMETIC, "int16", "int16", "as it is", "as it is", dot=dot)


def _amx(dot: str, panel_a: str, panel_b: str, total: str) -> Form:
    """Return the form whose tile is 2 × 2 registers of AMX."""
    return Form(*ARITHMETIC, panel_a, panel_b, total, "as it is", "as it is", rows=32, vectors=2, lanes=16, dot=dot)


def reading(dtype: np.dtype[Any]) -> str:
    """Return how elements of a type are converted; see `Form.read_a`."""
    if dtype == BFLOAT16:
        return "bfloat16"
    if dtype == np.float16:
        return "float16"
    return {"b": "truth", "c": "complex"}.get(dtype.kind, "as it is")


def _tiled(
    cpu: Cpu, total: str, pair: Pair, panel_a: str, panel_b: str, read_a: str, read_b: str, dot: str = "",
    planes: int = 1, correction: int = 0,
) -> Form:
    """Return the form with the tile that fits the registers: two vectors of b, one of a, and as many sums as remain."""
    lanes = cpu.vector_bytes // np.dtype(total).itemsize
    fuses = np.dtype(total).kind == "f" and pair == ARITHMETIC  # needs no register for products
    rows = (14 if fuses or dot else 12) if cpu.registers == 32 else 6
    if dot == PAIRS:  # a register for each product until it is added
        rows //= 2
    vectors = 2
    if planes == 2:
        rows, vectors = (6, 2) if cpu.registers == 32 else (6, 1)
    return Form(
        *pair, panel_a, panel_b, total, read_a, read_b, rows, vectors, lanes, dot, planes, correction
    )

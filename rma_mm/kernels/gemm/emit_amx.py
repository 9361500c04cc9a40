"""Emit LLVM code for AMX: tiles of sums in registers of 16 × 16 words, which one instruction multiplies and adds to.

Intel, "Architectures Software Developer's Manual", volume 1, chapter 18. A register of a holds 16 rows of 64 bytes of
k; one of b holds 16 words of k, of 16 columns each. Of eight registers four hold sums, two a and two b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from rma_mm.kernels.gemm import emit
from rma_mm.kernels.gemm.cpu import AMX_BFLOATS
from rma_mm.kernels.gemm.emit import Tile, Value, at, load
from rma_mm.kernels.gemm.emit_few import Across, Along, InPlace
from rma_mm.kernels.gemm.form import SMALLEST, Form

SQUARE = 16  # rows of a register, and words in each
WIDTH = 4 * SQUARE  # bytes of a row
REGISTERS = 8
_A, _B = 4, 6  # the first registers of a and of b; sums come before them
_BYTE, _WORD, _INDEX = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_HALVES = ir.VectorType(ir.IntType(16), 2 * SQUARE)


def configure(builder: ir.IRBuilder, form: Form) -> None:
    """Tell the processor the sizes of its registers, before they are used: of b whole ones, of others as many rows.

    The operand: palette 1, for each register the bytes of a row, then the rows of each.
    """
    rows = [min(form.rows, SQUARE)] * _B + [SQUARE] * (REGISTERS - _B)
    operand = bytearray([1, *[0] * 15, *[WIDTH, 0] * REGISTERS, *[0] * 16, *rows, *[0] * 8])
    with builder.goto_entry_block():
        place = builder.alloca(ir.ArrayType(_BYTE, len(operand)))
    builder.store(ir.Constant(place.type.pointee, operand), place)
    emit.call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), builder.bitcast(place, _BYTE.as_pointer()))


def release(builder: ir.IRBuilder, _: Form) -> None:
    """Empty the registers, so that the system need not save them when another thread runs."""
    emit.call(builder, "llvm.x86.tilerelease", ir.VoidType())


def code_of(form: Form) -> str:
    """Return LLVM's name of the instruction: for bytes it says which operand has signs."""
    if form.dot == AMX_BFLOATS:
        return "llvm.x86.tdpbf16ps"
    return "llvm.x86.tdpb{}{}d".format(*("u" if panel == "uint8" else "s" for panel in (form.panel_a, form.panel_b)))


class AmxTile(Tile):
    """A tile whose sums are in memory, in `self.sums`, where other tiles have them in vectors."""

    def summed(self, depth: Value) -> list[Value]:
        """Add up in registers: each instruction adds up its own products first, so that no sum is long."""
        with self.builder.goto_entry_block():
            self.sums = self.builder.alloca(self.vector, self.rows * self.vectors)
        self.loop(self.begun(), _INDEX(0), depth, 1)
        for t in range(self.rows // SQUARE):
            for v in range(self.vectors):
                start = at(self.builder, self.sums, (t * SQUARE * self.vectors + v) * WIDTH, _BYTE)
                on(self.builder, t * self.vectors + v, "llvm.x86.tilestored64", start, _INDEX(self.vectors * WIDTH))
        return []

    def begun(self) -> list[Value]:
        for register in range(self.rows // SQUARE * self.vectors):
            on(self.builder, register, "llvm.x86.tilezero")
        return []

    def steps(self, sums: list[Value], ap: Value, bp: Value, u: int) -> list[Value]:
        rows = [at(self.builder, ap, t * SQUARE * WIDTH, _BYTE) for t in range(self.rows // SQUARE)]
        words = [at(self.builder, bp, v * WIDTH, _BYTE) for v in range(self.vectors)]
        multiply(self.builder, self.form, rows, _INDEX(WIDTH), words, _INDEX(self.form.columns * 4))
        return sums

    def stored_row(self, sums: list[Value], i: int) -> list[Value]:
        places = (self.builder.gep(self.sums, [_INDEX(i * self.vectors + v)]) for v in range(self.vectors))
        return [self.builder.load(place) for place in places]


class Woven(Across):
    """Rows of b as registers take them: pairs are woven in a buffer, which stays in the first cache.

    Where an element of b is so small that the processor may count it, or a product with it, as 0, a sum becomes NaN.
    """

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.row = self.step_b
        self.step_b = self.builder.mul(self.row, _INDEX(self.form.group))
        with self.builder.goto_entry_block():
            self.woven = self.builder.alloca(self.vector, self.vectors * SQUARE)

    def begun(self) -> list[Value]:
        """Return the least element so far; the sums are in registers."""
        for v in range(self.vectors):
            on(self.builder, v, "llvm.x86.tileloadd64", at(self.builder, self.out, v * WIDTH, _BYTE), self.stride)
        return [self.builder.bitcast(every(-1), self.vector)]

    def steps(self, sums: list[Value], ap: Value, bp: Value, u: int) -> list[Value]:
        builder, least = self.builder, self.builder.bitcast(sums[0], _HALVES)
        words = [at(builder, self.woven, v * SQUARE * WIDTH, _BYTE) for v in range(self.vectors)]
        for pair in range(SQUARE):
            lines = []
            for q in (2 * pair, 2 * pair + 1):
                self.look_ahead(builder.add(builder.mul(self.index, _INDEX(self.form.group)), _INDEX(q)))
                lines.append(load(builder, at(builder, bp, builder.mul(self.row, _INDEX(q)), _BYTE), _HALVES))
                least = lesser(builder, least, lines[-1])
            for v, place in enumerate(words):
                columns = range(v * SQUARE, (v + 1) * SQUARE)
                turns = [ir.Constant(_WORD, at) for j in columns for at in (j, 2 * SQUARE + j)]
                made = builder.shuffle_vector(*lines, ir.Constant(ir.VectorType(_WORD, 2 * SQUARE), turns))
                builder.store(made, at(builder, place, pair * WIDTH, _HALVES), align=1)
        multiply(builder, self.form, [ap], _INDEX(WIDTH), words, _INDEX(WIDTH))
        return [builder.bitcast(least, self.vector)]

    def add(self, depth: Value) -> None:
        builder = self.builder
        [least] = self.loop(self.begun(), _INDEX(0), depth, 1)
        for v in range(self.vectors):
            on(builder, v, "llvm.x86.tilestored64", at(builder, self.out, v * WIDTH, _BYTE), self.stride)
        mark(self, least)


class AmxAlong(Along):
    """Columns of b, which registers take as they lie where they expect rows of a: the sums are those of the transpose.

    Where an element of b is too small, a sum becomes NaN, as in `Woven`.
    """

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.step_a, self.step_b = self.rows * WIDTH, _INDEX(WIDTH)
        self.squares = [(j, i) for j in range(0, self.vectors, SQUARE) for i in range(0, self.rows, SQUARE)]
        with self.builder.goto_entry_block():
            self.sums = self.builder.alloca(self.vector, SQUARE)

    def begun(self) -> list[Value]:
        """Return the least element so far; the sums are in registers."""
        for register in range(len(self.squares)):
            on(self.builder, register, "llvm.x86.tilezero")
        return [self.builder.bitcast(every(-1), self.vector)]

    def steps(self, sums: list[Value], ap: Value, bp: Value, u: int) -> list[Value]:
        builder, least = self.builder, self.builder.bitcast(sums[0], _HALVES)
        columns = [at(builder, bp, builder.mul(self.column, _INDEX(v)), _BYTE) for v in range(self.vectors)]
        for place in columns:
            self.ask(at(builder, place, builder.mul(self.column, _INDEX(self.vectors)), _BYTE))
            least = lesser(builder, least, load(builder, place, _HALVES))
        words = [at(builder, ap, 4 * i, _BYTE) for i in range(0, self.rows, SQUARE)]
        multiply(builder, self.form, columns[::SQUARE], self.column, words, _INDEX(4 * self.rows))
        return [builder.bitcast(least, self.vector)]

    def add(self, depth: Value) -> None:
        builder = self.builder
        [least] = self.loop(self.begun(), _INDEX(0), depth, 1)
        places = [builder.gep(self.sums, [_INDEX(v)]) for v in range(SQUARE)]
        for register, (column, row) in enumerate(self.squares):
            on(builder, register, "llvm.x86.tilestored64", at(builder, self.sums, 0, _BYTE), _INDEX(WIDTH))
            for i, made in enumerate(emit.transposed(builder, [builder.load(place) for place in places])):
                start = builder.add(builder.mul(self.stride, _INDEX(row + i)), _INDEX(4 * column))
                place = at(builder, self.out, start, self.vector)
                builder.store(builder.fadd(load(builder, place, self.vector), made), place, align=1)
        mark(self, least)


def lesser(builder: ir.IRBuilder, least: Value, line: Value) -> Value:
    """Return the least of elements and of others: their bits without signs, less 1, so that those of 0 are the most."""
    size = builder.sub(builder.shl(line, every(1)), every(1))
    return builder.select(builder.icmp_unsigned("<", size, least), size, least)


def mark(tile: InPlace, least: Value) -> None:
    """Make a sum NaN if an element of b is smaller than `SMALLEST`. least: of `lesser`, as a vector of sums."""
    builder, flags = tile.builder, ir.IntType(2 * SQUARE)
    are_small = builder.icmp_unsigned("<", builder.bitcast(least, _HALVES), every((SMALLEST << 8) - 1))
    with builder.if_then(builder.icmp_unsigned("!=", builder.bitcast(are_small, flags), flags(0))):
        builder.store(ir.Constant(tile.total, float("nan")), at(builder, tile.out, 0, tile.total))


def every(value: int) -> Value:
    return ir.Constant(_HALVES, [value] * 2 * SQUARE)


def multiply(
    builder: ir.IRBuilder, form: Form, rows: Sequence[Value], row: Value, words: Sequence[Value], word: Value
) -> None:
    """Add the products of registers of a and of b to the sums. row, word: bytes from one row to the next of either."""
    for t, place in enumerate(rows):
        on(builder, _A + t, "llvm.x86.tileloadd64", place, row)
        for v, of_b in enumerate(words):
            if t == 0:
                on(builder, _B + v, "llvm.x86.tileloadd64", of_b, word)
            on(builder, t * len(words) + v, code_of(form), _BYTE(_A + t), _BYTE(_B + v))


def on(builder: ir.IRBuilder, register: int, name: str, *arguments: Value) -> None:
    """Emit an instruction on a register."""
    emit.call(builder, name, ir.VoidType(), _BYTE(register), *arguments)

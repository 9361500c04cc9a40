"""Emit LLVM code for AMX: tiles of sums in registers of 16 × 16 words, which one instruction multiplies and adds to.

Intel, "Architectures Software Developer's Manual", volume 1, chapter 18. A register of a holds 16 rows of 64 bytes of
k; one of b holds 16 words of k, of 16 columns each. Of eight registers four hold sums, two a and two b.
"""

from __future__ import annotations

from llvmlite import ir

from rma_mm.kernels.gemm import emit
from rma_mm.kernels.gemm.cpu import AMX_BFLOATS
from rma_mm.kernels.gemm.emit import Tile, Value, at
from rma_mm.kernels.gemm.form import Form

SQUARE = 16  # rows of a register, and words in each
WIDTH = 4 * SQUARE  # bytes of a row
REGISTERS = 8
_A, _B = 4, 6  # the first registers of a and of b; sums come before them
_BYTE, _INDEX = ir.IntType(8), ir.IntType(64)
_CONFIGURATION = bytearray([1, *[0] * 15, *[WIDTH, 0] * REGISTERS, *[0] * 16, *[SQUARE] * REGISTERS, *[0] * 8])
"""The operand of `ldtilecfg`: palette 1, for each register the bytes of a row, then the rows of each."""


def configure(builder: ir.IRBuilder) -> None:
    """Tell the processor the sizes of its registers, before they are used."""
    with builder.goto_entry_block():
        place = builder.alloca(ir.ArrayType(_BYTE, len(_CONFIGURATION)))
    builder.store(ir.Constant(place.type.pointee, _CONFIGURATION), place)
    emit.call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), builder.bitcast(place, _BYTE.as_pointer()))


def release(builder: ir.IRBuilder) -> None:
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
                self.on(t * self.vectors + v, "llvm.x86.tilestored64", start, _INDEX(self.vectors * WIDTH))
        return []

    def begun(self) -> list[Value]:
        for register in range(self.rows // SQUARE * self.vectors):
            self.on(register, "llvm.x86.tilezero")
        return []

    def steps(self, sums: list[Value], ap: Value, bp: Value, u: int) -> list[Value]:
        for t in range(self.rows // SQUARE):
            self.on(_A + t, "llvm.x86.tileloadd64", at(self.builder, ap, t * SQUARE * WIDTH, _BYTE), _INDEX(WIDTH))
            for v in range(self.vectors):
                if t == 0:
                    step = _INDEX(self.form.columns * 4)
                    self.on(_B + v, "llvm.x86.tileloadd64", at(self.builder, bp, v * WIDTH, _BYTE), step)
                self.on(t * self.vectors + v, code_of(self.form), _BYTE(_A + t), _BYTE(_B + v))
        return sums

    def stored_row(self, sums: list[Value], i: int) -> list[Value]:
        places = (self.builder.gep(self.sums, [_INDEX(i * self.vectors + v)]) for v in range(self.vectors))
        return [self.builder.load(place) for place in places]

    def on(self, register: int, name: str, *arguments: Value) -> None:
        """Emit an instruction on a register."""
        emit.call(self.builder, name, ir.VoidType(), _BYTE(register), *arguments)

"""Emit LLVM code: tiles of few rows whose b is read where it lies, in whole vectors, and is asked for ahead of that."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from rma_mm.kernels.gemm import emit
from rma_mm.kernels.gemm.blocks import ONE
from rma_mm.kernels.gemm.emit import LINE, Tile, Value, at, load, type_of
from rma_mm.kernels.gemm.form import Form

_WORD, _INDEX, _BYTE = ir.IntType(32), ir.IntType(64), ir.IntType(8)
_MASK = 0xFFFF0000  # of a bfloat16 in the upper half of a word


class InPlace(Tile):
    """A tile of sums that go on: `out` holds what they were, `stride` bytes from row to row.

    step: bytes from one step of b to the next. source: type of b's elements in memory.
    """

    def __init__(
        self, builder: ir.IRBuilder, form: Form, a: Value, b: Value, step: Value, out: Value, stride: Value, source: str
    ) -> None:
        super().__init__(builder, form, a, b, out, stride, form.rows, form.vectors)
        self.step_b, self.source, self.item = step, type_of(source), np.dtype(source).itemsize

    def converted(self, place: Value, lanes: int) -> Value:
        """Return elements that lie side by side, in the type of the sums."""
        value = load(self.builder, place, ir.VectorType(self.source, lanes))
        found = emit.READS.get(self.form.read_b)
        return value if found is None else found[1](self.builder, value)

    def ask(self, place: Value) -> None:
        """Ask for a line, which is to wait in the second cache."""
        emit.ask(self.builder, place, writes=0, locality=2)


class Across(InPlace):
    """Rows of b, whose elements lie side by side: each adds to a row of sums, so many times.

    Meanwhile the rows from `ahead` on are asked for, one after another, as memory gives one row faster than many at
    once: in each step a piece as wide as a tile. first: pieces before this tile's. inverse: of the number of pieces
    of a row, times `ONE`. jump: bytes from the end of a row's last piece to the next row. share: `ONE` by the number of
    tiles that ask for these pieces, each for its part of them.
    """

    def __init__(
        self, builder: ir.IRBuilder, form: Form, a: Value, b: Value, step: Value, out: Value, stride: Value,
        source: str, ahead: Value, first: Value, inverse: Value, jump: Value, share: Value,
    ) -> None:
        super().__init__(builder, form, a, b, step, out, stride, source)
        self.ahead, self.first, self.inverse, self.jump, self.share = ahead, first, inverse, jump, share

    def steps(self, sums: list[Value], ap: Value, bp: Value, u: int) -> list[Value]:
        self.look_ahead(self.builder.add(self.index, _INDEX(u)))
        return super().steps(sums, ap, bp, u)

    def look_ahead(self, step: Value) -> None:
        """Ask for the piece that belongs to a step."""
        builder, width = self.builder, self.vectors * self.form.lanes * self.item
        piece = builder.add(self.first, self.fraction(self.share, step))
        row = self.fraction(self.inverse, piece)
        offset = builder.add(builder.mul(piece, _INDEX(width)), builder.mul(row, self.jump))
        for place in range(0, width, LINE):
            self.ask(at(builder, self.ahead, builder.add(offset, _INDEX(place)), _BYTE))

    def fraction(self, part: Value, number: Value) -> Value:
        """Return a part of a number, rounded down. part: times `ONE`."""
        return self.builder.lshr(self.builder.mul(number, part), _INDEX(ONE.bit_length() - 1))

    def begun(self) -> list[Value]:
        return [load(self.builder, place, self.vector) for place in self.places()]

    def add(self, depth: Value) -> None:
        """Add the products of `depth` steps to the sums."""
        for value, place in zip(self.summed(depth), self.places(), strict=True):
            self.builder.store(value, place, align=1)

    def places(self) -> list[Value]:
        """Return where the vectors of sums are kept."""
        builder, form, width = self.builder, self.form, self.form.lanes * self.size
        rows = [at(builder, self.out, builder.mul(self.stride, _INDEX(i)), _BYTE) for i in range(form.rows)]
        return [at(builder, row, v * width, self.vector) for row in rows for v in range(self.vectors)]

    def columns(self, line: Value) -> list[Value]:
        lanes, width = self.form.lanes, self.form.lanes * self.item
        starts = (at(self.builder, line, v * width, ir.VectorType(self.source, lanes)) for v in range(self.vectors))
        return [self.converted(start, lanes) for start in starts]


class Along(InPlace):
    """Columns of b, whose elements lie side by side: each is multiplied by every row of a, a vector at a time.

    The columns lie `step` bytes apart. In the end the elements of each vector are added up.
    """

    def __init__(
        self, builder: ir.IRBuilder, form: Form, a: Value, b: Value, step: Value, out: Value, stride: Value, source: str
    ) -> None:
        super().__init__(builder, form, a, b, step, out, stride, source)
        self.column = step
        self.width = form.lanes * self.size  # bytes of a vector of a
        self.step_a = form.rows * form.halves * self.width
        self.step_b = _INDEX(form.halves * form.lanes * self.item)

    def begun(self) -> list[Value]:
        return [ir.Constant(self.vector, [0.0] * self.form.lanes)] * (self.form.rows * self.vectors)

    def steps(self, sums: list[Value], ap: Value, bp: Value, u: int) -> list[Value]:
        builder, form, out = self.builder, self.form, list(sums)
        line = at(builder, bp, builder.mul(self.step_b, _INDEX(u)), _BYTE)
        for v in range(self.vectors):
            column = at(builder, line, builder.mul(self.column, _INDEX(v)), _BYTE)
            following = at(builder, line, builder.mul(self.column, _INDEX(v + self.vectors)), _BYTE)
            for place in range(0, form.halves * form.lanes * self.item, LINE):
                self.ask(at(builder, following, place, _BYTE))
            for half, b in enumerate(self.halves(column)):
                for i in range(form.rows):
                    place = u * self.step_a + (i * form.halves + half) * self.width
                    a = load(builder, at(builder, ap, place, self.vector), self.vector)
                    out[i * self.vectors + v] = emit.step(builder, form, out[i * self.vectors + v], a, b)
        return out

    def halves(self, place: Value) -> list[Value]:
        """Return the vectors of a step: one, or those of elements with even and with odd numbers."""
        builder, form = self.builder, self.form
        if form.halves == 1:
            return [self.converted(place, form.lanes)]
        words = ir.VectorType(_WORD, form.lanes)
        value = load(builder, place, words)
        low = builder.shl(value, ir.Constant(words, [16] * form.lanes))
        high = builder.and_(value, ir.Constant(words, [_MASK] * form.lanes))
        return [builder.bitcast(each, self.vector) for each in (low, high)]

    def add(self, depth: Value) -> None:
        """Add the products of `depth` steps to the sums."""
        builder, form = self.builder, self.form
        totals = _added_up(builder, self.summed(depth), form.lanes)
        row = ir.VectorType(self.total, self.vectors)
        for i in range(form.rows):
            first, place = divmod(i * self.vectors, form.lanes)
            lanes = [ir.Constant(_WORD, place + v) for v in range(self.vectors)]
            mask = ir.Constant(ir.VectorType(_WORD, self.vectors), lanes)
            mine = builder.shuffle_vector(totals[first], totals[first], mask)
            at_out = at(builder, self.out, builder.mul(self.stride, _INDEX(i)), row)
            builder.store(builder.fadd(load(builder, at_out, row), mine), at_out, align=1)


def _added_up(builder: ir.IRBuilder, vectors: list[Value], lanes: int) -> list[Value]:
    """Return the sum of each vector's elements, in vectors: two are folded into one, again and again."""
    vectors = vectors + [ir.Constant(vectors[0].type, None)] * (-len(vectors) % lanes)
    runs = 1  # of lanes that belong to one of the first vectors
    while runs < lanes:
        size = lanes // runs
        starts = [run * size for run in range(2 * runs)]  # of the runs of one vector, then of another
        low, high = (
            ir.Constant(ir.VectorType(_WORD, lanes), [start + half + n for start in starts for n in range(size // 2)])
            for half in (0, size // 2)
        )
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            builder.fadd(builder.shuffle_vector(x, y, low), builder.shuffle_vector(x, y, high)) for x, y in pairs
        ]
        runs *= 2
    return vectors

"""Emit LLVM code: the innermost kernel of a form, a tile of sums in registers, and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir

from rma_mm.elements.reduction import REDUCTIONS
from rma_mm.kernels.gemm.cpu import BFLOATS, BYTES, PAIRS, PAIRS_ADDED
from rma_mm.kernels.gemm.form import ADDS, STREAMS, Form

Value = Any  # A value of LLVM's

LINE = 64  # bytes that are prefetched at a time
UNROLLED = 4  # steps of k between two branches
AHEAD = 4096  # bytes of a panel from what is multiplied to what is prefetched, out of the second cache

_BITWISE = {"bitwise_or": ir.IRBuilder.or_, "bitwise_and": ir.IRBuilder.and_, "bitwise_xor": ir.IRBuilder.xor}
_FLOATS = {"float32": ir.FloatType(), "float64": ir.DoubleType()}
_BYTE = ir.IntType(8)
_INDEX = ir.IntType(64)
_WORD = ir.IntType(32)


DOTS = {
    BYTES: {32: "llvm.x86.avx512.vpdpbusd.256", 64: "llvm.x86.avx512.vpdpbusd.512"},
    PAIRS_ADDED: {32: "llvm.x86.avx512.vpdpwssd.256", 64: "llvm.x86.avx512.vpdpwssd.512"},
    PAIRS: {16: "llvm.x86.sse2.pmadd.wd", 32: "llvm.x86.avx2.pmadd.wd", 64: "llvm.x86.avx512.pmaddw.d.512"},
    BFLOATS: {64: "llvm.x86.avx512bf16.dpbf16ps.512"},
}
"""LLVM's names of the instructions, by the bytes of a vector."""


def type_of(name: str) -> ir.Type:
    return _FLOATS.get(name) or ir.IntType(8 * np.dtype(name).itemsize)


def at(builder: ir.IRBuilder, pointer: Value, offset: Value | int, pointee: ir.Type) -> Value:
    """Return a pointer, the given number of bytes further on."""
    if isinstance(offset, int):
        offset = _INDEX(offset)
    moved = builder.gep(builder.bitcast(pointer, _BYTE.as_pointer()), [offset])
    return builder.bitcast(moved, pointee.as_pointer())


def load(builder: ir.IRBuilder, pointer: Value, pointee: ir.Type) -> Value:
    return builder.load(pointer, align=1, typ=pointee)


def splat(builder: ir.IRBuilder, value: Value, lanes: int) -> Value:
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _WORD(0))
    zeros = ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


# -- arithmetic, of vectors or of single elements ---------------------------------------------------


def identity(form: Form) -> Any:
    (reduction,) = (each for each in REDUCTIONS.values() if each.add.__name__ == form.add)
    return reduction.identity(np.dtype(form.total)).item()


def combine(builder: ir.IRBuilder, form: Form, old: Value, new: Value, no_nan: bool = False) -> Value:
    return _done(builder, form, form.add, old, new, no_nan)


def times(builder: ir.IRBuilder, a: Value, b: Value) -> Value:
    return (builder.fmul if _floating(a) else builder.mul)(a, b)


def step(builder: ir.IRBuilder, form: Form, old: Value, a: Value, b: Value) -> Value:
    """`old` with the product of a and b added to it, in the sense of the semiring."""
    if form.is_arithmetic and _floating(old):
        return _intrinsic(builder, "llvm.fma", old.type, a, b, old)
    return combine(builder, form, old, _done(builder, form, form.times, a, b, form.no_nan), form.no_nan)


def _done(builder: ir.IRBuilder, form: Form, operation: str, x: Value, y: Value, no_nan: bool) -> Value:
    """Return one of NumPy's operations, by its name."""
    if operation == "add":
        return (builder.fadd if _floating(x) else builder.add)(x, y)
    if operation == "multiply":
        return times(builder, x, y)
    if operation in _BITWISE:
        return _BITWISE[operation](builder, x, y)
    return _better(builder, form, "<" if operation == "minimum" else ">", x, y, no_nan)


def _better(builder: ir.IRBuilder, form: Form, sign: str, old: Value, new: Value, no_nan: bool) -> Value:
    if _floating(old):
        wins = builder.fcmp_ordered(sign, new, old)
        if not no_nan:
            wins = builder.or_(wins, builder.fcmp_unordered("uno", new, new))
    elif np.dtype(form.total).kind == "u":
        wins = builder.icmp_unsigned(sign, new, old)
    else:
        wins = builder.icmp_signed(sign, new, old)
    return builder.select(wins, new, old)


def _floating(value: Value) -> bool:
    kind = getattr(value.type, "element", value.type)
    return isinstance(kind, ir.FloatType | ir.DoubleType)


def _intrinsic(builder: ir.IRBuilder, name: str, kind: ir.Type, *values: Value) -> Value:
    """Call one of LLVM's functions on vectors."""
    suffix = {"float": "f32", "double": "f64"}[str(getattr(kind, "element", kind))]
    count = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    return call(builder, f"{name}.{count}{suffix}", kind, *values)


def ask(builder: ir.IRBuilder, place: Value, writes: int, locality: int) -> None:
    """Prefetch a line. writes: 1 if it will be written. locality: 3 for the first cache, 2 for the second."""
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, _WORD(writes), _WORD(locality), _WORD(1))


def fence(builder: ir.IRBuilder) -> None:
    """Order what was stored past the caches before what is stored from here on."""
    if builder.module.triple.startswith("x86"):  # where an ordinary fence may be one that leaves these out
        call(builder, "llvm.x86.sse.sfence", ir.VoidType())
    else:
        builder.fence("seq_cst")


def call(builder: ir.IRBuilder, name: str, kind: ir.Type, *values: Value) -> Value:
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(kind, [value.type for value in values]), name)
    return builder.call(function, values)


def _dot(builder: ir.IRBuilder, form: Form, old: Value, a: Value, b: Value) -> Value:
    """`old` plus the products of `form.group` neighbours, by one instruction, or by one and an addition."""
    code = DOTS[form.dot][form.lanes * 4]
    if form.dot != PAIRS:
        pair = (a, b) if form.panel_a != "int8" else (b, a)
        return call(builder, code, old.type, old, *pair)
    halves = ir.VectorType(ir.IntType(16), 2 * form.lanes)
    return builder.add(old, call(builder, code, old.type, *(builder.bitcast(x, halves) for x in (a, b))))


# -- the tile ---------------------------------------------------------------------------------------


class Tile:
    """Emits the kernel of a form: sums over `depth` steps of a sliver of a and one of b, then stored or combined.

    rows, vectors: how many rows, and vectors of each, are wanted; slivers at the edge may hold no more.
    """

    def __init__(
        self, builder: ir.IRBuilder, form: Form, a: Value, b: Value, out: Value, stride: Value, rows: int, vectors: int
    ) -> None:
        self.builder, self.form, self.rows, self.vectors = builder, form, rows, vectors
        self.a, self.b, self.out, self.stride = a, b, out, stride
        self.total = type_of(form.total)
        self.vector = ir.VectorType(self.total, form.lanes)
        grouped = form.group > 1
        self.element_a = _WORD if grouped else type_of(form.panel_a)
        self.vector_b = ir.VectorType(_WORD if grouped else type_of(form.panel_b), form.lanes)
        self.size = form.group * np.dtype(form.panel_b).itemsize  # bytes of one element of a step
        self.step_a, step_b = (n * form.planes * self.size for n in (form.rows, form.columns))
        self.step_b: Value = _INDEX(step_b)
        self.index: Value = None  # number of the step that the body of a loop begins with

    def emit(self, depth: Value, mode: Value) -> None:
        """depth: steps of k (groups of them). mode: `ADDS`, `STREAMS`, or any other to overwrite `out`."""
        builder = self.builder
        streams, adds = (builder.icmp_unsigned("==", mode, _INDEX(which)) for which in (STREAMS, ADDS))
        with builder.if_then(builder.not_(streams)):
            self.prefetch()
        sums = self.summed(depth)
        with builder.if_else(adds) as (then, otherwise):
            with then:
                self.store(sums, combines=True)
            with otherwise, builder.if_else(streams) as (then, otherwise):
                with then:
                    self.store(sums, combines=False, streams=True)
                with otherwise:
                    self.store(sums, combines=False)

    def emit_to(self, depth: Value, targets: Value, combines: Value) -> None:
        """Add the sums to several submatrices, or subtract them; overwrite those that hold nothing yet.

        targets: their number; of each an offset from `out`, a sign, and whether it is added to, in words. combines:
        whether all of them are.
        """
        builder = self.builder
        with self.each(targets):
            self.prefetch()
        sums = self.summed(depth)
        with self.each(targets) as target:
            signs = signed(builder, number(builder, target, 8), self.vector)
            made = [times(builder, signs, value) for value in sums]
            holds = builder.icmp_unsigned("!=", number(builder, target, 16), _INDEX(0))
            with builder.if_else(builder.or_(holds, combines)) as (then, otherwise):
                with then:
                    self.store(made, combines=True)
                with otherwise:
                    self.store(made, combines=False)

    @contextmanager
    def each(self, targets: Value) -> Iterator[Value]:
        """Emit a loop over targets, in which `out` is the place in each of them."""
        builder, before, origin = self.builder, self.builder.block, self.out
        body, after = (builder.append_basic_block(name) for name in ("target", "told"))
        count = number(builder, targets, 0)
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(_INDEX)
        index.add_incoming(_INDEX(0), before)
        target = at(builder, targets, builder.add(builder.mul(index, _INDEX(24)), _INDEX(8)), _BYTE)
        self.out = at(builder, origin, number(builder, target, 0), _BYTE)
        yield target
        following = builder.add(index, _INDEX(1))
        index.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, count), body, after)
        builder.position_at_end(after)
        self.out = origin

    def summed(self, depth: Value) -> list[Value]:
        """Return the sums after all steps: after every `Form.summed` of them they are added to others, in the stack."""
        builder, form, most = self.builder, self.form, self.form.summed
        if not most:
            return self.between(_INDEX(0), depth)
        count = self.rows * self.vectors * form.planes
        with builder.goto_entry_block():
            total = builder.alloca(self.vector, count)
        places = [builder.gep(total, [_INDEX(s)]) for s in range(count)]
        is_long = builder.icmp_unsigned(">", depth, _INDEX(most))
        with builder.if_then(is_long):
            for place in places:
                builder.store(ir.Constant(self.vector, None), place)
        before, body, done = builder.block, *(builder.append_basic_block(name) for name in ("some", "summed"))
        builder.branch(body)
        builder.position_at_end(body)
        first = builder.phi(_INDEX)
        first.add_incoming(_INDEX(0), before)
        following = builder.add(first, _INDEX(most))
        is_last = builder.icmp_unsigned(">=", following, depth)
        sums = self.between(first, builder.select(is_last, depth, following))
        outside = builder.block
        with builder.if_then(is_long):
            added = [combine(builder, form, builder.load(at), value) for at, value in zip(places, sums, strict=True)]
            for place, value in zip(places, added, strict=True):
                builder.store(value, place)
            inside = builder.block
        totals = [self.merged((value, outside), (more, inside)) for value, more in zip(sums, added, strict=True)]
        first.add_incoming(following, builder.block)
        builder.cbranch(is_last, done, body)
        builder.position_at_end(done)
        return totals

    def merged(self, *ways: tuple[Value, ir.Block]) -> Value:
        """Return the value that belongs to the block from which this one is entered."""
        phi = self.builder.phi(self.vector)
        for value, block in ways:
            phi.add_incoming(value, block)
        return phi

    def between(self, first: Value, last: Value) -> list[Value]:
        """Return the sums of some steps."""
        length = self.builder.and_(self.builder.sub(last, first), _INDEX(~(UNROLLED - 1)))
        whole = self.builder.add(first, length)
        return self.loop(self.loop(self.begun(), first, whole, UNROLLED), whole, last, 1)

    def prefetch(self) -> None:
        """Ask for what `out` holds, which is needed after the last step."""
        builder, form = self.builder, self.form
        width = self.vectors * form.planes * form.lanes * np.dtype(form.total).itemsize
        for i in range(self.rows):
            row = at(builder, self.out, builder.mul(self.stride, _INDEX(i)), _BYTE)
            for line in range(0, width, LINE):
                ask(builder, at(builder, row, line, _BYTE), writes=1, locality=3)

    def begun(self) -> list[Value]:
        """Return the sums before the first step."""
        form, builder = self.form, self.builder
        count = self.rows * self.vectors * form.planes
        if not form.correction:
            return [ir.Constant(self.vector, [identity(form)] * form.lanes)] * count
        width = form.lanes * 4
        heads = [load(builder, at(builder, self.b, v * width, self.vector), self.vector) for v in range(self.vectors)]
        return heads * self.rows

    def loop(self, sums: list[Value], first: Value, last: Value, unrolled: int) -> list[Value]:
        """Return the steps from first to last."""
        builder = self.builder
        before = builder.block
        body, after = (builder.append_basic_block(name) for name in ("steps", "after"))
        builder.cbranch(builder.icmp_unsigned("<", first, last), body, after)
        builder.position_at_end(body)
        index = builder.phi(_INDEX)
        index.add_incoming(first, before)
        self.index = index
        current = [self.merged((value, before)) for value in sums]
        ap = at(builder, self.a, builder.mul(index, _INDEX(self.step_a)), _BYTE)
        start = builder.mul(index, self.step_b)
        bp = at(builder, self.b, builder.add(start, _INDEX(self.form.head)), _BYTE)
        if unrolled > 1 and not self.form.in_place:
            self.ask_ahead(ap, unrolled * self.step_a)
            self.ask_ahead(bp, unrolled * self.step_b.constant)
        results: list[Value] = list(current)
        for u in range(unrolled):
            results = self.steps(results, ap, bp, u)
        following = builder.add(index, _INDEX(unrolled))
        index.add_incoming(following, builder.block)
        for phi, value in zip(current, results, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, last), body, after)
        ending = builder.block
        builder.position_at_end(after)
        return [self.merged((value, before), (result, ending)) for value, result in zip(sums, results, strict=True)]

    def ask_ahead(self, place: Value, size: int) -> None:
        """Prefetch a part of a panel, of so many bytes, that is multiplied later than the one at `place`."""
        for line in range(AHEAD, AHEAD + size, LINE):
            ask(self.builder, at(self.builder, place, line, _BYTE), writes=0, locality=3)

    def steps(self, sums: list[Value], ap: Value, bp: Value, u: int) -> list[Value]:
        builder, form = self.builder, self.form
        bs, out = self.columns(at(builder, bp, builder.mul(self.step_b, _INDEX(u)), _BYTE)), list(sums)
        for i in range(self.rows):
            if form.planes == 2:
                self.complex_row(out, ap, bs, u, i)
                continue
            a = self.spread(ap, u, i)
            for v in range(self.vectors):
                at_sum = i * self.vectors + v
                add = _dot if form.group > 1 else step
                out[at_sum] = add(builder, form, out[at_sum], a, bs[v])
        return out

    def columns(self, line: Value) -> list[Value]:
        """Return the vectors of b's step."""
        form, width = self.form, self.form.lanes * self.size
        places = [part * form.vectors + v for part in range(form.planes) for v in range(self.vectors)]
        starts = (at(self.builder, line, place * width, self.vector_b) for place in places)
        return [load(self.builder, start, self.vector_b) for start in starts]

    def spread(self, ap: Value, u: int, i: int) -> Value:
        """Element i of a's step, in every lane."""
        builder = self.builder
        place = at(builder, ap, u * self.step_a + i * self.size, self.element_a)
        return splat(builder, load(builder, place, self.element_a), self.form.lanes)

    def complex_row(self, sums: list[Value], ap: Value, bs: list[Value], u: int, i: int) -> None:
        """One step of a row of complex sums: real parts of all of them, then imaginary parts."""
        builder, form = self.builder, self.form
        real, imaginary = self.spread(ap, u, i), self.spread(ap, u, form.rows + i)
        minus = builder.fneg(imaginary)
        half = self.rows * self.vectors
        for v in range(self.vectors):
            re, im = i * self.vectors + v, half + i * self.vectors + v
            b_re, b_im = bs[v], bs[self.vectors + v]
            sums[re] = step(builder, form, sums[re], real, b_re)
            sums[im] = step(builder, form, sums[im], real, b_im)
            sums[re] = step(builder, form, sums[re], minus, b_im)
            sums[im] = step(builder, form, sums[im], imaginary, b_re)

    def store(self, sums: list[Value], combines: bool, streams: bool = False) -> None:
        """Store sums into `out`, whose rows are `stride` bytes apart. streams: past the caches."""
        builder, form = self.builder, self.form
        for i in range(self.rows):
            row = at(builder, self.out, builder.mul(self.stride, _INDEX(i)), _BYTE)
            for v, value in enumerate(self.stored_row(sums, i)):
                size = value.type.count * np.dtype(form.total).itemsize
                place = at(builder, row, v * size, value.type)
                if combines:
                    value = combine(builder, form, load(builder, place, value.type), value)
                stored = builder.store(value, place, align=size if streams else 1)
                if streams:
                    stored.set_metadata("nontemporal", builder.module.add_metadata([_WORD(1)]))

    def stored_row(self, sums: list[Value], i: int) -> list[Value]:
        """Return the vectors of one row, real and imaginary parts taking turns."""
        form = self.form
        row = sums[i * self.vectors : (i + 1) * self.vectors]
        if form.planes == 1:
            return row
        half = self.rows * self.vectors
        other = sums[half + i * self.vectors : half + (i + 1) * self.vectors]
        return [_woven(self.builder, [re, im]) for re, im in zip(row, other, strict=True)]


# -- packing ----------------------------------------------------------------------------------------


def gathered(builder: ir.IRBuilder, form: Form, others: Value, load_at: Callable[[Value], Value]) -> Value:
    """Return what lies at offset 0, and in each further term, added or subtracted.

    others: (offset, sign) of each of these, in words; a sign of 0 for none.
    """
    total = load_at(_INDEX(0))
    for t in range(form.terms - 1):
        offset, sign = (number(builder, others, 16 * t + part) for part in (0, 8))
        total = step(builder, form, total, signed(builder, sign, total.type), load_at(offset))
    return total


def number(builder: ir.IRBuilder, address: Value, offset: int) -> Value:
    return load(builder, at(builder, address, offset, _INDEX), _INDEX)


def signed(builder: ir.IRBuilder, sign: Value, kind: ir.Type) -> Value:
    """Return a sign as a number of a type, or in all lanes of a vector."""
    one = getattr(kind, "element", kind)
    if isinstance(one, ir.FloatType | ir.DoubleType):
        made = builder.sitofp(sign, one)
    else:
        made = sign if one == _INDEX else builder.trunc(sign, one)
    return splat(builder, made, kind.count) if isinstance(kind, ir.VectorType) else made


def copy(
    builder: ir.IRBuilder, form: Form, source: Value, others: Value, along: Value, target: Value, width: int,
    element: ir.Type,
) -> None:
    """Copy a step of `width` cells from lines that are `along` bytes apart, one for each element of a cell."""
    vector = ir.VectorType(element, width)
    starts = (builder.mul(along, _INDEX(q)) for q in range(form.neighbours))
    made = _woven(builder, [_line(builder, form, source, others, start, vector) for start in starts])
    builder.store(made, at(builder, target, 0, made.type), align=1)


def _line(builder: ir.IRBuilder, form: Form, source: Value, others: Value, start: Value, vector: ir.Type) -> Value:
    """Return the vector that begins `start` bytes behind the source; see `gathered`."""

    def load_at(offset: Value) -> Value:
        return load(builder, at(builder, source, builder.add(start, offset), vector), vector)

    return gathered(builder, form, others, load_at)


def _woven(builder: ir.IRBuilder, lines: list[Value]) -> Value:
    """Return the first element of every line, then the second of every line, and so on; lines are a power of two."""
    if len(lines) == 1:
        return lines[0]
    even, odd = _woven(builder, lines[::2]), _woven(builder, lines[1::2])
    turns = [place + part * even.type.count for place in range(even.type.count) for part in (0, 1)]
    return builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(_WORD, len(turns)), turns))


def transpose(
    builder: ir.IRBuilder, form: Form, source: Value, others: Value, across: Value, target: Value, width: int,
    cell: ir.Type, size: int, lanes: int,
) -> None:
    """Store `lanes` steps of `width` cells, one behind the other, from lines of cells that are `across` bytes apart.

    It writes whole vectors, so that up to a vector behind the last step is overwritten. size: bytes of a cell.
    """
    vector = ir.VectorType(cell, lanes)
    nothing = ir.Constant(vector, ir.Undefined)

    def line(j: int) -> Value:
        return _line(builder, form, source, others, builder.mul(across, _INDEX(j)), vector)

    for first in reversed(range(0, width, lanes)):  # what overwrites the beginning of the next step comes before it
        lines = [line(j) for j in range(first, width)[:lanes]]
        lines += [nothing] * (lanes - len(lines))
        for step, made in enumerate(transposed(builder, lines)):
            builder.store(made, at(builder, target, (step * width + first) * size, vector), align=1)


def collect(
    builder: ir.IRBuilder, form: Form, source: Value, others: Value, across: Value, target: Value, width: int,
    cell: ir.Type, size: int, lanes: int,
) -> None:
    """Store the lines that `transpose` transposes as they are, one behind the other."""
    vector = ir.VectorType(cell, lanes)
    for j in range(width):
        made = _line(builder, form, source, others, builder.mul(across, _INDEX(j)), vector)
        builder.store(made, at(builder, target, j * lanes * size, vector), align=1)


def turn(builder: ir.IRBuilder, place: Value, width: int, lanes: int) -> None:
    """Transpose `lanes` lines of `width` words, in place."""
    vector = ir.VectorType(_WORD, lanes)
    lines = [
        [load(builder, at(builder, place, 4 * (j * width + first), vector), vector) for j in range(lanes)]
        for first in range(0, width, lanes)
    ]
    for n, made in enumerate(made for square in lines for made in transposed(builder, square)):
        builder.store(made, at(builder, place, n * 4 * lanes, vector), align=1)


def transposed(builder: ir.IRBuilder, lines: list[Value]) -> list[Value]:
    """The transpose of a square of vectors: a swap of the off-diagonal blocks of each size, a power of two."""
    count, size = len(lines), 1
    while size < count:
        kept = [e + (count - size if e & size else 0) for e in range(count)]  # of a line and of one `size` below it
        other = [e + (count if e & size else size) for e in range(count)]
        masks = [ir.Constant(ir.VectorType(_WORD, count), places) for places in (kept, other)]
        pairs = [(lines[i & ~size], lines[i | size], masks[bool(i & size)]) for i in range(count)]
        lines = [builder.shuffle_vector(*pair) for pair in pairs]
        size *= 2
    return lines


def read_truth(builder: ir.IRBuilder, value: Value) -> Value:
    return builder.zext(builder.icmp_unsigned("!=", value, value.type(0)), _BYTE)


def _like(value: Value, kind: ir.Type) -> ir.Type:
    """Return the type of as many of a kind as `value` has elements."""
    return ir.VectorType(kind, value.type.count) if isinstance(value.type, ir.VectorType) else kind


def _all(kind: ir.Type, number: float) -> Value:
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def read_bfloat16(builder: ir.IRBuilder, value: Value) -> Value:
    """float32 from the bits of a bfloat16, or of a vector of them."""
    words = _like(value, _WORD)
    return builder.bitcast(builder.shl(builder.zext(value, words), _all(words, 16)), _like(value, type_of("float32")))


def read_float16(builder: ir.IRBuilder, value: Value) -> Value:
    """float32 from the bits of a float16, subnormals included: the exponent is moved by a multiplication by 2^112."""
    words, kind = _like(value, _WORD), _like(value, type_of("float32"))
    bits = builder.zext(value, words)
    absolute = builder.and_(bits, _all(words, 0x7FFF))
    magnitude = builder.shl(absolute, _all(words, 13))
    scaled = builder.bitcast(builder.fmul(builder.bitcast(magnitude, kind), _all(kind, 2.0**112)), words)
    special = builder.icmp_unsigned(">=", absolute, _all(words, 0x7C00))  # infinity and NaN
    scaled = builder.select(special, builder.or_(magnitude, _all(words, 0x7F800000)), scaled)
    sign = builder.shl(builder.and_(bits, _all(words, 0x8000)), _all(words, 16))
    return builder.bitcast(builder.or_(scaled, sign), kind)


def write_bfloat16(builder: ir.IRBuilder, value: Value) -> Value:
    """The bits of the nearest bfloat16, or of the even one of two, from a float32."""
    bits = builder.bitcast(value, _WORD)
    odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _WORD(0x7FFF))), _WORD(16))
    nan = builder.or_(builder.lshr(bits, _WORD(16)), _WORD(0x7FC0))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), nan, rounded), ir.IntType(16))


def write_float16(builder: ir.IRBuilder, value: Value) -> Value:
    """The bits of the nearest float16, from a float32: by an addition that rounds, where they are subnormal."""
    bits = builder.bitcast(value, _WORD)
    absolute = builder.and_(bits, _WORD(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(absolute, _WORD(13)), _WORD(1))
    moved = builder.sub(builder.add(absolute, builder.add(odd, _WORD(0xFFF))), _WORD(112 << 23))
    least = builder.fadd(builder.bitcast(absolute, value.type), value.type(0.5))
    made = builder.select(
        builder.icmp_unsigned("<", absolute, _WORD(113 << 23)),
        builder.sub(builder.bitcast(least, _WORD), _WORD(126 << 23)), builder.lshr(moved, _WORD(13)),
    )
    made = builder.select(builder.icmp_unsigned(">=", absolute, _WORD(143 << 23)), _WORD(0x7C00), made)
    made = builder.select(builder.icmp_unsigned(">", absolute, _WORD(255 << 23)), _WORD(0x7E00), made)
    sign = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(0x8000))
    return builder.trunc(builder.or_(made, sign), ir.IntType(16))


WRITES = {"bfloat16": write_bfloat16, "float16": write_float16}
"""Elements of c that sums in float32 are rounded to: the function that returns their bits."""
READS: dict[str, tuple[str, Callable[[ir.IRBuilder, Value], Value]]] = {
    "truth": ("uint8", read_truth), "float16": ("float32", read_float16), "bfloat16": ("float32", read_bfloat16),
}
"""Elements that need conversion when read: the type they are loaded as, and the function that converts them."""

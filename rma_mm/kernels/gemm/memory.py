"""Vocabulary of the compiled loops: types that carry a form, and functions on raw memory with offsets in bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import cgutils
from numba.core.compiler import Flags, compile_internal
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model

from rma_mm.kernels.gemm import emit, emit_amx, emit_few
from rma_mm.kernels.gemm.form import Form

types: Any = numba.types
function: Any = intrinsic  # numba's decorator, whose own annotations take what it makes for its argument

BYTES = types.CPointer(types.uint8)  # the type of every address


def digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


class SumType(types.Opaque):  # type: ignore[misc]
    """Type of an argument that carries the type of the sums and of the stored result."""

    def __init__(self, form: Form, stored: str) -> None:
        self.form, self.stored = form, stored
        super().__init__(f"sum{digest((form, stored))}")


class SideType(types.Opaque):  # type: ignore[misc]
    """Type of an argument that carries how operand a or b is packed, and its element type."""

    def __init__(self, form: Form, operand: str, source: str) -> None:
        self.form, self.operand, self.source = form, operand, source
        self.read, self.panel = (form.read_a, form.panel_a) if operand == "a" else (form.read_b, form.panel_b)
        super().__init__(f"side{digest((form, operand, source))}")


for _kind in (SumType, SideType):
    register_model(_kind)(models.OpaqueModel)


def _width(side: Any) -> int:
    return int(side.form.rows if side.operand == "a" else side.form.columns)


def _square(side: Any) -> int:
    form, item = side.form, np.dtype(side.panel).itemsize
    is_copied = side.read == "as it is" and side.source == side.panel and form.neighbours * item in (4, 8)
    return form.lanes * np.dtype(form.total).itemsize // (form.neighbours * item) if is_copied else 0


def turns(side: Any) -> bool:
    """True for a panel whose steps are stored row by row, as AMX takes them from a."""
    return bool(side.form.is_amx and side.operand == "a")


def _bits(sums: Any) -> str:
    """Return the type as which Numba holds elements of c."""
    return "uint16" if sums.stored in emit.WRITES else str(sums.stored)


_SUM: dict[str, Callable[[Any], int]] = {
    "rows": lambda sums: sums.form.rows,
    "short": lambda sums: sums.form.short,
    "columns": lambda sums: sums.form.columns,
    "lanes": lambda sums: sums.form.lanes,
    "vectors": lambda sums: sums.form.vectors,
    "halves": lambda sums: sums.form.halves,
    "grain": lambda sums: sums.form.grain,
    "beside": lambda sums: sums.form.beside,
    "steps": lambda sums: sums.form.steps,
    "group": lambda sums: sums.form.group,
    "parts": lambda sums: sums.form.planes,
    "item": lambda sums: np.dtype(_bits(sums)).itemsize,
    "terms": lambda sums: sums.form.terms,
    "total": lambda sums: np.dtype(sums.form.total).itemsize,
    "direct": lambda sums: sums.stored == sums.form.total,
}
_SIDE: dict[str, Callable[[Any], int]] = {
    "width": _width,
    "group": lambda side: side.form.neighbours,
    "steps": lambda side: side.form.group // side.form.neighbours,  # that an instruction takes
    "parts": lambda side: side.form.planes,
    "terms": lambda side: side.form.terms,
    "item": lambda side: np.dtype(side.source).itemsize * (2 if side.read == "complex" else 1),
    "part": lambda side: np.dtype(side.source).itemsize,
    "cell": lambda side: side.form.neighbours * np.dtype(side.panel).itemsize,
    "square": _square,  # cells of a vector, where squares of them are packed as they are; else 0
    "head": lambda side: side.form.head if side.operand == "b" else 0,
    "correction": lambda side: side.form.correction if side.operand == "b" else 0,
}


def _constants(kind: type[types.Opaque], values: dict[str, Callable[[Any], int]]) -> None:
    """Make facts attributes that are known when the loops are compiled, without a function for each."""

    @infer_getattr
    class Facts(AttributeTemplate):  # type: ignore[misc]
        key = kind

        def generic_resolve(self, what: Any, name: str) -> Any:
            return types.int64 if name in values else None

    @lower_getattr_generic(kind)
    def constant(context: Any, builder: Any, what: Any, value: Any, name: str) -> Any:
        return context.get_constant(types.int64, int(values[name](what)))


_constants(SumType, _SUM)
_constants(SideType, _SIDE)


def subroutine(inlined: bool = False, only: Callable[[Any], bool] = bool) -> Callable[[Callable[..., None]], Any]:
    """Make a function without a result part of the code that calls it.

    Numba would optimise and load each of them apart as well, which takes twice the time. inlined: what is constant in a
    call is then constant in the function. only: for which types of the first argument anything is to be done; for
    others nothing is compiled.
    """

    def made(body: Callable[..., None]) -> Any:
        known: dict[Any, Any] = {}

        @function
        def call(typing: Any, *given: Any) -> Any:
            inner = types.void(*(types.unliteral(kind) for kind in given))

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                if not only(given[0]):
                    return context.get_dummy_value()
                if inner not in known:
                    known[inner] = _unfinished(context, body, inner, inlined)
                context.active_code_library.add_linking_library(known[inner].library)
                passed = zip(cgutils.unpack_tuple(builder, args[0]), given, inner.args, strict=True)
                values = [context.cast(builder, value, kind, wanted) for value, kind, wanted in passed]
                context.call_internal(builder, known[inner].fndesc, inner, values)
                return context.get_dummy_value()

            return types.void(types.StarArgTuple.from_types(given)), generate

        return call

    return made


def _unfinished(context: Any, body: Callable[..., None], signature: Any, inlined: bool) -> Any:
    """A function translated for LLVM, but not optimised: that is done where it has become part of its callers."""
    flags = Flags()
    flags.error_model, flags.forceinline = "numpy", inlined
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    library = context.codegen().create_library(body.__name__)
    library._optimize_final_module = lambda: None
    library._finalize_final_module = lambda: setattr(library, "_finalized", True)
    return compile_internal(
        context.typing_context, context, library, body, signature.args, signature.return_type, flags, locals={}
    )


def numba_type(name: str) -> Any:
    return numba.from_dtype(np.dtype(name))


def _element(context: Any, builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    data = context.get_data_type(kind)
    return emit.load(builder, emit.at(builder, address, offset, data), data)


def _store(context: Any, builder: Any, address: Any, offset: Any, value: Any, kind: Any) -> None:
    builder.store(value, emit.at(builder, address, offset, context.get_data_type(kind)), align=1)


@function
def read(typing: Any, side: Any, source: Any, others: Any, offset: Any, along: Any, left: Any) -> Any:
    """Load one cell of a panel.

    A cell takes as many elements, `along` apart, as an instruction takes steps; beyond the `left`th it is 0. others:
    where else there are elements that are added to it, see `emit.gathered`.
    """
    form, panel, kind = side.form, numba_type(side.panel), numba_type(side.source)
    name, convert = emit.READS.get(side.read, (side.source, lambda _, value: value))
    cell = types.uint32 if form.group > 1 else panel

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, others, offset, along, left = args

        def one(at: Any) -> Any:
            value = convert(builder, _element(context, builder, source, builder.add(offset, at), kind))
            return context.cast(builder, value, numba_type(name), panel)

        if form.group == 1:
            return emit.gathered(builder, form, others, one)
        word, bits = context.get_data_type(types.uint32), np.dtype(side.panel).itemsize * 8
        total = word(0)
        for q in range(form.neighbours):
            inside = builder.icmp_signed("<", left.type(q), left)
            step = builder.select(inside, builder.mul(along, along.type(q)), along.type(0))
            value = builder.zext(one(step), word)
            if side.read == "moved by 128":
                value = builder.xor(value, word(0x80))
            value = builder.select(inside, value, word(0))
            total = builder.or_(total, builder.shl(value, word(q * bits)))
        return total

    return cell(side, source, others, types.int64, types.int64, types.int64), generate


@function
def fill(typing: Any, side: Any, panel: Any, offset: Any, value: Any) -> Any:
    """Set a cell of a panel."""
    cell = types.uint32 if side.form.group > 1 else numba_type(side.panel)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _store(context, builder, args[1], args[2], context.cast(builder, args[3], value, cell), cell)
        return context.get_dummy_value()

    return types.void(side, panel, types.int64, value), generate


def _whole(side: Any, size: int) -> Any:
    """Return the type as which a cell or an element of so many bytes is moved."""
    return emit.type_of(side.panel if side.form.terms > 1 else f"int{8 * size}")


@function
def transpose(typing: Any, side: Any, source: Any, others: Any, across: Any, target: Any) -> Any:
    """Pack `side.square` steps of a sliver whose steps lie side by side in each line of the source."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if lanes := _square(side):
            _, source, others, across, target = args
            size, emitted = _SIDE["cell"](side), emit.collect if turns(side) else emit.transpose
            emitted(builder, side.form, source, others, across, target, _width(side), _whole(side, size), size, lanes)
        return context.get_dummy_value()

    return types.void(side, source, others, types.int64, target), generate


@function
def turn(typing: Any, side: Any, place: Any) -> Any:
    """Store a step of AMX row by row, which was packed as others are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if turns(side):
            emit.turn(builder, args[1], _width(side), emit_amx.SQUARE)
        return context.get_dummy_value()

    return types.void(side, place), generate


@function
def copy(typing: Any, side: Any, source: Any, others: Any, along: Any, target: Any) -> Any:
    """Pack a step of a sliver whose cells lie side by side in the source, in lines that are `along` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _square(side):
            element = _whole(side, np.dtype(side.panel).itemsize)
            emit.copy(builder, side.form, args[1], args[2], args[3], args[4], _width(side), element)
        return context.get_dummy_value()

    return types.void(side, source, others, types.int64, target), generate


@function
def element(typing: Any, side: Any, source: Any, offset: Any) -> Any:
    """Return an element of an operand of whole numbers."""
    kind = numba_type(side.source)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _element(context, builder, args[1], args[2], kind)

    return kind(side, source, types.int64), generate


def _loader(kind: Any) -> Any:
    """load(address, offset): what lies there, as a type."""

    @function
    def load(typing: Any, address: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _element(context, builder, args[0], args[1], kind)

        return kind(address, types.int64), generate

    return load


word, half, number = (_loader(kind) for kind in (types.int32, types.uint16, types.int64))


@function
def set_word(typing: Any, address: Any, offset: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cast = context.cast(builder, args[2], value, types.int32)
        _store(context, builder, args[0], args[1], cast, types.int32)
        return context.get_dummy_value()

    return types.void(address, types.int64, value), generate


@function
def load_sum(typing: Any, sums: Any, address: Any, offset: Any) -> Any:
    """Return a sum that a tile left there."""
    kind = numba_type(sums.form.total)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _element(context, builder, args[1], args[2], kind)

    return kind(sums, address, types.int64), generate


@function
def stored(typing: Any, sums: Any, address: Any, offset: Any) -> Any:
    """Return an element of c, in the type of the sums."""
    kind, total = numba_type(_bits(sums)), numba_type(sums.form.total)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _element(context, builder, args[1], args[2], kind)
        if sums.stored in emit.WRITES:
            return emit.READS[sums.stored][1](builder, value)
        return context.cast(builder, value, kind, total)

    return total(sums, address, types.int64), generate


@function
def put(typing: Any, sums: Any, address: Any, offset: Any, value: Any) -> Any:
    kind, write = numba_type(_bits(sums)), emit.WRITES.get(sums.stored)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = write(builder, args[3]) if write else context.cast(builder, args[3], value, kind)
        _store(context, builder, args[1], args[2], made, kind)
        return context.get_dummy_value()

    return types.void(sums, address, types.int64, value), generate


@function
def moved(typing: Any, address: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit.at(builder, args[0], args[1], args[0].type.pointee)

    return address(address, types.int64), generate


@function
def combined(typing: Any, sums: Any, old: Any, new: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit.combine(builder, sums.form, args[1], args[2])

    return old(sums, old, old), generate


def _tile_of(form: Form) -> type[emit.Tile]:
    return emit_amx.AmxTile if form.is_amx else emit.Tile


def _tile(extents: Callable[[Form], tuple[int, int]]) -> Any:
    """tile(sums, sliver of a, sliver of b, out, bytes between its rows, cells of k, mode of out)."""

    @function
    def tile(typing: Any, sums: Any, a: Any, b: Any, out: Any, stride: Any, depth: Any, mode: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            made = _tile_of(sums.form)(builder, sums.form, args[1], args[2], args[3], args[4], *extents(sums.form))
            made.emit(args[5], args[6])
            return context.get_dummy_value()

        return types.void(sums, a, b, out, types.int64, types.int64, types.int64), generate

    return tile


@function
def tile_across(
    typing: Any, sums: Any, side: Any, a: Any, b: Any, step: Any, out: Any, stride: Any, depth: Any, ahead: Any,
    first: Any, inverse: Any, jump: Any, share: Any,
) -> Any:
    """Add the product of a packed sliver of a and of rows of b, where it lies, to `out`; see `emit_few.Across`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, a, b, step, out, stride, depth, *ahead = args
        tile = emit_amx.Woven if sums.form.is_amx else emit_few.Across
        tile(builder, sums.form, a, b, step, out, stride, side.source, *ahead).add(depth)
        return context.get_dummy_value()

    return types.void(sums, side, a, b, types.int64, out, *(types.int64,) * 2, ahead, *(types.int64,) * 4), generate


@function
def tile_along(typing: Any, sums: Any, side: Any, a: Any, b: Any, step: Any, out: Any, stride: Any, depth: Any) -> Any:
    """Add the product of a packed sliver of a and of columns of b, where it lies, to `out`; see `emit_few.Along`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, a, b, step, out, stride, depth = args
        tile = emit_amx.AmxAlong if sums.form.is_amx else emit_few.Along
        tile(builder, sums.form, a, b, step, out, stride, side.source).add(depth)
        return context.get_dummy_value()

    return types.void(sums, side, a, b, types.int64, out, types.int64, types.int64), generate


@function
def whole_tile(
    typing: Any, sums: Any, a: Any, b: Any, out: Any, targets: Any, stride: Any, depth: Any, mode: Any
) -> Any:
    """As `tile`; if the form has several terms, for several submatrices of c: see `emit.Tile.emit_to`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, a, b, out, targets, stride, depth, mode = args
        made = _tile_of(sums.form)(builder, sums.form, a, b, out, stride, sums.form.rows, sums.form.vectors)
        if sums.form.terms == 1:
            made.emit(depth, mode)
        else:
            made.emit_to(depth, targets, cgutils.is_true(builder, mode))
        return context.get_dummy_value()

    return types.void(sums, a, b, out, targets, types.int64, types.int64, types.int64), generate


tile = _tile(lambda form: (form.rows, form.vectors))
narrow_tile = _tile(lambda form: (form.rows, 1))
short_tile = _tile(lambda form: (form.short, form.vectors))
"""The innermost kernel, and the same for one vector of each row, and for half of the rows."""


def _around(emitted: Callable[[Any, Form], None]) -> Any:
    """around(sums): what comes before, or after, all tiles of AMX."""

    @function
    def around(typing: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if sums.form.is_amx:
                emitted(builder, sums.form)
            return context.get_dummy_value()

        return types.void(sums), generate

    return around


configure, release = _around(emit_amx.configure), _around(emit_amx.release)


@function
def fence(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit.fence(builder)
        return context.get_dummy_value()

    return types.void(), generate


@function
def times(typing: Any, sums: Any, x: Any, y: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit.times(builder, args[1], args[2])

    return x(sums, x, x), generate

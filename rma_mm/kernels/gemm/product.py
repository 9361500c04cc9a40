"""Binding products to generated code: the form, the memory, the compiled loops, and the threads that share them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import accumulator, is_half
from rma_mm.elements.semiring import Semiring
from rma_mm.kernels.blocked import Blocking, Scratch, bind_blocked
from rma_mm.kernels.compiling import Source, compiled
from rma_mm.kernels.gemm.blocks import MOST_KEPT, PANELS, Blocks, blocks_of, few_blocks, may_be_whole
from rma_mm.kernels.gemm.cpu import host
from rma_mm.kernels.gemm.form import (
    ACROSS,
    ADDS,
    ALONG,
    FEW,
    OVERWRITES,
    SAFE,
    SCALARS,
    SCALES,
    SMALLEST,
    STREAMS,
    Form,
    few_rows,
    form_of,
    takes_bytes,
)
from rma_mm.kernels.product import LocalOperands, Product
from rma_mm.kernels.threads import get_threads, run_concurrently

_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
_OPERAND = (_ADDRESS, _SIZE, _SIZE, _SIZE)
ARGUMENTS = (
    *(_ADDRESS,) * 3, *_OPERAND, *_OPERAND, _ADDRESS, _SIZE, _SIZE, *(_SIZE,) * 4,
    *(_SIZE,) * 5, _ADDRESS, *(_SIZE,) * 3, *(_ADDRESS,) * PANELS,
)
"""Types of what compiled loops are called with; the last tell where scratch is."""
WORTH = 1 << 20  # multiply-adds from which a thread of its own pays
_MARGIN = 1 << 10  # bytes; alignment
_UNIT = 96  # rows or columns: whole tiles of most forms

Array = NDArray[Any]
Call = Callable[[], None]


@cache
def code(form: Form, a: str, b: str, c: str) -> Callable[..., None]:
    """Return the loops for a form, for operands and a result that are stored as these types."""

    def source() -> Source:
        from rma_mm.kernels.gemm import sources

        return sources.loops(form, a, b, c)

    return compiled("multiply", (form, a, b, c), ARGUMENTS, source)


@cache
def compiled_scan(form: Form | None, stored: str) -> Callable[..., None]:
    """`least_exponents` of bfloat16, or `specials` of elements that a form packs, compiled."""

    def source() -> Source:
        from rma_mm.kernels.gemm import sources

        return sources.scan(form, stored)

    arguments = _ADDRESS, *(_SIZE,) * 6, _ADDRESS
    return compiled("scan", (form, stored), arguments if form is None else (_ADDRESS, *arguments), source)


def storage(dtype: np.dtype[Any], ordered: bool) -> str:
    """Return the memory type of elements: raw bits for types that Numba lacks, parts for complex numbers.

    Where order does not matter, integers are taken as signed: they wrap around alike.
    """
    if dtype.kind == "c":
        return f"float{4 * dtype.itemsize}"
    if is_half(dtype):
        return "uint16"
    if dtype.kind == "b":
        return "uint8"
    return dtype.name if ordered else dtype.name.lstrip("u")


def bind_numba(problem: LocalOperands) -> Product:
    """Return the product by generated code, for every supported type; compiles here, not in the first call."""
    a, b, c = (x.dtype for x in (problem.a, problem.b, problem.c))
    blocking = plan_numba(problem.semiring, *problem.sizes, a, b, c)
    if blocking is not None:
        _compile_all(problem.semiring, blocking.types(a, b, c), min(problem.sizes[:2]))
        return bind_blocked("numba", problem, blocking, partial(_step, problem.semiring))
    calls = [bound(part) for part in parts_of(problem, get_threads())]
    return Product.by("numba", problem, calls[0] if len(calls) == 1 else partial(run_concurrently, calls))


def plan_numba(
    semiring: Semiring, m: int, n: int, k: int, a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any]
) -> Blocking | None:
    """Return how a product is cut whose types generated code cannot take as they are; None if it can.

    It takes operands of the type in which c is summed, two of one 16-bit float, and bytes where it adds their products
    by one instruction. For all others there would be a thousand forms to compile.
    """
    working = accumulator(c)
    as_they_are = a == b and is_half(a) and working == np.float32
    as_they_are = as_they_are or takes_bytes(a, b, c, host())
    packs = (not as_they_are and a != working, not as_they_are and b != working)
    if not any(packs) and (c == working or _rounds(semiring, m, n, k, a, b)):
        return None
    return Blocking(working, *packs, accumulate=c != working, spare=c != working)


@lru_cache(maxsize=1024)
def _rounds(semiring: Semiring, m: int, n: int, k: int, a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """True if sums in float32 are complete when they are stored, and can be rounded there to the 16 bits of c."""
    forms = (form_of(semiring, a, b, np.dtype(np.float32), host(), safe) for safe in (True, False))
    return min(m, n) > FEW and all(may_be_whole(form, k, host()) for form in forms)


@lru_cache(maxsize=1024)
def _scratch_of(
    semiring: Semiring, m: int, n: int, k: int, a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], count: int,
    levels: int, threads: int,
) -> int:
    blocking, outer, rounds = plan_numba(semiring, m, n, k, a, b, c), 0, False
    if blocking is None:
        rounds, c = is_half(c), accumulator(c)
    else:
        outer = blocking.scratch_bytes(m, n, k, count)
        m, n, k = blocking.block(m, n, k)
        a, b, c = blocking.types(a, b, c)
    most = 0
    for some in _slices(m, n, k, threads if count < threads else 1):  # as `parts_of` cuts it
        rows, columns = (some.stop - some.start, n) if m >= n else (m, some.stop - some.start)
        for x, y, height, width in ((a, b, rows, columns), (b, a, columns, rows)):  # a c stored by columns swaps them
            packing = [form_of(semiring, x, y, c, host(), safe) for safe in (True, False)]
            reading = [
                few_rows(height, x, y, c, host(), way, safe)
                for way in (ACROSS, ALONG) for safe in (True, False) if height <= FEW
            ]
            sizes = [
                blocks_of(form, height >> cut, width >> cut, k >> cut, host(), rounds)
                for form in packing for cut in range(levels + 1)
            ]
            sizes += [few_blocks(form, height, width, k, host()) for form in reading if form is not None]
            most = max(most, _MARGIN + max(blocks.total_bytes for blocks in sizes))
    return outer + most * threads


def scratch_of(
    semiring: Semiring, m: int, n: int, k: int, a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], count: int = 1,
    levels: int = 0,
) -> int:
    """Bytes of scratch that a product takes, at the most. levels: how often `fast` may cut it."""
    return _scratch_of(semiring, m, n, k, a, b, c, count, levels, get_threads())


# -- one product, one thread ------------------------------------------------------------------------


_scratch = Scratch()


def _code_of(
    semiring: Semiring, a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], safe: bool
) -> tuple[Form, Callable[..., None]]:
    form = form_of(semiring, a, b, accumulator(c), host(), safe)
    ordered = not form.is_arithmetic
    widens = form.dot != "" and a.itemsize == 1  # the products of bytes are wider, so that their signs matter
    stored = c.name if is_half(c) else storage(c, ordered)
    return form, code(form, storage(a, ordered or widens), storage(b, ordered or widens), stored)


def _compile_all(semiring: Semiring, dtypes: tuple[np.dtype[Any], ...], rows: int) -> None:
    """Compile the code for blocks of these types, for either order of c. rows: of the product, or columns if fewer."""
    a, b, c = dtypes
    for way in (ACROSS, ALONG) if rows <= FEW and semiring.is_arithmetic else ():
        for safe in (True, False):
            _code_of_few(rows, a, b, c, way, safe)
    for x, y in ((a, b), (b, a)):
        forms = {_code_of(semiring, x, y, c, safe)[0] for safe in (True, False)}
        if len(forms) > 1:
            _look(np.zeros((1, 1), x), forms.pop())


def bound(problem: LocalOperands) -> Call:
    """Return the call that computes a product whose result is of the type in which it is summed."""
    p = problem
    if (few := _few_rows(p)) is not None:
        return few
    p = by_rows(p)
    a, b, c = p.a, p.b, p.c
    facts = (p.semiring, a, b, c, p.alpha, p.beta, p.conj_a, p.conj_b)
    careful, _ = _code_of(p.semiring, a.dtype, b.dtype, c.dtype, safe=False)
    if _code_of(p.semiring, a.dtype, b.dtype, c.dtype, safe=True)[0] == careful:
        return _call(*facts, safe=False)
    _look(a[..., :0, :], careful)  # compile it now
    return partial(_choose, a, b, careful, _call(*facts, safe=True), _call(*facts, safe=False))


def by_rows(p: LocalOperands) -> LocalOperands:
    """Return the transposed product if c is stored by columns: its result is stored by rows."""
    if not p.c.strides[-2] == p.c.itemsize != p.c.strides[-1]:
        return p
    a, b, c = (x.swapaxes(-1, -2) for x in (p.b, p.a, p.c))
    return replace(p, a=a, b=b, c=c, conj_a=p.conj_b, conj_b=p.conj_a)


def _few_rows(p: LocalOperands) -> Call | None:
    """Return the call for a product of few rows, or few columns, that reads the longer operand where it lies."""
    a, b, c = (p.a, p.b, p.c) if p.sizes[0] <= p.sizes[1] else (x.swapaxes(-1, -2) for x in (p.b, p.a, p.c))
    if c.shape[-2] > FEW or not p.semiring.is_arithmetic:
        return None
    way = {b.strides[-2]: ALONG, b.strides[-1]: ACROSS}.get(b.itemsize)
    (m, n), k = c.shape[-2:], a.shape[-1]
    codes = [_code_of_few(m, a.dtype, b.dtype, c.dtype, way, safe) for safe in (True, False)] if way else []
    found = [code for code in codes if code is not None]
    if not found:
        return None

    def call(form: Form, loops: Callable[..., None]) -> Call:
        return bound_loops(form, loops, few_blocks(form, m, n, k, host()), a, b, c, p.alpha, p.beta)

    fast, careful = found
    if p.beta or fast == careful:
        return call(*careful)
    return partial(_checked, a, c, fast[0], call(*fast), call(*careful))


def _checked(a: Array, c: Array, form: Form, fast: Call, careful: Call) -> None:
    """Multiply fast unless an operand has small elements: of b, they have then made sums NaN."""
    if _look(a, form) >= SMALLEST:
        fast()
        if not np.isnan(c).any():
            return
    careful()


def _code_of_few(
    m: int, a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], way: str, safe: bool
) -> tuple[Form, Callable[..., None]] | None:
    form = few_rows(m, a, b, c, host(), way, safe)
    return None if form is None else (form, code(form, *(storage(x, False) for x in (a, b, c))))


def _call(
    semiring: Semiring, a: Array, b: Array, c: Array, alpha: Any, beta: Any, conj_a: bool, conj_b: bool, safe: bool
) -> Call:
    form, loops = _code_of(semiring, a.dtype, b.dtype, c.dtype, safe)
    (m, n), k = c.shape[-2:], a.shape[-1]
    blocks = blocks_of(form, m, n, k, host(), whole=is_half(c.dtype))
    return bound_loops(form, loops, blocks, a, b, c, alpha, beta, conj_a, conj_b)


def bound_loops(
    form: Form, loops: Callable[..., None], blocks: Blocks, a: Array, b: Array, c: Array, alpha: Any, beta: Any,
    conj_a: bool = False, conj_b: bool = False, table: Array | None = None,
) -> Call:
    """Return the call of the loops of a form for a product. table: of a fast one."""
    m, n, k = (extent // form.terms for extent in (*c.shape[-2:], a.shape[-1]))
    mode = SCALES if beta not in (0, 1) else ADDS if beta else STREAMS if _streams(form, blocks, c, k) else OVERWRITES
    scalars = np.array([alpha, beta], accumulator(c.dtype))
    if c.dtype.kind in "biu":
        scalars = scalars.astype(form.total)
    if table is not None:
        both = np.concatenate([scalars, -scalars[:1], scalars[1:]])
        scalars = np.frombuffer(both.tobytes().ljust(SCALARS, b"\0") + table.tobytes(), np.uint8)
    values = (
        None, None, None,
        _address(a), *a.strides[-2:], conj_a, _address(b), *b.strides[-2:], conj_b, _address(c), *c.strides[-2:],
        *_steps(a, b, c), m, n, k, mode, int(alpha == 1), _address(scalars), blocks.m, blocks.n, blocks.k,
    )
    given = [kind(value) for kind, value in zip(ARGUMENTS[:-PANELS], values, strict=True)]
    return partial(_run, loops, given, blocks, (a, b, c, scalars))


def _streams(form: Form, blocks: Blocks, c: Array, k: int) -> bool:
    """True if a c that does not stay in the caches is stored past them: whole vectors, once."""
    whole = form.lanes * np.dtype(form.total).itemsize
    least = min(host().caches[2] // 4, MOST_KEPT)
    return (
        k <= blocks.k and form.terms == form.planes == 1 and not form.in_place and c.strides[-1] == c.itemsize
        and c.nbytes >= least and not any(x % whole for x in (_address(c), *c.strides[:-1]))
    )


def _steps(a: Array, b: Array, c: Array) -> tuple[int, ...]:
    return (len(c), a.strides[0], b.strides[0], c.strides[0]) if c.ndim == 3 else (1, 0, 0, 0)


def _address(x: Array) -> int:
    return int(x.ctypes.data)


def _run(loops: Callable[..., None], given: list[Any], blocks: Blocks, _: object) -> None:
    """Call the loops with this thread's scratch. The last argument is what must not be freed before."""
    base = scratch_address(blocks.total_bytes)
    loops(*given, *(base + offset for offset in blocks.offsets))


def scratch_address(nbytes: int) -> int:
    """Return where so much of this thread's scratch lies, until it takes more of it."""
    return _address(_scratch.take(nbytes))


def as_words(product: Product) -> tuple[Callable[..., None], list[int], int] | None:
    """Return a product as one call of compiled loops: these, their arguments, and the bytes of scratch; else None.

    The last `PANELS` arguments are relative to the scratch.
    """
    if product.func is not _run:
        return None
    loops, given, blocks, _ = product.args
    return loops, [each.value or 0 for each in given] + blocks.offsets, blocks.total_bytes


def _choose(a: Array, b: Array, form: Form, fast: Call, careful: Call) -> None:
    """Use the fast instructions if the operands hold no values for which those are wrong."""
    found = _look(a, form), _look(b, form)
    if form.is_arithmetic:
        is_safe = min(found) > 0 and sum(found) >= SAFE  # subnormal operands count as 0 too
    else:
        is_safe = not (found[0] | found[1]) & 1 and not _makes_nan(form.times, *found)
    (fast if is_safe else careful)()


def _makes_nan(times: str, one: int, other: int) -> bool:
    """True if ⊗ may make NaN of infinities: `specials` of two operands without NaN."""
    if times == "multiply":
        return bool((one | other) & 6)  # ∞ · 0
    return times == "add" and bool((one & 2 and other & 4) or (one & 4 and other & 2))  # ∞ − ∞


def _look(x: Array, form: Form) -> int:
    """Return what decides if fast instructions are exact: the least exponent in `x`, or its special values."""
    x = x if abs(x.strides[-1]) <= abs(x.strides[-2]) else x.swapaxes(-1, -2)  # in the order of memory
    batch = x[:1] if x.ndim == 3 and not x.strides[0] else x if x.ndim == 3 else x[None]
    out, place = ctypes.c_int32(), (_address(batch), *batch.strides, *batch.shape)
    if form.is_arithmetic:
        compiled_scan(None, "")(*place, ctypes.addressof(out))
    else:
        compiled_scan(form, storage(x.dtype, True))(None, *place, ctypes.addressof(out))
    return out.value


def _step(
    semiring: Semiring, blocks: tuple[Array, Array, Array], scalars: tuple[Any, Any], conj: tuple[bool, bool],
    spare: Array,
) -> None:
    """Set c = a @ b + beta · c for a block of c, or of each of a batch, in the type in which it is summed."""
    a, b, c = blocks
    alpha, beta = (c.dtype.type(x) for x in scalars)
    calls = [bound(part) for part in parts_of(LocalOperands(a, b, c, alpha, beta, *conj, semiring), get_threads())]
    run_concurrently(calls) if len(calls) > 1 else calls[0]()


# -- several threads --------------------------------------------------------------------------------


def _slices(m: int, n: int, k: int, threads: int) -> list[slice]:
    """Equal parts of the longer of m and n."""
    extent = max(m, n)
    parts = max(1, min(threads, m * n * k // WORTH))
    share = -(-extent // parts)
    size = extent if parts == 1 else -(-share // _UNIT) * _UNIT
    return [slice(start, min(start + size, extent)) for start in range(0, extent, size)]


def parts_of(problem: LocalOperands, threads: int) -> list[LocalOperands]:
    """Equal parts, one for each thread, if they are worth it: of a batch, or of a product along c's longer side."""
    (m, n, k), count = problem.sizes, problem.count
    if threads > 1 and count >= threads:
        parts = max(1, min(threads, count * m * n * k // WORTH))
        return [problem.some(slice(count * i // parts, count * (i + 1) // parts)) for i in range(parts)]
    made = []
    for some in _slices(m, n, k, threads):
        if m >= n:
            made.append(replace(problem, a=problem.a[..., some, :], c=problem.c[..., some, :]))
        else:
            made.append(replace(problem, b=problem.b[..., some], c=problem.c[..., some]))
    return made

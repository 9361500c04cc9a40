"""The generated kernels: every form, blocks and threads, other processors' vectors, and compiling once a machine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding
from numpy.typing import NDArray

from rma_mm import kernels
from rma_mm.elements.dtypes import BFLOAT16, accumulator, as_dtype
from rma_mm.elements.semiring import SEMIRINGS
from rma_mm.kernels import cache
from rma_mm.kernels.blocked import Scratch
from rma_mm.kernels.gemm import cpu as processor
from rma_mm.kernels.gemm import product
from rma_mm.kernels.gemm.cpu import AMX_BFLOATS, AMX_BYTES, BFLOATS, PAIRS, PAIRS_ADDED, Cpu, host
from rma_mm.kernels.gemm.cpu import BYTES as BYTE_DOTS
from rma_mm.kernels.gemm.form import FEW
from rma_mm.kernels.product import checked
from rma_mm.kernels.threads import get_threads, set_threads
from rma_mm.runtime.verification.floats import BLOCK_TERMS
from tests.thorough import nightly, usually

TINY = (1 << 9, 1 << 11, 1 << 12)
"""Caches so small that all blocks are."""
BYTES = [(a, b, "int32") for a in ("int8", "uint8") for b in ("int8", "uint8")] + [("int8", "int8", "int8")]
ORDERED = [
    ("min_plus", "float32"), ("min_plus", "int8"), ("min_plus", "float16"),
    ("max_plus", "uint32"), ("max_min", "float64"), ("or_and", "bool"),
]
"""Each is compiled, which takes seconds: some of all."""


def whole(rng: np.random.Generator, shape: tuple[int, int], name: str) -> NDArray[Any]:
    """Any values of an integer type."""
    limits = np.iinfo(name)
    return rng.integers(limits.min, limits.max, shape, name, endpoint=True)


def on(monkeypatch: pytest.MonkeyPatch, cpu: Cpu) -> None:
    """Generate code for another processor than this one."""
    monkeypatch.setattr(product, "host", lambda: cpu)


def times(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], **options: Any) -> NDArray[Any]:
    """The product by generated code, which must be what did it."""
    bound = kernels.bind(a, b, c, kernel="numba", **options)
    assert bound.kernel == "numba"
    bound()
    return c


# -- forms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a_type", "b_type", "c_type"), usually(1, BYTES, rest=nightly))
@pytest.mark.parametrize("shape", [(1, 1, 1), (13, 33, 5), (25, 70, 130)])
def test_bytes_are_exact(a_type: str, b_type: str, c_type: str, shape: tuple[int, int, int]) -> None:
    """Both signs and the extremes: an operand is moved by 128, and the sums are put right."""
    m, n, k = shape
    rng = np.random.default_rng(m)
    a, b = whole(rng, (m, k), a_type), whole(rng, (k, n), b_type)
    a.flat[0], b.flat[0] = np.iinfo(a_type).min, np.iinfo(b_type).max
    expected = (a.astype(np.int64) @ b.astype(np.int64)).astype(c_type)
    for x, y in ((a, b), (np.asfortranarray(a), np.asfortranarray(b))):
        np.testing.assert_array_equal(times(x, y, np.empty((m, n), c_type)), expected)
    np.testing.assert_array_equal(times(a, b, np.empty((n, m), c_type).T), expected)


def test_every_float16_is_read() -> None:
    """All 65536 bit patterns: subnormals, infinities and NaN too."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 1)
    c = times(every, np.ones((1, 1), np.float16), np.empty(every.shape, np.float32))
    np.testing.assert_array_equal(c, every.astype(np.float32))


@pytest.mark.skipif(BFLOAT16 is None, reason="ml_dtypes is not installed")
@nightly
@pytest.mark.parametrize("scales", [(1e-39, 1e-39), (1e-39, 1e38), (1e-25, 1e-14), (1e-19, 1e-19), (1e18, 1e18)])
@pytest.mark.parametrize("dot", ["", BFLOATS, AMX_BFLOATS])
def test_bfloat16_keeps_subnormals(scales: tuple[float, float], dot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instructions for its products flush them to zero; then they must not be used."""
    has = host().dots | ({BFLOATS} if binding.get_host_cpu_features().get("avx512bf16") else set())
    if dot and dot not in has:
        pytest.skip(f"this processor has no {dot}")
    on(monkeypatch, replace(host(), dots=frozenset({dot})))
    rng = np.random.default_rng(0)
    shapes = (14, 51), (51, 40)
    a, b = ((rng.standard_normal(s) * x).astype(BFLOAT16) for s, x in zip(shapes, scales, strict=True))
    c = times(a, b, np.empty((14, 40), np.float32))
    wide = a.astype(np.float64) @ b.astype(np.float64)
    size = abs(a.astype(np.float64)) @ abs(b.astype(np.float64))
    assert (abs(c - wide) <= 60 * 2.0**-24 * size + 2.0**-149).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_sums_are_rounded_once_to_16_bits(name: str) -> None:
    """As NumPy rounds them: subnormals, halfway cases, and what becomes infinite; old values of c enter before."""
    ends = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([ends | low for low in (0, 1, 0x0FFF, 0x1000, 0x7FFF, 0x8000, 0xC000, 0xFFFF)])
    bits = np.concatenate([bits, np.arange(0x33000000, 0x39000000, 997, dtype=np.uint32)])
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    x, dtype = values[: len(values) // 64 * 64].reshape(-1, 64), as_dtype(name)
    c = times(x, np.eye(64, dtype=np.float32), np.empty(x.shape, dtype))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(c, x.astype(dtype))
    a = np.ones((64, 64), np.float32)
    a[0, 0], a[1, 0] = np.inf, np.nan
    c = times(a, a, np.ones((64, 64), dtype), alpha=0.5, beta=3)
    assert np.isinf(c[0, 1]) and np.isnan(c[1, 1]) and c[2, 1] == 35


@st.composite
def semiring_cases(draw: st.DrawFn) -> tuple[str, NDArray[Any], NDArray[Any], NDArray[Any], int]:
    name, dtype = draw(st.sampled_from(ORDERED))
    m, n, k = (draw(st.integers(1, 70)) for _ in range(3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    a, b, c = (matrix(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    if draw(st.booleans()):
        a, c = np.asfortranarray(a), c[::-1]
    return name, a, b, c, draw(st.sampled_from([0, 1]))


def matrix(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    if dtype == "bool":
        return rng.random(shape) < 0.05
    if "int" in dtype:
        return whole(rng, shape, dtype)
    values = rng.standard_normal(shape).astype(dtype)
    values.flat[rng.integers(0, values.size, 2)] = [rng.choice([np.nan, np.inf]), -np.inf]
    return values


@nightly
@settings(max_examples=10, deadline=None)  # nearly each is compiled first
@given(case=semiring_cases())
def test_semirings_equal_numpy(case: tuple[str, NDArray[Any], NDArray[Any], NDArray[Any], int]) -> None:
    name, a, b, c, beta = case
    semiring = SEMIRINGS[name]
    with np.errstate(all="ignore"):
        expected = semiring.add.reduce(semiring.multiply(a[:, :, None], b[None]), axis=1)
        if beta:
            expected = semiring.add(expected, c)
    times(a, b, c, beta=beta, semiring=semiring)
    np.testing.assert_array_equal(c, expected)


# -- blocks, threads, processors ---------------------------------------------------------------------


@pytest.mark.parametrize("name", usually(1, ["int32", "int8", "float64", "complex64"], rest=nightly))
def test_blocks_of_all_extents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several panels along m, n and k, the last ones narrower."""
    on(monkeypatch, replace(host(), caches=TINY))
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(-3, 4, shape).astype(name) for shape in ((61, 333), (333, 175), (61, 175)))
    expected = 2 * (a @ b) + 3 * c
    np.testing.assert_array_equal(times(a, b, c, alpha=2, beta=3), expected)


@pytest.mark.parametrize("name", ["float32", "complex64"])
def test_edges_of_all_heights(name: str) -> None:
    """What remains below whole tiles has any number of rows, of which few have a tile of their own."""
    rng = np.random.default_rng(3)
    scale = 1 + 2j if name == "complex64" else 1
    a, b = ((scale * rng.integers(-5, 6, shape)).astype(name) for shape in ((FEW + 15, 29), (29, 70)))
    for m in range(FEW + 1, len(a) + 1):
        np.testing.assert_array_equal(times(a[:m], b, np.empty((m, 70), name)), a[:m] @ b, str(m))


@pytest.mark.parametrize(
    ("width", "name"), usually(1, [(32, "float32"), (32, "complex128"), (16, "float64"), (16, "int8")], rest=nightly)
)
def test_narrower_vectors(width: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is generated for processors with fewer and shorter registers is right too."""
    on(monkeypatch, Cpu(f"{width} bytes", width, 16, frozenset(), TINY))
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-5, 6, shape).astype(name) for shape in ((45, 70), (70, 53)))
    np.testing.assert_array_equal(times(a, b, np.empty((45, 53), name)), a @ b)


SETS = {
    "avx2": (32, 16, {PAIRS}), "sse2": (16, 16, {PAIRS}), "avx512": (64, 32, {PAIRS}),
    "avxvnni": (32, 16, {BYTE_DOTS, PAIRS, PAIRS_ADDED}), "avx512vnni": (64, 32, {BYTE_DOTS, PAIRS, PAIRS_ADDED}),
    "amx": (64, 32, {BYTE_DOTS, PAIRS, PAIRS_ADDED, AMX_BYTES, AMX_BFLOATS}),
}
"""Bytes of a vector, registers and instructions of processors, for sums of products of small whole numbers."""
SMALL = [
    ("int8", "int8", "int32"), ("uint16", "uint16", "uint16"), ("uint8", "int8", "int32"), ("int8", "int8", "int8"),
    ("int16", "int16", "int16"), ("uint8", "uint8", "uint32"),
]


@pytest.mark.parametrize(("a_type", "b_type", "c_type"), usually(2, SMALL))
@pytest.mark.parametrize("name", usually(1, list(SETS)))
def test_sets_of_instructions(
    name: str, a_type: str, b_type: str, c_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small whole numbers are multiplied exactly, of all values, by what processors of less have, and by this one."""
    width, registers, dots = SETS[name]
    if width > host().vector_bytes or not dots <= host().dots:
        pytest.skip(f"this processor has not got {name}")
    on(monkeypatch, Cpu(name, width, registers, frozenset(dots), TINY))
    rng = np.random.default_rng(3)
    a, b = whole(rng, (29, 301), a_type), whole(rng, (301, 83), b_type)
    a[0], b[:, 0] = np.iinfo(a_type).min, np.iinfo(b_type).min
    assert product.form_of(SEMIRINGS["plus_times"], a.dtype, b.dtype, np.dtype(c_type), product.host()).dot in dots
    expected = (a.astype(np.int64) @ b.astype(np.int64)).astype(c_type)
    np.testing.assert_array_equal(times(a, b, np.empty((29, 83), c_type)), expected)
    np.testing.assert_array_equal(times(a, b, np.empty((83, 29), c_type).T), expected)


@pytest.mark.parametrize(
    ("width", "registers", "name"),
    usually(3, [(64, 32, "float64"), (32, 16, "float64"), (64, 32, "float32"), (32, 16, "int32"), (64, 32, "int8")]),
)
def test_operands_stored_by_rows_and_by_columns(
    width: int, registers: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines along k are packed square by square, and are right up to each one's last step."""
    if width > host().vector_bytes:
        pytest.skip(f"this processor has no vectors of {width} bytes")
    on(monkeypatch, Cpu(f"{width} bytes", width, registers, frozenset(), TINY))
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-5, 6, shape).astype(name) for shape in ((45, 149), (149, 101)))
    for x, y in itertools.product((a, np.asfortranarray(a), a[::-1]), (b, np.asfortranarray(b), b[:, ::-1])):
        np.testing.assert_array_equal(times(x, y, np.empty((45, 101), name)), x @ y)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_amx_takes_operands_stored_any_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All edges of tiles and of what one instruction takes of k, several panels, and any c."""
    dtype = as_dtype(name)
    if {"bfloat16": AMX_BFLOATS, "int8": AMX_BYTES}[name] not in host().dots:
        pytest.skip("this processor has no AMX, or the system does not grant it")
    rng, summed = np.random.default_rng(9), np.dtype("float32" if name == "bfloat16" else "int32")
    shapes = (33, 35, 1), (64, 32, 64), (50, 81, 31), (49, 48, 33), (100, 130, 545), (47, 70, 1100)
    for caches, (m, n, k) in itertools.product(((1 << 12, 1 << 16, 1 << 17), host().caches), shapes):
        on(monkeypatch, replace(host(), caches=caches))
        x, y = (rng.integers(-5, 6, shape).astype(dtype) for shape in ((m, k), (k, n)))
        for a, b in itertools.product((x, np.asfortranarray(x), x[::-1]), (y, np.asfortranarray(y), y[:, ::-1])):
            expected = a.astype(np.float64) @ b.astype(np.float64)
            np.testing.assert_array_equal(times(a, b, np.full((m, n), 7, summed)), expected)
            np.testing.assert_array_equal(times(a, b, np.full((n, m), 3, summed).T, alpha=2, beta=-1), 2 * expected - 3)


VECTORS = {
    "avx512": (64, 32), "znver4": (64, 32), "amx": (64, 32), "avx2": (32, 16), "sse2": (16, 16), "neon": (16, 32),
}
"""Bytes of a vector, and registers."""


@pytest.mark.parametrize("name", usually(2, ["bfloat16", "float32", "float64", "float16"]))
@pytest.mark.parametrize("cpu", usually(1, list(VECTORS), rest=nightly))
def test_few_rows_read_the_longer_operand_where_it_lies(name: str, cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever operand it is and whichever way it is stored: all edges of tiles, blocks and vectors, and any c."""
    dtype, dots = np.dtype(name) if name != "bfloat16" else BFLOAT16, {AMX_BFLOATS} if cpu == "amx" else set()
    if dtype is None or VECTORS[cpu][0] > host().vector_bytes or not dots <= host().dots:
        pytest.skip(f"there is no {name}, or this processor has no {cpu}")
    monkeypatch.setattr(product, "blocks_of", None)  # nothing is packed
    monkeypatch.setattr(product, "_checked", lambda a, c, form, fast, careful: fast())
    rng, summed = np.random.default_rng(5), accumulator(dtype)
    shapes = (1, 1, 1), (2, 150, 45), (6, 150, 45), (3, 261, 70), (8, 64, 128), (13, 33, 301), (32, 7, 37)
    for caches, (m, n, k) in itertools.product((TINY, host().caches), shapes):
        on(monkeypatch, Cpu(cpu, *VECTORS[cpu], frozenset(dots), caches))
        x, y = (rng.integers(-5, 6, shape).astype(dtype) for shape in ((m, k), (k, n)))
        for a, b in itertools.product((x, np.asfortranarray(x), x[::-1]), (y, np.asfortranarray(y))):
            expected = a.astype(np.float64) @ b.astype(np.float64)
            np.testing.assert_array_equal(times(a, b, np.full((m, n), np.nan, summed)), expected)
            np.testing.assert_array_equal(times(b.T, a.T, np.full((n, m), np.nan, summed)), expected.T)
            c = times(a, b, np.full((n, 2 * m), 3, summed).T[::2], alpha=2, beta=-1)
            np.testing.assert_array_equal(c, 2 * expected - 3)


@pytest.mark.skipif(AMX_BFLOATS not in host().dots, reason="this processor has no AMX")
@pytest.mark.parametrize("order", ["C", "F"])
def test_few_rows_with_small_elements_are_not_left_to_amx(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take them, and products with them, for 0: wherever they are."""
    a, c = np.ones((20, 100), BFLOAT16), np.empty((20, 41), np.float32)
    seen, real = list[str](), product._checked

    def spied(a: Any, c: Any, form: Any, fast: Any, careful: Any) -> None:
        real(a, c, form, lambda: (seen.append("fast"), fast()), lambda: (seen.append("careful"), careful()))

    monkeypatch.setattr(product, "_checked", spied)
    for row, column in itertools.product((0, 1, 31, 32, 63, 64, 99), (0, 15, 16, 31, 32, 40)):
        b = np.zeros((100, 41), BFLOAT16, order)
        call = kernels.bind(a, b, c, kernel="numba")
        for small, who in ((0, "fast"), (2.0**-55, "fast"), (2.0**-130, "fast careful"), (1, "fast")):
            b[row, column] = small
            seen.clear()
            call()
            assert " ".join(seen) == who
            np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32))
    a[3, 7], b = 2.0**-130, np.zeros((100, 41), BFLOAT16, order)
    b[7] = 1
    assert times(a, b, c)[3, 0] == 2.0**-130
    assert seen[-1] == "careful" != seen[-2]
    b[:] = np.inf
    assert np.isinf(times(a, b, c)).all()


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "bfloat16"])
def test_a_large_c_is_stored_past_the_caches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where whole vectors are: all of it, and nothing beside it; not where k is cut, or old values enter."""
    if BFLOAT16 is None and name == "bfloat16":
        pytest.skip("there is no bfloat16")
    on(monkeypatch, replace(host(), caches=(1 << 12, 1 << 15, 1 << 15)))
    rng, (m, n), dtype = np.random.default_rng(8), (75, 200), as_dtype(name)
    summed, real, seen = accumulator(dtype), product._streams, []
    monkeypatch.setattr(product, "_streams", lambda *facts: seen.append(real(*facts)) or seen[-1])
    memory = Scratch().take(8 * (m + 2) * (n + 56))
    for k, beta, offset, is_streamed in ((40, 0, 0, True), (40, 1, 0, False), (40, 0, 1, False), (3000, 0, 0, False)):
        a, b = (rng.integers(-5, 6, shape).astype(dtype) for shape in ((m, k), (k, n)))
        around = memory[: summed.itemsize * (m + 2) * (n + 56)].view(summed).reshape(m + 2, n + 56)
        around[...] = 7
        times(a, b, around[1:-1, offset : n + offset], beta=beta)
        wanted = np.full(around.shape, 7, summed)
        wanted[1:-1, offset : n + offset] = a.astype(np.float64) @ b.astype(np.float64) + 7 * beta
        np.testing.assert_array_equal(around, wanted)
        assert any(seen) == is_streamed
        seen.clear()


@pytest.mark.parametrize("turn", [np.ascontiguousarray, np.asfortranarray])
def test_few_rows_round_no_more_than_others(turn: Any) -> None:
    """A sum of thousands of products is added up in parts, as where operands are packed: 3 times as exact."""
    rng = np.random.default_rng(7)
    a, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((8, 20000), (20000, 200)))
    off = times(a, turn(b), np.empty((8, 200), np.float32)) - a.astype(np.float64) @ b.astype(np.float64)
    assert np.sqrt((off**2).mean()) < 4e-5


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", "float16", "bfloat16"])
def test_sums_are_no_longer_than_checks_take_for_granted(dtype: str) -> None:
    """Small numbers are lost behind a 1 within one sum, and not in the sums after it; with panels as deep as k."""
    of = as_dtype(dtype)
    summed = accumulator(of)
    tiny = float(np.finfo(summed).eps) / 4
    for k in (500, 516, 1100, 2300):
        a, b = np.full((40, k), 2.0 ** (np.log2(tiny) // 2), of), np.full((k, 70), 2.0 ** -(-np.log2(tiny) // 2), of)
        a[:, 0] = b[0] = 1
        found = (times(a, b, np.empty((40, 70), summed)).real.astype(np.float64) - 1) / tiny
        assert found.min() >= k - BLOCK_TERMS
        least = 16 if dtype == "bfloat16" and AMX_BFLOATS in host().dots else BLOCK_TERMS // 4
        assert found.max() <= k - least  # as much is lost, else this would show nothing


def test_few_rows_of_a_batch() -> None:
    """Products of one matrix by many, as in decoding."""
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-5, 6, shape).astype(np.float32) for shape in ((5, 3, 40), (5, 40, 70)))
    c = np.empty((5, 3, 70), np.float32)
    for part in (slice(None), slice(1, 2)):
        problem = replace(checked(a[0], b[0], c[0], 1, 0, False, False), a=a[part], b=b[part], c=c[part])
        product.bind_numba(problem)()
        np.testing.assert_array_equal(c[part], a[part] @ b[part])


@pytest.mark.parametrize(("name", "more"), [
    ("sse2", ""), ("avx2", "+avx2,+fma"), ("avxvnni", "+avx2,+fma,+avxvnni"),
    ("avx512", "+avx2,+fma,+avx512f,+avx512bw,+avx512dq,+avx512vl"),
    ("avx512vnni", "+avx2,+fma,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni"),
    ("amx", "+avx2,+fma,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni,+amx-tile,+amx-int8,+amx-bf16"),
])
def test_the_set_is_chosen_by_what_the_processor_has(name: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_FEATURES", f"+sse2,{more}".rstrip(","))
    monkeypatch.setattr(processor, "grants_tiles", lambda: True)
    found = host.__wrapped__()
    assert (found.vector_bytes, found.registers, found.dots) == SETS[name]


def test_amx_is_used_only_if_the_system_grants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+sse2,+avx512f,+avx512bw,+avx512dq,+avx512vl,+amx-tile,+amx-int8")
    monkeypatch.setattr(processor, "grants_tiles", lambda: False)
    assert host.__wrapped__().dots == {PAIRS}


@pytest.mark.parametrize(("name", "has_it"), [("znver4", True), ("sapphirerapids", False)])
def test_products_of_bfloat16_by_one_instruction_where_it_is_fast(
    name: str, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", name)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16")
    assert (BFLOATS in host.__wrapped__().dots) == has_it


@pytest.mark.parametrize("shape", [(700, 40, 300), (40, 700, 300)])
@pytest.mark.parametrize("name", usually(1, ["int32", "float16"]))
def test_threads_share_a_product(shape: tuple[int, int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "WORTH", 1 << 12)
    m, n, k = shape
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-2, 3, s).astype(name) for s in ((m, k), (k, n)))
    before = get_threads()
    set_threads(3)
    try:
        assert len(product.parts_of(checked(a, b, np.empty((m, n), name), 1, 0, False, False), 3)) == 3
        c = times(a, b, np.empty((m, n), name))
    finally:
        set_threads(before)
    np.testing.assert_array_equal(c, a @ b)


def test_a_forked_child_multiplies() -> None:
    """The threads of the parent are not there; others must be made."""
    before = get_threads()
    set_threads(2)
    try:
        a = np.ones((300, 300), np.int32)
        bound = kernels.bind(a, a, np.empty_like(a), kernel="numba")
        bound()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            bound()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        set_threads(before)


@nightly
def test_scratch_is_bounded() -> None:
    """What a product takes is what `scratch_bytes` says, for every type."""
    product._scratch.buffer = np.empty(0, np.uint8)
    for name in ("float32", "complex128", "int8", "int64", "bool"):
        m, n, k = 300, 500, 700
        dtype = np.dtype(name)
        times(np.ones((m, k), dtype), np.ones((k, n), dtype), np.empty((m, n), dtype))
        promised = kernels.scratch_bytes(m, n, k, dtype, dtype, accumulator(dtype), "numba")
        assert product._scratch.buffer.size <= promised
        product._scratch.buffer = np.empty(0, np.uint8)


def test_scratch_of_few_rows_is_bounded() -> None:
    """It is what `scratch_bytes` says, and no copy of the long operand."""
    for m, n, k in ((8, 4096, 3000), (4096, 20, 3000)):
        product._scratch.buffer = np.empty(0, np.uint8)
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        times(a, b, np.empty((m, n), np.float32))
        promised = kernels.scratch_bytes(m, n, k, a.dtype, a.dtype, a.dtype, "numba")
        assert 0 < product._scratch.buffer.size <= min(promised, max(a.nbytes, b.nbytes) // 8)
    product._scratch.buffer = np.empty(0, np.uint8)


# -- compiling -------------------------------------------------------------------------------------

PROGRAM = """
import json, sys, time
import numpy as np
from rma_mm import kernels
from numba.core import event
compiled = []
class Listener(event.Listener):
    def on_start(self, happened): compiled.append(1)
    def on_end(self, happened): pass
event.register("numba:compile", Listener())
a, c = np.ones((9, 9), "int64"), np.zeros((9, 9), "int64")
kernels.bind(a, a, c, kernel="numba")()
print(json.dumps([len(compiled), int(c.sum())]))
"""


def run_program(folder: Path) -> list[int]:
    """Multiply in a new process whose cache is there: (functions compiled, the sum of the result)."""
    env = {**os.environ, "RMA_MM_CACHE": str(folder)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True, timeout=120)
    found: list[int] = json.loads(done.stdout)
    return found


@nightly
def test_compiles_once_a_machine(tmp_path: Path) -> None:
    """Of processes that start together one compiles; a cache that cannot be written only costs time."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(run_program, [tmp_path] * 3))
    assert sorted(bool(compiled) for compiled, _ in found) == [False, False, True]
    assert {total for _, total in found} == {729}
    (kept,) = tmp_path.iterdir()
    for file in kept.glob("*.o"):
        file.write_bytes(b"not what it was")
    compiled, total = run_program(tmp_path)
    assert compiled > 0 and total == 729
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    assert run_program(nowhere)[1] == 729


def test_cache_follows_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RMA_MM_CACHE", str(tmp_path))
    first = cache.cache_folder.__wrapped__()
    monkeypatch.setattr(cache, "_sources", lambda: "others")
    assert first is not None
    assert cache.cache_folder.__wrapped__() == tmp_path / "kernels-others" != first

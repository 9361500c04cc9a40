"""Local products against exact or wider arithmetic: every kernel, type, stride and scalar."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rma_mm import kernels
from rma_mm.elements.dtypes import BFLOAT16, BLAS_TYPES, SUPPORTED, accumulator, parse_dtype, rank
from rma_mm.kernels import blas, blocked, threads
from rma_mm.kernels.product import checked
from tests.thorough import nightly, usually

NAMES = sorted(dtype.name for dtype in SUPPORTED)
STORED = ("rows", "columns", "wide rows", "wide columns", "every other column", "every third row", "backwards", "grid")

# -- matrices ------------------------------------------------------------------------------------------------------


def stored(values: NDArray[Any], how: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """A view equal to `values` in memory laid out as `how`, and the whole memory behind it."""
    m, n = values.shape
    order: Any = "F" if "columns" in how else "C"
    if how in ("rows", "columns"):
        copy = np.array(values, order=order)
        return copy, copy
    big: NDArray[Any] = np.ones((3 * m + 4, 2 * n + 5), values.dtype, order=order)
    views = {
        "wide rows": big[2 : m + 2, 3 : n + 3],
        "wide columns": big[2 : m + 2, 3 : n + 3],
        "every other column": big[1 : m + 1, 1 : 2 * n + 1 : 2],
        "every third row": big[0 : 3 * m : 3, 1 : n + 1],
        "backwards": big[:m, :n][::-1, ::-1],
        "grid": big[1 : 3 * m + 1 : 3, 0 : 2 * n : 2],
    }
    views[how][...] = values
    return views[how], big


def random_matrix(
    rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype[Any], whole_range: bool = False
) -> NDArray[Any]:
    """Small values of both signs; `whole_range` for integers that may wrap around."""
    if dtype.kind == "b":
        return rng.random(shape) < 0.4
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = (int(limits.min), int(limits.max)) if whole_range else (-9 if limits.min else 0, 9)
        return rng.integers(low, high, shape, dtype, endpoint=True)
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if dtype.kind == "c" else values).astype(dtype)


@dataclass
class Case:
    a: NDArray[Any]
    b: NDArray[Any]
    c: NDArray[Any]
    around_c: NDArray[Any]
    alpha: Any
    beta: Any
    conj_a: bool
    conj_b: bool

    def __repr__(self) -> str:
        what = ", ".join(f"{x.dtype}{x.shape}/{x.strides}" for x in (self.a, self.b, self.c))
        return f"Case({what}, alpha={self.alpha!r}, beta={self.beta!r}, conj={self.conj_a, self.conj_b})"


def scalars(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    if dtype.kind == "b":
        return st.sampled_from([0, 1])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return st.sampled_from([0, 1, 2, 3, int(limits.min), int(limits.max)])
    plain = [0, 1, -1, 0.5, -2.25]
    return st.sampled_from([*plain, 1j, 0.5 - 2j] if dtype.kind == "c" else plain)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = st.one_of(st.integers(0, 3), st.integers(0, 33))
    m, n, k = draw(size), draw(size), draw(size)
    c_type = parse_dtype(draw(st.sampled_from(NAMES)))
    lower = [dtype for dtype in SUPPORTED if rank(dtype) <= rank(c_type)]
    same = draw(st.booleans())
    a_type, b_type = (c_type if same else draw(st.sampled_from(lower)) for _ in "ab")
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    how = [draw(st.sampled_from(STORED)) for _ in "abc"]
    whole = rank(c_type) < 2
    a, _ = stored(random_matrix(rng, (m, k), a_type, whole), how[0])
    b, _ = stored(random_matrix(rng, (k, n), b_type, whole), how[1])
    c, around = stored(random_matrix(rng, (m, n), c_type, whole), how[2])
    alpha, beta = draw(scalars(c_type)), draw(scalars(c_type))
    if beta == 0 and rank(c_type) >= 2:
        c[...] = np.nan
    return Case(a, b, c, around, alpha, beta, draw(st.booleans()), draw(st.booleans()))


# -- references ----------------------------------------------------------------------------------------------------


def wrapped(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Python integers reduced to what `dtype` holds."""
    if dtype.kind == "b":
        return (values != 0).astype(bool)
    bits = 8 * dtype.itemsize
    low = -(2 ** (bits - 1)) if dtype.kind == "i" else 0
    return ((values - low) % 2**bits + low).astype(dtype)


def python_ints(x: NDArray[Any]) -> NDArray[Any]:
    return np.array([[int(v) for v in row] for row in x.tolist()], dtype=object).reshape(x.shape)


def exact(case: Case) -> NDArray[Any]:
    total = np.zeros(case.c.shape, object)
    a, b = python_ints(case.a), python_ints(case.b)
    for p in range(a.shape[1]):
        total = total + a[:, p : p + 1] * b[p : p + 1, :]
    total = case.alpha * total + case.beta * python_ints(case.c)
    return wrapped(total, case.c.dtype)


def check_floats(case: Case, before: NDArray[Any]) -> None:
    """|result − wide| ≤ γ·(|alpha||A||B| + |beta||C|), γ for k products and a few roundings of each."""
    wide = np.clongdouble if case.c.dtype.kind == "c" else np.longdouble
    a, b = (np.asarray(x if x.dtype.kind == "c" else x.astype(np.float64), wide) for x in (case.a, case.b))
    a, b = a.conj() if case.conj_a else a, b.conj() if case.conj_b else b
    old = before.astype(np.complex128 if case.c.dtype.kind == "c" else np.float64)
    part = case.beta * old if case.beta != 0 else np.zeros_like(old)
    expected = case.alpha * (a @ b) + part
    working = accumulator(case.c.dtype)
    size = abs(case.alpha) * (abs(a) @ abs(b)) + abs(part)
    unit = np.finfo(working).eps * (2 if case.c.dtype.kind == "c" else 1)
    final, tiny = rounding(case.c.dtype)
    got = case.c.astype(old.dtype)
    limit = (case.a.shape[1] + 8) * unit * size + final * abs(expected) + tiny
    assert (abs(got - expected) <= limit).all(), (got, expected)


def rounding(dtype: np.dtype[Any]) -> tuple[float, float]:
    """The relative rounding error of `dtype`, and the absolute one near zero."""
    if dtype == BFLOAT16:
        return 2.0**-8, 2.0**-126
    return float(np.finfo(dtype).eps), float(np.finfo(dtype).smallest_subnormal)


def check(case: Case, kernel: str) -> None:
    untouched = mask_around(case)
    around, before = case.around_c.copy(), case.c.copy()
    reference = exact(case) if case.c.dtype.kind in "biu" else None
    bound = kernels.bind(case.a, case.b, case.c, case.alpha, case.beta, case.conj_a, case.conj_b, kernel)
    bound()
    if reference is not None:
        np.testing.assert_array_equal(case.c, reference)
    else:
        check_floats(case, before)
    assert np.array_equal(case.around_c[untouched].tobytes(), around[untouched].tobytes())


def mask_around(case: Case) -> NDArray[np.bool_]:
    """Which elements of the memory behind c are not c's: found by writing, then put back."""
    if case.around_c is case.c:
        return np.zeros(case.c.shape, bool)
    values, around = case.c.copy(), case.around_c.copy()
    case.around_c[...], case.c[...] = 0, 1
    mask = np.array(case.around_c == 0)
    case.around_c[...], case.c[...] = around, values
    return mask


# -- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "examples"),
    usually(4, [("auto", 40), ("blas", 40), ("numpy", 40), ("numba", 4), ("numba", 80)], rest=nightly),
)
def test_product_is_right(kernel: str, examples: int) -> None:
    """Fewer where nearly each is compiled first."""

    @settings(max_examples=examples, deadline=None)
    @given(case=cases())
    def is_right(case: Case) -> None:
        check(case, "auto" if kernel == "blas" and accumulator(case.c.dtype) not in BLAS_TYPES else kernel)

    is_right()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_blas_reads_conjugates_in_place(data: st.DataObject) -> None:
    """Unit strides, any order and conjugation: one call, no scratch."""
    dtype = data.draw(st.sampled_from([np.dtype("c8"), np.dtype("c16")]))
    m, n, k = (data.draw(st.integers(1, 9)) for _ in range(3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    unit_stride = st.sampled_from(["rows", "columns", "wide rows", "wide columns", "every third row"])
    how = [data.draw(unit_stride) for _ in "abc"]
    a, b = stored(random_matrix(rng, (m, k), dtype), how[0])[0], stored(random_matrix(rng, (k, n), dtype), how[1])[0]
    c, around = stored(random_matrix(rng, (m, n), dtype), how[2])
    case = Case(a, b, c, around, 1j, 0.5 - 1j, data.draw(st.booleans()), data.draw(st.booleans()))
    bound = kernels.bind(a, b, c, case.alpha, case.beta, case.conj_a, case.conj_b)
    if (lib := blas.library()) is not None and lib.conjugates:
        assert bound.func is not blocked._run
    check(case, "blas")


@pytest.mark.parametrize("kernel", kernels.KERNELS)
@pytest.mark.parametrize("name", usually(2, ["float32", "int32", "complex64", "float16", "bool"]))
def test_many_blocks(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny panels force every loop over blocks to turn more than once."""
    monkeypatch.setattr(blocked, "PANEL_BYTES", 256)
    monkeypatch.setattr(blocked, "_DEPTH", 5)
    dtype, rng = parse_dtype(name), np.random.default_rng(3)
    if kernel == "blas" and accumulator(dtype) not in BLAS_TYPES:
        kernel = "auto"
    a, b = stored(random_matrix(rng, (37, 41), dtype), "backwards")[0], random_matrix(rng, (41, 29), dtype)
    c, around = stored(random_matrix(rng, (37, 29), dtype), "grid")
    check(Case(a, b, c, around, 1, 1, True, False), kernel)


def test_block_stays_within_its_panels() -> None:
    for sizes in [(1, 1, 10**9), (10**6, 3, 7), (3, 10**6, 10**6), (2048, 2048, 2048), (5, 5, 5)]:
        for working in BLAS_TYPES:
            cut = blocked.Blocking(working, True, True, True, True)
            assert min(cut.block(*sizes)) >= 1
            assert max(cut.pieces(*sizes)) <= blocked.PANEL_BYTES
            assert cut.scratch_bytes(*sizes) <= 4 * blocked.PANEL_BYTES + blocked._MARGIN


@pytest.mark.parametrize("kernel", kernels.KERNELS)
@pytest.mark.parametrize("shape", [(1, 7, 5), (7, 1, 5), (1, 1, 5), (6, 7, 5), (40, 50, 60), (3, 4, 0), (1, 70, 90)])
@pytest.mark.parametrize("name", usually(2, ["float16", "complex64", "float32", "float64", "complex128"]))
def test_beta_zero_ignores_nan(kernel: str, shape: tuple[int, int, int], name: str) -> None:
    m, n, k = shape
    a, b, c = np.ones((m, k), name), np.ones((k, n), name), np.full((m, n), np.nan, name)
    kernels.bind(a, b, c, 1, 0, kernel=kernel)()
    assert (c == k).all()


@pytest.mark.parametrize("kernel", kernels.KERNELS)
@pytest.mark.parametrize("shape", [(1, 7, 5), (7, 1, 5), (6, 7, 5), (1, 64, 90), (70, 1, 64)])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_nan_and_inf_pass_as_in_numpy(kernel: str, shape: tuple[int, int, int], name: str) -> None:
    m, n, k = shape
    a, b, c = np.ones((m, k), name), np.zeros((k, n), name), np.zeros((m, n), name)
    b[1:], a[0, 0], b[2, -1], b[3, 0] = 1, np.inf, np.nan, -np.inf
    kernels.bind(a, b, c, kernel=kernel)()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(c, a @ b)


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_alpha_zero_reads_neither_operand(kernel: str) -> None:
    a, c = np.full((3, 3), np.nan, np.float32), np.full((3, 3), 2, np.float32)
    kernels.bind(a, a, c, 0, 3, kernel=kernel)()
    assert (c == 6).all()


def test_half_sums_in_float32_and_rounds_once() -> None:
    a, b = np.ones((1, 5000), np.float16), np.ones((5000, 1), np.float16)
    c = np.zeros((1, 1), np.float16)
    kernels.bind(a, b, c)()
    assert c[0, 0] == np.float16(5000)


def test_bound_product_follows_its_arrays_and_keeps_them() -> None:
    c = np.zeros((2, 2))
    bound = kernels.bind(np.eye(2), np.full((2, 2), 3.0), c, 1, 1)
    bound()
    bound()
    assert (c == 6).all()


def run_python(text: str, **env: str) -> None:
    subprocess.run([sys.executable, "-c", text], env={**os.environ, **env}, check=True, timeout=60)


def test_numba_kernel_with_jit_disabled() -> None:
    run_python(
        """
import numpy as np
from rma_mm import kernels
rng = np.random.default_rng(0)
for name in ("int8", "uint32", "int64", "bool", "float32", "complex64", "float16"):
    a, b = (rng.integers(0, 200, s).astype(name) for s in ((5, 19), (19, 4)))
    c = np.zeros((5, 4), name)
    with np.errstate(all="ignore"):
        kernels.bind(a, b, c, kernel="numba")()
        assert np.allclose(c, a @ b, rtol=1e-2), name
""",
        NUMBA_DISABLE_JIT="1",
    )


def test_numba_that_is_broken(tmp_path: Path) -> None:
    """NumPy multiplies, also where code was compiled before Numba broke."""
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs another NumPy')")
    run_python(
        """
import numpy as np
from rma_mm import kernels
a = np.ones((600, 600), np.int32)
c = np.zeros_like(a)
product = kernels.bind(a, a, c)
product()
assert product.kernel == "numpy" and (c == 600).all()
""",
        PYTHONPATH=str(tmp_path),
    )


@pytest.mark.skipif(len(threads.cores()) < 2, reason="there is one core")
def test_threads_of_a_product_keep_off_the_core_of_the_caller() -> None:
    """Which is some core; the caller's own may have changed since."""
    found: list[frozenset[int]] = []
    for _ in range(3):
        threads.run_concurrently([lambda: found.append(threads.cores()), lambda: time.sleep(0.01)])
    assert all(each < threads.cores() and len(each) == len(threads.cores()) - 1 for each in found[1:])
    assert threads.cores() == frozenset(os.sched_getaffinity(0))


def test_import_is_light() -> None:
    run_python(
        "import sys, rma_mm.kernels, rma_mm.kernels.threads\n"
        "assert not {'numba', 'scipy', 'mpi4py', 'threadpoolctl'} & set(sys.modules)"
    )


def test_products_that_blas_does_load_no_compiler() -> None:
    """As long as they are not large enough to be compared."""
    run_python(
        "import sys\n"
        "import numpy as np\n"
        "from rma_mm.kernels import choose_kernel\n"
        "assert choose_kernel('auto', np.dtype('float32'), 2048, 2048, 1023) in ('blas', 'numpy')\n"
        "assert not {name.split('.')[0] for name in sys.modules} & {'numba', 'llvmlite'}"
    )


@pytest.mark.parametrize(
    ("kernel", "name", "n"), [("blas", "float64", 1800), ("numba", "int64", 900), ("numpy", "int32", 500)]
)
def test_multiply_lets_other_threads_run(kernel: str, name: str, n: int) -> None:
    a, c = np.ones((n, n), name), np.zeros((n, n), name)
    bound = kernels.bind(a, a, c, kernel=kernel)
    ticks, stop, cores = [0], threading.Event(), threads.get_threads()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    helper = threading.Thread(target=tick)
    helper.start()
    threads.set_threads(1)  # else many cores end it before anything can be counted
    try:
        while not ticks[0]:
            time.sleep(0.001)
        before = ticks[0]
        bound()
        during = ticks[0] - before
    finally:
        stop.set()
        helper.join()
        threads.set_threads(cores)
    assert during >= 5, f"{during} ticks of a millisecond during a long multiply"


def test_operation_codes_without_the_extension() -> None:
    """A BLAS that only conjugates when it transposes: what it cannot read is left to panels."""
    lib = blas.library()
    if lib is None:
        pytest.skip("no BLAS with a C interface here")
    standard = dataclasses.replace(lib, conjugates=False)
    x, c = np.ones((3, 3), np.complex64), np.zeros((3, 3), np.complex64)
    assert blas.arguments(standard, x, x, c, 1, 0, True, False) is None
    assert blas.arguments(standard, x.T, x, c, 1, 0, True, False) is not None
    x[0] = 1j
    case = Case(x, x.T, c, c, 1, 0, True, True)
    problem = checked(x, x.T, c, 1, 0, True, True)
    blas._by_blocks(standard, problem)()
    check_floats(case, c)

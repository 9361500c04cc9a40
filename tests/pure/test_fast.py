"""Strassen's algorithm: its coefficients, exact integers, the edges, NaN, rounding errors and what a check allows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rma_mm import kernels
from rma_mm.kernels.gemm import fast, form, product
from rma_mm.kernels.product import checked
from rma_mm.kernels.threads import set_threads
from tests.thorough import usually

TYPES = ["float32", "complex128", "uint64", "int32", "float64", "complex64", "int64"]
ORDERS = list(itertools.product((np.ascontiguousarray, np.asfortranarray), repeat=3))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut products that are tested in a moment."""
    monkeypatch.setattr(form, "LEAST", (8, 8))


def times(
    levels: int, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], alpha: Any = 1, beta: Any = 0,
    conj: tuple[bool, bool] = (False, False),
) -> NDArray[Any]:
    made = fast.bind_fast(levels, checked(a, b, c, alpha, beta, *conj))
    assert made.kernel == f"fast{levels}"
    made()
    return c


def whole_numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    x = rng.integers(0, 9, shape).astype(dtype)
    return x + (1j * rng.integers(0, 9, shape)).astype(dtype) if np.dtype(dtype).kind == "c" else x


@pytest.mark.parametrize("levels", [1, 2])
def test_the_factors_make_a_product(levels: int) -> None:
    """Σ over the products of LEFT · RIGHT · RESULT is 1 where a·b belongs to c, else 0 (R. Brent, 1970)."""
    left, right, result = (np.array(fast.factors(levels, x)) for x in (fast.LEFT, fast.RIGHT, fast.RESULT))
    side = 2**levels
    assert len(left) == len(right) == len(result) == 7**levels
    found = np.einsum("ra,rb,rc->abc", left, right, result).reshape((side,) * 6)
    i, p, q, j, y, x = np.indices(found.shape)
    np.testing.assert_array_equal(found, (p == q) & (i == y) & (j == x))


@pytest.mark.parametrize("dtype", usually(3, TYPES))
@pytest.mark.parametrize("levels", [1, 2])
def test_whole_numbers_are_exact(dtype: str, levels: int) -> None:
    """For any order in memory, beside edges of any width, with scalars; integers wrap around."""
    rng = np.random.default_rng(levels)
    is_complex = np.dtype(dtype).kind == "c"
    shapes, scalars = ((64, 64, 64), (67, 130, 71), (40, 90, 333)), ((1, 0), (1, 1), (3, 2))
    for (m, n, k), (alpha, beta) in itertools.product(shapes, scalars):
        a, b, c = (whole_numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
        for conj in ((False, False), (True, False), (False, True)) if is_complex else ((False, False),):
            expected = alpha * ((a.conj() if conj[0] else a) @ (b.conj() if conj[1] else b)) + beta * c
            for of_a, of_b, of_c in ORDERS:
                made = times(levels, of_a(a), of_b(b), of_c(c.copy()), alpha, beta, conj)
                np.testing.assert_array_equal(made, expected.astype(dtype))


@pytest.mark.parametrize("beta", [0, 1])
def test_nan_and_infinities_stay_in_their_rows_and_columns(beta: int) -> None:
    rng = np.random.default_rng(3)
    for value, inside in itertools.product((np.nan, np.inf, -np.inf), (0, 1)):
        a, b = rng.uniform(1, 2, (50, 40)), rng.uniform(1, 2, (40, 60))
        (a, b)[inside][3, 5] = value
        np.testing.assert_allclose(times(2, a, b, np.ones((50, 60)), beta=beta), a @ b + beta)


def test_a_value_of_c_that_is_not_read() -> None:
    a = np.ones((40, 40))
    np.testing.assert_array_equal(times(1, a, a, np.full((40, 40), np.nan)), np.full((40, 40), 40.0))


@pytest.mark.parametrize("levels", [1, 2])
def test_errors_are_within_the_bound_that_is_documented(levels: int) -> None:
    """N. Higham's (2002, section 23.2.2), and no more than 4^levels of the usual ones."""
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal((512, 512)).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    usual = np.abs(kernels.matmul(a, b, kernel="numpy") - exact).max()
    found = np.abs(times(levels, a, b, np.empty_like(a)) - exact).max()
    part = 512 / 2**levels
    bound = (12**levels * (part**2 + 5 * part) - 5 * 512) * 2.0**-24 * np.abs(a).max() * np.abs(b).max()
    assert found <= min(bound, 4**levels * usual)
    assert found > usual  # else it was not done so


def test_threads_share_it_and_scratch_is_as_promised() -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-5, 6, shape).astype(np.float32) for shape in ((300, 200), (200, 400)))
    before = product.get_threads()
    try:
        for threads in (1, 3):
            set_threads(threads)
            product._scratch.buffer = np.empty(0, np.uint8)
            np.testing.assert_array_equal(times(2, a, b, np.empty((300, 400), np.float32)), a @ b)
            promised = kernels.scratch_bytes(300, 400, 200, a.dtype, b.dtype, a.dtype, kernel="fast2")
            assert 0 < product._scratch.buffer.size <= promised
    finally:
        set_threads(before)


def test_others_are_done_as_usual() -> None:
    """Small products, and halves."""
    for dtype, of_c, size in (("float32", "float32", 15), ("float16", "float32", 64)):
        a = np.ones((size, size), dtype)
        made = fast.bind_fast(1, checked(a, a, c := np.empty((size, size), of_c), 1, 0, False, False))
        made()
        assert made.kernel == "numba" and (c == size).all()

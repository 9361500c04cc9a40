"""Products of a matrix and its own transpose, of which kernels do half: on and below the diagonal as NumPy has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rma_mm import kernels
from rma_mm.kernels import blas
from rma_mm.kernels.product import checked
from rma_mm.kernels.symmetric import bind_syrk, mirror_within

DTYPES = ("float32", "float64", "complex64", "complex128", "int32", "float16")
CONJUGATES = [("float64", False), ("float32", False), ("complex64", True), ("complex64", False)]
ORDERS: dict[str, Any] = {
    "by rows": np.ascontiguousarray, "by columns": np.asfortranarray, "spread": lambda x: np.repeat(x, 2, axis=0)[::2],
    "scattered": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(DTYPES), st.sampled_from((0, 1, 5, 300)), st.sampled_from((0, 1, 7)),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(list(ORDERS)), st.sampled_from(list(ORDERS)), st.booleans(),
    st.sampled_from((0, 1, 2)), st.integers(0, 99),
)
def test_half_is_right(
    dtype: str, n: int, k: int, conj: tuple[bool, bool], of_a: str, of_c: str, is_copied: bool, beta: int, seed: int
) -> None:
    """Also where b is a copy of a transposed, which BLAS would not know."""
    rng = np.random.default_rng(seed)
    a, c = (ORDERS[order](_whole(rng, shape, dtype)) for order, shape in ((of_a, (n, k)), (of_c, (n, n))))
    if conj[0] != conj[1]:
        np.fill_diagonal(c, c.diagonal().real)
    b = a.T.copy() if is_copied else a.T
    left, right = (x.conj() if yes else x for x, yes in zip((a, b), conj, strict=True))
    wide = "complex128" if c.dtype.kind == "c" else "float64"
    wanted = 2 * left.astype(wide) @ right.astype(wide) + beta * c.astype(wide)
    kernels.bind(a, b, c, 2, beta, *conj, half=True)()
    assert np.array_equal(np.tril(c), np.tril(wanted))


def _whole(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    x = rng.integers(-3, 4, shape).astype(dtype)
    return x + x.dtype.type(1j) * rng.integers(-3, 4, shape).astype(dtype) if x.dtype.kind == "c" else x


@pytest.mark.skipif(blas.library() is None, reason="no BLAS")
@pytest.mark.parametrize(("dtype", "conj"), CONJUGATES)
def test_blas_is_told_that_it_is_half(dtype: str, conj: bool) -> None:
    """Nothing above the diagonal is touched where a matrix meets its own transpose; a copy of it is another matrix."""
    a, c = np.ones((300, 4), dtype), np.full((300, 300), 7, dtype)
    kernels.bind(a, a.T, c, conj_b=conj, half=True)()
    assert (np.triu(c, 1) == np.triu(np.full_like(c, 7), 1)).all() and (np.tril(c) == np.tril(np.full_like(c, 4))).all()
    assert bind_syrk(checked(a, a.T.copy(), c, 1, 0, False, conj)) is None


@pytest.mark.parametrize("conjugates", [False, True])
def test_squares_are_mirrored_in_themselves(conjugates: bool) -> None:
    """Wide ones by halves; the diagonal of a Hermitian one is real."""
    for n in (0, 1, 128, 301):
        x = _whole(np.random.default_rng(n), (n, n), "complex64")
        below = np.tril(x, -1)
        diagonal = np.diag(x.diagonal().real if conjugates else x.diagonal())
        mirror_within(x, conjugates)
        assert np.array_equal(x, below + diagonal + (below.conj() if conjugates else below).T)

"""Local products of batches against NumPy: any type, kernel, order in memory and broadcast; few calls for many."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rma_mm.elements.dtypes import accumulator, parse_dtype
from rma_mm.elements.semiring import SEMIRINGS
from rma_mm.errors import ShapeError
from rma_mm.kernels import batched, blocked, threads
from rma_mm.kernels.batched import bind_batch
from rma_mm.kernels.gemm import product
from rma_mm.kernels.product import checked
from tests.thorough import usually

CODE = (("int32", "plus_times"), ("float16", "plus_times"), ("float32", "min_plus"))
"""Types for which code is generated in these tests: each costs a second of compiling."""
REST = (
    *((name, "plus_times") for name in ("float32", "complex64", "int8", "bfloat16", "bool")), ("int64", "max_plus"),
)


def placed(draw: Any, x: Any) -> Any:
    """The same elements in another order in memory."""
    order = draw(st.permutations(range(x.ndim)))
    made = np.empty([x.shape[dim] for dim in order], x.dtype).transpose(np.argsort(order))
    made[...] = x
    return made


def expected(a: Any, b: Any, c: Any, alpha: int, beta: int, conj: tuple[bool, bool], ring: Any) -> Any:
    """What NumPy makes of them, summed as the kernels do."""
    a, b = (x.conj() if turned else x for x, turned in zip((a, b), conj, strict=True))
    wide = accumulator(c.dtype)
    if ring.is_arithmetic:
        made = np.matmul(a.astype(wide), b.astype(wide))
        return (made | c if beta else made) if c.dtype.kind == "b" else (alpha * made + beta * c).astype(c.dtype)
    terms = ring.multiply(a[..., :, :, None], b[..., None, :, :])
    made = ring.add.reduce(terms, axis=-2, initial=ring.identity(a.dtype))
    return ring.add(made, c) if beta else made


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_batches_are_numpys(data: st.DataObject) -> None:
    draw = data.draw
    kernel = draw(st.sampled_from(("numba", "numpy")))
    name, ring = draw(st.sampled_from(CODE if kernel == "numba" else (*CODE, *REST)))
    dtype, semiring, rng = parse_dtype(name), SEMIRINGS[ring], np.random.default_rng(draw(st.integers(0, 99)))
    batch = draw(st.lists(st.sampled_from((0, 1, 2, 3, 3, 9)), min_size=1, max_size=3))
    m, n, k = (draw(st.sampled_from((0, 1, 2, 5, 17))) for _ in range(3))
    leading = [tuple(1 if draw(st.integers(0, 3)) == 0 else extent for extent in batch) for _ in "ab"]
    a, b, c = (
        placed(draw, rng.integers(-2, 3, shape).astype(dtype))
        for shape in ((*leading[0], m, k), (*leading[1], k, n), (*batch, m, n))
    )
    is_number = semiring.is_arithmetic and name != "bool"
    alpha, beta = draw(st.sampled_from((1, 2, 0) if is_number else (1,))), draw(st.sampled_from((0, 1)))
    conj = draw(st.tuples(st.booleans(), st.booleans())) if semiring.is_arithmetic else (False, False)
    if dtype.kind == "c":
        a, b = a * (1 + 2j), b * (2 - 1j)
        a, b = a.astype(dtype), b.astype(dtype)
    wanted = expected(a, b, c, alpha, beta, conj, semiring)
    few = draw(st.booleans())  # elements in panels, so that a batch goes through them in parts; and two threads
    with pytest.MonkeyPatch.context() as patch, threads.using_threads(1 + few):
        for where, what, value in ((blocked, "PANEL_BYTES", 400), (product, "WORTH", 1), (batched, "WORTH", 1)):
            patch.setattr(where, what, value if few else getattr(where, what))
        bind_batch(a, b, c, alpha, beta, *conj, kernel, semiring)()
    assert np.array_equal(c, np.broadcast_to(wanted, c.shape))


@pytest.mark.parametrize(("name", "ring"), [*CODE, ("int64", "plus_times"), ("float32", "plus_times")])
def test_calls_do_not_grow_with_the_batch(name: str, ring: str) -> None:
    """A batch is a few calls of what is compiled, however many products it has: no loop of Python's."""

    def calls(count: int) -> int:
        a, b, c = (np.zeros((count, 4, 4), name) for _ in "abc")
        multiply = bind_batch(a, b, c, kernel="numba" if (name, ring) in CODE else "numpy", semiring=SEMIRINGS[ring])
        multiply()
        seen: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, argument: seen.update([event]))
        try:
            multiply()
        finally:
            sys.setprofile(None)
        return seen["call"] + seen["c_call"]

    assert calls(500) < calls(5) + 100


MEASURED = (
    ("float16", "float16", "numpy", 0, "plus_times"), ("float32", "float32", "numpy", 2, "plus_times"),
    ("int8", "int32", "numpy", 0, "plus_times"), ("float32", "float32", "numpy", 1, "max_plus"),
    ("float16", "float16", "numba", 2, "plus_times"), ("float32", "float32", "numba", 0, "min_plus"),
)


@pytest.mark.parametrize(("dtype", "of_c", "kernel", "beta", "ring"), usually(4, MEASURED))
def test_temporary_memory_is_what_is_said(dtype: str, of_c: str, kernel: str, beta: int, ring: str) -> None:
    """Also of one b for all; that of a thread that has multiplied nothing before."""
    count, m, n, k = 700, 16, 24, 32
    for leading in ((count,), ()):
        a, b, c = np.ones((count, m, k), dtype), np.ones((*leading, k, n), dtype), np.zeros((count, m, n), of_c)
        multiply = bind_batch(a, b, c, 1, beta, kernel=kernel, semiring=SEMIRINGS[ring])
        types = a.dtype, b.dtype, c.dtype
        said = batched.scratch_bytes(count, m, n, k, types, 1, beta, False, kernel, SEMIRINGS[ring])
        tracemalloc.start()
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= said <= 20 << 20, (peak, said)


def test_shapes_that_are_no_batch_are_refused() -> None:
    a, b, c = np.zeros((2, 3, 4)), np.zeros((2, 4, 5)), np.zeros((3, 3, 5))
    with pytest.raises(ShapeError, match="does not give"):
        checked(a, b, c, 1, 0, False, False, dims=3)
    with pytest.raises(ShapeError, match="does not give"):
        checked(a, b, c[:2], 1, 0, False, False)

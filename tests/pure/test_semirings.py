"""Products of other semirings against NumPy: the kernel on any operands, and schedules on virtual ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from numpy.typing import NDArray

from bench.trust.own_semirings import TYPES, elements, registered
from rma_mm import kernels
from rma_mm.algorithms import ALGORITHMS
from rma_mm.command.options.run import parser
from rma_mm.elements.dtypes import SUPPORTED, accumulator
from rma_mm.elements.reduction import REDUCTIONS, Reduction, zero
from rma_mm.elements.semiring import PLUS_TIMES, SEMIRINGS, Distributes, Semiring, find_semiring, register_semiring
from rma_mm.errors import AlgorithmError, DtypeError, OptionError
from rma_mm.flavours import DEFAULT
from rma_mm.kernels import numpy_gemm as plain
from rma_mm.kernels.choice.choice import choose_kernel
from rma_mm.kernels.gemm.form import emitted
from rma_mm.kernels.order_keys import from_keys, has_keys, key_type, to_keys
from rma_mm.schedule.interpret import interpret
from rma_mm.schedule.lowering.lower import lower
from tests.pure.test_schedules import LIMITS, limits, stored
from tests.reference import collect, distribute, nothing
from tests.strategies import Case, cases, pure
from tests.thorough import covering, nightly, usually

Array = NDArray[Any]

OTHERS = [semiring for semiring in SEMIRINGS.values() if not semiring.is_arithmetic]
NUMBERS = [dtype for dtype in SUPPORTED if dtype.kind not in "bc"]


def expected(semiring: Semiring, a: Array, b: Array, c: Array | None = None) -> Array:
    """⊕ over k of a[i, k] ⊗ b[k, j], in NumPy's own words; of the 16-bit floats each term is rounded."""
    with np.errstate(all="ignore"):
        terms = semiring.multiply(a[:, :, None], b[None])
        total = semiring.add.reduce(terms, axis=1, initial=semiring.identity(terms.dtype))
        return total if c is None else semiring.add(c, total)


def same(x: Array, y: Array) -> bool:
    """Whether two arrays hold the same values, all NaN being one."""
    return x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], sign: int = 0) -> Array:
    """Values of a type, its limits among them; of one sign where `sign` is not 0."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        some = rng.integers(0, 20, shape).astype(dtype)
        limits = np.where(rng.integers(0, 2, shape) == 0, info.max, info.min).astype(dtype)
        return np.where(rng.integers(0, 10, shape) == 0, limits, some)
    x = rng.normal(size=shape) * 100
    x = np.abs(x) * sign if sign else x
    special = rng.choice([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40], shape)
    made: Array = np.where(rng.integers(0, 30, shape) == 0, special, x).astype(dtype)
    return made


@st.composite
def strided(draw: DrawFn, shape: tuple[int, int], dtype: np.dtype[Any], seed: int) -> Array:
    """An array of any strides: by rows or columns, with gaps, backwards."""
    steps = [draw(st.sampled_from((1, 1, 2, -1, -3))) for _ in shape]
    big = tuple(extent * abs(step) for extent, step in zip(shape, steps, strict=True))
    held = np.array(values(np.random.default_rng(seed), big, dtype), order=draw(st.sampled_from("CF")))
    return held[tuple(slice(None, None, step) for step in steps)][: shape[0], : shape[1]]


@st.composite
def products(draw: DrawFn) -> tuple[Semiring, Array, Array, Array, int]:
    """A semiring, a, b, c and beta."""
    m, n, k = (draw(st.sampled_from((0, 1, 2, 3, 5, 8, 17))) for _ in range(3))
    dtype = draw(st.sampled_from(NUMBERS))
    seed = draw(st.integers(0, 2**16))
    a, b, c = (draw(strided(s, dtype, seed + x)) for x, s in enumerate(((m, k), (k, n), (m, n))))
    return draw(st.sampled_from(OTHERS)), a, b, c, draw(st.sampled_from((0, 1)))


@pure(500)
@given(products())
def test_the_kernel_is_numpy(product: tuple[Semiring, Array, Array, Array, int]) -> None:
    semiring, a, b, c, beta = product
    wanted = expected(semiring, a, b, c if beta else None)
    kernels.bind(a, b, c, 1, beta, kernel="numpy", semiring=semiring)()
    assert same(c, wanted)


@pytest.mark.parametrize("name", ["min_plus", "max_min"])
@pytest.mark.parametrize("shape", [(1, 1, 5000), (1, 5000, 3), (5000, 1, 3), (70, 60, 50), (3, 2, 400)])
def test_the_kernel_cuts_large_products(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(plain, "TERMS", 4096)
    monkeypatch.setattr(plain, "TILE", 512)
    m, n, k = shape
    rng = np.random.default_rng(1)
    for dtypes in (("f4", "f4", "f4"), ("f2", "f2", "f2"), ("i2", "f4", "f8")):
        a, b = rng.integers(1, 99, (m, k)).astype(dtypes[0]), rng.integers(1, 99, (k, n)).astype(dtypes[1])
        c = np.zeros((m, n), dtypes[2])
        kernels.bind(a, b, c, kernel="numpy", semiring=SEMIRINGS[name])()
        assert same(c, expected(SEMIRINGS[name], a.astype(c.dtype), b.astype(c.dtype)))


@pytest.mark.parametrize("shape", [(64, 64, 64), (1, 1, 10**6), (1000, 1000, 1000), (1, 10**6, 1), (10**6, 1, 2)])
def test_temporary_memory_is_what_is_said(shape: tuple[int, int, int]) -> None:
    import tracemalloc

    (m, n, k), semiring = shape, SEMIRINGS["max_plus"]
    for a_dtype, c_dtype in (("f4", "f4"), ("i1", "f8"), ("f2", "f2")):
        a, b, c = np.ones((m, 1), a_dtype), np.ones((1, n), a_dtype), np.zeros((m, n), c_dtype)
        a, b = np.broadcast_to(a, (m, k)), np.broadcast_to(b, (k, n))
        if m * n * k > 10**8:  # the panels count, not how often they are filled
            a, b, k = a[:, :200], b[:200], 200
        product = kernels.bind(a, b, c, kernel="numpy", semiring=semiring)
        tracemalloc.start()
        product()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        said = kernels.scratch_bytes(m, n, k, a.dtype, b.dtype, c.dtype, "numpy", semiring=semiring)
        assert peak <= said <= 5 << 20


def test_an_empty_sum_is_the_identity() -> None:
    for semiring in OTHERS:
        for dtype in NUMBERS:
            c = np.ones((2, 3), dtype)
            kernels.bind(np.ones((2, 0), dtype), np.ones((0, 3), dtype), c, semiring=semiring)()
            x = values(np.random.default_rng(3), (2, 3), dtype)
            assert same(semiring.add(c, x), x), (semiring.name, dtype)
    c = np.ones((2, 3), bool)
    kernels.bind(np.ones((2, 0), bool), np.ones((0, 3), bool), c, semiring=SEMIRINGS["or_and"])()
    assert not c.any()


@pytest.mark.parametrize("beta", [0, 1])
def test_or_and_is_the_product_of_bools(beta: int) -> None:
    rng = np.random.default_rng(5)
    a, b, c = rng.random((40, 30)) < 0.1, rng.random((30, 50)) < 0.1, rng.random((40, 50)) < 0.1
    wanted = expected(SEMIRINGS["or_and"], a, b, c if beta else None)
    assert not wanted.all()
    kernels.bind(a, b, c, 1, beta, semiring=SEMIRINGS["or_and"])()
    assert same(c, wanted)


@pytest.mark.parametrize(
    ("name", "dtype", "options", "error", "said"),
    [
        ("or_and", "float32", {}, DtypeError, ".astype(bool)"),
        ("min_plus", "bool", {}, DtypeError, "or_and"),
        ("max_plus", "complex64", {}, DtypeError, "order"),
        ("min_plus", "float32", {"alpha": 2}, OptionError, "alpha: got 2"),
        ("max_min", "int8", {"beta": 3}, OptionError, "beta: got 3"),
        ("or_and", "bool", {"alpha": 0}, OptionError, "alpha: got 0"),
        ("min_plus", "float64", {"conj_a": True}, OptionError, "conjugate"),
        ("min_plus", "float64", {"kernel": "blas"}, AlgorithmError, "min_plus"),
        ("min_plus", "float64", {"kernel": "cuda"}, AlgorithmError, "unknown"),
    ],
)
def test_what_a_semiring_does_not_have(
    name: str, dtype: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    a = np.ones((2, 2), dtype)
    with pytest.raises(error, match=re.escape(said)):
        kernels.bind(a, a.copy(), a.copy(), semiring=SEMIRINGS[name], **options)


def test_unknown_names_are_told_the_known_ones() -> None:
    for wrong in ("tropical", None, 3):
        with pytest.raises(OptionError, match="plus_times, min_plus, max_plus, max_min, or_and"):
            find_semiring(wrong)


# -- of one's own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", usually(1, sorted(TYPES, key=("min_max", "union", "xor_and").count), rest=nightly))
def test_local_products_by_a_semiring_of_ones_own(name: str) -> None:
    """By NumPy and, where code can be made of the ufuncs, compiled; any strides."""
    rng, dtype = np.random.default_rng(6), np.dtype(TYPES[name])
    with registered():
        semiring = SEMIRINGS[name]
        a, b, c = (elements(rng, name, shape) for shape in ((33, 41), (41, 37), (33, 37)))
        wanted = expected(semiring, a, b, c)
        for kernel in ("numpy", "numba") if emitted(semiring, dtype) else ("numpy",):
            for out in (c.copy(), np.asfortranarray(c)):
                kernels.bind(a, b, out, 1, 1, kernel=kernel, semiring=semiring)()
                assert same(out, wanted), kernel
        assert (emitted(semiring, dtype) is None) == (name == "gcd_lcm")
        assert choose_kernel("auto", dtype, 1024, 1024, 1024, semiring) == ("numpy" if name == "gcd_lcm" else "numba")
        if name == "gcd_lcm":
            with pytest.raises(AlgorithmError, match="no code for gcd and lcm of uint32"):
                kernels.matmul(a, b, kernel="numba", semiring=name)
        (choices,) = [each.choices for each in parser()._actions if each.dest == "semiring"]
        assert name in (choices or ())
    with pytest.raises(OptionError, match=name):
        find_semiring(name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("min_plus", np.minimum, np.add, "f"), "it must be new"),
        (("", np.minimum, np.add, "f"), "it must be new"),
        (("mine", np.minimum, np.add, "fx"), "letters biufc"),
        (("mine", np.gcd, np.lcm, "u"), "Reduction(add, identity)"),
        (("mine", np.add, np.minimum, "f"), "depend on their order"),
        (("mine", Reduction(np.subtract, zero), np.multiply, "i"), "⊕ is commutative"),
        (("mine", Reduction(np.lcm, zero), np.gcd, "u"), "identity"),
        (("mine", np.minimum, np.subtract, "f"), "⊗ is commutative"),
        (("mine", np.bitwise_or, np.bitwise_and, "f"), "do not go with float32"),
        (("mine", np.maximum, np.multiply, "i", Distributes.UNLESS_SUMS_WRAP), "only for ⊗ = np.add"),
        (("mine", np.bitwise_xor, np.bitwise_or, "u", Distributes.ALWAYS), "⊗ distributes over ⊕"),
    ],
)
def test_what_is_no_semiring_is_refused(given: tuple[Any, ...], said: str) -> None:
    before = dict(SEMIRINGS)
    with pytest.raises(OptionError, match=re.escape(said)):
        register_semiring(*given)
    assert before == SEMIRINGS


# -- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["MIN", "MAX"])
def test_keys_are_ordered_as_floats_and_nan_comes_through(dtype: str, name: str) -> None:
    reduction = REDUCTIONS[name]
    add = reduction.add
    floats = np.finfo(dtype)
    some = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, -np.nan, floats.tiny, -floats.smallest_subnormal, floats.max]
    x, y = (np.asfortranarray(z) for z in np.meshgrid(np.array(some, dtype), np.array(some, dtype)))
    wanted = add(x, y)
    ours, theirs = (np.repeat(z, 2, axis=1)[:, ::2] for z in (x, y))
    to_keys(ours, reduction)
    to_keys(theirs, reduction)
    whole = key_type(np.dtype(dtype))
    assert DEFAULT.accumulates(whole, name)
    found = add(ours.view(whole), theirs.view(whole)).view(dtype)
    from_keys(found, reduction)
    assert same(found, wanted)
    from_keys(ours, reduction)
    assert same(ours, np.ascontiguousarray(x))


def test_long_arrays_are_converted_in_pieces() -> None:
    x = np.random.default_rng(2).normal(size=(3, 10_001)).astype(np.float32)
    y = x.copy()
    to_keys(y, REDUCTIONS["MIN"])
    assert np.array_equal(np.argsort(y.view(np.int32), axis=1), np.argsort(x, axis=1))
    from_keys(y, REDUCTIONS["MIN"])
    assert np.array_equal(x, y)


def test_every_sum_can_be_accumulated() -> None:
    """Each type that a result is summed in, or that of its keys, with each semiring's reduction."""
    for semiring in SEMIRINGS.values():
        for dtype in map(accumulator, SUPPORTED):
            if semiring.kinds == "b":
                assert DEFAULT.accumulates(dtype, "LOR") == (dtype.kind == "b")
            elif semiring == PLUS_TIMES or dtype.kind not in "bc":
                ordered = has_keys(dtype) and semiring != PLUS_TIMES
                assert DEFAULT.accumulates(key_type(dtype) if ordered else dtype, semiring.reduction.mpi)
    assert not has_keys(np.dtype(ml_dtypes.bfloat16))  # summed in float32


# -- schedules ------------------------------------------------------------------------------------


def signed(rng: np.random.Generator, shape: tuple[int, int], semiring: Semiring) -> Array:
    """Numbers on the far side of 0 from the identity's: wherever a 0 is taken for nothing, it wins."""
    x = rng.integers(1, 9, shape).astype(np.float64)
    return x if semiring.reduction.order < 0 else -x


@pytest.mark.parametrize("name", covering(ALGORITHMS))
def test_every_row_is_for_every_semiring(name: str) -> None:
    """The schedule is the same; what is done in place of + and × is the interpreter's affair."""

    @pure(15)
    @given(cases(ALGORITHMS[name]), LIMITS, st.sampled_from(OTHERS))
    def check(case: Case, changed: dict[str, int], semiring: Semiring) -> None:
        assume(not any(layout.partial for layout in case.problem.layouts))
        case = replace(case, alpha=1, beta=1 if case.problem.keeps_c else 0)
        with limits(changed):
            run(case, semiring)

    check()


def run(case: Case, semiring: Semiring) -> None:
    """Lower and interpret a case; the result must be NumPy's."""
    problem, mesh, rng = case.problem, case.problem.mesh, np.random.default_rng(case.seed)
    whole = {x: signed(rng, problem.extent(x), semiring) for x in "ABC"}
    homes = {
        x: stored(whole[x].T if x in case.transposed else whole[x], problem.layout(x), mesh, rng, x in case.transposed)
        for x in "AB"
    }
    place = problem.layout("C")
    kept = problem.keeps_c
    homes["C"] = distribute(whole["C"], place, mesh, rng) if kept else nothing(place, mesh, problem.extent("C"))
    schedule = lower(case.row, problem, case.tuning)
    outcome = interpret(schedule, homes, 1, case.beta, case.seed, arithmetic=semiring)
    got = collect(outcome.tiles, place, mesh, problem.extent("C"))
    assert np.array_equal(got, expected(semiring, whole["A"], whole["B"], whole["C"] if kept else None))

"""Epilogues: once for every element of C in every schedule, right in every type, refused where they do not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS
from rma_mm.elements.dtypes import BFLOAT16, SUPPORTED, accumulator, parse_dtype, rank
from rma_mm.errors import DtypeError, OptionError, ShapeError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Region
from rma_mm.kernels import bind
from rma_mm.kernels.elementwise import cast
from rma_mm.kernels.epilogue import activations, epilogue
from rma_mm.kernels.epilogue.epilogue import Epilogue, EpilogueTile
from rma_mm.schedule.algorithm import PlacedProblem
from rma_mm.schedule.interpret import Matrix, interpret
from rma_mm.schedule.lowering import decisions
from rma_mm.schedule.lowering.fused_finish import closing
from rma_mm.schedule.lowering.lower import lower
from rma_mm.schedule.ops import Barrier, Finish, Multiply, Op, Ref, Scale
from rma_mm.schedule.verify.checker import verify
from tests.reference import collect, distribute, expected, nothing, whole_numbers
from tests.strategies import Case, cases, pure
from tests.thorough import covering

Array = np.ndarray[Any, Any]
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


# -- in schedules ---------------------------------------------------------------------------------


def closed(values: Matrix, region: Region) -> Matrix:
    """What tells twice from once, and one element from another: bias per row and column, ReLU, and a step down."""
    rows, cols = (span.indices for span in region)
    return np.maximum(3 * values + 2 * rows[:, None] - cols, -5) - 7


def run_closed(case: Case) -> None:
    """Lower, verify and interpret a case with an epilogue; the result must be NumPy's."""
    problem, mesh, rng = case.problem, case.problem.mesh, np.random.default_rng(case.seed)
    a, b, c = (whole_numbers(rng, problem.extent(x)) for x in "ABC")
    place = problem.layout("C")
    homes = {x: distribute(value, problem.layout(x), mesh, rng) for x, value in zip("AB", (a, b), strict=True)}
    homes["C"] = distribute(c, place, mesh, rng) if problem.keeps_c else nothing(place, mesh, c.shape)
    schedule = lower(case.row, problem, case.tuning)
    verify(schedule)
    outcome = interpret(schedule, homes, case.alpha, case.beta, case.seed, epilogue=closed)
    wanted = closed(expected(a, b, c, case.alpha, case.beta), Region.whole(c.shape))
    assert np.array_equal(collect(outcome.tiles, place, mesh, c.shape), wanted)


@pytest.mark.parametrize("name", covering(ALGORITHMS))
def test_every_row_closes_every_element_once(name: str) -> None:
    """On any mesh and placement but summands of C, cut finely, with a kept C too."""

    @pure(25)
    @given(cases(ALGORITHMS[name], max_ranks=12), st.sampled_from((1, 3, 128)))
    def check(case: Case, narrow: int) -> None:
        if case.problem.layout("C").partial:  # refused: each summand would be closed for itself
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decisions, "NARROW", narrow)
            run_closed(case)

    check()


def problem() -> PlacedProblem:
    mesh = MeshShape((2, 2))
    layout = parse_layout("i,j", mesh)
    return PlacedProblem((8, 8, 8), mesh, (layout, layout, layout), False, "")


@pytest.mark.parametrize("name", ["stationary_c", "srumma", "cannon", "summa_c"])
def test_last_products_close_c_where_it_stays(name: str) -> None:
    schedule = lower(ALGORITHMS[name], problem())
    ops = schedule.program(0)
    found = closing(ops)
    [finish] = [op for op in ops if isinstance(op, Finish)]
    products = [op for op in ops if isinstance(op, Multiply)]
    assert id(finish) in found
    assert id(products[-1]) in found
    assert sum(product.c.region.size for product in products if id(product) in found) == finish.c.region.size


@pytest.mark.parametrize("name", ["stationary_a", "stationary_b", "summa_a", "row_parallel", "queue"])
def test_no_product_closes_c_where_it_is_added_to(name: str) -> None:
    ops = lower(ALGORITHMS[name], problem()).program(0)
    assert any(isinstance(op, Finish) for op in ops)
    assert closing(ops) == set()


def box(rows: tuple[int, int], cols: tuple[int, int]) -> Ref:
    return Ref(0, "C", Region.box(rows, cols))


def times(rows: tuple[int, int], cols: tuple[int, int], first: bool = False) -> Multiply:
    a, b = Ref(0, "A", Region.box(rows, (0, 4))), Ref(0, "B", Region.box((0, 4), cols))
    return Multiply(a, b, box(rows, cols), first, 0)


def test_a_finish_is_left_alone_unless_last_products_make_it_up() -> None:
    whole, half, other = (0, 4), (0, 2), (2, 4)
    finish = Finish(box(whole, whole), 0)

    def found(*ops: Op) -> list[int]:
        ids = closing([*ops, finish])
        return [n for n, op in enumerate([*ops, finish]) if id(op) in ids]

    assert found(times(whole, whole, True), times(whole, whole)) == [1, 2]
    assert found(times(whole, whole, True), times(half, whole), times(other, whole)) == [1, 2, 3]
    assert found(times(whole, whole, True), times(half, whole)) == []  # the other half was not touched by the last
    assert found(times(half, whole, True), Scale(box(other, whole), False, 0)) == []
    assert found(times(whole, whole, True), Scale(box(half, half), False, 0)) == []
    assert found(times(whole, whole, True), Barrier(0)) == []
    assert found() == []


# -- the arithmetic -------------------------------------------------------------------------------


def gelu(x: Array) -> Array:
    """In float64, by the C library."""
    values = [v / 2 * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64).flat]
    return np.array(values).reshape(x.shape)


def applied(
    x: Array, activation: str | None, compiles: bool, bias: Array | None = None, per: str | None = None
) -> Array:
    """`x` closed in place."""
    found = x.copy()
    EpilogueTile(found, bias, per, activation, compiles).bound(found)()
    return found


@pytest.fixture(params=[False, True], ids=["numpy", "numba"])
def compiles(request: pytest.FixtureRequest) -> bool:
    if request.param:
        pytest.importorskip("numba")
    return bool(request.param)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gelu_is_within_a_few_roundings_of_the_exact_form(dtype: np.dtype[Any], compiles: bool) -> None:
    info = np.finfo(dtype)
    near = np.linspace(-10, 10, 40001)
    edges = np.nextafter(np.array([5.5, -5.5, 8.3, -8.3], dtype), dtype.type(0)).astype(np.float64)
    tiny = np.array([0.0, -0.0, info.smallest_normal, -info.smallest_subnormal, 1e-20, -1e-8])
    large = np.array([12, -12, 40, -40, 1e10, -1e10, float(info.max), -float(info.max)])
    x = np.concatenate([near, edges, [5.5, -5.5, 8.3, -8.3], tiny, large]).astype(dtype).reshape(1, -1)
    error = np.abs(applied(x, "gelu", compiles).astype(np.longdouble) - gelu(x))
    bound = 4 * float(info.eps) * np.abs(x.astype(np.longdouble)) + info.smallest_subnormal
    assert (error <= bound).all(), (float((error / bound).max()), x[0, int((error / bound).argmax())])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_derivative_of_gelu_is_within_a_few_roundings(dtype: np.dtype[Any], compiles: bool) -> None:
    """Φ(x) + x · φ(x) of every size of x, 0 and 1 where it ends, and NaN of NaN."""
    near, far = np.linspace(-10, 10, 40001), [12, -12, 14, -14, 36.9, -36.9, 40, -40, 1e10, -1e10, np.inf, -np.inf]
    x = np.concatenate([near, far, [0.0, -0.0, 1e-20]]).astype(dtype).reshape(1, -1)
    exact = [math.erfc(-v / math.sqrt(2)) / 2 + (abs(v) < 50 and v * math.exp(-v * v / 2)) / math.sqrt(2 * math.pi)
             for v in x.astype(np.float64).flat]
    found = applied(x, "gelu'", compiles)
    assert np.abs(found - exact).max() < 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(found[0, -7:-3], [1, 0, 1, 0], atol=1e-30)
    assert np.isnan(applied(np.full((1, 9), np.nan, dtype), "gelu'", compiles)).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite(dtype: np.dtype[Any], compiles: bool) -> None:
    """NaN goes through both; gelu(−∞) is −0, as its limit, and not the NaN that −∞ · 0 is."""
    x = np.array([[np.nan, np.inf, -np.inf, 2, -2]] * 9, dtype)
    for row in applied(x, "relu", compiles):
        np.testing.assert_array_equal(row, np.array([np.nan, np.inf, 0, 2, 0], dtype))
    for row in applied(x, "gelu", compiles):
        np.testing.assert_array_equal(row[:3], np.array([np.nan, np.inf, 0], dtype))
        assert np.signbit(row[2])
        np.testing.assert_allclose(row[3:], [1.954499736, -0.045500264], rtol=1e-6)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu'"])
@pytest.mark.parametrize("per", ["column", "row", None])
def test_compiled_loops_agree_with_numpy(activation: str | None, per: str | None) -> None:
    """Whatever the strides; what lies between the rows is not touched."""
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    for dtype in FLOATS:
        wide = rng.standard_normal((37, 90)).astype(dtype)
        bias = rng.standard_normal({"column": 53, "row": 37}[per]).astype(dtype) if per else None
        x = wide[:, 11:64]
        wanted = applied(np.ascontiguousarray(x), activation, False, bias, per)
        for held in (wide, np.asfortranarray(wide)):
            whole = held.copy(order="K")
            part = whole[:, 11:64]
            EpilogueTile(part, bias, per, activation, True).bound(part)()
            np.testing.assert_allclose(part, wanted, rtol=1e-5, atol=8 * np.finfo(dtype).eps)
            assert np.array_equal(whole[:, :11], wide[:, :11])
            assert np.array_equal(whole[:, 64:], wide[:, 64:])


def nearest_bfloat16(value: float | int) -> float:
    """`value` rounded once to 8 significant bits, ties to even; for numbers of middling size."""
    if isinstance(value, int):
        shift = max(0, abs(value).bit_length() - 8)
        whole, rest = divmod(abs(value), 1 << shift)
        up = 2 * rest > (1 << shift) or (2 * rest == (1 << shift) and whole % 2)
        return math.copysign((whole + bool(up)) * 2.0**shift, value)
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 256), exponent - 8)


@pytest.mark.skipif(BFLOAT16 is None, reason="bfloat16 is not installed")
@pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "uint64"])
def test_bfloat16_is_rounded_once(dtype: str) -> None:
    """Values just beside the middle of two neighbours, which float32 would round to the middle."""
    assert BFLOAT16 is not None
    values: list[Any] = []
    for odd in (129, 130, 131):
        for shift in (12, 22, 40, 52):
            middle = (2 * odd + 1) << shift
            values += [middle - 1, middle, middle + 1]
    if dtype == "float64":
        exact = [float(v) for v in values if float(v) == v]
        values = [sign * v * 2.0**-30 for v in exact for sign in (1, -1)]
        values += [1 + 2**-8 + 2.0**-40, 1 + 2**-8 - 2.0**-40, -1 - 3 * 2**-8 + 2.0**-50]
    else:
        most = int(np.iinfo(dtype).max)
        values = [v for v in values if v <= most] + ([-v for v in values if v <= most] if dtype[0] == "i" else [])
    src = np.array([values], dtype)
    dst = np.empty(src.shape, BFLOAT16)
    cast(src, dst)
    assert dst.astype(np.float64)[0].tolist() == [nearest_bfloat16(v) for v in src[0].tolist()]


def test_bfloat16_of_what_is_not_finite_or_too_large() -> None:
    assert BFLOAT16 is not None
    src = np.array([[np.nan, np.inf, -np.inf, 1e300, -1e300, 1e-300, -0.0]])
    dst = np.empty(src.shape, BFLOAT16)
    cast(src, dst)
    np.testing.assert_array_equal(dst.astype(float)[0], [np.nan, np.inf, -np.inf, np.inf, -np.inf, 0, 0])


# -- behind products ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "numpy"])
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (65, 2), (37, 53), (0, 5), (5, 0)])
def test_a_product_in_blocks_is_closed_once(
    monkeypatch: pytest.MonkeyPatch, kernel: str, order: Any, shape: tuple[int, int], compiles: bool
) -> None:
    """Many blocks, none of which divides C; alpha, beta; k = 0; into C itself and into another array."""
    monkeypatch.setattr(epilogue, "BLOCK_BYTES", 2048)
    monkeypatch.setattr(epilogue, "BLOCK_LEAST", 7)
    monkeypatch.setattr(epilogue, "STEP_BYTES", 300)
    rng = np.random.default_rng(0)
    (m, n), side = shape, "column" if order == "C" else "row"
    for k, into in ((11, None), (11, "float16"), (0, None)):
        a, b, c = (rng.integers(-4, 5, extent).astype(np.float32) for extent in ((m, k), (k, n), (m, n)))
        bias = rng.integers(-4, 5, n if side == "column" else m).astype(np.float32)
        wanted = np.maximum(2 * (a @ b) - c + (bias if side == "column" else bias[:, None]), 0)
        summed = np.array(c, order=order)
        result = summed if into is None else np.empty((m, n), into)
        bind(a, b, summed, 2, -1, kernel=kernel, tile=EpilogueTile(result, bias, side, "relu", compiles))()
        np.testing.assert_array_equal(result, wanted.astype(result.dtype))


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_every_type_may_be_summed_and_stored_in_any_above(dtype: np.dtype[Any]) -> None:
    """Bias, ReLU where the type has an order, and one rounding into every type up the ladder."""
    rng = np.random.default_rng(0)
    summed = accumulator(dtype)
    a, b = (rng.integers(0, 3, extent).astype(dtype) for extent in ((9, 5), (5, 7)))
    bias = rng.integers(0, 2, 7).astype(summed)
    activation = "relu" if dtype.kind not in "bc" else None
    asked = Epilogue(bias, "column", activation)
    for stored in SUPPORTED:
        if rank(stored) < rank(summed):
            with pytest.raises(DtypeError, match="never down"):
                replace_dtype(asked, stored).check((9, 7), dtype)
            continue
        assert replace_dtype(asked, stored).check((9, 7), dtype) == stored
        total, result = np.empty((9, 7), summed), np.empty((9, 7), stored)
        bind(a, b, total, tile=EpilogueTile(result, bias, "column", activation))()
        exact = a.real.astype(int) @ b.real.astype(int)
        exact = (exact > 0) | (bias > 0) if dtype.kind == "b" else exact + bias.real.astype(int)
        np.testing.assert_array_equal(result, exact.astype(stored))


def replace_dtype(asked: Epilogue, dtype: np.dtype[Any]) -> Epilogue:
    return Epilogue(asked.bias, asked.per, asked.activation, dtype)


def test_integers_wrap_where_they_are_narrowed() -> None:
    total, result = np.array([[300, -129, 5]], np.int32), np.empty((1, 3), np.int8)
    EpilogueTile(result, None, None, "relu").bound(total)()
    assert result.tolist() == [[44, 0, 5]]


def test_numpy_does_it_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Numba the same call is right."""
    monkeypatch.setattr(activations, "works", lambda: False)
    activations.compiled_loop.cache_clear()
    try:
        x = np.linspace(-3, 3, 200, dtype=np.float32).reshape(1, -1)
        np.testing.assert_allclose(applied(x, "gelu", True), gelu(x), atol=1e-6)
    finally:
        activations.compiled_loop.cache_clear()


# -- what is refused ------------------------------------------------------------------------------

V = np.ones


@pytest.mark.parametrize(
    ("asked", "product", "kind", "words"),
    [
        (Epilogue(V((7, 2))), "float64", OptionError, ["per=None", "per='column' takes 7", "per='row' takes 5"]),
        (Epilogue(V(5)), "float64", ShapeError, ["5 values", "per='row' would fit"]),
        (Epilogue(V(7), "columns"), "float64", OptionError, ["per='columns'"]),
        (Epilogue(per="row"), "float64", OptionError, ["without a bias"]),
        (Epilogue(V(7), "row"), "float64", ShapeError, ["7 values", "(5, 7)", "5", "per='column' would fit"]),
        (Epilogue(V(6), "row"), "float64", ShapeError, ["6 values"]),
        (Epilogue(V((2, 7)), "column"), "float64", ShapeError, ["(2, 7)", "vector"]),
        (Epilogue(1.0, "column"), "float64", ShapeError, ["()", "vector"]),
        (Epilogue(V(7, complex), "column"), "float64", DtypeError, ["complex128", "float64", "never down"]),
        (Epilogue(V(7), "column"), "int32", DtypeError, ["float64", "int32", "compute_dtype"]),
        (Epilogue(V(7, object), "column"), "float64", DtypeError, ["object"]),
        (Epilogue(V(7) * 1e300, "column"), "float32", DtypeError, ["bias[0]", "1e+300", "float32"]),
        (Epilogue(np.full(7, 300), "column"), "int8", DtypeError, ["bias[0]", "300", "int8"]),
        (Epilogue(activation="tanh"), "float64", OptionError, ["tanh", "relu", "gelu"]),
        (Epilogue(activation="gelu"), "int32", DtypeError, ["gelu", "int32", "compute_dtype='float32'"]),
        (Epilogue(activation="gelu"), "complex64", DtypeError, ["gelu", "complex64"]),
        (Epilogue(activation="relu"), "complex64", DtypeError, ["relu", "complex64"]),
        (Epilogue(activation="relu"), "bool", DtypeError, ["relu", "bool"]),
        (Epilogue(dtype="int32"), "float32", DtypeError, ["int32", "float32", "never down"]),
        (Epilogue(dtype="float12"), "float32", DtypeError, ["float12", "bfloat16"]),
    ],
)
def test_a_misfit_is_named(asked: Epilogue, product: str, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        asked.check((5, 7), np.dtype(product))
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_its_text_tells_biases_apart_and_not_the_spelling_of_types() -> None:
    bias = np.arange(5.0)
    one = Epilogue(bias, "row", "relu", "float32")
    for alike in (
        Epilogue(bias.copy(), "row", "relu", np.float32),
        Epilogue(bias.tolist(), "row", "relu", np.dtype("f4")),
    ):
        assert repr(one) == repr(alike)
    bias[3] = 2.5
    assert repr(one) != repr(Epilogue(bias, "row", "relu", "float32"))
    assert one.bias[3] == 3  # it was copied
    assert one.words(np.dtype("float32"), np.dtype("float64")) == (
        "bias per row, relu, summed in float64 and stored as float32"
    )
    assert Epilogue().words(parse_dtype("float32"), parse_dtype("float32")) == "nothing"

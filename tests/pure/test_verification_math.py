"""The check of a product: right results pass whatever the type, wrong ones are found. Ranks are threads here."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mpi4py", exc_type=ImportError)

from mpi4py import MPI

from bench.trust.own_semirings import TYPES, elements, registered, spoilt
from rma_mm.elements.dtypes import SUPPORTED, accumulator, parse_dtype, result_dtype
from rma_mm.elements.reduction import REDUCTIONS
from rma_mm.elements.semiring import SEMIRINGS, Distributes
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.files.generated import generated
from rma_mm.runtime.verification import rows as verification_rows
from rma_mm.runtime.verification.bools import _times
from rma_mm.runtime.verification.check import Verdict, verify
from tests.thorough import nightly, usually

Array = np.ndarray[Any, Any]
PLACES = ["i,j", "j,i", "i+j:cyclic(3),*", "*,j", "*,*", "i,*,j=1"]


class Team:
    """Threads that meet in collective calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size


@dataclass
class Comm:
    """What the check needs of a communicator."""

    team: Team
    rank: int

    @property
    def size(self) -> int:
        return self.team.size

    def allgather(self, item: Any) -> list[Any]:
        self.team.slots[self.rank] = item
        self.team.barrier.wait()
        found = list(self.team.slots)
        self.team.barrier.wait()
        return found

    def bcast(self, item: Any, root: int = 0) -> Any:
        return self.allgather(item)[root]

    def Allreduce(self, send: Array, out: Array, op: Any = MPI.SUM) -> None:
        (add,) = (each.add for name, each in REDUCTIONS.items() if op == getattr(MPI, name))
        out[...] = reduce(add, self.allgather(send))

    def Alltoall(self, send: Array, out: Array) -> None:
        out[...] = [each[self.rank] for each in self.allgather(send)]

    def Allgather(self, send: Array, out: Array) -> None:
        out[...] = self.allgather(send)


@dataclass
class Mesh:
    comm: Comm
    rank: int
    grid: MeshShape


@dataclass
class Matrix:
    mesh: Mesh
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: Layout
    region: Any
    tile: Array


def placed(x: Array, mesh: Mesh, text: str) -> Matrix:
    """Rank's own part of x; a partial placement gets all of it in the first summand and 0 in the others."""
    layout = parse_layout(text, mesh.grid)
    region = layout.region(x.shape, mesh.grid, mesh.rank)
    tile = x[region.selector()].copy()
    coords = mesh.grid.coords(mesh.rank) if mesh.rank < mesh.grid.size else {}
    if any(coords.get(axis) for axis in layout.partial):
        tile[...] = 0
    return Matrix(mesh, x.shape, x.dtype, layout, region, tile)


@dataclass
class Case:
    """One product, with the placements of its matrices."""

    a: Array
    b: Array
    c: Array
    before: Array | None = None
    places: tuple[str, str, str] = (PLACES[0],) * 3
    grid: tuple[int, int] = (1, 1)
    extra: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, spoil: Callable[[Matrix], None] = lambda c: None) -> Verdict:
        """Verify on threads; `spoil` may change each rank's C first."""
        shape = MeshShape(self.grid)
        team = Team(shape.size + self.extra)
        found: list[Verdict | BaseException] = [Verdict(False, None)] * team.size

        def rank(number: int) -> None:
            try:
                mesh = Mesh(Comm(team, number), number, shape)
                a, b, c = (placed(x, mesh, at) for x, at in zip((self.a, self.b, self.c), self.places, strict=True))
                before = None if self.before is None else placed(self.before, mesh, self.places[2])
                spoil(c)
                found[number] = verify(a, b, c, before=before, **self.options)
            except BaseException as error:
                found[number] = error
                team.barrier.abort()

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(team.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for verdict in found:
            if isinstance(verdict, BaseException) and not isinstance(verdict, threading.BrokenBarrierError):
                raise verdict
        assert isinstance(found[0], Verdict)
        assert found == [found[0]] * team.size
        return found[0]


def made(which: str, shape: tuple[int, int], dtype: Any, seed: int = 1) -> Array:
    rows, cols = np.ogrid[: shape[0], : shape[1]]
    return generated(seed, which, dtype)(rows, cols)


def multiplied(
    a: Array, b: Array, alpha: Any = 1, beta: Any = 0, before: Array | None = None, dtype: Any = None
) -> Array:
    """The product as a kernel makes it: summed in the accumulator, rounded once."""
    dtype = dtype or result_dtype(a.dtype, b.dtype)
    working = accumulator(dtype)
    with np.errstate(all="ignore"):
        if dtype.kind == "b":
            out = (a.astype(int) @ b.astype(int) > 0) & bool(alpha)
            return out | before if beta and before is not None else out
        out = a.astype(working) @ b.astype(working) * working.type(alpha)
        if beta != 0 and before is not None:
            out += working.type(beta) * before.astype(working)
        return out.astype(dtype)


@given(
    dtype=st.sampled_from([dtype.name for dtype in SUPPORTED]),
    shape=st.tuples(*[st.integers(0, 40)] * 3),
    places=st.tuples(*[st.sampled_from(PLACES)] * 3),
    grid=st.sampled_from([(1, 1), (2, 3), (2, 1)]),
    extra=st.integers(0, 1),
    beta=st.sampled_from([0, 1]),
    seed=st.integers(0, 5),
)
def test_right_results_pass_and_one_wrong_element_does_not(
    dtype: str, shape: tuple[int, int, int], places: Any, grid: Any, extra: int, beta: int, seed: int
) -> None:
    """Every type, any placement, more ranks than the grid holds."""
    m, n, k = shape
    t = parse_dtype(dtype)
    places = tuple("i,*" if "j=1" in p and grid[1] == 1 else p for p in places)
    a, b, before = made("A", (m, k), t, seed), made("B", (k, n), t, seed), made("C", (m, n), t, seed)
    c = multiplied(a, b, beta=beta, before=before)
    case = Case(a, b, c, before if beta else None, places, grid, extra, {"beta": beta})
    verdict = case.check()
    assert verdict.ok, verdict
    assert verdict.residual is not None
    if c.size and t.kind != "b":
        case.c = c.copy()
        at = (m - 1, n // 2)
        with np.errstate(all="ignore"):
            wrong = c[at].astype(complex) + 100
            case.c[at] = wrong if t.kind == "c" else wrong.real.astype(np.float32).astype(t)
        assert not case.check().ok


@pytest.mark.parametrize("beta", [0, 1])
def test_wrong_bool(beta: int) -> None:
    """All rows of a small matrix are computed again."""
    a, b, before = (made(x, (33, 33), bool) & made(x, (33, 33), bool, 2) & made(x, (33, 33), bool, 3) for x in "ABC")
    c = multiplied(a, b, 1, beta, before)
    case = Case(a, b, c, before, PLACES[:3], (2, 2), options={"beta": beta})  # type: ignore[arg-type]
    assert case.check().ok
    case.c = c.copy()
    case.c[17, 30] ^= True
    verdict = case.check()
    assert not verdict.ok
    assert "C[17, 30]" in verdict.reason


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "bfloat16"])
@pytest.mark.parametrize("width", [8, 64])
def test_dropped_panel_of_one_tile_is_found(dtype: str, width: int) -> None:
    """A few k-indices missing in one tile of a product of ordinary size."""
    a, b = made("A", (300, 500), dtype), made("B", (500, 400), dtype)
    c = multiplied(a, b)
    c[:100, 100:200] -= multiplied(a[:100, :width], b[:width, 100:200])
    verdict = Case(a, b, c).check()
    assert not verdict.ok
    assert re.match(r"C\[\d?\d, 1\d\d\] is", verdict.reason)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("scale", usually(3, [1e-30, 200, 1e30, 1e-4, 1, 1e4], rest=nightly))
@pytest.mark.parametrize("kind", ["random", "constant"])
def test_right_results_are_never_blamed(dtype: str, scale: float, kind: str) -> None:
    """Overflow, underflow, errors that all have one sign."""
    t = parse_dtype(dtype)
    with np.errstate(all="ignore"):
        a, b = ((made(x, (70, 90), "float64") if kind == "random" else np.full((70, 90), 0.1)) * scale for x in "AB")
        a, b = a.astype(t), b.T.astype(t)
        before = a[:, :70]
        for alpha, beta in ((1, 0), (-0.3, 0.7), (1e-3, 0)):
            c = multiplied(a, b, alpha, beta, before, t)
            verdict = Case(a, b, c, before, options={"alpha": alpha, "beta": beta}).check()
            assert verdict.ok, verdict


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_infinity_that_no_sum_reaches_is_found(dtype: str) -> None:
    """Where sums come near to the largest number, which an overflow would need."""
    largest = np.finfo(dtype).maxexp
    a, b = np.full((9, 8), 2.0 ** (largest // 2), dtype), np.full((8, 7), 2.0 ** (largest // 2 - 6), dtype)
    c = a @ b
    assert np.isfinite(c).all() and Case(a, b, c).check().ok
    c[3, 4] = np.inf
    assert not Case(a, b, c).check().ok


@pytest.mark.parametrize("dtype", usually(2, ["float16", "complex64", "float32", "float64"], rest=nightly))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", "ABC")
def test_nan_and_inf_are_compared_by_pattern(dtype: str, value: float, where: str) -> None:
    """Touched rows pass if the pattern is right; a finite number in its place, or a NaN elsewhere, does not."""
    operands = {x: made(x, (50, 50), dtype) for x in "ABC"}
    operands[where][7, 9] = value
    a, b, before = operands.values()
    c = multiplied(a, b, 1, 1, before)
    case = Case(a, b, c, before, PLACES[:3], (2, 2), options={"beta": 1})  # type: ignore[arg-type]
    verdict = case.check()
    assert verdict.ok, verdict
    at = tuple(np.argwhere(~np.isfinite(c))[-1])
    case.c = c.copy()
    case.c[at] = 1
    assert not case.check().ok
    case.c = c.copy()
    case.c[3, 4] = np.nan
    assert not case.check().ok


def test_overflow_is_right_only_where_it_can_be() -> None:
    """float16 ends at 65504."""
    a = np.full((40, 64), 40, np.float16)
    c = multiplied(a, a.T)
    assert np.isinf(c).all()
    case = Case(a, a.T, c)
    assert case.check().ok
    case.c = np.full_like(c, -np.inf)
    assert not case.check().ok
    case.a, case.c = (a / 40).astype(np.float16), c
    assert not case.check().ok


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_sums_near_the_largest_number_are_looked_at(dtype: str, activation: str | None) -> None:
    """A finite element must be right; one that is not may have overflown on the way, where sums come near."""
    if activation and dtype.startswith("complex"):
        return
    largest = float(np.finfo(dtype).max)
    a, b = np.full((9, 4), 2.0, dtype), np.full((4, 7), largest / 16, dtype)
    b[:, 2], a[4] = 1, 2.125
    c = multiplied(a, b)  # about half of the largest number; 8 in column 2
    assert np.isfinite(c).all() and abs(c[0, 0]) > 0.4 * largest
    options = {"epilogue": Epilogue(activation=activation)} if activation else {}
    case = Case(a, b, c, options=options)
    assert case.check().ok
    for at, value, is_right in (
        ((3, 3), 7.0, False), ((3, 3), largest / 3, False), ((4, 2), c[0, 0], False), ((3, 3), -c[0, 0], False),
        ((4, 2), np.inf, False), ((3, 3), c[0, 0] * (1 + 1e-3), False), ((3, 3), c[0, 0] * (1 + 1e-16), True),
    ):
        case.c = c.copy()
        case.c[at] = value
        assert case.check().ok == is_right, (at, value)


@pytest.mark.parametrize("value", [3, 0])
def test_no_inner_dimension(value: int) -> None:
    """K = 0: C is beta·C0."""
    before = np.full((5, 6), value, np.float32)
    empty = np.empty((5, 0), np.float32), np.empty((0, 6), np.float32)
    assert Case(*empty, 2 * before, before, options={"beta": 2}).check().ok
    assert not Case(*empty, 2 * before + 1, before, options={"beta": 2}).check().ok
    assert Case(*empty, 0 * before).check().ok
    assert not Case(*empty, 0 * before + np.float32(1e-30)).check().ok


def test_conjugates_and_complex_scalars() -> None:
    """op conjugates."""
    a, b, before = (made(x, (30, 30), "complex64") for x in "ABC")
    alpha, beta = -1 - 2j, 0.5j
    c = (alpha * (a.conj() @ b.conj()) + beta * before).astype(np.complex64)
    options = {"alpha": alpha, "beta": beta, "conj_a": True, "conj_b": True}
    assert Case(a, b, c, before, options=options).check().ok
    assert not Case(a, b, c, before, options=options | {"conj_b": False}).check().ok


def test_alpha_zero_does_not_read_the_operands() -> None:
    """As in BLAS."""
    a = np.full((4, 4), np.nan, np.float32)
    assert Case(a, a, np.zeros((4, 4), np.float32), options={"alpha": 0}).check().ok
    assert not Case(a, a, np.ones((4, 4), np.float32), options={"alpha": 0}).check().ok


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64"])
def test_integers_wrap(dtype: str) -> None:
    """Exact modulo 2^w; half the modulus in two places of a row is found too, which signs would miss."""
    rng = np.random.default_rng(0)
    info = np.iinfo(dtype)
    a, b = (rng.integers(info.min, info.max, (40, 40), dtype, endpoint=True) for _ in "AB")
    c = a @ b
    assert Case(a, b, c).check().ok
    c[5, 3:5] ^= c.dtype.type(1 << (info.bits - 1) if info.min == 0 else info.min)
    verdict = Case(a, b, c).check()
    assert not verdict.ok
    assert "row 5" in verdict.reason


def test_partial_sums_add_up() -> None:
    """Every rank along the axis holds a summand."""
    a, b = made("A", (9, 8), "float32"), made("B", (8, 7), "float32")
    places = ("P('i', None, j=sum)", "P(None, None, i=sum)", "P('i', None, j=sum)")
    assert Case(a, b, a @ b, places=places, grid=(2, 3)).check().ok
    assert not Case(a, b, a @ b + 1, places=places, grid=(2, 3)).check().ok


def test_replicas_must_be_equal() -> None:
    """A wrong replica is found although another one answers for the elements."""
    a, b = made("A", (9, 8), "float32"), made("B", (8, 7), "float32")
    case = Case(a, b, a @ b, places=(PLACES[0], PLACES[0], "P('i', None)"), grid=(2, 2))
    assert case.check().ok

    def spoil(c: Matrix) -> None:
        if c.mesh.rank == 3:
            c.tile[0, 0] += 1

    assert case.check(spoil).reason == "replicas of C differ"


@pytest.mark.parametrize("place", ["P('i:skew(j)', None)", "P(None, 'i:skew(j)')"])
def test_replicas_of_skewed_parts_must_be_equal(place: str) -> None:
    """Each rank along the replicated axis holds another part then; a wrong element on any of them is found."""
    a, b = made("A", (9, 8), "float32"), made("B", (8, 7), "float32")
    case = Case(a, b, a @ b, places=(PLACES[0], PLACES[0], place), grid=(2, 2))
    assert case.check().ok
    for rank in range(4):

        def spoil(c: Matrix, rank: int = rank) -> None:
            if c.mesh.rank == rank:
                c.tile[0, 0] += 1

        assert not case.check(spoil).ok


def test_beta_needs_the_old_c() -> None:
    """A missing C0 is a mistake of the caller's."""
    x = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="before"):
        Case(x, x, x, options={"beta": 1}).check()


def spoils(case: Case, at: Any, value: Any) -> Verdict:
    """The verdict where some elements of C are others."""
    right = case.c
    case.c = right.copy()
    case.c[at] = value
    verdict = case.check()
    case.c = right
    return verdict


@pytest.mark.parametrize("dtype", usually(1, ["float32", "complex64", "bfloat16"], rest=nightly))
def test_rounding_of_a_long_sum_hides_nothing(dtype: str) -> None:
    """Errors of sums of terms of either sign grow as √k: nothing at all, half of k or one sign are no rounding."""
    a, b = made("A", (24, 65536), dtype), made("B", (65536, 20), dtype)
    case = Case(a, b, multiplied(a, b))
    assert case.check().ok
    assert not spoils(case, slice(None), 0).ok
    assert not spoils(case, slice(None), multiplied(a[:, :32768], b[:32768])).ok
    for at in ((3, 4), (23, 19)):
        verdict = spoils(case, at, -case.c[at])
        assert not verdict.ok and f"C[{at[0]}, {at[1]}]" in verdict.reason


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", "float16", "bfloat16"])
def test_one_wrong_element_of_many_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by ten times the largest rounding error, where most rows are looked at by sums with random signs only."""
    monkeypatch.setattr(verification_rows, "TERMS", 0)
    a, b = made("A", (260, 90), dtype), made("B", (90, 150), dtype)
    b = b * np.exp2(np.arange(150) % 7).astype(b.real.dtype)  # small columns are not hidden by others
    case = Case(a, b, multiplied(a, b), places=PLACES[:3], grid=(2, 2), options={"seed": 3})  # type: ignore[arg-type]
    verdict = case.check()
    assert verdict.ok and verdict.rows is not None and verdict.rows <= 64
    assert "of 260 rows computed again" in verdict.how
    wide = np.clongdouble if a.dtype.kind == "c" else np.longdouble
    exact = a.astype(wide) @ b.astype(wide)
    error = np.abs(case.c - exact).max(axis=0)
    for at in ((17, 11), (130, 70), (259, 149)):
        assert not spoils(case, at, exact[at] + 10 * error[at[1]]).ok
    assert not spoils(case, (slice(None), [5, 12]), case.c[:, [12, 5]]).ok
    assert not spoils(case, (slice(80), slice(80)), 0).ok


@pytest.mark.parametrize("dtype", usually(1, ["float32", "complex64", "float64", "float16", "bfloat16"], rest=nightly))
def test_what_is_done_with_each_product_finds_faults(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right product is looked at once, by sums of neighbours; whatever looks wrong is gone into, and is named."""
    monkeypatch.setattr(verification_rows, "TERMS", 0)
    a, b, old = made("A", (260, 600), dtype), made("B", (600, 150), dtype), made("C", (260, 150), dtype)
    alpha, beta = (2 - 1j, 1j) if a.dtype.kind == "c" else (2, -1.5)
    b = b * np.exp2(np.arange(150) % 7).astype(b.real.dtype)
    for c0, (x, y) in ((None, (1, 0)), (old, (alpha, beta))):
        options = {"seed": 3, "quick": True, "alpha": x, "beta": y}
        c = multiplied(a, b, x, y, c0)
        case = Case(a, b, c, c0, PLACES[:3], (2, 2), 1, options)  # type: ignore[arg-type]
        for seed in range(5):
            options["seed"] = seed
            verdict = case.check()
            assert verdict.ok and verdict.rows is None and "350 standard deviations" in verdict.odds
        wide = np.clongdouble if a.dtype.kind == "c" else np.longdouble
        exact = x * (a.astype(wide) @ b.astype(wide)) + y * old.astype(wide)
        error = np.sqrt((np.abs(c.astype(wide) - exact) ** 2).mean(axis=0))
        for row, col in ((17, 11), (130, 70), (259, 149)):
            verdict = spoils(case, (row, col), exact[row, col] + 500 * error[col])
            assert not verdict.ok and f"C[{row}, {col}] is" in verdict.reason
        assert not spoils(case, (slice(None), [5, 12]), c[:, [12, 5]]).ok
        assert not spoils(case, (slice(80), slice(80)), 0).ok
        assert not spoils(case, (200, 100), np.nan).ok
        assert not spoils(case, (slice(None), slice(None)), 0).ok
    monkeypatch.undo()
    assert case.check().how == "every element computed again"


def test_what_is_done_with_each_product_takes_no_nan_for_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands that hold some, and squares that are infinite or vanish, are gone into."""
    monkeypatch.setattr(verification_rows, "TERMS", 0)
    a, b = made("A", (260, 600), "float32"), made("B", (600, 150), "float32")
    spotted = a.copy()
    spotted[7, 7] = np.nan
    for left, right in ((spotted, b), (a * np.float32(1e30), b), (a * np.float32(1e-25), b)):
        case = Case(left, right, multiplied(left, right), options={"quick": True})
        verdict = case.check()
        assert verdict.ok and verdict.rows is not None
        assert not spoils(case, (100, 100), case.c[100, 100] * np.float32(1.5)).ok


def test_constant_matrices_are_right() -> None:
    """Where terms repeat, the roundings of a sum have one sign for long: no error, and no place to hide one."""
    a, b = np.full((3, 30000), 0.1, np.float32), np.full((30000, 4), 0.7, np.float32)
    c = np.cumsum(a[0] * b[:, 0])[-1] * np.ones((3, 4), np.float32)  # one after the other
    case = Case(a, b, c)
    assert case.check().ok
    assert not spoils(case, (1, 2), c[0, 0] * np.float32(1.3)).ok


def test_every_bool_is_looked_at() -> None:
    """One wrong element in a row of hundreds, wherever it is."""
    a, b = (
        made(x, shape, bool) & made(x, shape, bool, 2) & made(x, shape, bool, 3)
        for x, shape in (("A", (301, 20)), ("B", (20, 70)))
    )
    case = Case(a, b, multiplied(a, b), places=PLACES[:3], grid=(2, 3))  # type: ignore[arg-type]
    assert case.check().ok
    for row in range(0, 301, 60):
        assert f"C[{row}, 65]" in spoils(case, (row, 65), ~case.c[row, 65]).reason


@pytest.mark.parametrize("shape", [(16, 70), (9, 64), (4, 1), (0, 5)])
def test_a_transposed_bool_is_read_as_it_lies(shape: tuple[int, int]) -> None:
    """Tiles of transposed matrices, whose columns are contiguous."""
    a, b = made("A", (7, shape[0]), bool), np.asfortranarray(made("B", shape, bool))
    assert np.array_equal(_times(a, b), a.astype(int) @ b > 0)


@pytest.mark.parametrize("name", ["min_plus", "max_plus", "max_min"])
@pytest.mark.parametrize("dtype", ["float32", "int16", "bfloat16"])
def test_semirings_look_at_all_or_say_so(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong element of a product of ordinary size; of a large one what is beyond its group."""
    semiring = SEMIRINGS[name]
    a, b = made("A", (301, 9), dtype), made("B", (9, 70), dtype)
    working = accumulator(a.dtype)
    terms = semiring.multiply(a.astype(working)[:, :, None], b.astype(working)[None])
    c = semiring.add.reduce(terms, axis=1).astype(a.dtype)
    case = Case(a, b, c, None, PLACES[:3], (2, 2), options={"semiring": semiring})  # type: ignore[arg-type]
    for row in (0, 133, 300):
        assert f"C[{row}, 7]" in spoils(case, (row, 7), case.c[row, 7] + 1).reason
    monkeypatch.setattr(verification_rows, "TERMS", 0)
    verdict = case.check()
    assert verdict.ok and "64 of 301 rows" in verdict.how and "may go unseen" in verdict.odds
    beyond = -100 if semiring.reduction.order < 0 else 100
    assert not any(spoils(case, (row, 7), beyond).ok for row in range(0, 301, 50))


@pytest.mark.parametrize("name", TYPES)
def test_semirings_of_ones_own_are_verified_by_their_own_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong element of a small product; of a large one what the sums of groups show, where they are known to."""
    rng = np.random.default_rng(8)
    with registered():
        semiring = SEMIRINGS[name]
        a, b, before = (elements(rng, name, shape) for shape in ((201, 9), (9, 70), (201, 70)))
        c = semiring.add(semiring.add.reduce(semiring.multiply(a[:, :, None], b[None]), axis=1), before)
        options = {"semiring": semiring, "beta": 1}
        case = Case(a, b, c, before, PLACES[:3], (2, 3), options=options)  # type: ignore[arg-type]
        assert case.check().ok
        for seed in range(3):
            other = spoilt(np.random.default_rng(seed), c)
            row, col = np.argwhere((other != c) & (other == other))[0]
            assert f"C[{row}, {col}]" in spoils(case, (row, col), other[row, col]).reason
        monkeypatch.setattr(verification_rows, "TERMS", 0)
        verdict = case.check()
        assert verdict.ok and "64 of 201 rows" in verdict.how
        assert ("not compared" in verdict.how) == (semiring.distributes is Distributes.NOT_KNOWN)
        if name in ("xor_and", "parity"):  # no summand of a group hides another
            assert all("sum of a group" in reason or "C[" in reason for reason in (
                spoils(case, (row, 7), c[row, 7] ^ c.dtype.type(1)).reason for row in range(0, 201, 20)
            ))


def test_an_epilogue_hides_no_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of an ordinary product is computed again; a bias alone keeps the sums with random signs."""
    a, b, bias = made("A", (301, 60), "float32"), made("B", (60, 50), "float32"), made("C", (1, 50), "float32")[0]
    plain = multiplied(a, b) + bias
    for activation, c in (("relu", np.maximum(plain, 0)), (None, plain)):
        case = Case(a, b, c, options={"epilogue": Epilogue(bias, "column", activation)})
        assert case.check().ok
        assert not any(spoils(case, (row, 11), c[row, 11] + np.float32(1e-3)).ok for row in (1, 150, 299))
    monkeypatch.setattr(verification_rows, "TERMS", 0)
    assert not any(spoils(case, (row, 11), c[row, 11] + np.float32(1e-3)).ok for row in (1, 150, 299))
    assert case.check().ok
    case.c, case.options["epilogue"] = np.maximum(plain, 0), Epilogue(bias, "column", "relu")
    assert "not compared" in case.check().how

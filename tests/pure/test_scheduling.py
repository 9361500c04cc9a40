"""DISTAL's words: the algorithms of the paper against the registry, any words against NumPy, wrong words."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS
from rma_mm.dsl.scheduling import (
    BLOCKS,
    CANNON,
    PUMMA,
    SUMMA,
    Loops,
    product,
)
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.mesh import AXIS_NAMES, MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.schedule.algorithm import Algorithm, Layouts, PlacedProblem
from rma_mm.schedule.lowering.lower import lower
from rma_mm.schedule.ops import Broadcast, Copy, Multiply, Reduce, Shift
from rma_mm.schedule.schedule import Schedule
from rma_mm.schedule.verify.checker import verify
from tests.pure.test_schedules import LIMITS, assert_price_is_exact, limits, placed, run
from tests.strategies import cases, problems, pure
from tests.thorough import nightly, usually

SHAPES = ((24, 24, 24), (7, 11, 13), (5, 3, 2), (4, 4, 3000))

JOHNSON = (
    product(A="xy->x0y", B="xy->0yx", C="xy->xy0")
    .distribute(m="i", n="j", k="l").communicate("A", "B", "C", at="k")
)
"""As `johnson_3d`, where long parts of k go in panels. The paper sends them whole: at="start" and at="end"."""
SOLOMONIK = (
    product(A="xy->xy*", B="xy->xy*", C="xy->xy0")
    .distribute(m="i", n="j", k="l").divide("k").reorder("k")
    .communicate("A", "B", at="k").communicate("C", at="end")
)
"""As `solomonik_25d`, the SUMMA form. Here `*` asks for the copies of A and B; one at layer 0 is taken, as there."""
SOLOMONIK_ROTATED = (
    product(A="xy->xy0", B="xy->xy0", C="xy->xy0")
    .distribute(m="i", n="j", k="l").divide("k").reorder("k").rotate("k", by=("i", "j"))
    .communicate("A", "B", at="k").communicate("C", at="end")
)
"""As `solomonik_25d:cannon`: every layer does Cannon's algorithm on its part of k."""
SUMMA_A = (
    product(A="xy->xy", B="xy->yx", C="xy->xy")
    .distribute(m="i", k="j").divide("n").reorder("n").communicate("B", "C", at="n")
)
AGARWAL_LIKE = (
    product(A="xy->xy*", B="xy->*yx", C="xy->xy0")
    .distribute(m="i", n="j", k="l").communicate("A", "B", at="start").communicate("C", at="end")
)
TESSERACT = (
    product(A="xy->xyx", B="xy->xy*", C="xy->xyx")
    .distribute(m=("i", "l"), n="j").divide("k").reorder("k").communicate("A", "B", at="k")
)


def programs(algorithm: Algorithm, problem: PlacedProblem) -> list[list[str]]:
    """Every rank's operations as text."""
    schedule = lower(algorithm, problem)
    return [[str(op) for op in schedule.program(rank)] for rank in problem.mesh.ranks]


def needed(algorithm: Algorithm, mesh: MeshShape) -> Layouts:
    """The placements that a row asks for."""
    found = algorithm.placements(mesh) if algorithm.placements else ""
    assert not isinstance(found, str)
    a, b, c = found
    assert a and b and c
    return a, b, c


def operations(schedule: Schedule, kind: type) -> int:
    return sum(isinstance(op, kind) for rank in schedule.mesh.ranks for op in schedule.program(rank))


# -- the algorithms of the paper ------------------------------------------------------------------


@pytest.mark.parametrize("shape", usually(2, SHAPES, several=False, rest=nightly), ids=str)
@pytest.mark.parametrize("grid", [(2, 2), (2, 3), (3, 2), (3, 3), (2, 2, 2), (2, 3, 2), (3, 2, 4)], ids=str)
@pytest.mark.parametrize(
    ("name", "loops"),
    [
        ("summa_c", SUMMA),
        ("cannon", CANNON),
        ("pumma", PUMMA),
        ("johnson_3d", JOHNSON),
        ("solomonik_25d", SOLOMONIK),
        ("summa_a", SUMMA_A),
        ("tesseract", TESSERACT),
    ],
)
def test_the_same_schedule_as_the_registry(
    name: str, loops: Loops, grid: tuple[int, ...], shape: tuple[int, int, int]
) -> None:
    """Cannon on plain blocks (which it skews) and on skewed ones; the others where the registry's rows want them."""
    mesh, algorithm, known = MeshShape(grid), loops.algorithm("mine"), ALGORITHMS[name]
    if len(grid) != len(loops.axes):
        assert known.placements
        assert isinstance(known.placements(mesh), str) and isinstance(
            algorithm.placements and algorithm.placements(mesh), str
        )
        return
    for layouts in (needed(known, mesh), needed(algorithm, mesh)):
        problem = PlacedProblem(shape, mesh, layouts)
        assert programs(algorithm, problem) == programs(known, problem)


def test_what_the_passes_make_of_them() -> None:
    mesh = MeshShape((2, 2))
    problem = PlacedProblem((8, 8, 8), mesh, needed(SUMMA.algorithm("x"), mesh))
    summa, cannon, pumma = (lower(loops.algorithm("x"), problem) for loops in (SUMMA, CANNON, PUMMA))
    assert [operations(summa, kind) for kind in (Broadcast, Shift)] == [16, 0]
    assert [operations(cannon, kind) for kind in (Broadcast, Shift)] == [0, 8]
    assert [operations(pumma, kind) for kind in (Broadcast, Shift)] == [8, 4]


def test_solomonik_as_the_paper_has_it() -> None:
    """Every layer does Cannon's algorithm on windows of its own part of k, which come from layer 0."""
    mesh, algorithm = MeshShape((2, 2, 2)), SOLOMONIK_ROTATED.algorithm("x")
    assert algorithm.also_accepts
    assert algorithm.also_accepts(mesh)["A"] == parse_layout("i, (l, j:skew(i))", mesh)
    assert algorithm.also_accepts(mesh)["B"] == parse_layout("(l, i:skew(j)), j", mesh)
    schedule = lower(algorithm, PlacedProblem((8, 8, 16), mesh, needed(algorithm, mesh)))
    verify(schedule)
    assert [operations(schedule, kind) for kind in (Broadcast, Shift, Reduce)] == [0, 16, 8]


def test_the_axes_of_the_mesh_may_be_called_otherwise() -> None:
    mesh = MeshShape((2, 3), ("l", "i"))
    problem = PlacedProblem((6, 6, 12), mesh, placed(mesh, "l, i", "l, i", "l, i"))
    algorithm = CANNON.algorithm("x")
    assert algorithm.also_accepts
    assert algorithm.also_accepts(mesh)["A"] == parse_layout("l, i:skew(l)", mesh)
    assert algorithm.also_accepts(mesh)["B"] == parse_layout("l:skew(i), i", mesh)
    assert programs(algorithm, problem) == programs(ALGORITHMS["cannon"], problem)


def test_divided_into_parts_there_are_more_messages() -> None:
    mesh = MeshShape((2, 2))
    problem = PlacedProblem((8, 8, 2048), mesh, needed(SUMMA.algorithm("x"), mesh))
    whole, halves = (lower(loops.algorithm("x"), problem) for loops in (SUMMA, SUMMA.divide("k", 4)))
    assert operations(halves, Broadcast) == 4 * operations(whole, Broadcast)


def test_what_is_fetched_whole_comes_at_once() -> None:
    mesh = MeshShape((2, 2))
    problem = PlacedProblem((8, 8, 2048), mesh, needed(SUMMA.algorithm("x"), mesh))
    schedule = lower(SUMMA.communicate("A", at="start").algorithm("x"), problem)
    assert {op.step for op in schedule.program(1) if isinstance(op, Broadcast) and op.parts[0].buffer == "A"} == {0}


def fetched(loops: Loops, mesh: MeshShape, shape: tuple[int, int, int], rank: int, x: str) -> list[tuple[int, ...]]:
    """Sizes of what a rank gets of an operand from others, in order, in the one-sided form."""
    algorithm = loops.algorithm("x").pulled
    ops = lower(algorithm, PlacedProblem(shape, mesh, needed(algorithm, mesh), in_place="")).program(rank)
    pulled = [op for op in ops if isinstance(op, Copy) and op.dst.operand == x and op.src.rank != rank]
    return [tuple(map(len, op.src.region)) for op in pulled]


def test_operands_move_at_the_loop_where_they_are_communicated() -> None:
    """On 2x2 a rank has half of k of A and of B; it gets the other half in chunks, each at its own cut."""
    mesh, shape = MeshShape((2, 2), node_of_rank=(0, 1, 2, 3)), (8, 12, 96)
    grid = product().distribute(m="i", n="j")

    def sizes(loops: Loops) -> dict[str, list[tuple[int, ...]]]:
        return {x: fetched(loops, mesh, shape, 0, x) for x in "AB"}

    once = grid.divide("k", "X").reorder("ko").communicate("A", "B", at="ko")
    assert sizes(once) == {"A": [(4, 48)], "B": [(48, 6)]}
    twice = once.divide("ki", 4).reorder("ko", "kio").communicate("B", at="kio")
    assert sizes(twice) == {"A": [(4, 48)], "B": [(12, 6)] * 4}
    odd = grid.divide("k", 3).reorder("ko").communicate("A", "B", at="ko")
    assert sizes(odd) == {"A": [(4, 16), (4, 32)], "B": [(16, 6), (32, 6)]}  # the middle third has two owners
    panels = grid.split("k", 10).reorder("ko").communicate("A", "B", at="ko")
    assert sizes(panels)["A"] == [(4, 2), *[(4, 10)] * 4, (4, 6)]
    both = grid.split("k", 40).reorder("ko").split("ki", 20).reorder("ko", "kio").communicate("A", at="ko")
    assert sizes(both.communicate("B", at="k")) == {"A": [(4, 32), (4, 16)], "B": [(12, 6), (20, 6), (16, 6)]}


def test_panels_of_a_size_are_broadcast_one_by_one() -> None:
    mesh, shape = MeshShape((2, 2)), (8, 8, 4096)
    loops = product().distribute(m="i", n="j").split("k", 1500).reorder("ko").communicate("A", "B", at="ko")
    algorithm = loops.algorithm("x")
    program = lower(algorithm, PlacedProblem(shape, mesh, needed(algorithm, mesh))).program(0)
    moved = [op for op in program if isinstance(op, Broadcast) and op.parts[0].operand == "A"]
    assert [[len(ref.region[1]) for ref in op.parts] for op in moved] == [[1500], [548], [952], [1096]]
    steps = [op.step for op in program if isinstance(op, Multiply)]
    assert steps == [0, 1500, 3000]
    start = lower(
        loops.communicate("A", at="no").algorithm("x"), PlacedProblem(shape, mesh, needed(algorithm, mesh))
    ).program(0)
    assert {op.step for op in start if isinstance(op, Broadcast) and op.parts[0].operand == "A"} == {0}


def test_the_same_whatever_tensors_and_indices_are_called() -> None:
    """Factors in either order, a factor transposed: the row is that of op(A) · op(B)."""
    mesh = MeshShape((2, 3))
    named = product("Y(o,b) = X(b,i) * W(o,i)", X="xy->yx", W="xy->xy", Y="xy->xy").distribute(o="i", b="j")
    named = named.divide("i").reorder("i").communicate("X", "W", at="i").rotate("io", by=("oo", "bo"))
    assert (named.operands, named.options) == (("W", "X"), {"transpose_b": True})
    problem = PlacedProblem((12, 12, 24), mesh, needed(CANNON.algorithm("x"), mesh))
    assert programs(named.algorithm("x"), problem) == programs(CANNON.algorithm("x"), problem)


# -- any words ------------------------------------------------------------------------------------


@st.composite
def loops_of(draw: st.DrawFn) -> Loops:
    """Loops arranged by any words that go together."""
    axes = AXIS_NAMES[: draw(st.integers(1, 4))]
    entries = st.lists(st.sampled_from("xyxy0*"), min_size=len(axes), max_size=len(axes))
    a, b, c = ("xy->" + "".join(draw(entries)) for _ in "ABC")
    statement = draw(st.sampled_from(("C(m,n) = A(m,k) * B(k,n)", "C(m,n) = B(n,k) * A(k,m)")))
    over = draw(st.sampled_from("mnk"))
    work: dict[str, list[str]] = {}
    for axis in draw(st.permutations(axes)):
        work.setdefault(draw(st.sampled_from("mnk")), []).append(axis)
    loops = product(statement, A=a, B=b, C=c).distribute(**work)
    for word in draw(st.lists(st.sampled_from(("divide", "split")), max_size=2)):
        loops = getattr(loops, word)(over, draw(st.integers(1, 5)))
    loops = loops.divide(over) if not loops.loops.cuts and draw(st.booleans()) else loops
    cuts = loops.loops.outer(over)
    loops = loops.reorder(*(cuts or (over,)))
    for x in "ABC":
        level = draw(st.sampled_from(("", over, "end" if x == "C" else "start", *cuts)))
        loops = loops.communicate(x, at=level) if level else loops
    by = draw(st.lists(st.sampled_from(axes), unique=True))
    return loops.rotate(over, by) if by else loops


@pure(200)
@given(st.data(), loops_of(), LIMITS, st.booleans())
def test_any_words_multiply_as_numpy(data: st.DataObject, loops: Loops, changed: dict[str, int], pulls: bool) -> None:
    algorithm = loops.algorithm("any")
    case = data.draw(cases(algorithm.pulled if pulls else algorithm, max_ranks=12))
    with limits(changed):
        run(case, case.seed)


@pure(100)
@given(st.data(), loops_of(), st.booleans())
def test_any_words_are_priced_to_the_word(data: st.DataObject, loops: Loops, pulls: bool) -> None:
    algorithm = loops.algorithm("any")
    algorithm, problem = data.draw(
        problems(algorithm.pulled if pulls else algorithm, 12, extents=range(1, 31), recut=False)
    )
    assert algorithm is not None
    assert_price_is_exact(algorithm, replace(problem, in_place=""))


@pytest.mark.parametrize(
    "loops", [SUMMA, CANNON, PUMMA, JOHNSON, SOLOMONIK, SOLOMONIK_ROTATED, SUMMA_A, AGARWAL_LIKE, TESSERACT]
)
def test_each_of_these_multiplies_as_numpy(loops: Loops) -> None:
    @pure(20)
    @given(st.data(), LIMITS)
    def check(data: st.DataObject, changed: dict[str, int]) -> None:
        case = data.draw(cases(loops.algorithm("known"), max_ranks=18))
        with limits(changed):
            run(case, case.seed)

    check()


# -- wrong words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("say", "got", "fits"),
    [
        (lambda: product(A="xy->xy", B="xy->xy0", C="xy->xy"), "A 2, B 3, C 2", "all have as many"),
        (lambda: product(**dict.fromkeys("ABC", "xy->xyxyxyx")), "A 7", "one to 6"),
        (lambda: product(A="xy->xy", B="xy->xz", C="xy->xy"), "B: layout", "expected x, y, a coordinate or"),
        (lambda: product(A="xy->xy", B="xy->xy"), "placements of A, B", "the tensors are A, B, C"),
        (lambda: BLOCKS.distribute(m="i"), "nothing for the axis j", "each of i, j cuts one of m, n, k"),
        (BLOCKS.distribute, "nothing for the axis i, j", "each of i, j"),
        (lambda: BLOCKS.distribute(m="i", n="i"), "the axis i twice", "each of i, j"),
        (lambda: BLOCKS.distribute(m="i", n="l"), "'l'", "the axes i, j"),
        (lambda: BLOCKS.distribute(m="i", q="j"), "'q'", "the loops are m, n, k"),
        (lambda: SUMMA.divide("k", 0), "got 0", "whole number of at least 1"),
        (lambda: SUMMA.divide("q"), "'q'", "the loops are m, n, k"),
        (lambda: SUMMA.divide("m").algorithm("x"), "divide: got m", r"the loop in time is k; reorder\('m'\)"),
        (lambda: SUMMA.reorder("mn"), "'mn'", "the loops are m, n, k"),
        (lambda: SUMMA.reorder("n"), "A at k", "A moves in chunks at n, or is fetched whole at start"),
        (lambda: SUMMA.communicate("D", at="k"), "'D'", "the operands are A, B and C"),
        (lambda: SUMMA.communicate("A", at="ki"), "A at ki", "at k, or is fetched whole at start; or at ko"),
        (lambda: SUMMA.communicate("A", at="mo"), "A at mo", "in chunks at k, or is fetched whole at start"),
        (lambda: SUMMA.communicate("C", at="start"), "C at start", "in chunks at k, or leaves in one at end"),
        (lambda: SUMMA.rotate("m", by="i"), "rotate: got m", "the loop in time is k; only that one rotates"),
        (lambda: SUMMA.rotate("k", by=("l",)), "'l'", "the axes i, j"),
        (lambda: SUMMA.rotate("k", by=()), r"got \(\)", "the axes i, j"),
        (lambda: SUMMA.rotate("k", by="ii"), "'ii'", "each named once"),
        (lambda: product(7), "got 7", "the statement is a text"),  # type: ignore[arg-type]
        (lambda: SUMMA.divide("k", "Z"), "'Z'", "or of X, Y"),
        (lambda: SUMMA.divide("k"), "k without parts", "where owners change is the first cut"),
        (lambda: SUMMA.divide("ko", 2), "got ko", "it is cut already"),
        (lambda: SUMMA.divide("mo", 2), "got mo", "it is cut already"),
        (lambda: SUMMA.split("k", 0), "split: got 0", "whole number of at least 1"),
        (lambda: SUMMA.distribute(m="i", n="j"), "distributed or cut", "it comes first, and once"),
        (lambda: SUMMA.reorder("ki"), "got ki", "ki lies within ko"),
        (lambda: SUMMA.reorder("k", "ko"), r"\('k', 'ko'\)", "each once"),
        (lambda: SUMMA.reorder("mi", "ko"), "A at k", "A moves in chunks at m"),
        (
            lambda: product("C(k,n) = A(k,ko) * B(ko,n)").distribute(k="i", n="j"),
            "called ko", "call the index otherwise",
        ),
        (
            lambda: BLOCKS.distribute(m="i", n="j").divide("k", 2).communicate("A", at="ko"),
            "inside mi, ni", r"reorder\('ko'\)",
        ),
        (lambda: BLOCKS.algorithm("x"), "not distributed", r"distribute\(m=…, n=…\)"),
    ],
)
def test_wrong_words_are_refused(say: Callable[[], object], got: str, fits: str) -> None:
    with pytest.raises(AlgorithmError, match=got) as error:
        say()
    assert error.match(fits)


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("C(m,n) += A(m,k) * B(k,n)", 7, "out= and beta=1"),
        ("C(m,n) = A(m,k) * B(k,n) * D(n,n)", 25, "a third factor"),
        ("C(m,n) = A(m,k)", 15, "expected '*'"),
        ("C(m,n) = A(m,k) + B(k,n)", 16, "expected '*'"),
        ("y(m) = A(m,k) * x(k)", 0, "a vector is a matrix of one row or column"),
        ("C(b,m) = A(b,m,k) * B(k,b)", 9, "A has 3 indices"),
        ("C(m,n) = A(m,m) * B(m,n)", 13, "m twice in one matrix"),
        ("C(m,n) = A(m,n) * B(m,n)", 20, "m is in all three"),
        ("C(m,n) = A(m,k) * B(k,j)", 4, "n is in neither factor"),
        ("C(m,n) = A(m,k) * B(j,n)", 13, "k is in one factor only"),
        ("C(m,n) = A(m,n) * B(k,j)", 20, "k is in one factor only"),
        ("C(m,n) = B(m,k) * C(k,n)", 18, "C is the result"),
        ("C(m,n) = A(m;k) * B(k,n)", 12, "no meaning here"),
        ("C(m,n) = A(m,k) * B(k,n) + 1", 25, "behind the end"),
        ("", 0, "the name of a matrix"),
    ],
)
def test_statements_that_are_no_product_of_two_matrices(text: str, column: int, says: str) -> None:
    with pytest.raises(AlgorithmError) as error:
        product(text)
    first, shown, mark = str(error.value).splitlines()
    assert (shown, mark) == (f"  {text}", f"  {' ' * column}^")
    with pytest.raises(AlgorithmError) as error:
        product(f"\t{text}")
    assert str(error.value).splitlines()[2] == f"  \t{' ' * column}^"
    assert first.startswith("product: ") and says in first and first.endswith("as in C(m,n) = A(m,k) * B(k,n)")


def test_a_mesh_that_does_not_fit_is_a_reason() -> None:
    algorithm = SUMMA.algorithm("x")
    assert algorithm.placements
    assert "this one is 2x2x2" in str(algorithm.placements(MeshShape((2, 2, 2))))
    far = product(A="xy->xy3", B="xy->xy*", C="xy->xy0").distribute(m="i", n="j", k="l").algorithm("x")
    assert far.placements
    assert "got l=3; the axis has coordinates 0 to 1" in str(far.placements(MeshShape((2, 2, 2))))
    assert not isinstance(far.placements(MeshShape((1, 1, 4))), str)


def test_words_make_new_values() -> None:
    assert SUMMA.rotate("k", by="ij") == CANNON
    assert SUMMA.rotated == "" and CANNON.rotated == "k"


def test_what_is_neither_text_nor_list_is_refused_in_words() -> None:
    loops = product()
    for call, words in (
        (lambda: product(A=3, B="xy->xy", C="xy->xy"), "A: got 3; a placement is a text"),  # type: ignore[arg-type]
        (lambda: loops.distribute(m=3), "distribute: got 3"),  # type: ignore[arg-type]
        (lambda: loops.distribute(m="i", n="j").rotate("k", by=3), "rotate: got 3"),  # type: ignore[arg-type]
    ):
        with pytest.raises(AlgorithmError, match=words):
            call()


def test_earlier_places_and_names_still_work() -> None:
    for module, name in (("scheduling", "product"), ("signature", "signed")):
        with pytest.warns(DeprecationWarning, match=f"rma_mm.algorithms.{module} is now rma_mm.dsl.{module}"):
            old = importlib.reload(importlib.import_module(f"rma_mm.algorithms.{module}"))
        assert getattr(old, name) is getattr(importlib.import_module(f"rma_mm.dsl.{module}"), name)
    with pytest.warns(DeprecationWarning, match="row is now called algorithm"):
        assert SUMMA.row("mine").name == SUMMA.algorithm("mine").name == "mine"

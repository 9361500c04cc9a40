"""Choices of the planner: what moves least, what was asked for, and why the others lost."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.algorithms import ALGORITHMS, find_algorithm, list_algorithms
from rma_mm.algorithms.pblas import MOST_BLOCKS
from rma_mm.errors import AlgorithmError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.policy.planner.candidates import (
    CLOSE,
    FEW,
    Request,
    adds_in_any_order,
    candidates,
    choose,
    default_mesh,
    every_form,
    needs_pricing,
    placed_problem,
    single_layouts,
)
from rma_mm.policy.planner.tables import explain, table
from rma_mm.schedule.algorithm import same_place
from rma_mm.schedule.lowering.lower import lower
from rma_mm.schedule.verify.checker import verify
from tests.strategies import layouts, meshes, pure, some_mesh

NODE = MeshShape((2, 2))
APART = MeshShape((4, 4), node_of_rank=tuple(range(16)))
TWO_NODES = MeshShape((4, 4), node_of_rank=tuple(rank // 8 for rank in range(16)))


def texts(layouts: tuple[Layout, Layout, Layout] | None) -> list[str]:
    return [str(layout) for layout in layouts or ()]


# -- choices --------------------------------------------------------------------------------------


def test_squares_on_one_node_are_read_in_place() -> None:
    best, *_ = choose(Request((512, 512, 512), NODE))
    assert best.algorithm.name == "stationary_c"
    assert texts(best.layouts) == ["P('i', 'j')"] * 3
    words = best.traffic
    assert (words.between, words.within, words.messages) == (0, 0, 0)
    assert words.in_place == 2 * 512 * 512  # a/R · (C − 1)/C + b/C · (R − 1)/R, on four ranks


def test_few_algorithms_are_priced_for_what_takes_less_than_pricing_all() -> None:
    """Not where some of them may not serve: between nodes, by groups only, or in little memory."""
    brief = Request((64, 64, 64), NODE, is_brief=True)
    assert {each.algorithm.name for each in choose(brief)} == set(FEW)
    assert default_mesh(4, (64, 64, 64), is_brief=True) == default_mesh(4, (64, 64, 64))
    for all_of in (
        replace(brief, is_brief=False), replace(brief, mesh=TWO_NODES), replace(brief, prefer="two-sided"),
        replace(brief, memory=10**6),
    ):
        assert len(choose(all_of)) > len(ALGORITHMS)


def test_a_dominant_k_is_split_over_all_ranks() -> None:
    """algorithms.md §3 (b): one-dimensional in k while P ≤ K/max(M, N); only C moves."""
    best, *others = choose(Request((64, 64, 65536), TWO_NODES))
    assert best.layouts
    for layout, text, extent in zip(best.layouts, ("*, (i, j)", "(i, j)"), ((64, 65536), (65536, 64)), strict=False):
        assert same_place(layout, parse_layout(text, TWO_NODES), extent, TWO_NODES)
    assert best.algorithm.result in ("accumulate", "reduce")
    assert best.traffic.between + best.traffic.within == 15 * 64 * 64
    assert min(c.seconds for c in others if c.algorithm.name == "stationary_c") > 5 * best.seconds


@pytest.mark.parametrize(
    ("shape", "name", "kept"),
    [
        ((4096, 64, 4096), "stationary_a", 0),
        ((64, 4096, 4096), "stationary_b", 1),
        ((4096, 4096, 64), "stationary_c", 2),
    ],
)
def test_the_largest_operand_stays(shape: tuple[int, int, int], name: str, kept: int) -> None:
    """With blocks of all three given, the owner of the largest works."""
    place = parse_layout("i, j", TWO_NODES)
    found = {c.algorithm.name: c.seconds for c in choose(Request(shape, APART, (place,) * 3))}
    forms = [f"stationary_{x}" for x in "abc"]
    assert min(forms, key=found.__getitem__) == name == forms[kept]


def test_given_placements_are_kept() -> None:
    a = parse_layout("P('j:cyclic(3)', None, i=1)", NODE)
    for found in candidates(Request((8, 8, 8), NODE, (a, None, None))):
        assert found.rejected or (found.layouts and found.layouts[0] == a)


def test_deterministic_excludes_accumulation() -> None:
    found = choose(Request((64, 64, 65536), TWO_NODES, deterministic=True))
    assert found[0].algorithm.reproducible
    rejected = {c.algorithm.name for c in found if "deterministic=True" in c.rejected}
    assert rejected >= {"stationary_a", "stationary_b", "queue", "cosma:pull"}
    assert not rejected & {"stationary_c", "cosma", "row_parallel", "gemm_scatter"}
    with pytest.raises(AlgorithmError, match=r"queue: accumulates in no fixed order"):
        choose(Request((8, 8, 8), NODE, algorithm="queue", deterministic=True))


def test_srumma_says_what_would_fit() -> None:
    with pytest.raises(AlgorithmError, match=r"needs a mesh of two axes, as \(2, 3\); this one is \(4,\)"):
        choose(Request((8, 8, 8), MeshShape((4,)), algorithm="srumma"))
    given_a = (parse_layout("i, None", NODE), None, None)
    with pytest.raises(AlgorithmError) as error:
        choose(Request((8, 8, 8), NODE, given_a, algorithm="srumma"))
    for word in ("needs A placed as P('i', 'j')", "it is P('i', None)", "redistribute"):
        assert word in str(error.value)
    blocks = parse_layout("i, j", NODE)
    assert choose(Request((8, 8, 8), NODE, (blocks, None, blocks), algorithm="srumma"))[0].algorithm.name == "srumma"


def test_unknown_algorithm_lists_the_names() -> None:
    with pytest.raises(AlgorithmError) as error:
        choose(Request((8, 8, 8), NODE, algorithm="cannonball"))
    for name in ("cannonball", "auto", *ALGORITHMS):
        assert name in str(error.value)
    assert list_algorithms() == list(ALGORITHMS)
    assert all(find_algorithm(name).name == name for name in ALGORITHMS)


@pytest.mark.parametrize("shape", [(1, 2**50, 1), (0, 0, 2**50), (2**48, 3, 1), (70_000, 60, 50_000)])
def test_long_thin_matrices_are_cut_into_few_runs(shape: tuple[int, int, int]) -> None:
    """So that they are planned at once; the only rows that deal out blocks choose their size by the extents."""
    for name in ("pblas", "auto"):
        for candidate in candidates(Request(shape, NODE, algorithm=name)):
            for x, layout in zip("ABC", candidate.layouts or (), strict=False):
                extents = tuple(shape["mnk".index(dim)] for dim in {"A": "mk", "B": "kn", "C": "mn"}[x])
                assert max(len(span.runs) for span in layout.region(extents, NODE, 0)) <= MOST_BLOCKS, (x, layout)
    if max(shape) > 2**30:
        with pytest.raises(AlgorithmError, match="pblas:1: cyclic: got blocks of 1"):
            choose(Request(shape, NODE, algorithm="pblas:1"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_named_algorithm_is_the_only_candidate(name: str) -> None:
    found = choose(Request((8, 8, 8), some_mesh(ALGORITHMS[name]), algorithm=name))
    assert [c.algorithm.name for c in found] == [name]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    mesh = draw(meshes(12))
    m, n, k = (draw(st.sampled_from((0, 1, 7, 16))) for _ in range(3))
    a, b, c = (draw(st.none() | layouts(mesh, extents)) for extents in ((m, k), (k, n), (m, n)))
    return Request((m, n, k), mesh, (a, b, c), draw(st.booleans()), deterministic=draw(st.booleans()))


@pure(30)
@given(requests())
def test_what_is_chosen_is_cheapest_and_works(request: Request) -> None:
    if request.deterministic and adds_in_any_order(request.mesh, request.layouts):
        with pytest.raises(AlgorithmError, match="partial sums of A or B in no fixed order"):
            choose(request)
        return
    found = choose(request)
    serving = [c for c in found if not c.rejected]
    assert {c.algorithm.name for c in found} >= set(ALGORITHMS)
    least, closeness = min(c.seconds for c in serving), CLOSE if request.mesh.is_one_node else 1.0
    first = [c for c in serving if c.seconds <= closeness * least]
    listed = [algorithm.name for algorithm in every_form()]
    assert serving[: len(first)] == sorted(first, key=lambda c: listed.index(c.algorithm.name))
    assert [c.seconds for c in serving[len(first) :]] == sorted(c.seconds for c in serving[len(first) :])
    assert found[0].layouts
    for given_layout, layout in zip(request.layouts, found[0].layouts, strict=True):
        assert given_layout in (None, layout)
        assert given_layout or layout.is_single(request.mesh)
    verify(lower(found[0].algorithm, placed_problem(request, found[0].layouts)))


# -- meshes and placements ------------------------------------------------------------------------


def test_placements_left_open_hold_each_element_once() -> None:
    mesh = MeshShape((2, 3, 2))
    found = list(single_layouts(mesh))
    assert len(set(found)) == 4
    assert all(layout.is_single(mesh) and layout.split_axes == mesh.names for layout in found)
    assert str(next(single_layouts(NODE))) == "P('i', 'j')"


@pytest.mark.parametrize("size", [1, 2, 6, 7])
@pytest.mark.parametrize("shape", [(512, 512, 512), (64, 64, 65536), (4096, 64, 64), (0, 5, 3)])
def test_default_mesh_uses_every_rank(size: int, shape: tuple[int, int, int]) -> None:
    grid = default_mesh(size, shape)
    assert len(grid) == 2
    assert prod(grid) == size


def test_default_mesh_is_square_for_squares() -> None:
    assert default_mesh(4, (512, 512, 512)) == (2, 2)
    assert sorted(default_mesh(6, (512, 512, 512))) == [2, 3]
    assert default_mesh(9, (512, 512, 512)) == (3, 3)


# -- the table ------------------------------------------------------------------------------------


def test_what_was_found_is_remembered() -> None:
    request = Request((113, 57, 91), NODE)
    assert needs_pricing(request)
    first = candidates(request)
    assert not needs_pricing(request)
    assert candidates(request) == first


def test_the_table_has_every_row_and_a_reason() -> None:
    found = choose(Request((64, 64, 65536), TWO_NODES, deterministic=True))
    head, line, *rows = explain(found, found[0], "auto").splitlines()
    assert head.startswith("algorithm") and head.endswith("why")
    assert set(line) == {"-"}
    same = [row for row in rows if row.startswith("the same as ")]
    rows = rows[: len(rows) - len(same)]
    also = [name for row in same for name in row.partition(": ")[2].split(", ")]
    assert {*(row.split()[0] for row in rows), *also} == {c.algorithm.name for c in found} >= set(list_algorithms())
    assert len(rows) + len(also) == len(found)
    assert all(len(row) > head.index("why") for row in rows)
    assert "chosen: the fastest" in rows[0]
    assert all("cannot: accumulates" in row for row in rows if row.startswith(("queue", "stationary_a")))


def test_reasons() -> None:
    found = choose(Request((512, 512, 512), NODE))
    text = explain(found, found[0], "auto")
    assert "the same as stationary_c: " in text and "srumma" in text
    assert "slower: transfers +" in text
    assert "chosen: it was named" in explain(found[:1], found[0], "stationary_c")
    dearest = [c for c in found if not c.rejected][-1]
    assert "does not fit the memory limit" in explain(found, dearest, "auto")


def test_table_aligns_columns() -> None:
    assert table([["a", "bb"], ["ccc", "d"]]).splitlines() == ["a    bb", "-------", "ccc  d"]


@pytest.mark.parametrize("name", ["column_parallel", "column_parallel:pull", "data_parallel", "mixed_2d", "cannon"])
@pytest.mark.parametrize("text", ["j, *", "*, j", "*, *, j=0", "*, *"])
def test_a_c_that_is_everywhere_is_so_however_it_says_it(name: str, text: str) -> None:
    """On an axis of one rank a cut, or a pin, is none: every rank gets all of C."""
    mesh = MeshShape((3, 1))
    a = parse_layout("*, *", mesh) if name.startswith("column") else None
    request = Request((6, 6, 6), mesh, (a, None, parse_layout(text, mesh)), algorithm=name)
    found = choose(request)[0]
    assert found.layouts
    verify(lower(found.algorithm, placed_problem(request, found.layouts)))

"""Placements: every element in its place, on any mesh; what is refused, and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import Layout, everywhere
from rma_mm.geometry.level import MOST_BLOCKS, Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.span import Region, Span
from tests.reference import collect, distribute, nothing, whole_numbers
from tests.strategies import layouts, meshes, pure, seeds

MESH = MeshShape((2, 3))


@st.composite
def placements(draw: st.DrawFn, **kept: Any) -> tuple[MeshShape, tuple[int, int], Layout]:
    """A mesh, the shape of a matrix, and a placement of it."""
    mesh = draw(meshes())
    shape = draw(st.tuples(st.integers(0, 15), st.integers(0, 15)))
    return mesh, shape, draw(layouts(mesh, shape, **kept))


Placement = tuple[MeshShape, tuple[int, int], Layout]


def counted(shape: tuple[int, ...], regions: list[Region]) -> Any:
    """How often each element is in one of the regions."""
    count = np.zeros(shape, int)
    for region in regions:
        count[np.ix_(*(span.indices for span in region))] += 1
    return count


# -- who owns what --------------------------------------------------------------------------------


@pure(80)
@given(placements(), st.data())
def test_overlapping_covers_every_element_once(placement: Placement, data: st.DataObject) -> None:
    mesh, shape, layout = placement
    inner = Region(Span(data.draw(st.lists(st.tuples(*[st.integers(0, n)] * 2), max_size=3))) for n in shape)
    near = data.draw(st.integers(0, mesh.size - 1))
    for region in (Region.whole(shape), inner):
        found = layout.overlapping(shape, mesh, region, near)
        parts = [part for _, part in found]
        assert np.array_equal(counted(shape, parts), counted(shape, [region]))
        for owner, part in found:
            assert part
            assert part.issubset(layout.region(shape, mesh, owner))
            assert all(mesh.coords(owner)[axis] == mesh.coords(near)[axis] for axis in layout.partial)


@pure(80)
@given(placements())
def test_what_is_held_overlaps_with_oneself(placement: Placement) -> None:
    """A rank that holds a region is asked for it itself, and otherwise a node-mate that does."""
    mesh, shape, layout = placement
    for rank in mesh.ranks:
        home = layout.region(shape, mesh, rank)
        if home:
            assert layout.overlapping(shape, mesh, home, rank) == [(rank, home)]
    if layout.partial or layout.skew_axes or layout.pins:
        return
    for owner, part in layout.overlapping(shape, mesh, Region.whole(shape), 0):
        holders = [rank for rank in mesh.ranks if part.issubset(layout.region(shape, mesh, rank))]
        near = any(mesh.node_of_rank[rank] == mesh.node_of_rank[0] for rank in holders)
        assert not near or mesh.node_of_rank[owner] == mesh.node_of_rank[0]


@pure(80)
@given(placements(), seeds)
def test_tiles_make_up_the_matrix(placement: Placement, seed: int) -> None:
    """Each replica holds each element once for each summand; the helpers of the tests agree with that."""
    mesh, shape, layout = placement
    rng = np.random.default_rng(seed)
    x = whole_numbers(rng, shape)
    assert np.array_equal(collect(distribute(x, layout, mesh, rng), layout, mesh, shape), x)
    assert [tile.shape for tile in nothing(layout, mesh, shape)] == [
        layout.region(shape, mesh, rank).shape for rank in mesh.ranks
    ]


@pure(60)
@given(placements())
def test_transposed_placement(placement: Placement) -> None:
    mesh, shape, layout = placement
    layout.T.check(shape[::-1], mesh)
    assert layout == layout.T.T
    for rank in mesh.ranks:
        assert layout.T.region(shape[::-1], mesh, rank) == layout.region(shape, mesh, rank).T


@pure(80)
@given(placements())
def test_single_and_unshared(placement: Placement) -> None:
    mesh, shape, layout = placement
    single, unshared = layout.single(mesh), layout.split_replicas(mesh)
    assert single.is_single(mesh)
    spare = (*layout.replicated_axes(mesh), *layout.partial)
    assert layout.is_single(mesh) == all(mesh.axis_size(axis) == 1 for axis in spare)
    assert (counted(shape, [single.region(shape, mesh, rank) for rank in mesh.ranks]) == 1).all()
    assert unshared.partial == layout.partial
    assert not unshared.replicated_axes(mesh)
    for made in (single, unshared):
        made.check(shape, mesh)
        for rank in mesh.ranks:
            part, home = made.region(shape, mesh, rank), layout.region(shape, mesh, rank)
            assert part.issubset(home)


@pure(60)
@given(placements(skew=False, kinds=("even",)))
def test_replicas_share_out_dense_parts(placement: Placement) -> None:
    """What a replica takes of an even tile lies in one piece in that tile's memory."""
    mesh, shape, layout = placement
    for rank in mesh.ranks:
        part, home = layout.split_replicas(mesh).region(shape, mesh, rank), layout.region(shape, mesh, rank)
        assert not part or home.locate(part).is_contiguous


def test_ranks_beyond_the_mesh_and_off_a_pin_hold_nothing() -> None:
    layout = parse_layout("P('i', None, j=1)", MESH)
    assert not layout.region((4, 4), MESH, 6)
    assert [rank for rank in MESH.ranks if layout.region((4, 4), MESH, rank)] == [1, 4]
    assert layout.holds(MESH.coords(4)) and not layout.holds(MESH.coords(3))
    assert layout.overlapping((4, 4), MESH, Region.whole((4, 4)), 17) == [
        (1, Region.box((0, 2), (0, 4))),
        (4, Region.box((2, 4), (0, 4))),
    ]


def test_everywhere() -> None:
    assert all(everywhere().region((3, 4), MESH, rank) == Region.whole((3, 4)) for rank in MESH.ranks)
    assert everywhere(3) == Layout(((), (), ()))


# -- cuts -----------------------------------------------------------------------------------------


def rows(text: str, extent: int, mesh: MeshShape = MESH) -> list[list[int]]:
    """The rows that each rank holds, without neighbours that hold the same."""
    layout = parse_layout(text, mesh)
    layout.check((extent, 1), mesh)
    return [layout.region((extent, 1), mesh, rank)[0].indices.tolist() for rank in mesh.ranks]


@pytest.mark.parametrize(
    ("text", "extent", "wanted"),
    [
        ("i", 5, [[0, 1], [2, 3, 4]]),
        ("i:cyclic(2)", 7, [[0, 1, 4, 5], [2, 3, 6]]),
        ("i:weights(1, 3)", 8, [[0, 1], [2, 3, 4, 5, 6, 7]]),
        ("i:weights(0, 3)", 3, [[], [0, 1, 2]]),
        ("i:bounds(0, 1, 4)", 4, [[0], [1, 2, 3]]),
        ("i", 1, [[], [0]]),
    ],
)
def test_cuts(text: str, extent: int, wanted: list[list[int]]) -> None:
    assert rows(text, extent, MeshShape((2,))) == wanted


def test_cuts_one_after_the_other_and_axes_taken_together() -> None:
    assert rows("(i, j)", 6) == rows("i+j", 6) == [[0], [1], [2], [3], [4], [5]]
    assert rows("(j, i)", 6) == [[0], [2], [4], [1], [3], [5]]
    assert rows("(i:cyclic(1), j)", 6) == [[0], [2], [4], [1], [3], [5]]
    assert rows("i+j:cyclic(1)", 8) == [[0, 6], [1, 7], [2], [3], [4], [5]]


def test_cannons_windows() -> None:
    """Circular windows of k, shifted by i · K/R: on 2 × 3, columns 0:2, 2:4, 4:6 and 3:5, 5:1, 1:3."""
    layout = parse_layout("i, j:skew(i)", MESH)
    held = [layout.region((2, 6), MESH, rank)[1].indices.tolist() for rank in MESH.ranks]
    assert held == [[0, 1], [2, 3], [4, 5], [3, 4], [0, 5], [1, 2]]


def test_columns_of_ranks_cut_their_rows_each_in_another_way() -> None:
    layout = parse_layout("i:bounds(0, 1, 4, 0, 3, 4, 0, 4, 4):skew(j), j", MESH)
    layout.check((4, 6), MESH)
    held = [layout.region((4, 6), MESH, rank) for rank in MESH.ranks]
    assert [len(region[0]) for region in held] == [1, 3, 4, 3, 1, 0]
    turned = [layout.T.region((6, 4), MESH, rank) for rank in MESH.ranks]
    assert [(cols, rows) for rows, cols in turned] == [tuple(region) for region in held]
    wanted = Region((Span.range(0, 4), Span.range(0, 6)))
    given = layout.overlapping((4, 6), MESH, wanted, 0)
    assert sorted((rank, part.size) for rank, part in given) == [(0, 2), (1, 6), (2, 8), (3, 6), (4, 2)]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("P('i', 'i')", ["'i'", "used twice"]),
        ("P('i', None, i=sum)", ["'i'", "used twice"]),
        ("P(None, None, i=2)", ["i=2", "0 to 1"]),
        ("P('i:weights(1, 2, 3)', None)", ["got 3 for 2 parts", "one is needed per part"]),
        ("P('i:bounds(0, 4)', None)", ["(0.0, 4.0)", "3 ascending bounds", "from 0 to 4"]),
        ("P('i:bounds(0, 3, 5)', None)", ["from 0 to 4"]),
        ("P('i:bounds(0, 5, 4)', None)", ["ascending"]),
        ("P('i:bounds(1, 2, 4)', None)", ["from 0 to 4"]),
        ("P(('i', 'j:bounds(0, 1, 1, 2)'), None)", ["first cut"]),
        ("P('i:bounds(0, 2, 4, 0, 1, 4):skew(j)', 'j')", ["3 ascending", "or 3 such lists one behind"]),
        ("P('i:bounds(0, 2, 4, 0, 1, 4):skew(l)', 'j')", ["the axis 'l'"]),
        ("P('i:bounds(0, 2, 4, 0, 1, 4)', 'j')", ["3 ascending bounds are needed, from 0 to 4"]),
        ("P('i:bounds(0, 2, 4, 0, 1, 4, 1, 2, 4):skew(j)', 'j')", ["from 0 to 4"]),
        ("P('i:skew(i)', None)", ["do not cut it"]),
        ("P('i:skew(j)', 'j:skew(i)')", ["only one dimension may be skewed"]),
    ],
)
def test_check_refuses(text: str, words: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text, MESH).check((4, 4), MESH)
    for word in words:
        assert word in str(error.value)


def test_check_refuses_other_meshes_and_dimensions() -> None:
    with pytest.raises(LayoutError, match=r"got the axis 'l'; the mesh 2x3 has the axes i, j"):
        parse_layout("l", MeshShape((2, 2, 2))).check((4, 4), MESH)
    with pytest.raises(LayoutError, match=r"got 2 dimensions; the shape \(4,\) has 1"):
        parse_layout("i", MESH).check((4,), MESH)


def test_check_refuses_more_blocks_than_can_be_looked_at() -> None:
    layout = parse_layout("P(None, 'i:cyclic(2)')", MESH)
    layout.check((1, 2 * MOST_BLOCKS), MESH)
    with pytest.raises(LayoutError, match=rf"blocks of 2 for {2**40} indices.*a block has {2**20} indices or more"):
        layout.check((0, 2**40), MESH)


@pytest.mark.parametrize(
    "level",
    [
        Level(("i",), "weights", (0, 0)),
        Level(("i",), "weights", (-1, 2)),
        Level(("i",), "weights", (float("inf"), 1)),
        Level(("i",), "cyclic", (0,)),
        Level(("i",), "cyclic", ()),
        Level(("i",), "bounds", (0, 1.5, 4)),
    ],
    ids=str,
)
def test_check_refuses_arguments_made_by_hand(level: Level) -> None:
    with pytest.raises(LayoutError):
        Layout(((level,), ())).check((4, 4), MESH)

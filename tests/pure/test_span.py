"""Spans against Python sets, and the boxes that they make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.geometry.span import EMPTY, Region, Span, even_part
from tests.strategies import pure, spans


def members(span: Span) -> set[int]:
    """The indices, run by run."""
    return {index for a, b in span.runs for index in range(a, b)}


def is_normal(span: Span) -> bool:
    """Whether the runs are sorted, not empty, and do not touch."""
    edges = [edge for run in span.runs for edge in run]
    return edges == sorted(set(edges))


# -- set algebra ----------------------------------------------------------------------------------


@pure(200)
@given(spans(), spans())
def test_algebra_is_that_of_sets(one: Span, two: Span) -> None:
    a, b = members(one), members(two)
    for span, wanted in ((one & two, a & b), (one | two, a | b), (one - two, a - b)):
        assert members(span) == wanted
        assert is_normal(span)
    assert one.issubset(two) == (a <= b)
    assert (one == two) == (a == b)
    assert one != two or hash(one) == hash(two)


@pure(100)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_runs_are_joined_and_sorted(runs: list[tuple[int, int]]) -> None:
    span = Span(runs)
    assert is_normal(span)
    assert members(span) == {index for a, b in runs for index in range(a, b)}


@pure(100)
@given(spans())
def test_what_a_span_says_of_itself(span: Span) -> None:
    inside = sorted(members(span))
    assert len(span) == len(inside)
    assert bool(span) == bool(inside)
    assert span.indices.tolist() == inside
    assert span.indices.dtype == np.int64
    assert span.stop == (inside[-1] + 1 if inside else 0)
    if inside:
        assert span.start == inside[0]
    assert span.is_contiguous == (inside == list(range(span.stop - len(inside), span.stop)))
    if span.is_contiguous:
        assert np.arange(50)[span.as_slice()].tolist() == inside


def test_equal_spans_are_one_key() -> None:
    assert len({Span([(0, 2), (2, 4)]), Span.range(0, 4), Span([(1, 4), (0, 3)])}) == 1
    assert Span.range(0, 4) != (0, 4)


# -- positions ------------------------------------------------------------------------------------


@pure(200)
@given(spans(), spans())
def test_locate_and_take_are_inverse(span: Span, other: Span) -> None:
    part = span & other
    where = span.locate(part)
    assert where.issubset(Span.range(0, len(span)))
    assert span.indices[where.indices].tolist() == part.indices.tolist()
    assert span.take(where) == part


@pure(200)
@given(spans(), spans())
def test_take_picks_positions(span: Span, positions: Span) -> None:
    positions &= Span.range(0, len(span))
    part = span.take(positions)
    assert is_normal(part)
    assert part.indices.tolist() == span.indices[positions.indices].tolist()
    assert span.locate(part) == positions


def test_locate_refuses_what_is_not_inside() -> None:
    with pytest.raises(AssertionError, match="not within"):
        Span([(0, 2), (4, 6)]).locate(Span.range(1, 5))


@pure(100)
@given(spans(), st.integers(0, 50))
def test_pieces_are_few_even_and_in_order(span: Span, width: int) -> None:
    pieces = span.pieces(width)
    lengths = [len(piece) for piece in pieces]
    assert [index for piece in pieces for index in piece.indices] == span.indices.tolist()
    assert len(pieces) == -(-len(span) // max(1, width))
    assert not pieces or (max(lengths) <= max(1, width) and max(lengths) - min(lengths) <= 1 and min(lengths))


# -- constructors ---------------------------------------------------------------------------------


@pure(100)
@given(st.integers(0, 40), st.integers(1, 7), st.integers(1, 6))
def test_cyclic_deals_out_blocks(extent: int, block: int, parts: int) -> None:
    dealt = [Span.cyclic(extent, block, parts, index) for index in range(parts)]
    for index, span in enumerate(dealt):
        assert members(span) == {x for x in range(extent) if x // block % parts == index}
        assert is_normal(span)


@pure(100)
@given(st.integers(0, 40), st.integers(-50, 90), st.data())
def test_window_goes_round(extent: int, start: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, extent))
    span = Span.window(extent, start, length)
    assert members(span) == {(start + x) % extent for x in range(length)}
    assert is_normal(span)


@pure(100)
@given(st.integers(0, 60), st.integers(1, 20))
def test_even_parts(extent: int, count: int) -> None:
    parts = [even_part(extent, index, count) for index in range(count)]
    lengths = [len(part) for part in parts]
    assert [index for part in parts for index in part.indices] == list(range(extent))
    assert max(lengths) - min(lengths) <= 1


# -- text -----------------------------------------------------------------------------------------


def test_text() -> None:
    assert repr(Span.range(2, 5)) == "Span(2:5)"
    assert repr(EMPTY) == "Span()"
    assert str(EMPTY) == "empty"
    assert str(Span([(0, 2), (4, 6)])) == "0:2,4:6"
    assert str(Span.cyclic(24, 2, 2, 1)) == "2+2/4*6"
    assert str(Span([(0, 2), (5, 7), (9, 11)])) == "0:2,5:7,9:11"
    assert str(Span.cyclic(23, 2, 2, 1)) == "2:4,6:8,10:12,14:16,18:20,22:23"


def test_text_of_unequal_blocks() -> None:
    """Span.__str__ compares the sum of the lengths only, and prints 0+2/10*3."""
    assert str(Span([(0, 2), (10, 11), (20, 23)])) == "0:2,10:11,20:23"


# -- regions --------------------------------------------------------------------------------------

boxes = st.tuples(spans(12), spans(12)).map(Region)


def points(region: Region) -> set[tuple[int, ...]]:
    return {(x, y) for x in members(region[0]) for y in members(region[1])}


@pure(150)
@given(boxes, boxes)
def test_boxes_are_sets_of_points(one: Region, two: Region) -> None:
    assert points(one & two) == points(one) & points(two)
    assert isinstance(one & two, Region)
    assert one.issubset(two) == (points(one) <= points(two))
    assert one.size == len(points(one)) == one.shape[0] * one.shape[1]
    assert bool(one) == bool(points(one))
    assert points(one.T) == {(y, x) for x, y in points(one)}


@pure(100)
@given(boxes, boxes)
def test_regions_select_from_local_arrays(home: Region, other: Region) -> None:
    """`home.locate(part).selector()` finds `part` in the dense array of `home`."""
    part = home & other
    matrix = np.arange(144).reshape(12, 12)
    local = matrix[np.ix_(home[0].indices, home[1].indices)]
    where = home.locate(part)
    wanted = matrix[np.ix_(part[0].indices, part[1].indices)]
    assert np.array_equal(local[where.selector()], wanted)
    if where.is_contiguous:
        assert np.shares_memory(local[where.selector()], local) or not part


@pure(100)
@given(boxes)
def test_run_boxes_cover_once(region: Region) -> None:
    plain = list(region.run_boxes())
    assert all(box.is_contiguous and box for box in plain)
    assert points(region) == set().union(*(points(box) for box in plain))
    assert region.size == sum(box.size for box in plain)


def test_region_constructors_and_text() -> None:
    assert Region.whole((2, 3)) == Region.box((0, 2), (0, 3))
    assert repr(Region.box((0, 2), (3, 3))) == "Region(0:2 x empty)"
    assert Region.box((0, 2), (0, 3), (1, 4)).size == 18

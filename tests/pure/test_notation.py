"""Layouts as text: every form, there and back, and errors that point at the character."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import LayoutError, MeshError
from rma_mm.geometry import notation
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import notations, parse_layout
from rma_mm.geometry.span import Region, Span
from tests.strategies import layouts, meshes, pure

MESH = MeshShape((2, 2, 2))
FLAT = MeshShape((2, 3))


@st.composite
def written(draw: st.DrawFn) -> tuple[MeshShape, Layout]:
    mesh = draw(meshes())
    return mesh, draw(layouts(mesh, draw(st.tuples(st.integers(0, 20), st.integers(0, 20)))))


@pure(150)
@given(written())
def test_text_and_back(case: tuple[MeshShape, Layout]) -> None:
    mesh, layout = case
    text = str(layout)
    assert parse_layout(text, mesh) == layout
    assert parse_layout(text[2:-1].replace("'", ""), mesh) == layout  # as on a command line
    assert parse_layout(text.replace("'", '"').replace("None", "*").replace(" ", ""), mesh) == layout
    assert str(parse_layout(text, mesh)) == text


@pytest.mark.parametrize("share", [0.5, 1e-7, 12345678.25, 1e22, 3])
def test_any_weight_is_written_in_full(share: float) -> None:
    layout = Layout(((Level(("i",), "weights", (share, 1.0)),), ()))
    assert parse_layout(str(layout), MESH) == layout


def test_work_maps_have_three_dimensions() -> None:
    text = "P('i', ('l', 'j'), None)"
    assert str(parse_layout(text, MESH, dims=3)) == text
    assert len(parse_layout("i", MESH, dims=3).splits) == 3


def _level(*axes: str, **kept: object) -> Level:
    return Level(axes, **kept)  # type: ignore[arg-type]


ROWS, COLS = _level("i"), _level("j")
FORMS = {
    "P('i', 'j')": Layout(((ROWS,), (COLS,))),
    "P('i', ('l', 'j'))": Layout(((ROWS,), (_level("l"), COLS))),
    "P(None, 'j')": Layout(((), (COLS,))),
    "P('i:cyclic(32)', None)": Layout(((_level("i", kind="cyclic", args=(32,)),), ())),
    "P('i:cyclic(32, 5, 1)', None)": Layout(((_level("i", kind="cyclic", args=(32, 5, 1)),), ())),
    "P('i+j:cyclic(32)', None)": Layout(((_level("i", "j", kind="cyclic", args=(32,)),), ())),
    "P('i:weights(1, 2)', None)": Layout(((_level("i", kind="weights", args=(1, 2)),), ())),
    "'i:bounds(0, 10, 30)'": Layout(((_level("i", kind="bounds", args=(0, 10, 30)),), ())),
    "P('i', 'j:skew(i)')": Layout(((ROWS,), (_level("j", skew=("i",)),))),
    "P('i:bounds(0, 9, 30, 0, 20, 30):skew(j)', 'j')": Layout(
        ((_level("i", kind="bounds", args=(0, 9, 30, 0, 20, 30), skew=("j",)),), (_level("j"),))
    ),
    "P('i', 'j', l=0)": Layout(((ROWS,), (COLS,)), pins=(("l", 0),)),
    "P('i', None, j=sum)": Layout(((ROWS,), ()), partial=("j",)),
    "i,j": Layout(((ROWS,), (COLS,))),
    "P('m', 'k') on m=2, k=3": Layout(((_level("m"),), (_level("k"),)), grid=MeshShape((2, 3), ("m", "k"))),
    "(S(0), B, P)": Layout(((ROWS,), ()), partial=("l",)),
    "[(0,1),()]": Layout(((ROWS, COLS), ())),
    "xy->xy0": Layout(((ROWS,), (COLS,)), pins=(("l", 0),)),
    "desc(100, 80, 32, 16, 0, 0)": Layout(
        ((_level("i", kind="cyclic", args=(32,)),), (_level("j", kind="cyclic", args=(16,)),))
    ),
    "sbp: S(0), B, P": Layout(((ROWS,), ()), partial=("l",)),
}
"""The forms of the module's docstring."""

MORE = {
    "P()": Layout(((), ())),
    "*": Layout(((), ())),
    "*,j": Layout(((), (COLS,))),
    "i": Layout(((ROWS,), ())),
    '  P( "i" ,"j" )  ': Layout(((ROWS,), (COLS,))),
    "P('i', 'j',)": Layout(((ROWS,), (COLS,))),
    "i=sum, l=1": Layout(((), ()), (("l", 1),), ("i",)),
    "(i,), ()": Layout(((ROWS,), ())),
    "j:cyclic(2):skew(i, l)": Layout(((_level("j", kind="cyclic", args=(2,), skew=("i", "l")),), ())),
    "j:skew(i):cyclic(2)": Layout(((_level("j", kind="cyclic", args=(2,), skew=("i",)),), ())),
    "i:weights(0.5, 1e1)": Layout(((_level("i", kind="weights", args=(0.5, 10)),), ())),
    "i:cyclic(4, 0)": Layout(((_level("i", kind="cyclic", args=(4, 0)),), ())),
    "S(1), S(1), S(0)": Layout(((_level("l"),), (ROWS, COLS))),
    " ( P ,B, S( 0 ) , ) ": Layout(((_level("l"),), ()), partial=("i",)),
    "'sbp: B, B, B'": Layout(((), ())),
    "[(2),(1,0)]": Layout(((_level("l"),), (COLS, ROWS))),
    "elemental: [ ( ) , (2, ) ]": Layout(((), (_level("l"),))),
    "xy->yx*": Layout(((COLS,), (ROWS,))),
    "ab -> a a 1": Layout(((ROWS, COLS), ()), pins=(("l", 1),)),
    "distal:xy->***": Layout(((), ())),
}
FLAT_MORE = {
    "desc(9, 9, 2, 3)": Layout(((_level("i", kind="cyclic", args=(2,)),), (_level("j", kind="cyclic", args=(3,)),))),
    "pblas: desc(9, 9, 2, 3, 1, 2)": Layout(
        ((_level("i", kind="cyclic", args=(2, 0, 1)),), (_level("j", kind="cyclic", args=(3, 0, 2)),))
    ),
    "desc(9, 9, 2, 3, C)": Layout(
        ((_level("i", kind="cyclic", args=(2,)),), (_level("j", kind="cyclic", args=(3,)),)),
        grid=MeshShape((3, 2), ("j", "i")),
    ),
}
"""On a mesh of two axes."""


@pytest.mark.parametrize("text", [*FORMS, *MORE, *FLAT_MORE])
def test_forms(text: str) -> None:
    mesh = FLAT if "desc" in text else MESH
    assert parse_layout(text, mesh) == (FORMS | MORE | FLAT_MORE)[text]


def test_the_docstring_has_no_other_forms() -> None:
    lines = (notation.__doc__ or "").splitlines()
    shown = [line.strip().partition("  ")[0] for line in lines if line.startswith("    ")]
    assert set(shown) <= set(FORMS)


def test_an_axis_called_like_the_outer_letter() -> None:
    mesh = MeshShape((2, 2), ("P", "Q"))
    assert str(parse_layout("P, Q", mesh)) == str(parse_layout("P(P, Q)", mesh)) == "P('P', 'Q')"


ERRORS = [
    # text, the column of the mark, what the message says
    ("i on", 4, "expected the axes of the grid"),
    ("m on m=5, k=7", 2, "the grid needs 35 ranks"),
    ("m on m=x", 7, "expected its ranks"),
    ("m on m=0", 7, "at least one rank"),
    ("i on m=2", 0, "got the axis 'i'"),
    ("i;j", 1, "a character that has no meaning here"),
    ("i, -j", 3, "a character that has no meaning here"),
    ("i j", 2, "expected ','"),
    ("P('i', 'j'", 10, "expected ')'"),
    ("P('i', 'j') k", 12, "something behind the end"),
    ("i, j, l", 6, "more than 2 dimensions"),
    ("i=0, j", 5, "a dimension may not follow a pin or a sum"),
    ("i, j:cylic(2)", 5, "there are cyclic, weights, bounds, skew"),
    ("i:2", 2, "expected one of cyclic, weights, bounds, skew"),
    ("i:cyclic", 8, "expected '('"),
    ("i:cyclic(a)", 9, "expected a number"),
    ("i:skew(2)", 7, "expected a mesh axis"),
    ("i:cyclic(2", 10, "expected"),
    ("i, l=all", 5, "expected a coordinate or the word sum"),
    ("i+", 2, "expected a mesh axis"),
    ("('i', 'j'", 9, "expected"),
    ("3", 0, "expected a mesh axis, None or *"),
    (",", 0, "expected a mesh axis, None or *"),
]


@pytest.mark.parametrize(("text", "column", "words"), ERRORS)
def test_errors_point_at_the_character(text: str, column: int, words: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text, MESH)
    message, shown, mark = str(error.value).split("\n")
    assert words in message
    assert "P('i', 'j')" in message
    assert shown == f"  {text}"
    assert mark == f"  {' ' * column}^"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("i:cyclic(0)", "whole block size of at least 1"),
        ("i:cyclic(1.5)", "whole block size of at least 1"),
        ("i:cyclic()", "whole block size of at least 1"),
        ("i:bounds(0, 1.5, 4)", "whole numbers"),
        ("i:weights(0, 0)", "not all zero"),
        ("i:weights()", "not all zero"),
    ],
)
def test_arguments_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words) as error:
        parse_layout(text, MESH)
    shown, mark = str(error.value).split("\n")[1:]
    assert shown[mark.index("^")] in "0123456789.)"


OTHER_ERRORS = [
    # text, the column of the mark, what the message says
    ("i:cyclic(2, 1.5)", 12, "whole offset of at least 0"),
    ("i:cyclic(2, 0, 2)", 15, "the part with the first block, 0 to 1"),
    ("i+j:cyclic(2, 0, 4)", 17, "the part with the first block, 0 to 3"),
    ("i:cyclic(2, 0, 1, 3)", 18, "at most a block size, an offset and a part"),
    ("S(0), B", 7, "got 2 words; the mesh 2x2x2 has 3 axes"),
    ("(S(0), B)", 8, "got 2 words; the mesh 2x2x2 has 3 axes"),
    ("S(0), B, B, P", 12, "more than one word per axis; the mesh 2x2x2 has 3"),
    ("(S(2), B, P)", 3, "dimension 0, the rows, or 1, the columns"),
    ("S0, B, P", 0, "expected S(0), S(1), B or P, not 'S0'"),
    ("S B P", 2, "expected '('"),
    ("(B, B, P", 8, "expected ')'"),
    ("sbp: B, B, Q", 11, "expected S(0), S(1), B or P, not 'Q'"),
    ("sbp: B, B, B) P", 12, "something behind the end"),
    ("sbp: B, (B), B", 8, "expected S(0), S(1), B or P"),
    ("  sbp :", 7, "got 0 words"),
    ("[(0),(3)]", 6, "got the axis 3; the mesh 2x2x2 has 0 to 2"),
    ("[(0),(1,0)]", 8, "the axis 0 is used twice"),
    ("[(0)]", 4, "expected ','"),
    ("[0,(1)]", 1, "expected '('"),
    ("[(0),(i)]", 6, "expected the number of a mesh axis"),
    ("[(0),(1),(2)]", 8, "expected ']'"),
    ("elemental: [(0),(1)] 2", 21, "something behind the end"),
    ("elemental:(0),(1)", 10, "expected '['"),
    ("xy->xy", 6, "nothing is said of the axis l; the mesh 2x2x2 has 3"),
    ("xy->xy*0", 7, "more than one entry per axis; the mesh 2x2x2 has 3"),
    ("xy->xz0", 5, "expected x, y, a coordinate or *"),
    ("xy->xy2", 6, "got l=2; the axis has coordinates 0 to 1"),
    ("xx->xxx", 1, "two dimensions have one name"),
    ("xyz->xy*", 2, "a dimension too many: this is a matrix, of two dimensions"),
    ("x->x**", 1, "a further dimension: this is a matrix, of two dimensions; a vector that is multiplied is a matrix"),
    ("x*->xyz", 1, "the name of a dimension, or ->"),
    ("distal: xy", 10, "a dimension too many"),
    ("distal: xy->x,y", 13, "a character that has no meaning here"),
    ("'distal: xy=>xy'", 11, "a character that has no meaning here"),
]
FLAT_ERRORS = [
    ("desc(1, 1, 1)", 12, "expected NB"),
    ("desc(1, 1, 0, 1)", 11, "MB is at least 1"),
    ("desc(1, 1, 1, 1, 2)", 17, "RSRC is at least 0 and less than 2"),
    ("desc(1, 1, 1, 1, 0, 3)", 20, "CSRC is at least 0 and less than 3"),
    ("desc(1, 1, 1, 1, 0, 0, 0)", 23, "expected R or C"),
    ("desc(1, 1, 1, 1, Q)", 17, "expected R or C"),
    ("desc(1, 1, 1, 1", 15, "expected"),
    ("desc(1, 1, 1, 1) 1", 17, "something behind the end"),
    ("pblas: descr(1)", 7, "expected the word desc"),
]


@pytest.mark.parametrize(("text", "column", "words"), OTHER_ERRORS + FLAT_ERRORS)
def test_errors_of_the_other_notations_point_there_too(text: str, column: int, words: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text, FLAT if "desc" in text else MESH)
    message, shown, mark = str(error.value).split("\n")
    assert words in message
    assert "; write it " in message
    assert (shown, mark) == (f"  {text}", f"  {' ' * column}^")


def test_descriptors_need_two_axes() -> None:
    with pytest.raises(LayoutError, match=r"two axes; got the mesh 2x2x2 with 3.*\n.*\n  \^"):
        parse_layout("desc(9, 9, 2, 2)", MESH)


def test_axes_come_before_the_words_of_other_notations() -> None:
    mesh = MeshShape((2, 2), ("S", "sbp"))
    cyclic = _level("sbp", kind="cyclic", args=(2,))
    assert parse_layout("S, sbp", mesh) == Layout(((_level("S"),), (_level("sbp"),)))
    assert parse_layout("sbp:cyclic(2), S", mesh) == Layout(((cyclic,), (_level("S"),)))
    assert parse_layout("sbp: S(0), B", mesh) == Layout(((_level("S"),), ()))
    with pytest.raises(LayoutError, match="the axes S, sbp"):
        parse_layout("B, P", mesh)
    grid = MeshShape((2, 2), ("S", "B"))
    assert parse_layout("S, B on S=2, B=2", MESH) == Layout(((_level("S"),), (_level("B"),)), grid=grid)
    assert parse_layout("P()", MESH) == Layout(((), ()))


PIECES = [
    *("S(0)", "S(", "B", "P", "P(", "xy", "->", "0", "7", "1.5", "i", "j", "desc(", "sum", " on m=2"),
    *(":cyclic(", ":skew(", "sbp:", "elemental:", "distal:", "pblas:", *"()[],*=+-µ' "),
]
"""What texts are made of."""


@pure(400)
@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join), st.sampled_from([MESH, FLAT, MeshShape((3,))]))
def test_any_text_is_read_or_refused_with_a_mark(text: str, mesh: MeshShape) -> None:
    try:
        layout = parse_layout(text, mesh)
    except LayoutError as error:
        _, shown, mark = str(error).split("\n")
        assert shown == f"  {text}"
        assert mark.strip() == "^" and len(mark) <= len(shown) + 1
    else:
        assert parse_layout(str(layout), mesh) == layout


def test_tensors_and_vectors_in_the_notation_of_distal() -> None:
    """Faces of a tensor, as DISTAL places them, and a vector: what `P(…)` of as many dimensions says."""
    same = {"xyz->xy": "P('i', 'j', None)", "xyz->zx": "P('j', None, 'i')", "distal:xyz->y0": "P(None, 'i', *, j=0)"}
    for text, ours in same.items():
        assert parse_layout(text, FLAT, dims=3) == parse_layout(ours, FLAT, dims=3)
    assert parse_layout("x->x", MeshShape((4,)), dims=1) == parse_layout("i", MeshShape((4,)), dims=1)
    assert parse_layout("x->*x", FLAT, dims=1).region((6,), FLAT, 4) == Region((Span.range(2, 4),))
    for text, dims, column, words in (
        ("xy->xy", 3, 2, "a further dimension: this is a tensor of 3 dimensions"),
        ("xy->xy", 1, 1, "a dimension too many: this is a vector, of one dimension"),
        ("xyz->xw", 3, 6, "expected x, y, z, a coordinate or *"),
        ("x->x", 1, 4, "nothing is said of the axis j"),
    ):
        with pytest.raises(LayoutError) as error:
            parse_layout(text, FLAT, dims)
        assert words in str(error.value) and str(error.value).splitlines()[-1] == f"  {' ' * column}^"


def test_work_maps_have_two_notations_only() -> None:
    for text in ("B, B, B", "[(0),(1),()]", "sbp: B, B, B"):
        with pytest.raises(LayoutError):
            parse_layout(text, MESH, dims=3)


@pytest.mark.parametrize("text", ["q", "i, q", "i:skew(q)", "q=0", "q=sum", "i+q"])
def test_unknown_axes(text: str) -> None:
    with pytest.raises(LayoutError, match=r"got the axis 'q'; the mesh 2x2x2 has the axes i, j, l") as error:
        parse_layout(text, MESH)
    assert f"\n  {text}\n" in str(error.value)


def test_unknown_axes_are_marked() -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout("i, q", MESH)
    assert str(error.value).endswith("\n  i, q\n     ^")


@pytest.mark.parametrize("text", ["i, j=1.5", "i, j=1e3"])
def test_coordinates_are_whole(text: str) -> None:
    with pytest.raises(LayoutError, match=r"a coordinate is a whole number.*\n.*\n *\^"):
        parse_layout(text, MESH)


@pytest.mark.parametrize("text", ["i:cyclic(2):weights(1, 2)", "i:skew(j):skew(l)", "i:weights(1e999, 1)"])
def test_cuts_that_make_no_sense(text: str) -> None:
    with pytest.raises(LayoutError):
        parse_layout(text, MESH).check((4, 4), MESH)


def test_any_name_of_an_axis_can_be_written() -> None:
    mesh = MeshShape((2,), ("rows_1",))
    assert parse_layout("rows_1", mesh).split_axes == ("rows_1",)
    with pytest.raises(MeshError, match="ASCII"):
        MeshShape((2,), ("µ",))


@pytest.mark.parametrize("text", ["", "  ", "''"])
def test_saying_nothing_is_no_placement(text: str) -> None:
    with pytest.raises(LayoutError, match="nothing is said"):
        parse_layout(text, MESH)


# -- one layout in all notations ------------------------------------------------------------------

PREFIXES = {"SBP": "sbp", "DISTAL": "distal", "Elemental": "elemental", "PBLAS": "pblas"}


@st.composite
def placed(draw: st.DrawFn) -> tuple[MeshShape, tuple[int, int], Layout]:
    """Any placement, but half of them plain enough for most notations, and some on a column-major grid."""
    mesh = draw(meshes())
    shape = draw(st.tuples(st.integers(0, 20), st.integers(0, 20)))
    kinds = draw(st.sampled_from([("even",), ("cyclic",), ("even", "cyclic", "weights", "bounds")]))
    turned = draw(st.booleans()) and len(mesh.dims) == 2
    grid = MeshShape(mesh.dims[::-1], mesh.names[::-1]) if turned else None
    layout = draw(layouts(grid or mesh, shape, kinds=kinds, skew=draw(st.booleans())))
    return mesh, shape, replace(layout, grid=grid)


def regions(layout: Layout, shape: tuple[int, int], mesh: MeshShape) -> list[Region | None]:
    """What each rank holds; None for nothing."""
    return [layout.region(shape, mesh, rank) or None for rank in mesh.ranks]


@pure(300)
@given(placed())
def test_what_a_notation_says_it_reads(case: tuple[MeshShape, tuple[int, int], Layout]) -> None:
    mesh, shape, layout = case
    found = notations(layout, mesh, shape)
    assert list(found) == ["rma_mm", "PartitionSpec", "SBP", "DISTAL", "Elemental", "PBLAS"]
    for name, written in found.items():
        assert bool(written.text) != bool(written.reason)
        if not written.text:
            assert written.reason.startswith(name)
            continue
        again = parse_layout(written.text, mesh)
        again.check(shape, mesh)
        assert regions(again, shape, mesh) == regions(layout, shape, mesh)
        assert set(again.partial) == set(layout.partial)
        if name in PREFIXES:
            assert parse_layout(f"{PREFIXES[name]}: {written.text}", mesh) == again


@pytest.mark.parametrize(
    ("text", "mesh", "wanted"),
    [
        ("i,j", FLAT, ["P('i', 'j')", "(S(0), S(1))", "xy->xy", "[(0),(1)]", "desc(8, 6, 4, 2, 0, 0)"]),
        ("j,i", FLAT, ["P('j', 'i')", "(S(1), S(0))", "xy->yx", "[(1),(0)]", "rows over i and columns over j"]),
        ("(j,i),*", FLAT, ["P(('j', 'i'), None)", "nests axes in", "nests axes in", "[(1,0),()]", "rows over i"]),
        ("i,*", FLAT, ["P('i', None)", "(S(0), B)", "xy->x*", "[(0),()]", "no replicas; got copies along j"]),
        ("i,*,j=2", FLAT, ["no pins; got j=2", "no pins", "xy->x2", "no pins", "desc(8, 6, 4, 6, 0, 2)"]),
        ("i,*,j=sum", FLAT, ["no partial sums; got j=sum", "(S(0), P)", *["no partial sums"] * 3]),
        ("i,j:skew(i)", FLAT, ["has no skew; got j shifted by i"] * 4 + ["no skew; got j shifted by i"]),
        ("i+j,*", FLAT, ["one axis after the other; got i+j"] * 4 + ["rows over i"]),
        ("i:weights(1,3),j", FLAT, ["got weights over i"] * 4 + ["blocks of one size; got weights cuts of 8 into 2"]),
        ("i:cyclic(2,4,1),j:cyclic(1)", FLAT, ["cuts evenly"] * 4 + ["desc(8, 6, 2, 1, 1, 0)"]),
        ("i:cyclic(3,1),j", FLAT, ["cuts evenly"] * 4 + ["an offset of 1 into blocks of 3"]),
        ("m,n on m=3,n=2", FLAT, ["those of the grid 3x2"] * 4 + ["got the grid 3x2"]),
        ("i,j on j=3,i=2", FLAT, ["those of the grid 3x2"] * 4 + ["desc(8, 6, 4, 2, 0, 0, C)"]),
        ("*,*,i=11", MeshShape((12,)), ["no pins", "no pins", "one digit; got i=11", "no pins", "1x12 would do"]),
        ("i,j,l=1", MESH, ["no pins", "no pins", "xy->xy1", "no pins", "two axes; got the mesh 2x2x2"]),
    ],
)
def test_what_each_notation_can_say(text: str, mesh: MeshShape, wanted: list[str]) -> None:
    layout = parse_layout(text, mesh)
    found = notations(layout, mesh, (8, 6))
    assert found.pop("rma_mm").text == str(layout)
    for written, words in zip(found.values(), wanted, strict=True):
        assert words == written.text or words in written.reason, str(written)


def test_descriptors_hold_the_shape() -> None:
    written = notations(parse_layout("i,j", FLAT), FLAT)["PBLAS"]
    assert str(written).startswith("cannot: PBLAS descriptors hold the shape")


def test_other_meshes_and_dimensions_have_no_text() -> None:
    found = notations(parse_layout("l", MESH), FLAT, (4, 4))
    assert "the axes i, j of the mesh; got l" in found["SBP"].reason
    assert "the mesh 2x3 has the axes i, j" in found["PBLAS"].reason
    assert "of two dimensions; got 3" in notations(parse_layout("i", MESH, dims=3), MESH)["DISTAL"].reason

"""Layouts as text: every form, there and back, and errors that point at the character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import LayoutError, MeshError
from rma_mm.geometry import notation
from rma_mm.geometry.layout import Layout, Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from tests.strategies import layouts, meshes, pure

MESH = MeshShape((2, 2, 2))


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
    "P('i+j:cyclic(32)', None)": Layout(((_level("i", "j", kind="cyclic", args=(32,)),), ())),
    "P('i:weights(1, 2)', None)": Layout(((_level("i", kind="weights", args=(1, 2)),), ())),
    "'i:bounds(0, 10, 30)'": Layout(((_level("i", kind="bounds", args=(0, 10, 30)),), ())),
    "P('i', 'j:skew(i)')": Layout(((ROWS,), (_level("j", skew=("i",)),))),
    "P('i', 'j', l=0)": Layout(((ROWS,), (COLS,)), pins=(("l", 0),)),
    "P('i', None, j=sum)": Layout(((ROWS,), ()), partial=("j",)),
    "i,j": Layout(((ROWS,), (COLS,))),
    "P('m', 'k') on m=2, k=3": Layout(((_level("m"),), (_level("k"),)), grid=MeshShape((2, 3), ("m", "k"))),
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
}


@pytest.mark.parametrize("text", [*FORMS, *MORE])
def test_forms(text: str) -> None:
    assert parse_layout(text, MESH) == (FORMS | MORE)[text]


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
        ("i:cyclic(1, 2)", "one whole block size"),
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

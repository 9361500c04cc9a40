"""SBP: signatures of products against NumPy, and the words of boxing against sets of elements."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rma_mm.errors import LayoutError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.notations.sbp import (
    PLACED,
    VALID,
    Sbp,
    boxing,
    deduce,
    layout_to_sbp,
    parse_sbp,
    sbp_text,
    sbp_to_layout,
    signatures,
)
from tests.reference import collect, distribute, whole_numbers
from tests.strategies import meshes, pure

MESH = MeshShape((2, 3))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[MeshShape, tuple[int, int], Sbp, Sbp]:
    mesh = draw(meshes(max_ranks=12))
    words = st.tuples(*[st.sampled_from(PLACED)] * len(mesh.dims))
    return mesh, draw(st.tuples(st.integers(0, 13), st.integers(0, 13))), draw(words), draw(words)


def changed(steps: object, source: Sbp, mesh: MeshShape) -> list[Sbp]:
    """The signatures from step to step."""
    states = [source]
    for step in steps:  # type: ignore[attr-defined]
        axis = mesh.names.index(step.axis)
        assert states[-1][axis] == step.source
        states.append((*states[-1][:axis], step.target, *states[-1][axis + 1 :]))
    return states


# -- text and layouts -----------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [MeshShape((4,)), MESH, MeshShape((2, 2, 2))], ids=str)
def test_every_signature_there_and_back(mesh: MeshShape) -> None:
    for sbp in product(PLACED, repeat=len(mesh.dims)):
        assert parse_sbp(sbp_text(sbp), mesh) == sbp
        assert layout_to_sbp(sbp_to_layout(sbp, mesh), mesh) == sbp


def test_layouts_of_other_meshes_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"got \(B\); the mesh 2x3 has the axes i, j"):
        sbp_to_layout(("B",), MESH)
    with pytest.raises(LayoutError, match="each needs one of S"):
        boxing(("B", "B"), ("B", "Q"), (2, 2), MESH)  # type: ignore[arg-type]


# -- products -------------------------------------------------------------------------------------


def test_the_examples_of_the_literature() -> None:
    assert deduce(("S(0)", "B"), ("B", "S(1)")) == ("S(0)", "S(1)")
    assert deduce(("S(0)", "S(1)"), ("B", "S(0)")) == ("S(0)", "P")


def test_there_are_six_signatures_per_axis() -> None:
    found = list(signatures(MESH))
    assert len(found) == len(set(found)) == 36
    for a, b, c in found:
        assert deduce(a, b) == c


@pytest.mark.parametrize("pair", [pair for pair in product(PLACED, repeat=2) if pair not in VALID], ids=str)
def test_what_cannot_be_multiplied(pair: Sbp) -> None:
    with pytest.raises(LayoutError) as error:
        deduce(("B", pair[0]), ("B", pair[1]))
    message = str(error.value)
    assert f"axis 1 has A {pair[0]} and B {pair[1]}" in message
    for (a, b), c in VALID.items():
        assert f"{a}·{b} = {c}" in message
        beside_a, beside_b = message.split("; ")[1:3]
        assert (a != pair[0]) or b in beside_a.partition("may be")[2]
        assert (b != pair[1]) or a in beside_b.partition("may be")[2]


def test_both_operands_have_all_axes() -> None:
    with pytest.raises(LayoutError, match="one word per mesh axis"):
        deduce(("B",), ("B", "B"))


@pytest.mark.parametrize("mesh", [MeshShape((3,)), MESH, MeshShape((3, 2))], ids=str)
def test_local_products_make_up_c(mesh: MeshShape) -> None:
    """For every valid signature, each rank multiplies what it holds, and C is what was deduced."""
    rng = np.random.default_rng(1)
    x, y = whole_numbers(rng, (7, 11)), whole_numbers(rng, (11, 8))
    for a, b, c in signatures(mesh):
        held = [distribute(m, sbp_to_layout(sbp, mesh), mesh, rng) for m, sbp in ((x, a), (y, b))]
        tiles: list[NDArray[np.generic]] = [left @ right for left, right in zip(*held, strict=True)]
        assert np.array_equal(collect(tiles, sbp_to_layout(c, mesh), mesh, (7, 8)), x @ y)


# -- boxing ---------------------------------------------------------------------------------------


@pure(150)
@given(boxes())
def test_boxing_arrives_and_counts(case: tuple[MeshShape, tuple[int, int], Sbp, Sbp]) -> None:
    mesh, shape, source, target = case
    found = boxing(source, target, shape, mesh)
    states = changed(found.steps, source, mesh)
    assert states[-1] == target
    assert found.words == sum(step.words for step in found.steps)
    for step, before, after in zip(found.steps, states[:-1], states[1:], strict=True):
        assert step.words == counted(step.axis, step.name, before, after, shape, mesh), step


def counted(axis: str, name: str, before: Sbp, after: Sbp, shape: tuple[int, int], mesh: MeshShape) -> int:
    """Words by the regions of all ranks: what each lacks of its new part, or the ring forms on what a group holds."""
    old, new = (sbp_to_layout(sbp, mesh) for sbp in (before, after))
    words = 0
    for rank in mesh.ranks:
        have, want = old.region(shape, mesh, rank), new.region(shape, mesh, rank)
        if name in ("all-gather", "all-to-all", "slice"):
            group = [mesh.rank(at) for at in mesh.along((axis,), mesh.coords(rank))]
            assert want.size == sum((want & old.region(shape, mesh, other)).size for other in group) or name == "slice"
            words += want.size - (want & have).size
        elif name == "reduce-scatter":
            words += want.size * (mesh.axis_size(axis) - 1)
        elif name == "all-reduce" and mesh.coords(rank)[axis] == 0:
            words += 2 * have.size * (mesh.axis_size(axis) - 1)
    assert name != "slice" or words == 0
    return words


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("S(0), B", "S(0), B", []),
        ("S(0), B", "B, B", [("i", "all-gather", 3 * 48)]),
        ("B, P", "B, S(0)", [("j", "reduce-scatter", 2 * 2 * 48)]),
        ("B, P", "B, B", [("j", "all-reduce", 2 * 2 * 2 * 48)]),
        ("S(0), B", "S(1), B", [("i", "all-to-all", 3 * 48 // 2)]),
        ("S(0), B", "S(0), S(1)", [("j", "slice", 0)]),
        ("B, B", "P, B", [("i", "keep one summand", 0)]),
        ("S(0), B", "P, B", [("i", "pad with zeros", 0)]),
        # the sums first, while there is less to gather
        ("S(0), P", "B, B", [("j", "all-reduce", 2 * 2 * 48), ("i", "all-gather", 3 * 48)]),
        # the inner split has to go before the outer one can come or go
        ("S(0), S(0)", "S(1), S(0)", [("j", "all-gather", 2 * 48), ("i", "all-to-all", 72), ("j", "slice", 0)]),
        ("B, S(0)", "S(0), S(0)", [("j", "all-gather", 2 * 2 * 48), ("i", "slice", 0), ("j", "slice", 0)]),
    ],
)
def test_the_steps_and_their_words(source: str, target: str, steps: list[tuple[str, str, int]]) -> None:
    found = boxing(parse_sbp(source, MESH), parse_sbp(target, MESH), (6, 8), MESH)
    assert [(step.axis, step.name, step.words) for step in found.steps] == steps


def test_the_printed_layout_is_the_one_of_the_signature() -> None:
    assert parse_layout("(S(1), P)", MESH) == parse_layout("P(None, 'i', j=sum)", MESH)

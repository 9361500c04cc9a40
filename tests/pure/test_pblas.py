"""Descriptors against ScaLAPACK's arithmetic, element by element, on both orders of the grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.notations.pblas import Descriptor, indxg2p, layout_to_descriptor, numroc
from rma_mm.geometry.span import Region, Span
from tests.strategies import meshes, pure

MESH = MeshShape((2, 3))


@dataclass(frozen=True)
class Part:
    """A sub-matrix of a block-cyclic matrix."""

    mesh: MeshShape
    whole: Descriptor
    at: tuple[int, int]
    shape: tuple[int, int]

    @property
    def layout(self) -> Layout:
        return self.whole.layout(self.mesh, *self.at, *self.shape)

    def coords(self, rank: int) -> tuple[int, int]:
        """Process row and column, as BLACS numbers them."""
        rows, cols = self.mesh.dims
        return divmod(rank, cols) if self.whole.order == "R" else (rank % rows, rank // rows)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    mesh = draw(meshes(max_ranks=16, axes=(2,)))
    shape = m, n = draw(st.tuples(st.integers(0, 20), st.integers(0, 20)))
    blocks = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    sources = [draw(st.integers(0, size - 1)) for size in mesh.dims]
    at = draw(st.tuples(st.integers(0, m), st.integers(0, n)))
    rows, cols = (draw(st.integers(0, extent - start)) for extent, start in zip(shape, at, strict=True))
    order = draw(st.sampled_from("RC"))
    return Part(mesh, Descriptor(m, n, *blocks, *sources, order), at, (rows, cols))


# -- one dimension --------------------------------------------------------------------------------

counts = st.integers(1, 5)


def indxg2l(index: int, block: int, parts: int) -> int:
    """The local index of a global index, in the part that has it."""
    return block * (index // (block * parts)) + index % block


@pure(100)
@given(st.integers(0, 40), st.integers(1, 7), counts, st.data())
def test_the_arithmetic_agrees_with_itself(extent: int, block: int, parts: int, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, parts - 1))
    mine: dict[int, list[int]] = {part: [] for part in range(parts)}
    for index in range(extent):
        mine[indxg2p(index, block, source, parts)].append(index)
    for part, indices in mine.items():
        assert numroc(extent, block, part, source, parts) == len(indices)
        assert [indxg2l(index, block, parts) for index in indices] == list(range(len(indices)))


@pure(100)
@given(st.integers(0, 40), st.integers(1, 7), counts, st.integers(0, 20), st.data())
def test_cyclic_spans_follow_the_rule(extent: int, block: int, parts: int, offset: int, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, parts - 1))
    for part in range(parts):
        wanted = [x for x in range(extent) if ((x + offset) // block + source) % parts == part]
        span = Span.cyclic(extent, block, parts, part, offset, source)
        assert span.indices.tolist() == wanted
        assert span == Span((x, x + 1) for x in wanted)


# -- matrices and their parts ---------------------------------------------------------------------


@pure(120)
@given(parts())
def test_each_element_is_where_scalapack_has_it(part: Part) -> None:
    whole, (rows, cols) = part.whole, part.mesh.dims
    part.layout.check(part.shape, part.mesh)
    for rank in part.mesh.ranks:
        process = part.coords(rank)
        region = part.layout.region(part.shape, part.mesh, rank)
        here = part.whole.local_part(part.mesh, rank, *part.at, *part.shape)
        axes = zip(
            region, part.shape, part.at, process, here, (whole.mb, whole.nb), (whole.rsrc, whole.csrc), (rows, cols),
            strict=True,
        )
        for span, extent, at, mine, local, block, source, count in axes:
            wanted = [x for x in range(extent) if indxg2p(at + x, block, source, count) == mine]
            assert span.indices.tolist() == wanted
            assert [indxg2l(at + x, block, count) for x in wanted] == list(range(local.start, local.stop))


@pure(80)
@given(parts())
def test_local_arrays_are_parts_of_local_arrays(part: Part) -> None:
    """What a rank holds of the sub-matrix is one rectangle of its array for the whole matrix."""
    whole = part.whole
    matrix = np.arange(whole.m * whole.n).reshape(whole.m, whole.n)
    inner = matrix[part.at[0] :, part.at[1] :][: part.shape[0], : part.shape[1]]
    for rank in part.mesh.ranks:
        home = whole.layout(part.mesh).region(matrix.shape, part.mesh, rank)
        array = matrix[np.ix_(*(span.indices for span in home))]
        assert array.shape == whole.local_shape(part.mesh, rank)
        region = part.layout.region(part.shape, part.mesh, rank)
        tile = inner[np.ix_(*(span.indices for span in region))]
        assert np.array_equal(array[whole.local_part(part.mesh, rank, *part.at, *part.shape)], tile)


@pure(80)
@given(parts())
def test_text_and_back(part: Part) -> None:
    layout = part.whole.layout(part.mesh)
    assert parse_layout(str(part.whole), part.mesh) == layout
    assert parse_layout(str(layout), part.mesh) == layout
    assert layout_to_descriptor(layout, part.mesh, (part.whole.m, part.whole.n)) == part.whole


def test_column_major_ranks() -> None:
    """Process (r, c) of 2 × 3 is rank r + 2c."""
    layout = Descriptor(2, 3, 1, 1, order="C").layout(MESH)
    assert [layout.region((2, 3), MESH, rank) for rank in MESH.ranks] == [
        Region.box((r, r + 1), (c, c + 1)) for c in range(3) for r in range(2)
    ]
    assert str(layout) == "P('i:cyclic(1)', 'j:cyclic(1)') on j=3, i=2"


def test_ranks_beyond_the_mesh_hold_nothing() -> None:
    assert Descriptor(9, 9, 2, 2).local_shape(MESH, 6) == (0, 0)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((-1, 2, 1, 1), "got M = -1; must be at least 0"), ((1, 2, 1, 0), "got NB = 0; must be at least 1"),
        ((1, 2, 1, 1, 0, -1), "got CSRC = -1; must be at least 0"),
    ],
)
def test_numbers_that_are_refused(numbers: tuple[int, ...], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Descriptor(*numbers)  # type: ignore[arg-type]


def test_what_does_not_fit() -> None:
    with pytest.raises(LayoutError, match=r"got the mesh 6 with 1; 1x6 would do"):
        Descriptor(4, 4, 2, 2).layout(MeshShape((6,)))
    with pytest.raises(LayoutError, match=r"got RSRC = 2; on the mesh 2x3 it is 0 to 1"):
        Descriptor(4, 4, 2, 2, 2).layout(MESH)
    for beyond in [(0, 0, 5, 1), (2, 0, 3, 1), (-1, 0, 2, 1), (0, 3, 1, -1)]:
        with pytest.raises(LayoutError, match=r"it lies within \(0:4, 0:4\)"):
            Descriptor(4, 4, 2, 2).layout(MESH, *beyond)

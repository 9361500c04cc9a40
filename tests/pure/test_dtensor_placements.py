"""Placements of DTensor and layouts, both ways, against torch.chunk's rule written out; no torch needed."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rma_mm.errors import LayoutError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notation import parse_layout
from rma_mm.geometry.notations.dtensor import chunks, placements_of, sharded
from rma_mm.geometry.notations.sbp import PLACED

EXTENTS = (0, 1, 3, 5, 7, 12)


def cut(indices: np.ndarray, count: int, part: int) -> np.ndarray:
    """Part of torch.chunk(indices, count), which gives fewer parts where none is left."""
    size = -(-len(indices) // count)
    parts = [indices[at : at + size] for at in range(0, len(indices), size)] if size else []
    return parts[part] if part < len(parts) else indices[:0]


@pytest.mark.parametrize("grid", [(1,), (4,), (2, 3), (3, 2), (2, 2, 2)])
def test_both_ways(grid) -> None:
    mesh = MeshShape(grid)
    for words in product(PLACED, repeat=len(grid)):
        for shape in product(EXTENTS, (1, 4, 5)):
            layout = sharded(words, shape, mesh)
            layout.check(shape, mesh)
            assert placements_of(layout, shape, mesh) == words
            assert placements_of(parse_layout(str(layout), mesh), shape, mesh) == words
            for rank in mesh.ranks:
                held = [np.arange(extent) for extent in shape]
                for axis, at, count in zip(words, mesh.coords(rank).values(), grid, strict=True):
                    if axis.startswith("S"):
                        held[int(axis[2])] = cut(held[int(axis[2])], count, at)
                assert [list(span.indices) for span in layout.region(shape, mesh, rank)] == [list(x) for x in held]


def test_parts() -> None:
    assert [chunks(5, 4), chunks(4, 4), chunks(0, 2), chunks(7, 3)] == [[2, 2, 1, 0], [1] * 4, [0, 0], [3, 3, 1]]


REFUSED = [
    ("P('i', 'j')", (5, 4), "redistribute to that"), ("P(('j', 'i'), None)", (8, 4), "(Shard(0), Shard(0))"),
    ("P('i', None, j=0)", (4, 4), "pins"), ("P('m', None) on m=4", (8, 4), "a grid of its own"),
    ("P('i:cyclic(1)', None)", (8, 4), "torch.chunk"), ("P(None, 'j:skew(i)')", (4, 4), "(Replicate(), Shard(1))"),
]


@pytest.mark.parametrize(("text", "shape", "said"), REFUSED)
def test_what_dtensor_has_not(text, shape, said) -> None:
    mesh = MeshShape((2, 2))
    with pytest.raises(LayoutError) as caught:
        placements_of(parse_layout(text, mesh), shape, mesh)
    assert said in str(caught.value)


def test_the_same_parts_written_otherwise() -> None:
    """Where the cuts fall counts, and not how they are written; and a word for each axis is needed."""
    mesh = MeshShape((2, 2))
    assert placements_of(parse_layout("P('i:cyclic(4)', 'j')", mesh), (8, 4), mesh) == ("S(0)", "S(1)")
    with pytest.raises(LayoutError):
        sharded(("B",), (2, 2), mesh)

"""Meshes of ranks: coordinates, names, nodes, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given

from rma_mm.errors import MeshError
from rma_mm.geometry.mesh import MeshShape, grids
from tests.strategies import meshes, pure


@pure(60)
@given(meshes())
def test_ranks_and_coordinates_are_row_major(mesh: MeshShape) -> None:
    corners = list(product(*map(range, mesh.dims)))
    assert [tuple(mesh.coords(rank).values()) for rank in mesh.ranks] == corners
    assert [mesh.rank(dict(zip(mesh.names, corner, strict=True))) for corner in corners] == list(mesh.ranks)
    assert mesh.size == len(corners) == len(mesh.node_of_rank) <= 64
    assert tuple(mesh.axis_size(name) for name in mesh.names) == mesh.dims
    assert tuple(mesh.coords(0)) == mesh.names


@pure(60)
@given(meshes())
def test_along_some_axes(mesh: MeshShape) -> None:
    start = mesh.coords(mesh.size - 1)
    axes = mesh.names[::-1]
    everyone = list(mesh.along(axes, start))
    assert sorted(mesh.rank(at) for at in everyone) == list(mesh.ranks)
    corners = [tuple(at[axis] for axis in axes) for at in everyone]
    assert corners == sorted(corners)
    assert list(mesh.along((), start)) == [start]
    first = [at for at in everyone if all(at[axis] == start[axis] for axis in axes[1:])]
    assert list(mesh.along(axes[:1], start)) == first


def test_defaults_and_text() -> None:
    mesh = MeshShape((2, 3, 4))
    assert mesh.names == ("i", "j", "l")
    assert mesh.node_of_rank == (0,) * 24
    assert str(mesh) == "2x3x4"
    assert mesh == MeshShape((2, 3, 4), ("i", "j", "l"))
    assert len({mesh, MeshShape((2, 3, 4)), MeshShape((2, 3, 4), node_of_rank=range(24))}) == 2
    assert MeshShape((2, 3), ("rows", "cols")).coords(5) == {"rows": 1, "cols": 2}


def test_nodes_of_ranks_beyond_the_mesh_are_left_out() -> None:
    assert MeshShape((2,), node_of_rank=(0, 1, 2)).node_of_rank == (0, 1)


def test_too_few_nodes() -> None:
    with pytest.raises(MeshError, match="nodes"):
        MeshShape((4,), node_of_rank=(0, 0))


@pytest.mark.parametrize("shape", [(), (0,), (2, -1), (1, 1, 1, 0)])
def test_shapes_that_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(MeshError, match="every axis needs at least one rank") as error:
        MeshShape(shape)
    assert str(shape) in str(error.value)


def test_many_axes_want_names() -> None:
    assert MeshShape((1, 2, 1, 2, 1, 1)).names == ("i", "j", "l", "p", "q", "r")
    with pytest.raises(MeshError, match="got none for 7 axes; up to 6 have names of their own, i, j, l, p, q, r"):
        MeshShape((1,) * 7)
    assert MeshShape((1,) * 7, tuple("abcdefg")).coords(0)["g"] == 0


@pytest.mark.parametrize("names", [("i",), ("i", "i"), ("i", "j", "l")])
def test_names_must_be_one_for_each_axis(names: tuple[str, ...]) -> None:
    with pytest.raises(MeshError, match="every axis needs one name of its own"):
        MeshShape((2, 2), names)


@pytest.mark.parametrize("name", ["", "1", "a b", "None", "sum", "*"])
def test_names_must_be_words_of_the_notation(name: str) -> None:
    with pytest.raises(MeshError, match="identifier"):
        MeshShape((2, 2), ("i", name))


@pytest.mark.parametrize("count", [1, 2, 6, 12, 13])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_grids(count: int, dims: int) -> None:
    wanted = {grid for grid in product(range(1, count + 1), repeat=dims) if _product(grid) == count}
    found = list(grids(count, dims))
    assert len(found) == len(wanted)
    assert set(found) == wanted


def _product(grid: tuple[int, ...]) -> int:
    size = 1
    for factor in grid:
        size *= factor
    return size

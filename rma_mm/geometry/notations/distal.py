"""DISTAL's notation (Yadav, Aiken and Kjolstad 2022, "DISTAL: the distributed tensor algebra compiler", section 3).

    xy->xy    rows over the first mesh axis, columns over the second
    xy->yx    the other way round
    xy->x     a mesh of one axis: rows over it, columns not split
    xy->xy0   the third axis has the matrix at its coordinate 0 only
    xy->xy*   every rank along the third axis has a copy
    xyz->xy   a tensor of three dimensions: each rank has all of the third
    x->x      a vector in pieces

On the left stand names of the dimensions; on the right there is one entry per mesh axis. DISTAL names a dimension
once; here `xy->xx` splits the rows over both axes, nested in mesh order. What is multiplied are matrices; tensors of
other dimensions are placed where such are asked for, as (m, n, k) by a work map.
"""

from __future__ import annotations

import re

from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.reader import Reader, even_axes

_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z])|(?P<number>[0-9])|(?P<mark>->|\*))")
_FORMS = "as in xy->xy*: the dimensions, then for each mesh axis the one it splits, a coordinate, or *"


def parse_distal(text: str, mesh: MeshShape, begin: int = 0, dims: int = 2) -> Layout:
    """Return the layout of `dims` dimensions that `text` describes from the column `begin` on.

    Raises LayoutError, with a mark under the offending character, where it is malformed, is of other dimensions, or
    does not have one entry per axis of `mesh`.
    """
    reader = Reader(text, _FORMS, begin, _TOKEN)
    names = _dimensions(reader, dims)
    splits: dict[str, list[Level]] = {name: [] for name in names}
    pins = []
    for axis, size in zip(mesh.names, mesh.dims, strict=True):
        kind, entry, _ = reader.tokens[reader.at]
        if kind == "end":
            reader.fail(f"nothing is said of the axis {axis}; the mesh {mesh} has {len(mesh.dims)}")
        if entry not in (*names, "*") and kind != "number":
            reader.fail(f"expected {', '.join(names)}, a coordinate or *")
        if kind == "number" and int(entry) >= size:
            reader.fail(f"got {axis}={entry}; the axis has coordinates 0 to {size - 1}")
        if entry in splits:
            splits[entry].append(Level((axis,)))
        elif kind == "number":
            pins.append((axis, int(entry)))
        reader.at += 1
    if not reader.peek(""):
        reader.fail(f"more than one entry per axis; the mesh {mesh} has {len(mesh.dims)}")
    return Layout(tuple(map(tuple, splits.values())), tuple(pins))


def _dimensions(reader: Reader, dims: int) -> list[str]:
    """Return the names on the left, of which there are `dims`."""
    kinds = {1: "a vector, of one dimension", 2: "a matrix, of two dimensions"}
    what = kinds.get(dims, f"a tensor of {dims} dimensions")
    advice = "; a vector that is multiplied is a matrix of one row or column" if dims == 2 else ""
    names: list[str] = []
    while not reader.peek("->"):
        if len(names) == dims:
            reader.fail(f"a dimension too many: this is {what}")
        names.append(reader.next("word", "the name of a dimension, or ->"))
        if names.count(names[-1]) > 1:
            reader.fail_before("two dimensions have one name")
    if len(names) < dims:
        reader.fail(f"expected the name of a further dimension: this is {what}{advice}")
    reader.mark("->")
    return names


def layout_to_distal(layout: Layout, mesh: MeshShape) -> str:
    """Return the layout as text; raises LayoutError, saying why, where it cannot be expressed.

    >>> layout_to_distal(Layout(((Level(("i",)),), (Level(("j",)),)), (("l", 0),)), MeshShape((2, 2, 2)))
    'xy->xy0'
    """
    rows, cols = even_axes(layout, mesh, "DISTAL", pins=True, ordered=True)
    far = [(axis, at) for axis, at in layout.pins if at > 9]
    if far:
        raise LayoutError(f"DISTAL writes a coordinate as one digit; got {far[0][0]}={far[0][1]}")
    entries = dict.fromkeys(mesh.names, "*") | dict.fromkeys(rows, "x") | dict.fromkeys(cols, "y")
    entries |= {axis: str(at) for axis, at in layout.pins}
    return f"xy->{''.join(entries.values())}"

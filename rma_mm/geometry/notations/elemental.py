"""The notation of Elemental and FLAME: `[(0,1),()]`, rows over mesh axes 0 then 1, columns not split.

Numbers are positions of axes on the mesh, in any order; axes that are not named replicate. The original deals
single rows and columns out round robin (Schatz, van de Geijn and Poulson 2016, "Parallel matrix multiplication: a
systematic journey"). Here the notation means the order of the axes, and cuts are even.
"""

from __future__ import annotations

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.reader import Reader, even_axes

_FORMS = "as in [(0,1),()]: for rows and for columns, the mesh axes that split them, numbered from 0"


def parse_elemental(text: str, mesh: MeshShape, begin: int = 0) -> Layout:
    """Return the layout that `text` describes from the column `begin` on.

    Raises LayoutError, with a mark under the offending character, where it is malformed or names an axis that the
    mesh does not have, or one twice.
    """
    reader = Reader(text, _FORMS, begin)
    reader.mark("[")
    used: list[str] = []
    rows = _split(reader, mesh, used)
    reader.mark(",")
    cols = _split(reader, mesh, used)
    reader.mark("]")
    reader.end()
    return Layout((rows, cols))


def _split(reader: Reader, mesh: MeshShape, used: list[str]) -> Split:
    """Read the axes of one dimension and mark them as used."""
    levels = []
    reader.mark("(")
    while not reader.peek(")"):
        number = int(reader.next("number", "the number of a mesh axis"))
        if number >= len(mesh.names):
            reader.fail_before(f"got the axis {number}; the mesh {mesh} has 0 to {len(mesh.names) - 1}")
        if mesh.names[number] in used:
            reader.fail_before(f"the axis {number} is used twice")
        used.append(mesh.names[number])
        levels.append(Level((mesh.names[number],)))
        reader.comma(")")
    reader.mark(")")
    return tuple(levels)


def layout_to_elemental(layout: Layout, mesh: MeshShape) -> str:
    """Return the layout as text; raises LayoutError, saying why, where it cannot be expressed.

    >>> layout_to_elemental(Layout(((Level(("i",)), Level(("j",))), ())), MeshShape((2, 3)))
    '[(0,1),()]'
    """
    cuts = even_axes(layout, mesh, "Elemental")
    return f"[{','.join('(' + ','.join(str(mesh.names.index(axis)) for axis in axes) + ')' for axes in cuts)}]"

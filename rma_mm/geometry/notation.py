"""Text ↔ layout, in the notations that people already write. Ours is JAX's PartitionSpec with a few words more:

    P('i', 'j')                 rows over the mesh axis i, columns over j
    P('i', ('l', 'j'))          columns over l, and inside each part over j
    P(None, 'j')                rows not split; axes that are not named replicate
    P('i:cyclic(32)', None)     blocks of 32 rows dealt out round robin
    P('i:cyclic(32, 5, 1)', None)  … from row 5 of a block on, which part 1 has (a ScaLAPACK sub-matrix)
    P('i+j:cyclic(32)', None)   the same over i and j taken as one axis
    P('i:bounds(0, 9, 30, 0, 20, 30):skew(j)', 'j')  rows are cut otherwise in each column of ranks
    P('i:weights(1, 2)', None)  uneven shares;  'i:bounds(0, 10, 30)' says where to cut
    P('i', 'j:skew(i)')         columns in circular windows shifted by i (Cannon)
    P('i', 'j', l=0)            pinned to the coordinate 0 of the axis l
    P('i', None, j=sum)         every rank along j holds a summand
    P('m', 'k') on m=2, k=3     axes of another grid over the first ranks of the mesh

Quotes and the outer P( ) may be left out: `i,j` on a command line. `*` is None. The others, with one entry per mesh
axis in SBP and DISTAL:

    (S(0), B, P)                SBP: the axes split rows, replicate, sum
    [(0,1),()]                  Elemental: rows over mesh axes 0 then 1, columns not split
    xy->xy0                     DISTAL: rows over the first axis, columns over the second, pinned on the third
    desc(100, 80, 32, 16, 0, 0)  a PBLAS descriptor: M, N, MB, NB, RSRC, CSRC
    sbp: S(0), B, P             any of these may say so in front: sbp, elemental, distal, pblas

Vectors and tensors, where such are placed, are written in our notation or in DISTAL's, as x->x** or xyz->xyx.
SBP without `sbp:` is not recognised on a mesh with an axis called S, B or P: there these are axes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rma_mm.classes import dataclass
from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.distal import layout_to_distal, parse_distal
from rma_mm.geometry.notations.elemental import layout_to_elemental, parse_elemental
from rma_mm.geometry.notations.partition_spec import CUTS, layout_to_partition_spec, parse_partition_spec
from rma_mm.geometry.notations.pblas import layout_to_descriptor, parse_descriptor
from rma_mm.geometry.notations.reader import unquoted
from rma_mm.geometry.notations.sbp import layout_to_sbp, parse_sbp, sbp_text, sbp_to_layout

_PARSERS: dict[str, Callable[[str, MeshShape, int], Layout]] = {
    "sbp": lambda text, mesh, begin: sbp_to_layout(parse_sbp(text, mesh, begin), mesh),
    "elemental": parse_elemental,
    "distal": parse_distal,
    "pblas": lambda text, mesh, begin: parse_descriptor(text, mesh, begin).layout(mesh),  # of a matrix of any shape
}
"""Parsers by prefix: text, mesh and the column to begin at → layout of a matrix."""

_PREFIX = re.compile(rf"\s*({'|'.join(_PARSERS)})\s*:(?!\s*(?:{'|'.join(CUTS)})\s*\()")
"""The word in front; `sbp:cyclic(2)` is an axis of that name."""


def parse_layout(text: str, mesh: MeshShape, dims: int = 2, shape: tuple[int, ...] | None = None) -> Layout:
    """Parse the text of a layout.

    Parameters
    ----------
    text : str
        A layout as PartitionSpec, SBP, DISTAL, Elemental or PBLAS descriptor.
    mesh : MeshShape
        The mesh whose axes it names.
    dims : int
        Number of dimensions (default 2). Others are possible in PartitionSpec and DISTAL only.
    shape : tuple of int, optional
        Shape of the matrix, which M and N of a PBLAS descriptor must equal.

    Returns
    -------
    Layout
        The layout.

    Raises
    ------
    LayoutError
        If the text does not parse, or names axes that the mesh does not have. It marks the character.
    """
    name, begin = _recognised(unquoted(text), mesh)
    if name == "pblas" and dims == 2 and shape is not None:
        made = parse_descriptor(text, mesh, begin)
        if (made.m, made.n) != shape:
            raise LayoutError(f"layout {text}: is of a matrix of shape {(made.m, made.n)}; this one has {shape}")
    if dims != 2:
        return parse_distal(text, mesh, begin, dims) if name == "distal" else parse_partition_spec(text, mesh, dims)
    return _PARSERS[name](text, mesh, begin) if name else parse_partition_spec(text, mesh, dims)


def _recognised(plain: str, mesh: MeshShape) -> tuple[str, int]:
    """Return the notation of a text without quotes, and the column where it begins; no name for our own."""
    if found := _PREFIX.match(plain):
        return found[1], found.end()
    if "->" in plain:
        return "distal", 0
    if plain.lstrip().startswith("["):
        return "elemental", 0
    if re.match(r"\s*desc\s*\(", plain):
        return "pblas", 0
    axes = {"S", "B", "P", *re.findall(r"\w+", plain)} & set(mesh.names)
    if not axes and re.fullmatch(r"[SBP0-9(),\s]*[SBP][SBP0-9(),\s]*", plain) and not re.match(r"\s*P\s*\(", plain):
        return "sbp", 0
    return "", 0


@dataclass(frozen=True)
class Written:
    """A layout in some notation, or why that cannot be."""

    text: str = ""  # text that `parse_layout` reads; empty if the notation cannot express the layout
    reason: str = ""  # reason why the notation cannot express the layout; empty if there is a text

    def __str__(self) -> str:
        return self.text or f"cannot: {self.reason}"


def notations(layout: Layout, mesh: MeshShape, shape: tuple[int, int] | None = None) -> dict[str, Written]:
    """Return the placement of a matrix in our notation, which has a text for every one, and in each that people know.

    A PBLAS descriptor needs the `shape` of the matrix.

    >>> from rma_mm.geometry.layout import everywhere
    >>> for name, written in notations(everywhere(), MeshShape((2, 3)), (8, 6)).items():
    ...     print(f"{name}: {written}")
    rma_mm: P(None, None)
    PartitionSpec: P(None, None)
    SBP: (B, B)
    DISTAL: xy->**
    Elemental: [(),()]
    PBLAS: cannot: PBLAS has no replicas; got copies along i
    """
    writers: dict[str, Callable[[], str]] = {
        "PartitionSpec": lambda: layout_to_partition_spec(layout, mesh),
        "SBP": lambda: sbp_text(layout_to_sbp(layout, mesh)),
        "DISTAL": lambda: layout_to_distal(layout, mesh),
        "Elemental": lambda: layout_to_elemental(layout, mesh),
        "PBLAS": lambda: str(layout_to_descriptor(layout, mesh, shape)),
    }
    written = {"rma_mm": Written(str(layout))}
    for name, write in writers.items():
        try:
            written[name] = Written(write())
        except LayoutError as error:
            written[name] = Written(reason=str(error))
    return written

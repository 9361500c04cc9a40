"""PBLAS descriptors: block-cyclic matrices and their sub-matrices (Blackford et al. 1997, "ScaLAPACK users' guide").

    desc(M, N, MB, NB, RSRC, CSRC)       blocks of MB × NB; process row RSRC and column CSRC have the first
    desc(M, N, MB, NB, RSRC, CSRC, C)    the same on a grid of ranks in column-major order

Rows go over the first mesh axis and columns over the second. All indices here begin at 0, in ScaLAPACK at 1. `numroc`
and the like are ScaLAPACK's own arithmetic of one dimension: `block` indices a block, `parts` process rows or columns.
"""

from __future__ import annotations

from operator import index
from typing import Any, Literal, cast

from rma_mm.classes import dataclass
from rma_mm.errors import LayoutError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.notations.reader import Reader

GridOrder = Literal["R", "C"]  # ranks row-major or column-major on the grid, as in BLACS

_FORMS = "desc(M, N, MB, NB, RSRC, CSRC), with C as a seventh entry for a column-major grid"
_NINE = ("DTYPE_", "CTXT_", "M_", "N_", "MB_", "NB_", "RSRC_", "CSRC_", "LLD_")
_LEAST = (("M", 0), ("N", 0), ("MB", 1), ("NB", 1), ("RSRC", 0), ("CSRC", 0))


# -- one dimension --------------------------------------------------------------------------------


def numroc(extent: int, block: int, part: int, source: int, parts: int) -> int:
    """Return how many of the first `extent` indices belong to `part`.

    >>> [numroc(10, 2, part, 1, 3) for part in range(3)]
    [2, 4, 4]
    """
    distance = (part - source) % parts
    whole, rest = divmod(extent, block)
    rounds, over = divmod(whole, parts)
    return rounds * block + (block if distance < over else rest if distance == over else 0)


def indxg2p(index: int, block: int, source: int, parts: int) -> int:
    return (source + index // block) % parts


# -- the descriptor -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Descriptor:
    """A block-cyclic matrix of m × n.

    >>> mesh = MeshShape((2, 3))
    >>> print(Descriptor(100, 80, 32, 16).layout(mesh, ia=40, ja=16, rows=50, cols=64))
    P('i:cyclic(32, 8, 1)', 'j:cyclic(16, 0, 1)')
    """

    m: int  # rows of the whole matrix
    n: int  # columns of the whole matrix
    mb: int  # rows of a block
    nb: int  # columns of a block
    rsrc: int = 0  # the process row with the first block
    csrc: int = 0  # the process column with the first block
    order: GridOrder = "R"  # the order of the ranks on the process grid

    def __post_init__(self) -> None:
        for (name, least), number in zip(_LEAST, self._numbers, strict=True):
            if number < least:
                raise LayoutError(f"descriptor {self}: got {name} = {number}; must be at least {least}")

    @property
    def _numbers(self) -> tuple[int, ...]:
        return self.m, self.n, self.mb, self.nb, self.rsrc, self.csrc

    def __str__(self) -> str:
        return f"desc({', '.join(map(str, self._numbers))}{', C' if self.order == 'C' else ''})"

    def layout(
        self, mesh: MeshShape, ia: int = 0, ja: int = 0, rows: int | None = None, cols: int | None = None
    ) -> Layout:
        """Return the placement of the sub-matrix of `rows` × `cols` at (ia, ja), by default all from there on.

        Raises LayoutError for a mesh that is not of two axes or lacks RSRC or CSRC, and for a sub-matrix that
        reaches over the edge.
        """
        self._check(mesh)
        self._ranges(ia, ja, rows, cols)
        cuts = zip(mesh.names, (self.mb, self.nb), (ia, ja), (self.rsrc, self.csrc), mesh.dims, strict=True)
        splits = tuple(
            (_cyclic(axis, block, at % block, indxg2p(at, block, source, parts)),)
            for axis, block, at, source, parts in cuts
        )
        return Layout(splits, grid=_column_major(mesh) if self.order == "C" else None)

    def local_shape(self, mesh: MeshShape, rank: int) -> tuple[int, int]:
        """Return the shape of the local array of `rank` for the whole matrix; (0, 0) for a rank beyond the mesh."""
        rows, cols = self.local_part(mesh, rank)
        return rows.stop - rows.start, cols.stop - cols.start

    def local_part(
        self, mesh: MeshShape, rank: int, ia: int = 0, ja: int = 0, rows: int | None = None, cols: int | None = None,
    ) -> tuple[slice, slice]:
        """Return the slices of `rank`'s local array that hold its part of a sub-matrix.

        Raises LayoutError as `layout` does.
        """
        self._check(mesh)
        if rank >= mesh.size:
            return slice(0, 0), slice(0, 0)
        coords = divmod(rank, mesh.dims[1]) if self.order == "R" else divmod(rank, mesh.dims[0])[::-1]
        cuts = zip((self.mb, self.nb), coords, (self.rsrc, self.csrc), mesh.dims, strict=True)
        edges = (
            slice(*(numroc(index, *cut) for index in ends))
            for ends, cut in zip(self._ranges(ia, ja, rows, cols), cuts, strict=True)
        )
        return next(edges), next(edges)

    def _check(self, mesh: MeshShape) -> None:
        _check_grid(mesh)
        for name, source, size in zip(("RSRC", "CSRC"), (self.rsrc, self.csrc), mesh.dims, strict=True):
            if source >= size:
                raise LayoutError(f"descriptor {self}: got {name} = {source}; on the mesh {mesh} it is 0 to {size - 1}")

    def _ranges(self, ia: int, ja: int, rows: int | None, cols: int | None) -> tuple[tuple[int, int], tuple[int, int]]:
        """First index and one more than the last, of the rows and columns of a sub-matrix."""
        ends = (self.m if rows is None else ia + rows), (self.n if cols is None else ja + cols)
        if not (0 <= ia <= ends[0] <= self.m and 0 <= ja <= ends[1] <= self.n):
            raise LayoutError(
                f"descriptor {self}: got the sub-matrix ({ia}:{ends[0]}, {ja}:{ends[1]}); "
                f"it lies within (0:{self.m}, 0:{self.n})"
            )
        return (ia, ends[0]), (ja, ends[1])


def _cyclic(axis: str, block: int, offset: int, source: int) -> Level:
    """Return a cyclic cut with no more arguments than it needs."""
    args = (block, offset, source) if source else (block, offset) if offset else (block,)
    return Level((axis,), "cyclic", args)


def _column_major(mesh: MeshShape) -> MeshShape:
    return MeshShape(mesh.dims[::-1], mesh.names[::-1])


def _check_grid(mesh: MeshShape) -> None:
    if len(mesh.dims) != 2:
        raise LayoutError(
            f"PBLAS has process grids of two axes; got the mesh {mesh} with {len(mesh.dims)}; "
            f"1x{mesh.size} would do for its {mesh.size} ranks"
        )


# -- text and layouts -----------------------------------------------------------------------------


def text_of(layout: Any) -> Any:
    """Return ScaLAPACK's descriptor of nine integers, a list or an array, as the text `desc(…)`; all else as it is.

    The context and the leading dimension, which differ between ranks, are left out. Raises LayoutError if the first
    integer is not 1, that of dense matrices.

    >>> text_of([1, 0, 100, 80, 32, 16, 0, 0, 52])
    'desc(100, 80, 32, 16, 0, 0)'
    """
    try:
        numbers = [] if isinstance(layout, str | Layout) else [index(x) for x in layout]
    except TypeError:
        numbers = []
    if len(numbers) != len(_NINE):
        return layout
    if numbers[0] != 1:
        raise LayoutError(f"layout: got the descriptor {numbers}; its first integer must be 1, of a dense matrix")
    return f"desc({', '.join(map(str, numbers[2:8]))})"


def parse_descriptor(text: str, mesh: MeshShape, begin: int = 0) -> Descriptor:
    """Return the descriptor that `text` spells from the column `begin` on; RSRC and CSRC may be left out.

    Raises LayoutError, with a mark under the offending character, where it is malformed or does not fit `mesh`.
    """
    reader = Reader(text, _FORMS, begin)
    if len(mesh.dims) != 2:
        reader.fail(f"process grids have two axes; got the mesh {mesh} with {len(mesh.dims)}")
    if reader.next("word", "the word desc") != "desc":
        reader.fail_before("expected the word desc")
    reader.mark("(")
    numbers: list[int] = []
    tops = (None, None, None, None, *mesh.dims)
    for (name, least), top in zip(_LEAST, tops, strict=True):
        if len(numbers) >= 4 and (reader.peek(")") or reader.tokens[reader.at][0] == "word"):
            break
        numbers.append(int(reader.next("number", name)))
        if numbers[-1] < least or (top is not None and numbers[-1] >= top):
            reader.fail_before(f"{name} is at least {least}" + ("" if top is None else f" and less than {top}"))
        reader.comma(")")
    order = "R" if reader.peek(")") else reader.next("word", "R or C, the order of the grid")
    if order not in ("R", "C"):
        reader.fail_before("expected R or C, the order of the grid")
    reader.mark(")")
    reader.end()
    m, n, mb, nb, rsrc, csrc = (*numbers, 0, 0)[:6]
    return Descriptor(m, n, mb, nb, rsrc, csrc, cast(GridOrder, order))


def layout_to_descriptor(layout: Layout, mesh: MeshShape, shape: tuple[int, int] | None) -> Descriptor:
    """Return the descriptor of a matrix of `shape` placed by `layout`.

    Raises LayoutError, saying why, if there is none; so does a matrix whose shape is not known.
    """
    _check_grid(mesh)
    if layout.grid is not None and layout.grid != _column_major(mesh):
        raise LayoutError(f"PBLAS has row-major and column-major grids of the mesh {mesh}; got the grid {layout.grid}")
    if layout.partial:
        raise LayoutError(f"PBLAS has no partial sums; got {', '.join(f'{axis}=sum' for axis in layout.partial)}")
    if shape is None or len(layout.splits) != 2:
        raise LayoutError("PBLAS descriptors hold the shape of a matrix of two dimensions; none was given")
    layout.check(shape, mesh)
    for split, axis in zip(layout.splits, mesh.names, strict=True):
        if any(level.axes != (axis,) for level in split):
            raise LayoutError(f"PBLAS cuts rows over {mesh.names[0]} and columns over {mesh.names[1]}; got {layout}")
    cuts = zip(layout.splits, shape, mesh.names, mesh.dims, strict=True)
    (mb, rsrc), (nb, csrc) = (_blocks(*cut, dict(layout.pins)) for cut in cuts)
    return Descriptor(*shape, mb, nb, rsrc, csrc, "R" if layout.grid is None else "C")


def _blocks(split: Split, extent: int, axis: str, parts: int, pins: dict[str, int]) -> tuple[int, int]:
    """Block and source of one dimension over `axis`; raises LayoutError if it is not dealt out in blocks."""
    if not split and (axis in pins or parts == 1):
        return max(extent, 1), pins.get(axis, 0)
    if not split:
        raise LayoutError(f"PBLAS has no replicas; got copies along {axis}")
    (level,) = split
    if level.skew:
        raise LayoutError(f"PBLAS has no skew; got {axis} shifted by {', '.join(level.skew)}")
    if level.kind == "cyclic":
        block, offset, source = (*map(int, level.args), 0, 0)[:3]
        if offset % block:
            raise LayoutError(f"PBLAS has whole first blocks; got an offset of {offset} into blocks of {block}")
        return block, (source + offset // block) % parts
    if level.kind == "even" and extent % parts == 0:
        return max(extent // parts, 1), 0
    raise LayoutError(f"PBLAS has blocks of one size; got {level.kind} cuts of {extent} into {parts}")

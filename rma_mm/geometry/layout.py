"""Placements: which rank owns which part of a matrix (or of the iteration space).

A `Layout` places each dimension by a `Split`: the mesh axes that cut it, outermost first. A mesh axis that no
dimension names replicates the matrix, pins it to one coordinate, or holds partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from rma_mm.classes import dataclass
from rma_mm.errors import LayoutError
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape, regrouped
from rma_mm.geometry.span import Region, Span


@dataclass(frozen=True)
class Layout:
    """Placement of a matrix on a mesh: which rank owns which elements.

    >>> from rma_mm.geometry.notation import parse_layout
    >>> mesh = MeshShape((2, 2))
    >>> parse_layout("P('i', 'j')", mesh).region((5, 4), mesh, 3)
    Region(2:5 x 2:4)
    """

    splits: tuple[Split, ...]
    """One split per dimension."""
    pins: tuple[tuple[str, int], ...] = ()
    """(axis, coordinate): only ranks at this coordinate own anything."""
    partial: tuple[str, ...] = ()
    """Axes along which every rank holds a summand; the matrix is their sum."""
    grid: MeshShape | None = None
    """The grid that the axes are of, over the first ranks of the mesh, where it is not the mesh itself."""

    def mesh(self, mesh: MeshShape) -> MeshShape:
        """Return the grid that the axes of this placement are of, where the ranks are those of `mesh`."""
        return mesh if self.grid is None else regrouped(self.grid, mesh.node_of_rank)

    def coords(self, mesh: MeshShape, rank: int) -> dict[str, int] | None:
        """Coordinates of `rank` along the axes of this placement; None for a rank beyond its grid."""
        mesh = self.mesh(mesh)
        return mesh.coords(rank) if rank < mesh.size else None

    # -- axes -------------------------------------------------------------------------------------

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Axes that cut some dimension, in the order of the dimensions."""
        return tuple(axis for split in self.splits for level in split for axis in level.axes)

    def outline(self, mesh: MeshShape, by_column: bool = False) -> tuple[object, ...]:
        """Return the placement without the positions of its cuts: the axes that cut, shift, pin and sum.

        by_column: it may also be in another place in each column of ranks.
        """
        mesh = self.mesh(mesh)
        free = [[by_column and level.is_table(mesh) for level in split] for split in self.splits]
        cuts = tuple(
            tuple((level.axes, () if is_free else level.skew) for level, is_free in zip(split, each, strict=True))
            for split, each in zip(self.splits, free, strict=True)
        )
        return cuts, self.pins, self.partial, self.grid

    @property
    def skew_axes(self) -> tuple[str, ...]:
        """Axes whose coordinate shifts a window."""
        return tuple(axis for split in self.splits for level in split for axis in level.skew)

    def replicated_axes(self, mesh: MeshShape) -> tuple[str, ...]:
        """Axes along which the same elements are held again."""
        used = {*self.split_axes, *self.partial, *(axis for axis, _ in self.pins)}
        return tuple(axis for axis in self.mesh(mesh).names if axis not in used)

    def check(self, shape: tuple[int, ...], mesh: MeshShape) -> None:
        """Raise LayoutError if this placement does not fit the mesh or a matrix of `shape`."""
        if self.grid is not None and self.grid.size > mesh.size:
            raise LayoutError(f"layout {self}: its grid needs {self.grid.size} ranks; the mesh {mesh} has {mesh.size}")
        mesh = self.mesh(mesh)
        used = [*self.split_axes, *self.partial, *(axis for axis, _ in self.pins)]
        for axis in (*used, *self.skew_axes):
            if axis not in mesh.names:
                raise LayoutError(
                    f"layout {self}: got the axis {axis!r}; the mesh {mesh} has the axes {', '.join(mesh.names)}"
                )
        for axis in used:
            if used.count(axis) > 1:
                raise LayoutError(f"layout {self}: the axis {axis!r} is used twice; each splits, pins or sums once")
        for axis, coordinate in self.pins:
            if not 0 <= coordinate < mesh.axis_size(axis):
                last = mesh.axis_size(axis) - 1
                raise LayoutError(f"layout {self}: got {axis}={coordinate}; the axis has coordinates 0 to {last}")
        if len(self.splits) != len(shape):
            raise LayoutError(f"layout {self}: got {len(self.splits)} dimensions; the shape {shape} has {len(shape)}")
        for split, extent in zip(self.splits, shape, strict=True):
            for n, level in enumerate(split):
                if n and level.kind == "bounds" and not level.fold:
                    raise LayoutError(f"layout {self}: bounds must be the first cut of a dimension")
                level.check(level.fold[0][level.fold[1]] if level.fold else extent, mesh)
        self._check_skew()

    def _check_skew(self) -> None:
        """A window may be shifted by the axes of another dimension only, and only where that one is not shifted."""
        skewed = [any(level.skew for level in split) for split in self.splits]
        for split in self.splits:
            own = {axis for level in split for axis in level.axes}
            if own & {axis for level in split for axis in level.skew} or sum(skewed) > 1:
                raise LayoutError(f"layout {self}: only one dimension may be skewed, and by axes that do not cut it")

    # -- who owns what ----------------------------------------------------------------------------

    def span(self, dim: int, extent: int, mesh: MeshShape, coords: Mapping[str, int]) -> Span:
        """Indices of dimension `dim` held at `coords`, pins apart."""
        split = self.splits[dim]
        if not split:
            return Span.range(0, extent)
        return _split_span(split, extent, mesh, tuple(coords[axis] for axis in mesh.names))

    def holds(self, coords: Mapping[str, int]) -> bool:
        """True if the pins allow the rank at `coords` to own anything."""
        return all(coords[axis] == coordinate for axis, coordinate in self.pins)

    def region(self, shape: tuple[int, ...], mesh: MeshShape, rank: int) -> Region:
        """Return the box that `rank` holds; empty for a rank beyond the mesh or off a pin."""
        mesh = self.mesh(mesh)
        coords = mesh.coords(rank) if rank < mesh.size else {}
        if rank >= mesh.size or not self.holds(coords):
            return Region(Span() for _ in shape)
        return Region(self.span(d, extent, mesh, coords) for d, extent in enumerate(shape))

    def overlapping(
        self, shape: tuple[int, ...], mesh: MeshShape, region: Region, near: int
    ) -> list[tuple[int, Region]]:
        """Return the holders of `region` and the part each gives: disjoint, covering, one replica of each element.

        Of several replicas the rank `near` itself comes first, then its node, then the one at its own coordinates
        along the replicated axes (so that readers spread). Along partial axes it is the summand at `near`'s own
        coordinates.
        """
        mesh = self.mesh(mesh)
        base = mesh.coords(near % mesh.size) | dict(self.pins)
        return [(self._nearest(mesh, at, near), part) for at, part in self._parts(shape, mesh, region, base)]

    def _parts(
        self, shape: tuple[int, ...], mesh: MeshShape, region: Region, base: dict[str, int]
    ) -> Iterator[tuple[dict[str, int], Region]]:
        """Coordinates along the split axes whose part meets `region`, with the common part."""
        order = sorted(range(len(shape)), key=lambda d: any(level.skew for level in self.splits[d]))
        partial: list[tuple[dict[str, int], dict[int, Span]]] = [(base, {})]
        for d in order:
            split, wanted = self.splits[d], region[d]
            skew = [axis for level in split for axis in level.skew]
            grown = []
            for coords, spans in partial:
                for at, held in _split_spans(split, shape[d], mesh, tuple((axis, coords[axis]) for axis in skew)):
                    if common := held & wanted:
                        grown.append(({**coords, **at}, {**spans, d: common}))
            partial = grown
        for coords, spans in partial:
            yield coords, Region(spans[d] for d in range(len(shape)))

    def _nearest(self, mesh: MeshShape, coords: dict[str, int], near: int) -> int:
        """Return the replica of the part at `coords` that suits the rank `near` best."""
        free = tuple(axis for axis in self.replicated_axes(mesh) if axis not in self.skew_axes)
        default = mesh.rank(coords)
        if not free or near >= mesh.size:
            return default
        replicas = [mesh.rank(at) for at in mesh.along(free, coords)]
        if near in replicas:
            return near
        if mesh.node_of_rank[default] == mesh.node_of_rank[near]:
            return default
        return next((r for r in replicas if mesh.node_of_rank[r] == mesh.node_of_rank[near]), default)

    # -- layouts made from layouts ----------------------------------------------------------------

    @property
    def T(self) -> Layout:
        """The placement of the transposed matrix on the same memory."""
        return replace(self, splits=self.splits[::-1])

    def folded(self, shape: tuple[int, ...]) -> Layout:
        """Return the placement of an array of `shape` as a matrix: all dimensions but the last are its rows.

        >>> from rma_mm.geometry.notation import parse_layout
        >>> mesh = MeshShape((2, 2))
        >>> parse_layout("P('i', 'j', None)", mesh, 3).folded((4, 2, 5)).region((8, 5), mesh, 1)
        Region(1:2,3:4 x 0:5)
        """
        if len(shape) == 2:
            return self
        parts = [_parts_of(split, extent) for split, extent in zip(self.splits, shape, strict=True)][:-1]
        extents, rows = tuple(extent for part in parts for extent in part), []
        for dim, split in enumerate(self.splits[:-1]):
            begin = sum(map(len, parts[:dim]))
            rows += [replace(x, fold=(extents, begin + (x.fold[1] if x.fold else 0))) for x in split]
        return replace(self, splits=(tuple(rows), self.splits[-1]))

    @property
    def transposed(self) -> Layout:
        """Return the placement of the transposed matrix on the same grid: equal blocks over each other's axes.

        >>> print(Layout(((Level(("i",), "cyclic", (2,)),), (Level(("j",), "cyclic", (3,)),))).transposed)
        P('j:cyclic(2)', 'i:cyclic(3)')
        """
        rows, cols = self.splits
        return replace(self, splits=tuple(
            tuple(replace(own, axes=other.axes) for own, other in zip(mine, theirs, strict=True))
            for mine, theirs in ((rows, cols), (cols, rows))
        ))

    def split_replicas(self, mesh: MeshShape) -> Layout:
        """Return this placement with replicas dividing their elements: replicated axes cut one dimension further.

        It is the rows, or the columns where the rows are skewed. The part that a rank holds is within what it holds
        here, and dense there.
        """
        extra = tuple(Level((axis,)) for axis in self.replicated_axes(mesh))
        if not extra:
            return self
        dim = int(any(level.skew for level in self.splits[0]))
        return replace(self, splits=tuple(split + extra * (d == dim) for d, split in enumerate(self.splits)))

    def single(self, mesh: MeshShape) -> Layout:
        """This placement with each element held once and no partial sums: all spare axes cut."""
        return replace(self, partial=()).split_replicas(mesh)

    def is_single(self, mesh: MeshShape) -> bool:
        """True if each element is held by exactly one rank (axes of one rank apart)."""
        spare = (*self.replicated_axes(mesh), *self.partial)
        return all(self.mesh(mesh).axis_size(axis) == 1 for axis in spare)

    def __repr__(self) -> str:
        return f"Layout({self})"

    def __str__(self) -> str:
        dims = [_split_text(split) for split in self.splits]
        dims += [f"{axis}={coordinate}" for axis, coordinate in self.pins]
        dims += [f"{axis}=sum" for axis in self.partial]
        text = f"P({', '.join(dims)})"
        if self.grid is not None:
            sizes = zip(self.grid.names, self.grid.dims, strict=True)
            text += f" on {', '.join(f'{name}={size}' for name, size in sizes)}"
        return text


def _parts_of(split: Split, extent: int) -> tuple[int, ...]:
    return next((level.fold[0] for level in split if level.fold), (extent,))


@lru_cache(maxsize=8192)
def _split_span(split: Split, extent: int, mesh: MeshShape, at: tuple[int, ...]) -> Span:
    """Indices held at the coordinates `at`; remembered, for lowering asks for the same few again and again."""
    coords = dict(zip(mesh.names, at, strict=True))
    folded = [level for level in split if level.fold]
    span = _folded_span(folded, mesh, coords) if folded else Span.range(0, extent)
    for level in split:
        if not level.fold:
            span = span.take(level.part(len(span), mesh, coords))
    return span


def _folded_span(levels: Sequence[Level], mesh: MeshShape, coords: Mapping[str, int]) -> Span:
    """Indices of a dimension that is several in one, each of which is cut by levels of its own."""
    assert levels[0].fold
    spans = [Span.range(0, extent) for extent in levels[0].fold[0]]
    for level in levels:
        assert level.fold
        dim = level.fold[1]
        spans[dim] = spans[dim].take(level.part(len(spans[dim]), mesh, coords))
    return Span.folded(spans, levels[0].fold[0])


@lru_cache(maxsize=4096)
def _split_spans(
    split: Split, extent: int, mesh: MeshShape, shifted: tuple[tuple[str, int], ...]
) -> list[tuple[dict[str, int], Span]]:
    """All parts of a dimension: coordinates along the axes that cut it, and indices held there; empty ones left out.

    shifted: coordinates along the axes that shift them.
    """
    axes = tuple(axis for level in split for axis in level.axes)
    base = dict.fromkeys(mesh.names, 0) | dict(shifted)
    found = []
    for coords in mesh.along(axes, base):
        span = _split_span(split, extent, mesh, tuple(coords.values())) if split else Span.range(0, extent)
        if span:
            found.append(({axis: coords[axis] for axis in axes}, span))
    return found


def _split_text(split: Split) -> str:
    """Return a dimension in PartitionSpec form: None, 'i', ('i', 'j'), with cuts other than even behind a colon."""
    words = []
    for level in split:
        args = ", ".join(str(int(arg)) if arg % 1 == 0 else repr(arg) for arg in level.args)
        cut = "" if level.kind == "even" else f":{level.kind}({args})"
        skew = f":skew({', '.join(level.skew)})" if level.skew else ""
        fold = f" of {level.fold[1]} in {'x'.join(map(str, level.fold[0]))}" if level.fold else ""
        words.append(f"'{'+'.join(level.axes)}{cut}{skew}{fold}'")
    return words[0] if len(words) == 1 else f"({', '.join(words)})" if words else "None"


def everywhere(dims: int = 2) -> Layout:
    return Layout(((),) * dims)

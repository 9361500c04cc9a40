"""Products of batches: which axes of the mesh cut the batch, and which the rows, columns and sums of its products.

Every rank multiplies one box of batch × m × n × k. Operands are brought to where its faces are needed, unless they lie
so already, and what ranks sum apart is added up in the end. A batch that is cut over all ranks moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod

from rma_mm.classes import dataclass
from rma_mm.errors import ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level, Split
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region
from rma_mm.policy.model.machine import Machine
from rma_mm.schedule.algorithm import same_place

MATRIX = {"A": "mk", "B": "kn", "C": "mn"}  # which of m, n and k are the rows and columns of op(A), op(B) and C
Fold = tuple[tuple[int, ...], int] | None  # which of several dimensions in one is cut; see `Level.fold`
Cuts = tuple[tuple[str, Split], ...]  # cuts of dimensions, by name; a batch's are called by the axis of C, "0" first


@dataclass(frozen=True)
class Batch:
    """C[…, m, n] = A[…, m, k] @ B[…, k, n], where the leading dimensions of A and B broadcast as NumPy's do."""

    a: tuple[int, ...]  # the shape of A as it is stored
    b: tuple[int, ...]  # the shape of B as it is stored
    transposed: str = ""  # which of A and B are stored with their last two dimensions exchanged
    folds: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Dimensions among m, n and k that combine several, with their extents; each of these is cut by itself."""

    def __post_init__(self) -> None:
        for name, shape in (("A", self.a), ("B", self.b)):
            if len(shape) < 2:
                raise ShapeError(f"{name}: got an array of shape {shape}; matmul takes matrices and batches of them")
        leading = self.a[:-2], self.b[:-2]
        for back in range(1, 1 + min(map(len, leading))):
            one, other = leading[0][-back], leading[1][-back]
            if one != other and 1 not in (one, other):
                raise ShapeError(
                    f"shapes: A is {self.a}, B is {self.b}; batch axis {-2 - back} has {one} in A and {other} in B, "
                    f"which do not broadcast: they must be equal, or one of them 1"
                )
        inner = [dict(zip(self.dims(x), self.shape(x), strict=True))["k"] for x in "AB"]
        if inner[0] != inner[1]:
            turned = [f"{x} is transposed" for x in self.transposed]
            said = f" ({', '.join(turned)})" if turned else ""
            raise ShapeError(
                f"shapes: A is {self.a}, B is {self.b}{said}; the inner dimensions {inner[0]} and {inner[1]} must be "
                f"equal"
            )

    @cached_property
    def extents(self) -> dict[str, int]:
        """The extent of each dimension by name: those of the batch, then m, n and k."""
        depth = max(len(self.a), len(self.b)) - 2
        found = {str(dim): 1 for dim in range(depth)} | dict.fromkeys("mnk", 1)
        for x in "AB":
            found |= {dim: extent for dim, extent in zip(self.dims(x), self.shape(x), strict=True) if extent != 1}
        return found

    def dims(self, x: str) -> tuple[str, ...]:
        """Return the names of the dimensions of A, B or C, as it is stored."""
        depth = max(len(self.a), len(self.b)) - 2
        own = depth if x == "C" else len(self.shape(x)) - 2
        last = MATRIX[x][::-1] if x in self.transposed else MATRIX[x]
        return (*map(str, range(depth - own, depth)), *last)

    def shape(self, x: str) -> tuple[int, ...]:
        """Return the shape of A, B or C, as it is stored."""
        if x == "C":
            return tuple(self.extents[dim] for dim in self.dims("C"))
        return self.a if x == "A" else self.b

    def layout(self, x: str, cuts: Mapping[str, Split]) -> Layout:
        """Return the layout of A, B or C for these cuts; ranks hold partial sums of C if k is cut."""
        splits = [
            cuts.get(dim, ()) if extent == self.extents[dim] else ()
            for dim, extent in zip(self.dims(x), self.shape(x), strict=True)
        ]
        summed = tuple(axis for level in cuts.get("k", ()) for axis in level.axes) if x == "C" else ()
        return Layout(tuple(splits), partial=summed)

    def parts(self) -> list[tuple[str, Fold]]:
        """Return the dimensions that may be cut, with folded ones by each of their parts."""
        folds = dict(self.folds)
        found: list[tuple[str, Fold]] = []
        for dim, extent in self.extents.items():
            inner = folds.get(dim, ())
            found += [(dim, (inner, n)) for n, part in enumerate(inner) if part > 1]
            found += [(dim, None)] * (not inner and extent > 1)
        return found

    def lying(self, x: str, cuts: Mapping[str, Split], mesh: MeshShape) -> Layout:
        """Return the layout of A, B or C if its caller gives none: as needed, and for a C with k cut, cut further."""
        inner, cuts = self.layout(x, cuts), dict(cuts)
        if not inner.partial:
            return inner
        parts = [(dim, fold) for dim, fold in self.parts() if dim in self.dims("C")]
        if not parts:
            return replace(inner, partial=(), pins=tuple((axis, 0) for axis in inner.partial))
        for axis in inner.partial:
            dim, fold = max(parts, key=lambda part: self._left(part, cuts, mesh))
            cuts[dim] = (*cuts.get(dim, ()), Level((axis,), fold=fold))
        return replace(self.layout(x, cuts), partial=())

    def _left(self, part: tuple[str, Fold], cuts: Mapping[str, Split], mesh: MeshShape) -> float:
        """Return the number of indices of a dimension that a rank has."""
        dim, fold = part
        axes = [axis for level in cuts.get(dim, ()) if level.fold == fold for axis in level.axes]
        return (fold[0][fold[1]] if fold else self.extents[dim]) / prod(map(mesh.axis_size, axes))

    def cuts_of(self, x: str, layout: Layout | None) -> dict[str, Split] | None:
        """Return the cuts by which A, B or C lies as `layout` says; None if none do."""
        if layout is None or layout.partial or layout.pins or layout.grid or layout.skew_axes:
            return None
        found = {dim: split for dim, split in zip(self.dims(x), layout.splits, strict=True) if split}
        return found if self.layout(x, found) == layout else None


def candidates(
    batch: Batch, mesh: MeshShape, layouts: Mapping[str, Layout | None], may_sum: bool
) -> list[dict[str, Split]]:
    """Return every way to cut the product, each once: first along existing placements, then even cuts.

    may_sum: whether k may be cut, so that sums of several ranks are added up.
    """
    dims = [(dim, fold) for dim, fold in batch.parts() if may_sum or dim != "k"]
    axes = [axis for axis in mesh.names if mesh.axis_size(axis) > 1]
    bases = [found for x in "ABC" if (found := batch.cuts_of(x, layouts.get(x))) and (may_sum or "k" not in found)]
    every: dict[Cuts, dict[str, Split]] = {}
    for base in (*bases, {}):
        for cuts in _completed(base, dims, axes):
            every.setdefault(tuple(sorted(cuts.items())), cuts)
    return list(every.values())


def _completed(base: Mapping[str, Split], dims: list[tuple[str, Fold]], axes: list[str]) -> Iterator[dict[str, Split]]:
    """`base` with every axis that it leaves to spare cutting some dimension evenly, or none."""
    used = {axis for split in base.values() for level in split for axis in level.axes}
    spare = [axis for axis in axes if axis not in used]
    for chosen in product([*dims, ("", None)], repeat=len(spare)):
        cuts = dict(base)
        for axis, (dim, fold) in zip(spare, chosen, strict=True):
            if dim:
                cuts[dim] = (*cuts.get(dim, ()), Level((axis,), fold=fold))
        yield cuts


@dataclass(frozen=True)
class BatchPrices:
    """Prices of one rank's part of a product of batches."""

    machine: Machine
    kernel: tuple[str, str]  # element type and name of the local kernel
    itemsize: Mapping[str, int]  # bytes of an element of A, B and C
    moved: Mapping[str, int]  # the same where they are brought to, and where C is summed
    flavours: Mapping[str, str]  # the windows that A, B and C are read and added to through


@dataclass(frozen=True)
class BatchLoad:
    """Work of one rank for a product of batches that is cut in one way."""

    seconds: float
    words: int  # elements that it takes from other ranks, or adds to theirs
    nbytes: int
    """Bytes of operands, result, and what is brought or summed beside them; of the way that is taken scratch, too."""


def batch_load(
    batch: Batch, mesh: MeshShape, rank: int, cuts: Mapping[str, Split], layouts: Mapping[str, Layout | None],
    prices: BatchPrices,
) -> BatchLoad:
    """Return the work of `rank`. layouts: where A, B and C lie, None for wherever the product wants them."""
    link = "own" if mesh.size == 1 else "node" if len(set(mesh.node_of_rank)) == 1 else "between"
    machine = prices.machine
    seconds, words, held = _multiplying(batch, mesh, rank, cuts, prices), 0, 0
    for x in "ABC":
        shape, inner = batch.shape(x), batch.layout(x, cuts)
        outer = layouts.get(x) or batch.lying(x, cuts, mesh)
        here, there = (layout.region(shape, mesh, rank) for layout in (inner, outer))
        held += there.size * prices.itemsize[x]
        if same_place(inner, outer, shape, mesh):
            continue
        itemsize = prices.moved[x]
        held += (here.size + there.size * (x == "C")) * itemsize
        moved, wanted = _moved(here, there, inner, outer, x)
        words += moved
        cost = machine.cost(link, "accumulate" if (inner if x == "C" else outer).partial else "get", prices.flavours[x])
        copied = machine.cost("own", "copy").seconds((wanted - moved) * itemsize)
        seconds += cost.seconds(moved * itemsize, 2) + copied + 2 * machine.meet(mesh.size)
    return BatchLoad(seconds, words, held)


def box(batch: Batch, mesh: MeshShape, rank: int, cuts: Mapping[str, Split]) -> tuple[int, ...]:
    """Return the extents of a rank's products: the batch's, then m, n and k."""
    layout = Layout(tuple(cuts.get(dim, ()) for dim in batch.extents))
    return layout.region(tuple(batch.extents.values()), mesh, rank).shape


def _multiplying(batch: Batch, mesh: MeshShape, rank: int, cuts: Mapping[str, Split], prices: BatchPrices) -> float:
    *count, m, n, k = box(batch, mesh, rank, cuts)
    return prod(count) * prices.machine.kernel(*prices.kernel).seconds(m, n, k) if prod((*count, m, n, k)) else 0.0


def _moved(here: Region, there: Region, inner: Layout, outer: Layout, x: str) -> tuple[int, int]:
    """(words from or to other ranks, words in all) of one operand on one rank."""
    source, target = (inner, outer) if x == "C" else (outer, inner)
    wanted, has = (there, here) if x == "C" else (here, there)
    summed = has.size if source.partial else 0  # pushed to where each element is once, and taken from there
    common = 0 if source.partial or target.partial else (wanted & has).size
    return wanted.size - common + summed, wanted.size + summed


def cuts_text(cuts: Mapping[str, Split], batch: Batch) -> str:
    said = [
        f"{_name(dim)} over {', '.join('+'.join(level.axes) for level in cuts[dim])}"
        for dim in batch.extents
        if cuts.get(dim)
    ]
    return "; ".join(said) or "nothing is cut"


def _name(dim: str) -> str:
    return f"batch axis {dim}" if dim.isdecimal() else {"m": "rows", "n": "columns", "k": "sums"}[dim]


def best(shares: Iterable[BatchLoad], limit: int | None, rests: bool = False) -> int | None:
    """Return the index of the fastest load whose memory fits, or None.

    rests: whether those are excluded that move words.
    """
    able = [
        (each.seconds, n) for n, each in enumerate(shares)
        if (limit is None or each.nbytes <= limit) and not (rests and each.words)
    ]
    return min(able)[1] if able else None

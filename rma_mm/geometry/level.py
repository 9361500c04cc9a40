"""Cuts of one dimension: levels over mesh axes, outermost first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite, prod
from typing import Literal

from rma_mm.classes import dataclass
from rma_mm.errors import LayoutError
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Span, even_part

MOST_BLOCKS = 2**20  # blocks that a cyclic cut deals out; each is looked at when a product is planned
CutKind = Literal["even", "cyclic", "weights", "bounds"]


@dataclass(frozen=True)
class Level:
    """One cut of a dimension over one or more mesh axes (taken together, row-major)."""

    axes: tuple[str, ...]  # the mesh axes whose combined coordinate numbers the parts
    kind: CutKind = "even"
    """even; cyclic (args: block[, offset[, source]]); weights (args: one per part); bounds (args: 0, …, extent, or such
    a list for each coordinate along `skew`)."""
    args: tuple[float, ...] = ()  # what the kind needs
    skew: tuple[str, ...] = ()
    """Axes that shift the parts circularly by coordinate · extent / size each: Cannon's windows. Of bounds that are
    several lists, axes that say which: columns of ranks that cut their rows each in another way."""
    fold: tuple[tuple[int, ...], int] | None = None
    """If the dimension combines several (the last varies fastest): their extents, and the index of the one that is
    cut.
    """

    def part(self, extent: int, mesh: MeshShape, coords: Mapping[str, int]) -> Span:
        """Positions 0…extent − 1 that belong to the part at `coords`."""
        index, count = mesh.index(self.axes, coords)
        if self.kind == "cyclic":
            block, *rest = map(int, self.args)
            part = Span.cyclic(extent, block, count, index, *rest)
        elif self.kind == "bounds":
            at = index + mesh.index(self.skew, coords)[0] * (count + 1) * self.is_table(mesh)
            part = Span.range(int(self.args[at]), int(self.args[at + 1]))
        elif self.kind == "weights":
            total = sum(self.args)
            edges = [round(extent * sum(self.args[:n]) / total) for n in (index, index + 1)]
            part = Span.range(*edges)
        else:
            part = even_part(extent, index, count)
        if not self.skew or self.is_table(mesh):
            return part
        return _rotated(part, sum(coords[axis] * extent // mesh.axis_size(axis) for axis in self.skew), extent)

    def is_table(self, mesh: MeshShape) -> bool:
        return self.kind == "bounds" and len(self.args) > 1 + prod(mesh.axis_size(axis) for axis in self.axes)

    def check(self, extent: int, mesh: MeshShape) -> None:
        """Raise LayoutError if this cut cannot cut `extent` indices over this mesh."""
        count = prod(mesh.axis_size(axis) for axis in self.axes)
        if self.kind == "cyclic" and (fault := cyclic_fault(self.args, count)):
            raise LayoutError(f"cyclic: got {self.args}; {fault[1]}")
        if self.kind == "cyclic" and extent > MOST_BLOCKS * self.args[0]:
            raise LayoutError(
                f"cyclic: got blocks of {self.args[0]:.0f} for {extent} indices; a cut deals out at most {MOST_BLOCKS} "
                f"blocks, so a block has {-(-extent // MOST_BLOCKS)} indices or more"
            )
        if self.kind == "weights" and not (all(0 <= w < inf for w in self.args) and sum(self.args) > 0):
            raise LayoutError(f"weights: got {self.args}; they must be finite, at least 0, and not all 0")
        if self.kind == "bounds" and not all(map(is_whole, self.args)):
            raise LayoutError(f"bounds: got {self.args}; they must be whole numbers")
        if self.kind == "weights" and len(self.args) != count:
            raise LayoutError(
                f"weights: got {len(self.args)} for {count} parts over {self.axes}; one is needed per part"
            )
        if self.kind == "bounds":
            lists = [list(self.args[at : at + count + 1]) for at in range(0, max(1, len(self.args)), count + 1)]
            most = prod(mesh.axis_size(axis) for axis in self.skew)
            is_right = all(len(x) > count and x == sorted(x) and (x[0], x[-1]) == (0, extent) for x in lists)
            if not is_right or len(lists) not in (1, most):
                more = f", or {most} such lists one behind the other" if most > 1 else ""
                raise LayoutError(
                    f"bounds: got {self.args} for {count} parts of {extent} indices; "
                    f"{count + 1} ascending bounds are needed, from 0 to {extent}{more}"
                )


def is_whole(number: float) -> bool:
    return isfinite(number) and number % 1 == 0


def cyclic_fault(args: Sequence[float], parts: int) -> tuple[int, str] | None:
    """The first argument of a cyclic cut into `parts` that is wrong, and the rule it breaks; None if none is."""
    if not args or not is_whole(args[0]) or args[0] < 1:
        return 0, "cyclic takes a whole block size of at least 1"
    if len(args) > 1 and not (is_whole(args[1]) and args[1] >= 0):
        return 1, "cyclic takes a whole offset of at least 0 behind the block size"
    if len(args) > 2 and not (is_whole(args[2]) and 0 <= args[2] < parts):
        return 2, f"the third number of cyclic is the part with the first block, 0 to {parts - 1}"
    return (3, "cyclic takes at most a block size, an offset and a part") if len(args) > 3 else None


def _rotated(part: Span, shift: int, extent: int) -> Span:
    """`part` moved up by `shift`, going round the end of 0…extent − 1."""
    pieces = [Span.window(extent, a + shift, b - a) for a, b in part.runs]
    return Span(run for piece in pieces for run in piece.runs)


Split = tuple[Level, ...]
"""Cuts of one dimension: levels, outermost first, each of which cuts the positions left by the one before."""

"""The loops into which indices are cut, over ranks and in time: what they are called, and how often they run.

An index m that is shared out becomes mo over ranks and mi on each; one that is cut in time becomes two again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from rma_mm.classes import dataclass
from rma_mm.geometry.mesh import AXIS_NAMES
from rma_mm.schedule.algorithm import OWNERS, Cut, Cuts

SIZES = dict(zip("XYZWVU", AXIS_NAMES, strict=True))  # ranks along an axis → the axis
_LETTERS = {axis: letter for letter, axis in SIZES.items()}


@dataclass(frozen=True)
class CutLoops:
    """Indices, and the cuts of each."""

    indices: tuple[str, str, str]
    work: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Index → the axes that share it out, outermost first."""
    cuts: Mapping[str, Cuts] = field(default_factory=dict)
    """Index → how each rank's share of it is cut in time, each cut within the one before."""

    @property
    def distributed(self) -> tuple[str, ...]:
        return tuple(f"{index}o" for index in self.work)

    def outer(self, index: str) -> tuple[str, ...]:
        """Return the loops that cut a rank's share of an index in time."""
        base = f"{index}i" if index in self.work else index
        return tuple(f"{base}{'i' * n}o" for n in range(len(self.cuts.get(index, ()))))

    def innermost(self, index: str) -> str:
        return f"{index}{'i' * ((index in self.work) + len(self.cuts.get(index, ())))}"

    def local(self, index: str) -> tuple[str, ...]:
        return (*self.outer(index), self.innermost(index))

    def over_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{index}o" for index, named in self.work.items() if set(named) & set(axes))

    # -- in symbols -------------------------------------------------------------------------------

    @property
    def relations(self) -> list[str]:
        return [relation for index in self.indices for relation, _ in self._steps(index)]

    @property
    def extents(self) -> dict[str, str]:
        """Loop → how often it runs."""
        found: dict[str, str] = {}
        for index in self.indices:
            outer = [loop for loop in self.distributed if loop == f"{index}o"] + [*self.outer(index)]
            found |= dict(zip(outer, (count for _, (count, _) in self._steps(index)), strict=True))
            found[self.innermost(index)] = self.tile(index, len(self.outer(index)))
        return found

    def tile(self, index: str, depth: int) -> str:
        """Indices of a rank's share of an index within so many cuts."""
        extents = [index.upper(), *(within for _, (_, within) in self._steps(index))]
        return extents[(index in self.work) + depth]

    def _steps(self, index: str) -> list[tuple[str, tuple[str, str]]]:
        """Return, for each cut of an index, the relation and the trip counts of its outer and its inner loop."""
        shared = "*".join(_LETTERS[axis] for axis in self.work.get(index, ()))
        cuts = [("", shared)] * bool(shared) + [(str(cut.size or ""), _parts(cut)) for cut in self.cuts.get(index, ())]
        loop, extent, found = index, index.upper(), []
        for size, parts in cuts:
            word, count, times = ("split", size, f"{extent}/{size}") if size else ("divide", parts, parts)
            extent = size or f"{extent}/{f'({parts})' if '*' in parts else parts}"
            found.append((f"{word}({loop}, {loop}o, {loop}i, {count})", (times, extent)))
            loop = f"{loop}i"
        return found


def _parts(cut: Cut) -> str:
    return "owners" if cut == OWNERS else _LETTERS.get(str(cut.parts), str(cut.parts))

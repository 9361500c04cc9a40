"""Mirror the finished half of a symmetric C to all of it, or to its lower triangle."""

from __future__ import annotations

from collections.abc import Iterator

from rma_mm.geometry.span import Region
from rma_mm.schedule.lowering import decisions as limits
from rma_mm.schedule.lowering.syrk import Halves
from rma_mm.schedule.mirror_ops import Clear, Mirror
from rma_mm.schedule.ops import Barrier, Copy, Op, Ref, Slot
from rma_mm.schedule.passes import frames, prefetch
from rma_mm.schedule.symmetry import FINISHED, Symmetry


def mirrored(halves: Halves, symmetry: Symmetry, rank: int, width: int, depth: int) -> list[Op]:
    """Return a rank's part of C completed, once all ranks have multiplied: by its own boxes transposed, and by others'.

    Others' come first, as their Copies go on while the rank transposes its own. width, depth: of panels, for which
    there is room.
    """
    found = sorted(halves.mirrored(rank), key=lambda pair: (pair[0] == rank, (pair[0] - rank) % halves.mesh.size))
    ops: list[Op] = []
    for owner, box in found:
        for part in _pieces(box, width * limits.WIDTH) if owner != rank else [box]:
            src, step = Ref(owner, "C", part.T), len(ops)
            if part[0] == part[1]:
                src = Ref(rank, "C", part)
            elif owner != rank:
                slot = Slot(f"{FINISHED}{step}", part.T)
                ops.append(Copy(src, Ref(rank, slot, part.T), step))
                src = Ref(rank, slot, part.T)
            ops.append(Mirror(src, Ref(rank, "C", part), symmetry.conjugates, step))
    home = halves.home(rank)
    zeros = [Barrier(0), *([Clear(Ref(rank, "C", home), 0)] if home else [])] if symmetry.fill == "lower" else []
    return [Barrier(0), *frames(prefetch(ops, depth), linger=False), *zeros]


def _pieces(box: Region, most: int) -> Iterator[Region]:
    """Yield a box in parts of its rows, of the given number of elements at most if a row has no more."""
    rows, cols = box
    for part in rows.pieces(most // max(1, len(cols))):
        yield Region((part, cols))

"""Words and messages of each algorithm in closed form, for even blocks. No MPI: pure and MPI tests count against them.

algorithms.md §3. A mesh has R × C × D ranks, this rank is (i, j, l); a = MK, b = KN, c = MN. A rank counts what it
receives of A and B, and what it sends of C. Every formula is derived from the placements: what the rank multiplies,
less what it holds. Extents must be multiples of the number of ranks, so that all blocks are even.

Messages follow from the cut into chunks: an owner's part of what a rank needs is one chunk, and every chunk that
comes from another rank (or is added to another rank's C) is one message, be it got, broadcast, shifted or reduced.
A matrix that is read where it lies moves words, but no message. The counts of `srumma` and of `cannon:pull` are
those of blocks of k that are narrower than `rma_mm.schedule.lowering.decisions.NARROW`: then all of k is one panel.
"""

from .blocks import ONE_AXIS, STATIONARY_AB, STATIONARY_C, skewing
from .form import Extents, Form, Grid, even_shape
from .layers import THREE_AXES
from .turned import TURNED

__all__ = ["FORMS", "MESHES", "TURNED", "Extents", "Form", "Grid", "even_shape", "skewing"]

FORMS: dict[str, Form] = {form.label: form for form in (*ONE_AXIS, *STATIONARY_C, *STATIONARY_AB, *TURNED, *THREE_AXES)}
"""Every closed form, by label."""

MESHES: dict[int, list[Grid]] = {
    1: [(1,), (2,), (3,), (4,), (7,), (2, 3), (2, 2, 2)],
    2: [(1, 4), (3, 1), (2, 2), (3, 3), (2, 3), (3, 2), (2, 4), (3, 5), (6, 4)],
    3: [(1, 1, 4), (1, 4, 2), (3, 1, 2), (2, 2, 2), (3, 3, 3), (2, 3, 2), (3, 2, 4), (4, 2, 3)],
}
"""Axes → meshes to try: square, oblong, with axes of one rank, with factors in common and without."""

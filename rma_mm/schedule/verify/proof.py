"""Prove a schedule before it runs, at the cost of each rank's own operations.

Every rank looks at what it will do and brings a few numbers; one sum and one maximum over ranks then show that every
point of (m, n, k) is multiplied once and reaches C once, that every replica of C ends final and nothing else of it is
written, and that barriers keep writers and readers apart. `verify` shows the same, and more, from all ranks'
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from rma_mm.classes import dataclass
from rma_mm.errors import ScheduleError
from rma_mm.geometry.span import Region
from rma_mm.schedule.schedule import STAGE, Schedule
from rma_mm.schedule.verify.fingerprint import PRIME, fingerprint

MIRRORED = "mirrored C"
"""The half of a symmetric C that is not multiplied: opened is here when others take what they mirror, added when half
of a square on the diagonal is multiplied, and used when such a square is mirrored."""
WRITTEN = ("A" + STAGE, "B" + STAGE, "C")  # the homes that a schedule writes to
PASSED_ON = {name: f"{name} passed on" for name in WRITTEN}
"""Parts of such a home that a rank brings, and others copy from it: added when they are brought, used when copied."""
NAMES = (*WRITTEN, MIRRORED, *PASSED_ON.values())
NEVER = 2**40  # an epoch that does not come


@dataclass
class Epochs:
    """Epochs (barriers passed) in which a rank touches a home; first ones negated, so that a maximum finds them."""

    opened: int = -NEVER
    first_added: int = -NEVER
    added: int = -NEVER
    first_used: int = -NEVER  # finished, or read by anyone
    written: int = -NEVER
    first_taken: int = -NEVER  # read by another rank

    def note(self, epoch: int, *last: str, first: str = "") -> None:
        """Something happens now that is the last of some kinds, and the first of another."""
        for name in last:
            setattr(self, name, max(getattr(self, name), epoch))
        if first:
            setattr(self, first, max(getattr(self, first), -epoch))


@dataclass(frozen=True)
class Evidence:
    """Evidence of one rank (see `rank_evidence`)."""

    sums: tuple[int, ...]
    """Added up over ranks modulo 2^64: the halves of fingerprints, which cannot run over, and a balance."""
    latest: tuple[int, ...]  # of which the maximum over ranks counts


def nothing() -> Evidence:
    return Evidence((0,) * (2 * len(NAMES) + 3), (-NEVER,) * (6 * len(NAMES) + 2))


def conclude(schedule: Schedule, sums: Sequence[int], latest: Sequence[int]) -> None:
    """Raise ScheduleError unless the summed and maximal evidence of all ranks proves the schedule."""
    for n, name in enumerate(NAMES):
        if name in schedule.homes and (wanted := _summands(schedule, name)) is not None:
            points = schedule.shape or () if name == "C" else schedule.homes[name].shape
            whole = fingerprint(Region.whole(points))
            if (_joined(sums, n) - wanted * whole) % PRIME:
                what = f"point of {points} is multiplied" if name == "C" else f"element of {name} is added to"
                raise ScheduleError("not-once", f"not every {what} {wanted} times")
    mirrors = _joined(sums, NAMES.index(MIRRORED)) % PRIME
    is_halved = latest[6 * NAMES.index(MIRRORED) + 2] != -NEVER
    if (mirrors or is_halved) and mirrors != fingerprint(Region.whole(schedule.homes["C"].shape)):
        raise ScheduleError("not-once", "not every element of C is mirrored, or mirrors another, once")
    if _joined(sums, len(NAMES)) % PRIME or sums[-1]:
        raise ScheduleError("unmatched", "the messages of the ranks do not match")
    if latest[-2] != -latest[-1]:
        raise ScheduleError("barriers", f"barriers do not match: ranks meet at {-latest[-1]} to {latest[-2]} of them")
    for n, name in enumerate(NAMES):
        opened, first_added, added, first_used, written, first_taken = latest[6 * n : 6 * n + 6]
        if opened >= -first_added or added >= -first_used or written >= -first_taken:
            raise ScheduleError("race", f"{name} is opened, added to and read without a barrier between these")


def _joined(sums: Sequence[int], n: int) -> int:
    return sums[2 * n] * 2**32 + sums[2 * n + 1]


def _summands(schedule: Schedule, name: str) -> int | None:
    """Return how often each element, or point, is to be added to a home; None if that is not counted."""
    if name == "C":
        return 1 if schedule.shape else None
    given = schedule.homes[name.removesuffix(STAGE)].layout
    return prod(given.mesh(schedule.mesh).axis_size(axis) for axis in given.partial) if given.partial else 0

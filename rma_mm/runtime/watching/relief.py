"""Reduce the share of a slow rank until it keeps up, and restore it later. No MPI here. No MPI here.

The one place where that is decided, from every rank's pace: what its multiplies take, by multiply-add, over what they
take as a rule (`slowness.Slowness.pace`). Paces are compared with the smallest ones: what slows all ranks moves no
work.
"""

from __future__ import annotations

from collections.abc import Sequence

STEP = 0.8  # factor by which a share shrinks in a step, and grows back
REST = 10  # products between two steps at least
LATE, EARLY = 1.15, 0.85
"""A rank's time for its share, as a multiple of its usual, above which it shrinks and below which it grows back.

Further apart than a step, so that a rank between two shares stays where it is.
"""
MOST = 10  # steps that a share shrinks by at most


class Relief:
    """The shares of the ranks of a mesh, known alike on all of them."""

    def __init__(self, ranks: int) -> None:
        self.steps = (0,) * ranks  # by how many steps each rank's share has shrunk
        self._rest = 0

    @property
    def factors(self) -> tuple[float, ...]:
        return tuple(STEP**steps for steps in self.steps) if any(self.steps) else ()

    def is_due(self, is_slow: bool) -> bool:
        """True if this rank wants all paces compared; one rank is enough. Called once a product."""
        self._rest = max(0, self._rest - 1)
        return not self._rest and (is_slow or any(self.steps))

    def follow(self, told: Sequence[tuple[float, bool]]) -> None:
        """Take each rank a step further, or none. told: its pace, 0 if it is not known, and whether it is slow."""
        self._rest = REST
        known = sorted(pace for pace, _ in told if pace)
        if known:
            usual = known[(len(known) - 1) // 4]  # the smallest of many would be one that was lucky
            each = zip(self.steps, told, strict=True)
            self.steps = tuple(_next(steps, pace / usual, is_slow) for steps, (pace, is_slow) in each)


def _next(steps: int, pace: float, is_slow: bool) -> int:
    """Return the steps by which a rank's share shrinks next. Only a slow rank begins.

    So the last step back can be taken as soon as it would not be late with its whole share.
    """
    takes = pace * STEP**steps
    if takes > LATE and steps < MOST and (steps or is_slow):
        return steps + 1
    early = EARLY if is_slow or steps > 1 else STEP * LATE
    return steps - 1 if steps and 0 < takes < early else steps

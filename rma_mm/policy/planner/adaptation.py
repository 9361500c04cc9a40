"""Predicted against measured: when a repeated product changes from one-sided transfers to those of groups, and back.

A product changes its plan twice at most: to the best two-sided plan where the one-sided one is late, and back where
that turns out to be no faster. So it cannot flap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from rma_mm.policy.model.machine import MULTIPLIES

LATE, SLACK = 1.2, 1e-4
"""Measured over predicted from which a one-sided plan is late, and seconds by which it is at least: that long may calls
take beside the transfers, whichever plan makes them."""
LOOKS = 3  # executions of a plan that are looked at, after a first one that touches its memory
LIMITS, MULTIPLY_LIMITS = (0.5, 2.0), (0.8, 1.25)
"""Limits of a correction, which holds for products of all sizes: of transfers, and of multiplies."""
ERROR, MULTIPLY_ERROR, SCATTER = 0.3, 0.1, 0.2
"""Standard deviation of measured over predicted: of transfers, of multiplies, and of a product whose prices are right.
Of seven sets, these made the predictions of 240 measured products best (`bench.policy`, 2 to 6 ranks)."""
SHORTEST = 1e-3
"""Seconds that a product takes at least by which prices of its kind are corrected: shorter ones are mostly calls."""
WORTH = 0.1
"""A ratio that is further from 1 corrects the calibration."""


class Watch:
    """One product that is repeated, and the plans that it has been done by."""

    def __init__(self, name: str, kind: str, predicted: float, multiplying: float) -> None:
        """predicted: seconds of a product. multiplying: those of its multiplies among them."""
        self.name, self.kind, self.predicted, self.multiplying = name, kind, predicted, multiplying
        self.changes = 0  # how often the plan was changed
        self._seen: deque[float] = deque(maxlen=LOOKS)
        self._count = 0
        self._before: tuple[str, float] | None = None

    def note(self, seconds: float) -> None:
        self._seen.append(seconds)
        self._count += 1

    @property
    def measured(self) -> float | None:
        from statistics import median  # slow to import

        return median(self._seen) if self._count > LOOKS else None

    @property
    def is_new(self) -> bool:
        return self._count == LOOKS + 1

    def should_change(self) -> bool:
        """True if the next product is better done by a two-sided plan."""
        if self.changes or self.kind != "one-sided":
            return False
        measured = self.measured
        return measured is not None and measured > max(LATE * self.predicted, self.predicted + SLACK)

    def should_return(self) -> bool:
        """True if the new plan is slower than the one before."""
        if self.changes != 1 or self._before is None:
            return False
        measured = self.measured
        return measured is not None and measured > self._before[1]

    def change(self, name: str, kind: str, predicted: float, multiplying: float) -> str:
        """Record that another plan is used from now on, and return the line to report."""
        measured = self.measured
        assert measured is not None
        ratio, before = measured / self.predicted, self.name
        self._before = before, measured
        self.name, self.kind, self.predicted, self.multiplying = name, kind, predicted, multiplying
        self._seen.clear()
        self._count = 0
        self.changes += 1
        return f"{before}: took {ratio:.2f} times the seconds predicted; {name} does the next products"

    def correction(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return the factors of this kind of transfers and of multiplies, in place of those `before`.

        Half of the difference is divided between the two and chance, by the gain of a Kalman filter. Nothing if there
        is hardly any difference.
        """
        if self.measured is None or not self.predicted or self.measured < SHORTEST:
            return {}
        ratio, multiplies = self.measured / self.predicted, self.multiplying / self.predicted
        if abs(ratio - 1) < WORTH:
            return {}
        prices = {self.kind: (1 - multiplies, ERROR, LIMITS), MULTIPLIES: (multiplies, MULTIPLY_ERROR, MULTIPLY_LIMITS)}
        variance = SCATTER**2 + sum((share * error) ** 2 for share, error, _ in prices.values())
        found = {}
        for what, (share, error, (least, most)) in prices.items():
            factor = before.get(what, 1.0) * (1 + (ratio**0.5 - 1) * share * error**2 / variance)
            found[what] = float(min(most, max(least, factor)))
        return found

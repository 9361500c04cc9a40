"""Sets of points compared by a number: what covers what, and how often, at the cost of the boxes' runs.

Σ x^i over the indices i of a span, times the same in other dimensions, modulo a prime. Two collections of boxes cover
each point equally often where their fingerprints, polynomials of degree at most m + n + k, are equal; by chance with
probability (m + n + k) / 2^61 (Schwartz 1980, Zippel 1979).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

from rma_mm.geometry.span import Region, Span

PRIME = 2**61 - 1
BASES = (1_094_861_636_275_290_733, 403_958_272_517_823_409, 1_887_209_563_901_441_873)
"""One for each dimension; any will do that were not chosen with the schedule in view."""


@lru_cache(maxsize=65536)
def _power_sum(dim: int, span: Span) -> int:
    """Σ x^i over a span, except for a factor that all spans of the dimension have."""
    base = BASES[dim]
    return sum(pow(base, stop, PRIME) - pow(base, start, PRIME) for start, stop in span.runs) % PRIME


def fingerprint(box: Region) -> int:
    return prod(_power_sum(dim, span) for dim, span in enumerate(box)) % PRIME


def total(boxes: Iterable[Region]) -> int:
    return sum(map(fingerprint, boxes)) % PRIME

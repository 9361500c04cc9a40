"""The normal distribution function Φ, which GELU needs, as a rational function; and exp, which its derivative needs."""

from __future__ import annotations

from math import factorial, log
from typing import Any

import numpy as np

from rma_mm.classes import dataclass


@dataclass(frozen=True)
class Normal:
    """Φ(x) as 1/2 + x · P(x²)/Q(x²)."""

    edge: float  # where Φ(x) is 1, of −x 0
    top: tuple[float, ...]  # P, the constant first
    below: tuple[float, ...]  # Q
    reach: float  # argument beyond which x · φ(x) is next to nothing while φ(x) is still a normal number


@dataclass(frozen=True)
class Exponential:
    """exp(y), for y ≤ 0, as 2ⁿ · (1 + r + r²/2 + …), where y = n · ln 2 + r: for compiled loops without branches."""

    series: tuple[float, ...]  # 1, 1, 1/2, 1/6, …: as many as |r| ≤ ln 2 / 2 needs
    per_two: float  # 1 / ln 2
    high: float
    low: float  # ln 2 as a sum; n · high is exact
    magic: float  # added to n it rounds it; n and the exponent's bias are then the lowest bits of the number

    @classmethod
    def of(cls, dtype: np.dtype[Any]) -> Exponential:
        bits, terms, bias = {4: (23, 8, 127), 8: (52, 14, 1023)}[dtype.itemsize]
        high = round(log(2) * 2**11) / 2**11
        series = tuple(1 / factorial(n) for n in range(terms))
        return cls(series, 1 / log(2), high, log(2) - high, 1.5 * 2.0**bits + bias)


NORMAL = {
    np.dtype(np.float32): Normal(
        5.5,
        (
            0.3989422346556369, 0.03384927771531335, 0.004677063157951457, 0.000168796311103756, 6.352349396242701e-06,
            2.275415153270221e-08,
        ),
        (
            1.0, 0.25151347154661613, 0.028643973591721092, 0.0018842635565694764, 7.364077849014747e-05,
            1.1976648476755666e-06,
        ),
        13.0,
    ),
    np.dtype(np.float64): Normal(
        8.3,
        (
            0.3989422804014326, 0.03880776122222078, 0.005834867372991359, 0.00030298449809984215,
            1.8845574451118947e-05, 6.251967133656361e-07, 2.145405183500847e-08, 4.6512197208898646e-10,
            9.306317767621395e-12, 1.1839440778431642e-13, 1.1607850968267697e-15, 3.922782373846503e-18,
            1.3975518357708789e-21,
        ),
        (
            1.0, 0.2639432982214101, 0.03361639323944704, 0.002739809736906611, 0.00015965765354700978,
            7.032050931223899e-06, 2.4089453091777497e-07, 6.488379386470422e-09, 1.3665088719743456e-10,
            2.189325226751672e-12, 2.4919129488362662e-14, 1.6440981305446805e-16, 2.2162985070699447e-19,
        ),
        37.0,
    ),
}
"""Coefficients by the type in which C is summed."""

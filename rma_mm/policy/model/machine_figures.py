"""Tables and figures of a machine's file: with units, and with what would fit where they are missing or wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from rma_mm.classes import dataclass

MOST = 1e30  # upper limit of every figure, so that results computed from it are finite

Convert = Callable[[Any], float]
"""A figure in seconds, bytes or bytes a second. Raises ValueError if it is none."""

_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGTP", 1)
}
_BYTES = {"": 1.0, **{f"{prefix}B": float(size) for prefix, size in _PREFIXES.items()}}
_RATES = {"": 1.0, **{f"{unit}/s": size for unit, size in _BYTES.items() if unit}} | {
    f"{prefix}{bit}/s": size / 8 for prefix, size in _PREFIXES.items() for bit in ("b", "bit")
}


@dataclass
class Table:
    """A table of a file, with the entries that were read and the errors found."""

    entries: Mapping[str, Any]
    name: str  # its name in the file; empty for the file itself
    faults: list[str]  # shared by all tables of a file
    read_keys: set[str] = field(default_factory=set)

    def fault(self, key: str, problem: str, fits: str) -> None:
        where = f"{self.name}.{key}" if self.name else key
        self.faults.append(f"{where} {problem}; {fits}")

    def names(self) -> list[str]:
        self.read_keys |= set(self.entries)
        return list(self.entries)

    def table(self, key: str) -> Table:
        """Return a table within it; an empty one if there is none."""
        self.read_keys.add(key)
        found = self.entries.get(key, {})
        if not isinstance(found, dict):
            self.fault(key, f"is {found!r}", f"it is a table, as [{key}] or {{ latency = …, bandwidth = … }}")
            found = {}
        return Table(found, f"{self.name}.{key}" if self.name else key, self.faults)

    def tables(self, key: str) -> list[Table]:
        """Tables of one name, as [[group]]; none if there is none."""
        self.read_keys.add(key)
        found = self.entries.get(key, [])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            self.fault(key, f"is {found!r}", f"they are tables, each begun by [[{key}]]")
            return []
        return [Table(each, f"{key} {n}", self.faults) for n, each in enumerate(found, 1)]

    def figure(self, key: str, convert: Convert, default: float | None = None) -> float:
        """Return a figure; where it is not there and has no default, or is wrong, a fault is noted, and it is 1."""
        self.read_keys.add(key)
        fits = _FITS[convert]
        if key not in self.entries:
            if default is None:
                self.fault(key, "is missing", f"it is {fits}")
            return 1.0 if default is None else default
        try:
            return convert(self.entries[key])
        except (ValueError, OverflowError):
            self.fault(key, f"is {self.entries[key]!r}", f"it is {fits}")
            return 1.0

    def whole(self, key: str, convert: Convert) -> int | None:
        return int(self.figure(key, convert)) if key in self.entries else None

    def count(self, key: str, default: int | None = None) -> int:
        return int(self.figure(key, whole_number, default))

    def text(self, key: str, default: str) -> str:
        self.read_keys.add(key)
        found = self.entries.get(key, default)
        if not isinstance(found, str):
            self.fault(key, f"is {found!r}", "it is a text")
        return str(found)

    def close(self) -> None:
        """Report entries that nothing has read."""
        for key in self.entries:
            if key not in self.read_keys:
                self.fault(key, "is not known", f"known are {', '.join(sorted(self.read_keys))}")


def _measure(value: Any, units: Mapping[str, float]) -> float:
    """Return a number, or a text of a number and a unit. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    if not isinstance(value, str):
        return float(value)
    found = re.fullmatch(r"\s*([-+0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([^\s0-9]*)\s*", value)
    if found is None or found[2] not in units:
        raise ValueError
    return float(found[1]) * units[found[2]]


def _within(number: float, least: float, most: float = MOST) -> float:
    if not least <= number <= most:
        raise ValueError
    return number


def seconds(value: Any) -> float:
    """Seconds, also as a text with a unit. Raises ValueError."""
    return _within(_measure(value, _SECONDS), 0)


def bytes_a_second(value: Any) -> float:
    """Return bytes a second, also as a text with a unit. Raises ValueError."""
    return _within(_measure(value, _RATES), 1)


def nbytes(value: Any) -> float:
    """Bytes, also as a text with a unit. Raises ValueError."""
    return _within(_measure(value, _BYTES), 1)


def positive(value: Any) -> float:
    """Return a number above 0. Raises ValueError."""
    return _within(_measure(value, {"": 1.0}), 1e-6)


def fraction(value: Any) -> float:
    """Return a number from 0 to 1. Raises ValueError."""
    return _within(_measure(value, {"": 1.0}), 0, 1)


def whole_number(value: Any) -> float:
    """Return a whole number of at least 1. Raises ValueError."""
    if not isinstance(value, int):
        raise ValueError
    return _within(_measure(value, {}), 1)


_FITS: dict[Convert, str] = {
    seconds: 'a time of at least 0, as "1.5 us" or 1.5e-6',
    bytes_a_second: 'a rate of at least a byte a second, as "25 GB/s" or 25e9',
    nbytes: 'a size of at least a byte, as "64 GiB"',
    positive: "a number of at least 1e-6, as 100",
    fraction: "a share from 0 to 1, as 0.9",
    whole_number: "a whole number of at least 1",
}
"""Rule for each kind of figure, as text."""

__all__ = ["Table", "bytes_a_second", "fraction", "nbytes", "positive", "seconds", "whole_number"]

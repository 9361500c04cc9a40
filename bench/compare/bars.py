"""The bars of `bench/bars.toml` that a measurement guards, and what this machine lacks for them."""

from __future__ import annotations

import os
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "bars.toml"


@cache
def all_bars() -> list[dict[str, Any]]:
    """Return every bar."""
    found: list[dict[str, Any]] = tomllib.loads(FILE.read_text())["bar"]
    return found


def bars_of(measurement: str) -> list[str]:
    """Return the bars that a measurement guards, in words, with what is lacking here to measure them."""
    found = []
    for bar in all_bars():
        if any(measurement.startswith(guard) for guard in bar["guards"]):
            lacking = [need for need in bar.get("needs", ()) if not has(need)]
            found.append(bar["what"] + (f" (not here: needs {', '.join(lacking)})" if lacking else ""))
    return found


@cache
def has(need: str) -> bool:
    """Return whether this machine has what a bar needs."""
    if need == "root":
        return os.geteuid() == 0
    if need == "torch":
        return find_spec("torch") is not None
    return need in Path("/proc/cpuinfo").read_text().split()

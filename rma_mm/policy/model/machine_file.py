"""Machines described in files: a small TOML of what is known of one, or the JSON that calibration writes.

Every figure that is missing, unknown or impossible is named, with what would fit.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rma_mm.errors import MachineError
from rma_mm.flavours import FLAVOURS
from rma_mm.policy.model.machine import ONE_SIDED, TOGETHER, TYPICAL, Cost, Machine, described

EXAMPLE = """\
# A machine, as `python -m rma_mm.simulate --machine FILE` reads it. A figure is a number, in seconds, bytes or
# bytes a second, or a text with its unit: "1.5 us", "64 GiB", "25 GB/s", "200 Gbit/s". Lines with ? may be left out.

name = "example"
nodes = 15625
ranks_per_node = 64
cores = 64                  # of a node
threads = 1                 # ? cores that a rank's local products use
memory = "4 GiB"            # ? of a rank
gflops = 100                # of a rank in float32, 10^9 operations a second
memory_rate = "10 GB/s"     # of a rank, in its own memory
# operation = "5 us"        # ? what the runtime itself takes for one get, accumulate, multiply, ...
# meeting = "5 us"          # ? in which all ranks meet, for each doubling of their number

[node]                      # between ranks of a node
latency = "1 us"
bandwidth = "10 GB/s"       # ? of a rank; memory_rate where it is left out

[network]                   # between nodes
latency = "3 us"
bandwidth = "25 GB/s"       # of a node, in and out at once; its ranks share it
hidden = 0.9                # ? the share of a transfer that goes on behind a multiply; 1 where it is left out

# Movements that cost something else, on a link ("node" or "between"): get, put, accumulate and fetch_add behind the
# windows that they go through (shared, allocated, created), "shared.get busy" where the target multiplies, and
# broadcast, all-gather, reduce, reduce-scatter, shift.
# [movements.between]
# "shared.get" = { latency = "4 us", bandwidth = "23 GB/s" }
# broadcast = { latency = "6 us", bandwidth = "20 GB/s" }

# Nodes that differ, in the order of their ranks: how many, and what is not as above.
# [[group]]
# nodes = 5000
# gflops = 300              # ?
# bandwidth = "50 GB/s"     # ? of the wire of a node
"""
"""What `--example` prints."""

HETEROGENEOUS = """\
# Eight fast nodes on a fast fabric, and eight slow ones on a slow one.

name = "heterogeneous"
nodes = 16
ranks_per_node = 4
cores = 4
memory_rate = "10 GB/s"
gflops = 125                # of a rank, where its group does not say
node = { latency = "1 us" }
network = { latency = "3 us", bandwidth = "10 GB/s", hidden = 0.9 }

[[group]]
nodes = 8
gflops = 300
bandwidth = "25 GB/s"

[[group]]
nodes = 8
"""
"""What `--example heterogeneous` prints."""

LARGEST = 2**22
"""Characters of a machine's file."""
SHOWN = 4
"""Faults of a file that are told at once."""
MOST = 1e30
"""What no figure is above, so that what is made of it is finite."""

Convert = Callable[[Any], float]
"""A figure in seconds, bytes or bytes a second. Raises ValueError where it is none."""

_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGTP", 1)
}
_BYTES = {"": 1.0, **{f"{prefix}B": float(size) for prefix, size in _PREFIXES.items()}}
_RATES = {"": 1.0, **{f"{unit}/s": size for unit, size in _BYTES.items() if unit}} | {
    f"{prefix}{bit}/s": size / 8 for prefix, size in _PREFIXES.items() for bit in ("b", "bit")
}


@dataclass(frozen=True)
class Description:
    """A machine, and how many ranks it has."""

    machine: Machine
    nodes: int | None = None
    """None where there are as many as are wanted."""
    ranks_per_node: int | None = None
    """None where it is not known."""

    def of(self, nodes: int | None, ranks_per_node: int | None) -> Description:
        """The same with other numbers of ranks, where they are given."""
        return replace(self, nodes=nodes or self.nodes, ranks_per_node=ranks_per_node or self.ranks_per_node)


TYPICALLY = Description(TYPICAL, None, TYPICAL.slots)
"""`TYPICAL`, with as many nodes as are wanted."""


def read_machine(path: str) -> Description:
    """The machine that a file describes: JSON as calibration writes it, or TOML. Raises MachineError."""
    try:
        text = machine_text(path)
        if text.lstrip().startswith("{"):
            return Description(Machine.from_json(json.loads(text)))
        return from_toml(tomllib.loads(text), Path(path).stem)
    except MachineError as error:
        raise MachineError(f"machine file {path}: {error}") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        kind = "JSON" if text.lstrip().startswith("{") else "TOML"
        raise MachineError(f"machine file {path}: is no {kind}: {error}; --example prints one that is") from None


def machine_text(path: str) -> str:
    """The text of a machine's file. Raises MachineError unless that is a regular file of a fair size."""
    try:
        with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # one that never ends, or that nobody writes to
                raise MachineError("cannot be read: it is not a regular file")
            text = file.read(LARGEST + 1)
    except MachineError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null character in the name
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise MachineError(f"cannot be read: {reason}") from None
    if len(text) > LARGEST:
        raise MachineError(f"cannot be read: it has more than {LARGEST} characters; a machine takes a few thousand")
    return text


def from_toml(given: Mapping[str, Any], name: str = "described") -> Description:
    """The machine of a table like `EXAMPLE`. Raises MachineError naming all its faults."""
    top = _Table(given, "", [])
    node, network, movements = (top.table(key) for key in ("node", "network", "movements"))
    groups = top.tables("group")
    counts = {key: top.count(key) for key in ("nodes", "ranks_per_node", "cores")}
    cores, ranks = counts["cores"], counts["ranks_per_node"]
    threads = top.count("threads", max(1, cores // ranks))
    rate, gflops = top.figure("memory_rate", _rate), top.figure("gflops", _number)
    bandwidth = network.figure("bandwidth", _rate)
    machine = described(
        top.text("name", name), cores=cores, threads=threads, gflops=gflops, memory_rate=rate,
        latency=network.figure("latency", _time), bandwidth=bandwidth,
        memory=top.whole("memory", _size), node_latency=node.figure("latency", _time),
        node_rate=node.figure("bandwidth", _rate, rate), hidden=network.figure("hidden", _share, 1.0),
    )  # fmt: skip
    refined = {link: _refined(movements.table(link), machine.costs[link]) for link in ("node", "between")}
    operation = top.figure("operation", _time, machine.operation)
    meeting = top.figure("meeting", _time, machine.meeting)
    sizes = [group.count("nodes") for group in groups]
    paces = [group.figure("gflops", _number, gflops) / gflops for group in groups]
    wires = [group.figure("bandwidth", _rate, bandwidth) / bandwidth for group in groups]
    if groups and sum(sizes) != counts["nodes"]:
        top.fault("nodes", f"is {counts['nodes']}", f"the groups have {sum(sizes)} together")
    for table in (node, network, movements, *groups, top):
        table.close()
    if top.faults:
        more = len(top.faults) - SHOWN
        rest = [f"and {more} more; --example prints a file that is complete"] * (more > 0)
        raise MachineError("\n".join([*top.faults[:SHOWN], *rest]))
    machine = replace(machine, costs={**machine.costs, **refined}, operation=operation, meeting=meeting)
    if {*paces, *wires} - {1.0}:
        speeds = tuple(pace for pace, size in zip(paces, sizes, strict=True) for _ in range(size * ranks))
        each = tuple(wire for wire, size in zip(wires, sizes, strict=True) for _ in range(size))
        machine = replace(machine, speeds=speeds, wires=each)
    return Description(machine, counts["nodes"], ranks)


def _refined(given: _Table, costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The costs of a class of link with those that are named in their place."""
    known = {f"{flavour}.{move}{busy}" for flavour in FLAVOURS for move in ONE_SIDED for busy in ("", " busy")}
    found = dict(costs)
    for name in given.names():
        if name not in known.union(TOGETHER):
            given.fault(name, "is no movement", f"there are shared.get, created.put busy, {', '.join(TOGETHER)}, …")
            continue
        table = given.table(name)
        found[name] = Cost(table.figure("latency", _time), 1 / table.figure("bandwidth", _rate))
        table.close()
    return found


# -- figures --------------------------------------------------------------------------------------


@dataclass
class _Table:
    """A table of a file: what is asked for of it, and what is wrong with it."""

    given: Mapping[str, Any]
    name: str
    """Its name in the file; empty for the file itself."""
    faults: list[str]
    """Shared by all tables of a file."""
    asked: set[str] = field(default_factory=set)

    def fault(self, key: str, problem: str, fits: str) -> None:
        """Note what is wrong with an entry."""
        where = f"{self.name}.{key}" if self.name else key
        self.faults.append(f"{where} {problem}; {fits}")

    def names(self) -> list[str]:
        """All its entries, which count as asked for."""
        self.asked |= set(self.given)
        return list(self.given)

    def table(self, key: str) -> _Table:
        """A table within it; an empty one where there is none."""
        self.asked.add(key)
        found = self.given.get(key, {})
        if not isinstance(found, dict):
            self.fault(key, f"is {found!r}", f"it is a table, as [{key}] or {{ latency = …, bandwidth = … }}")
            found = {}
        return _Table(found, f"{self.name}.{key}" if self.name else key, self.faults)

    def tables(self, key: str) -> list[_Table]:
        """Tables of one name, as [[group]]; none where there is none."""
        self.asked.add(key)
        found = self.given.get(key, [])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            self.fault(key, f"is {found!r}", f"they are tables, each begun by [[{key}]]")
            return []
        return [_Table(each, f"{key} {n}", self.faults) for n, each in enumerate(found, 1)]

    def figure(self, key: str, convert: Convert, default: float | None = None) -> float:
        """A figure; where it is not there and has no default, or is wrong, a fault is noted, and it is 1."""
        self.asked.add(key)
        fits = _FITS[convert]
        if key not in self.given:
            if default is None:
                self.fault(key, "is missing", f"it is {fits}")
            return 1.0 if default is None else default
        try:
            return convert(self.given[key])
        except (ValueError, OverflowError):
            self.fault(key, f"is {self.given[key]!r}", f"it is {fits}")
            return 1.0

    def whole(self, key: str, convert: Convert) -> int | None:
        """A figure without its fraction; None where it is not there."""
        return int(self.figure(key, convert)) if key in self.given else None

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        return int(self.figure(key, _count, default))

    def text(self, key: str, default: str) -> str:
        """A text."""
        self.asked.add(key)
        found = self.given.get(key, default)
        if not isinstance(found, str):
            self.fault(key, f"is {found!r}", "it is a text")
        return str(found)

    def close(self) -> None:
        """Note entries that nobody asked for."""
        for key in self.given:
            if key not in self.asked:
                self.fault(key, "is not known", f"known are {', '.join(sorted(self.asked))}")


def _measure(value: Any, units: Mapping[str, float]) -> float:
    """A number, or a text of a number and a unit. Raises ValueError."""
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


def _time(value: Any) -> float:
    return _within(_measure(value, _SECONDS), 0)


def _rate(value: Any) -> float:
    return _within(_measure(value, _RATES), 1)


def _size(value: Any) -> float:
    return _within(_measure(value, _BYTES), 1)


def _number(value: Any) -> float:
    return _within(_measure(value, {"": 1.0}), 1e-6)


def _share(value: Any) -> float:
    return _within(_measure(value, {"": 1.0}), 0, 1)


def _count(value: Any) -> float:
    if not isinstance(value, int):
        raise ValueError
    return _within(_measure(value, {}), 1)


_FITS: dict[Convert, str] = {
    _time: 'a time of at least 0, as "1.5 us" or 1.5e-6',
    _rate: 'a rate of at least a byte a second, as "25 GB/s" or 25e9',
    _size: 'a size of at least a byte, as "64 GiB"',
    _number: "a number of at least 1e-6, as 100",
    _share: "a share from 0 to 1, as 0.9",
    _count: "a whole number of at least 1",
}
"""What figures have to be."""

__all__ = ["EXAMPLE", "HETEROGENEOUS", "TYPICALLY", "Description", "from_toml", "read_machine"]

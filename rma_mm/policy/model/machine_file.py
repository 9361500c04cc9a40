"""Machines described in files: a small TOML of what is known of one, or the JSON that calibration writes.

Every figure that is missing, unknown or impossible is named, with what would fit.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rma_mm.classes import dataclass
from rma_mm.errors import MachineError
from rma_mm.flavours import FLAVOURS
from rma_mm.policy.model.machine import COLLECTIVES, ONE_SIDED, TYPICAL, Cost, Machine, described
from rma_mm.policy.model.machine_figures import Table, bytes_a_second, fraction, nbytes, positive, seconds

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
hidden = 0.9                # ? the share of a transfer that goes on behind a multiply; 1 if it is left out

# Movements that cost something else, on a link ("node" or "between"): get, put, accumulate and fetch_add behind the
# windows that they go through, "shared.get busy" where the target multiplies, and
# broadcast, all-gather, reduce, reduce-scatter, shift.
# [movements.between]
# "shared.get" = { latency = "4 us", bandwidth = "23 GB/s" }
# broadcast = { latency = "6 us", bandwidth = "20 GB/s" }

# Nodes that differ, in the order of their ranks: how many, and what is not as above.
# [[group]]
# nodes = 5000
# gflops = 300              # ?
# memory = "16 GiB"         # ? of a rank
# latency = "2 us"          # ? between its nodes; between nodes of two groups it is that of the slower
# bandwidth = "50 GB/s"     # ? of the wire of a node
#
# [group_link]          # ? what joins each group to the others
# latency = "2 us"          # ? on top of that of their nodes
# bandwidth = "200 GB/s"    # of all its nodes together, in and out at once
"""
"""Text that `--example` prints."""

HETEROGENEOUS = """\
# Eight fast nodes on a fast fabric, and eight slow ones on a slow one; four cables join the two.

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
memory = "64 GiB"
latency = "2 us"
bandwidth = "25 GB/s"

[[group]]
nodes = 8
memory = "32 GiB"

[group_link]
latency = "2 us"
bandwidth = "40 GB/s"
"""
"""Text that `--example heterogeneous` prints."""

LARGEST = 2**22  # characters of a machine's file
SHOWN = 4  # faults of a file that are told at once
@dataclass(frozen=True)
class Description:
    """A machine, and how many ranks it has."""

    machine: Machine
    nodes: int | None = None  # None if there are as many as are wanted
    ranks_per_node: int | None = None  # None if it is not known

    def of(self, nodes: int | None, ranks_per_node: int | None) -> Description:
        """Return the same with other numbers of ranks, where they are given: each as the ranks of its node are."""
        old, new = self.ranks_per_node, ranks_per_node or self.ranks_per_node
        machine = self.machine
        if old and new and old != new:
            speeds, rooms = (
                tuple(figure for figure in figures[::old] for _ in range(new))
                for figures in (machine.speeds, machine.rooms)
            )
            machine = replace(machine, speeds=speeds, rooms=rooms)
        return replace(self, machine=machine, nodes=nodes or self.nodes, ranks_per_node=new)


TYPICALLY = Description(TYPICAL, None, TYPICAL.slots)  # `TYPICAL`, with as many nodes as are wanted


def read_machine(path: str) -> Description:
    """Return the machine that a file describes: JSON as calibration writes it, or TOML. Raises MachineError."""
    import tomllib

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
    """Return the text of a machine's file. Raises MachineError unless that is a regular file of a fair size."""
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
    """Return the machine of a table like `EXAMPLE`. Raises MachineError naming all its faults."""
    top = Table(given, "", [])
    node, network, movements = (top.table(key) for key in ("node", "network", "movements"))
    groups, joint = top.tables("group"), top.table("group_link")
    counts = {key: top.count(key) for key in ("nodes", "ranks_per_node", "cores")}
    cores, ranks = counts["cores"], counts["ranks_per_node"]
    threads = top.count("threads", max(1, cores // ranks))
    rate, gflops = top.figure("memory_rate", bytes_a_second), top.figure("gflops", positive)
    memory, latency = top.whole("memory", nbytes), network.figure("latency", seconds)
    bandwidth = network.figure("bandwidth", bytes_a_second)
    kinds = _Kinds.of(groups, gflops, memory, latency, bandwidth)
    machine = described(
        top.text("name", name), cores=cores, threads=threads, gflops=gflops, memory_rate=rate,
        latency=min(kinds.latencies, default=latency), bandwidth=bandwidth,
        memory=max(kinds.memories, default=memory), node_latency=node.figure("latency", seconds),
        node_rate=node.figure("bandwidth", bytes_a_second, rate), hidden=network.figure("hidden", fraction, 1.0),
    )
    refined = {link: _refined(movements.table(link), machine.costs[link]) for link in ("node", "between")}
    operation = top.figure("operation", seconds, machine.operation)
    meeting = top.figure("meeting", seconds, machine.meeting)
    if groups and sum(kinds.sizes) != counts["nodes"]:
        top.fault("nodes", f"is {counts['nodes']}", f"the groups have {sum(kinds.sizes)} together")
    joined = _joined(joint, len(groups))
    for table in (node, network, movements, joint, *groups, top):
        table.close()
    if top.faults:
        more = len(top.faults) - SHOWN
        rest = [f"and {more} more; --example prints a file that is complete"] * (more > 0)
        raise MachineError("\n".join([*top.faults[:SHOWN], *rest]))
    machine = replace(machine, costs={**machine.costs, **refined}, operation=operation, meeting=meeting)
    return Description(kinds.told_by(machine, ranks, joined), counts["nodes"], ranks)


@dataclass(frozen=True)
class _Kinds:
    """Figures of groups of nodes, each in the order of the groups; empty if there are none."""

    sizes: list[int]  # nodes of each
    paces: list[float]  # how fast its ranks are, over the usual
    memories: list[int]  # bytes of its ranks; empty if nothing says
    latencies: list[float]
    wires: list[float]  # the bandwidth of its nodes, over the usual

    @classmethod
    def of(
        cls, groups: Sequence[Table], gflops: float, memory: int | None, latency: float, bandwidth: float
    ) -> _Kinds:
        """Return the figures of tables, some of which may omit them; report those that then all must give."""
        is_said = memory is not None or any("memory" in group.entries for group in groups)
        return cls(
            [group.count("nodes") for group in groups],
            [group.figure("gflops", positive, gflops) / gflops for group in groups],
            [int(group.figure("memory", nbytes, memory)) for group in groups if is_said],
            [group.figure("latency", seconds, latency) for group in groups],
            [group.figure("bandwidth", bytes_a_second, bandwidth) / bandwidth for group in groups],
        )

    def told_by(self, machine: Machine, ranks: int, joint: Cost | None) -> Machine:
        """Return the machine with the given figures replaced.

        ranks: of a node. joint: what joins groups, if anything does.
        """
        rooms = [memory / max(self.memories) for memory in self.memories]
        delays = [latency - min(self.latencies) for latency in self.latencies]
        return replace(
            machine,
            speeds=self._each(self.paces, ranks, 1.0), rooms=self._each(rooms, ranks, 1.0),
            wires=self._each(self.wires, 1, 1.0), delays=self._each(delays, 1, 0.0),
            groups=tuple(n for n, size in enumerate(self.sizes) for _ in range(size)) if joint else (),
            joint=joint or machine.joint,
        )

    def _each(self, figures: Sequence[float], times: int, usual: float) -> tuple[float, ...]:
        """Return the figures of groups for each of their nodes, so many times; empty if all are as usual."""
        found = zip(figures, self.sizes, strict=True) if {*figures} - {usual} else ()
        return tuple(figure for figure, size in found for _ in range(size * times))


def _joined(table: Table, groups: int) -> Cost | None:
    """Return the cost of the link that joins groups, if the file gives one; report it if there is nothing to join."""
    if not table.entries:
        return None
    if groups < 2:
        table.fault("bandwidth", f"joins {groups} groups", "it takes two at least, each begun by [[group]]")
    return Cost(table.figure("latency", seconds, 0.0), 1 / table.figure("bandwidth", bytes_a_second))


def _refined(given: Table, costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """Return the costs of a class of link with the named ones replaced."""
    known = {f"{flavour}.{move}{busy}" for flavour in FLAVOURS for move in ONE_SIDED for busy in ("", " busy")}
    found = dict(costs)
    for name in given.names():
        if name not in known.union(COLLECTIVES):
            given.fault(name, "is no movement", f"there are shared.get, created.put busy, {', '.join(COLLECTIVES)}, …")
            continue
        table = given.table(name)
        found[name] = Cost(table.figure("latency", seconds), 1 / table.figure("bandwidth", bytes_a_second))
        table.close()
    return found


__all__ = ["EXAMPLE", "HETEROGENEOUS", "TYPICALLY", "Description", "from_toml", "read_machine"]

"""Places of the ranks: hosts, nodes and processors, who transfers to whom, and what the cost laws make of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rma_mm.classes import dataclass
from rma_mm.kernels.threads import cores
from rma_mm.policy.model.traffic import FLAT

if TYPE_CHECKING:
    from mpi4py import MPI

Load = tuple[float, float]
"""Number of transfers, and multiple of a transfer's bytes, that the time of a movement consists of."""


@dataclass(frozen=True)
class Site:
    """Hosts, nodes and processors of the ranks of a communicator, the same on all of them."""

    rank: int
    node_of: tuple[int, ...]  # the node of each rank
    host_of: tuple[int, ...]  # the host of each rank; hosts have several nodes where nodes are pretended
    cores: int  # processors of the host that has fewest
    threads: int
    """BLAS threads of the rank that has fewest: hosts may differ in cores, and all ranks time the same cases."""
    pool_of: tuple[int, ...] = ()
    """A number for the processors of each rank: ranks of one number share theirs, as the system schedules them."""

    @classmethod
    def of(cls, comm: MPI.Intracomm, node_of: Sequence[int], threads: int) -> Site:
        """Ask every rank. Collective over `comm`."""
        from mpi4py import MPI

        told = comm.allgather((MPI.Get_processor_name() + _boot(), cores(), threads, _control_group()))
        hosts: dict[str, set[int]] = defaultdict(set)
        for host, theirs, *_ in told:
            hosts[host] |= theirs
        numbers = {host: number for number, host in enumerate(hosts)}
        host_of = tuple(numbers[host] for host, *_ in told)
        fewest = min(count for _, _, count, _ in told)
        pools = [(host, theirs, group) for host, theirs, _, group in told]
        places = {pool: number for number, pool in enumerate(dict.fromkeys(pools))}
        pool_of = tuple(places[pool] for pool in pools)
        return cls(comm.rank, tuple(node_of), host_of, min(map(len, hosts.values())), fewest, pool_of)

    @property
    def size(self) -> int:
        return len(self.node_of)

    @property
    def slots(self) -> int:
        return max(1, self.cores // self.threads)

    @cached_property
    def nodes(self) -> list[list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for rank, node in enumerate(self.node_of):
            found[node].append(rank)
        return list(found.values())

    @cached_property
    def nodes_per_host(self) -> int:
        return max(Counter(host for _, host in set(zip(self.node_of, self.host_of, strict=True))).values())

    def has(self, link: str) -> bool:
        return len(self.nodes) > 1 if link == "between" else any(len(ranks) > 1 for ranks in self.nodes)

    # -- who moves what ---------------------------------------------------------------------------

    def pairs(self, link: str, busy: bool = False) -> dict[int, int]:
        """Origin → target of one-sided movements that go on at once.

        Everyone reads from someone else; with busy targets, half of the ranks (or nodes) from the other half.
        """
        if link == "between":
            found: dict[int, int] = {}
            for at, ranks in enumerate(self.nodes):
                targets = self.nodes[at - 1] if busy else self.nodes[(at + 1) % len(self.nodes)]
                if len(self.nodes) > 1 and (at % 2 or not busy):
                    found |= {rank: targets[n % len(targets)] for n, rank in enumerate(ranks)}
            return found
        if busy:
            halves = [(ranks, -(-len(ranks) // 2)) for ranks in self.nodes]
            return {origin: ranks[n] for ranks, half in halves for n, origin in enumerate(ranks[half:])}
        return {rank: ranks[n - 1] for ranks in self.nodes if len(ranks) > 1 for n, rank in enumerate(ranks)}

    def readers(self, link: str) -> tuple[dict[int, int], dict[int, int]]:
        """Reader → owner, where several read from one, and where each reads from another; empty if they cannot."""
        if link == "node":
            crowds = [ranks for ranks in self.nodes if len(ranks) > 2]
            each = {reader: ranks[(n + 2) % len(ranks)] for ranks in crowds for n, reader in enumerate(ranks[1:])}
        else:
            each = self.pairs("between", busy=True)
        firsts = {rank: ranks[0] for ranks in self.nodes for rank in ranks}
        one = {reader: firsts[reader if link == "node" else owner] for reader, owner in each.items()}
        return (one, each) if one != each else ({}, {})

    def groups(self, link: str) -> list[tuple[int, ...]]:
        """Disjoint groups that move something together: ranks of a node, or one of each of some nodes."""
        together = self.nodes
        if link == "between":
            longest = max(map(len, self.nodes))
            together = [[ranks[n] for ranks in self.nodes if len(ranks) > n] for n in range(longest)]
        return [part for ranks in together for part in _parts(ranks) if len(part) > 1]

    # -- the laws of `rma_mm.policy.model.machine` ------------------------------------------------------

    def pair_load(self, link: str, pairs: Mapping[int, int], busy: bool = False) -> Load:
        """Return the load of one transfer on each of these pairs; busy targets use a processor too."""
        if link == "between":
            return self.wire_load(Counter(pairs.values()), Counter(list(pairs)))
        active = set(pairs) | (set(pairs.values()) if busy else set())
        return self.processor_load(dict.fromkeys(active, 1))

    def processor_load(self, charges: Mapping[int, float]) -> Load:
        """Return the load of transfers that processors carry out."""
        hosts: dict[int, float] = defaultdict(float)
        for rank, charge in charges.items():
            hosts[self.host_of[rank]] += charge
        most = max(*charges.values(), *(charge / self.slots for charge in hosts.values()))
        return most, most

    def wire_load(self, sent: Mapping[int, float], received: Mapping[int, float]) -> Load:
        """Return the load of transfers that wires carry."""
        calls, volumes = [], []
        for way in (sent, received):
            nodes: dict[int, float] = defaultdict(float)
            for rank, count in way.items():
                nodes[self.node_of[rank]] += count
            calls.append(max(way.values()))
            volumes.append(max(nodes.values()))
        return max(calls), max(volumes)


def _parts(ranks: list[int]) -> list[tuple[int, ...]]:
    """Return ranks in as few groups of at most `FLAT` as there can be, as even as can be."""
    count = -(-len(ranks) // FLAT)
    bounds = [len(ranks) * n // count for n in range(count + 1)]
    return [tuple(ranks[a:b]) for a, b in pairwise(bounds)]


def _control_group() -> str:
    """The control group of this process, which may have less than all of its processors' time; empty if unknown."""
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def _boot() -> str:
    """Return the boot identifier, which tells apart hosts of the same name; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""

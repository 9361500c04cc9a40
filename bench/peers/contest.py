"""Peers against each other on one case: interleaved rounds of jobs that all hold the same product."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from bench import measure
from bench.peers.cases import Case
from bench.peers.jobs import Job, JobError, Launcher
from bench.peers.operands import uncovered
from bench.peers.registry import NUMPY, RMA_MM, Peer

LEAST_SAMPLE = 0.05
"""Seconds that a sample should take at least; the same number of products of every peer is timed together."""
MOST_PRODUCTS = 100
"""Products in a sample at most."""
SHARE_OF_MEMORY = 0.8
"""Of the memory that is free, how much the jobs of a batch may take together."""
COPIES = 2.5
"""A, B and C this many times is what a peer is reckoned to take: operands, result and what it moves."""


@dataclass
class Outcome:
    """What became of one peer in one batch."""

    peer: str
    batch: int
    seconds: list[float] = field(default_factory=list)
    """Of one product each."""
    products: int = 1
    """In a sample."""
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def batches(case: Case, ranks: int, peers: Sequence[Peer], memory: float | None = None) -> Iterator[list[Peer]]:
    """The peers in groups that fit into memory together, rma_mm and NumPy in each of them."""
    always = [peer for peer in peers if peer.name in (RMA_MM, NUMPY)]
    others = [peer for peer in peers if peer not in always]
    room = SHARE_OF_MEMORY * (free_memory() if memory is None else memory)
    room -= sum(taken(peer, case, ranks) for peer in always)
    batch: list[Peer] = []
    left = room
    for peer in others:
        if batch and taken(peer, case, ranks) > left:
            yield [*always, *batch]
            batch, left = [], room
        batch.append(peer)
        left -= taken(peer, case, ranks)
    if batch or always:
        yield [*always, *batch]


def taken(peer: Peer, case: Case, ranks: int) -> float:
    """Bytes that a peer's job is reckoned to take."""
    processes = 1 if peer.start == "one" else ranks
    return COPIES * case.nbytes + processes * peer.mebibytes * 2**20


def free_memory() -> int:
    """Bytes that may be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo names no MemAvailable")


class Contest:
    """One batch of peers on one case, their jobs alive together."""

    def __init__(self, case: Case, ranks: int, batch: int, launcher: Launcher) -> None:
        self.case, self.ranks, self.launcher = case, ranks, launcher
        self.batch = batch
        self.jobs: dict[str, Job] = {}
        self.outcomes: dict[str, Outcome] = {}

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs.values():
            job.end()

    def run(self, peers: Iterable[Peer], rounds: int) -> list[Outcome]:
        """Prepare, check, warm up, measure, check again."""
        for peer in peers:
            self.prepare(peer)
        products = 1
        for _ in range(2):  # one product alone takes longer than each of several
            fastest = [took for name in list(self.jobs) if (took := self.sample(name, products)) is not None]
            products = min(MOST_PRODUCTS, max(1, ceil(products * LEAST_SAMPLE / min(fastest, default=1))))
        for turn in range(-1, rounds):
            names = list(self.jobs)
            for at in range(len(names)):
                name = names[(turn + at) % len(names)]
                took = self.sample(name, products)
                if took is not None and turn >= 0:
                    self.outcomes[name].seconds.append(took / products)
        for name in list(self.jobs):
            self.outcomes[name].products = products
            self.check(name)
        return list(self.outcomes.values())

    def prepare(self, peer: Peer) -> None:
        """Start a peer's job, multiply once and check."""
        outcome = self.outcomes[peer.name] = Outcome(peer.name, self.batch)
        try:
            job = self.jobs[peer.name] = Job(peer, self.case, self.ranks, self.launcher)
            outcome.facts = job.facts
        except (JobError, OSError) as error:
            self.drop(peer.name, str(error))
            return
        if self.sample(peer.name, 1) is not None:
            self.check(peer.name)

    def sample(self, name: str, products: int) -> float | None:
        """Seconds of so many products on the slowest rank; None where the peer failed."""
        time.sleep(measure.SETTLE)
        try:
            return max(float(answer["seconds"]) for answer in self.jobs[name].ask("run", products))
        except JobError as error:
            self.drop(name, str(error))
            return None

    def check(self, name: str) -> None:
        """Hold the last result against the right one."""
        try:
            answers = self.jobs[name].ask("check")
        except JobError as error:
            self.drop(name, f"while its result was checked: {error}")
            return
        wrong = sum(answer["wrong"] for answer in answers)
        fault = f"{wrong} rows of parts of C are wrong" if wrong else None
        fault = fault or uncovered(self.case, [box for answer in answers for box in answer["boxes"]])
        if fault:
            self.drop(name, f"WRONG RESULT: {fault}")

    def drop(self, name: str, error: str) -> None:
        """End a peer's job; what it measured counts no more."""
        self.outcomes[name].error = next(filter(None, error.splitlines()), "failed without a word")
        self.outcomes[name].seconds = []
        if name in self.jobs:
            self.jobs.pop(name).end()

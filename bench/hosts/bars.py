"""`python -m bench.hosts --bars`: what products cost between hosts, against what no program could avoid.

Time bars: seconds / max(multiply alone, bytes that enter the busiest host / the link's rate). Multiply alone is all
ranks at once without communication, in turn with the product; the rate is that of a plain TCP stream over the same
link. Exposed communication is what the product takes beyond multiply alone, by the time on the link. Word bars: words
against the lower bound of `rma_mm.policy.model.lower_bounds`, and words between nodes against what ranks would fetch
that share nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import measure
from bench.hosts.cluster import Cluster
from bench.hosts.link import link_rate
from bench.hosts.namespaces import ClusterError
from rma_mm.policy.model.lower_bounds import least_words

LIMIT = 240.0
"""Seconds that one job may take."""

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Timed:
    """A product whose time is measured."""

    hosts: int
    ranks: int
    """On each host."""
    rate: str
    shape: Shape
    bar: float

    def __str__(self) -> str:
        return f"{'×'.join(map(str, self.shape))}, {self.hosts} hosts × {self.ranks}, {self.rate}"


@dataclass(frozen=True)
class Counted:
    """A product whose words are counted."""

    name: str
    hosts: int
    ranks: int
    arguments: tuple[str, ...]
    """For `rma_mm.run`."""
    reference: float
    """What the words are compared with."""
    of: str
    """What that is."""
    bar: float
    words: str = "inter_node"
    """Which words of the report."""


def main(arguments: Sequence[str]) -> int:
    """Measure and report; `WRONG` where a product was. Raises ClusterError."""
    parser = measure.Parser(__doc__)
    parser.prog = "python -m bench.hosts --bars"
    parser.add_argument("--size", type=int, default=4096, help="rows of the square product; the others with it (4096)")
    parser.add_argument("--repeat", type=int, default=5, help="samples of each case (5)")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    options = parser.parse_args(arguments)
    timed = [time_of(case, options.repeat) for case in timed_cases(options.size) if options.only in str(case)]
    counted = [words_of(case) for case in counted_cases(options.size) if options.only in case.name]
    if not timed and not counted:
        parser.error(f"--only {options.only!r} is in no case's name")
    lines = [*timed_lines(timed), *counted_lines(counted)]
    machine = {name: value for name, value in measure.machine().items() if name != "mpi"}
    measure.publish(options.json, "hosts", machine, lines, timed=timed, counted=counted)
    return 0 if all(result["right"] for result in timed + counted) else measure.WRONG


def timed_cases(size: int) -> list[Timed]:
    """The products of the time bars."""
    square, deep = (size, size, size), deep_shape(size)
    return [
        *(Timed(2, 1, rate, square, 1.10) for rate in ("5gbit", "1gbit")),
        *(Timed(2, 2, rate, square, 1.20) for rate in ("5gbit", "1gbit")),
        Timed(2, 1, "1gbit", deep, 1.10),
    ]


def deep_shape(size: int) -> Shape:
    """K-dominant."""
    return size // 8, size // 8, size * 16


def counted_cases(size: int) -> list[Counted]:
    """The products of the word bars.

    On two nodes of two ranks, half of an operand that every rank wants whole lies on the other node: ranks that share
    nothing fetch 4 · 1/2 of it. With A's blocks transposed on a 2 × 2 mesh and B in place, each rank fetches a quarter
    of A, the same one as its node-mate.
    """
    m, n, k = half = (size // 2, size // 2, size // 2)
    text, deep = ",".join(map(str, half)), deep_shape(size)
    row = ("--algorithm", "stationary_c", "--shape", text, "--mesh")
    blocks = ("--layout-c", "P('i', 'j')")
    turned = ("2x2", "--layout-a", "P('j', 'i')", "--layout-b", "P(None, 'j')", *blocks)
    thin = ("--shape", ",".join(map(str, deep)))
    unshared = "unshared fetching"
    return [
        Counted("4 hosts × 1, K-dominant, auto", 4, 1, thin, least_words(deep, 4), "lower bound", 1.25, "per_rank_max"),
        Counted("2 hosts × 2, mesh 4x1", 2, 2, (*row, "4x1", *blocks), 2.0 * k * n, unshared, 0.5),
        Counted("2 hosts × 2, mesh 1x4", 2, 2, (*row, "1x4", *blocks), 2.0 * m * k, unshared, 0.5),
        Counted("2 hosts × 2, mesh 2x2, same slices", 2, 2, (*row, *turned), 1.0 * m * k, unshared, 0.5),
    ]


# -- measuring ------------------------------------------------------------------------------------


def time_of(case: Timed, repeat: int) -> dict[str, Any]:
    """The record of a time bar."""
    shape = ",".join(map(str, case.shape))
    with Cluster(case.hosts, case.rate) as cluster:
        rates = [link_rate(cluster) for _ in range(3)]
        found = answer(cluster, case.ranks, ["-m", "bench.hosts.rounds", "--shape", shape, "--repeat", str(repeat)])
    rate = sorted(rates)[1]
    seconds = found["seconds"]
    on_link = found["busiest_host_bytes"] / rate
    ratio = seconds["product"] / max(seconds["multiply alone"], on_link)
    met = bool(ratio <= case.bar)
    return {
        "case": str(case), "rate": case.rate, "link_rates": rates, "link_rate": rate, "link_seconds": on_link,
        "exposed": max(0.0, seconds["product"] - seconds["multiply alone"]) / on_link,
        "ratio": ratio, "bar": case.bar, "met": met, **found,
    }


def words_of(case: Counted) -> dict[str, Any]:
    """The record of a word bar."""
    with Cluster(case.hosts) as cluster:
        found = answer(cluster, case.ranks, ["-m", "rma_mm.run", *case.arguments, "--verify", "--json", "-"])
    words = found["words"][case.words]
    ratio = words / case.reference
    return {
        "case": case.name, "words": words, "reference": case.reference, "of": case.of, "ratio": ratio,
        "bar": case.bar, "met": bool(ratio <= case.bar), "right": found["verified"], "report": found,
    }


def answer(cluster: Cluster, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON that a Python job prints. Raises ClusterError where it fails otherwise than by a wrong product."""
    done = cluster.run(ranks, [sys.executable, *arguments], timeout=LIMIT)
    if done.returncode not in (0, measure.WRONG):
        said = f"{done.stdout}\n{done.stderr}".strip()  # mpiexec tells of killed ranks on standard output
        raise ClusterError(f"python {' '.join(arguments)} ended with {done.returncode}: {said}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# -- telling --------------------------------------------------------------------------------------


def timed_lines(results: Sequence[dict[str, Any]]) -> list[str]:
    """The table of the time bars."""
    head = ["product", "algorithm", "link Gbit/s", "on link s", "alone s", "product s", "exposed"]
    head += ["ratio", "bar", "met", "right"]
    rows = [
        [
            r["case"], r["algorithm"], 8e-9 * r["link_rate"], r["link_seconds"], r["seconds"]["multiply alone"],
            r["seconds"]["product"], f"{100 * r['exposed']:.0f} %", f"{r['ratio']:.3f}", r["bar"], r["met"], r["right"],
        ]
        for r in results
    ]
    return ["", *measure.table(head, rows)] if rows else []


def counted_lines(results: Sequence[dict[str, Any]]) -> list[str]:
    """The table of the word bars."""
    head = ["words", "algorithm", "counted", "against", "which is", "ratio", "bar", "met", "right"]
    rows = [
        [
            r["case"], r["report"]["algorithm"], r["words"], f"{r['reference']:.0f}", r["of"], f"{r['ratio']:.3f}",
            r["bar"], r["met"], r["right"],
        ]
        for r in results
    ]
    return ["", *measure.table(head, rows)] if rows else []

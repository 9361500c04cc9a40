"""`python -m bench.peers`: rma_mm beside what users would otherwise pick, in the same run, on the same data.

For each case and number of ranks every peer's job holds the operands; rounds are interleaved, each starting with
another peer. Every result is checked exactly, before and after. Peers that are not installed are skipped by name. Jobs
that do not fit into memory together are measured in batches, with rma_mm and NumPy in each of them.
"""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import measure
from bench.peers import report
from bench.peers.cases import CASES, Case
from bench.peers.contest import Contest, Outcome, batches
from bench.peers.jobs import JobError, Launcher
from bench.peers.registry import NUMPY, PEERS, RMA_MM, Peer, missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; `WRONG` where rma_mm's product was, 1 where it failed."""
    options = parsed(arguments)
    if options.list:
        print(*listing(options), sep="\n")
        return 0
    results = [result for file in options.add for result in json.loads(file.read_text())["results"]]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that every job is ended
    try:
        for case in options.case:
            for ranks in options.ranks or case.ranks + (case.full if options.full else ()):
                results.append(measured(case, ranks, options))
    except KeyboardInterrupt:
        print("interrupted: what follows is what was measured before", file=sys.stderr)
        publish(results, options)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    publish(results, options)
    return code_of(results)


def parsed(arguments: Sequence[str] | None) -> Namespace:
    """The options."""
    parser = measure.Parser(__doc__)
    add = parser.add_argument
    add("--case", nargs="+", type=case_of, metavar="NAME", help="by name (see --list), or as M,N,K[,float64] (all)")
    add("--ranks", nargs="+", type=int, help="numbers of ranks (those of each case)")
    add("--full", action="store_true", help="the numbers of ranks too that take long")
    add("--rounds", type=int, default=5, help="samples of each peer (5)")
    add("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="PEER", help="by name (all)")
    add(
        "--launcher",
        default=Launcher.prefix,
        metavar="COMMAND",
        help="what starts MPI jobs, before -n RANKS; {mpiexec} stands for the peer's own. Others but NumPy are skipped",
    )
    add("--listen", metavar="WHERE", help="path or HOST:PORT where ranks find this process (a path of its own)")
    add("--python", nargs="+", default=[], type=python_of, metavar="PEER=PATH", help="a peer's own interpreter")
    add("--threads", type=int, help="BLAS threads of a rank (cores / ranks, at least 1)")
    add("--limit", type=float, default=120, help="seconds after which a peer that does not answer has failed (120)")
    add("--add", nargs="+", type=Path, default=[], metavar="FILE", help="JSON of earlier runs, to report together")
    add("--plot", type=Path, metavar="FILE", help="draw the ratios there")
    add("--markdown", type=Path, metavar="FILE", help="write the table there as a README shows it")
    add("--list", action="store_true", help="list cases and peers, and which of them are missing")
    options = parser.parse_args(arguments)
    if options.case is None:
        options.case = [] if options.add else list(CASES.values())
    if options.rounds < 1 or min(options.ranks or [1]) < 1 or (options.threads or 1) < 1:
        parser.error("--rounds, --ranks and --threads must be 1 or more")
    return options


def case_of(text: str) -> Case:
    """The case that a user named."""
    try:
        return CASES[text] if text in CASES else Case.parsed(text)
    except ValueError:
        names = ", ".join(map(repr, CASES))
        raise ArgumentTypeError(f"{text!r} is neither M,N,K[,float64] nor one of {names}") from None


def python_of(text: str) -> tuple[str, str]:
    """PEER=PATH."""
    name, _, path = text.partition("=")
    if name not in PEERS or not Path(path).exists():
        raise ArgumentTypeError(f"{text!r} must be PEER=PATH, PEER one of {', '.join(PEERS)}, PATH a Python")
    return name, path


def launcher_of(options: Namespace) -> Launcher:
    """How this run starts its jobs."""
    return Launcher(options.launcher, options.listen, dict(options.python), options.threads, options.limit)


def why_not(peer: Peer, ranks: int, launcher: Launcher) -> str | None:
    """Why a peer is skipped, if it is."""
    if launcher.prefix != Launcher.prefix and peer.start != "mpi" and peer.name != NUMPY:
        return "it starts its processes on this host only"
    return peer.unfit(ranks) or missing(peer, launcher.python(peer))


def measured(case: Case, ranks: int, options: Namespace) -> dict[str, Any]:
    """The record of one case on so many ranks."""
    launcher = launcher_of(options)
    reasons = {name: why_not(PEERS[name], ranks, launcher) for name in options.peers}
    skipped = {name: why for name, why in reasons.items() if why}
    peers = [PEERS[name] for name in options.peers if name not in skipped]
    outcomes: list[Outcome] = []
    for batch, group in enumerate(batches(case, ranks, peers)):
        print(f"{case.name} on {ranks}: {', '.join(peer.name for peer in group)}", file=sys.stderr, flush=True)
        with Contest(case, ranks, batch, launcher) as contest:
            outcomes += contest.run(group, options.rounds)
    return report.record(case, ranks, outcomes, skipped)


def publish(results: list[dict[str, Any]], options: Namespace) -> None:
    """Print the table, and write what was asked for."""
    where = report.machine(results)
    lines = report.text_table(results)
    if options.plot and (trouble := report.plot(results, options.plot)):
        lines.append(trouble)
    if options.markdown:
        options.markdown.write_text(report.markdown(results, where))
    measure.publish(options.json, "peers", where, lines, results=results)


def code_of(results: Sequence[dict[str, Any]]) -> int:
    """The exit code: other peers' faults are reported, rma_mm's are failures."""
    errors = [result["peers"][RMA_MM]["error"] for result in results if RMA_MM in result["peers"]]
    if any(error and error.startswith("WRONG") for error in errors):
        return measure.WRONG
    return 1 if any(errors) else 0


def listing(options: Namespace) -> list[str]:
    """Cases and peers."""
    launcher = launcher_of(options)
    cases = [
        [case.name, f"{case.m}×{case.n}×{case.k}", case.dtype, ", ".join(map(str, case.ranks + case.full))]
        for case in CASES.values()
    ]
    peers = [[peer.name, missing(peer, launcher.python(peer)) or "installed"] for peer in PEERS.values()]
    return [*measure.table(["case", "M×N×K", "type", "ranks"], cases), "", *measure.table(["peer", ""], peers)]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobError as error:
        sys.exit(f"bench.peers: {error}")

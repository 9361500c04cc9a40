"""`python -m bench.policy`: how well the planner chooses, and how well it predicts.

For each number of ranks and nodes the machine is calibrated, and then one job works through its cases. In each case
every candidate that the planner does not reject is prepared by name, checked exactly and timed, all of them
interleaved; then what it chose and the best other one are timed again head to head, and regret is the chosen one's time
over the best one's. More than one node is pretended (MPICH).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench import measure
from bench.policy import report
from bench.policy.cases import Case, between_hosts, drawn, table, uneven
from bench.policy.jobs import WORKER, Job, JobError
from bench.policy.plot import plot


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; `WRONG` where a product was, 1 where anything failed."""
    options = parsed(arguments)
    cases = selected(options)
    if options.list:
        print(*(f"{case.kind:10} {case.title}: {'x'.join(map(str, case.shape))}" for case in cases), sep="\n")
        return 0
    results = [result for file in options.read for result in json.loads(file.read_text())["results"]]
    where: dict[str, Any] = measure.machine()
    if options.read:
        where = json.loads(options.read[0].read_text())["machine"]
        cases = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that every job is ended
    faults: list[str] = []
    try:
        measure_all(cases, options, where, results, faults)
    except KeyboardInterrupt:
        faults.append("interrupted: this is what was measured before")
    finally:
        signal.signal(signal.SIGTERM, before)
    done = {result["case"] for result in results}
    publish(results, where, faults, [case.title for case in cases if case.title not in done], options)
    return code_of(results, faults)


def parsed(arguments: Sequence[str] | None) -> Namespace:
    """The options."""
    parser = measure.Parser(__doc__)
    add = parser.add_argument
    add("--ranks", nargs="+", type=int, default=[2, 4, 6], help="numbers of ranks (2 4 6; with --random any)")
    add("--nodes", nargs="+", type=int, default=[1, 2], choices=[1, 2], help="numbers of nodes (1 2)")
    add("--only", nargs="+", default=[""], metavar="TEXT", help="cases with one of these in their names (see --list)")
    add("--calibrated", action="store_true", help="price by what was calibrated before, or is in the course of this")
    add("--quick", action="store_true", help="fewer rounds: regrets are then noise to some per cent")
    add("--random", nargs=2, type=int, metavar=("SEED", "COUNT"), help="so many drawn cases in place of the table")
    add("--uneven", nargs=2, type=int, metavar=("SEED", "COUNT"), help="the same on ranks that are pinned unevenly")
    add("--hosts", nargs=2, type=int, metavar=("SEED", "COUNT"), help="the same between two hosts in namespaces, for "
        "each of --rates, on a machine that is measured at first use; as root")
    add("--rates", nargs="+", default=["5gbit", "1gbit"], help="of the links between hosts (5gbit 1gbit)")
    add("--budget", type=float, metavar="SECONDS", help="leave out what does not fit")
    add("--limit", type=float, default=180, metavar="SECONDS", help="give a job up that takes longer for a case (180)")
    add("--plot", type=Path, metavar="FILE", help="draw measured against predicted, and the regrets")
    add("--read", nargs="+", type=Path, default=[], metavar="FILE", help="report on earlier --json; measure nothing")
    add("--list", action="store_true", help="list the cases")
    options = parser.parse_args(arguments)
    if not options.read and not selected(options):
        parser.error("no case is left: see --list")
    return options


def selected(options: Namespace) -> list[Case]:
    """The cases that were asked for."""
    if options.uneven:
        return uneven(*options.uneven)
    if options.hosts:
        seed, count = options.hosts
        found = between_hosts(seed, count, options.rates)
        return [case for case in found if any(text in case.title for text in options.only)]
    asked = product(sorted({*options.nodes}), sorted({*options.ranks}))  # a seed draws the same in whatever order
    settings = [(ranks, nodes) for nodes, ranks in asked if nodes < ranks]
    if options.random:
        seed, count = options.random
        cases = drawn(seed, count, settings) if settings else []
    else:
        cases = [case for case in table() if (case.ranks, case.nodes) in settings]
    return [case for case in cases if any(text in case.title for text in options.only)]


def measure_all(
    cases: Sequence[Case], options: Namespace, where: dict[str, Any], results: list[dict[str, Any]], faults: list[str],
    worker: str = WORKER,
) -> None:
    """Run job after job; what each found is added to `where`, `results` and `faults`."""
    end = None if options.budget is None else time.monotonic() + options.budget
    left = len(cases)
    for where_run in dict.fromkeys(map(place_of, cases)):
        ranks, nodes, _, rate = where_run
        group = [case for case in cases if place_of(case) == where_run]
        share = None if end is None else max(0.0, end - time.monotonic()) * len(group) / left
        left -= len(group)
        print(f"{ranks} ranks, {nodes} nodes {rate}: {len(group)} cases", file=sys.stderr, flush=True)
        with Job(group, options.quick, share, worker) as job:
            try:
                fault = (None if options.calibrated or rate else job.calibrate()) or job.work(options.limit)
            finally:  # what was measured counts, also where the user ends it
                machine, found = job.written()
                results += found
                where |= {"mpi": machine["mpi"]} if machine else {}
        if fault:
            at = group[len(found)].title if len(found) < len(group) else "its end"
            faults.append(f"the job on {ranks} ranks, {nodes} nodes FAILED at {at}: {fault}")


def place_of(case: Case) -> tuple[int, int, tuple[int, ...], str]:
    """Return what the cases of one job have in common."""
    return case.ranks, case.nodes, case.cores, case.rate


def publish(
    results: list[dict[str, Any]], where: dict[str, Any], faults: list[str], left_out: list[str], options: Namespace
) -> None:
    """Print the tables, and write what was asked for."""
    lines = report.lines(results)
    if left_out:
        lines.append(f"left out: {len(left_out)} cases: {'; '.join(left_out)}")
    lines += faults
    if options.plot and (trouble := plot(results, options.plot)):
        lines.append(trouble)
    figures = {name: report.summary(group) for name, group in report.groups(results).items()}
    facts = {"summary": figures, "left_out": left_out, "faults": faults, "results": results}
    measure.publish(options.json, "policy", where, lines, **facts)


def code_of(results: Sequence[dict[str, Any]], faults: Sequence[str]) -> int:
    """The exit code."""
    contenders = [x for result in results for x in result.get("contenders", [])]
    if any(x["right"] is False for x in contenders):
        return measure.WRONG
    failed = any(x["error"] for x in contenders) or any(result.get("error") for result in results)
    return 1 if failed or faults else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobError as error:
        sys.exit(f"bench.policy: {error}")

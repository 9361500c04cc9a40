"""`python -m bench.question`: read remote data directly, or broadcast it?

Twelve shapes in each of several settings: one node, two hosts at 5 and at 1 Gbit/s, four pretended nodes, ranks of
different speed, and callers' own arrays through MPI and through UCX. In each cell every candidate is checked and timed
as by `bench.policy`; the best of each family stands in the table. Then come experiments of the literature.

Bars: the planner chooses a plan within 5 % of the fastest in 90 % of the cells, its regret is at most 1.05 on average,
and words are those of the closed forms. How often a plan is of the family that wins stands beside.
"""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from bench import measure
from bench.policy.__main__ import measure_all
from bench.policy.jobs import WORKER, JobError
from bench.question.cells import EXPERIMENTS, SETTINGS, Cell, cases, code_of, failure, lines
from bench.question.plot import plot
from bench.question.tables import experiment_faults, experiment_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or read what was measured, and report; 1 where a bar is missed or anything failed."""
    parser = measure.Parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="what has one of these in its name")
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS, *EXPERIMENTS], choices=[*SETTINGS, *EXPERIMENTS],
                        metavar="NAME", help=f"all of: {', '.join([*SETTINGS, *EXPERIMENTS])}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: regrets are then noise to some per cent")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="leave out what does not fit")
    parser.add_argument("--read", nargs="+", type=Path, default=[], metavar="FILE", help="report on earlier --json")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the tables there; needs matplotlib")
    options = parser.parse_args(arguments)
    chosen = [
        case for case in chain(cases(), *EXPERIMENTS.values())
        if case.kind in options.settings and any(text in f"{case.name} on {case.kind}" for text in options.only)
    ]
    results: list[dict[str, Any]] = [each for file in options.read for each in json.loads(file.read_text())["results"]]
    where: dict[str, Any] = json.loads(options.read[0].read_text())["machine"] if options.read else measure.machine()
    faults: list[str] = []
    if not options.read:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        how = Namespace(budget=options.budget, quick=options.quick, calibrated=False, limit=900)
        for setting in options.settings:  # a job each, as they differ in more than ranks and nodes
            group = [case for case in chosen if case.kind == setting]
            worker = "bench.question.literature" if setting in EXPERIMENTS else WORKER
            try:
                measure_all(group, how, where, results, faults, worker)
            except (JobError, KeyboardInterrupt) as error:
                faults.append(f"{setting}: {error or 'interrupted'}")
    cells = [Cell(record) for record in results if record["kind"] not in EXPERIMENTS]
    experiments = [record for record in results if record["kind"] in EXPERIMENTS]
    faults += experiment_faults(experiments)
    faults += [f"{cell.record['case']}: {each}" for cell in cells for each in cell.wrong_words[:3]]
    faults += [f"{cell.record['case']}: {text}" for cell in cells if (text := failure(cell.record))]
    faults += [f"{record['case']}: {record['error']}" for record in experiments if "error" in record]
    said = [*lines(cells), *experiment_lines(experiments), *faults]
    measure.publish(options.json, "question", where, said, faults=faults, results=results)
    if options.plot and (trouble := plot(cells, experiments, where, options.plot)):
        print(trouble)
    measured = [cell for cell in cells if cell.is_measured]
    return code_of(measured, faults) if measured or not experiments else int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

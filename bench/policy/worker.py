"""`mpiexec -n P python -m bench.policy.worker CASES RESULTS`: one job of `bench.policy`, a line of JSON a case."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import measure
from bench.policy.cases import Case
from bench.policy.contest import QUICK, Contest, Pace
from rma_mm.errors import RmaError

if TYPE_CHECKING:
    from mpi4py import MPI


def main(comm: MPI.Intracomm, measured: Callable[[Case, MPI.Intracomm, Pace], dict[str, Any]] | None = None) -> int:
    """Work through the cases; those that do not fit into the budget are left out.

    measured: returns the record of a case; all its candidates in turn if not given.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path, help="JSON: a list of cases")
    parser.add_argument("results", type=Path, help="where the lines go: the machine, then a record for each case")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--budget", type=float, help="seconds for all cases")
    options = parser.parse_args()
    start = time.monotonic()
    write(comm, options.results, {"machine": measure.machine(comm)})
    cases = [Case.from_json(given) for given in json.loads(options.cases.read_text())]
    longest = 0.0
    for number, case in enumerate(cases):
        spent = time.monotonic() - start
        if comm.bcast(options.budget is not None and spent + longest > options.budget):
            break
        record = (measured or raced)(case, comm, QUICK if options.quick else Pace())
        longest = max(longest, time.monotonic() - start - spent)
        write(comm, options.results, record)
        tell(comm, f"[{number + 1}/{len(cases)}] {case.title}: {in_words(record)}")
    return 0


def raced(case: Case, comm: MPI.Intracomm, pace: Pace) -> dict[str, Any]:
    """The record of a case. Collective."""
    start = time.monotonic()
    try:
        with Contest(case, comm, pace) as contest:
            found = contest.run()
    except RmaError as error:  # the same one on every rank
        found = {"error": f"{type(error).__name__}: {error}"}
    gc.collect()  # matrices that nobody names any more keep their memory until then
    facts = {"case": case.title, "setting": case.setting, "kind": case.kind, "shape": list(case.shape)}
    given = {"dtype": case.dtype, "mesh": case.mesh, "layouts": dict(zip("ABC", case.layouts, strict=True))}
    return {**facts, **given, **found, "took": time.monotonic() - start}


def in_words(record: dict[str, Any]) -> str:
    """What came out, in a few words."""
    took = f"{record['took']:.1f} s"
    if "regret" not in record:
        return f"{record.get('error') or record.get('skipped') or record.get('said')}; {took}"
    chosen, best = (record["contenders"][record[x]] for x in ("chosen", "best"))
    better = "" if best is chosen else f", best {best['algorithm']} on {best['mesh']}"
    return f"{chosen['algorithm']} on {chosen['mesh']}{better}, regret {record['regret']:.3f}; {took}"


def write(comm: MPI.Intracomm, file: Path, record: dict[str, Any]) -> None:
    """Add a line. On one rank."""
    if comm.rank == 0:
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def tell(comm: MPI.Intracomm, line: str) -> None:
    """Say how far the job is. On one rank."""
    if comm.rank == 0:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    measure.run(main)

"""`python -m bench.trust.misuse --count N --seed S`: random programs whose ranks do not do the same, one job each.

A rank skips a call, swaps two, closes a mesh, returns, exits or fails while others call; callbacks fail or call;
threads call at once; communicators, rows, arrays and the environment differ. A program must end: rightly, or by errors
of ours or its own. What hangs, dies by a signal or ends in another traceback is printed with the command to repeat it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.measure import WRONG
from bench.trust.misuse_rank import MISUSES, Program, draw
from tests.processes import mpirun

OUTCOMES = ("right", "no error", "silent rank", "foreign", "died", "hung")
FAULTS = OUTCOMES[2:]


@dataclass
class Outcome:
    """What became of a program."""

    kind: str
    text: str
    seconds: float


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.trust.misuse", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="programs (default: %(default)s)")
    parser.add_argument("--seed", type=int, required=True, help="what they are drawn from")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="begin with this program")
    parser.add_argument("--only", type=int, metavar="N", help="this program alone, with what its ranks say")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.count) if options.only is None else [options.only]
    deadline = time.monotonic() + 60 * options.minutes
    counts: Counter[tuple[str, str]] = Counter()
    for number in numbers:
        if time.monotonic() > deadline:
            break
        program = draw(options.seed, number)
        outcome = run(program, options.limit)
        counts[program.misuse, outcome.kind] += 1
        print(f"{counts.total()} of {len(numbers)}: {program.misuse}: {outcome.kind}", file=sys.stderr, flush=True)
        if outcome.kind in FAULTS or options.only is not None:
            print(f"{outcome.kind} after {outcome.seconds:.0f} s: {program}\n{outcome.text}\n"
                  f"python -m bench.trust.misuse --seed {options.seed} --only {number}\n", flush=True)
    print(table(counts))
    if options.json:
        found = [{"misuse": misuse, "outcome": kind, "count": count} for (misuse, kind), count in counts.items()]
        options.json.write_text(json.dumps({"seed": options.seed, "counts": found}, indent=1))
    return WRONG if any(kind in FAULTS for _, kind in counts) else 0


def run(program: Program, limit: float) -> Outcome:
    """One job."""
    runner = ["-m", "mpi4py"] if program.by_mpi4py else []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="misuse-") as name:
        words = [*runner, "-m", "bench.trust.misuse_rank", name, str(program.seed), str(program.number)]
        code, said = None, ""
        try:
            done = mpirun(program.ranks, words, timeout=limit)
            code, said = done.returncode, done.stderr
        except subprocess.TimeoutExpired as error:
            said = str(error.stderr)
        notes = [notes_of(Path(name) / f"rank.{rank}") for rank in range(program.ranks)]
    kind = judged(program, code, said, notes)
    lines = [f"  rank {rank}: {line}" for rank, each in enumerate(notes) for line in each]
    return Outcome(kind, "\n".join([*lines, f"  exit code {code}", said[-3000:]]), time.monotonic() - begin)


def notes_of(file: Path) -> list[str]:
    """What befell a rank."""
    return file.read_text().splitlines() if file.exists() else []


def judged(program: Program, code: int | None, said: str, notes: list[list[str]]) -> str:
    """Which of `OUTCOMES` it is."""
    from rma_mm import errors

    if code is None:
        return "hung"
    if code < 0 or code > 128 or "KILLED BY SIGNAL" in said or "Fatal Python error" in said:
        return "died"
    lines = [line.partition(": ")[2] for each in notes for line in each]
    found = [line.split()[1].rstrip(":") for line in lines if line.startswith("error ")]
    if any(not (hasattr(errors, name) or name == "Planted") for name in found):
        return "foreign"
    last = [each[-1].partition(": ")[2] if each else "" for each in notes]
    if not all(line.startswith(("error", "end", "exit", "return")) for line in last):
        ended = "the job ends" in said or program.by_mpi4py  # a rank that ended the job, for all
        return "right" if ended else "silent rank"
    return "right" if found else "no error"


def table(counts: Counter[tuple[str, str]]) -> str:
    """Outcomes by misuse."""
    rows = [("misuse", *OUTCOMES)]
    rows += [(misuse, *(str(counts[misuse, kind]) for kind in OUTCOMES)) for misuse in MISUSES]
    rows.append(("all", *(str(sum(counts[misuse, kind] for misuse in MISUSES)) for kind in OUTCOMES)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    sys.exit(main())

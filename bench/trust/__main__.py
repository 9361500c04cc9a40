"""`python -m bench.trust --count N --seed S`: random products and more on real ranks, compared with NumPy.

Of each twenty cases thirteen are products, the others redistributions, files, batches, expressions of `einsum`, chains.
A case is drawn from the seed, its setting (ranks, window, nodes) and its number; each fault is printed with the command
that repeats it alone. What only shows after others is repeated by `--from` and `--to`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

from bench.measure import WINDOWS, WRONG
from bench.trust.cases import KINDS, draw
from bench.trust.jobs import NODES, Report, Setting, run

ROUND = 200
"""Cases of a setting before the next has its turn."""
OUTCOMES = ("right", "refused", "wrong", "raised", "died", "hung")


def main() -> int:
    """The command."""
    options = arguments()
    settings = [
        Setting(ranks, window, nodes)
        for ranks in options.ranks
        for window in options.windows
        for nodes in options.nodes
        if ranks > 1 or nodes == "one"
    ]
    total = -(-options.count * len(KINDS) // KINDS.count("product"))
    share = -(-total // len(settings))
    numbers = range(options.first, options.stop if options.stop is not None else options.first + share)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
        print(draw(options.seed, settings[0].name, settings[0].ranks, options.only))
    deadline = time.monotonic() + 60 * options.minutes
    if options.shuffle:
        Random(options.seed).shuffle(settings)
    reports = {setting: Report(setting) for setting in settings}
    for first in range(numbers.start, numbers.stop, ROUND):
        for report in reports.values():
            if time.monotonic() < deadline:
                one(report, options.seed, range(first, min(first + ROUND, numbers.stop)), deadline)
    done = [report for report in reports.values() if report.seconds]
    print(table(done))
    if options.json:
        options.json.write_text(json.dumps([as_json(report, options.seed) for report in done], indent=1))
    return WRONG if any(report.faults for report in done) else 0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.trust", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="products, over all settings (default: %(default)s)")
    parser.add_argument("--seed", type=int, required=True, help="what everything is drawn from")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(1, 10)), help="default: 1 to 9")
    parser.add_argument("--windows", nargs="+", choices=WINDOWS, default=list(WINDOWS))
    parser.add_argument("--nodes", nargs="+", choices=list(NODES), default=list(NODES), help="pretended nodes (MPICH)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--only", type=int, metavar="N", help="this case alone, on the first setting")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="begin with this case")
    parser.add_argument("--to", dest="stop", type=int, metavar="M", help="end before this case")
    parser.add_argument("--shuffle", action="store_true", help="go through the settings in an order of the seed's own")
    parser.add_argument("--json", type=Path, help="write counts and faults to this file")
    return parser.parse_args()


def one(report: Report, seed: int, numbers: range, deadline: float) -> None:
    """Some cases of one setting; their faults are printed."""
    setting, known = report.setting, len(report.faults)
    run(setting, seed, numbers, deadline, report)
    for fault in report.faults[known:]:
        number = fault["number"]
        assert isinstance(number, int)
        print(f"\n{fault['outcome']}: {repeat(setting, seed)} --only {number}")
        print(f"or, after what came before it: --from {numbers.start} --to {number + 1}")
        print(f"  {draw(seed, setting.name, setting.ranks, number)}\n{fault['text']}", flush=True)
    print(row(report), file=sys.stderr, flush=True)


def repeat(setting: Setting, seed: int) -> str:
    """The command for one setting."""
    place = f"--ranks {setting.ranks} --windows {setting.window} --nodes {setting.nodes}"
    return f"python -m bench.trust --seed {seed} {place}"


def counts(report: Report) -> Counter[str]:
    """Of all kinds together."""
    return sum(report.counts.values(), Counter[str]())


def row(report: Report) -> str:
    """A line of the table."""
    found = counts(report)
    cells = "".join(f"{found[outcome]:>9}" for outcome in OUTCOMES)
    return f"{report.setting.name:<20}{cells}{report.seconds:>9.0f} s"


def table(reports: list[Report]) -> str:
    """What came out on each setting, and in all."""
    lines = [" " * 20 + "".join(f"{outcome:>9}" for outcome in OUTCOMES)] + [row(report) for report in reports]
    for kind in sorted(set(KINDS)):
        found = sum((report.counts[kind] for report in reports), Counter[str]())
        lines.append(f"{kind:<20}" + "".join(f"{found[outcome]:>9}" for outcome in OUTCOMES))
    refused = sum((report.refusals for report in reports), Counter[str]())
    return "\n".join([*lines, "", "refused most:", *(f"{n:>7}  {text}" for text, n in refused.most_common(8))])


def as_json(report: Report, seed: int) -> dict[str, object]:
    """All that is known of a setting."""
    found = {kind: dict(each) for kind, each in report.counts.items()}
    return {"setting": report.setting.name, "seed": seed, "seconds": report.seconds, "counts": found,
            "faults": report.faults, "refusals": dict(report.refusals)}


if __name__ == "__main__":
    sys.exit(main())

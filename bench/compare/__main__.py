"""`python -m bench.compare [COMMIT]`: is this checkout slower than an earlier one?

Both versions are installed into environments of their own, and some 25 small products, calls and commands are measured
in turn: this, that, that, this. That is done three times in new processes, on machines calibrated anew. A line tells
the ratio this / that, and the least and the largest median of the three times; below 1 is better. WORSE is what is more
than 5 % slower, or larger, and was so by 2 % at least each time: by more than figures scatter. Exits 1 then, 4 where
what was to be measured failed. COMMIT is the last tag where none is given, or else the last that `bench/history.jsonl`
knows. Hosts are namespaces of this machine, which root alone can make; else they are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import measure
from bench.compare import worker
from bench.compare.bars import bars_of
from bench.hosts import Cluster, obstacle
from bench.processes import ROOT, clean_environment, kill_marked, mpiexec_of

TIMES, PAIRS, APART, COMMANDS = 3, 7, 11, 6
"""Times that all is measured in new processes; pairs of samples each time, of those between hosts, of commands."""
WORSE, EACH = 1.05, 1.02
"""Limits that the ratio of a figure that got worse exceeds, and that its median exceeds each time."""
PATIENCE = 120.0
"""Seconds that a job may take to answer."""
FAILED = 4
SIDES = ("this", "that")
HISTORY = ROOT / "bench" / "history.jsonl"
MARKER = "BENCH_COMPARE_JOB"
IMPORTED = "import rma_mm; rma_mm.matmul, rma_mm.Mesh, rma_mm.plan_chain"
"""The program whose processor time is the import time."""

Samples = dict[str, list[list[tuple[float, float]]]]
"""Measurement → pairs of samples, this and that, for each time."""


class CompareError(Exception):
    """There is nothing to compare with, or no way to."""


class Side:
    """One version in an environment of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder / name
        self.python = str(self.folder / "env" / "bin" / "python")
        self.environment = clean_environment(("PYTHONPATH",)) | {
            "RMA_MM_CACHE": str(self.folder / "cache"), MARKER: str(self.folder), "PYTHONPATH": "",
        }

    def install(self, source: str) -> None:
        """Install what is in a folder, with an MPI library."""
        self.folder.mkdir(exist_ok=True)
        called(sys.executable, "-m", "venv", str(self.folder / "env"))
        called(self.python, "-m", "pip", "install", "--quiet", f"{source}[mpich]")

    def forget(self) -> None:
        """Let the machine be measured again."""
        shutil.rmtree(self.folder / "cache" / "machines", ignore_errors=True)

    def mpiexec(self, ranks: int) -> list[str]:
        """Return how so many ranks are started."""
        found = mpiexec_of(self.python)
        assert found is not None
        return [found, "-n", str(ranks)]


class Job:
    """Ranks of one side that measure what they are asked for."""

    def __init__(self, side: Side, setting: str, script: Path, cluster: Cluster | None) -> None:
        grid, _ = worker.SETTINGS[setting]
        self.side, self.number, ranks = side, 0, prod(grid)
        self.folder = Path(tempfile.mkdtemp(dir=side.folder))
        program = [side.python, str(script), setting, str(self.folder)]
        self.process: subprocess.Popen[Any]
        with (self.folder / "log").open("w") as log:
            if cluster is not None:
                self.process = cluster.start(ranks // cluster.count, program, side.environment, stdout=log, stderr=log)
            else:
                null = subprocess.DEVNULL
                line = [*side.mpiexec(ranks), *program]
                self.process = subprocess.Popen(line, env=side.environment, stdin=null, stdout=log, stderr=log)

    def ask(self, name: str) -> dict[str, Any]:
        """Return the answer. Raises CompareError where there is none."""
        worker.write(self.folder / f"ask-{self.number}", name)
        answer, begin = self.folder / f"answer-{self.number}", time.monotonic()
        while not answer.exists():
            time.sleep(0.01)
            if time.monotonic() - begin > PATIENCE or self.process.poll() is not None:
                said = (self.folder / "log").read_text()[-2000:]
                raise CompareError(f"{self.side.name}: no answer to {name!r}; its last words: {said}")
        self.number += 1
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def close(self) -> None:
        """End it."""
        worker.write(self.folder / f"ask-{self.number}", "end")
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and print the table; 1 where something got worse."""
    parser = measure.Parser(__doc__)
    parser.add_argument("commit", nargs="?", help="what to compare with (the last tag, or the last of the history)")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="measurements with this in their names")
    parser.add_argument("--times", type=int, default=TIMES, help=f"how often in new processes ({TIMES})")
    parser.add_argument("--record", action="store_true", help="add a line to bench/history.jsonl")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that every job is ended
    with tempfile.TemporaryDirectory(prefix="bench-compare-") as name:
        folder = Path(name)
        commit = commit_of(options.commit)
        sides = [Side(each, folder) for each in SIDES]
        try:
            installed(sides, commit, folder)
            wanted = [case for case in cases() if any(text in case for text in options.only)]
            if not wanted:
                parser.error(f"--only {options.only} leaves nothing: there are {', '.join(cases())}")
            samples, faults = measured(sides, wanted, options.times)
        finally:
            for side in sides:
                kill_marked(f"{MARKER}={side.folder}".encode())
    found = {case: summary(each) for case, each in samples.items()}
    lines = [f"this checkout ({head()}) against {commit}: ratios of seconds, or of bytes", "", *table(found), *faults]
    took = time.monotonic() - begin
    worse = [case for case, each in found.items() if is_worse(each)]
    lines += ["", f"WORSE: {'; '.join(worse)}" if worse else "nothing is worse", f"took {took:.0f} s"]
    facts = {"commit": head(), "against": commit, "ratios": found, "worse": worse, "faults": faults, "took": took}
    measure.publish(options.json, "compare", measure.machine(), lines, **facts)
    if options.record:
        kept = {case: round(each["ratio"], 3) for case, each in found.items()}
        line = {"date": time.strftime("%Y-%m-%d"), "commit": head(), "against": commit, "cpu": measure.cpu_name()}
        with HISTORY.open("a") as history:
            history.write(json.dumps({**line, "worse": worse, "ratios": kept}, ensure_ascii=False) + "\n")
    return 1 if worse else FAILED if faults else 0


def table(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each measurement, with the bars that it guards."""
    rows = [
        [case, f"{1e3 * x['this']:.3f}", f"{x['ratio']:.3f}", f"{x['low']:.3f} to {x['high']:.3f}",
         "WORSE" if is_worse(x) else ""]
        for case, x in found.items()
    ]
    lines = measure.table(["measured", "ms, MiB", "ratio", "medians", ""], rows)
    guarded = [(bar, case) for case in found for bar in bars_of(case)]
    bars = {bar: [case for each, case in guarded if each == bar] for bar, _ in guarded}
    return [*lines, "", "bars that these guard:", *(f"  {bar}: {'; '.join(cases)}" for bar, cases in bars.items())]


def is_worse(found: Mapping[str, float]) -> bool:
    """Return whether a measurement got worse by more than it scatters."""
    return found["ratio"] > WORSE and found["low"] > EACH


def summary(times: Sequence[Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Return the ratio of a measurement, what it scatters between, and the figure itself."""
    medians = [median(mine / other for mine, other in each) for each in times if each]
    pairs = [pair for each in times for pair in each]
    ratio = median(mine / other for mine, other in pairs)
    return {"ratio": ratio, "low": min(medians), "high": max(medians), "this": median(mine for mine, _ in pairs)}


# -- the two versions -----------------------------------------------------------------------------


def commit_of(given: str | None) -> str:
    """Return the short name of what is compared with. Raises CompareError."""
    found = given
    if found is None:
        tag = git("describe", "--tags", "--abbrev=0")
        lines = HISTORY.read_text().splitlines() if HISTORY.exists() else []
        known = [json.loads(line)["commit"] for line in reversed(lines)]
        found = tag or next((each for each in known if git("rev-parse", "--verify", f"{each}^{{commit}}")), "HEAD")
    name = git("rev-parse", "--short", "--verify", f"{found}^{{commit}}")
    if not name:
        raise CompareError(f"COMMIT: got {found!r}; it is a commit, a tag or a branch of this repository")
    return name


def git(*words: str) -> str:
    """Return what git says; nothing where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def head() -> str:
    """Return the short name of this checkout's commit, with a + where files differ from it."""
    return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))


def installed(sides: Sequence[Side], commit: str, folder: Path) -> None:
    """Install both. Raises CompareError."""
    source = folder / "source"
    source.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False)
    if archive.returncode:
        raise CompareError(archive.stderr.decode())
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
    for side, where in zip(sides, (ROOT, source), strict=True):
        side.install(str(where))


def called(*command: str) -> None:
    """Run a command. Raises CompareError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompareError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")


# -- measuring ------------------------------------------------------------------------------------


def cases() -> list[str]:
    """Return the names of all measurements."""
    found = [f"{setting}: {name}" for setting, (_, each) in worker.SETTINGS.items() for name in each]
    return [*found, *(f"{setting}: peak" for setting in worker.SETTINGS), *COMMANDED]


def measured(sides: Sequence[Side], wanted: Sequence[str], times: int) -> tuple[Samples, list[str]]:
    """Return pairs of samples of each measurement for each time, and what failed."""
    samples: Samples = defaultdict(list)
    faults: dict[str, None] = {}
    script = sides[0].folder.parent / "worker.py"
    shutil.copy(worker.__file__, script)  # beside which there is no rma_mm
    for at in range(times):
        for side in sides:
            side.forget()
        for setting, (_, named) in worker.SETTINGS.items():
            names = [name for name in named if f"{setting}: {name}" in wanted]
            if not names and f"{setting}: peak" not in wanted:
                continue
            names = names or list(named)  # whose memory is wanted
            if "hosts" in setting and (reason := obstacle()):
                faults[f"left out: {setting}: {reason}"] = None
                continue
            say(f"[{at + 1}/{times}] {setting}: {', '.join(names)}")
            with jobs(sides if at % 2 == 0 else sides[::-1], setting, script) as both:
                for name, found in asked(both, names, faults, setting):
                    if f"{setting}: {name}" in wanted:
                        samples[f"{setting}: {name}"].append(found)
        for name, command in COMMANDED.items():
            if name in wanted:
                say(f"[{at + 1}/{times}] {name}")
                runs = [partial(command, side) for side in sides]
                samples[name].append([in_turn(runs, turn + at) for turn in range(-1, COMMANDS)][1:])
    return samples, list(faults)


def asked(
    both: Sequence[Job], names: Sequence[str], faults: dict[str, None], setting: str
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield measurements with pairs of samples; at last the memory that was held, at its most, in 1000 MiB."""
    for name in names:
        answers = [job.ask(name) for job in both]
        wrong = {job.side.name: x["error"] for job, x in zip(both, answers, strict=True) if "error" in x}
        faults |= {f"{setting}: {name}: {side}: {error}": None for side, error in wrong.items()}
        if wrong:
            continue
        ask = [lambda job=job, name=name: float(job.ask(name)["seconds"]) for job in both]
        yield name, [in_turn(ask, turn) for turn in range(APART if "hosts" in setting else PAIRS)]
    if names:
        mine, other = (job.ask(names[0])["peak"] / 2**10 / 1e3 for job in both)
        yield "peak", [(mine, other)]


def in_turn(calls: Sequence[Callable[[], float]], turn: int) -> tuple[float, float]:
    """Return what both take, of which the one and then the other comes first."""
    if turn % 2:
        other = calls[1]()
        return calls[0](), other
    return calls[0](), calls[1]()


@contextmanager
def jobs(sides: Sequence[Side], setting: str, script: Path) -> Iterator[list[Job]]:
    """Run a job of each side, in the order of SIDES, whoever starts first; on hosts where the setting has some."""
    with ExitStack() as stack:
        rate = setting.partition(", ")[2]
        cluster = stack.enter_context(Cluster(2, rate)) if rate else None
        made = []
        for side in sides:
            made.append(Job(side, setting, script, cluster))
            stack.callback(made[-1].close)
        yield sorted(made, key=lambda job: SIDES.index(job.side.name))


def import_time(side: Side) -> float:
    """Return the processor's seconds of importing what most programs use."""
    process = subprocess.Popen([side.python, "-c", IMPORTED], env=side.environment, cwd=side.folder)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise CompareError(f"{side.name}: python -c {IMPORTED!r} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def run_files(side: Side) -> float:
    """Return the seconds of the command line from files to a file, on two ranks."""
    if not (side.folder / "A.npy").exists():
        for name in "AB":
            np.save(side.folder / f"{name}.npy", np.ones((1500, 1500), np.float32))
    line = [*side.mpiexec(2), side.python, "-m", "rma_mm.run", "A.npy", "B.npy", "-o", "C.npy"]
    line += ["--algorithm", "stationary_c", "--mesh", "2x1"]
    begin = time.perf_counter()
    done = subprocess.run(line, env=side.environment, cwd=side.folder, capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if done.returncode:
        raise CompareError(f"{side.name}: {' '.join(line)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return took


COMMANDED: dict[str, Callable[[Side], float]] = {"import": import_time, "files 1500²": run_files}
"""Measurements made by commands, each a process of its own."""


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CompareError as error:
        sys.exit(f"bench.compare: {error}")

"""Jobs of `bench.trust`: started, watched, ended after a death or a hang, and started again behind it."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.processes import clean_environment, kill_marked, mpiexec_of
from bench.trust.cases import KINDS, kind_of

MARKER = "BENCH_TRUST_JOB"
"""Environment variable that every process of a job inherits."""
CONTROLLED = ("RMA_MM_MACHINE", "RMA_MM_WINDOW", "MPIR_CVAR_NUM_CLIQUES", "MPIR_CVAR_NOLOCAL")
"""Variables that a setting decides."""
NODES = {
    "one": {},
    "two": {"MPIR_CVAR_NUM_CLIQUES": "2"},
    "three": {"MPIR_CVAR_NUM_CLIQUES": "3"},
    "each": {"MPIR_CVAR_NOLOCAL": "1"},
}
"""How many nodes are pretended, and by what; `each`: every rank is one."""
LIMIT = 60.0
"""Seconds that a case, or the start of a job, may take."""
JOBS_AT_MOST = 50
"""Jobs of one setting: where each dies, more would tell nothing new."""
SAYING = 1.0
"""Seconds that the ranks of a job that hangs have to say where."""
LOOK = 0.1
"""Seconds between two looks at whether a job goes on."""
HEAD, TAIL = 4000, 6000
"""Characters of what the ranks said of a death that are shown: from where it is named, and the last."""
DEATH = "Fatal Python error"
"""What Python says first of a signal that ends it."""


@dataclass(frozen=True)
class Setting:
    """On what cases run."""

    ranks: int
    window: str
    nodes: str

    @property
    def name(self) -> str:
        """As in what a case is drawn from."""
        return f"{self.ranks}-{self.window}-{self.nodes}"

    @property
    def environment(self) -> dict[str, str]:
        """What its jobs see."""
        shared = {"RMA_MM_MACHINE": "typical", "RMA_MM_WINDOW": self.window}  # `auto` chooses alike in each run
        return clean_environment(CONTROLLED) | shared | NODES[self.nodes]


@dataclass
class Report:
    """What became of the cases of one setting."""

    setting: Setting
    counts: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in sorted(set(KINDS))})
    """By kind: how many came out how."""
    faults: list[dict[str, object]] = field(default_factory=list)
    """What was neither right nor refused: number, kind, outcome, text."""
    refusals: Counter[str] = field(default_factory=Counter)
    """First words of what was refused, and how often."""
    seconds: float = 0.0

    def note(self, number: int, kind: str, outcome: str, text: str) -> None:
        """Count a case."""
        self.counts[kind][outcome] += 1
        if outcome == "refused":
            self.refusals[text[:60]] += 1
        elif outcome != "right":
            self.faults.append({"number": number, "kind": kind, "outcome": outcome, "text": text})


def run(setting: Setting, seed: int, numbers: range, deadline: float, report: Report) -> None:
    """Do all cases of a setting, in as many jobs as it takes; none is started after `JOBS_AT_MOST`."""
    first, since = numbers.start, time.monotonic()
    for _ in range(JOBS_AT_MOST):
        if first >= numbers.stop or time.monotonic() >= deadline:
            break
        first = _job(setting, seed, range(first, numbers.stop), deadline, report)
    report.seconds += time.monotonic() - since


def _job(setting: Setting, seed: int, numbers: range, deadline: float, report: Report) -> int:
    """One job: the number of the case to go on with."""
    mpiexec = mpiexec_of(sys.executable)
    if mpiexec is None:
        raise SystemExit(f"no mpiexec beside {sys.executable} nor on PATH: pip install '.[mpich]'")
    with tempfile.TemporaryDirectory(prefix="bench-trust-") as directory:
        journal, said = Path(directory) / "journal", Path(directory) / "said"
        journal.touch()
        marker = secrets.token_hex(8)
        command = [mpiexec, "-n", str(setting.ranks), sys.executable, "-X", "faulthandler", "-m", "bench.trust.worker"]
        command += [str(journal), str(seed), setting.name, str(numbers.start), str(numbers.stop)]
        with said.open("wb") as output:
            process = subprocess.Popen(
                command, env=setting.environment | {MARKER: marker, "TMPDIR": directory},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )
            how = _watched(process, journal, deadline)
            if how == "hung":
                _say(process)
            kill_marked(f"{MARKER}={marker}".encode())
            process.wait()
        lines = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
        tail = _ending(said.read_text(errors="replace"))
    done = [line for line in lines if "number" in line]
    for line in done:
        report.note(**line)
    following = numbers.start + len(done)
    if how == "late" or (how == "ended" and "ended" in (lines[-1] if lines else {}) and not process.returncode):
        return numbers.stop if how == "late" else following
    report.note(min(following, numbers.stop - 1), kind_of(following), "hung" if how == "hung" else "died", tail)
    return following + 1


def _say(mpiexec: subprocess.Popen[bytes]) -> None:
    """Have the ranks of a job that hangs print where they are, one after the other.

    Not before: faulthandler's own thread reads frames that the interpreter is changing, and dies of it (cpython
    #116008, #131580), so that a slow case would be a death.
    """
    mpiexec.send_signal(signal.SIGUSR1)  # to all ranks: MPICH's and Open MPI's pass it on
    time.sleep(SAYING)


def _ending(said: str) -> str:
    """What ranks said of their death, or last."""
    death = said.rfind(DEATH, 0, max(0, len(said) - TAIL))
    return said[-TAIL:] if death < 0 else f"{said[death : death + HEAD]}\n[…]\n{said[-TAIL:]}"


def _watched(process: subprocess.Popen[bytes], journal: Path, deadline: float) -> str:
    """Wait for a job: how it ended (ended, hung, late)."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(LOOK)
        now = time.monotonic()
        if journal.stat().st_size != size:
            size, since = journal.stat().st_size, now
        elif now - since > LIMIT:
            return "hung"
        if now > deadline:
            return "late"
    return "ended"

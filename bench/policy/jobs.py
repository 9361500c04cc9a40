"""One mpiexec job for each setting: started, watched, and certainly ended."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.hosts import Cluster, ClusterError
from bench.policy.cases import Case
from bench.processes import clean_environment, kill_marked, mpiexec_of
from rma_mm.kernels.threads import cores

MARKER = "BENCH_POLICY_JOB"
"""Environment variable that every process of a job inherits; mpiexec's ranks leave its process group."""
CONTROLLED = ("RMA_MM_WINDOW", "MPIR_CVAR_NUM_CLIQUES", "MPIR_CVAR_NOLOCAL")
"""Variables that a case decides."""
WORKER = "bench.policy.worker"
LOOK = 0.1
"""Seconds between two looks at whether a job goes on."""
PATIENCE = 5.0
"""Seconds for an mpiexec to end its ranks."""
CALIBRATION = 120.0
"""Seconds that a calibration may take, start and end of its ranks included."""


class JobError(Exception):
    """There is no way to start jobs here."""


class Job:
    """The cases of one setting on as many ranks. Raises JobError."""

    def __init__(self, cases: Sequence[Case], quick: bool, budget: float | None, worker: str = WORKER) -> None:
        mpiexec = mpiexec_of(sys.executable)
        if mpiexec is None:
            raise JobError(f"no mpiexec beside {sys.executable} nor on PATH: pip install '.[mpich]'")
        self.directory = tempfile.TemporaryDirectory(prefix="bench-policy-")
        given, self.file = (Path(self.directory.name) / name for name in ("cases.json", "results.jsonl"))
        given.write_text(json.dumps([asdict(case) for case in cases]))
        self.file.touch()
        self.marker = secrets.token_hex(8)
        environment = clean_environment(CONTROLLED) | {MARKER: self.marker}
        if cases[0].nodes > 1 and not cases[0].rate:
            environment["MPIR_CVAR_NUM_CLIQUES"] = str(cases[0].nodes)
        self.environment, self.mpiexec = environment, mpiexec
        self.rate, self.hosts = cases[0].rate, cases[0].nodes
        self.cluster: Cluster | None = None
        self.stack = ExitStack()
        self.ranks, self.cores = cases[0].ranks, [str((sorted(cores()) * 2)[n]) for n in cases[0].cores]
        self.worker = [worker, str(given), str(self.file)]
        self.worker += ["--quick"] * quick + (["--budget", str(budget)] if budget is not None else [])
        self.process: subprocess.Popen[Any] | None = None

    def __enter__(self) -> Job:
        if self.rate:
            self.environment["RMA_MM_CACHE"] = str(Path(self.directory.name) / "cache")
            try:
                self.cluster = self.stack.enter_context(Cluster(self.hosts, self.rate))
            except ClusterError as error:
                raise JobError(str(error)) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        kill_marked(f"{MARKER}={self.marker}".encode())
        if self.process is not None:
            self.process.wait()
        self.stack.close()
        self.directory.cleanup()

    def start(self, module: Sequence[str]) -> subprocess.Popen[Any]:
        """Run a module on all ranks."""
        program = [sys.executable, "-m", *module]
        if self.cluster is not None:
            self.process = self.cluster.start(self.ranks // self.hosts, program, self.environment, stdout=sys.stderr)
            return self.process
        self.process = subprocess.Popen(
            [self.mpiexec, *self.programs(program)],
            env=self.environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True,
        )
        return self.process

    def programs(self, program: Sequence[str]) -> list[str]:
        """What mpiexec is told to start: all ranks alike, or each pinned to its core."""
        if not self.cores:
            return ["-n", str(self.ranks), *program]
        pinned = [["-n", "1", "taskset", "-c", core, *program] for core in self.cores]
        return [word for rank in pinned for word in (":", *rank)][1:]

    def calibrate(self) -> str | None:
        """Measure what these ranks can do here: what went wrong, if anything did."""
        try:
            code = self.start(["rma_mm.calibrate"]).wait(CALIBRATION)
        except subprocess.TimeoutExpired:
            return f"it was not calibrated within {CALIBRATION:g} s"
        return f"its calibration ended with {code}" if code else None

    def work(self, limit: float) -> str | None:
        """Measure the cases until all are, or none is added for `limit` seconds: what went wrong, if anything did."""
        process = self.start(self.worker)
        size, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(LOOK)
            if self.file.stat().st_size != size:
                size, since = self.file.stat().st_size, time.monotonic()
            elif time.monotonic() - since > limit:
                return f"no case was finished within {limit:g} s"
        return f"it ended with {process.returncode}" if process.returncode else None

    def written(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The machine and the records that it wrote so far; the machine is empty before it has started."""
        lines = [json.loads(line) for line in self.file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return (lines[0]["machine"], lines[1:]) if lines else ({}, [])

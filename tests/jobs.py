"""A job of ranks that stays alive from test to test, and the pool that holds the one job in use.

Tests on fewer ranks than a job has run on its first ones; the others hear nothing of them and sleep.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.processes import DIRECTORY, PATIENCE, Limit, Mpiexec, job_environment

START_SECONDS = 120
"""Limit for starting a job or importing a test module: a loaded machine may compile bytecode for all ranks."""

VARIANT = "RMA_MM_TEST_VARIANT"
"""Environment variable: the name of the environment that a rank lives in."""

LOST_DAEMON = "A daemon failed to report back after being spawned"
"""What Open MPI's mpiexec says where its daemon on a (pretended) host died as it began: once in some hundred starts."""

TAIL_LINES = 40
"""Lines of the ranks' output shown with a failure."""


SIZES = {4: "few"}
"""Most ranks → name of the jobs that have no more, in the environments of most tests."""

SHARED = ("node", "cliques")
"""Those environments: several processes of pytest share their tests, each with jobs of one size."""


class Kind(NamedTuple):
    """What a job must be to serve a test."""

    ranks: int
    env: str

    @property
    def scope(self) -> str:
        """The tests that one job serves: those in the same environment, and of one size where these are many."""
        sizes = [name for most, name in SIZES.items() if self.ranks <= most]
        return f"{self.env} {[*sizes, 'many'][0]}" if self.env in SHARED else self.env


class JobError(Exception):
    """A job did not answer: it did not start, lost a rank, or ran out of time. It cannot be used again."""


class LauncherError(JobError):
    """mpiexec lost one of its own daemons before a rank had begun: nothing that is tested here had run."""


@dataclass
class Channel:
    """The connection to one rank."""

    rank: int
    pid: int
    socket: socket.socket
    unread: bytes = b""
    loaded: set[str] = field(default_factory=set)
    """Test modules that it has imported."""

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come in; None where the rank is gone."""
        try:
            chunk = self.socket.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        if not chunk:
            return None
        *lines, self.unread = (self.unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass
class Answers:
    """What the first `size` ranks have said to one request so far."""

    size: int
    verdicts: dict[int, dict[str, str]] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)

    def are_complete(self) -> bool:
        """All verdicts are in, and where none failed all ranks are ready again."""
        return len(self.verdicts) == self.size and (len(self.ready) == self.size or bool(self.failure()))

    def failure(self) -> str:
        """The failed ranks with their tracebacks, alike ones shown once; empty where none failed."""
        alike: dict[str, list[int]] = {}
        for rank, verdict in sorted(self.verdicts.items()):
            if verdict["verdict"] == "failed":
                alike.setdefault(verdict["text"], []).append(rank)
        parts = []
        for text, ranks in alike.items():
            parts.append(f"failed on {name_ranks(ranks)} of {self.size}:\n{text}")
            if shown := self.verdicts[ranks[0]]["locals"]:
                parts.append(f"  with, on rank {ranks[0]}:\n{shown}\n")
        return "\n".join(parts)


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 1`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


class Job:
    """`ranks` live ranks that run one test after the other."""

    def __init__(self, ranks: int, variables: Mapping[str, str], controlled: Sequence[str] = ()) -> None:
        self.ranks = ranks
        self.channels: list[Channel] = []
        self.selector = selectors.DefaultSelector()
        self.directory = Path(tempfile.mkdtemp(prefix="rma-mm-"))
        self.log = self.directory / "output"
        environment = job_environment(
            {"HYPOTHESIS_STORAGE_DIRECTORY": str(self.directory), **variables, DIRECTORY: str(self.directory)},
            controlled,
        )
        with socket.socket(socket.AF_UNIX) as listener, open(self.log, "wb") as log:
            listener.bind(str(self.directory / "socket"))
            listener.listen(ranks)
            listener.settimeout(0.1)
            self.mpiexec = Mpiexec(
                ranks, ["-m", "tests.worker"], environment, cwd=self.directory, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                self._meet(listener)
            except BaseException:
                self.kill()
                raise

    def _meet(self, listener: socket.socket) -> None:
        """Wait until every rank has connected."""
        limit = Limit(START_SECONDS)
        while len(self.channels) < self.ranks:
            if self.mpiexec.process.poll() is not None or limit.left <= 0:
                met = name_ranks([channel.rank for channel in self.channels]) if self.channels else "no rank"
                lost = not self.channels and LOST_DAEMON in self.tail()
                kind = LauncherError if lost else JobError
                raise kind(f"mpiexec -n {self.ranks} did not start: {met} came\n{self.tail()}")
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                self._welcome(connection)
        self.channels.sort(key=lambda channel: channel.rank)
        self.mpiexec.remember_segments()  # a rank that dies later can no longer be asked

    def _welcome(self, connection: socket.socket) -> None:
        """Read one rank's greeting."""
        channel = Channel(-1, -1, connection)
        self.channels.append(channel)
        connection.settimeout(PATIENCE * START_SECONDS)
        messages: list[dict[str, Any]] = []
        while not messages:
            received = channel.receive()
            if received is None:
                raise JobError(f"a rank left while it started\n{self.tail()}")
            messages = received
        channel.rank, channel.pid = messages[0]["rank"], messages[0]["pid"]
        if messages[0]["size"] != self.ranks:
            raise JobError(
                f"mpiexec -n {self.ranks} made jobs of {messages[0]['size']}: it belongs to another MPI than mpi4py's"
            )
        self.selector.register(connection, selectors.EVENT_READ, channel)

    def load(self, ranks: int, module: str) -> Answers:
        """Import `module` on the first ranks, where they have not yet, outside any test's time limit."""
        answers = self._ask(ranks, {"do": "load", "module": module}, START_SECONDS)
        for channel in self.channels[:ranks]:
            channel.loaded.add(module)
        return answers

    def has_loaded(self, ranks: int, module: str) -> bool:
        """Whether the first ranks have."""
        return all(module in channel.loaded for channel in self.channels[:ranks])

    def run(self, ranks: int, module: str, name: str, arguments: str, timeout: float) -> Answers:
        """Run one test on the first ranks; `arguments` is a pickled dict in base 64, `timeout` in seconds at rest."""
        request = {"do": "run", "module": module, "name": name, "arguments": arguments, "timeout": PATIENCE * timeout}
        return self._ask(ranks, {**request, "ranks": ranks}, timeout)

    def _ask(self, ranks: int, request: dict[str, Any], timeout: float) -> Answers:
        """Send `request` to the first ranks and wait until their answers are complete."""
        line = (json.dumps(request) + "\n").encode()
        for channel in self.channels[:ranks]:
            with suppress(ConnectionError):  # its end is noticed when reading
                channel.socket.sendall(line)
        answers = Answers(ranks)
        limit = Limit(timeout)
        while not answers.are_complete():
            if (left := limit.left) <= 0:
                raise JobError(self._explain_timeout(answers, limit))
            self._listen(answers, min(1.0, left))
        return answers

    def _listen(self, answers: Answers, seconds: float) -> None:
        """Take in what the ranks say within `seconds`."""
        for key, _ in self.selector.select(seconds):
            channel: Channel = key.data
            messages = channel.receive()
            if messages is None:
                raise JobError(self._explain_loss(answers, channel.rank))
            for message in messages:
                if "verdict" in message:
                    answers.verdicts[channel.rank] = message
                if "ready" in message:
                    answers.ready.add(channel.rank)

    def _explain_loss(self, answers: Answers, rank: int) -> str:
        """The failure text where a rank died."""
        code = self.mpiexec.wait(3)
        return f"rank {rank} of {answers.size} died (exit code of mpiexec: {code})\n{answers.failure()}{self.tail()}"

    def _explain_timeout(self, answers: Answers, limit: Limit) -> str:
        """The failure text where time ran out: who hangs, where, and who had failed before."""
        asked = self.channels[: answers.size]
        late = [channel for channel in asked if channel.rank not in answers.verdicts]
        late = late or [channel for channel in asked if channel.rank not in answers.ready]
        for channel in late:
            with suppress(ProcessLookupError):
                os.kill(channel.pid, signal.SIGUSR1)
        time.sleep(0.3)
        parts = [f"timed out after {limit.seconds:g} s on {name_ranks([c.rank for c in late])} of {answers.size}"]
        parts += [f"(stretched {limit.stretch:.1f} times, as the machine is busy)"] * (limit.stretch > 1)
        parts.append(answers.failure())
        for channel in late:
            stack = (self.directory / f"stacks.{channel.rank}").read_text()
            parts.append(f"stack of rank {channel.rank} (innermost first):\n{_brief_stack(stack)}")
        return "\n".join(parts) + self.tail()

    def tail(self) -> str:
        """The last lines that the ranks and mpiexec wrote."""
        files = sorted(self.directory.glob(f"{self.log.name}*"))
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines()[-TAIL_LINES:]]
        return "\n".join(["", "last output of the job:", *lines]) if lines else ""

    def close(self) -> None:
        """Let the ranks leave through MPI_Finalize.

        Raises JobError where they do not within 20 seconds, or with another exit code than 0.
        """
        for channel in self.channels:
            with suppress(ConnectionError):
                channel.socket.sendall(b'{"do": "leave"}\n')
        code = self.mpiexec.wait(20)
        trouble = None if code == 0 else f"the ranks did not leave cleanly (exit code {code}){self.tail()}"
        self.kill()
        if trouble:
            raise JobError(trouble)

    def kill(self) -> None:
        """End all processes of the job and remove its files. May be called again."""
        self.mpiexec.kill()
        for channel in self.channels:
            channel.socket.close()
        self.channels = []
        self.selector.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _brief_stack(stack: str) -> str:
    """The main thread's frames, without the interpreter's own at the outer end."""
    main = stack.rpartition("Current thread")[2].partition("\n\n")[0]
    frames = [line for line in main.splitlines()[1:] if line.startswith("  File") and "<frozen" not in line]
    return "\n".join(frames[:20])


class Pool:
    """The job in use: at most one at a time, replaced when a test wants another environment or more ranks."""

    def __init__(self, variants: Mapping[str, Mapping[str, str]]) -> None:
        self.variants = variants
        self.controlled = sorted({name for variables in variants.values() for name in variables})
        self.most: dict[str, int] = {}
        """Scope → ranks of its jobs, where that is known to be more than a test wants."""
        self.env = ""
        self.job: Job | None = None

    def run(self, kind: Kind, module: str, name: str, arguments: str, timeout: float) -> None:
        """Run one test on the first ranks of a job.

        Fails or skips the calling test with the ranks' words; after a failure the next test gets a fresh job.
        """
        try:
            answers = self._run(kind, module, name, arguments, timeout)
        except BaseException as error:
            self.kill()
            if isinstance(error, JobError):
                pytest.fail(str(error), pytrace=False)
            raise
        failure = answers.failure()
        skipped = [verdict["text"] for verdict in answers.verdicts.values() if verdict["verdict"] == "skipped"]
        if skipped and len(skipped) < kind.ranks and not failure:
            failure = f"{len(skipped)} of {kind.ranks} ranks skipped, the others ran: {skipped[0]}"
        if failure:
            text = failure + (self.job.tail() if self.job else "")
            self.kill()
            pytest.fail(text, pytrace=False)
        if skipped:
            pytest.skip(skipped[0])

    def _run(self, kind: Kind, module: str, name: str, arguments: str, timeout: float) -> Answers:
        """The ranks' answers; where the module cannot be imported, those to the import."""
        job = self._job(kind)
        if not job.has_loaded(kind.ranks, module):
            answers = job.load(kind.ranks, module)
            if any(verdict["verdict"] != "passed" for verdict in answers.verdicts.values()):
                return answers
        return job.run(kind.ranks, module, name, arguments, timeout)

    def _job(self, kind: Kind) -> Job:
        """The live job of the environment, with that many ranks or more."""
        if self.job is None or self.env != kind.env or self.job.ranks < kind.ranks:
            self.close()
            ranks = max(kind.ranks, self.most.get(kind.scope, 0))
            self.job = self._start(ranks, {**self.variants[kind.env], VARIANT: kind.env})
            self.env = kind.env
        return self.job

    def _start(self, ranks: int, variables: Mapping[str, str]) -> Job:
        """A new job; once more where the launcher lost its own daemon."""
        try:
            return Job(ranks, variables, self.controlled)
        except LauncherError as error:
            print(f"{error}\nstarted once more", file=sys.stderr)
            return Job(ranks, variables, self.controlled)

    def close(self) -> None:
        """End the job in use, if there is one; raises JobError where it does not end well."""
        job, self.job = self.job, None
        if job:
            job.close()

    def kill(self) -> None:
        """End the job in use at once."""
        job, self.job = self.job, None
        if job:
            job.kill()

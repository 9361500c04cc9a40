"""Jobs that stay alive between products: started, asked, and certainly ended."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from bench.peers.cases import Case
from bench.peers.registry import Peer
from bench.peers.systems import Task
from bench.peers.worker import ADDRESS, DIRECTORY, KEY, RANK, START, address_of
from bench.processes import clean_environment, kill_marked, mpiexec_of

MARKER = "BENCH_PEERS_JOB"
"""Environment variable that every process of a job inherits; mpiexec's ranks leave its process group."""
PATIENCE = 3.0
"""Seconds for a job to end by itself."""
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NPROC")
"""NPROC is XLA's."""
MEETING_PLACE = {"GLOO_SOCKET_IFNAME": "lo"}
"""Where gloo's processes meet, unless the caller's environment says so."""


class JobError(Exception):
    """A job that could not be started, failed, or did not answer."""


@dataclass(frozen=True)
class Launcher:
    """How jobs are started."""

    prefix: str = "{mpiexec}"
    """Command before `-n RANKS python …`; {mpiexec} stands for the one beside the peer's Python."""
    listen: str | None = None
    """Path or HOST:PORT where ranks find the coordinator; a path in a private directory when None."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Peer → its interpreter, where it is not this one."""
    threads: int | None = None
    """BLAS threads of a rank; its share of this machine's cores when None."""
    limit: float = 120
    """Seconds that preparing, or one order, may take."""

    def python(self, peer: Peer) -> str:
        """The interpreter of a peer."""
        return self.pythons.get(peer.name, sys.executable)

    def command(self, peer: Peer, ranks: int) -> list[str]:
        """The command that starts a peer's job, or one of its processes."""
        python = self.python(peer)
        worker = [python, "-m", peer.program]
        if peer.start != "mpi":
            return worker
        mpiexec = mpiexec_of(python)
        if mpiexec is None:
            raise JobError(f"no mpiexec beside {python} nor on PATH: pip install '.[mpich]'")
        return [*shlex.split(self.prefix.replace("{mpiexec}", shlex.quote(mpiexec))), "-n", str(ranks), *worker]


class Job:
    """The processes of one peer for one case."""

    def __init__(self, peer: Peer, case: Case, ranks: int, launcher: Launcher) -> None:
        self.peer, self.limit = peer, launcher.limit
        self.directory = tempfile.TemporaryDirectory(prefix="bench-peers-")
        self.log = (Path(self.directory.name) / "log").open("a+b")  # each writes at its end, whoever reads
        self.marker = secrets.token_hex(8)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        try:
            self.start(case, ranks, launcher)
        except BaseException:
            self.end()
            raise

    def start(self, case: Case, ranks: int, launcher: Launcher) -> None:
        """Start the processes, meet them, and let them prepare their operands."""
        cores = len(os.sched_getaffinity(0))
        share = launcher.threads or max(1, cores // ranks)
        threads = cores if self.peer.threads == "all" else share
        address = launcher.listen or str(Path(self.directory.name) / "socket")
        key = secrets.token_bytes(16)
        mine = {
            ADDRESS: address,
            KEY: key.hex(),
            START: self.peer.start,
            MARKER: self.marker,
            "PYTHONWARNINGS": "ignore",
            "TMPDIR": self.directory.name,
            DIRECTORY: self.directory.name,
        }
        environment = MEETING_PLACE | clean_environment() | mine | dict.fromkeys(THREADS, str(threads))
        count = 1 if self.peer.start == "one" else ranks
        with Listener(address_of(address), backlog=count, authkey=key) as listener:
            command = launcher.command(self.peer, ranks)
            for rank in range(count if self.peer.start == "processes" else 1):
                self.processes.append(self.launched(command, environment | {RANK: str(rank)}))
            self.meet(listener, count)
        task = Task(case, ranks, 0, threads, self.directory.name, free_port())
        self.facts = self.ask(self.peer.target, task)[0]["facts"]

    def launched(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A process in a session of its own, what it prints in the log."""
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def meet(self, listener: Listener, count: int) -> None:
        """Accept `count` connections, and bring them into the order of the ranks."""
        inner: socket.socket = listener._listener._socket  # type: ignore[attr-defined]
        inner.settimeout(0.2)  # the public class has no limit, and a process may die before it connects
        deadline = time.monotonic() + self.limit
        while len(self.connections) < count:
            self.require_alive()
            if time.monotonic() > deadline:
                raise JobError(f"only {len(self.connections)} of {count} processes answered in {self.limit:g} s")
            with suppress(TimeoutError, AuthenticationError, EOFError, ConnectionError):
                self.connections.append(listener.accept())
        ranks = self.answers()
        if sorted(ranks) != list(range(count)):
            raise JobError(f"ranks {sorted(ranks)} answered, not 0 to {count - 1}: wrong mpiexec?")
        self.connections = [self.connections[ranks.index(rank)] for rank in range(count)]

    def ask(self, *order: Any) -> list[Any]:
        """Every process's answer to an order. Raises JobError."""
        for connection in self.connections:
            with suppress(OSError):  # the answer, or its absence, tells more
                connection.send(order)
        return self.answers()

    def answers(self) -> list[Any]:
        """One message of every process."""
        deadline = time.monotonic() + self.limit
        found: dict[Any, Any] = {}
        while len(found) < len(self.connections):
            waiting = [connection for connection in self.connections if connection not in found]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise JobError(f"no answer within {self.limit:g} s")
            for connection in ready:
                found[connection] = self.received(connection)
        return [found[connection] for connection in self.connections]

    def received(self, connection: Any) -> Any:
        """A message, unless it tells of an error."""
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            raise JobError(f"a process ended unexpectedly; {self.last_words()}") from None
        if isinstance(answer, dict) and "error" in answer:
            raise JobError(answer["error"])
        return answer

    def require_alive(self) -> None:
        """Raises JobError when a process that was started has ended."""
        for process in self.processes:
            if process.poll() is not None:
                raise JobError(f"ended with {process.returncode} before it answered; {self.last_words()}")

    def last_words(self) -> str:
        """The last line that tells something of what the processes printed."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        told = [line.strip() for line in lines if any(map(str.isalpha, line))]
        errors = [line for line in told if "Error" in line]
        return f"it printed: {(errors or told or ['nothing'])[-1]}"

    def end(self) -> None:
        """End every process of the job: asked to, then told to, then killed."""
        for connection in self.connections:
            with suppress(OSError):
                connection.send(("end",))
        give_up = time.monotonic() + (PATIENCE if self.connections else 0)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up - time.monotonic()))
        for connection in self.connections:
            connection.close()
        self.kill()
        self.log.close()
        self.directory.cleanup()

    def kill(self) -> None:
        """End what still runs, ranks that left mpiexec's process group included."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # mpiexec then ends its ranks, on other hosts too
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
        kill_marked(f"{MARKER}={self.marker}".encode())
        for process in self.processes:
            process.wait()


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Linux namespaces that end with the process that made them, and that nobody else sees by name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
"""Programs of util-linux, iproute2 and hostname that a cluster is made with."""

FILES = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt", "pid": "pid_for_children"}
"""Options of nsenter, and where /proc/PID/ns has the namespace."""

PURPOSE = "several hosts on one machine"

TRIAL = """
ip link add switch type bridge
ip link add trial1 type veth peer name trial2
tc qdisc add dev trial1 root tbf rate 1gbit burst 256kb latency 20ms
"""
"""What must work in a namespace of one's own."""

KILL_SECONDS = 5.0
"""How long killed processes may take to be gone."""


class ClusterError(Exception):
    """There can be no cluster on this machine, or it could not be made as asked."""


def obstacle() -> str | None:
    """Why no cluster can be made here: one sentence, or None where it can."""
    if os.geteuid() != 0:
        return f"{PURPOSE} need root (CAP_NET_ADMIN and CAP_SYS_ADMIN), to make network namespaces and links"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{PURPOSE} need {', '.join(missing)} (packages util-linux, iproute2, mount, hostname)"
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--uts", "--net", "sh", "-ec", TRIAL]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        return f"{PURPOSE} need namespaces, bridges and limited links (CAP_NET_ADMIN), not to be had here: {reason}"
    return None


class Holder:
    """A process that keeps namespaces alive, and the way into them."""

    def __init__(self, words: Sequence[str], kinds: Sequence[str]) -> None:
        """Start `words`, which makes namespaces of `kinds`, says a line and waits."""
        self.kinds = kinds
        pipe = subprocess.PIPE
        # a session of its own: Ctrl-C is for us to handle
        self.process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1, start_new_session=True
        )

    def expect(self) -> str:
        """The line that the process says. Raises ClusterError with its complaint where there is none."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line.strip()
        _, complaint = self.process.communicate()
        raise ClusterError(f"the namespaces could not be made: {complaint.strip()}")

    def inside(self, kinds: Sequence[str] | None = None) -> list[str]:
        """What to write before a command that is to run in these namespaces, in `kinds` of them."""
        directory = f"/proc/{self.process.pid}/ns"
        return ["nsenter", *(f"--{kind}={directory}/{FILES[kind]}" for kind in kinds or self.kinds), "--"]

    def network(self, tool: str, commands: str) -> None:
        """Let `ip` or `tc` do `commands`, one a line, in the network namespace. Raises ClusterError."""
        words = [*self.inside(["net"]), tool, "-batch", "-"]
        done = subprocess.run(words, input=commands, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{tool} could not do {commands!r}: {done.stderr.strip()}")

    def processes(self) -> list[int]:
        """Ids of the processes in the network namespace, the holder's own excepted."""
        own = os.readlink(f"/proc/{self.process.pid}/ns/net")
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if os.readlink(directory / "ns/net") == own:
                    found.append(int(directory.name))
        return [process for process in found if not self._is_own(process)]

    def _is_own(self, process: int) -> bool:
        return process == self.process.pid or parent_of(process) == self.process.pid

    def close(self) -> None:
        """End the holder; its namespaces go when nothing else lives in them."""
        self.process.kill()
        self.process.communicate()


class Keeper(Holder):
    """The first process of a process namespace, and a network namespace for the switch.

    It ends with this process, whatever ends this one, since then its input ends. With it the kernel ends all
    processes in it, and with them go the namespaces that only they live in, their links and their mounts.
    """

    def __init__(self) -> None:
        words = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net", "cat"]
        super().__init__(words, ("pid", "mount", "net"))
        assert self.process.stdin is not None
        self.process.stdin.write("here\n")  # cat says it again as soon as it lives
        self.expect()

    def close(self) -> None:
        """End all processes in it, by the end of its input as when this process had died."""
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=KILL_SECONDS)
        super().close()


class Host(Holder):
    """A host: networks, name, shared memory and file table of its own, in the keeper's process namespace."""

    SETUP = """
    hostname "$1"
    mount -t tmpfs -o "size=$2" tmpfs /dev/shm
    printf '127.0.0.1 localhost\n%s' "$3" > /dev/shm/hosts
    mount --bind /dev/shm/hosts /etc/hosts
    rm /dev/shm/hosts
    echo $$
    exec sleep infinity
    """

    def __init__(self, keeper: Keeper, name: str, address: str, shm: str, names: str) -> None:
        self.name, self.address = name, address
        shell = ["sh", "-ec", self.SETUP, "sh", name, shm, names]
        # nsenter does not fork here: unshare stays outside of the process namespace, where its id is known to us
        within = [*keeper.inside(["pid", "mount"])[:-1], "--no-fork", "--"]
        unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--fork", "--kill-child"]
        super().__init__([*within, *unshare, *shell], ("pid", "mount", "net", "uts", "ipc"))
        self.inner = int(self.expect())
        """Id of a process of this host as processes of the cluster see it."""

    def kill(self) -> None:
        """Kill every process on the host at once; the host itself stays."""
        limit = time.monotonic() + KILL_SECONDS
        while processes := self.processes():
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if time.monotonic() > limit:
                raise ClusterError(f"{self.name}: processes {processes} cannot be killed")
            time.sleep(0.01)


def parent_of(process: int) -> int:
    """Id of the process that started `process`; 0 where it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0

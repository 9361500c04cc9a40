"""Several hosts on one machine: a switch, hosts at it by links of a limited rate, and mpiexec across them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from bench.hosts.namespaces import ClusterError, Host, Keeper, obstacle, parent_of
from bench.processes import mpiexec_of

NETWORK = "10.77.0"
"""First bytes of the hosts' addresses, which nothing outside of the cluster sees."""

INTERFACE = "eth0"
"""A host's end of its link."""

BURST, LATENCY = "512kb", "20ms"
"""Of the limiters: what may leave at once (segments of 64 KiB pass whole), and how long anything waits at most."""

GRACE = 3.0
"""Seconds that interrupted ranks have for leaving by themselves."""

ENTER = Path(__file__).with_name("enter.sh")

NETWORK_VARIABLES = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": INTERFACE}
"""What makes MPICH use TCP between hosts, over the links."""


class Cluster:
    """`hosts` hosts named h1, h2, … at one switch, each link limited to `rate` in each direction (as tc writes it).

    A context: hosts come up on entry, and everything is gone on exit, or when this process ends in any other way.
    Raises ClusterError on entry where that is not possible.
    """

    def __init__(self, hosts: int = 2, rate: str = "5gbit", shm: str = "4g") -> None:
        """shm: size of each host's /dev/shm, as mount writes it."""
        self.count, self.rate, self.shm = hosts, rate, shm
        self.hosts: list[Host] = []

    def __enter__(self) -> Cluster:
        if reason := obstacle():
            raise ClusterError(reason)
        self.keeper = Keeper()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.keeper.close()  # first: what it ends is reaped by the hosts' holders
        for host in self.hosts:
            host.close()
        self.hosts.clear()

    def _build(self) -> None:
        """Set up the switch, then the hosts."""
        self.keeper.network("ip", "link add switch type bridge\nlink set switch up\n")
        identities = [(f"h{number}", f"{NETWORK}.{number}") for number in range(1, self.count + 1)]
        names = "".join(f"{address} {name}\n" for name, address in identities)
        for number, (name, address) in enumerate(identities, 1):
            self.hosts.append(Host(self.keeper, name, address, self.shm, names))
            self._connect(number, self.hosts[-1])

    def _connect(self, number: int, host: Host) -> None:
        """Join the host to the switch by a link of the rate."""
        port = _port(number)
        self.keeper.network(
            "ip",
            f"link add {port} type veth peer name {INTERFACE} address {_station(number)} netns {host.process.pid}\n"
            f"link set {port} master switch\nlink set {port} up\n",
        )
        host.network("ip", f"link set lo up\naddr add {host.address}/24 dev {INTERFACE}\nlink set {INTERFACE} up\n")
        # asked for, they would be found missing while a cable is out, and "no route" told for a while after
        others = [other for other in range(1, self.count + 1) if other != number]
        known = "neigh add {}.{} lladdr {} dev {} nud permanent\n"
        host.network("ip", "".join(known.format(NETWORK, q, _station(q), INTERFACE) for q in others))
        for holder, device in ((self.keeper, port), (host, INTERFACE)):
            limit = f"qdisc add dev {device} root tbf rate {self.rate} burst {BURST} latency {LATENCY}\n"
            holder.network("tc", limit)

    # -- jobs -------------------------------------------------------------------------------------

    def start(
        self,
        ranks_per_host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
    ) -> subprocess.Popen[str]:
        """mpiexec on the first host, with `ranks_per_host` ranks of `command` on each; the caller waits for it.

        env: added to this process's. threads: of each rank; an equal share of this machine's cores when not given.
        """
        ranks = ranks_per_host * len(self.hosts)
        share = threads or max(1, len(os.sched_getaffinity(0)) // ranks)
        addresses = ",".join(host.address for host in self.hosts)
        mpiexec = [mpich_mpiexec(), "-launcher", "ssh", "-launcher-exec", str(ENTER), "-hosts", addresses]
        variables = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            **NETWORK_VARIABLES,
            "OMP_NUM_THREADS": str(share),
            "OPENBLAS_NUM_THREADS": str(share),
            "RMA_MM_HOSTS": " ".join(f"{host.address}={host.inner}" for host in self.hosts),
            **(env or {}),
        }
        line = [*mpiexec, "-ppn", str(ranks_per_host), "-n", str(ranks), *command]
        return self.process(1, line, env=variables, stdout=stdout, stderr=stderr)

    def run(
        self,
        ranks_per_host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`start`, wait, and what came out.

        Raises subprocess.TimeoutExpired after `timeout` seconds, all processes on all hosts having been killed.
        """
        pipe = subprocess.PIPE
        job = self.start(ranks_per_host, command, env, threads, stdout=pipe, stderr=pipe)
        try:
            out, err = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            self.kill_all()
            out, err = job.communicate()
            raise subprocess.TimeoutExpired(list(command), error.timeout, out, err) from None
        return subprocess.CompletedProcess(list(command), job.returncode, out, err)

    def interrupt(self, job: subprocess.Popen[str], number: int = signal.SIGINT) -> None:
        """Pass a signal on to a job of `start`, whose mpiexec passes it on to the ranks, and wait until it has ended.

        Ranks that do not leave within `GRACE` seconds are killed.
        """
        for process in self.host(1).processes():
            if parent_of(process) == job.pid:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
        with suppress(subprocess.TimeoutExpired):
            job.wait(GRACE)
        self.kill_all()
        job.wait()

    def process(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
    ) -> subprocess.Popen[str]:
        """`command` on one host, in this process's directory. env: all of it; this process's when not given."""
        words = [*self.host(host).inside(), "env", f"--chdir={Path.cwd()}", *command]
        null = subprocess.DEVNULL
        return subprocess.Popen(
            words, env=env, stdin=null, stdout=stdout, stderr=stderr, text=True, start_new_session=True
        )

    def host(self, number: int) -> Host:
        """The host named h`number`."""
        return self.hosts[number - 1]

    # -- links and accidents ----------------------------------------------------------------------

    def cut(self, host: int) -> None:
        """Pull h`host`'s cable: what it sends and what is sent to it is lost, without a word to either side."""
        self.keeper.network("ip", f"link set {_port(host)} down\n")

    def mend(self, host: int) -> None:
        """Put the cable back."""
        self.keeper.network("ip", f"link set {_port(host)} up\n")

    def kill(self, host: int) -> None:
        """Kill every process on h`host`. Its system lives on and resets the connections that they had."""
        self.host(host).kill()

    def kill_all(self) -> None:
        """Kill every process on every host."""
        for host in self.hosts:
            host.kill()


def mpich_mpiexec() -> str:
    """MPICH's mpiexec beside this interpreter, or on PATH. Raises ClusterError where there is none."""
    found = mpiexec_of(sys.executable)
    if found is None:
        raise ClusterError(f"no mpiexec beside {sys.executable} nor on PATH: install one with pip install '.[mpich]'")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "HYDRA" not in version:
        raise ClusterError(f"{found} is not MPICH's, which alone starts ranks on these hosts: pip install '.[mpich]'")
    return found


def _port(number: int) -> str:
    """The switch's end of a host's link."""
    return f"port{number}"


def _station(number: int) -> str:
    """The hardware address of a host."""
    return f"02:00:00:00:00:{number:02x}"

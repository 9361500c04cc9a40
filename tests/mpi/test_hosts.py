"""Several hosts on one machine: right products, words as the links carry them, accidents, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.hosts import Cluster, ClusterError, obstacle
from bench.hosts.link import link_rate
from bench.hosts.namespaces import parent_of
from bench.processes import marked
from tests.mpi.test_command_line import is_rank
from tests.mpi.test_standstill import rank_of
from tests.processes import MARKER, ROOT, is_open_mpi, job_environment
from tests.thorough import nightly, thorough, usually

reason = "only MPICH's mpiexec starts ranks on these hosts" if is_open_mpi() else obstacle()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

SHAPE = "768,640,512"
"""Large enough that a product's words outweigh what surrounds them."""

ALGORITHMS = ("stationary_c", "summa_c", "cannon", "auto")


@pytest.fixture(scope="module", name="cluster")
def two_hosts():
    with Cluster(hosts=2, rate="5gbit") as cluster:
        yield cluster


def variables(**more):
    return {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **more}


def run_python(cluster, ranks_per_host, *arguments):
    """What a Python job wrote."""
    done = cluster.run(ranks_per_host, [sys.executable, *arguments], env=variables(), timeout=40)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- the cluster ----------------------------------------------------------------------------------

NODES = """
from mpi4py import MPI
import json, os, socket
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
mine = [socket.gethostname(), node.size, world.bcast(os.listdir("/dev/shm")), os.listdir("/dev/shm"),
        [socket.gethostbyname(name) for name in ("h1", "h2")], os.environ["OPENBLAS_NUM_THREADS"]]
found = world.gather(mine)
if found: print(json.dumps(found))
"""


def test_each_host_is_a_node(cluster):
    """Its own name and shared memory; names resolve; ranks share this machine's cores."""
    found = json.loads(run_python(cluster, 2, "-c", NODES))
    assert [name for name, *_ in found] == ["h1", "h1", "h2", "h2"]
    assert [size for _, size, *_ in found] == [2] * 4
    first, last = found[0], found[-1]
    assert first[2] == first[3]
    assert not set(first[3]) & set(last[3])
    assert first[4] == [host.address for host in cluster.hosts]
    assert {int(threads) for *_, threads in found} == {max(1, len(os.sched_getaffinity(0)) // 4)}


@thorough
def test_rate_is_limited():
    with Cluster(hosts=2, rate="200mbit") as cluster:
        for source, sink in ((1, 2), (2, 1)):
            assert 15e6 < link_rate(cluster, source, sink) < 26e6


def command(*arguments, prefix=(), timeout=60):
    """`python -m bench.hosts` with arguments, ended."""
    words = [*prefix, sys.executable, "-m", "bench.hosts", *arguments]
    pipes = {"capture_output": True, "text": True}
    return subprocess.run(words, cwd=ROOT, env=job_environment({}), timeout=timeout, check=False, **pipes)


@pytest.mark.parametrize("arguments", [["--rate", "5foo", "--", "true"], ["--hosts", "0", "--", "true"], []])
def test_bad_arguments(arguments):
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_exit_code():
    """The job's own; hosts and ranks as asked for. mpiexec may die of SIGPIPE where ranks end before all have begun."""
    assert command("--hosts", "3", "--ranks", "2", "--", "sh", "-c", "sleep 0.5; exit 3").returncode == 3


def test_no_root():
    """One message and exit code 2."""
    done = command("--", "true", prefix=("unshare", "--user"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "need root" in done.stderr


# -- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks_per_host", usually(1, [2, 1]))
@pytest.mark.parametrize("algorithm", usually(1, ALGORITHMS, rest=nightly))
def test_product(cluster, algorithm, ranks_per_host):
    """Right, and the words between nodes as the links carried them during one product."""
    words = ("-m", "bench.hosts.rounds", "--shape", SHAPE, "--algorithm", algorithm, "--repeat", "1")
    report = json.loads(run_python(cluster, ranks_per_host, *words))
    assert report["right"] is True
    assert report["nodes"] == 2
    counted = report["words_inter"] * 4
    assert counted > 0
    assert sum(report["sent_by_hosts_bytes"]) == pytest.approx(counted, rel=0.1)


@thorough
def test_command(cluster):
    """Ranks and nodes as they are, and the product verified."""
    report = json.loads(run_python(cluster, 2, "-m", "rma_mm.run", "--shape", SHAPE, "--verify", "--json", "-"))
    assert report["verified"] is True
    assert (report["nodes"], report["ranks"]) == (2, 4)


# -- accidents ------------------------------------------------------------------------------------

ECHO = """
import socket
server = socket.create_server(("", 5002))
print("ready", flush=True)
stream, _ = server.accept()
while word := stream.recv(1): stream.sendall(word)
"""

TALK = """
import socket, time
stream = socket.create_connection(("h2", 5002))
while True:
    stream.sendall(b"x")
    stream.recv(1)
    print("heard", flush=True)
    time.sleep(0.01)
"""


@thorough
def test_a_cut_link_is_silent_until_mended(cluster, tmp_path):
    """Neither side is told, and TCP carries on where it stopped."""
    server = cluster.process(2, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    assert server.stdout.readline() == "ready\n"
    heard = tmp_path / "heard"
    with open(heard, "w") as output:
        client = cluster.process(1, [sys.executable, "-c", TALK], stdout=output)
    wait_for(heard.read_text)
    cluster.cut(2)
    time.sleep(0.1)
    until_now = heard.read_text()
    time.sleep(1)
    assert heard.read_text() == until_now
    assert client.poll() is None
    cluster.mend(2)
    wait_for(lambda: len(heard.read_text()) > len(until_now))
    cluster.kill_all()
    assert client.wait(5) == -signal.SIGKILL
    with server:
        assert server.wait(5) is not None


def test_killed_host(cluster):
    """Its ranks are gone at once, and mpiexec says so by its exit code."""
    job = cluster.start(1, [sys.executable, "-c", NODES + "import time; time.sleep(60)"], env=variables())
    wait_for(lambda: len(cluster.host(2).processes()) >= 2)
    cluster.kill(2)
    assert cluster.host(2).processes() == []
    assert job.wait(10) != 0
    assert json.loads(run_python(cluster, 1, "-c", NODES))[1][0] == "h2"  # and the host can be used again


@thorough
def test_time_limit(cluster):
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(1, [sys.executable, "-c", "import time; time.sleep(60)"], timeout=1)
    assert all(host.processes() == [] for host in cluster.hosts)


@thorough
@pytest.mark.parametrize("stopped", usually(1, [2, None, 3], rest=nightly))
def test_a_cut_link_and_a_stopped_rank_end_the_job_with_one_message(cluster, tmp_path, stopped):
    """Of a stopped rank its node-mates tell; nothing is left under the output's name."""
    line = ["-m", "rma_mm.run", "--shape", "2000,2000,2000", "--repeat", "100000", "--quiet", "--timeout", "2", "-o"]
    log = tmp_path / "log"
    with open(log, "w") as out:
        words = [sys.executable, *line, str(tmp_path / "C.npy")]
        job = cluster.start(2, words, env=variables(), stdout=out, stderr=out)
    wait_for(lambda: any(name.endswith(".partial") for name in os.listdir(tmp_path)) or job.poll() is not None, 40)
    time.sleep(2)
    begun = time.monotonic()
    if stopped is None:
        cluster.cut(2)
    else:
        ranks = {rank_of(pid): pid for pid in filter(is_rank, cluster.host(2).processes())}
        assert stopped in ranks, log.read_text()
        os.kill(ranks[stopped], signal.SIGSTOP)
    try:
        assert job.wait(15) == 1
        assert time.monotonic() - begun < 7
    finally:
        cluster.kill_all()
        cluster.mend(2)
    (said,) = filter(None, log.read_text().splitlines())
    what = "nothing was heard of rank 2 on host h2" if stopped is None else f"rank {stopped} on host h2 (process "
    assert said.startswith(f"rma_mm: {what}"), said
    assert ("it is stopped" in said) == (stopped is not None)
    assert os.listdir(tmp_path) == ["log"]


# -- nothing left behind --------------------------------------------------------------------------

SEGMENTS = NODES + """
import time
open(f"segments.{world.rank}", "w").write(json.dumps(os.listdir("/dev/shm")))
world.Barrier()
time.sleep(60 if os.environ["LINGER"] else 0)
"""


def network():
    words = ["sh", "-ec", "ip -brief link; ip netns list"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def children():
    """Processes that this one has started and not yet waited for."""
    return {p for p in Path("/proc").glob("[0-9]*") if parent_of(int(p.name)) == os.getpid()}


def wait_for(condition, seconds=10):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come about"
        time.sleep(0.02)


@thorough
@pytest.mark.parametrize("end", [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(tmp_path, end):
    """However the command ends: no process, link, namespace, mount, shared memory or temporary file."""
    environment = job_environment(variables(TMPDIR=str(tmp_path / "tmp"), LINGER="1" if end else ""))
    marker = f"{MARKER}={environment[MARKER]}".encode()
    (tmp_path / "tmp").mkdir()
    before = network(), Path("/proc/self/mounts").read_text(), os.listdir("/tmp")
    words = [sys.executable, "-m", "bench.hosts", "--hosts", "3", "--", sys.executable, "-c", SEGMENTS]
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    if end:
        wait_for(lambda: [x.read_text()[-1:] for x in tmp_path.glob("segments.*")] == ["]"] * 3)  # each is whole
        assert len(marked(marker)) > 6
        process.send_signal(end)
    code = process.wait(20)
    assert code == {None: 0, signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[end]
    wait_for(lambda: not marked(marker), 5 if end == signal.SIGKILL else 0.5)
    assert (network(), Path("/proc/self/mounts").read_text()) == before[:2]
    segments = [name for file in tmp_path.glob("segments.*") for name in json.loads(file.read_text())]
    assert len(segments) >= 3
    assert not set(segments) & set(os.listdir("/dev/shm"))
    assert not os.listdir(tmp_path / "tmp")


def test_failed_start_leaves_nothing():
    before = children()
    with pytest.raises(ClusterError, match="5foo"):
        Cluster(rate="5foo").__enter__()
    assert children() == before


# -- the benchmark --------------------------------------------------------------------------------


@nightly
def test_bars(tmp_path):
    file = tmp_path / "report.json"
    words = ["--bars", "--size", "256", "--repeat", "1", "--json", str(file)]
    done = command(*words, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [result["right"] for result in found["timed"] + found["counted"]] == [True] * 9
    for result in found["timed"]:
        assert result["nodes"] == 2
        assert result["link_rate"] > 0
        assert result["busiest_host_bytes"] > 0
        limit = max(result["seconds"]["multiply alone"], result["link_seconds"])
        assert result["ratio"] == pytest.approx(result["seconds"]["product"] / limit)

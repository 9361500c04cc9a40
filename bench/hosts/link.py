"""The rate that a link really has: a plain TCP stream between two hosts."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.hosts.cluster import Cluster
from bench.hosts.namespaces import ClusterError

SECONDS = 0.5
"""How long the stream lasts."""

SINK = """
import json, socket, time
with socket.create_server(("", 5001)) as listener:
    print("ready", flush=True)
    stream, _ = listener.accept()
    place = memoryview(bytearray(1 << 20))
    total, start = -stream.recv_into(place[:1]), time.perf_counter()
    while count := stream.recv_into(place):
        total += count
    print(json.dumps(total / (time.perf_counter() - start)))
"""
"""Prints the bytes a second that came in from the first byte on."""

SOURCE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001)) as stream:
    block, end = bytes(1 << 20), time.perf_counter() + float(sys.argv[2])
    while time.perf_counter() < end:
        stream.sendall(block)
"""


def link_rate(cluster: Cluster, source: int = 1, sink: int = 2) -> float:
    """Bytes a second that a program gets from one host to another through one TCP stream, nothing else running."""
    python = [sys.executable, "-c"]
    receiver = cluster.process(sink, [*python, SINK], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    address = cluster.host(sink).address
    sender = cluster.process(source, [*python, SOURCE, address, str(SECONDS)])
    try:
        out, _ = receiver.communicate(timeout=20 * SECONDS)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"nothing came through from h{source} to h{sink}") from None
    finally:
        for host, process in ((source, sender), (sink, receiver)):
            cluster.kill(host)
            process.wait()
    return float(json.loads(out))

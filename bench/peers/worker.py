"""`python -m bench.peers.worker`: one process of a job. It does what its coordinator asks over a connection.

Between two products it sleeps in a read. When the coordinator is gone it ends at once, whatever it was doing.
"""

from __future__ import annotations

import importlib
import os
import queue
import shutil
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

from bench.peers.operands import wrong_rows
from bench.peers.systems import System, Task

ADDRESS, KEY, RANK, START, DIRECTORY = (f"BENCH_PEERS_{x}" for x in ("ADDRESS", "KEY", "RANK", "START", "DIRECTORY"))
"""Environment variables: where the coordinator listens, the shared secret, the rank of a plain process, how the job
was started, its directory."""


def address_of(text: str) -> str | tuple[str, int]:
    """A path, or HOST:PORT."""
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host and "/" not in text else text


def own_rank() -> int:
    """This process's rank: MPI's, or the one that the coordinator wrote down."""
    if os.environ[START] != "mpi":
        return int(os.environ.get(RANK, "0"))
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


def listen(connection: Connection, orders: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Queue up the coordinator's orders; end the process when it is gone."""
    while True:
        try:
            orders.put(connection.recv())
        except (EOFError, OSError):
            abandon()


def abandon() -> NoReturn:
    """End at once, the coordinator being gone, and do what it would have done."""
    shutil.rmtree(os.environ[DIRECTORY], ignore_errors=True)
    leave()


def leave() -> NoReturn:
    """End at once: MPI_Finalize would wait for the others, but it alone removes MPICH's shared memory files."""
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        for name in {line.split(maxsplit=5)[-1] for line in maps.splitlines() if " /dev/shm/" in line}:
            Path(name).unlink(missing_ok=True)
    os._exit(1)


def timed(system: System, times: int) -> float:
    """Seconds of so many products, from one barrier to the next."""
    system.barrier()
    start = time.perf_counter()
    for _ in range(times):
        system.multiply()
    system.barrier()
    return time.perf_counter() - start


def check(system: System, task: Task) -> dict[str, Any]:
    """How many rows of this rank's parts of C are wrong, and which parts those are."""
    pieces = list(system.pieces())
    boxes = [(rows.start, rows.stop, cols.start, cols.stop) for rows, cols, _ in pieces]
    return {"wrong": sum(wrong_rows(task.case, piece) for piece in pieces), "boxes": boxes}


def serve(connection: Connection) -> None:
    """Prepare the product that comes first, then answer orders until told to end."""
    orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    rank = own_rank()
    connection.send(rank)
    threading.Thread(target=listen, args=(connection, orders), daemon=True).start()
    target, task = orders.get()
    task = replace(task, rank=rank)
    module, _, name = target.partition(":")
    system: System = getattr(importlib.import_module(module), name)(task)
    connection.send({"facts": system.facts})
    while True:
        order, *arguments = orders.get()
        if order == "end":
            return
        answer = {"seconds": timed(system, *arguments)} if order == "run" else check(system, task)
        connection.send(answer)


def main() -> int:
    """Serve; on an exception tell the coordinator, then end."""
    try:
        connection = Client(address_of(os.environ[ADDRESS]), authkey=bytes.fromhex(os.environ[KEY]))
    except (OSError, EOFError) as error:
        sys.stderr.write(f"{type(error).__name__}: nobody answers at {os.environ[ADDRESS]}: {error}\n")
        sys.stderr.flush()
        if isinstance(error, FileNotFoundError):  # a wrong address; else there was a coordinator
            leave()
        abandon()
    try:
        serve(connection)
    except Exception as error:  # noqa: BLE001 - the coordinator shall know, whatever it is
        traceback.print_exc()
        connection.send({"error": f"{type(error).__name__}: {error}"})
        leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())

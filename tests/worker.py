"""One rank of a test job: `mpiexec -n P python -m tests.worker`, started by `tests.jobs`.

Every rank holds its own socket to pytest. While it waits for a test it sleeps in the kernel (MPICH would spin), and
pytest can tell the ranks that answered from those that hang without any help from MPI.
"""

from __future__ import annotations

import base64
import faulthandler
import functools
import importlib
import json
import os
import pickle
import reprlib
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from rma_mm.windows import waiting
from tests.processes import DIRECTORY

ORPHAN_SECONDS = 30
"""A rank ends itself this long after its test's time limit: then pytest is gone and nobody else will."""


def main() -> None:
    """Serve requests until told to leave."""
    directory = Path(os.environ[DIRECTORY])
    rank = MPI.COMM_WORLD.rank
    # there are more ranks than cores: a sixth of their time went into it
    waiting.YIELDING = waiting.YIELDING_OWN_CORE = 0.0
    with open(directory / f"stacks.{rank}", "w") as stacks, socket.socket(socket.AF_UNIX) as channel:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        channel.connect(str(directory / "socket"))
        send(channel, rank=rank, pid=os.getpid(), size=MPI.COMM_WORLD.size)
        with channel.makefile("r") as requests:
            for line in requests:
                request = json.loads(line)
                if request["do"] == "leave":
                    break
                serve(request, channel)
            else:  # pytest is gone: Finalize might wait for a rank that never comes
                os._exit(1)


@functools.cache
def first(ranks: int) -> MPI.Intracomm:
    """The first ranks of the job, for what surrounds tests. Collective over them at the first call."""
    everyone = MPI.COMM_WORLD.Get_group()
    group = everyone.Incl(range(ranks))
    comm = MPI.COMM_WORLD.Create_group(group)
    group.Free()
    everyone.Free()
    return comm


def send(channel: socket.socket, **message: object) -> None:
    """One message: a line of JSON."""
    channel.sendall((json.dumps(message) + "\n").encode())


def serve(request: dict[str, Any], channel: socket.socket) -> None:
    """Import a test module, or run one test. The verdict goes out before this rank waits for the others."""
    if request["do"] == "load":
        send(channel, **attempt(lambda: importlib.import_module(request["module"])), ready=True)
        return
    faulthandler.dump_traceback_later(request["timeout"] + ORPHAN_SECONDS, exit=True)
    control = first(request["ranks"])
    comm = control.Dup()
    verdict = attempt(lambda: call(request, comm))
    sys.stdout.flush()
    send(channel, **verdict)
    wait_politely(control.Ibarrier())  # gives progress to ranks that still take from this one's windows
    if comm != MPI.COMM_NULL:
        comm.Free()
    faulthandler.cancel_dump_traceback_later()
    send(channel, ready=True)


def call(request: dict[str, Any], comm: MPI.Comm) -> None:
    """Run the body of the test that `request` names."""
    target: Any = importlib.import_module(request["module"])
    *owners, name = request["name"].split(".")
    for owner in owners:
        target = getattr(target, owner)
    if owners:  # a method: every rank makes its own instance of the test class
        target = target()
    body = getattr(target, name).parallel_body
    arguments = pickle.loads(base64.b64decode(request["arguments"]))  # written by the pytest that started us
    body(*([target] if owners else []), comm, **arguments)


def attempt(act: Callable[[], object]) -> dict[str, str]:
    """Run `act`; the verdict as `verdict`, `text` and `locals`."""
    try:
        act()
    except pytest.skip.Exception as skipped:
        return {"verdict": "skipped", "text": str(skipped), "locals": ""}
    except BaseException as error:  # SystemExit, pytest.fail and KeyboardInterrupt are verdicts too
        return {"verdict": "failed", "text": describe(error), "locals": innermost_locals(error)}
    return {"verdict": "passed", "text": "", "locals": ""}


def describe(error: BaseException) -> str:
    """The traceback of `error`, without this file's frames."""
    steps = traceback.TracebackException.from_exception(error)
    steps.stack = traceback.StackSummary.from_list([f for f in steps.stack if f.filename != __file__])
    return "".join(steps.format())


def innermost_locals(error: BaseException) -> str:
    """The local variables of the deepest frame that is in a test, shortened: ranks have no assert rewriting."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if f"{os.sep}tests{os.sep}" in
              frame.f_code.co_filename and frame.f_code.co_filename != __file__]
    if not frames:
        return ""
    short = reprlib.Repr()
    short.maxother = short.maxstring = 200
    return "\n".join(f"    {name} = {short.repr(value)}" for name, value in frames[-1].f_locals.items())


def descriptors() -> Counter[str]:
    """What this rank has open, and how often, but for what the thread that watches the others reads for a moment."""
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            target = os.readlink(f"/proc/self/fd/{name}")
            found[target] += not (target.startswith("/proc/") and target.endswith("/stat"))
    return +found


def wait_politely(request: MPI.Request) -> None:
    """Complete `request` without spinning: there are more ranks than cores."""
    pause = 0.0
    while not request.Test():
        time.sleep(pause)
        pause = min(0.002, pause * 1.5 + 0.00002)


if __name__ == "__main__":
    main()

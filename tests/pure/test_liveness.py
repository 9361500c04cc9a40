"""Who stands still, as another process of the host sees it; time limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from rma_mm.errors import OptionError
from rma_mm.windows.hosts import liveness
from rma_mm.windows.hosts.liveness import BEATS, CELLS, Identity, PeerProcess, by_sight, timeout_of

CHILD = """
import sys, time
from rma_mm.windows.hosts.liveness import *
enter_call(call_name("matmul"))
CELLS[DOING] = activity(ACCUMULATE, 3)
print(repr(tuple(Identity.own("here"))), flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
LIMIT = 0.25
pytestmark = pytest.mark.skipif(not Identity.own("").sight, reason="processes do not see each other")


class Child:
    """A process that does what it is told, and has a page."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=-1, stdout=-1, text=True)
        self.mate = PeerProcess(Identity(*eval(self.read())))

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def do(self, line: str, wait: bool = True) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        if wait:
            assert self.read() == "done\n"

    def is_lost(self, seconds: float = 5.0, each: Callable[[], None] = lambda: None) -> bool:
        """Whether it is found to be lost within so many seconds."""
        self.mate.look(time.monotonic(), True)
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            each()
            self.mate.look(now, False)
            if self.mate.is_lost(now, LIMIT):
                return True
            time.sleep(0.05)
        return False


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.mark.thorough
def test_who_is_lost(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits without a beat in a call, or is stopped anywhere; not one that beats, computes, or is outside."""
    monkeypatch.setattr(liveness, "QUIET", 0.2)
    assert child.is_lost()  # it reads its standard input
    assert liveness.operation(child.mate.page[: liveness.SHOWN]) == "matmul, accumulate to rank 3"
    assert not child.is_lost(0.6, lambda: child.do("CELLS[BEATS] += 1"))
    child.do("leave_call()")
    assert not child.is_lost(0.6)
    os.kill(child.process.pid, signal.SIGSTOP)
    assert child.is_lost()
    assert child.mate.state == "T"
    os.kill(child.process.pid, signal.SIGCONT)
    child.do("enter_call(call_name('matmul'))")
    child.do("while True: pass", wait=False)
    assert not child.is_lost(0.6)
    child.process.kill()
    child.process.wait()
    assert child.is_lost()
    assert child.mate.state == "X"


def test_a_name_that_is_no_text(child: Child) -> None:
    """The system cuts names of processes after 15 bytes, which may be in the midst of a character."""
    child.do(r"import ctypes; ctypes.CDLL(None).prctl(15, b'na\xc3', 0, 0, 0)")
    assert liveness._state_of(child.process.pid)[0]


def test_the_thread_beats() -> None:
    """From the first mesh of several ranks on."""
    here = Identity.own("here")
    watch = liveness.NodeWatch(0, [here, here], [0, 0], 20.0, str)
    try:
        begun = CELLS[BEATS]
        end = time.monotonic() + 10
        while CELLS[BEATS] < begun + 1 and time.monotonic() < end:
            time.sleep(0.05)
        assert CELLS[BEATS] >= begun + 1
    finally:
        watch.end()


def test_those_who_see_each_other() -> None:
    """Ranks of a node, in one process namespace of one machine, with pages."""
    a, b, c = (Identity("one", (place,) * bool(place), n, 3) for n, place in enumerate(["x", "x", ""]))
    d = c._replace(process=7)
    assert by_sight([0, 0, 0, 0, 1], [a, b, c, d, a]) == [0, 0, 2, 3, 4]


@pytest.mark.parametrize("given", [0, 0.99, -1, float("nan"), float("inf"), True, [], 10**400])
def test_limits_that_are_none(given: object) -> None:
    with pytest.raises(OptionError, match=r"^timeout: got .*; must be a number of seconds, at least 1, as 20$"):
        timeout_of(given, {"RMA_MM_TIMEOUT": "5"})


def test_limits() -> None:
    assert [timeout_of(x, {"RMA_MM_TIMEOUT": "5"}) for x in (1, 2.5, None)] == [1, 2.5, 5]
    assert timeout_of(None, {}) == timeout_of(None, {"RMA_MM_TIMEOUT": ""}) == 20
    with pytest.raises(OptionError, match=r"^RMA_MM_TIMEOUT: got 'soon'; must be"):
        timeout_of(None, {"RMA_MM_TIMEOUT": "soon"})

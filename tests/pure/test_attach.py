"""Memory of other processes of the host, moved by calls of the system."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import WindowError
from rma_mm.windows import attach
from rma_mm.windows.attach import Attached
from rma_mm.windows.boxes.runs import Runs


def runs(*stretches: tuple[int, int, int]) -> Runs:
    return Runs(*(np.array(each, np.int64) for each in zip(*stretches, strict=True)))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), stretches=st.integers(1, 4),
    longest=st.sampled_from([3, 2**10]), is_put=st.booleans(),
)  # fmt: skip
def test_all_stretches_are_moved(sizes: list[int], stretches: int, longest: int, is_put: bool) -> None:
    """However many there are, and however long, of what a call takes."""
    far, near = np.arange(200, dtype=np.uint8), np.zeros(200, np.uint8)
    starts = np.cumsum([0, *(size + 1 for size in sizes)])[:-1]
    pieces = [(int(a), n) for a, n in zip(starts, sizes, strict=True)]
    found = runs(*((far.ctypes.data + a, near.ctypes.data + a + 50, n) for a, n in pieces))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "STRETCHES", stretches)
        patch.setattr(attach, "LONGEST", longest)
        if is_put:
            far, near = near, far
            found = Runs(found.near, found.far, found.sizes)
        assert Attached(os.getpid(), found, is_put).move()()
    wanted = np.zeros(200, np.uint8)
    for a, n in pieces:
        wanted[a + 50 : a + 50 + n] = np.arange(a, a + n)
    np.testing.assert_array_equal(far if is_put else near, wanted)


def test_nothing_is_moved_in_no_call() -> None:
    assert Attached(0, Runs(*(np.zeros(0, np.int64) for _ in range(3)))).move()()


def test_what_cannot_be_reached_is_said() -> None:
    byte = np.zeros(1, np.uint8)
    at = byte.ctypes.data
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(WindowError, match=f"process {gone.pid} of this host: .* the process is gone"):
        Attached(gone.pid, runs((at, at, 1))).move()
    with pytest.raises(WindowError, match="Bad address"):
        Attached(os.getpid(), runs((8, at, 1))).move()
    with pytest.raises(WindowError, match="Bad address"):  # a part of it came
        Attached(os.getpid(), runs((at, at, 1), (8, at, 1))).move()

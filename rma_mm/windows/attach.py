"""Memory of other processes of this host, read and written where it lies: cross memory attach (CMA) of Linux.

The owner takes no part, and knows nothing of it. One call of the system moves up to 1024 stretches; UCX, which uses the
same on a node, takes a call of its own and 20 µs for each.
"""

from __future__ import annotations

import ctypes as C
import errno
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from rma_mm.errors import WindowError
from rma_mm.windows.boxes.runs import Runs

STRETCHES = 1024  # most stretches of a call (IOV_MAX)
LONGEST = 2**30  # most bytes of a stretch: a call moves less than 2³¹ in all
REMEDIES = {
    errno.EPERM: "it is forbidden here: sysctl kernel.yama.ptrace_scope=0, or docker run --cap-add=SYS_PTRACE",
    errno.ESRCH: "the process is gone, or in another PID namespace: docker run --pid=host",
    errno.ENOSYS: "this system has no process_vm_readv",
}
"""Explanations of errors, with remedies."""


class Attached:
    """Stretches of this process's memory and of another's, prepared to be moved many times."""

    def __init__(self, pid: int, runs: Runs, is_put: bool = False) -> None:
        self.pid, self.call = pid, calls()[is_put]
        far, near, sizes = _cut(runs)
        self.sides = np.empty((2, len(far), 2), np.uint64)  # of each side, address and length of each stretch
        self.sides[0, :, 0], self.sides[1, :, 0], self.sides[:, :, 1] = near, far, sizes
        starts = range(0, len(far), STRETCHES if sizes.max(initial=0) < LONGEST // STRETCHES else 1)
        step = starts.step
        self.parts = [
            (self.sides[0, n:].ctypes.data, self.sides[1, n:].ctypes.data, min(step, len(far) - n), int(total))
            for n, total in zip(starts, np.add.reduceat(sizes, list(starts)), strict=True)
        ] if len(far) else []  # fmt: skip

    def move(self) -> Callable[[], bool]:
        """Move all stretches; report completion. Raises WindowError."""
        for near, far, count, total in self.parts:
            moved = self.call(self.pid, near, count, far, count, 0)
            if moved != total:
                number = C.get_errno() if moved < 0 else errno.EFAULT
                why = REMEDIES.get(number, os.strerror(number))
                raise WindowError(f"process {self.pid} of this host: cross memory attach: {why}")
        return over


def over() -> bool:
    return True


@cache
def calls() -> tuple[Any, Any]:
    """Return the functions that read and write. Raises WindowError if the system has neither."""
    try:
        library: Any = C.CDLL(None, use_errno=True)
        found = library.process_vm_readv, library.process_vm_writev
    except (OSError, AttributeError):
        raise WindowError(f"cross memory attach: {REMEDIES[errno.ENOSYS]}") from None
    for call in found:
        call.restype = C.c_ssize_t
        call.argtypes = C.c_int, C.c_void_p, C.c_ulong, C.c_void_p, C.c_ulong, C.c_ulong
    return found


def _cut(runs: Runs) -> Runs:
    """Stretches that are not too long for a call."""
    if runs.sizes.max(initial=0) <= LONGEST:
        return runs
    pieces = [
        (far + at, near + at, min(LONGEST, size - at))
        for far, near, size in zip(*(each.tolist() for each in runs), strict=True) for at in range(0, size, LONGEST)
    ]
    return Runs(*(np.array(each, np.int64) for each in zip(*pieces, strict=True)))

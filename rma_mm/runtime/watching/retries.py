"""Retry operations that failed, if they may be repeated. No MPI here. No MPI here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rma_mm.errors import WindowError
from rma_mm.runtime.watching.tally import Tally
from rma_mm.windows.base import NotBegunError

T = TypeVar("T")

FAULTS = (WindowError, OSError)  # what windows raise of what fails
PAUSES = (0.02, 0.2, 1.0)  # seconds before the first, second and third time that something is tried again
WITHIN = 5.0  # seconds after the first failure in which it is


def retry(fault: Exception, attempt: Callable[[], T], what: str, tally: Tally, repeats: bool = False) -> T:
    """Retry an operation that has just failed. repeats: whether it may be repeated where it had begun, as a get may.

    Raises WindowError if it may not, or keeps failing.
    """
    begun, times = time.monotonic(), 1
    for pause in PAUSES:
        if not (repeats or isinstance(fault, NotBegunError)) or time.monotonic() + pause - begun > WITHIN:
            break
        time.sleep(pause)
        tally.retries += 1
        times += 1
        try:
            return attempt()
        except FAULTS as error:
            fault = error
    how = f"failed {times} times" if times > 1 else "failed, and cannot be repeated"
    raise WindowError(f"{what}: {how}: {fault}") from fault

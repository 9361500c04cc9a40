"""Progress on standard error: a bar on a terminal, and elsewhere, as under mpiexec, a line every few seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rma_mm.command.options.parser import PROGRESS

FIRST, EVERY = 1.0, 5.0
"""Seconds of a job until its first line, and from one line to the next."""
LOOK = 0.1  # seconds from one look at the stage to the next
COUNTED, UNCOUNTED = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}", "{desc} {elapsed}{postfix}"
"""Bars of stages that tell how much is done, and of others."""
VARIABLE = "RMA_MM_PROGRESS"
Show = Callable[[float, float], None]
"""Takes the work that is done, and all work; None where nobody wants to know."""


class ProgressReport:
    """Report of one rank on the stages of a job: reading, multiplying, writing, measuring.

    A thread prints, so that lines also come while a rank is inside one long call.
    """

    def __init__(self, mode: str | None, wanted: bool) -> None:
        """mode: one of `PROGRESS`, or None for RMA_MM_PROGRESS. wanted: False on ranks that are to be silent."""
        named = mode or os.environ.get(VARIABLE) or "auto"
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        chosen = named if named in PROGRESS else "auto"
        if chosen == "auto":
            chosen = "bar" if is_terminal else "lines"
        self.mode = chosen if wanted else "off"
        self._title, self._begun, self._next = "", 0.0, time.monotonic() + FIRST
        self._detail: Callable[[], str] = str
        self._done = self._whole = 0.0
        self._bar: Any = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def stage(self, title: str, detail: Callable[[], str] = str) -> Iterator[Show | None]:
        """Report what is going on until the block ends.

        Yields a function that takes the work that is done and all work; None if there is nothing to report to.
        """
        if self.mode == "off":
            yield None
            return
        with self._lock:
            self._title, self._detail, self._begun = title, detail, time.monotonic()
            self._done = self._whole = 0.0
        if self._thread is None:
            self._thread = threading.Thread(target=self._report, name="rma_mm progress", daemon=True)
            self._thread.start()
        try:
            yield self._show
        finally:
            with self._lock:
                self._title = ""
                self._clear()

    def _show(self, done: float, whole: float) -> None:
        self._done, self._whole = done, whole

    def close(self) -> None:
        """End the thread; a later stage reports nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.mode = "off"

    def _report(self) -> None:
        """Print until the end: runs in the thread."""
        while not self._ended.wait(LOOK):
            with self._lock, suppress(OSError, ValueError):
                if self._title and time.monotonic() >= self._next:
                    self._print(time.monotonic())

    def _print(self, now: float) -> None:
        share = min(1.0, self._done / self._whole) if self._whole > 0 else None
        detail = self._detail()
        if self.mode == "lines":
            self._next = now + EVERY
            said = [f"{share:.0%}" if share is not None else "", f"{now - self._begun:.0f} s", detail]
            sys.stderr.write(f"rma_mm: {self._title}: {', '.join(filter(None, said))}\n")
            sys.stderr.flush()
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=1.0, desc=self._title, leave=False, bar_format=UNCOUNTED, file=sys.stderr)
            self._bar.start_t -= now - self._begun
        self._bar.bar_format = UNCOUNTED if share is None else COUNTED
        self._bar.set_postfix_str(detail, refresh=False)
        self._bar.n = share or 0.0
        self._bar.refresh()

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

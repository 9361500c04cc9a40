"""Threads that take turns: one runs at a time, and lets the next one run where it waits.

So what they do is the same in every run, and code that was written for one thread in a process stays right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rma_mm.errors import DisagreementError, MeshError, ranks_in_words
from rma_mm.runtime.ranks.rank_state import RankState, become
from rma_mm.windows.waiting import TURNS

SOME, MOST = 20, 2000
"""Rounds in which all ranks wait and none gets on, after which they sleep between rounds, and after which none will."""
SLEEP = 1e-3  # seconds
LAST = 3.0  # seconds for the ranks to end after Ctrl-C


class StuckError(DisagreementError):
    """All ranks that still run wait, for ever. Not raised by one rank's own fault."""


class EndedError(BaseException):
    """Ends the threads, as the context was left after Ctrl-C."""


class TurnTaker:
    """The thread of one pretended rank, with its task and the task's result."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self.turns, self.rank = turns, rank
        self.gate = threading.Lock()  # held by nobody while it is this thread's turn to begin
        self.gate.acquire()
        self.task: Callable[[], Any] | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, state: RankState) -> None:
        """Run tasks, each when its turn comes, until one is None."""
        become(state)
        TURNS.pass_on = self.pass_on
        while True:
            self.gate.acquire()
            if self.task is None:
                return
            try:
                self.result, self.error = self.task(), None
            except BaseException as error:  # noqa: BLE001 - raised where all are waited for
                self.result, self.error = None, error
            self.task = None
            self.turns.finish(self)

    def pass_on(self) -> None:
        """Let the other threads run. Raises StuckError if all wait and none gets on."""
        self.turns.after(self).gate.release()
        self.gate.acquire()
        self.turns.require_progress()


class Turns:
    """Threads that run as ranks 0, 1, … of a pretended job."""

    def __init__(self, states: Sequence[RankState]) -> None:
        """Start a thread for each state. Raises MeshError if the system starts no more threads."""
        self.takers = [TurnTaker(self, rank) for rank in range(len(states))]
        self._running: list[TurnTaker] = []
        self._all_done = threading.Event()
        self._idle, self.is_over = 0, False
        try:
            for rank, (taker, state) in enumerate(zip(self.takers, states, strict=True)):
                name = f"rma_mm pretended rank {rank}"
                threading.Thread(target=taker.run, args=(state,), name=name, daemon=True).start()
        except RuntimeError:
            self.takers = self.takers[:rank]
            self.end()
            raise MeshError(
                f"pretend: the system starts {rank} threads, and {len(states)} are needed; use fewer ranks"
            ) from None

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[TurnTaker]:
        """Run a task on each rank and return the threads, with results and errors."""
        if self.is_over:
            raise MeshError("pretend: its ranks have ended; call rma_mm.pretend again")
        for taker, task in zip(self.takers, tasks, strict=True):
            taker.task = task
        self._running = list(self.takers)
        self._all_done.clear()
        self.get_on()
        self.takers[0].gate.release()
        try:
            while not self._all_done.wait(0.1):
                pass
        except BaseException:
            self.is_over = True  # the ranks end at their next wait
            self._all_done.wait(LAST)
            raise
        return self.takers

    def after(self, taker: TurnTaker) -> TurnTaker:
        """Return the thread whose turn is next."""
        at = self._running.index(taker) + 1
        return self._running[at % len(self._running)]

    def finish(self, taker: TurnTaker) -> None:
        following = self.after(taker)
        self._running.remove(taker)
        if not isinstance(taker.error, StuckError):
            self.get_on()
        if self._running:
            following.gate.release()
        else:
            self._all_done.set()

    def get_on(self) -> None:
        """Note that a rank got on."""
        self._idle = 0

    def require_progress(self) -> None:
        if self.is_over:
            raise EndedError
        self._idle += 1
        rounds, place = divmod(self._idle, len(self._running))
        if rounds > MOST:
            raise StuckError(self._who_waits())
        if rounds > SOME and place == 0:
            time.sleep(SLEEP)

    def _who_waits(self) -> str:
        has_ended = [taker not in self._running and not isinstance(taker.error, StuckError) for taker in self.takers]
        ended = [rank for rank, is_over in enumerate(has_ended) if is_over]
        waiting = [rank for rank, is_over in enumerate(has_ended) if not is_over]
        whom = f"for {ranks_in_words(ended)}, which came to the end" if ended else "for one another"
        who = f"{ranks_in_words(waiting)} wait{'s' * (len(waiting) == 1)}"
        return f"pretend: {who} {whom}; all ranks must make the same calls"

    def end(self) -> None:
        """End the threads that have no task; others end at their next wait."""
        self.is_over = True
        for taker in self.takers:
            if taker.task is None:
                taker.gate.release()
        self.takers = []

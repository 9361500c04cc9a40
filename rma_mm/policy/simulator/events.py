"""Simulated time, and what takes it: servers that many jobs share, and processors that do one job after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush

Act = Callable[[], None]


class Clock:
    """A queue of events in simulated time, in seconds; equal calls give equal orders. Times are in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.event = 0  # the number of what happens now
        self._events: list[tuple[float, int, Act]] = []
        self._numbers = 0
        self._ready: deque[Act] = deque()
        self._changed: list[Server] = []

    def soon(self, act: Act) -> None:
        self._ready.append(act)

    def after(self, seconds: float, act: Act) -> int:
        """Do this when the given number of seconds have passed; the number of the event."""
        self._numbers += 1
        heappush(self._events, (self.now + seconds, self._numbers, act))
        return self._numbers

    def changed(self, server: Server) -> None:
        self._changed.append(server)

    def run(self) -> None:
        ready, changed, events = self._ready, self._changed, self._events
        while True:
            while ready:
                ready.popleft()()
            for server in changed:
                server.schedule()
            changed.clear()
            if not events:
                return
            self.now, self.event, act = heappop(events)
            act()


class Signal:
    """Something that is over at some time."""

    __slots__ = ("_clock", "_waiting", "is_over")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[Act] = []
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        for act in self._waiting:
            self._clock.soon(act)
        self._waiting.clear()

    def then(self, act: Act) -> None:
        self._waiting.append(act)


class Countdown:
    """Acts once the given number of parts are over."""

    __slots__ = ("_act", "_left")

    def __init__(self, parts: int, act: Act) -> None:
        self._left, self._act = parts, act

    def one(self) -> None:
        self._left -= 1
        if not self._left:
            self._act()


class Server:
    """Serves all its jobs at once: each of n at the rate min(1, slots / n), less where more of them crowd it; exactly.

    All jobs get the same service, so that those who came last need not be looked at: a job ends when what each has got
    since the server was empty reaches what that was when it came, and its own seconds. Of a server with another pace a
    job takes its seconds over that.
    """

    def __init__(self, clock: Clock, slots: float = 1.0, crowding: float = 1.0, pace: float = 1.0) -> None:
        self._clock, self._slots, self._crowding, self._pace = clock, slots, crowding, pace
        self._jobs: list[tuple[float, int, Act]] = []
        self._numbers = 0
        self._served = 0.0  # seconds that a job has got which is here since the server was empty
        self._since = 0.0  # when that was so
        self._due = 0  # the event at which the next job ends
        self._is_changed = False

    def add(self, seconds: float, act: Act) -> None:
        """A job of the given number of seconds, if it is served alone; `act` when it ends."""
        now = self._clock.now
        self._served = self._served + (now - self._since) * self._rate if self._jobs else 0.0
        self._since = now
        self._numbers += 1
        heappush(self._jobs, (self._served + seconds / self._pace, self._numbers, act))
        self._change()

    def schedule(self) -> None:
        """Plan the end of the next job. Called by the clock, at the time of the last change."""
        self._is_changed = False
        if self._jobs:
            left = max(0.0, self._jobs[0][0] - self._served)
            self._due = self._clock.after(left / self._rate, self._end)

    @property
    def _rate(self) -> float:
        return min(1.0, self._slots / self._crowding / len(self._jobs)) if len(self._jobs) > self._slots else 1.0

    def _change(self) -> None:
        if not self._is_changed:
            self._is_changed = True
            self._clock.changed(self)

    def _end(self) -> None:
        """The next job ends, and all that do so with it; unless there was a change since this was planned."""
        if self._clock.event != self._due:
            return
        jobs = self._jobs
        self._served, self._since = max(self._served, jobs[0][0]), self._clock.now
        ended = []
        while jobs and jobs[0][0] <= self._served:
            ended.append(heappop(jobs)[2])
        self._change()
        for act in ended:
            act()


Program = Iterator[Signal | float]
"""A program of a processor: it yields signals to wait for, or seconds of processor time to take."""


class Processor:
    """One rank's part of its host: a job after the other, in the order in which they come."""

    def __init__(self, host: Server) -> None:
        self._host = host
        self._waiting: deque[tuple[float, Act]] = deque()
        self._is_busy = False

    def add(self, seconds: float, act: Act) -> None:
        """A job of the given number of seconds of a slot of the host; `act` when it ends."""
        self._waiting.append((seconds, act))
        if not self._is_busy:
            self._next()

    def run(self, program: Program) -> None:
        """Run a program up to where it must wait, and from there on as soon as it need not."""
        for wanted in program:
            if not isinstance(wanted, Signal):
                self.add(wanted, partial(self.run, program))
                return
            if not wanted.is_over:
                wanted.then(partial(self.run, program))
                return

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            seconds, act = self._waiting.popleft()
            self._host.add(seconds, partial(self._ended, act))

    def _ended(self, act: Act) -> None:
        self._next()
        act()


__all__ = ["Clock", "Countdown", "Processor", "Program", "Server", "Signal"]

"""The one way of waiting: test, then give up the core, then sleep.

MPI libraries spin while they wait. With more ranks than cores that takes the time of the ranks that are being
waited for, and Python's signal handlers cannot run inside the call.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI

YIELDING, YIELDING_OWN_CORE = 1e-3, 20e-3
"""Seconds during which a waiter only yields its core; the second if each rank of the node has one. An emulated transfer
of some megabytes, which takes milliseconds, stands still while either side sleeps."""
BURST = 64
"""Tests between two sleeps. Each moves an emulated transfer by a packet or some: with a single test per sleep a
get of 16 MiB took 2.3 s where both sides waited, with 64 it took 44 ms; an idle waiter takes 5 % of a core."""
LASTING, FEWEST = 0.1e-3, 4
"""Seconds after which there are no more, and how many there are however long they take: some look at events, too, and
who waits must leave the core to those who work."""
FIRST_SLEEP = 50e-6  # seconds of the first sleep; each is twice the one before, up to `LAST_SLEEP`
LAST_SLEEP = 0.5e-3  # seconds of the longest sleep
LATE = 1.0  # seconds after which, and between which, a waiter asks what keeps the others


class Cores:
    """The cores of this node, and the meshes' ranks on it."""

    are_shared: bool | None = None
    """True if any mesh has more ranks than cores here; None until there is a mesh."""

    @classmethod
    def note(cls, are_shared: bool) -> None:
        cls.are_shared = cls.are_shared or are_shared


class TurnHook(threading.local):
    """Threads that take turns: in each of them, a function that lets the others run and returns at the next turn."""

    pass_on: Callable[[], None] | None = None


WHEN_LATE: list[Callable[[], None]] = []
"""Functions that waiting code calls if it was given none of its own; they may raise."""
TURNS = TurnHook()
POLLERS: list[Callable[[], object]] = []
"""Functions that give progress to the transfers of other ranks, one for each library that moves data."""
HELPERS: set[int] = set()  # threads that ask nothing: nobody would hear what they raise


def add_poller(poll: Callable[[], object]) -> None:
    """Have `poll` called, from any thread, while this rank waits, and by its helper thread while it multiplies."""
    if poll not in POLLERS:
        POLLERS.append(poll)


def poll() -> None:
    """Give progress to the transfers of other ranks."""
    for each in POLLERS:
        each()


def wait_until(done: Callable[[], bool], when_late: Callable[[], None] | None = None) -> None:
    """Wait until `done()` is true; `done` should drive the progress of its transfers.

    when_late: called about once a second after the first, instead of `WHEN_LATE`; may raise.
    """
    if done():
        return
    if TURNS.pass_on is not None:
        _wait_in_turns(done, when_late or _ask, TURNS.pass_on)
        return
    if len(POLLERS) > 1:
        done = partial(_polled, done)
    clock = time.perf_counter
    deadline = clock() + (YIELDING_OWN_CORE if Cores.are_shared is False else YIELDING)
    while clock() < deadline:
        os.sched_yield()
        if done():
            return
    pause, next_look = FIRST_SLEEP, deadline + LATE
    while not _burst(done):
        time.sleep(pause)
        pause = min(2 * pause, LAST_SLEEP)
        if clock() > next_look:
            (when_late or _ask)()
            next_look = clock() + LATE


def _wait_in_turns(done: Callable[[], bool], when_late: Callable[[], None], pass_on: Callable[[], None]) -> None:
    next_look = time.perf_counter() + LATE
    while not done():
        pass_on()
        if time.perf_counter() > next_look:
            when_late()
            next_look = time.perf_counter() + LATE


def pause(seconds: float) -> None:
    """Sleep, or let the other threads run where threads take turns."""
    if TURNS.pass_on is None:
        time.sleep(seconds)
    else:
        TURNS.pass_on()


def _polled(done: Callable[[], bool]) -> bool:
    poll()
    return done()


def _burst(done: Callable[[], bool]) -> bool:
    """Return whether one of several tests finds it done."""
    clock = time.perf_counter
    end = clock() + LASTING
    for n in range(BURST):
        if done():
            return True
        if n + 1 >= FEWEST and clock() > end:
            break
    return False


def _ask() -> None:
    if threading.get_ident() not in HELPERS:
        for ask in WHEN_LATE:
            ask()


def wait(request: MPI.Request, when_late: Callable[[], None] | None = None) -> None:
    wait_until(request.Test, when_late)


def barrier(comm: MPI.Intracomm) -> None:
    """Return when every rank of `comm` has called it. Collective over `comm`."""
    wait(comm.Ibarrier())


def reduced(comm: MPI.Intracomm, array: NDArray[Any], op: str) -> None:
    """Put the SUM, MIN or MAX over all ranks of `comm` instead of each element. Collective over `comm`."""
    from mpi4py import MPI

    wait(comm.Iallreduce(MPI.IN_PLACE, array, getattr(MPI, op)))


def largest(comm: MPI.Intracomm, figures: Sequence[int]) -> list[int]:
    """Return the largest of each of these on any rank. Collective over `comm`."""
    most = np.array(figures, np.int64)
    reduced(comm, most, "MAX")
    return [int(figure) for figure in most]

"""Waiting gives up the core and lets signal handlers run."""

from __future__ import annotations

import signal
import time
from itertools import count
from types import SimpleNamespace

import pytest

from rma_mm.windows import waiting
from rma_mm.windows.waiting import LASTING, YIELDING, YIELDING_OWN_CORE, Cores, wait_until


def test_returns_at_once_when_done() -> None:
    calls: list[None] = []
    wait_until(lambda: calls.append(None) is None)
    assert len(calls) == 1


@pytest.mark.parametrize("seconds", [0.0002, 0.01])
def test_returns_soon_after(seconds: float) -> None:
    end = time.perf_counter() + seconds
    wait_until(lambda: time.perf_counter() >= end)
    assert time.perf_counter() >= end


def test_a_long_wait_takes_little_of_the_core() -> None:
    end = time.perf_counter() + 0.5
    busy = time.process_time()
    wait_until(lambda: time.perf_counter() >= end)
    assert time.process_time() - busy < 0.25


@pytest.mark.parametrize(("meshes", "is_patient"), [([], False), ([False], True), ([False, True, False], False)])
def test_a_waiter_keeps_a_core_of_its_own_for_longer(
    monkeypatch: pytest.MonkeyPatch, meshes: list[bool], is_patient: bool
) -> None:
    monkeypatch.setattr(Cores, "are_shared", None)
    for are_shared in meshes:
        Cores.note(are_shared)
    ticks, slept = count(), list[float]()

    def clock() -> float:
        return 1e-4 * next(ticks)

    of_waiting = SimpleNamespace(perf_counter=clock, sleep=lambda _: slept.append(clock()))
    monkeypatch.setattr(waiting, "time", of_waiting)  # not that of other threads of this process
    wait_until(lambda: bool(slept))
    patience = YIELDING_OWN_CORE if is_patient else YIELDING
    assert patience <= slept[0] <= 2 * patience


def test_few_tests_lie_between_two_sleeps_where_each_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [0]

    def is_done() -> bool:
        found[-1] += 1
        end = time.perf_counter() + 2 * LASTING
        while time.perf_counter() < end:
            pass
        return len(found) > 5

    of_waiting = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: found.append(0))
    monkeypatch.setattr(waiting, "time", of_waiting)
    wait_until(is_done)
    assert max(found[1:]) <= 8


def test_signal_handlers_run() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        wait_until(lambda: bool(seen))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [signal.SIGALRM]

"""Property tests on real ranks: rank 0 draws and shrinks, all ranks try each example together."""

from __future__ import annotations

import os
import pickle
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import hypothesis
from hypothesis.strategies import SearchStrategy
from mpi4py import MPI

from tests.jobs import VARIANT
from tests.worker import wait_politely

T = TypeVar("T")

SHRINK_SECONDS = 15.0
"""Time given to making a failing example smaller; more would run into the test's time limit."""


class _Falsified(Exception):
    """Some rank failed on an example. Raised at one place only, so that Hypothesis shrinks any failure to any other."""


def shared_examples(
    comm: MPI.Comm,
    strategy: SearchStrategy[T],
    body: Callable[[MPI.Comm, T], None],
    max_examples: int = 25,
    examples: Iterable[T] = (),
) -> None:
    """Call `body(comm, example)` on every rank for `examples` and then for `max_examples` drawn from `strategy`.

    The same are drawn at each run; others in each environment, so that these do not all try the same few.
    Collective over comm. Examples must be picklable, and filtered within the strategy rather than by `assume`.
    Raises the same AssertionError on every rank, with the smallest example found, where any rank failed.
    """

    def search(leader: _Leader) -> None:
        for example in examples:
            leader.trial(example)
        trial: Callable[[T], None] = leader.trial
        seeded = hypothesis.seed(_seed())
        seeded(_settings(max_examples)(hypothesis.given(strategy)(_without_self(trial))))()

    _led(comm, body, search)


def _seed() -> int:
    """The same at each run, another in each environment; RMA_MM_TEST_SEED makes it another."""
    return zlib.crc32((os.environ.get("RMA_MM_TEST_SEED", "") + os.environ.get(VARIANT, "")).encode())


def _settings(max_examples: int, steps: int = 50) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        report_multiple_bugs=False,
    )


def _led(comm: MPI.Comm, body: Callable[[MPI.Comm, Any], None], search: Callable[[_Leader], None]) -> None:
    """Rank 0 searches, the others follow. Raises the same AssertionError on every rank where any failed."""
    control = comm.Dup()
    try:
        if comm.rank == 0:
            failure = _Leader(control, comm, body).search(search)
            _broadcast(control, ("done", failure))
        else:
            failure = _follow(control, comm, body)
    finally:
        control.Free()
    if failure is not None:
        raise AssertionError(failure)


class _Leader:
    """Rank 0: draws examples and hears the verdicts."""

    def __init__(self, control: MPI.Comm, comm: MPI.Comm, body: Callable[[MPI.Comm, Any], None]) -> None:
        self.control, self.comm, self.body = control, comm, body
        self.failure: str | None = None
        self.limit = float("inf")

    def search(self, search: Callable[[_Leader], None]) -> str | None:
        """The report of the smallest failure, or None."""
        try:
            search(self)
        except BaseException:  # the other ranks wait: whatever it is, they must hear of it
            return self.failure or f"rank 0 could not draw examples:\n{traceback.format_exc()}"
        return self.failure

    def trial(self, example: Any) -> None:
        """One example on all ranks."""
        if time.monotonic() > self.limit:
            return
        _broadcast(self.control, ("try", example))
        verdicts = _verdicts(self.control, self.comm, self.body, example)
        if not any(verdicts):
            return
        if self.failure is None:
            self.limit = time.monotonic() + SHRINK_SECONDS
        failed = [f"on rank {rank} of {len(verdicts)}:\n{text}" for rank, text in enumerate(verdicts) if text]
        self.failure = f"with the example {example!r}\n" + "\n".join(failed)
        raise _Falsified


def _without_self(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """A plain function: Hypothesis refuses bound methods."""

    def trial(example: Any) -> None:
        method(example)

    return trial


def _follow(control: MPI.Comm, comm: MPI.Comm, body: Callable[[MPI.Comm, Any], None]) -> str | None:
    """The other ranks: try what rank 0 sends until it is done."""
    while True:
        order, content = _broadcast(control, None)
        if order == "done":
            return content  # type: ignore[no-any-return]
        _verdicts(control, comm, body, content)


def _broadcast(control: MPI.Comm, message: Any) -> Any:
    """Rank 0's message on every rank. Pickled first: an example that cannot be must not leave the others waiting."""
    pickled = pickle.dumps(message)
    wait_politely(control.Ibarrier())
    return pickle.loads(control.bcast(pickled))


def _verdicts(control: MPI.Comm, comm: MPI.Comm, body: Callable[[MPI.Comm, Any], None], example: Any) -> list[str]:
    """The traceback of every rank, empty where it passed."""
    text = ""
    try:
        body(comm, example)
    except BaseException:  # pytest.fail and SystemExit count as failures of the example
        text = traceback.format_exc()
    wait_politely(control.Ibarrier())
    return control.allgather(text)

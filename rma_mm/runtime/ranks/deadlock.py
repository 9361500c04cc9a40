"""Ranks that wait for one another in calls of different groups: found, and told to all of them.

A rank that waits in a call waits for every rank that has not entered it. One that has waited long, and is in several
groups, sends a question to the ranks of that call; a rank that has not entered it and waits elsewhere itself passes
the question on there. A question that comes back to a rank that still waits has gone round a circle (Chandy, Misra and
Haas 1983, the AND model). A rank that is at work passes nothing on: it will come.
"""

from __future__ import annotations

from typing import NamedTuple

from rma_mm.errors import DisagreementError
from rma_mm.runtime.ranks.process_group import AbortNotice, ProcessGroup, broken, poison_job
from rma_mm.runtime.ranks.rank_state import rank_state
from rma_mm.windows.waiting import WHEN_LATE


class Probe(NamedTuple):
    """Does a rank wait for itself?"""

    asker: int  # rank of COMM_WORLD
    wait: int  # which of its waits it asks in
    call: int  # the call of the group it was sent on that its sender waits in
    path: tuple[tuple[int, str], ...]  # (rank of COMM_WORLD, what it waits in), the asker's first


class Wait:
    """One rank's wait in one call of a group, from its beginning."""

    def __init__(self, group: ProcessGroup, what: str) -> None:
        state = rank_state()
        state.waits += 1
        self.group, self.what, self.number = group, what, state.waits
        self.me = group.world_ranks[group.comm.rank]
        self._has_asked = False
        self._passed_on: set[tuple[int, int]] = set()

    def look(self) -> None:
        """Ask, and pass questions on; raise DisagreementError if ranks wait for one another."""
        receive()
        questions = rank_state().questions
        if len(rank_state().groups) > 1 and not self._has_asked:
            self._has_asked = True
            self._ask(Probe(self.me, self.number, 0, ()))
        for group, question in list(questions.values()):
            if group.calls >= question.call:  # this rank has come there since
                questions.pop((id(group), question.asker))
            elif (question.asker, question.wait) == (self.me, self.number):
                self._say(question.path)
            elif (question.asker, question.wait) not in self._passed_on:
                self._passed_on.add((question.asker, question.wait))
                self._ask(question)
        _require_all()

    def _ask(self, question: Probe) -> None:
        """Send a question to the ranks that this one waits for, and others."""
        path = (*question.path, (self.me, self.what))
        self.group.tell(question._replace(call=self.group.calls, path=path))

    def _say(self, path: tuple[tuple[int, str], ...]) -> None:
        waits = " and ".join(f"{what} on rank {rank}" for rank, what in sorted(path))
        rule = "meshes that share ranks must be used in the same order on them"
        _tell_all(f"ranks wait for one another in different calls: {waits} (of COMM_WORLD); {rule}")


def _tell_all(verdict: str) -> None:
    """Believe a verdict, and pass it on once."""
    if not broken():
        poison_job(verdict)
        for group in list(rank_state().groups):
            group.tell(verdict)


def receive() -> None:
    """Receive the messages of other ranks."""
    for group in list(rank_state().groups):
        for message in group.receive_messages():
            if isinstance(message, Probe):
                rank_state().questions[id(group), message.asker] = group, message
            elif isinstance(message, AbortNotice):
                group.aborted[message.rank] = message.failure
            else:
                _tell_all(str(message))


def _raise_if_aborted() -> None:
    """Raise DisagreementError if another rank has left a product, which this one waits for."""
    receive()
    _require_all()


def _require_all() -> None:
    if broken():
        raise DisagreementError(broken())
    for group in rank_state().groups:
        for rank in group.aborted:
            raise DisagreementError(f"rank {rank} aborted during a product")


WHEN_LATE.append(_raise_if_aborted)

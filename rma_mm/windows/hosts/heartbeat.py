"""Notice that a host is gone: TCP alone reports nothing for minutes when a link drops.

Ranks of one node see each other (`liveness`). Rank 0 and the first rank of every other node tell each other every few
seconds that they are there, and what they are in. The helper thread does it, so that a long multiply does not look like
a dead host; and only while products run: in a computation of its own a rank may hold the GIL for as long as it likes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from rma_mm.windows.hosts.liveness import SHOWN, Identity, end_job, operation, shown
from rma_mm.windows.waiting import wait

BEAT = 5.0  # seconds between two beats at most
LOOK = 0.1  # seconds between two looks for beats
NEARER = 3.0  # seconds by which ranks of other nodes wait longer than those of the same, who can say more
TAG = 5  # of beats


class Heartbeat:
    """One rank's beats, sent and awaited while products run."""

    def __init__(
        self, comm: MPI.Intracomm, seen: Sequence[int], identities: Sequence[Identity], timeout: float,
        when_lost: Callable[[], str],
    ) -> None:
        """Collective over `comm`, which is duplicated.

        seen: as `by_sight` says. timeout: seconds of silence after which a rank is lost. when_lost: see `end_job`.
        """
        self._comm: MPI.Intracomm = comm.Dup()
        self.rank, self.identities, self.timeout, self.when_lost = comm.rank, identities, timeout, when_lost
        leaders = [seen.index(number) for number in dict.fromkeys(seen)]
        others = leaders[1:] if self.rank == 0 else [0]
        self.peers = others if self.rank in leaders else []  # whom it hears, and who hear it
        self.limits = {q: timeout + NEARER * (seen.count(seen[q]) > 1) for q in self.peers}
        self.is_first = self.rank in leaders[:2]  # true if it says so when a rank is lost: one of those that remain
        self._beat = min(BEAT, timeout / 4)
        self._rooms = {q: np.zeros(SHOWN, np.uint8) for q in self.peers}
        self._waiting = {q: self._comm.Irecv(room, q, TAG) for q, room in self._rooms.items()}
        self._last = dict.fromkeys(self.peers, b"")  # what each showed last
        self._got = dict.fromkeys(self.peers, 0)  # beats received so far, by rank
        self._sent: dict[int, int] = dict.fromkeys(self.peers, 0)
        self._own = {q: np.zeros(SHOWN, np.uint8) for q in self.peers}
        self._sending: dict[int, MPI.Request] = {}
        self._received_at: dict[int, float] = {}
        self._looked = self._sent_at = 0.0

    def begin(self) -> None:
        """A product begins: everyone was there a moment ago."""
        now = time.monotonic()
        self._looked = self._sent_at = now
        self._received_at = dict.fromkeys(self.peers, now)

    def look(self) -> None:
        """Send and receive due heartbeats, and end the job if a rank has been silent for too long."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        if now - self._looked > self._beat:  # this process itself stood still
            self._received_at = dict.fromkeys(self.peers, now)
        self._looked = now
        for q, request in self._waiting.items():
            if request.Test():
                self._received_at[q], self._last[q] = now, self._rooms[q].tobytes()
                self._got[q] += 1
                self._waiting[q] = self._comm.Irecv(self._rooms[q], q, TAG)
        if now - self._sent_at >= self._beat:
            self._sent_at = now
            self._tell()
        for q, heard in self._received_at.items():
            if now - heard > self.limits[q]:
                self._lose(q)

    def _tell(self) -> None:
        """Send a beat to everyone who has taken the one before."""
        for q in self.peers:
            if q not in self._sending or self._sending[q].Test():
                self._own[q][:] = np.frombuffer(shown(), np.uint8)
                self._sending[q] = self._comm.Isend(self._own[q], q, TAG)
                self._sent[q] += 1

    def _lose(self, lost: int) -> None:
        there, here, last = self.identities[lost], self.identities[self.rank], self._last[lost]
        text = (
            f"nothing was heard of rank {lost} on host {there.host} (process {there.process}) for {self.timeout:g} s "
            f"by rank {self.rank} on host {here.host}: it stands still, or that host or the link to it is gone"
        )
        end_job(text + (f"; it was last in {operation(last)}" if last else ""), self.when_lost, self.is_first)

    def close(self) -> None:
        """Free the communicator. Collective.

        Every beat is received first: one that came later could be taken for a message of a communicator made later.
        """
        sent = self._comm.allgather(self._sent)
        for q, request in self._waiting.items():
            for _ in range(sent[q].get(self.rank, 0) - self._got[q]):
                wait(request)
                request = self._comm.Irecv(self._rooms[q], q, TAG)
            request.Cancel()
            request.Wait()
        for request in self._sending.values():
            wait(request)
        self._comm.Free()

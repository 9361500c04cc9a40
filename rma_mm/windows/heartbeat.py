"""How ranks notice that a host is gone: TCP alone says nothing for minutes when a link drops.

Rank 0 and the first rank of every other node tell each other every few seconds that they are there, and tell the ranks
of their own node. The helper thread does it, so that a long multiply does not look like a dead host.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from rma_mm.windows.waiting import wait

BEAT = 5.0
"""Seconds between two beats."""
PATIENCE = 20.0
"""Seconds of silence after which a rank counts as lost."""
LOOK = 0.2
"""Seconds between two looks for beats."""
TAG = 5
"""Of beats."""
STUCK = 3.0
"""Seconds that MPI_Abort may take before the process ends itself."""


class Heartbeat:
    """One rank's beats, sent and awaited while products run."""

    def __init__(
        self, comm: MPI.Intracomm, node_of: Sequence[int], hosts: Sequence[str], when_lost: Callable[[], str]
    ) -> None:
        """Collective over `comm`, which is duplicated.

        hosts: the names of the ranks' hosts. when_lost: called before the job ends; says what the user will miss.
        """
        self._comm: MPI.Intracomm = comm.Dup()
        self.rank, self.hosts = comm.rank, hosts
        leaders = [node_of.index(node) for node in dict.fromkeys(node_of)]
        leader = node_of.index(node_of[self.rank])
        mates = [q for q, node in enumerate(node_of) if node == node_of[self.rank] and q != leader]
        others = leaders[1:] if self.rank == 0 else [0]
        is_leader = self.rank == leader
        self.heard_by = [*others, *mates] if is_leader else []
        self.listens = others if is_leader else [leader]
        self.speaks = self.rank in leaders[:2]
        """Whether it says so when a rank is lost: one of those that remain."""
        self.when_lost = when_lost
        self._byte = np.zeros(1, np.uint8)
        self._rooms = {q: np.zeros(1, np.uint8) for q in self.listens}
        self._waiting = {q: self._comm.Irecv(room, q, TAG) for q, room in self._rooms.items()}
        self._got = dict.fromkeys(self.listens, 0)
        """Beats received so far, by rank."""
        self._sent: dict[int, int] = dict.fromkeys(self.heard_by, 0)
        self._sending: dict[int, MPI.Request] = {}
        self._heard: dict[int, float] = {}
        self._looked = self._told = 0.0

    def begin(self) -> None:
        """A product begins: everyone was there a moment ago."""
        now = time.monotonic()
        self._looked = self._told = now
        self._heard = dict.fromkeys(self.listens, now)

    def look(self) -> None:
        """Send and receive what is due, and end the job where a rank has been silent for too long."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        if now - self._looked > BEAT:  # this process itself stood still
            self._heard = dict.fromkeys(self.listens, now)
        self._looked = now
        for q, request in self._waiting.items():
            if request.Test():
                self._heard[q] = now
                self._got[q] += 1
                self._waiting[q] = self._comm.Irecv(self._rooms[q], q, TAG)
        if now - self._told >= BEAT:
            self._told = now
            for q in self.heard_by:
                if q not in self._sending or self._sending[q].Test():
                    self._sending[q] = self._comm.Isend(self._byte, q, TAG)
                    self._sent[q] += 1
        for q, heard in self._heard.items():
            if now - heard > PATIENCE:
                self.lose(q)

    def lose(self, lost: int) -> None:
        """End the job because a rank is gone."""
        missing = self.when_lost()
        if self.speaks:
            text = (
                f"rma_mm: nothing was heard of rank {lost} on host {self.hosts[lost]} for {PATIENCE:g} s by rank "
                f"{self.rank} on host {self.hosts[self.rank]}: that host or the link to it is gone; the job ends"
            )
            os.write(2, f"\n{text}{missing and '; ' + missing}\n".encode())
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI_Abort would add a line that says less
        last_resort = threading.Timer(STUCK, os._exit, [1])
        last_resort.daemon = True
        last_resort.start()
        MPI.COMM_WORLD.Abort(1)

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

"""The metrics of a mesh: what its products take and move on each rank, who became slow, and a file that says so.

Ranks count for themselves. In the allreduce that opens a product they tell each other what has to be known at once:
seconds of the slowest rank, how much the least and the most slowed down, a rank or a link that became slow, that a file
is due, and that shares are to be looked at. Compiled calls have no such allreduce: the next one tells of their mean.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from rma_mm.errors import FileFormatError, OptionError, display_path
from rma_mm.runtime.ranks.agreement import agree, agreed
from rma_mm.runtime.ranks.process_group import serialized
from rma_mm.runtime.ranks.rank_state import rank_state
from rma_mm.runtime.watching.relief import Relief
from rma_mm.runtime.watching.slowness import LEAST, Recent, SlowLink, Slowness
from rma_mm.runtime.watching.tally import FAR_LINKS, Tally
from rma_mm.runtime.watching.totals import Totals, require_client
from rma_mm.unfinished import check_target, real_path, write_whole
from rma_mm.windows.base import Counters
from rma_mm.windows.hosts.huge_pages import note_product
from rma_mm.windows.waiting import reduced

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm.geometry.mesh import MeshShape

EVERY = 5.0  # seconds between two writings of the file at least
SHORT = 50_000  # nanoseconds below which a product's multiplies say nothing of a rank
FINE = 1e6  # factor that turns shares into whole numbers for a vote
SILENT = -(2**62)  # told by a rank whose multiplies say nothing
MOST = 1e6  # largest slowdown of a rank that is reported
KINDS = 256  # kinds of products whose usual pace is remembered
BITS = 32  # of a rank in what is told of it
OWN = 3  # number of votes that belong to one product; the others belong to the rank


class ProductFigures(NamedTuple):
    """Time and traffic of one product on this rank."""

    seconds: float
    multiply: float  # seconds in local products
    wait: float  # seconds in waits for transfers and for other ranks
    traffic: Counters


class Watched(Protocol):
    """The properties of a mesh that metrics need."""

    rank: int
    grid: MeshShape
    hosts: list[str]
    fallbacks: list[str]

    @property
    def comm(self) -> MPI.Intracomm:
        """All ranks, those beyond the grid included."""


class Metrics:
    """Time and traffic of the products of a mesh. Counting is local; `collect` and `write` are collective.

    Counting is local; `collect` and `write` are collective.
    """

    def __init__(self, mesh: Watched) -> None:
        self.mesh, self._comm = mesh, mesh.comm
        self.tally = Tally()  # this rank's counts
        self.slowness = Slowness()  # this rank's multiplies
        self.relief = Relief(mesh.grid.size)  # what slow ranks are spared
        self._usual: OrderedDict[Hashable, Recent] = OrderedDict()
        self._last: tuple[int, int, int, Counters] | None = None
        self._links = {link: SlowLink() for link in FAR_LINKS}
        self._used = dict.fromkeys(FAR_LINKS, (0, 0.0))
        self._named: set[object] = set()  # ranks and classes of links that were reported
        self._path = ""
        self._next = 0.0
        self._has_failed = False
        self._moving = 0  # the tally's count of transfers when links were last examined
        self._slow_link = 0  # what is told of one that is slow

    @property
    def last(self) -> ProductFigures | None:
        """Return the figures of the last product; None before it, and on pretended ranks."""
        if self._last is None or rank_state().is_pretended:
            return None
        elapsed, multiplying, waiting, traffic = self._last
        return ProductFigures(1e-9 * elapsed, 1e-9 * multiplying, 1e-9 * waiting, traffic)

    @serialized
    def collect(self) -> Totals | None:
        """Return the counts of all ranks, on rank 0; None on the others. Collective."""
        self._require_real()
        agree(self._comm, "metrics.collect", {})
        return self._gathered()

    @serialized
    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, which is written again every 5 s at most while products go on, and when the mesh is closed.

        In Prometheus' text format, for its textfile collector; whole or not at all. Collective. Raises OptionError
        without prometheus_client, FileFormatError if it cannot be written. What fails later is said once.
        """
        self._require_real()
        with agreed(self._comm, "metrics.write", path=os.fspath(path)):
            require_client()
            if self.mesh.rank == 0:
                check_target(f"metrics {display_path(path)}", path)
        totals = self._gathered()
        with agreed(self._comm, "metrics.write"):
            if totals is not None:
                write_whole(f"metrics {display_path(path)}", path, totals.text())
        self._path, self._next = real_path(path), monotonic() + EVERY

    def _require_real(self) -> None:
        if rank_state().is_pretended:
            raise OptionError("metrics: pretended ranks have no speed; start the program with mpiexec")

    def close(self) -> None:
        """Write the file a last time. Collective."""
        if self._path:
            self._again()
        self._path = ""

    # -- what plans tell --------------------------------------------------------------------------

    def usual(self, kind: Hashable) -> Recent:
        """Return the usual time of products of this kind on this rank; it outlives their plans."""
        found = self._usual.pop(kind, None) or Recent()
        self._usual[kind] = found
        if len(self._usual) > KINDS:
            self._usual.popitem(last=False)
        return found

    def piggyback(self, elapsed: int, relative: float) -> tuple[int, ...]:
        """Return this rank's votes when a product begins; the largest of all ranks counts. See `act_on_votes`."""
        slow, slowness = 0, self.slowness
        if slowness.is_slow and self.mesh.rank not in self._named:
            slow = int(100 * min(slowness.factor, MOST)) << BITS | self.mesh.rank
        is_due = bool(self._path) and self.mesh.rank == 0 and monotonic() >= self._next
        fine = int(FINE * min(relative, MOST))
        known = (-fine, fine) if relative else (SILENT, SILENT)
        return elapsed, *known, slow, self._slow_link, int(is_due), int(self.relief.is_due(slowness.is_slow))

    def act_on_votes(self, told: Sequence[int]) -> None:
        """Name who became slow, on every rank alike; write the file, and follow with shares, where due. Collective."""
        _, _, _, slow, link, is_due, follows, *_ = told
        if not (slow or link or is_due or follows):
            return
        rank = (slow or link) & (1 << BITS) - 1
        if slow:
            self._report(
                rank,
                f"rank {rank} on host {self.mesh.hosts[rank]}: its multiplies take {(slow >> BITS) / 100:.2f} times as "
                f"long as in its products before; look for other programs, heat and limits of power there",
            )
        elif link:
            name = FAR_LINKS[(link >> BITS) - 1]
            self._report(
                name,
                f"link {name}: rank {rank} on host {self.mesh.hosts[rank]} gets less than half of the calibrated "
                f"bandwidth in product after product; look at the {_SUSPECTS[name]}, or calibrate again",
            )
        if is_due:
            self._again()
        if follows:
            paces = self._comm.allgather((self.slowness.pace, self.slowness.is_slow))
            self.relief.follow(paces[: self.mesh.grid.size])

    def changed_plan(self, *notes: str) -> None:
        """A repeated product goes on with another plan, for which there are these notes, or as ranks became slow."""
        self.tally.plan_changes += 1
        self.mesh.fallbacks.extend(notes)
        for rank, steps in enumerate(self.relief.steps):
            if steps:
                self._report(
                    ("share", rank),
                    f"rank {rank} on host {self.mesh.hosts[rank]}: its share of the work shrinks until it keeps up, "
                    f"and grows back when it is no longer slow",
                )

    def note(self, elapsed: int, multiplying: int, waiting: int, traffic: Counters) -> None:
        """Record a product's nanoseconds, in total, in multiplies and in waits, and its traffic."""
        tally = self.tally
        tally.products += 1
        tally.nanoseconds += elapsed
        total = tally.traffic
        total.words_intra += traffic.words_intra
        total.words_inter += traffic.words_inter
        total.messages += traffic.messages
        total.messages_inter += traffic.messages_inter
        self._last = elapsed, multiplying, waiting, traffic
        note_product(elapsed)
        if tally.moving != self._moving:
            self._moving = tally.moving
            self._look_at_links()

    def _look_at_links(self) -> None:
        self._slow_link = 0
        for n, (link, use) in enumerate(self.tally.links.items()):
            busy, expected = self._used[link]
            if use.busy > busy:
                self._links[link].note((use.expected - expected) / (use.busy - busy))
                self._used[link] = use.busy, use.expected
            if self._links[link].is_slow and link not in self._named:
                self._slow_link = (n + 1) << BITS | self.mesh.rank

    # -- all ranks together -----------------------------------------------------------------------

    def _report(self, what: object, text: str) -> None:
        if what not in self._named:
            self._named.add(what)
            self.mesh.fallbacks.append(text)

    def _gathered(self) -> Totals | None:
        """Return the counts of all ranks, on rank 0. Collective, among ranks that have agreed."""
        tallies = self._comm.gather(self.tally)
        return None if tallies is None else Totals(tallies, self.mesh.hosts, self.mesh.grid.size)

    def _again(self) -> None:
        """Write the file again; that it cannot be is said once. Collective, among ranks that have agreed."""
        totals = self._gathered()
        self._next = monotonic() + EVERY
        if totals is None:
            return
        try:
            write_whole(f"metrics {display_path(self._path)}", self._path, totals.text())
        except FileFormatError as error:
            if not self._has_failed:
                sys.stderr.write(f"rma_mm: {error}; the job goes on\n")
                sys.stderr.flush()
            self._has_failed = True


_SUSPECTS = {
    "node": "memory and processors of that host: other programs, and where its ranks are bound",
    "between": "network of that host: its link speed, errors, and who else uses it",
}


class ProductWatch:
    """The products of one plan, as the metrics of its mesh see them."""

    def __init__(self, metrics: Metrics, kind: Hashable) -> None:
        self.metrics = metrics
        self.exchanges = 0  # how often ranks told each other
        self.last_seconds = 0.0
        """Seconds of the product before the last on the slowest rank, known when ranks next meet."""
        self.was_slow = False  # true if that was as multiplies took longer than usual on some rank
        self._usual = metrics.usual(kind)
        self._products = self._elapsed = self._multiplied = 0
        self._work = 0.0
        self._pace = 0.0

    def piggyback(self) -> tuple[int, ...]:
        """Return this rank's votes when the next product begins: of those since the votes before, the mean."""
        slowness, multiplied, work = self.metrics.slowness, self._multiplied, self._work
        slowness.seen = self._usual
        self._pace = multiplied / work if multiplied > SHORT and work else 0.0
        return self.metrics.piggyback(self._elapsed // (self._products or 1), slowness.relative(self._pace))

    def act_on_votes(self, told: Sequence[int]) -> None:
        self.exchanges += 1
        self.last_seconds, self.was_slow = 1e-9 * told[0], told[2] > LEAST * FINE
        slowness = self.metrics.slowness
        slowness.seen = self._usual  # ranks may have told of several products at once
        if self._pace:
            slowness.note(self._pace, -told[1] / FINE, 1e-9 * self._elapsed)
            self.metrics.tally.is_slow = slowness.is_slow
        self._products = self._elapsed = self._multiplied = 0
        self._work = 0.0
        self.metrics.act_on_votes(told)

    def note(self, elapsed: int, multiplying: int, waiting: int, work: float, traffic: Counters) -> None:
        """Record a product: nanoseconds in total, in multiplies and in waits, multiply-adds, and traffic."""
        self._products += 1
        self._elapsed += elapsed
        self._multiplied += multiplying
        self._work += work
        self.metrics.note(elapsed, multiplying, waiting, traffic)


def tell_together(comm: MPI.Intracomm, watches: Sequence[ProductWatch]) -> None:
    """Exchange the votes of several successive products at once. Collective, if there are any."""
    if not watches:
        return
    told = np.array([watch.piggyback() for watch in watches], np.int64)
    reduced(comm, told, "MAX")
    for n, (watch, each) in enumerate(zip(watches, told.tolist(), strict=True)):
        watch.act_on_votes(each if n == 0 else [*each[:OWN], *[0] * (len(each) - OWN)])

"""Check accumulates: compare each home with the sum of what ranks added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.reduction import REDUCTIONS
from rma_mm.runtime.execution.addressing import Places
from rma_mm.runtime.ranks.arena import Block
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.schedule import STAGE
from rma_mm.windows import Checks
from rma_mm.windows.checks.poison import differing
from rma_mm.windows.waiting import barrier

Array = NDArray[Any]


class Entry(NamedTuple):
    """A contribution of one rank to another rank's home."""

    home: str
    rows: NDArray[np.int64]  # positions in the target's array, as it is stored
    cols: NDArray[np.int64]
    values: Array
    op: str
    what: str


class Pushes:
    """All accumulates of one executable. Its calls are collective over the ranks of the grid.

    Its calls are collective over the ranks of the grid.
    """

    def __init__(self, mesh: Mesh, checks: Checks, places: Places) -> None:
        self.mesh, self.checks, self.places = mesh, checks, places
        names = [name for name in places.schedule.homes if name == "C" or name.endswith(STAGE)]
        found = {name: places.block(name, summing=True)[0] for name in names}
        self.blocks: dict[str, Block] = {name: block for name, block in found.items() if block is not None}
        self.before: dict[str, Array] = {}  # contents of this rank's homes when the ranks last met

    def begin(self) -> None:
        """Begin a run or a phase of it: no rank adds before every rank has saved its homes."""
        self.checks.pushed.clear()
        self.before = {name: block.local.copy() for name, block in self.blocks.items()}
        barrier(self.mesh.active)

    def meeting(self, meet: Callable[[], None]) -> Callable[[], None]:
        """Return a barrier of the schedule that compares the homes with what was added."""

        def checked() -> None:
            meet()
            self.compare()
            self.begin()

        return checked

    def end(self) -> None:
        barrier(self.mesh.active)
        self.compare()

    def compare(self) -> None:
        """Record where this rank's homes differ from their old content plus the contributions."""
        to: list[list[Entry]] = [[] for _ in range(self.mesh.active.size)]
        for push in self.checks.pushed:
            name = next(x for x, b in self.blocks.items() if b.key == (push.window, push.target.offset))
            box = push.target.rows.indices, push.target.cols.indices
            to[push.rank].append(Entry(name, *box, push.values, push.op, push.what))
        came = self.mesh.active.alltoall(to)
        for name, block in self.blocks.items():
            added = [(rank, entry) for rank, entries in enumerate(came) for entry in entries if entry.home == name]
            if added:
                self.checks.findings += self.wrong(name, block, added)

    def wrong(self, name: str, block: Block, added: list[tuple[int, Entry]]) -> Iterable[str]:
        """Yield the faults of one home; nothing if it is right."""
        first = added[0][1].values.dtype  # keys of floats are integers
        local, total = block.local.view(first), Total(self.before[name].view(first))
        for _, entry in added:
            total.add(entry)
        wrong = total.differs(local)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            who = sorted({rank for rank, entry in added if at[0] in entry.rows and at[1] in entry.cols})
            rows, cols = self.places.schedule.home(name, self.mesh.rank)
            place = at[::-1] if self.places.block(name, summing=True)[1] else at
            yield (
                f"{added[0][1].what}: {wrong.sum()} elements of {name} on rank {self.mesh.rank} are not what was added "
                f"up: {name}[{rows.indices[place[0]]}, {cols.indices[place[1]]}] is {local[at]}, and what it was with "
                f"what ranks {who} added is {total.value[at]}"
            )


class Total:
    """The expected content of an array."""

    def __init__(self, before: Array) -> None:
        self.value = before.copy()
        self.size = np.abs(before) if self.rounds else np.zeros(0)  # the magnitudes of all that was added up
        self.terms = np.zeros(before.shape, np.int64)

    @property
    def rounds(self) -> bool:
        return self.value.dtype.kind in "fc"

    def add(self, entry: Entry) -> None:
        box = np.ix_(entry.rows, entry.cols)
        with np.errstate(all="ignore"):
            self.value[box] = REDUCTIONS[entry.op].add(self.value[box], entry.values)
            if self.rounds:
                self.size[box] += np.abs(entry.values)
        self.terms[box] += 1

    def differs(self, actual: Array) -> NDArray[np.bool_]:
        """Return the elements that differ from the expected ones, among those that were added to."""
        if not self.rounds:
            return differing(actual, self.value) & (self.terms > 0)
        info = np.finfo(self.value.dtype)
        with np.errstate(all="ignore"):
            allowed = 2 * float(info.eps) * self.terms * self.size + float(info.tiny)
            close = np.abs(actual - self.value) <= allowed
            free = ~(self.size < float(info.max) / 4)  # an order of sums may overflow where another does not
            wrong: NDArray[np.bool_] = ~(close | free) & (self.terms > 0)
        return wrong

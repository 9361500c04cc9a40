"""Calls of the ranks of a node that are repeated: they meet in shared memory, and a compiled function does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rma_mm.kernels.product import Product
from rma_mm.runtime.ranks.agreement import Ballot, abortable
from rma_mm.windows.boxes.copying import CopyTransfer
from rma_mm.windows.hosts.liveness import BEGIN, DOING, END, MULTIPLY, MeetingLine, cell_address
from rma_mm.windows.waiting import poll, wait_until

if TYPE_CHECKING:
    from rma_mm.runtime.ranks.mesh import Mesh

BUDGET = 1_000_000
"""Nanoseconds of a wait in compiled code, which neither hears signals nor gives MPI progress."""


def open_line(mesh: Mesh) -> MeetingLine | None:
    """Return this rank's line of the mesh's group, which is made when first wanted; None if ranks cannot see them all.

    Collective.
    """
    group = mesh.group
    if group.line is not None:
        return group.line
    line, mates = None, mesh.mates
    if len(mates) == mesh.size - 1:
        with suppress(IndexError):
            line = MeetingLine()
    offsets: list[int | None] = mesh.comm.allgather(None if line is None else line.offset)
    if line is None or None in offsets:
        if line is not None:
            line.close()
        return None
    line.others = [mate.address + (offsets[rank] or 0) for rank, mate in mates.items()]
    group.line = line
    return line


class NodeCall:
    """An execution on ranks of one node that have agreed on it before, as one compiled call. Collective to call."""

    def __init__(
        self, mesh: Mesh, line: MeetingLine, ballot: Ballot, digest: int, steps: Sequence[Product | CopyTransfer]
    ) -> None:
        """Compile, or load what was compiled. Raises TypeError if that is not known for such steps.

        digest: of the arguments, as ranks would vote with `ballot`.
        """
        from rma_mm.kernels.calls import cells, compiled_calls

        spins = cells.SHARED_CORE if mesh.shares_cores else cells.OWN_CORE
        activity = cell_address(DOING), BEGIN, MULTIPLY, END
        each: list[Product | compiled_calls.Pair] = []
        for step in steps:
            each += [step] if isinstance(step, Product) else step.pairs or []
        value = digest ^ ballot.salt
        self._calls = compiled_calls.CompiledCalls(
            each, value, mesh.threads, line.address, line.others, activity, spins, BUDGET
        )
        self._before, self._behind = cells.BEFORE, cells.BEHIND
        self._ballot, self._group = ballot, mesh.group

    def __call__(self) -> bool:
        """Make the call; False, with nothing done, if another rank is in another call, or does not call so."""
        self._group.calls += 1
        return self._calls(self._group.calls) or self._finish()

    @property
    def took(self) -> tuple[int, int, int, int]:
        """Return nanoseconds of the last call: in total, in copies, in products, and in waiting for the end."""
        return self._calls.took

    def _finish(self) -> bool:
        """Go on where ranks are late, or return False where one is in another call."""
        if self._calls.stage == self._before:
            self._ballot.wait(self._goes_on)
        if self._calls.stage == self._behind:
            with abortable(self._group, self):
                wait_until(self._goes_on)
        if not self._calls.is_done:
            self._group.calls -= 1  # the caller enters it again
        return self._calls.is_done

    def _goes_on(self) -> bool:
        poll()
        return self._calls.go_on()

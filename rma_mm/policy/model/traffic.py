"""Workload of a product, in phases: the words that move and the products that are formed.

A workload is a list of phases, as lowering makes them: summing partial operands, staging operands where the algorithm
wants them, the walk itself, pushing C, gathering a replicated C. Every figure is one for each rank that is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.locality import WHOLE, RankSample
from rma_mm.policy.model.spans import Figures

FLAT = 4  # ranks up to which a broadcast goes to each directly; beyond, down a tree
READ = "read"  # how what stays in a file comes


@dataclass(frozen=True, eq=False)
class TrafficItem:
    """Words of one operand that move in one way."""

    x: str  # A, B or C
    how: str  # here, view, get, accumulate, `READ`, or what a group does
    own: Figures  # words from or to a rank's own memory, by whatever moves them; 0 if they stay
    node: Figures  # words of other ranks of the node
    between: Figures  # words of other nodes
    messages: Figures  # transfers of a rank
    group: int = 1  # ranks that move it together
    run: float = WHOLE  # words that lie together on their way, on average
    rounds: Figures | float = 1.0
    """Factor by which the wire of a node is busy longer than its own traffic takes, while others rest."""
    served: Figures | float = 0.0  # words that go to, or come from, other nodes because of what a rank holds
    passed: Figures | None = None
    """Words that go the other way between a rank and its node-mates; None if those are as many."""
    skips_turn: bool = False  # true if nothing of it moves for the first turn of the walk, or for the last


@dataclass(frozen=True, eq=False)
class LocalWork:
    extents: tuple[Figures, Figures, Figures]  # m, n, k of a rank's box
    pieces: tuple[Figures, Figures, Figures]  # into how many pieces each is cut
    columns: Figures  # columns of the memory that a rank's products are added to


@dataclass(eq=False)
class Phase:
    """Traffic and work between two meetings of all ranks."""

    moved: list[TrafficItem] = field(default_factory=list)
    work: LocalWork | None = None
    steps: Figures | float = 1.0
    """Turns of the walk: what is moved for one goes on while the one before is multiplied."""
    claims: float = 0.0  # tickets that a rank draws
    is_shared: bool = False  # true if work falls to whoever is free, rather than as the work map says
    opened: Figures | float = 0.0  # words of C that a rank sets to zero, or scales, by itself
    barriers: int = 0  # meetings at its end


@dataclass(frozen=True, eq=False)
class Workload:
    sample: RankSample
    phases: list[Phase]
    elements_held: Figures  # elements that a rank holds
    on: Callable[[MeshShape], Workload] | None = None
    """The same on ranks that live elsewhere: on groups of nodes for nodes it tells what goes between those."""


@dataclass(frozen=True)
class Traffic:
    """Words of a whole product, all ranks together."""

    between: float = 0  # words that cross nodes
    within: float = 0  # words copied or added within nodes
    in_place: float = 0  # words of node-mates that are multiplied where they lie
    messages: float = 0  # transfers
    busiest: float = 0  # words of the rank that moves most
    elements_held: float = 0
    """Elements that the fullest rank holds: its parts of the operands, what they are brought to, and panels."""
    read: float = 0  # words that are read from files

    @property
    def words(self) -> float:
        """All words of other ranks that are moved, or read where they lie."""
        return self.between + self.within + self.in_place


NO_TRAFFIC = Traffic()  # of what moves nothing


def traffic(workload: Workload) -> Traffic:
    total = workload.sample.mesh.size
    between = within = in_place = messages = read = 0.0
    busiest = np.zeros(workload.sample.count)
    for moved in (each for phase in workload.phases for each in phase.moved):
        node, other, calls = (workload.sample.mean(x) * total for x in (moved.node, moved.between, moved.messages))
        between += other
        messages += calls
        within, in_place = (within, in_place + node) if moved.how == "view" else (within + node, in_place)
        busiest = busiest + moved.node + moved.between
        read += workload.sample.mean(moved.own) * total if moved.how == READ else 0.0
    return Traffic(between, within, in_place, messages, float(busiest.max()), float(workload.elements_held.max()), read)

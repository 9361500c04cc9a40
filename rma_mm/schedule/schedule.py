"""A schedule: every rank's operations, and the matrices whose tiles they work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region
from rma_mm.schedule.ops import Barrier, Claim, Op, Ref
from rma_mm.schedule.symmetry import Symmetry

STAGE = "+"  # suffix of the name of a matrix that a plan adds: an operand summed, or brought to another placement


@dataclass(frozen=True)
class Home:
    """A matrix whose tiles live on the ranks, or that stays in a file which every rank reads."""

    shape: tuple[int, int]
    layout: Layout
    is_file: bool = False


@dataclass(frozen=True)
class Pool:
    """Tasks that any rank may run, handed out by ticket."""

    tasks: int  # number of tasks; tickets 0…tasks − 1
    program: Callable[[int, int], list[Op]]  # program(task, rank): the operations of a task when `rank` runs it


@dataclass(frozen=True, eq=False)
class Schedule:
    """Every rank's operations, generated on demand, at a cost of that rank's own steps."""

    mesh: MeshShape
    homes: dict[str, Home]  # A, B and C, and the matrices a plan adds (A+, B+: operands summed, or placed otherwise)
    program: Callable[[int], list[Op]]  # program(rank): that rank's operations in order
    shape: tuple[int, int, int] | None = None  # (m, n, k) of the product; None for a pure redistribution of A into C
    pool: Pool | None = None
    computed: Layout | None = None
    """Layout in which ranks open and finish C, if replicas do not divide it in the usual way."""
    symmetry: Symmetry | None = None
    """The symmetry by which parts of C are mirrored rather than multiplied; None if no part may be."""

    @property
    def output_layout(self) -> Layout:
        return self.computed or self.homes["C"].layout.split_replicas(self.mesh)

    def home(self, buffer: str, rank: int) -> Region:
        """Return the box of the home matrix `buffer` that `rank` holds."""
        home = self.homes[buffer]
        return home_region(home.layout, home.shape, self.mesh, rank)

    def in_memory(self, buffer: str, rank: int) -> int:
        return 0 if self.homes[buffer].is_file else self.home(buffer, rank).size

    def is_in_file(self, ref: Ref) -> bool:
        return isinstance(ref.buffer, str) and self.homes[ref.buffer].is_file

    def holds(self, ref: Ref) -> Region:
        return self.home(ref.buffer, ref.rank) if isinstance(ref.buffer, str) else ref.buffer.region


def remembered(schedule: Schedule) -> Schedule:
    return replace(schedule, program=lru_cache(maxsize=1)(schedule.program))


@lru_cache(maxsize=4096)
def home_region(layout: Layout, shape: tuple[int, int], mesh: MeshShape, rank: int) -> Region:
    return layout.region(shape, mesh, rank)


def expand(schedule: Schedule, rank: int, claims: Iterable[int] | None = None) -> list[Op]:
    """Return the rank's operations with its Claim replaced by the tasks it runs: `claims`, or every size-th."""
    ops: list[Op] = []
    for op in schedule.program(rank):
        if isinstance(op, Claim) and schedule.pool:
            mine = range(rank, schedule.pool.tasks, schedule.mesh.size) if claims is None else claims
            ops += [inner for task in mine for inner in schedule.pool.program(task, rank)]
        else:
            ops.append(op)
    return ops


def epochs_of(ops: list[Op]) -> list[list[Op]]:
    epochs: list[list[Op]] = [[]]
    for op in ops:
        if isinstance(op, Barrier):
            epochs.append([])
        else:
            epochs[-1].append(op)
    return epochs

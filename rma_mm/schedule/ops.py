"""The operations of a schedule, all on regions in global coordinates, and the schedule itself.

Everything an algorithm does is a list of these per rank. Four readers understand them: `verify`, `interpret`,
the policy floor (prices) and the executor. None of them knows an algorithm's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape
from rma_mm.geometry.span import Region


@dataclass(frozen=True, slots=True)
class Slot:
    """Scratch memory of one rank, and what it holds for the time being."""

    name: str
    """Its own name among all that the rank ever uses; the first letter is the operand (A, B or C)."""
    region: Region
    """What it holds, as one dense array."""
    frame: str = ""
    """The frame of the scratch pool that it takes; slots that are never alive together share one."""
    group: tuple[int, ...] = ()
    """Ranks of one node that fill and read it together, where there are several."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A box of a home matrix (`buffer` is its name) or of a scratch slot, on one rank."""

    rank: int
    buffer: str | Slot
    region: Region

    def __str__(self) -> str:
        name = self.buffer if isinstance(self.buffer, str) else f"[{self.buffer.frame or self.buffer.name}]"
        return f"{name}@{self.rank}[{', '.join(map(str, self.region))}]"


@dataclass(frozen=True, slots=True)
class Copy:
    """One-sided get. Starts where it stands; may land at any moment up to the first operation that reads `dst`."""

    src: Ref
    dst: Ref
    step: int

    def __str__(self) -> str:
        return f"{self.dst} := {self.src}"


@dataclass(frozen=True, slots=True)
class Multiply:
    """Local product c (+)= alpha · a @ b. `first` overwrites c, so that nothing is read from it."""

    a: Ref
    b: Ref
    c: Ref
    first: bool
    step: int

    def __str__(self) -> str:
        return f"{self.c} {':=' if self.first else '+='} {self.a} @ {self.b}"


@dataclass(frozen=True, slots=True)
class Accumulate:
    """One-sided, element-wise atomic add of `src` into the owner's `dst`; complete at the next barrier."""

    src: Ref
    dst: Ref
    step: int

    def __str__(self) -> str:
        return f"{self.dst} +<- {self.src}"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Copies that all ranks of a group would make at once: every owner sends its parts to all the others.

    With one owner it is a broadcast, with several an all-gather. Made by a pass only, from Copies.
    """

    parts: tuple[Ref, ...]
    """Boxes of homes of ranks of the group, in one order for all of them."""
    dst: Ref | None
    """Where this rank puts the parts of others; None where all are its own."""
    group: tuple[int, ...]
    step: int

    @property
    def kind(self) -> str:
        """What it is called."""
        return "broadcast" if len({part.rank for part in self.parts}) == 1 else "all-gather"

    def arriving(self, rank: int) -> list[tuple[int, Ref]]:
        """(owner, place) of every part that comes to `rank`."""
        if self.dst is None:
            return []
        buffer = self.dst.buffer
        return [(part.rank, Ref(rank, buffer, part.region)) for part in self.parts if part.rank != rank]

    def __str__(self) -> str:
        return f"{self.dst or 'others'} := {self.kind} of {', '.join(map(str, self.parts))} in {self.group}"


@dataclass(frozen=True, slots=True)
class Shift:
    """One step of a ring: `src` goes to one neighbour while `dst` comes from the other. Made by a pass only."""

    src: Ref
    dst: Ref
    to: int
    source: int
    """The rank that `dst` comes from."""
    step: int

    def __str__(self) -> str:
        return f"{self.dst} := shift from {self.source}, {self.src} to {self.to}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Accumulates that all ranks of a group would make at once, one from each, summed on the way.

    With one owner it is a reduce, with several a reduce-scatter. Made by a pass only, from Accumulates. A home is added
    to; a slot then holds the sum alone.
    """

    srcs: tuple[Ref, ...]
    """This rank's summands, each a dense part of a slot."""
    dsts: tuple[Ref, ...]
    """The boxes that they belong to, of homes or of slots, in one order for all ranks of the group."""
    group: tuple[int, ...]
    step: int

    @property
    def kind(self) -> str:
        """What it is called."""
        return "reduce" if len({dst.rank for dst in self.dsts}) == 1 else "reduce-scatter"

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.dsts))} +<- {self.kind} of {', '.join(map(str, self.srcs))} in {self.group}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Open a region of the rank's own home or scratch: times beta where `keep`, else zero without reading."""

    c: Ref
    keep: bool
    step: int

    def __str__(self) -> str:
        return f"{self.c} := {'beta * ' + str(self.c) if self.keep else '0'}"


@dataclass(frozen=True, slots=True)
class Finish:
    """Close a region of the rank's own C, once: cast from the accumulator to the result."""

    c: Ref
    step: int

    def __str__(self) -> str:
        return f"finish {self.c}"


@dataclass(frozen=True, slots=True)
class Barrier:
    """All ranks: every Accumulate and store before it is visible to every read after it."""

    step: int

    def __str__(self) -> str:
        return "barrier"


@dataclass(frozen=True, slots=True)
class Post:
    """Count up this rank's `event`, once what it did before is over: of its Copies, those into `filled`."""

    event: str
    filled: Slot | None
    step: int

    def __str__(self) -> str:
        return f"post {self.event}"


@dataclass(frozen=True, slots=True)
class Await:
    """Go on once every rank of `group` has posted `event` `count` times."""

    event: str
    group: tuple[int, ...]
    count: int
    step: int

    def __str__(self) -> str:
        return f"await {self.event} {self.count} times of each of {self.group}"


@dataclass(frozen=True, slots=True)
class Claim:
    """Take tasks of the schedule's pool by fetch-and-add until none is left, running each."""

    step: int

    def __str__(self) -> str:
        return "claim tasks until none is left"


STAGE = "+"
"""Suffix of the name of a matrix that a plan adds: an operand summed, or brought to another placement."""

Op = Copy | Multiply | Accumulate | Broadcast | Shift | Reduce | Scale | Finish | Barrier | Post | Await | Claim


@dataclass(frozen=True)
class Home:
    """A matrix whose tiles live on the ranks."""

    shape: tuple[int, int]
    layout: Layout


@dataclass(frozen=True)
class Pool:
    """Tasks that any rank may run, handed out by ticket."""

    tasks: int
    """Number of tasks; tickets 0…tasks − 1."""
    program: Callable[[int, int], list[Op]]
    """program(task, rank): the operations of a task when `rank` runs it."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Every rank's operations, generated on demand, at a cost of that rank's own steps."""

    mesh: MeshShape
    homes: dict[str, Home]
    """A, B and C, and the matrices a plan adds (A+, B+: operands summed, or placed otherwise)."""
    program: Callable[[int], list[Op]]
    """program(rank): that rank's operations in order."""
    shape: tuple[int, int, int] | None = None
    """(m, n, k) of the product; None for a pure redistribution of A into C."""
    pool: Pool | None = None
    computed: Layout | None = None
    """What each rank opens and finishes of C, where it is not what replicas share out by themselves."""

    @property
    def share(self) -> Layout:
        """What each rank opens and finishes of C; the others take it from there."""
        return self.computed or self.homes["C"].layout.unshared(self.mesh)

    def home(self, buffer: str, rank: int) -> Region:
        """The box of the home matrix `buffer` that `rank` holds."""
        home = self.homes[buffer]
        return held(home.layout, home.shape, self.mesh, rank)

    def holds(self, ref: Ref) -> Region:
        """The box that the buffer behind `ref` stores as one dense array."""
        return self.home(ref.buffer, ref.rank) if isinstance(ref.buffer, str) else ref.buffer.region


def remembered(schedule: Schedule) -> Schedule:
    """The same schedule, which keeps the operations of the rank that it was last asked for."""
    return replace(schedule, program=lru_cache(maxsize=1)(schedule.program))


@lru_cache(maxsize=4096)
def held(layout: Layout, shape: tuple[int, int], mesh: MeshShape, rank: int) -> Region:
    """`layout.region`, remembered: schedules ask for the same few homes again and again."""
    return layout.region(shape, mesh, rank)


def expand(schedule: Schedule, rank: int, claims: Iterable[int] | None = None) -> list[Op]:
    """The rank's operations with its Claim replaced by the tasks it runs: `claims`, or every size-th."""
    ops: list[Op] = []
    for op in schedule.program(rank):
        if isinstance(op, Claim) and schedule.pool:
            mine = range(rank, schedule.pool.tasks, schedule.mesh.size) if claims is None else claims
            ops += [inner for task in mine for inner in schedule.pool.program(task, rank)]
        else:
            ops.append(op)
    return ops


def epochs_of(ops: list[Op]) -> list[list[Op]]:
    """The operations between barriers."""
    epochs: list[list[Op]] = [[]]
    for op in ops:
        if isinstance(op, Barrier):
            epochs.append([])
        else:
            epochs[-1].append(op)
    return epochs


def foreign(op: Op, rank: int) -> list[tuple[int, int, bool]]:
    """What `op` moves across ranks when `rank` runs it: (other rank, words, whether it is a message).

    What a group moves counts where it is received, sums where they are sent.
    """
    if isinstance(op, Copy):
        moved = [(op.src.rank, op.src.region.size, True)]
    elif isinstance(op, Accumulate):
        moved = [(op.dst.rank, op.dst.region.size, True)]
    elif isinstance(op, Multiply):
        moved = [(ref.rank, ref.region.size, False) for ref in (op.a, op.b)]
    elif isinstance(op, Broadcast):
        moved = [(owner, place.region.size, True) for owner, place in op.arriving(rank)]
    elif isinstance(op, Shift):
        moved = [(op.source, op.dst.region.size, True)]
    elif isinstance(op, Reduce):
        moved = [(dst.rank, dst.region.size, True) for dst in op.dsts]
    else:
        moved = []
    return [(other, words, message) for other, words, message in moved if other != rank]


def outgoing(op: Op, rank: int) -> list[tuple[int, Ref]]:
    """What `rank` sends in a group's operation: (to whom, which of its own memory)."""
    if isinstance(op, Broadcast):
        mine = [part for part in op.parts if part.rank == rank]
        return [(member, part) for part in mine for member in op.group if member != rank]
    if isinstance(op, Shift):
        return [(op.to, op.src)]
    if isinstance(op, Reduce):
        return [(dst.rank, src) for src, dst in zip(op.srcs, op.dsts, strict=True) if dst.rank != rank]
    return []


def incoming(op: Op, rank: int) -> list[tuple[int, Ref]]:
    """What comes to `rank` in a group's operation: (from whom, where it goes); a Reduce adds it."""
    if isinstance(op, Broadcast):
        return op.arriving(rank)
    if isinstance(op, Shift):
        return [(op.source, op.dst)]
    if isinstance(op, Reduce):
        mine = [dst for dst in op.dsts if dst.rank == rank]
        return [(member, dst) for dst in mine for member in op.group if member != rank]
    return []

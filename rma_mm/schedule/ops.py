"""The operations of a schedule, all on regions in global coordinates.

Everything an algorithm does is a list of these per rank. Four readers understand them: `verify`, `interpret`, the
simulator and the executor. None knows an algorithm's name. An operation says of itself what it touches and what it
moves; what else a reader does for each is in a table of its own (`rma_mm.schedule.dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from rma_mm.classes import dataclass
from rma_mm.geometry.span import Region
from rma_mm.schedule.symmetry import FINISHED


@dataclass(frozen=True, slots=True)
class Slot:
    """Scratch memory of one rank with its present content."""

    name: str
    """Its own name among all that the rank ever uses; the first letter is the operand (A, B or C), or `FINISHED`."""
    region: Region  # what it holds, as one dense array
    frame: str = ""  # the frame of the scratch pool that it takes; slots that are never alive together share one
    group: tuple[int, ...] = ()  # ranks of one node that fill and read it together, where there are several


@dataclass(frozen=True, slots=True)
class Ref:
    """A box of a home matrix (`buffer` is its name) or of a scratch slot, on one rank."""

    rank: int
    buffer: str | Slot
    region: Region

    @property
    def operand(self) -> str:
        """The operand that it is a part of: A, B or C."""
        letter = (self.buffer if isinstance(self.buffer, str) else self.buffer.name)[0]
        return "C" if letter == FINISHED else letter

    def on(self, new: Callable[[Slot], Slot]) -> Ref:
        return self if isinstance(self.buffer, str) else replace(self, buffer=new(self.buffer))

    @property
    def place(self) -> str:
        return f"home {self.buffer}" if isinstance(self.buffer, str) else self.buffer.frame

    def __str__(self) -> str:
        name = self.buffer if isinstance(self.buffer, str) else f"[{self.buffer.frame or self.buffer.name}]"
        return f"{name}@{self.rank}[{', '.join(map(str, self.region))}]"


class TransferSpec(NamedTuple):
    """A box that one rank moves to another, or to itself."""

    kind: str
    """get, accumulate, broadcast, all-gather, shift, reduce or reduce-scatter; view: it is read where it lies."""
    source: int
    src: Ref | None  # source; None if only another rank knows it
    to: int
    dst: Ref | None  # destination; None if only another rank knows it, or the data is only read
    adds: bool = False

    @property
    def ref(self) -> Ref:
        """The box, where it goes or else if it comes from."""
        ref = self.dst or self.src
        assert ref is not None
        return ref


class Op:
    """An operation of one rank at one step. It knows the references it touches and the data it moves.

    It knows what it touches, and what it moves.
    """

    __slots__ = ()
    kind: ClassVar[str]  # name in traces; for transfers, the movement that is priced
    adds: ClassVar[bool] = False  # true if it adds what it moves to what others computed
    is_dense: ClassVar[bool] = False
    """True if each of its boxes must be one dense part of its buffer: transfers may gather and scatter."""
    ref_fields: ClassVar[tuple[str, ...]] = ()  # its fields that are a Ref, or None
    step: int

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple([getattr(self, name) for name in self.ref_fields])

    @property
    def slots(self) -> list[Slot]:
        return [ref.buffer for ref in self.refs if isinstance(ref.buffer, Slot)]

    def on_slots(self, new: Callable[[Slot], Slot]) -> Op:
        changed: dict[str, Any] = {name: ref.on(new) for name in self.ref_fields if (ref := getattr(self, name))}
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    def ahead(self, depth: int) -> int | None:
        return None

    def moves(self, rank: int) -> list[TransferSpec]:
        return []


@dataclass(frozen=True, slots=True)
class OneSidedOp(Op):
    """A transfer between this rank's memory and a home, for which its owner does nothing."""

    src: Ref
    dst: Ref
    step: int
    ref_fields: ClassVar[tuple[str, ...]] = ("src", "dst")

    @property
    def remote(self) -> Ref:
        return self.dst if self.adds else self.src

    @property
    def local(self) -> Ref:
        return self.src if self.adds else self.dst

    def moves(self, rank: int) -> list[TransferSpec]:
        source, to = (rank, self.dst.rank) if self.adds else (self.src.rank, rank)
        return [TransferSpec(self.kind, source, self.src, to, self.dst, self.adds)]

    def __str__(self) -> str:
        return f"{self.dst} {'+<-' if self.adds else ':='} {self.src}"


class GroupOp(Op):
    """An operation of a group of ranks, each with its own part. Made by a pass only."""

    __slots__ = ()
    group: tuple[int, ...]
    dst: Ref | None

    @property
    def origins(self) -> tuple[Ref, ...]:
        """The homes in which all that it brings lies from the beginning; none of sums."""
        return ()

    def may_copy(self, nodes: Sequence[int]) -> bool:
        """True if each rank of the group can do its `copies` instead, where it loads its node-mates' memory."""
        return bool(self.origins) and len({nodes[rank] for rank in self.group}) == 1

    def copies(self, rank: int) -> list[Copy]:
        theirs = [ref for ref in self.origins if ref.rank != rank]
        return [Copy(ref, replace(self.dst, region=ref.region), self.step) for ref in theirs if self.dst]


class LocalOp(Op):
    """A local computation, with its own `c` as the result."""

    __slots__ = ()
    ref_fields: ClassVar[tuple[str, ...]] = ("c",)
    is_dense: ClassVar[bool] = True
    c: Ref


class Copy(OneSidedOp):
    """One-sided get. Starts where it stands; may land at any moment up to the first operation that reads `dst`."""

    __slots__ = ()
    kind: ClassVar[str] = "get"

    def ahead(self, depth: int) -> int:
        return depth


@dataclass(frozen=True, slots=True)
class Multiply(LocalOp):
    """Local product c (+)= alpha · a @ b. `first` overwrites c, so that nothing is read from it."""

    a: Ref
    b: Ref
    c: Ref
    first: bool
    step: int
    half: bool = False
    """True if just what lies on and below the diagonal of c, a square on it, is multiplied; a Mirror sets the rest."""
    b_is_transposed_a: bool = False  # true if b is a part of A, read transposed: A is both factors
    kind: ClassVar[str] = "multiply"
    ref_fields: ClassVar[tuple[str, ...]] = ("a", "b", "c")

    def moves(self, rank: int) -> list[TransferSpec]:
        return [TransferSpec("view", ref.rank, ref, rank, None) for ref in (self.a, self.b) if ref.rank != rank]

    def __str__(self) -> str:
        b = f"{self.b}{'.T' * self.b_is_transposed_a}"
        return f"{self.c} {'+:'[self.first]}= {self.a} @ {b}{', its lower half' * self.half}"


class Accumulate(OneSidedOp):
    """One-sided, element-wise atomic add of `src` into the owner's `dst`; complete at the next barrier."""

    __slots__ = ()
    kind: ClassVar[str] = "accumulate"
    adds: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Broadcast(GroupOp):
    """Copies that all ranks of a group would make at once: every owner sends its parts to all the others.

    With one owner it is a broadcast, with several an all-gather. Made from Copies.
    """

    parts: tuple[Ref, ...]
    """Boxes of homes of ranks of the group, or of slots that another Broadcast fills; in one order for all of them."""
    dst: Ref | None  # destination of the other ranks' parts on this rank; None if all parts are its own
    group: tuple[int, ...]
    step: int
    ref_fields: ClassVar[tuple[str, ...]] = ("dst",)

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "broadcast" if len({part.rank for part in self.parts}) == 1 else "all-gather"

    @property
    def origins(self) -> tuple[Ref, ...]:
        return () if any(isinstance(part.buffer, Slot) for part in self.parts) else self.parts

    @property
    def refs(self) -> tuple[Ref, ...]:
        parts = tuple(filter(self._is_known, self.parts))
        return (*parts, self.dst) if self.dst else parts

    def on_slots(self, new: Callable[[Slot], Slot]) -> Broadcast:
        parts = tuple(part.on(new) if self._is_known(part) else part for part in self.parts)
        return replace(self, parts=parts, dst=self.dst and self.dst.on(new))

    def ahead(self, depth: int) -> int:
        """Panels that come to a slot first are passed on from there one panel later."""
        return max(0, depth - (not self.origins))

    def _is_known(self, part: Ref) -> bool:
        return isinstance(part.buffer, str) or self.dst is None or part.rank == self.dst.rank

    def moves(self, rank: int) -> list[TransferSpec]:
        """Each of its own parts goes to every other member, and theirs come into its `dst`."""
        kind, mine = self.kind, (part for part in self.parts if part.rank == rank)
        moved = [TransferSpec(kind, rank, part, q, None) for part in mine for q in self.group if q != rank]
        if self.dst is not None:
            buffer, theirs = self.dst.buffer, (part for part in self.parts if part.rank != rank)
            moved += [TransferSpec(kind, part.rank, part, rank, Ref(rank, buffer, part.region)) for part in theirs]
        return moved

    def __str__(self) -> str:
        return f"{self.dst or 'others'} := {self.kind} of {', '.join(map(str, self.parts))} in {self.group}"


@dataclass(frozen=True, slots=True)
class Shift(GroupOp):
    """One step of a ring: `src` goes to one neighbour while `dst` comes from the other."""

    src: Ref
    dst: Ref
    to: int
    source: int  # the rank that `dst` comes from
    group: tuple[int, ...]
    step: int
    origin: Ref | None = None  # the home that `dst` was copied from by the first on the ring; None of a sum
    kind: ClassVar[str] = "shift"
    ref_fields: ClassVar[tuple[str, ...]] = ("src", "dst")

    @property
    def origins(self) -> tuple[Ref, ...]:
        return (self.origin,) if self.origin else ()

    def ahead(self, depth: int) -> int | None:
        """Parts of a neighbour's home can come early; slots that it passes on, when they have come to it."""
        if not depth or self.dst.operand == "C":
            return None
        return depth if isinstance(self.src.buffer, str) else 1

    def moves(self, rank: int) -> list[TransferSpec]:
        return [
            TransferSpec(self.kind, rank, self.src, self.to, None),
            TransferSpec(self.kind, self.source, None, rank, self.dst),
        ]

    def __str__(self) -> str:
        return f"{self.dst} := shift from {self.source}, {self.src} to {self.to}"


@dataclass(frozen=True, slots=True)
class Reduce(GroupOp):
    """Accumulates that all ranks of a group would make at once, one from each, summed on the way.

    With one owner it is a reduce, with several a reduce-scatter. Made from Accumulates. A home is added to; a slot then
    holds the sum alone.
    """

    srcs: tuple[Ref, ...]  # this rank's summands, each a dense part of a slot
    dsts: tuple[Ref, ...]
    """The boxes that they belong to, of homes or of slots, in one order for all ranks of the group."""
    group: tuple[int, ...]
    step: int
    adds: ClassVar[bool] = True
    is_dense: ClassVar[bool] = True

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "reduce" if len({dst.rank for dst in self.dsts}) == 1 else "reduce-scatter"

    @property
    def refs(self) -> tuple[Ref, ...]:
        return (*self.srcs, *filter(self._is_known, self.dsts))

    def on_slots(self, new: Callable[[Slot], Slot]) -> Reduce:
        dsts = tuple(dst.on(new) if self._is_known(dst) else dst for dst in self.dsts)
        return replace(self, srcs=tuple(src.on(new) for src in self.srcs), dsts=dsts)

    def moves(self, rank: int) -> list[TransferSpec]:
        """Each part goes to its owner, who takes its own parts from every other member."""
        kind, pairs = self.kind, zip(self.srcs, self.dsts, strict=True)
        out = [TransferSpec(kind, rank, src, dst.rank, dst, adds=True) for src, dst in pairs if dst.rank != rank]
        mine, others = (dst for dst in self.dsts if dst.rank == rank), [q for q in self.group if q != rank]
        return out + [TransferSpec(kind, q, None, rank, dst, adds=True) for dst in mine for q in others]

    def _is_known(self, dst: Ref) -> bool:
        return isinstance(dst.buffer, str) or dst.rank == self.srcs[0].rank

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.dsts))} +<- {self.kind} of {', '.join(map(str, self.srcs))} in {self.group}"


@dataclass(frozen=True, slots=True)
class Scale(LocalOp):
    """Open a region of the rank's own home or scratch: times beta where `keep`, else zero without reading."""

    c: Ref
    keep: bool
    step: int
    kind: ClassVar[str] = "scale"

    def __str__(self) -> str:
        return f"{self.c} := {'beta * ' + str(self.c) if self.keep else '0'}"


@dataclass(frozen=True, slots=True)
class Finish(LocalOp):
    """Close a region of the rank's own C, once: cast from the accumulator to the result."""

    c: Ref
    step: int
    kind: ClassVar[str] = "cast"

    def __str__(self) -> str:
        return f"finish {self.c}"


@dataclass(frozen=True, slots=True)
class Barrier(Op):
    """All ranks: every Accumulate and store before it is visible to every read after it."""

    step: int
    kind: ClassVar[str] = "barrier"

    def __str__(self) -> str:
        return "barrier"


@dataclass(frozen=True, slots=True)
class Post(Op):
    """Count up this rank's `event` after its earlier operations are complete; of Copies, those into `filled`."""

    event: str
    filled: Slot | None
    step: int
    kind: ClassVar[str] = "post"

    def __str__(self) -> str:
        return f"post {self.event}"


@dataclass(frozen=True, slots=True)
class Await(Op):
    """Go on once every rank of `group` has posted `event` `count` times."""

    event: str
    group: tuple[int, ...]
    count: int
    step: int
    kind: ClassVar[str] = "wait"

    def __str__(self) -> str:
        return f"await {self.event} {self.count} times of each of {self.group}"


@dataclass(frozen=True, slots=True)
class Claim(Op):
    """Take tasks of the schedule's pool by fetch-and-add until none is left, running each."""

    step: int
    kind: ClassVar[str] = "claim"

    def __str__(self) -> str:
        return "claim tasks until none is left"


def counted(op: Op, rank: int) -> list[TransferSpec]:
    return [move for move in op.moves(rank) if move.source != move.to and (move.source == rank) == move.adds]


def foreign(op: Op, rank: int) -> list[tuple[int, int, bool]]:
    return [(x.to if x.adds else x.source, x.ref.region.size, x.dst is not None) for x in counted(op, rank)]

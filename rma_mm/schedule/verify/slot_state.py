"""State of the scratch slots of all ranks during a check, and when shared ones were filled and read."""

from __future__ import annotations

from dataclasses import field

from rma_mm.classes import dataclass
from rma_mm.geometry.span import Region
from rma_mm.schedule.ops import Op, Post, Ref, Slot
from rma_mm.schedule.verify.coverage import covers, covers_union
from rma_mm.schedule.verify.local_rules import fail
from rma_mm.schedule.verify.messages import Route
from rma_mm.schedule.verify.vector_clocks import ClockValue, VectorClocks


@dataclass
class Fill:
    """A part of a slot that is on its way, or there."""

    part: Region
    rank: int  # who fetches it
    landed: ClockValue | None = None  # when that was posted, for slots that are shared


@dataclass
class SlotContent:
    """Content of a slot at one time."""

    slot: Slot
    awaited: list[tuple[Route, Region]] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    products: list[Region] = field(default_factory=list)
    zeroed: list[Region] = field(default_factory=list)
    uses: list[ClockValue] = field(default_factory=list)  # when ranks read it, where it is shared
    before: list[ClockValue] = field(default_factory=list)  # when the frame's former content was used

    @property
    def partial_sums(self) -> list[Region]:
        return [*self.zeroed, *(Region(product[:2]) for product in self.products)]


class SlotState:
    """The slots of all ranks, by holder and frame."""

    def __init__(self, order: VectorClocks) -> None:
        self.slots: dict[tuple[int, str], SlotContent] = {}
        self.order = order

    def find(self, ref: Ref) -> SlotContent | None:
        """Return the content of the slot behind `ref`, if the slot exists by now."""
        assert isinstance(ref.buffer, Slot)
        filled = self.slots.get((ref.rank, ref.buffer.frame))
        return filled if filled and filled.slot == ref.buffer else None

    def occupant(self, ref: Ref) -> SlotContent:
        """Make the slot behind `ref` the content of its frame."""
        assert isinstance(ref.buffer, Slot)
        filled = self.find(ref)
        if filled is None:
            old = self.slots.get((ref.rank, ref.buffer.frame))
            filled = self.slots[ref.rank, ref.buffer.frame] = SlotContent(ref.buffer)
            if old is not None:
                filled.before = [*old.uses, *(fill.landed or (fill.rank, 2**62) for fill in old.fills)]
        return filled

    def fill(self, rank: int, op: Op, dst: Ref) -> SlotContent:
        """A part of a slot is on its way."""
        filled = self.occupant(dst)
        if any(fill.part & dst.region for fill in filled.fills):
            fail(rank, op, "filled-twice", "that part of the slot is filled already")
        if filled.slot.group and not all(self.order.is_before(moment, rank) for moment in filled.before):
            fail(rank, op, "race", "a rank may still use what the shared slot held before; an Await is missing")
        filled.fills.append(Fill(dst.region, rank))
        return filled

    def read(self, rank: int, op: Op, ref: Ref) -> None:
        filled = self.find(ref)
        if not filled or not covers([fill.part for fill in filled.fills], ref.region):
            fail(rank, op, "not-filled", f"{ref} is read before it is filled")
        if not filled.slot.group:
            return
        for fill in filled.fills:
            if fill.landed is None or not self.order.is_before(fill.landed, rank):
                fail(rank, op, "race", f"{ref} is read before what rank {fill.rank} fetches has landed")
        filled.uses.append(self.order.now(rank))

    def land(self, rank: int, op: Post) -> None:
        """Record that a rank's fetch into a shared slot has completed."""
        moment = self.order.post(rank, op.event)
        for filled in self.slots.values():
            if filled.slot == op.filled:
                for fill in filled.fills:
                    if fill.rank == rank:
                        fill.landed = fill.landed or moment

    def contents(self, rank: int, op: Op, ref: Ref) -> list[Region]:
        """Return the products that a slot holds; those of A and B hold none."""
        if isinstance(ref.buffer, str):
            return []
        filled = self.find(ref)
        if filled is None:
            fail(rank, op, "not-filled", f"{ref} is sent and holds nothing")
        if ref.operand == "C" and not covers_union(filled.partial_sums, ref.region):
            fail(rank, op, "not-opened", f"{ref} is sent before all of it was opened")
        if ref.operand != "C" and not covers_union([fill.part for fill in filled.fills], ref.region):
            fail(rank, op, "not-filled", f"{ref} is sent before all of it is filled")
        return list(filled.products)

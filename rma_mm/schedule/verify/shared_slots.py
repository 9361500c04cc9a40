"""Slots that ranks of a node fill and read together, as one of these ranks can check them.

All ranks of a group post and await alike (the balance of the proof shows it), so each need only see that its own reads
lie between the posts that others wait for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import blake2b

from rma_mm.errors import ScheduleError
from rma_mm.schedule.ops import Await, Op, Post, Ref, Slot
from rma_mm.schedule.verify.fingerprint import PRIME, fingerprint
from rma_mm.schedule.verify.local_rules import fail


class SharedSlots:
    """Use of shared slots by one rank, in order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.clock = 0
        self.posts: dict[str, list[int]] = defaultdict(list)  # event → when this rank posted it
        self.awaited: Counter[str] = Counter()
        self.landed: dict[Slot, tuple[str, int]] = {}  # slot → the event, and its count, that say that it is filled
        self.frames: dict[str, Slot] = {}
        self.last_read: dict[Slot, int] = {}
        self.filled: Counter[Slot] = Counter()

    def post(self, op: Post) -> None:
        """This rank's piece has landed, or it needs a slot no more."""
        self.clock += 1
        self.posts[op.event].append(self.clock)
        if op.filled is not None:
            self._enter(op, op.filled)
            self.landed[op.filled] = (op.event, len(self.posts[op.event]))

    def learn(self, op: Await) -> None:
        self.awaited[op.event] = max(self.awaited[op.event], op.count)

    def fill(self, op: Op, dst: Ref) -> None:
        """A piece of a slot is fetched."""
        assert isinstance(dst.buffer, Slot)
        self._enter(op, dst.buffer)
        self.filled[dst.buffer] += fingerprint(dst.region)

    def read(self, op: Op, slot: Slot) -> None:
        event, count = self.landed.get(slot, ("", 1))
        if self.awaited[event] < count or self.frames.get(slot.frame) != slot:
            why = f"the shared slot {slot.name} is read before all that its ranks fetch has landed"
            fail(self.rank, op, "race", why)
        self.clock += 1
        self.last_read[slot] = self.clock

    def _enter(self, op: Op, slot: Slot) -> None:
        """The slot takes its frame, which no rank reads any more."""
        old = self.frames.get(slot.frame)
        self.frames[slot.frame] = slot
        if old in (None, slot):
            return
        read = self.last_read.get(old, 0)
        if not any(count and self.posts[event][count - 1 : count] > [read] for event, count in self.awaited.items()):
            fail(self.rank, op, "race", f"a rank may still read the shared slot {old.name}; an Await is missing")

    def missing(self) -> int:
        """Return a number whose sum over ranks is 0 modulo PRIME if every slot is filled, each part once."""
        for event, count in self.awaited.items():
            if len(self.posts[event]) < count:
                raise ScheduleError(
                    "deadlock", f"rank {self.rank}: {event} is awaited {count} times and not posted as often"
                )
        total = 0
        for slot in self.frames_seen():
            name = repr((slot.name, slot.region, slot.group)).encode()
            weight = int.from_bytes(blake2b(name, digest_size=7).digest(), "little")
            whole = fingerprint(slot.region) if slot.group[0] == self.rank else 0
            total += weight * (self.filled[slot] - whole)
        return total % PRIME

    def frames_seen(self) -> set[Slot]:
        return {*self.landed, *self.filled, *self.last_read}

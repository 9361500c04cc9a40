"""Scratch that is poisoned when its content is over, so that what reads it afterwards shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from rma_mm.schedule.ops import Op, Slot
from rma_mm.windows.checks.poison import poison


class Slots:
    """The frames of one list of operations, and the slots that they hold as it is bound.

    Frames that ranks of a node fill together are left alone: the gets that fill them poison each its own part.
    """

    def __init__(
        self, frames: dict[str, NDArray[Any]], wait: Callable[[Sequence[str]], None],
        act: Callable[[Callable[[], None]], None],
    ) -> None:
        """wait: what is under way under these names must be over before the next call; act: make a call next."""
        self.frames, self.wait, self.act = frames, wait, act
        self.by_frame: dict[str, Slot] = {}

    def enter(self, op: Op) -> None:
        """Before an operation: frames that it gives to other slots are poisoned, once nothing moves there."""
        for ref in op.refs:
            slot = ref.buffer
            if isinstance(slot, Slot) and not slot.group and self.by_frame.get(slot.frame) != slot:
                self.by_frame[slot.frame] = slot
                self.wait([f"read {slot.frame}", f"fill {slot.frame}"])
                self.act(partial(poison, self.frames[slot.frame]))

    def leave(self) -> None:
        """After the last operation, when nothing is under way."""
        for frame in self.by_frame:
            self.act(partial(poison, self.frames[frame]))

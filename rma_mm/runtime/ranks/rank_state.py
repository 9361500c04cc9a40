"""State that each rank has of its own. A rank is a process, or a thread where ranks are pretended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class RankState:
    """Calls, meshes and failures of one rank, which the code of all its threads shares."""

    def __init__(self, world: Any = None, window: str = "", note: str = "") -> None:
        """world: the communicator that stands for COMM_WORLD, if ranks are pretended.

        window: the only flavour of windows that they have. note: says so in reports.
        """
        self.world, self.window, self.note = world, window, note
        self.lock = threading.RLock()
        """Held by the thread that is in a collective call."""
        self.groups: list[Any] = []
        """Process groups with an open mesh, in the order in which they were made."""
        self.meshes: list[Any] = []
        """Open meshes in the order in which they were made, the same on every rank."""
        self.held: list[Any] = []
        """Closed meshes whose memory arrays still show on some rank, in the order in which they were closed."""
        self.default: list[Any] = []
        """The default mesh, once there is one."""
        self.questions: dict[tuple[int, int], Any] = {}
        """The last question of every asker by group, until this rank enters the call that the question is about."""
        self.waits = 0
        """Number of waits so far."""
        self.broken = ""
        """Why no call can be agreed on any more."""
        self.is_reported = False
        """True if all ranks have raised that."""
        self.kept: tuple[object, ...] = ()
        """Buffers that transfers may still write to although nobody waits for them any more."""
        self.within = ""
        """Name of the user's code that runs inside a call; empty if there is none."""

    @property
    def is_pretended(self) -> bool:
        """True if this rank is a thread, whose times say nothing."""
        return self.world is not None


CONTROLLERS: list[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]] = []
"""While ranks are pretended: runs a call on all of them, for a thread that is none of them."""


class _Threads(threading.local):
    state: RankState | None = None


_OF_PROCESS = RankState()
_threads = _Threads()


def rank_state() -> RankState:
    """Return the state of the rank that this thread belongs to."""
    return _threads.state or _OF_PROCESS


def controller() -> Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None:
    """Return what runs a call on all pretended ranks, if there are any and this thread is none of them."""
    return CONTROLLERS[-1] if CONTROLLERS and _threads.state is None else None


def become(state: RankState) -> None:
    """Make this thread a pretended rank, for good."""
    _threads.state = state

"""The ranks that call together. Meshes on the same ranks share one order of calls, in which each call is agreed on."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from rma_mm.errors import DisagreementError, OptionError, RmaError
from rma_mm.runtime.ranks.rank_state import controller, rank_state
from rma_mm.windows.hosts.liveness import MeetingLine, abort_quietly, call_name, enter_call, leave_call

if TYPE_CHECKING:
    from mpi4py import MPI

P = ParamSpec("P")
R = TypeVar("R")

TAG = 7  # of what waiting ranks tell each other
LAST_WORDS = 3.0  # seconds that a job goes on for the other ranks to hear why it ends


class MeshSlot(NamedTuple):
    """The number and name of a mesh within its group."""

    group: ProcessGroup
    number: int  # number of meshes made on the group so far, this one included; 0 for the group itself
    name: str


class AbortNotice(NamedTuple):
    """Notice that a rank has aborted a product; see `ProcessGroup.aborted`."""

    rank: int
    failure: tuple[str, str] | None


class ProcessGroup:
    """The ranks of a communicator, in its order. Collective to make and to close."""

    def __init__(self, parent: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self.comm: MPI.Intracomm = parent.Dup()
        members, world = parent.group, (rank_state().world or MPI.COMM_WORLD).group
        self.world_ranks: list[int] = list(members.Translate_ranks(list(range(parent.size)), world))
        members.Free()
        world.Free()
        self.calls = 0  # calls that this rank has entered
        self.line: MeetingLine | None = None
        """This rank's line of shared memory, by which its ranks meet without MPI; None until there is one."""
        self.meshes_made = self.meshes_open = 0  # meshes
        self.sent = [0] * parent.size  # messages to each rank, by `tell`
        self.received = [0] * parent.size
        self.aborted: dict[int, tuple[str, str] | None] = {}
        """Ranks that aborted a product, with the class and text of their own error, if any."""
        self._sending: list[MPI.Request] = []
        self._number(self.comm, MeshSlot(self, 0, ""))
        rank_state().groups.append(self)

    @staticmethod
    def on(parent: MPI.Intracomm) -> ProcessGroup | None:
        """Return the group that has the ranks of `parent` in the same order, if there is one. Local."""
        from mpi4py import MPI

        alike = (MPI.IDENT, MPI.CONGRUENT)
        return next((group for group in rank_state().groups if parent.Compare(group.comm) in alike), None)

    def admit(self, shape: object) -> MPI.Intracomm:
        """Return a communicator for a new mesh. Collective."""
        comm = self.comm.Dup()
        self.meshes_made += 1
        self.meshes_open += 1
        self._number(comm, MeshSlot(self, self.meshes_made, f"mesh {self.meshes_made} of shape {shape}"))
        return comm

    def dismiss(self) -> None:
        """A mesh was closed; the last one closes the group. Collective."""
        self.meshes_open -= 1
        if not self.meshes_open:
            if self.line is not None:
                self.line.close()
            rank_state().groups.remove(self)
            self._drain()
            self.comm.Free()

    def tell(self, message: object) -> None:
        """Send a message to every other rank, without waiting for any."""
        self._sending = [request for request in self._sending if not request.Test()]
        for rank in range(self.comm.size):
            if rank != self.comm.rank:
                self._sending.append(self.comm.isend(message, rank, TAG))
                self.sent[rank] += 1

    def announce_abort(self, failure: tuple[str, str] | None) -> None:
        """Tell the others that this rank has aborted during a product."""
        self.aborted[self.comm.rank] = failure
        self.tell(AbortNotice(self.comm.rank, failure))

    def receive_messages(self) -> list[Any]:
        from mpi4py import MPI

        found = []
        status = MPI.Status()
        while (message := self.comm.improbe(MPI.ANY_SOURCE, TAG, status)) is not None:
            found.append(message.recv())
            self.received[status.source] += 1
        return found

    def _drain(self) -> None:
        """Receive every message: one that came later could be taken for one of a communicator made later."""
        expected = self.comm.alltoall(self.sent)
        while self.received != expected:
            self.receive_messages()
        for request in self._sending:
            request.Wait()

    @staticmethod
    def _number(comm: MPI.Intracomm, slot: MeshSlot) -> None:
        comm.Set_attr(_keyval(), slot)


def mesh_slot_of(comm: MPI.Intracomm) -> MeshSlot | None:
    """Return the mesh that `comm` was made for; None for a communicator that is not of this package."""
    found: Any = comm.Get_attr(_keyval())
    return found if isinstance(found, MeshSlot) else None


@functools.cache
def _keyval() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


# -- one call at a time ---------------------------------------------------------------------------

ALONE = MemoryError, KeyboardInterrupt  # exceptions that come at any place, and to one rank alone


def serialized(call: Callable[P, R]) -> Callable[P, R]:
    """Return a collective call that waits until no other thread of this process is in one.

    Threads whose order differs between ranks meet other calls there, and all of them raise DisagreementError.
    """
    public = re.sub(r"\._(?=[a-z])", ".", call.__qualname__)  # a private one does a public one's work
    name = call_name(public.removesuffix(".__init__"))

    @functools.wraps(call)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        if (run := controller()) is not None:
            result: R = run(call, args, kwargs)
            return result
        with rank_state().lock:
            enter_call(name)
            try:
                return call(*args, **kwargs)
            except ALONE as error:
                abandon(public, error)
                raise
            finally:
                leave_call()

    return alone


def abandon(name: str, error: BaseException) -> None:
    """Note that this rank alone has left a call midway, because of one of `ALONE`."""
    if not isinstance(error, RmaError):
        poison_job(f"a rank aborted {name} midway ({type(error).__name__})")


# -- a job that cannot go on ----------------------------------------------------------------------


def broken() -> str:
    return rank_state().broken


def poison_job(why: str, *kept: object, is_told: bool = False) -> None:
    """This rank left a call midway, or waits forever: nothing can be agreed on any more.

    kept: what transfers under way may still write to. is_told: whether all ranks raise the same, and need not hear it.
    """
    state = rank_state()
    state.broken = state.broken or why
    state.kept += kept
    state.is_reported |= is_told


def require_usable() -> None:
    state = rank_state()
    if state.broken:
        raise DisagreementError(state.broken)
    if state.within:
        raise OptionError(f"{state.within}: it calls rma_mm, whose ranks are inside another call; call it later")


def within(what: str) -> None:
    rank_state().within = what


def end_broken_job() -> None:
    """End a job in which ranks left calls unfinished: MPI_Finalize would wait for them."""
    from mpi4py import MPI

    state = rank_state()
    if not state.broken:
        return
    if not state.is_reported:
        os.write(2, f"rma_mm: rank {MPI.COMM_WORLD.rank}: {state.broken}; the job ends\n".encode())
    sys.stdout.flush()
    deadline = time.monotonic() + LAST_WORDS
    while time.monotonic() < deadline:  # what was sent must arrive
        MPI.COMM_WORLD.Iprobe()
        time.sleep(0.01)
    abort_quietly()

"""The communicator of pretended ranks: messages and collectives in the memory of one process.

It has the calls of `MPI.Intracomm` that this package and most programs use; the others raise an error that names them.
MPI itself only packs and unpacks buffers, by messages of the process to itself.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from rma_mm.errors import MeshError
from rma_mm.windows.waiting import wait_until

Message = tuple[int, int, bytes]  # source, tag, contents


class CollectiveCall:
    """One collective call, as far as ranks have come to it."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.names: list[str] = [""] * size
        self.arrived = self.left = 0
        self.when_full: list[Callable[[], None]] = []


class Shared:
    """The part of a communicator that its ranks have in common."""

    def __init__(self, world_ranks: Sequence[int], get_on: Callable[[], None]) -> None:
        self.world_ranks, self.size, self.get_on = tuple(world_ranks), len(world_ranks), get_on
        self.meetings: dict[Any, CollectiveCall] = {}
        self.mail: list[deque[Message]] = [deque() for _ in world_ranks]
        """Messages that no rank has asked for yet, by receiver."""
        self.asked: list[list[tuple[int, int, Callable[[Message], None]]]] = [[] for _ in world_ranks]
        """Receives without a message yet, by receiver: source, tag, what to do with it."""


class RankGroup:
    """A group of pretended ranks; see `MPI.Group`."""

    def __init__(self, world_ranks: Sequence[int]) -> None:
        self.world_ranks = tuple(world_ranks)

    def Incl(self, ranks: Sequence[int]) -> RankGroup:
        return RankGroup([self.world_ranks[rank] for rank in ranks])

    def Translate_ranks(self, ranks: Sequence[int], other: RankGroup) -> list[int]:
        return [other.world_ranks.index(self.world_ranks[rank]) for rank in ranks]

    def Free(self) -> None:
        """Do nothing: a group of pretended ranks holds no memory of MPI."""


class Arrived:
    """A message that was taken out of the mail and can be unpickled; see `MPI.Message`."""

    def __init__(self, contents: bytes) -> None:
        self.contents = contents

    def recv(self) -> Any:
        return pickle.loads(self.contents)


class Later:
    """A request for an object; see `MPI.Request`."""

    def __init__(self, value: Any = None, is_there: bool = True) -> None:
        self.value, self.is_there = value, is_there

    def take(self, message: Message) -> None:
        self.value, self.is_there = pickle.loads(message[2]), True

    def Test(self) -> bool:
        return self.is_there

    def Wait(self) -> bool:
        wait_until(self.Test)
        return True

    def test(self) -> tuple[bool, Any]:
        return self.is_there, self.value

    def wait(self) -> Any:
        wait_until(self.Test)
        return self.value


class PretendedComm(MPI.Intracomm):
    """One pretended rank's side of a communicator. See `MPI.Intracomm`."""

    _shared: Shared
    _rank: int
    _attributes: dict[int, Any]
    _calls: int
    _calls_of: dict[tuple[int, ...], int]
    _is_free: bool

    @classmethod
    def of(cls, shared: Shared, rank: int) -> PretendedComm:
        self = cls.__new__(cls, MPI.COMM_SELF)
        self._shared, self._rank = shared, rank
        self._attributes, self._calls, self._calls_of = {}, 0, {}
        self._is_free = False
        return self

    # -- who is there -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._shared.size

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self.size

    @property
    def group(self) -> Any:  # type: ignore[override]
        return RankGroup(self._shared.world_ranks)

    def Get_group(self) -> Any:
        return self.group

    def Compare(self, other: Any) -> int:
        if not isinstance(other, PretendedComm):
            return MPI.UNEQUAL
        if other._shared is self._shared:
            return MPI.IDENT
        ours, theirs = self._shared.world_ranks, other._shared.world_ranks
        if ours == theirs:
            return MPI.CONGRUENT
        return MPI.SIMILAR if sorted(ours) == sorted(theirs) else MPI.UNEQUAL

    def __eq__(self, other: object) -> bool:
        return other == MPI.COMM_NULL if self._is_free else other is self

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return not self._is_free

    def __reduce__(self) -> Any:
        raise TypeError("a communicator cannot be pickled")

    def Is_inter(self) -> bool:
        return False

    def Get_attr(self, keyval: int) -> Any:
        return self._attributes.get(keyval)

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        self._attributes[keyval] = attrval

    # -- other communicators ----------------------------------------------------------------------

    def Free(self) -> None:
        self._is_free = True

    def Dup(self, info: Any = None) -> Any:
        return self.Split(0, self._rank)

    Clone = Dup

    def Split(self, color: int = 0, key: int = 0) -> Any:
        told = self.share((color, key), "Split")
        if color == MPI.UNDEFINED:
            return MPI.COMM_NULL
        members = sorted((rank for rank in range(self.size) if told[rank][0] == color), key=lambda rank: told[rank][1])
        return self._among(members, ("Split", self._calls))

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        return self.Split(0, key or self._rank)  # all are on one node

    def Create_group(self, group: Any, tag: int = 0) -> Any:
        members = [self._shared.world_ranks.index(rank) for rank in group.world_ranks]
        n = self._calls_of[tuple(members)] = self._calls_of.get(tuple(members), 0) + 1
        return self._among(members, ("Create_group", n))

    def _among(self, members: list[int], key: tuple[str, int]) -> PretendedComm:
        """Return the communicator of some members, made by the first of them that comes; see `CollectiveCall`."""
        place = (key, tuple(members))
        meeting = self._shared.meetings.setdefault(place, CollectiveCall(1))
        if meeting.values[0] is None:
            ours = self._shared.world_ranks
            meeting.values[0] = Shared([ours[member] for member in members], self._shared.get_on)
        meeting.left += 1
        if meeting.left == len(members):
            del self._shared.meetings[place]
        return PretendedComm.of(meeting.values[0], members.index(self._rank))

    # -- collectives ------------------------------------------------------------------------------

    def _meet(self, value: Any, name: str, when_full: Callable[[list[Any]], None] | None = None) -> CollectiveCall:
        """Bring a value to the next collective call. when_full: called once all ranks have come."""
        if self._is_free:
            raise MeshError(f"{name}: the communicator was freed")
        self._calls += 1
        meeting = self._shared.meetings.setdefault(self._calls, CollectiveCall(self.size))
        meeting.values[self._rank], meeting.names[self._rank] = value, name
        meeting.arrived += 1
        if when_full is not None:
            meeting.when_full.append(lambda: when_full(meeting.values))
        self._shared.get_on()
        if meeting.arrived == self.size:
            del self._shared.meetings[self._calls]
            if len(set(meeting.names)) > 1:
                calls = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(meeting.names))
                raise MeshError(f"comm: ranks are in different collective calls: {calls}")
            for act in meeting.when_full:
                act()
        return meeting

    def share(self, value: Any, name: str) -> list[Any]:
        """Return the value of each rank, not copied. Collective."""
        meeting = self._meet(value, name)
        wait_until(lambda: meeting.arrived == self.size)
        return meeting.values

    def _later(self, value: Any, name: str, act: Callable[[list[Any]], None]) -> MPI.Request:
        request = MPI.Grequest.Start()

        def finish(values: list[Any]) -> None:
            act(values)
            request.Complete()

        self._meet(value, name, finish)
        return request

    def barrier(self) -> None:
        self.share(None, "barrier")

    Barrier = barrier

    def Ibarrier(self) -> MPI.Request:
        return self._later(None, "Ibarrier", lambda _: None)

    def allgather(self, sendobj: Any) -> list[Any]:
        return [pickle.loads(each) for each in self.share(pickle.dumps(sendobj), "allgather")]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        found = self.share(pickle.dumps(sendobj), "gather")
        return [pickle.loads(each) for each in found] if self._rank == root else None

    def bcast(self, obj: Any, root: int = 0) -> Any:
        found = self.share(pickle.dumps(obj) if self._rank == root else None, "bcast")
        return obj if self._rank == root else pickle.loads(found[root])

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        found = self.share([pickle.dumps(each) for each in sendobj or ()], "scatter")
        return pickle.loads(found[root][self._rank])

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        found = self.share([pickle.dumps(each) for each in sendobj], "alltoall")
        return [pickle.loads(each[self._rank]) for each in found]

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        first, *others = self.allgather(sendobj)
        for each in others:
            first = op(first, each)
        return first

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        found = self.allreduce(sendobj, op)
        return found if self._rank == root else None

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> MPI.Request:
        source = recvbuf if sendbuf is MPI.IN_PLACE else sendbuf
        mine = np.array(_array(source))

        def reduce(values: list[Any]) -> None:
            total = values[0].copy()
            for each in values[1:]:
                other = each.copy()
                op.Reduce_local(total, other)
                total = other
            _array(recvbuf)[...] = total

        return self._later(mine, "Iallreduce", reduce)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:
        wait_until(self.Iallreduce(sendbuf, recvbuf, op).Test)

    def Ibcast(self, buf: Any, root: int = 0) -> MPI.Request:
        packed = pack(buf) if self._rank == root else None

        def land(values: list[Any]) -> None:
            if self._rank != root:
                unpack(values[root], buf)

        return self._later(packed, "Ibcast", land)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        wait_until(self.Ibcast(buf, root).Test)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        told = self.share(np.array(sendbuf), "Allgather")
        _array(recvbuf).reshape(self.size, -1)[...] = [each.ravel() for each in told]

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        told = self.share(np.array(sendbuf).reshape(self.size, -1), "Alltoall")
        _array(recvbuf).reshape(self.size, -1)[...] = [each[self._rank] for each in told]

    # -- messages ---------------------------------------------------------------------------------

    def _send(self, contents: bytes, dest: int, tag: int) -> None:
        self._shared.get_on()
        message = (self._rank, tag, contents)
        asked = self._shared.asked[dest]
        for wish in asked:
            if _fits(wish[0], wish[1], message):
                asked.remove(wish)
                wish[2](message)
                return
        self._shared.mail[dest].append(message)

    def _taken(self, source: int, tag: int) -> Message | None:
        """Return the first message of a source and tag, which is then gone; None if there is none."""
        mail = self._shared.mail[self._rank]
        found = next((message for message in mail if _fits(source, tag, message)), None)
        if found is not None:
            mail.remove(found)
            self._shared.get_on()
        return found

    def _ask(self, source: int, tag: int, act: Callable[[Message], None]) -> None:
        """Pass a message on, now or when it comes."""
        found = self._taken(source, tag)
        if found is None:
            self._shared.asked[self._rank].append((source, tag, act))
        else:
            act(found)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        self._send(pack(buf), dest, tag)
        return MPI.Request()

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.Isend(buf, dest, tag)

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> MPI.Request:
        request = MPI.Grequest.Start()

        def land(message: Message) -> None:
            unpack(message[2], buf)
            request.Complete()

        self._ask(source, tag, land)
        return request

    def Recv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> None:
        unpack(self._received(source, tag, status), buf)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Any:
        self._send(pickle.dumps(obj), dest, tag)
        return Later()

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.isend(obj, dest, tag)

    def irecv(self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:
        request = Later(is_there=False)
        self._ask(source, tag, request.take)
        return request

    def recv(self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        return pickle.loads(self._received(source, tag, status))

    def _received(self, source: int, tag: int, status: MPI.Status | None) -> bytes:
        found: list[Message] = []
        self._ask(source, tag, found.append)
        wait_until(lambda: bool(found))
        _tell(status, found[0])
        return found[0][2]

    def improbe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        found = self._taken(source, tag)
        if found is None:
            return None
        _tell(status, found)
        return Arrived(found[2])


def _fits(source: int, tag: int, message: Message) -> bool:
    return source in (MPI.ANY_SOURCE, message[0]) and tag in (MPI.ANY_TAG, message[1])


def _tell(status: MPI.Status | None, message: Message) -> None:
    if status is not None:
        status.source, status.tag = message[:2]


def _array(buffer: Any) -> NDArray[Any]:
    """Return the elements of a buffer, which may be given as [memory, type] or [memory, count, type]."""
    memory, *rest = buffer if isinstance(buffer, list | tuple) else (buffer,)
    if isinstance(memory, np.ndarray):
        return memory
    array = np.frombuffer(memory, rest[-1].typestr if rest else np.uint8)
    return array[: rest[0]] if len(rest) > 1 else array


def pack(buffer: Any) -> bytes:
    """Return the elements of a buffer, as MPI takes buffers, one after the other."""
    size = buffer[1] * buffer[2].Get_size() if isinstance(buffer, list) and len(buffer) == 3 else _array(buffer).nbytes
    packed = bytearray(size)
    request = MPI.COMM_SELF.Isend(buffer, 0)
    MPI.COMM_SELF.Recv([packed, MPI.BYTE], 0)
    request.Wait()
    return bytes(packed)


def unpack(packed: bytes, buffer: Any) -> None:
    """Put elements that were packed into a buffer."""
    request = MPI.COMM_SELF.Irecv(buffer, 0)
    MPI.COMM_SELF.Send([packed, MPI.BYTE], 0)
    request.Wait()


def _refuse(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MeshError(f"comm.{name}: pretended ranks do not know it; start the program under mpiexec")

    return refuse


for _name in dir(MPI.Intracomm):
    if not _name.startswith("_") and callable(getattr(MPI.Intracomm, _name)) and _name not in vars(PretendedComm):
        setattr(PretendedComm, _name, _refuse(_name))

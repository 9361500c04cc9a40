"""Agreement between ranks before anything collective: the same call with the same arguments, or one error for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

from rma_mm import errors
from rma_mm.errors import DisagreementError, LayoutError, RmaError, ranks_in_words
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.notations.pblas import text_of
from rma_mm.runtime.ranks.deadlock import Wait, receive
from rma_mm.runtime.ranks.process_group import ProcessGroup, mesh_slot_of, poison_job, require_usable
from rma_mm.windows.hosts.liveness import BEGIN, CELLS, DOING
from rma_mm.windows.waiting import pause, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def digest(*facts: object) -> int:
    """Return a 62-bit hash of the text of some facts, the same on every rank and in every process."""
    raw = blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 2


VOTES = 11  # numbers that a rank can tell with a ballot
MESH = 0x1000193  # keeps equal calls on two meshes apart
PARTING = 5.0  # seconds in which ranks that leave a product hear why the others do
END = "the end of the program"  # text of the call of a rank that has reached the end of its program
AgreedVotes = Sequence[int] | None
"""Votes of the caller's ballot in which all ranks agreed on a call; None if the call takes its own."""


class Ballot:
    """The one non-blocking allreduce that opens an execution: agreement and start barrier at once.

    MAX over h and −h shows whether all ranks brought the same h. On the way it brings the largest of each number that
    they tell. Calls on all meshes of the same ranks meet in one place, so that different ones are seen and not waited
    for.
    """

    def __init__(self, comm: MPI.Intracomm, what: str) -> None:
        from mpi4py import MPI

        self.max, self.what = MPI.MAX, what
        self.slot = mesh_slot_of(comm)
        self.comm = comm if self.slot is None else self.slot.group.comm
        self.salt = 0 if self.slot is None else self.slot.number * MESH
        """Number that keeps equal calls on different meshes apart."""
        self._late: Wait | None = None
        self.mine = np.empty(3 + VOTES, np.int64)
        self.all = np.empty(3 + VOTES, np.int64)

    @property
    def votes(self) -> list[int]:
        """The largest of each number that a rank told with the last ballot."""
        told: list[int] = self.all[3:].tolist()
        return told

    def cast(self, value: int, failed: bool = False, told: Sequence[int] = ()) -> bool:
        """True if every rank brought the same value and none failed. Collective.

        Raises DisagreementError if ranks wait for one another in calls of meshes that share some of them only.
        """
        require_usable()
        value ^= self.salt
        if self.slot is not None:
            self.slot.group.calls += 1
            if self.slot.group.line is not None:
                self.slot.group.line.enter_in_mpi(self.slot.group.calls)
        CELLS[DOING] = BEGIN
        self.mine[:] = value, -value, failed, *told, *(0,) * (VOTES - len(told))
        self.wait(self.comm.Iallreduce(self.mine, self.all, self.max).Test)
        return bool(self.all[0] == -self.all[1] and not self.all[2])

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()` is true, which it is once all ranks have come."""
        self._late = None
        try:
            wait_until(done, self._when_late)
        except BaseException:
            poison_job(f"rank {self.comm.rank} left {self.what} before all ranks had come", done, self)
            raise

    def _when_late(self) -> None:
        """Find out whether the others can still come."""
        if self.slot is not None:
            self._late = self._late or Wait(self.slot.group, f"{self.what} of {self.slot.name}")
            self._late.look()


def agree(comm: MPI.Intracomm, what: str, facts: Mapping[str, object], error: Exception | None = None) -> None:
    """Return only if all ranks brought equal facts and no error; else raise the same error on every rank.

    what: the call, as 'matmul'. Collective over `comm`. Raises DisagreementError naming who differs, or the error of
    the lowest rank that brought one.
    """
    texts = in_words(facts)
    ballot = Ballot(comm, what)
    if not ballot.cast(digest(what, *texts.items()), error is not None):
        disagree(ballot, texts, error)


def agree_to_end(comm: MPI.Intracomm, how: str) -> bool:
    """True if all ranks are at the end of the program; if not, they hear who is, and how it ended. Collective."""
    ballot = Ballot(comm, END)
    if ballot.cast(digest(END)):
        return True
    ballot.what += how
    if all(call.startswith(END) for call, *_ in _gather_calls(ballot, {}, None)):
        poison_job("ranks came to the end of the program with different meshes open")
    return False


def disagree(ballot: Ballot, texts: dict[str, str], error: Exception | None) -> NoReturn:
    """Raise the same error on every rank, after a ballot that failed. Collective over its communicator."""
    require_alike(ballot, texts, error)
    raise DisagreementError(f"{ballot.what}: ranks passed different arguments; every rank must pass the same")


def require_alike(ballot: Ballot, texts: dict[str, str], error: Exception | None) -> None:
    """Return, after a ballot that failed, where all ranks are in the same call with equal facts, and none has an error.

    What they differ in may then be their own. Collective over the ballot's communicator; raises as `agree` does.
    """
    found = _gather_calls(ballot, texts, error)
    calls = [call for call, _, _, _ in found]
    if len({name for _, name, _, _ in found}) > 1:
        calls = [f"{call} of {name}" if name else call for call, name, _, _ in found]
    failures = {rank: failure for rank, (*_, failure) in enumerate(found) if failure}
    is_same_call = len(set(calls)) == 1
    if failures and is_same_call:
        common = common_error(failures, ballot.comm.size)
        if error is not None and (type(error), str(error)) == (type(common), str(common)):
            raise error  # with the place where it arose, once
        raise common from error
    every = [texts for _, _, texts, _ in found]
    if not is_same_call or any(texts != every[0] for texts in every):
        raise DisagreementError(difference(calls, every)) from error


RankCall = tuple[str, str, dict[str, str], tuple[str, str] | None]
"""Facts of a rank after a failed ballot: its call, its mesh, its arguments and its error."""


def _gather_calls(ballot: Ballot, texts: dict[str, str], error: Exception | None) -> list[RankCall]:
    mesh = "" if ballot.slot is None else ballot.slot.name
    return ballot.comm.allgather((ballot.what, mesh, texts, describe(error)))


def in_words(facts: Mapping[str, object]) -> dict[str, str]:
    return {name: str(x) if isinstance(x := _shown(name, facts[name]), Layout) else repr(x) for name in sorted(facts)}


def _shown(name: str, x: object) -> object:
    """Return a fact; of a layout that is a descriptor of ScaLAPACK what ranks have in common."""
    try:
        return text_of(x) if name == "layout" else x
    except LayoutError:
        return x


@contextmanager
def abortable(group: ProcessGroup, kept: object) -> Iterator[None]:
    """Run a block after all ranks have agreed; if it fails on a rank, abort the product on all of them.

    Nothing can be agreed on any more then. kept: buffers that transfers may still write to.
    """
    try:
        yield
    except Exception as error:
        raise abort_product(group, error, kept) from error
    except BaseException as error:
        poison_job(f"rank {group.comm.rank} aborted during a product ({type(error).__name__})", kept)
        group.announce_abort((type(error).__name__, str(error)))
        raise


@contextmanager
def agreed(comm: MPI.Intracomm, what: str = "", **facts: object) -> Iterator[dict[str, object]]:
    """Run local checks in a block that ends in an agreement, so that all ranks learn of an error.

    The block may add to the facts that it is given. Collective over `comm`; raises as `agree` does.
    """
    error: Exception | None = None
    try:
        yield facts
    except Exception as caught:  # noqa: BLE001 - whatever it is, every rank must hear of it
        error = caught
    agree(comm, what, facts, error)


def distribute_tasks(comm: MPI.Intracomm, what: str, act: Callable[[int], T], count: int) -> list[T]:
    """Compute act(0) … act(count − 1), each on one rank, and return all results on every rank.

    Collective; raises as `agree` does.
    """
    with agreed(comm, what):
        mine = [act(n) for n in range(comm.rank, count, comm.size)]
    told = comm.allgather(mine)
    return [told[n % comm.size][n // comm.size] for n in range(count)]


def abort_product(group: ProcessGroup, error: Exception, kept: object) -> Exception:
    """Return the error to raise when a rank aborts a product, because of its own error or another rank's.

    All ranks of the group hear of it, and raise the error of the lowest that has one of its own, if all come within
    some seconds. Nothing can be agreed on any more. kept: see `spoil`.
    """
    has_heard = isinstance(error, DisagreementError) and bool(group.aborted)
    group.announce_abort(None if has_heard else describe(error))
    deadline = time.monotonic() + PARTING
    while len(group.aborted) < group.comm.size and time.monotonic() < deadline:
        receive()
        pause(0.005)
    failures = {rank: failure for rank, failure in sorted(group.aborted.items()) if failure}
    error = common_error(failures, group.comm.size) if failures else error
    poison_job(f"a product failed: {error}", kept, is_told=True)
    return error


def describe(error: Exception | None) -> tuple[str, str] | None:
    """Return the class and text of an error, to be sent."""
    if isinstance(error, MemoryError) and not isinstance(error, RmaError):  # NumPy raises one of a class of its own
        return errors.MemoryLimitError.__name__, f"memory: {str(error) or 'none is left'}"
    return (type(error).__name__, str(error)) if error is not None else None


def common_error(failures: dict[int, tuple[str, str]], size: int) -> Exception:
    """Return the error of the lowest rank, in its own class if that is ours; it names the rank."""
    name, text = next(iter(failures.values()))
    kind = getattr(errors, name, None)
    if len(failures) < size:
        text += f" ({ranks_in_words(list(failures))})"
    return kind(text) if isinstance(kind, type) and issubclass(kind, RmaError) else RuntimeError(f"{name}: {text}")


def difference(calls: list[str], found: list[dict[str, str]]) -> str:
    """Describe which ranks differ in which argument, one sentence for each. `calls` and facts are by rank.

    `calls` and facts are by rank.
    """
    if len(set(calls)) > 1:
        return f"ranks are in different calls: {by_value(calls)}; all ranks must make the same calls in the same order"
    names = dict.fromkeys(name for facts in found for name in facts)
    lines = []
    for name in names:
        values = [facts.get(name, "nothing") for facts in found]
        if len(set(values)) > 1:
            lines.append(f"{name}: {by_value(values)}")
    return f"{calls[0]}: ranks passed different arguments: {'; '.join(lines)}; every rank must pass the same"


def by_value(values: list[str]) -> str:
    """'x on ranks 0, 2; y on rank 1'."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    words = []
    for value, ranks in groups.items():
        words.append(f"{value} on {ranks_in_words(ranks)}")
    return " and ".join(words)

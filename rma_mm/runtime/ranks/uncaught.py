"""Report errors that end a program: one that all ranks raise is printed once, one of a single rank with its rank.

The first mesh of a program installs `report` as Python's hook for uncaught exceptions. RMA_MM_TRACEBACK=1 prints the
tracebacks of all ranks instead.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from rma_mm.errors import RmaError, in_lines, ranks_in_words
from rma_mm.launch import TRACEBACK, end_interrupted, launched_ranks, launcher_rank, part
from rma_mm.runtime.ranks.launchers import LonelyRankError
from rma_mm.runtime.ranks.process_group import broken
from rma_mm.runtime.ranks.rank_state import rank_state
from rma_mm.windows.hosts.liveness import ON_INTERRUPTION, announce_interruption

if TYPE_CHECKING:
    from mpi4py import MPI

TAG = 9  # of the messages by which ranks find out whether they end alike
PATIENCE = 2.0  # seconds for which rank 0 waits for the others to raise the same
MARGIN = 0.5  # seconds that the others wait longer, for its answer
REFUSED = 2  # exit code of a launch that cannot be right, as of the commands
OWN = str(Path(__file__).parents[2])
STARTER = re.compile(r"<frozen |.*/mpi4py/(run|__main__)\.py")
"""Names of files that run a program, as `python -m mpi4py` does."""


class _Hook:
    before: Any = None  # the hook that was there
    interrupted = threading.Lock()
    comm: Any = None  # ranks to compare with if no mesh is open


def install(comm: MPI.Intracomm | None = None) -> None:
    """Report uncaught exceptions from now on. Local; does nothing if repeated, except to name the ranks.

    comm: the ranks of the mesh that is being made, once MPI has been started.
    """
    _Hook.comm = comm
    if _Hook.before is None and os.environ.get(TRACEBACK, "") in ("", "0"):
        _Hook.before, sys.excepthook = sys.excepthook, report
        ON_INTERRUPTION.append(_end_interrupted)


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception: on one rank if all have the same, else with the rank."""
    MPI: Any = sys.modules.get("mpi4py.MPI")  # which must not be started for this
    if issubclass(kind, LonelyRankError):
        _forget_abort(MPI)
        if launcher_rank() == 0:
            _write(in_lines(f"rma_mm: {error}"))
        raise SystemExit(part(REFUSED, is_alike=True))
    text = in_lines(f"{_place(trace)}{kind.__name__}: {error}")
    is_under_way = MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()
    if hasattr(sys, "ps1") or sys.flags.interactive or not is_under_way:
        if MPI is None and launched_ranks() > 1 and issubclass(kind, Exception):
            _end_before_mpi(text)
        _Hook.before(kind, error, trace)
        return
    world = MPI.COMM_WORLD
    if issubclass(kind, KeyboardInterrupt):
        if launched_ranks() == world.size == 1:
            _write("rma_mm: interrupted by SIGINT\n")
        _end_interrupted()
    groups = rank_state().groups
    comm = groups[0].comm if groups else _Hook.comm or world
    if world.size == 1 and not issubclass(kind, RmaError):
        _Hook.before(kind, error, trace)
        return
    alike, all_end = ([], False) if broken() else _ranks_alike(comm, text)
    is_of_all = len(alike) == comm.size
    if all_end and comm.size == world.size:  # ranks beside a mesh that is over could wait for it forever
        _forget_abort(MPI)
    if alike and comm.rank:
        return  # rank 0 prints it
    if is_of_all:
        hint = "" if issubclass(kind, RmaError) else f"all ranks raised this; {TRACEBACK}=1 prints the tracebacks\n"
        _write(text + hint)
    elif issubclass(kind, RmaError):
        _write(f"{ranks_in_words(alike or [world.rank])}: {text}")
    else:
        lines = "".join(traceback.format_exception(kind, error, _from_program(trace)))
        _write(f"rma_mm: rank {world.rank} of {world.size} raised\n{lines}")


def _end_before_mpi(text: str) -> NoReturn:
    """Print an error on rank 0, and on others only if the ranks do not all end; end the process."""
    rank = launcher_rank()
    if rank == 0:
        _write(text)
    raise SystemExit(part(1, f"rank {rank}: {text}" if rank else ""))


def _from_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without what started the program."""
    at = trace
    while at is not None and STARTER.match(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return at or trace


def _place(trace: TracebackType | None) -> str:
    """Return the line of the program in which the error arose, as "product.py:7: "."""
    frames = traceback.extract_tb(trace)
    own = next((n for n, frame in enumerate(frames) if frame.filename.startswith(OWN + os.sep)), len(frames))
    if not own:
        return ""
    frame = frames[own - 1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}: "


def _ranks_alike(comm: MPI.Intracomm, text: str) -> tuple[list[int], bool]:
    """Return the ranks of `comm` that end with the same text as rank 0, within `PATIENCE`, and whether all ranks end.

    The list is empty for ranks with another text. Rank 0 collects the texts. Messages are used, as a collective would
    be matched with one of ranks that go on.
    """
    others = range(1, comm.size) if comm.rank == 0 else range(1)
    sent = [] if comm.rank == 0 else [comm.isend(text, 0, TAG)]
    waiting = {rank: comm.irecv(source=rank, tag=TAG) for rank in others}
    answers: dict[int, Any] = {}
    end = time.monotonic() + PATIENCE + MARGIN * (comm.rank > 0)
    while waiting and time.monotonic() < end:
        for rank, request in list(waiting.items()):
            is_there, message = request.test()
            if is_there:
                answers[rank] = message
                del waiting[rank]
        time.sleep(0.002)
    if comm.rank:
        same, all_end = answers.get(0, ([], False))
        return same, all_end
    alike = [0, *sorted(rank for rank, other in answers.items() if other == text)]
    sent += [comm.isend((alike if rank in alike else [], not waiting), rank, TAG) for rank in answers]
    for request in sent:
        request.wait()
    return alike, not waiting


def _forget_abort(MPI: Any) -> None:
    """Let MPI end as usual: `python -m mpi4py` would abort on every rank, though all of them come to the end."""
    with suppress(AttributeError):
        MPI._set_abort_status(0)


def _end_interrupted() -> None:
    """End the process after Ctrl-C, once the other ranks have been told of it."""
    _Hook.interrupted.acquire()  # never released: of the main and the helper thread, one ends the process
    announce_interruption()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    end_interrupted()


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()

"""Traces of whatever runs on a mesh, and the report of a plan. Collective."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import OptionError, count_of, display_path
from rma_mm.kernels.choice.rates import processor
from rma_mm.policy.planner.tables import seconds_text
from rma_mm.runtime.execution.tracing import Trace
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.launchers import library_name, start_command
from rma_mm.runtime.ranks.mesh import Mesh, default_mesh
from rma_mm.runtime.ranks.rank_state import CONTROLLERS, rank_state
from rma_mm.runtime.reports.page import ReportContent, report_page, require_bokeh, traffic_of
from rma_mm.runtime.reports.timeline import Record, gathered, predicted_run, timeline
from rma_mm.runtime.watching.exposed import exposed_share, exposed_text
from rma_mm.schedule.ops import counted
from rma_mm.schedule.schedule import expand
from rma_mm.unfinished import check_target, write_whole
from rma_mm.windows.waiting import barrier

RANKS = 64  # of the largest mesh of which every operation is predicted, and every pair of ranks drawn


def is_page(path: str | os.PathLike[str] | None) -> bool:
    """True if a path ends as HTML does."""
    return path is not None and os.fspath(path).lower().endswith((".html", ".htm"))


def write_report(
    plan: Any, path: str | os.PathLike[str], records: Sequence[Record], seconds: Sequence[float] = (),
    command: str = "",
) -> None:
    """Write the report of a `Plan`. Collective; raises FileFormatError, OptionError on every rank.

    records: of the traced products, on rank 0. seconds: of these, by the slowest rank. command: repeats them; the
    program's own if not given.
    """
    comm = plan.mesh.comm
    with agreed(comm, "report", path=os.fspath(path)):
        if comm.rank == 0:
            require_bokeh()
            check_target(f"report {display_path(path)}", path)
    traffic, words = _traffic(plan), comm.reduce(plan.words.words_intra + plan.words.words_inter)
    share = exposed_share(plan)
    with agreed(comm, "report"):
        if comm.rank == 0:
            moved = f"{words} moved between ranks in the last execution{exposed_text(share)}"
            page = report_page(_report_of(plan, records, traffic, moved, seconds, command or _command(comm.size)))
            write_whole(f"report {display_path(path)}", path, page)


def _traffic(plan: Any) -> NDArray[np.int64] | None:
    """Return the words that one execution moves from rank to rank, on rank 0; None for large meshes. Collective."""
    mesh = plan.mesh
    size = mesh.grid.size
    if size > RANKS:
        return None
    mine = np.zeros((size, size), np.int64)
    for op in expand(plan.schedule, mesh.rank, plan.claims) if mesh.is_member else ():
        for move in counted(op, mesh.rank):
            mine[move.source, move.to] += move.ref.region.size
    total: NDArray[np.int64] | None = mesh.comm.reduce(mine)
    return total


def _report_of(
    plan: Any, records: Sequence[Record], traffic: NDArray[np.int64] | None, moved: str,
    seconds: Sequence[float], command: str,
) -> ReportContent:
    mesh, choice = plan.mesh, plan.choice
    m, n, k = choice.spec.shape
    ours = mesh.grid.size <= RANKS
    predicted = predicted_run(plan.schedule, choice.request.cost_model, mesh.size, RANKS) if ours else []
    is_pretended = rank_state().is_pretended
    known = "none: this machine was not measured"
    times = [
        ("predicted", known if plan.predicted_seconds is None else seconds_text(plan.predicted_seconds)),
        *([("measured", ", ".join(seconds_text(each) for each in seconds))] if seconds else []),
    ]
    facts = [
        ("algorithm", f"{plan.algorithm} ({plan.why})"),
        *([("times", "none: pretended ranks take turns")] if is_pretended else times),
        ("words", moved),
        *((x, str(choice.operands[x].layout or "in its file")) for x in "ABC"),
        ("kernel", f"{choice.spec.kernel}, threads of a rank: {mesh.threads}"),
        ("window", mesh.window_flavour),
        *(("instead", text) for text in mesh.fallbacks),
        *machine_facts(mesh),
    ]
    return ReportContent(
        f"C[{m}, {n}] = A[{m}, {k}] @ B[{k}, {n}] in {choice.spec.c.dtype} on {mesh.grid} ranks by {plan.algorithm}",
        facts, [] if is_pretended else records, [] if is_pretended else predicted, traffic, _memory_of(plan),
        choice.spec.options.memory_limit, plan.decision, command,
    )


def _memory_of(plan: Any) -> list[tuple[str, int]]:
    """Return the bytes of the tiles of the rank that has most of them, and what the fullest rank has beside these."""
    grid, operands = plan.mesh.grid, plan.choice.operands
    placed = {x: each for x, each in operands.items() if each.layout is not None}
    sizes = {
        x: [prod(each.layout.region(each.shape, grid, rank).shape) * each.dtype.itemsize for rank in grid.ranks]
        for x, each in placed.items()
    }
    fullest = max(grid.ranks, key=lambda rank: sum(each[rank] for each in sizes.values()))
    parts = [(x, each[fullest]) for x, each in sizes.items()]
    rest = plan.peak_bytes - sum(size for _, size in parts)
    return [*parts, *([("scratch and copies", rest)] if rest > 0 else [])]


def machine_facts(mesh: Mesh) -> list[tuple[str, str]]:
    """Return the machine, the date and the software, as rows of a report."""
    from mpi4py import MPI

    library = library_name(MPI.Get_library_version())
    where = f"{count_of(len(set(mesh.hosts)), 'host')}, first {socket.gethostname()}"
    nodes = f"{count_of(mesh.size, 'rank')} on {count_of(mesh.num_nodes, 'node')}; {where}"
    return [
        ("machine", f"{nodes}; {processor().strip()}"), ("software", f"Python {sys.version.split()[0]}, {library}"),
        ("date", f"{datetime.now().astimezone():%Y-%m-%d %H:%M %z}"),
    ]


def _command(ranks: int) -> str:
    return " ".join([start_command(ranks), *map(shlex.quote, sys.argv[1:])])


class trace:
    """Trace what runs on a mesh inside a `with` block: `with rma_mm.trace("t.json", mesh):`.

    Collective. At the end of the block the traces of all ranks are written as one timeline. If the path ends in .html,
    this is a page that opens in a browser with the network off (`rma_mm[report]` draws it). Else it is JSON in the
    Trace Event Format, for Perfetto and Chrome. If the block raises an error, nothing is written.

    Parameters
    ----------
    path : path-like
        The file; it is replaced as a whole.
    mesh : Mesh, optional
        The ranks; the default mesh if not given.

    Raises
    ------
    FileFormatError
        If the file cannot be written; found before the block runs.
    OptionError
        If bokeh is not installed, for a page; or if the mesh is being traced already.

    Notes
    -----
    Products of matrices and chains are traced, batches are not. A plan binds its operations again when tracing begins
    and ends. Pretended ranks cannot be traced, as their times say nothing.
    """

    def __init__(self, path: str | os.PathLike[str], mesh: Mesh | None = None) -> None:
        if CONTROLLERS or rank_state().is_pretended:
            raise OptionError("trace: pretended ranks take turns, so their times say nothing; start with mpiexec")
        self.path, self.mesh = path, mesh or default_mesh()
        self.trace = Trace()

    def __enter__(self) -> Trace:
        mesh = self.mesh
        with agreed(mesh.comm, "trace", path=os.fspath(self.path)):
            if mesh.trace is not None:
                raise OptionError("trace: this mesh is being traced already; leave that block first")
            if mesh.rank == 0:
                if is_page(self.path):
                    require_bokeh()
                check_target(f"trace {display_path(self.path)}", self.path)
        self._put(self.trace)
        barrier(mesh.comm)
        self._repetition = self.trace.repetition()
        self._repetition.__enter__()
        return self.trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put(None)
        if kind is not None:
            return
        self._repetition.__exit__(None, None, None)
        mesh = self.mesh
        records = gathered(self.trace, mesh.comm)
        with agreed(mesh.comm, "trace"):
            if mesh.rank == 0:
                write_whole(f"trace {display_path(self.path)}", self.path, self._text(records))

    def _text(self, records: Sequence[Record]) -> str:
        mesh = self.mesh
        if not is_page(self.path):
            about = dict(machine_facts(mesh))
            return json.dumps(timeline(records, mesh.grid, mesh.node_of, about), allow_nan=False) + "\n"
        traffic = traffic_of(records, mesh.size) if mesh.size <= RANKS else None
        ran = max((end - start for each in records for start, end in each.repetitions), default=0)
        facts = [("block", f"{seconds_text(ran / 1e9)} from its first to its last rank"), *machine_facts(mesh)]
        title = f"What {mesh.size} ranks did"
        return report_page(ReportContent(title, facts, records, (), traffic, command=_command(mesh.size)))

    def _put(self, trace: Trace | None) -> None:
        self.mesh.trace = trace
        for each in list(self.mesh.prepared):
            retrace: Callable[[Trace | None], None] | None = getattr(each, "retrace", None)
            if retrace is not None:
                retrace(trace)

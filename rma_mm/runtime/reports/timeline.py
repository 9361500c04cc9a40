"""The traces of all ranks as one timeline, on one clock, in the Trace Event Format of Chrome and Perfetto.

A process of the timeline is a node, a thread of it a rank, and beside each rank stand as many rows for its transfers as
it ever had under way at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from time import perf_counter_ns as clock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rma_mm.geometry.mesh import MeshShape
from rma_mm.policy.model.cost_model import CostModel
from rma_mm.runtime.execution.tracing import Trace, TraceEvent
from rma_mm.schedule.schedule import Schedule
from rma_mm.windows.waiting import barrier, wait

if TYPE_CHECKING:
    from mpi4py import MPI

    from rma_mm.policy.simulator.simulate import Simulated

PREDICTED = "predicted"  # name used instead of a host, and before the names of rows, in a predicted timeline
PINGS = 32  # number of times that a rank asks rank 0 for the time; the quickest answer counts
TAG = 7


class Record(NamedTuple):
    """The trace of one rank, on the clock of rank 0."""

    rank: int
    host: str
    calls: list[TraceEvent]  # what the rank itself did, one after the other
    transfers: list[TraceEvent]  # what went on beside it
    repetitions: list[tuple[int, int]]  # start and end of each product, in nanoseconds


def gathered(trace: Trace, comm: MPI.Intracomm) -> list[Record]:
    """Return the traces of all ranks, on rank 0; nothing on the others. Collective over `comm`."""
    ahead = clock_offset(comm)
    calls, transfers = (
        [event._replace(start=event.start + ahead, end=event.end + ahead) for event in events]
        for events in (trace.calls, trace.transfers)
    )
    repetitions = [(start + ahead, end + ahead) for start, end in trace.repetitions]
    barrier(comm)  # those who wait for rank 0 to have told others the time must not spin
    return comm.gather(Record(comm.rank, socket.gethostname(), calls, transfers, repetitions)) or []


def clock_offset(comm: MPI.Intracomm) -> int:
    """Nanoseconds by which rank 0's clock is ahead of this rank's. Collective over `comm`.

    By the time that rank 0 tells and the shortest way there and back (Cristian, Probabilistic clock synchronization,
    1989, section 3): the truth lies within half that way. Where it may be zero it is, since processes of one machine
    read one clock.
    """
    told = np.zeros(1, np.int64)
    if comm.rank == 0:
        for other in range(1, comm.size):
            for _ in range(PINGS):
                wait(comm.Irecv(told, other, TAG))
                told[0] = clock()
                wait(comm.Isend(told, other, TAG))
        return 0
    answers = []
    for _ in range(PINGS):
        start = clock()
        wait(comm.Isend(told, 0, TAG))
        wait(comm.Irecv(told, 0, TAG))
        end = clock()
        answers.append((end - start, int(told[0]) - (start + end) // 2))
    return offset_of(answers)


def offset_of(answers: Iterable[tuple[int, int]]) -> int:
    """Return the offset among (round trip, offset) that the shortest round trip found; 0 if that may be meant."""
    trip, offset = min(answers)
    return offset if abs(offset) > trip / 2 else 0


def timeline(
    records: Sequence[Record], mesh: MeshShape, node_of: Sequence[int], facts: dict[str, Any],
    predicted: Sequence[Record] = (),
) -> dict[str, Any]:
    """Return the JSON object, for rank 0's records. Times are in microseconds from the start of the first product.

    `node_of`: the node of every rank, those beyond the mesh too. `facts` are told along with the events. predicted:
    what one product was expected to be, whose lanes begin where the first product does.
    """
    origin = min((record.repetitions[0][0] for record in records if record.repetitions), default=0)
    events = process(1, "products") + thread(1, 1, "repetitions")
    for number, spans in enumerate(zip(*(record.repetitions for record in records), strict=True)):
        first, last = min(start for start, _ in spans), max(end for _, end in spans)
        events.append(span(TraceEvent(f"repetition {number + 1}", "repetition", first, last, {}), 1, 1, origin))
    nodes = 1 + max(node_of)
    events += lanes(records, mesh, node_of, origin, 2)
    events += lanes(predicted, mesh, node_of, 0, 2 + nodes)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def lanes(
    records: Sequence[Record], mesh: MeshShape, node_of: Sequence[int], origin: int, first: int
) -> list[dict[str, Any]]:
    """A process for each node, from the number `first` on, and in it a row for each rank and for its transfers."""
    rows = {record.rank: rows_of(record.transfers) for record in records}
    width = 1 + max(map(len, rows.values()), default=0)
    nodes = 1 + max(node_of)
    events: list[dict[str, Any]] = []
    for node in range(nodes if records else 0):
        host = next(record.host for record in records if node_of[record.rank] == node)
        events += process(first + node, f"node {node} ({host})")
    for record in records:
        place, number = first + node_of[record.rank], first + nodes + width * record.rank
        kind = f"{PREDICTED} " if record.host == PREDICTED else ""
        name = f"rank {record.rank} {where(mesh, record.rank)}"
        for row, (title, noted) in enumerate([(name, record.calls), *titled(record.rank, rows[record.rank])]):
            events += thread(place, number + row, kind + title)
            events += [span(event, place, number + row, origin) for event in noted]
    return events


def predicted_run(schedule: Schedule, cost_model: CostModel, ranks: int, most: int) -> list[Record]:
    """Return the predicted timeline of each rank for one execution; empty for meshes of more than `most` ranks."""
    return predicted_records(simulated_by(schedule, cost_model), ranks) if schedule.mesh.size <= most else []


def simulated_by(schedule: Schedule, cost_model: CostModel) -> Simulated:
    from rma_mm.policy.simulator.simulate import simulate

    return simulate(
        schedule, cost_model.machine, cost_model.itemsize, cost_model.dtype, cost_model.kernel,
        dict(cost_model.flavours), cost_model.accum_itemsize, is_noted=True,
    )


def predicted_records(simulated: Simulated, ranks: int) -> list[Record]:
    """Return what a simulation recorded for each rank; empty for ranks beyond the mesh."""
    records = [Record(rank, PREDICTED, [], [], []) for rank in range(ranks)]
    for each in simulated.noted:
        begin, end = round(1e9 * each.begin), round(1e9 * each.end)
        event = TraceEvent(each.name, each.kind, begin, end, {"operation": each.what})
        record = records[each.rank]
        (record.transfers if each.is_beside else record.calls).append(event)
    return records


def rows_of(transfers: Iterable[TraceEvent]) -> list[list[TraceEvent]]:
    """Return the transfers in as few rows as hold them without overlapping."""
    rows: list[list[TraceEvent]] = []
    for event in sorted(transfers, key=lambda event: event.start):
        free = next((row for row in rows if row[-1].end <= event.start), None)
        if free is None:
            rows.append([event])
        else:
            free.append(event)
    return rows


def titled(rank: int, rows: list[list[TraceEvent]]) -> list[tuple[str, list[TraceEvent]]]:
    return [(f"rank {rank} transfers {number}", row) for number, row in enumerate(rows, 1)]


def where(mesh: MeshShape, rank: int) -> str:
    """Return the place of a rank on the mesh, in words."""
    if rank >= mesh.size:
        return "beyond the mesh"
    return f"at ({', '.join(map(str, mesh.coords(rank).values()))})"


# -- the format -----------------------------------------------------------------------------------


def span(event: TraceEvent, process: int, thread: int, origin: int) -> dict[str, Any]:
    return {
        "name": event.name,
        "cat": event.kind,
        "ph": "X",
        "ts": (event.start - origin) / 1000,
        "dur": (event.end - event.start) / 1000,
        "pid": process,
        "tid": thread,
        "args": event.facts,
    }


def process(number: int, name: str) -> list[dict[str, Any]]:
    return [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}},
    ]


def thread(process: int, number: int, name: str) -> list[dict[str, Any]]:
    return [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": name}},
        {"name": "thread_sort_index", "ph": "M", "pid": process, "tid": number, "args": {"sort_index": number}},
    ]

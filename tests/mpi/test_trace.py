"""Traces of real products: what they tell is what the schedule asked for and what the transports counted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.algorithms import ALGORITHMS
from rma_mm.elements.dtypes import accumulator
from rma_mm.policy.planner.candidates import default_mesh
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.execution.tracing import Trace
from rma_mm.runtime.reports import timeline
from rma_mm.runtime.reports.timeline import clock_offset, gathered
from rma_mm.schedule.ops import Claim, Multiply
from rma_mm.schedule.schedule import expand
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused
from tests.reference import whole_numbers
from tests.thorough import nightly, thorough, usually

SHAPE = (37, 300, 260)
"""m, n, k: neither even nor small enough for panels to be one."""


def traced_product(mesh, name, dtype):
    """The plan, its trace of the second of two products, and what that moved."""
    m, n, k = SHAPE
    rng = np.random.default_rng(0)
    a, b = (whole_numbers(rng, shape).astype(dtype) for shape in ((m, k), (k, n)))
    with rma_mm.plan(*(Operand(x.shape, x.dtype) for x in (a, b)), mesh, algorithm=name) as plan:
        trace = plan.trace = Trace()
        A, B = (DistMatrix.from_numpy(x, mesh, plan.layouts[letter]) for x, letter in ((a, "A"), (b, "B")))
        plan.execute(A, B)
        trace.clear()
        with trace.repetition():
            C = plan.execute(A, B)
        assert np.array_equal(C.to_numpy(), a @ b)
        ops = expand(plan.schedule, mesh.rank, plan.claims) if mesh.is_member else []
        return plan, trace, ops


def check_trace(plan, trace, ops):
    """One rank's trace against its own operations and counters."""
    multiplies = [event for event in trace.calls if event.kind == "multiply"]
    assert [event.facts["operation"] for event in multiplies] == [str(op) for op in ops if isinstance(op, Multiply)]
    for before, after in pairwise(trace.calls):
        assert before.start <= before.end <= after.start
    (start, end), *more = trace.repetitions
    assert not more
    for event in trace.calls + trace.transfers:
        assert start <= event.start <= event.end <= end
    counting = multiplies + trace.transfers
    words = [sum(event.facts["words"][where] for event in counting) for where in ("intra_node", "inter_node")]
    assert words == [plan.words.words_intra, plan.words.words_inter]
    itemsizes = {x: plan.choice.operands[x].dtype.itemsize for x in "AB"} | {"C": accumulator(plan.c_dtype).itemsize}
    for event in trace.transfers:
        counted = sum(event.facts["words"].values())
        assert event.facts["bytes"] == counted * itemsizes[event.facts["operand"]] or not counted


@parallel(ranks=(4,), env=("node", "nolocal"), timeout=120, usual="nolocal")
@pytest.mark.parametrize("half", usually(1, [0, 1], rest=nightly))
def test_a_trace_tells_what_was_done(comm, half):
    """Of every algorithm, on every rank: each product of its schedule once and in order, each word that it moved."""
    check_all(comm, "float32", [*ALGORITHMS][half::2])


@thorough
@parallel(ranks=(4,), env=("cliques",), timeout=120)
def test_what_is_summed_in_another_type_is_told_in_bytes_of_that(comm):
    """Halves are summed as float32, also on their way."""
    check_all(comm, "float16", ALGORITHMS)


def check_all(comm, dtype, names):
    """Algorithms on a mesh that each takes."""
    for name in names:
        with Mesh(default_mesh(comm.size, SHAPE, algorithm=name), comm) as mesh:
            plan, trace, ops = traced_product(mesh, name, dtype)
            check_trace(plan, trace, ops)
            work = sum(event.facts["multiply_adds"] for event in trace.calls if event.kind == "multiply")
            m, n, k = SHAPE
            assert comm.allreduce(work) == m * n * k, name
            claims = comm.allreduce(sum(event.kind == "claim" for event in trace.calls))
            pool = plan.schedule.pool
            assert claims == (pool.tasks + mesh.grid.size if pool else 0)
            assert bool(pool) == any(isinstance(op, Claim) for op in plan.schedule.program(0))
            records = gathered(trace, mesh.comm)
            assert [record.rank for record in records] == (list(range(comm.size)) if comm.rank == 0 else [])


@parallel(ranks=(1, 3), env=("node",))
def test_processes_of_one_machine_have_one_clock(comm):
    """Nothing is shifted by what it takes a busy rank to answer."""
    assert clock_offset(comm) == 0


@parallel(ranks=(2, 3), env=("node",))
def test_clocks_of_other_machines_are_found_out(comm):
    """Seconds apart, and told to far less than that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "clock", lambda: perf_counter_ns() + comm.rank * 10**9)
        assert abs(timeline.clock_offset(comm) + comm.rank * 10**9) < 5 * 10**7


# -- on the command line --------------------------------------------------------------------------


def events_by_row(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The events of each thread, by its name."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in found["traceEvents"] if event["name"] == "thread_name"
    }
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    assert len(rows) == len(names)
    for event in found["traceEvents"]:
        if event["ph"] != "M":
            assert event["ph"] == "X"
            rows[names[event["pid"], event["tid"]]].append(event)
    return rows


def check_timeline(directory: Path, ranks: int, repeat: int, itemsize: int) -> dict[str, list[dict[str, Any]]]:
    """The timeline t.json against the report r.json of the same run."""
    found, report = (json.loads((directory / name).read_text()) for name in ("t.json", "r.json"))
    assert found["displayTimeUnit"] == "ms"
    assert found["otherData"] == report
    rows = events_by_row(found)
    expected = {name: rows.pop(name) for name in list(rows) if name.startswith("predicted ")}
    lanes = [events for name, events in expected.items() if " transfers " not in name]
    assert len(lanes) == ranks and {e["cat"] for events in lanes for e in events} >= {"multiply", "wait"}
    assert min(event["ts"] for events in lanes for event in events) >= 0
    assert [event["name"] for event in rows["repetitions"]] == [f"repetition {n + 1}" for n in range(repeat)]
    assert rows["repetitions"][0]["ts"] == 0
    for events in rows.values():
        for before, after in pairwise(sorted(events, key=lambda event: (event["ts"], event["dur"]))):
            assert before["dur"] >= 0
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3  # nanoseconds
    main = {name: events for name, events in rows.items() if name.startswith("rank") and " transfers " not in name}
    assert [name.split(" (")[0] for name in sorted(main)] == [f"rank {rank} at" for rank in range(ranks)]
    m, n, k = report["shape"]
    multiplies = [event for events in main.values() for event in events if event["cat"] == "multiply"]
    assert sum(event["args"]["multiply_adds"] for event in multiplies) == repeat * m * n * k
    transfers = [event for name in set(rows) - set(main) - {"repetitions"} for event in rows[name]]
    last = rows["repetitions"][-1]["ts"]  # the report counts the words of one product
    counting = [event["args"] for event in multiplies + transfers if event["ts"] >= last]
    for where in ("intra_node", "inter_node"):
        assert sum(facts["words"][where] for facts in counting) == report["words"][where]
    moved = sum(facts["bytes"] for facts in counting if any(facts["words"].values()))
    assert moved == (report["words"]["intra_node"] + report["words"]["inter_node"]) * itemsize
    assert any(event["args"]["between_nodes"] for event in transfers) <= (report["nodes"] > 1)
    return rows


def check_run(comm: MPI.Intracomm, directory: Path, line: str, kinds: set[str]) -> None:
    """Work, words and bytes of all repetitions, and of nothing else; no two events of a row at once."""
    line += " --shape 300,200,500 --repeat 2 --trace t.json --json r.json --quiet"
    assert command(comm, line, directory) == (0, "", "")
    assert sorted(path.name for path in directory.iterdir()) == ["r.json", "t.json"]
    rows = check_timeline(directory, comm.size, 2, 4)
    found = {event["cat"] for name, events in rows.items() if " transfers " in name for event in events}
    assert found >= kinds
    if "queue" in line:
        assert any(event["cat"] == "claim" for events in rows.values() for event in events)


@parallel(ranks=(1, 2), env=("node",))
def test_a_timeline_is_the_report_in_time(comm: MPI.Intracomm, tmp_path: Path) -> None:
    line, kinds = (("stationary_c", set()), ("summa_c", {"broadcast"}))[comm.size - 1]
    check_run(comm, tmp_path, f"--algorithm {line}", kinds)


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("stationary_c --window created", {"get"}),
        ("queue", {"accumulate"}),
        ("row_parallel --dtype float16", {"reduce-scatter"}),
    ],
)
@parallel(ranks=(4,), env=("node",))
def test_a_timeline_of_four_ranks(comm: MPI.Intracomm, tmp_path: Path, line: str, kinds: set[str]) -> None:
    check_run(comm, tmp_path, f"--algorithm {line}", kinds)


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("cannon", {"shift"}),
        ("stationary_c", set()),
        ("stationary_c --mesh 4x1", set()),
        ("stationary_a", {"accumulate"}),
    ],
)
@parallel(ranks=(4,), env=("cliques",))
def test_a_timeline_of_two_nodes(comm: MPI.Intracomm, tmp_path: Path, line: str, kinds: set[str]) -> None:
    check_run(comm, tmp_path, f"--algorithm {line}", kinds)


@parallel(ranks=(4,), env=("cliques",))
def test_long_transfers_between_nodes_begin_behind_a_barrier(comm: MPI.Intracomm) -> None:
    """Its messages would come behind theirs. Short ones begin in front of it."""
    is_behind = []
    with Mesh((2, 2), comm) as mesh:
        for size in (32, 512):
            x = Operand((size, size), np.dtype("float32"))
            with rma_mm.plan(x, x, mesh, algorithm="stationary_b") as plan:
                trace = plan.trace = Trace()
                A, B = (DistMatrix.from_numpy(np.ones(x.shape, x.dtype), mesh, plan.layouts[y]) for y in "AB")
                plan.execute(A, B)
                kinds = [event.kind for event in trace.calls]
                is_behind.append(kinds.index("barrier") < kinds.index("start"))
    assert is_behind == [False, True]


@parallel(ranks=(3,), env=("node",))
def test_ranks_beyond_the_mesh_are_there_too(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """They wait; on standard output there is nothing but the timeline."""
    done = command(comm, "--mesh 2 --shape 50,60,70 --trace -", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = events_by_row(json.loads(done.stdout))
    assert {event["cat"] for event in rows["rank 2 beyond the mesh"]} == {"wait", "flush"}


@pytest.mark.parametrize("path", ["no/such/t.json", "."])
@parallel(ranks=(3,), env=("node",))
def test_a_place_that_cannot_be_written_is_refused_before_the_product(
    comm: MPI.Intracomm, tmp_path: Path, path: str
) -> None:
    """One message, and nothing is left behind."""
    refused(command(comm, f"--trace {path} --shape 64,64,64", tmp_path), f"--trace {path}: ")
    assert not list(tmp_path.iterdir())


@parallel(ranks=(2,), env=("node",))
def test_a_dry_run_writes_no_timeline(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """Nothing was done."""
    assert command(comm, "--trace t.json --dry-run --shape 64,64,64", tmp_path).returncode == 0
    assert not list(tmp_path.iterdir())

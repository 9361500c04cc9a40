"""The metrics of meshes on real ranks: what they count, the file, and who is named."""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

import rma_mm
from rma_mm.errors import DisagreementError, FileFormatError
from rma_mm.policy.model.machine import COLLECTIVES, FLAVOURS, ONE_SIDED, Cost, Kernel, Machine
from rma_mm.runtime.calibration.lookup import VARIABLE
from rma_mm.runtime.ranks import metrics as module
from rma_mm.runtime.watching.slowness import LONG, SEEN
from tests.doors import command
from tests.launch import parallel


def fast(beta: float) -> Machine:
    """A machine on which a byte takes so many seconds on the way, and nothing else takes any."""
    moves = dict.fromkeys([*(f"{x}.{move}" for x in FLAVOURS for move in ONE_SIDED), *COLLECTIVES], Cost(1e-9, beta))
    costs = {"own": {"copy": Cost(1e-9, beta)}, "node": moves, "between": moves}
    return Machine("fast", costs, {"float64 blas": Kernel(1e-9, 1e-18)}, 64, operation=0, meeting=1e-9, measured=True)


SHAPE = (48, 36, 40)
ALGORITHMS = ("stationary_c", "gather_gemm", "row_parallel", "queue")


def shared_directory(comm) -> Path:
    """A new directory that all ranks know."""
    return Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))


def read(path: Path) -> dict[tuple[str, ...], float]:
    """The samples of a file."""
    families = text_string_to_metric_families(path.read_text())
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


@parallel(ranks=(1, 2, 4), env=("node", "cliques", "nolocal"))
def test_words_of_the_file_are_those_of_the_plans(comm):
    """Exactly, and messages too, by link; the file is written last when the mesh is closed."""
    m, n, k = SHAPE
    path = shared_directory(comm) / "job.prom"
    words = np.zeros(4, np.int64)
    with rma_mm.Mesh((comm.size,), comm) as mesh:
        mesh.metrics.write(path)
        a, b = np.ones((m, k)), np.ones((k, n))
        for name in ALGORITHMS:
            with rma_mm.plan(a, b, mesh, algorithm=name) as plan:
                for _ in range(3):
                    plan.execute(a, b)
                    counted = plan.words
                    words += [counted.words_intra, counted.words_inter, counted.messages, counted.messages_inter]
                    assert mesh.metrics.last.traffic == counted
                    assert 0 < mesh.metrics.last.multiply + mesh.metrics.last.wait < mesh.metrics.last.seconds
        totals = mesh.metrics.collect()
        assert (totals is None) == (comm.rank > 0)
    intra, inter, messages, far = (int(each) for each in sum(comm.allgather(words)))
    if comm.rank == 0:
        found = read(path)
        assert found["rma_mm_products_total",] == 3 * len(ALGORITHMS)
        assert found["rma_mm_words_total", "node"] == intra
        assert found["rma_mm_words_total", "between"] == inter
        assert found["rma_mm_messages_total", "node"] == messages - far
        assert found["rma_mm_messages_total", "between"] == far
        assert comm.size == 1 or intra + inter > 0
        assert totals.by_link == {"node": (intra, messages - far), "between": (inter, far)}
        assert os.listdir(path.parent) == [path.name]
        least, middle, most = totals.spread("multiplying")
        assert 0 < least <= middle <= most
        assert totals.latency("get").quantile(0.5) <= totals.latency("get").quantile(0.99) < 60


@parallel(ranks=(2,), env=("nolocal",))
def test_the_command_writes_what_it_reports(comm, tmp_path):
    """Of four products, three of which are timed; and that nothing was wrong."""
    done = command(comm, "--shape 70,50,40 --repeat 3 --json r.json --metrics m.prom --quiet", tmp_path)
    assert done == (0, "", "")
    found, report = read(tmp_path / "m.prom"), json.loads((tmp_path / "r.json").read_text())
    assert found["rma_mm_products_total",] == 4
    assert found["rma_mm_words_total", "between"] == 4 * report["words"]["inter_node"] > 0
    assert found["rma_mm_messages_total", "between"] == 4 * report["messages"] > 0
    assert found["rma_mm_checksum_failures_total",] == 0


@parallel(ranks=(2,), env=("node",))
def test_files_that_cannot_be_written(comm):
    """At once: an error on every rank. Later: said once, and the products go on; then it is written again."""
    directory = shared_directory(comm)
    a = np.eye(8)
    with rma_mm.Mesh((comm.size,), comm) as mesh, mock.patch.object(module, "EVERY", 0.0):
        with pytest.raises(FileFormatError, match=r"metrics .*missing.* does not exist"):
            mesh.metrics.write(directory / "missing" / "job.prom")
        with pytest.raises(DisagreementError, match="path"):
            mesh.metrics.write(directory / f"{comm.rank}.prom")
        path = directory / "sub" / "job.prom"
        if comm.rank == 0:
            path.parent.mkdir()
        comm.barrier()
        mesh.metrics.write(path)
        if comm.rank == 0:
            path.unlink()
            path.parent.rmdir()
        with redirect_stderr(io.StringIO()) as said:
            for _ in range(4):
                rma_mm.matmul(a, a, mesh)
        assert comm.allgather(said.getvalue().count("the job goes on")) == [1, 0]
        if comm.rank == 0:
            path.parent.mkdir()
        comm.barrier()
        rma_mm.matmul(a, a, mesh)
        if comm.rank == 0:
            assert read(path)["rma_mm_products_total",] == 4


@parallel(ranks=(2,), env=("node",))
def test_it_is_written_at_most_every_few_seconds(comm):
    path = shared_directory(comm) / "job.prom"
    a = np.eye(8)
    with rma_mm.Mesh((comm.size,), comm) as mesh, mock.patch.object(module, "EVERY", 0.5):
        mesh.metrics.write(path)
        first, seen = path.stat().st_mtime_ns, set()
        begun = time.monotonic()
        while comm.bcast(time.monotonic() - begun) < 1.2:
            rma_mm.matmul(a, a, mesh)
            seen.add(path.stat().st_mtime_ns)
        assert 1 <= len(seen - {first}) <= 3


@parallel(ranks=(3,), env=("node",))
def test_a_slowed_rank_is_named_once_on_every_rank(comm):
    """Its multiplies sleep as long again as they take at least; the others' are as they were."""
    a = np.ones((6, 6), np.float32)
    with rma_mm.Mesh((comm.size,), comm) as mesh, rma_mm.plan(a, a, mesh, algorithm="data_parallel") as plan:
        slow_from, during = SEEN + 10, mesh.progress.during
        rest = 0.004

        def slowed(work):
            during(work)
            time.sleep(rest)

        mesh.progress.during = slowed
        plan.prepare(a, a)
        for number in range(slow_from + 10):
            if number == slow_from and comm.rank == 1:
                rest = 0.06
            assert not mesh.fallbacks or number > slow_from
            plan.execute(a, a)
        assert len(mesh.fallbacks) == 1 and plan.watch.was_slow
        assert f"rank 1 on host {mesh.hosts[1]}: its multiplies take" in mesh.fallbacks[0]
        totals = mesh.metrics.collect()
        if comm.rank == 0:
            assert [tally.is_slow for tally in totals.tallies] == [False, True, False]
            assert 'rma_mm_straggler{host=' in totals.text()


@parallel(ranks=(2,), env=("node", "nolocal"))
def test_a_slow_link_is_named_once_on_every_rank(comm):
    """Of a machine that is calibrated as faster than any; and what is as fast as calibrated is not named."""
    path = shared_directory(comm) / "machine.json"
    a = np.ones((128, 128))
    for beta, is_slow in ((1e-15, True), (1e-6, False)):
        if comm.rank == 0:
            path.write_text(json.dumps(fast(beta).as_json()))
        comm.barrier()
        with mock.patch.dict(os.environ, {VARIABLE: str(path)}), rma_mm.Mesh((2,), comm, window="allocated") as mesh:
            A = rma_mm.DistMatrix.from_numpy(a, mesh, "i")
            plan = rma_mm.plan(A, A, mesh, algorithm="stationary_c")
            for number in range(LONG + 5):
                plan.execute(A, A)
                assert bool(mesh.fallbacks) == (is_slow and number >= LONG)
            link = "between" if mesh.num_nodes > 1 else "node"
            found = [note for note in mesh.fallbacks if note.startswith(f"link {link}: rank ")]
            assert len(found) == len(mesh.fallbacks) == is_slow
            totals = mesh.metrics.collect()
            assert totals is None or (totals.bandwidth(link) < 0.5) == is_slow

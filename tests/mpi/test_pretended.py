"""Pretended ranks do what real ones do: the same results, words and errors, in one process."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import bench.trust.worker
import rma_mm
from bench.trust import trial
from bench.trust.worker import Worker
from rma_mm import DistMatrix, Mesh
from rma_mm.algorithms import ALGORITHMS
from rma_mm.errors import (
    AlgorithmError,
    DisagreementError,
    MemoryLimitError,
    MeshError,
    OptionError,
    WindowError,
)
from rma_mm.policy.model.machine import Machine
from rma_mm.schedule.verify.checker import verify
from tests.conformance import conform
from tests.mpi.test_habits import EXPRESSIONS, LAYOUTS, compared
from tests.mpi.test_rows import AXES, PRODUCTS, check_product
from tests.mpi.test_windows import MpiWorld
from tests.processes import mpirun
from tests.thorough import usually

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="pretended ranks need a process of their own")

SHAPES = ["2x3", "2x2x2", "5", "1x1", "3x3", "1x2x3"]
A, B = np.random.default_rng(3).standard_normal((2, 13, 9))


@pytest.mark.parametrize("shape", usually(2, SHAPES))
def test_expressions_of_numpy(shape):
    u, v = A[:, 0], B[0]
    with rma_mm.pretend(tuple(map(int, shape.split("x")))) as mesh:
        for layout in LAYOUTS[: 5 if mesh.grid[0] > 1 else 4]:
            layout = layout if len(mesh.grid) > 1 else None
            names = {"np": np, "u": u, "v": v}
            ours = {x: DistMatrix.from_numpy(y, mesh, layout) for x, y in (("A", A), ("B", B))}
            for text in EXPRESSIONS:
                wanted = eval(text.replace(".H", ".conj().T"), {**names, "A": A, "B": B})
                made = eval(text, {**names, **ours})
                if isinstance(wanted, np.ndarray | np.generic):
                    compared(made, wanted)
                else:
                    assert np.array_equal(made, wanted), text


@pytest.mark.parametrize("shape", usually(2, SHAPES))
def test_every_algorithm(shape):
    """The result is right, and counters of windows and channels agree with the movements that plans name."""
    with rma_mm.pretend(tuple(map(int, shape.split("x")))) as mesh:
        for at, name in enumerate(ALGORITHMS):
            if AXES.get(name, len(mesh.grid)) == len(mesh.grid):
                product = PRODUCTS[at % 3].rolled(at)
                assert not any(mesh.run(partial(check_product, name=name, product=product)))


def test_words_are_those_of_the_schedule():
    def words_of(mesh, name):
        x = np.ones((24, 24))
        plan = rma_mm.plan(x, x, mesh, algorithm=name)
        plan.execute(x, x)
        return mesh.comm.allreduce(plan.words.words_intra), sum(verify(plan.schedule).words)

    with rma_mm.pretend((2, 2)) as mesh:
        for name in ("cannon", "summa_c", "stationary_c", "queue"):
            moved, counted = mesh.run(words_of, name)
            assert moved == counted > 0


@pytest.mark.parametrize("shape", usually(1, SHAPES[:3]))
def test_whatever_is_drawn_is_numpys(shape, tmp_path, monkeypatch):
    """The session of real ranks: placements, types, semirings, epilogues, batches, chains and files.

    Cases patch constants of modules, which these ranks share: what they leave behind is put right at the end.
    """
    for module, name in ((trial.decisions, "NARROW"), (trial.closing, "COMPILE_FROM")):
        monkeypatch.setattr(module, name, getattr(module, name))

    def session(mesh):
        with mock.patch.object(bench.trust.worker, "registered", nullcontext) if mesh.rank else nullcontext():
            worker = Worker(mesh.comm, 38, "pretended", tmp_path)
        worker.meshes = {}
        found = [(number, *worker.case(number)) for number in range(40)]
        worker.close()
        return [(n, str(case), told) for n, case, told in found if told[0] not in ("right", "refused")]

    never = mock.patch.object(bench.trust.worker, "is_watched", return_value=False)  # a variable of all ranks says so
    with never, rma_mm.pretend(tuple(map(int, shape.split("x")))) as mesh:
        failures = mesh.run(session)
    assert failures == []


def test_windows_conform():
    with rma_mm.pretend(3) as mesh:
        mesh.run(lambda its: conform(MpiWorld(its.comm, "pretended")))


def test_values_that_differ_come_by_rank():
    with rma_mm.pretend((2, 3)) as mesh:
        assert mesh.rank == [0, 1, 2, 3, 4, 5] and mesh.size == 6 and mesh.coords[4] == (1, 1)
        C = rma_mm.matmul(A, B.T)
        assert isinstance(C, DistMatrix) and isinstance(mesh, Mesh)
        assert "13 x 13" in repr(C) and repr(mesh).startswith("Mesh(2x3")
        assert [tile.shape for tile in DistMatrix.from_numpy(A, mesh, "P('i', 'j')").tile][::3] == [(6, 3), (7, 3)]
        C.tile[0][...] = 7
        assert C.to_numpy()[0, 0] == 7


def test_programs_talk_by_the_meshs_communicator():
    def program(mesh, start):
        comm, mine = mesh.comm, np.full(2, mesh.rank + start)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.send(comm.rank, right, tag=3)
        request = comm.Isend(mine, right, tag=4)
        came = np.empty_like(mine)
        comm.Recv(came, left, tag=4)
        request.Wait()
        total, every = np.empty_like(mine), np.empty((comm.size, 2), mine.dtype)
        comm.Allreduce(mine, total, MPI.MAX)
        comm.Allgather(mine, every)
        half = comm.Split(comm.rank % 2, -comm.rank)
        return (
            comm.recv(source=left, tag=3) == left, came[0] == left + start, total[0], tuple(every[:, 1].tolist()),
            comm.bcast(comm.rank, 2), comm.gather(comm.rank), comm.scatter(list("abcd")), comm.allreduce(1), half.rank,
            comm.reduce(comm.rank, root=1), comm.alltoall([comm.rank] * 4),
        )  # fmt: skip

    with rma_mm.pretend((2, 2)) as mesh:
        got = mesh.run(program, 10)
        assert {each[:5] for each in got} == {(True, True, 13, (10, 11, 12, 13), 2)}
        assert [each[5] for each in got] == [[0, 1, 2, 3], None, None, None]
        assert [each[6:] for each in got] == [
            ("a", 4, 1, None, [0, 1, 2, 3]), ("b", 4, 1, 6, [0, 1, 2, 3]), ("c", 4, 0, None, [0, 1, 2, 3]),
            ("d", 4, 0, None, [0, 1, 2, 3]),
        ]  # fmt: skip


def test_no_speed_is_claimed():
    with rma_mm.pretend((2, 2)) as mesh, mock.patch.object(Machine, "measured", True):
        plan = rma_mm.plan(A, B.T)
        plan.execute(A, B.T)
        assert plan.predicted_seconds is None and mesh.metrics.last is None
        assert "on a typical machine" in str(plan) and "was not measured" in plan.explain()
        assert "times say nothing of any machine" in mesh.fallbacks[-1]
        with pytest.raises(OptionError, match="pretended ranks have no speed"):
            mesh.metrics.collect()


def test_errors_are_those_of_real_ranks():
    def one_fails(mesh):
        if mesh.rank == 2:
            raise KeyError("mine")
        rma_mm.matmul(A, B.T, mesh)

    def one_is_missing(mesh):
        if mesh.rank != 2:
            mesh.comm.barrier()

    with rma_mm.pretend((2, 2)) as mesh:
        with pytest.raises(AlgorithmError, match="did you mean cannon") as caught:
            rma_mm.matmul(A, B.T, algorithm="canon")
        assert not getattr(caught.value, "__notes__", [])
        with pytest.raises(DisagreementError, match="on rank 1"):
            mesh.run(lambda its: rma_mm.matmul(A, B.T, its, alpha=1 + (its.rank == 1)))
        with pytest.raises(DisagreementError, match="ranks 0, 1, 3 wait for rank 2, which came to the end"):
            mesh.run(one_is_missing)
    with rma_mm.pretend((2, 2)) as mesh, pytest.raises(KeyError, match="mine") as failed:
        mesh.run(one_fails)
    assert failed.value.__notes__ == ["rank 2 of 4 raised this"]


def test_what_pretended_ranks_cannot_do():
    with rma_mm.pretend((2, 2)) as mesh:
        for ask in (lambda _: MPI.COMM_WORLD.rank, lambda _: MPI.COMM_WORLD.Barrier()):
            with pytest.raises(MeshError, match=r"cannot call MPI.*mpiexec -n 4"):
                mesh.run(ask)
        with pytest.raises(MeshError, match="cannot call MPI"):
            MPI.COMM_WORLD.Get_size()
        with pytest.raises(MeshError, match=r"comm.Gatherv: pretended ranks do not know it"):
            mesh.comm.Gatherv(A, B)
        with pytest.raises(MeshError, match="are pretended already"), rma_mm.pretend(2):
            pass
        with pytest.raises(MeshError, match="Mesh: make it on pretended ranks"):
            rma_mm.Mesh((2, 2))
        with pytest.raises(WindowError, match="have 'pretended' only"):
            mesh.run(lambda its: Mesh((2, 2), window="shared"))
        assert mesh.run(lambda its: Mesh((4, 1)).grid.dims) == (4, 1)
    assert MPI.COMM_WORLD.size == 1
    with pytest.raises(WindowError, match="there are shared"):
        Mesh(window="pretended")
    for shape, says in (("x", "a shape is whole numbers"), ((0, 2), "at least one rank")):
        with pytest.raises(MeshError, match=says):
            rma_mm.pretend(shape)
    with pytest.raises(MemoryLimitError, match="use at most"), rma_mm.pretend((1000, 1000)):
        pass
    with Mesh(1) as real, rma_mm.pretend(2), pytest.raises(MeshError, match="of a mesh of real ranks"):
        rma_mm.matmul(A, B.T, real)


def test_under_mpiexec_it_is_one_error(tmp_path):
    (tmp_path / "product.py").write_text("import rma_mm\nwith rma_mm.pretend((2, 2)):\n    pass\n")
    done = mpirun(2, ["-m", "mpi4py", "product.py"], cwd=tmp_path, timeout=60)
    assert done.returncode == 1, done
    assert done.stderr.startswith("product.py:2: MeshError: pretend: mpiexec started 2 ranks, which are real; make")
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_shape_is_one_line():
    program = "import rma_mm\nrma_mm.pretend((2, 'x'))"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done
    assert "MeshError: pretend: got shape (2, 'x')" in done.stderr


def test_ctrl_c_ends_it():
    program = """
import os, rma_mm, signal, threading
def for_ever(mesh):
    while True:
        mesh.comm.Split(0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
with rma_mm.pretend(3) as mesh:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    mesh.run(for_ever)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT and done.stderr == "rma_mm: interrupted by SIGINT\n", done

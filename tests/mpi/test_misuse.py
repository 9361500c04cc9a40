"""Ranks that do not do the same: one error on all of them, and never a wait without end."""

import os
import threading
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.algorithms import ALGORITHMS, REGISTERED, register
from rma_mm.algorithms.text import in_text
from rma_mm.errors import AlgorithmError, DisagreementError, MeshError, OptionError
from rma_mm.runtime.calibration.site import Site
from tests.launch import parallel
from tests.processes import mpirun
from tests.thorough import nightly, usually

NODE = ("node",)


def same_error(comm, kind, call, *words):
    """`call` raises the same error of `kind` on every rank, and its message holds `words`."""
    with pytest.raises(kind) as caught:
        call()
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    for word in words:
        assert word in texts[0], texts[0]


def outcome(call):
    """The error that `call` raises on this rank, or None."""
    try:
        call()
    except Exception as error:
        return error
    return None


@parallel(ranks=(2, 3), env=NODE, timeout=30)
def test_meshes_in_another_order(comm):
    odd, x = comm.rank == 1, np.arange(36.0).reshape(6, 6)
    other = comm.Dup()
    with Mesh((comm.size,), comm) as one, Mesh((1, comm.size), other) as two:
        A, B = DistMatrix.from_numpy(x, one), DistMatrix.from_numpy(x, two)
        plans = [rma_mm.plan(a, a, layout="i" if a is A else "j") for a in (A, B)]
        for calls in (
            [lambda: A @ A, lambda: B @ B],
            [lambda: plans[0].execute(A, A), lambda: plans[1].execute(B, B)],
            [A.to_numpy, two.close],
            [lambda: Mesh((1,), comm), lambda: B.redistribute("i")],
        ):
            same_error(comm, DisagreementError, calls[odd], "different calls", f"shape (1, {comm.size})", "on rank 1")
        assert np.array_equal((A @ A).to_numpy(), x @ x)
        assert np.array_equal((B @ B).to_numpy(), x @ x)
    other.Free()
    with Mesh((comm.size,), comm) as mesh:  # the group is made anew
        assert np.array_equal(rma_mm.matmul(x, x, mesh).to_numpy(), x @ x)


@parallel(ranks=(3,), env=NODE, timeout=30)
def test_a_mesh_closed_by_one_rank_stays_open(comm):
    x = np.eye(5)
    with Mesh((3,), comm) as mesh:
        same_error(comm, DisagreementError, mesh.close if comm.rank == 2 else lambda: rma_mm.matmul(x, x, mesh),
                   "Mesh.close on rank 2", "matmul on ranks 0, 1")
        assert np.array_equal(rma_mm.matmul(x, x, mesh).to_numpy(), x)


@parallel(ranks=(3,), env=("node", "nolocal"), timeout=40)
def test_errors_of_a_progress_callback_come_after_the_product(comm):
    x = np.arange(144.0).reshape(12, 12)

    called = []

    def fail(done, total):
        called.append(done)
        raise ZeroDivisionError("the user's own")

    def call(done, total):
        called.append(done)
        A.to_numpy()

    with Mesh((1, 3), comm) as mesh:
        A = DistMatrix.from_numpy(x, mesh)
        for algorithm in ("queue", "srumma", "stationary_a"):
            plan = rma_mm.plan(A, A, algorithm=algorithm)
            for wrong in ((0, 1, 2), (1,)):
                C = DistMatrix.empty((12, 12), mesh, plan.layouts["C"], float)
                called.clear()
                error = outcome(partial(plan.execute, A, A, C, progress=fail if comm.rank in wrong else None))
                assert isinstance(error, ZeroDivisionError) == bool(called)
                assert len(called) <= 1
                assert called or algorithm == "queue" or comm.rank not in wrong
                assert np.array_equal(C.to_numpy(), x @ x)  # complete all the same
                assert np.array_equal(plan.execute(A, A).to_numpy(), x @ x)
            called.clear()
            error = outcome(partial(plan.execute, A, A, progress=call))
            assert (isinstance(error, OptionError) and "progress" in str(error)) == bool(called)
        assert np.array_equal((A @ A).to_numpy(), x @ x)


@parallel(ranks=(2,), env=NODE, timeout=30)
def test_a_mesh_wants_an_open_intracommunicator(comm):
    half = comm.Split(comm.rank)
    inter = half.Create_intercomm(0, comm, 1 - comm.rank)
    freed = comm.Dup()
    freed.Free()
    wrong_ones = ((MPI.COMM_NULL, "COMM_NULL"), (inter, "intercomm"), (freed, "freed"), ("x" * 999, "'xxx"), (3, "3"))
    for wrong, word in wrong_ones:
        with pytest.raises(MeshError, match=word) as caught:
            Mesh((2,), wrong)
        assert len(str(caught.value)) < 250
    inter.Free()
    half.Free()


@parallel(ranks=(2, 3), env=NODE, timeout=30)
def test_rows_that_differ_between_ranks(comm):
    x, odd = np.eye(8), comm.rank == 1
    known, base = dict(ALGORITHMS), ALGORITHMS["stationary_c"]
    texts = [in_text(algorithm) for algorithm in known.values()]
    assert comm.allgather(texts) == [texts] * comm.size
    assert len(set(texts)) == len(known)
    with Mesh((comm.size,), comm) as mesh:
        try:
            if odd:
                register(replace(base, name="mine"))
            for algorithm in ("auto", "srumma"):
                call = partial(rma_mm.matmul, x, x, mesh, algorithm=algorithm)
                same_error(comm, DisagreementError, call, "registered")
            if not odd:
                register(replace(ALGORITHMS["srumma"], name="mine"))
            same_error(comm, DisagreementError, lambda: rma_mm.plan_chain("C = A @ A", mesh, A=((8, 8), float)), "mine")
            for name, form in (("alike", lambda text: "none"), ("closure", lambda text: str(odd))):
                ALGORITHMS.pop("mine", None)
                REGISTERED.pop("mine", None)
                register(replace(base, name=name, form=form))
                if name == "alike":
                    assert np.array_equal(rma_mm.matmul(x, x, mesh, algorithm="alike").to_numpy(), x)
            same_error(comm, DisagreementError, partial(rma_mm.plan, x, x, mesh), "'closure'")
            with pytest.raises(AlgorithmError, match="name"):
                register(base)
        finally:
            ALGORITHMS.clear()
            ALGORITHMS.update(known)
            REGISTERED.clear()


@parallel(ranks=(2, 3), env=NODE, timeout=40)
def test_threads_take_turns_or_hear_of_it(comm):
    x, found = np.arange(64.0).reshape(8, 8), []

    def work(factor):
        try:
            for _ in range(3):
                C = rma_mm.matmul(x, x, mesh, alpha=factor)
                found.append(np.array_equal(C.tile, factor * (x @ x)[C.region.selector()]))
        except DisagreementError:
            found.append(None)

    with Mesh((comm.size,), comm) as mesh:
        for factors in ((1, 1), (1, 2)):  # the same calls in whatever order; different ones, whose order nobody settled
            found.clear()
            threads = [threading.Thread(target=work, args=(factor,)) for factor in factors]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert False not in found
            assert factors != (1, 1) or None not in found
            comm.Barrier()
        assert np.array_equal(rma_mm.matmul(x, x, mesh).to_numpy(), x @ x)


@parallel(ranks=(2,), env=NODE, timeout=30)
def test_arrays_that_are_permutations_of_one_another_differ(comm):
    x = np.arange(128.0 * 96).reshape(128, 96)
    order = np.arange(96)
    order[:64] = order[:64].reshape(8, 8).T.ravel()
    block = x.copy()
    block[0, :64], block[8, :64] = x[8, :64], x[0, :64]
    signs = x.copy()
    signs[3, [2, 4]] *= -1
    flat = np.zeros((2, 128))
    flat[0, 0] = flat[1, 65] = 1
    moved = np.zeros((2, 128))
    moved[0, 1] = moved[1, 64] = 1
    small = x.astype(np.int8)
    pairs = ((x, x[:, order]), (x, x[::-1]), (x, block), (x, signs), (flat, moved), (small, small[::-1]))
    with Mesh((2,), comm) as mesh:
        for pair in pairs:
            same_error(comm, DisagreementError, partial(DistMatrix.from_numpy, pair[comm.rank], mesh), "checksum")
        DistMatrix.from_numpy((x, np.asfortranarray(x))[comm.rank], mesh)


# -- what ends a job ------------------------------------------------------------------------------

BEGIN = """
import sys, os
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
%s
import numpy as np
from mpi4py import MPI
import rma_mm
from rma_mm import DistMatrix, Mesh
comm = MPI.COMM_WORLD
def main(x=np.eye(6)):
    mesh = Mesh((3,))
    A = DistMatrix.from_numpy(x, mesh)
    %s
    try:
        for _ in range(3):
            A @ A
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        raise
main()
"""
LEAVE = {
    "return": ("if rank == 1: return", ()),
    "exit": ("if rank == 1: sys.exit(1)", ()),
    "exit under mpi4py": ("if rank == 1: sys.exit(1)", ("-m", "mpi4py")),
    "exception": ("if rank == 1: raise KeyError('mine')", ()),
    "exit in a function": ("DistMatrix.from_function(x.shape, lambda i, j: sys.exit(1) if rank == 1 else i, mesh)", ()),
}


@pytest.mark.parametrize("how", usually(2, LEAVE))
def test_a_rank_that_leaves(how):
    code, runner = LEAVE[how]
    done = mpirun(3, [*runner, "-c", BEGIN % ("", code)], timeout=60)
    assert done.returncode
    said = done.stdout + done.stderr
    assert "the end of the program" in said, said
    if how == "exception":
        assert "KeyError: 'mine'" in done.stdout
    if not runner and "function" not in how:
        for rank in (0, 2):
            assert f"rank {rank}: DisagreementError: ranks are in different calls: matmul on ranks 0, 2" in done.stdout


@parallel(ranks=(3,), env=NODE)
def test_environments_that_differ(comm):
    for setting in ("OMP_NUM_THREADS", "RMA_MM_CACHE", "RMA_MM_MACHINE"):
        with mock.patch.dict(os.environ, {setting: "2" if comm.rank == 1 else "1"}):
            said = f"Mesh: ranks passed different arguments: {setting}"
            same_error(comm, DisagreementError, lambda: Mesh((3,), comm), said, "'2' on rank 1")


def test_an_environment_of_ones_own_ends_the_job():
    setting = "RMA_MM_CACHE"
    done = mpirun(3, ["-c", BEGIN % (f"os.environ[{setting!r}] = '2' if rank == 1 else '1'", "")], timeout=60)
    assert done.returncode
    said = f"DisagreementError: Mesh: ranks passed different arguments: {setting}"
    assert done.stderr.count(said) == 1, done.stderr
    assert "'2' on rank 1" in done.stderr


@parallel(ranks=(2,), env=NODE, timeout=30)
def test_a_site_is_the_same_where_ranks_have_other_threads(comm):
    site = Site.of(comm, (0, 0), 3 - comm.rank)  # as hosts with other cores give them
    assert comm.allgather((site.threads, site.slots)) == [(2, site.slots)] * 2


CIRCLE = """
whole, x = Mesh((3,)), np.eye(4)
pairs = [[0, 1], [1, 2], [0, 2]]
comms = [comm.Create_group(comm.group.Incl(pair)) if rank in pair else None for pair in pairs]
meshes = [each and Mesh((2,), each) for each in comms]
try:
    if FIRST[rank] is not None:
        rma_mm.matmul(x, x, meshes[FIRST[rank]])
    rma_mm.matmul(x, x, whole)
except Exception as error:
    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
    raise
"""


@nightly
@pytest.mark.parametrize("first", usually(1, [(None, 0, None), (0, 1, 2)], several=False))
def test_ranks_that_wait_for_one_another_on_meshes_that_overlap(first):
    script = BEGIN.partition("def main")[0] % "" + CIRCLE.replace("FIRST", str(first))
    done = mpirun(3, ["-c", script], timeout=60)
    assert done.returncode
    for rank in range(3):
        assert f"rank {rank}: DisagreementError: ranks wait for one another in different calls" in done.stdout, done
    assert "matmul of mesh 1 of shape (2,) on rank 1" in done.stdout
    assert "the job ends" in done.stderr and "MPI_Abort" not in done.stderr, done.stderr

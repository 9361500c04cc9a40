"""Executions that are repeated on one node: by compiled calls, which all ranks make together or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import DisagreementError
from rma_mm.kernels.calls import cells, compiled_calls
from rma_mm.runtime.products import prepared
from rma_mm.runtime.ranks import meeting
from rma_mm.windows.hosts import liveness
from tests.launch import parallel

SOON = mock.patch.multiple(prepared, REPEATED=2, LONGEST=60.0, TOLD_EVERY=600.0)
"""Executions are compiled after the third, however long they take on a machine that is busy."""
TYPES = ("float32", "float64", "complex64", "complex128")


def matrix(mesh: Mesh, shape: tuple[int, int], dtype: str, seed: int) -> tuple[DistMatrix, np.ndarray]:
    """A matrix of small whole numbers, whose products are exact."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-4, 5, shape).astype(dtype)
    if values.dtype.kind == "c":
        values += 1j * rng.integers(-4, 5, shape)
    return DistMatrix.from_numpy(values, mesh), values


def is_compiled(plan: rma_mm.Plan) -> bool:
    """Whether the next execution is a compiled call on all ranks."""
    found = [bool(plan._known.repeats) and plan._known.sets[0].call is not None]
    return all(each[0] for each in plan.mesh.comm.allgather(found))


@parallel(ranks=(1, 2, 3, 4, 6), env=("node", "ucx"))
@pytest.mark.parametrize("dtype", TYPES)
def test_repeated_products_follow_their_operands(comm: MPI.Intracomm, dtype: str) -> None:
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (45, 37), dtype, 1), matrix(mesh, (37, 29), dtype, 2)
        plan = rma_mm.plan(A, B, mesh, alpha=3)
        compiled = 0
        for n in range(80):
            A.tile[...] += n % 3
            a += n % 3
            compiled += is_compiled(plan)
            C = plan.execute(A, B).to_numpy()
            assert C is not None
            assert np.array_equal(C, 3 * a @ b)
        if plan._known.sets[0].executable.is_plain:
            assert compiled > 60
        assert mesh.metrics.tally.products == 80


@parallel(ranks=(1, 2, 4), env=("node",))
@pytest.mark.parametrize("rows", [45, 5])
@pytest.mark.parametrize("dtype", ["float32", "complex128", "int32", "int64"])
def test_repeated_products_by_generated_code(comm: MPI.Intracomm, dtype: str, rows: int) -> None:
    """Of two plans in turn, whose products share their scratch; one adds to its result."""
    with SOON, Mesh(None, comm, threads=1) as mesh:
        (A, a), (B, b) = matrix(mesh, (rows, 37), dtype, 1), matrix(mesh, (37, 90), dtype, 2)
        (X, x), (Y, y) = matrix(mesh, (rows, 300), dtype, 3), matrix(mesh, (300, 50), dtype, 4)
        plan, other = rma_mm.plan(A, B, mesh, kernel="numba", alpha=3), rma_mm.plan(X, Y, mesh, kernel="numba", beta=1)
        out, total, compiled = DistMatrix.from_numpy(0 * x @ y, mesh, other.layouts["C"]), 0 * x @ y, 0
        for n in range(20):
            A.tile[...] += n % 3
            a += n % 3
            compiled += is_compiled(plan) and is_compiled(other)
            assert np.array_equal(plan.execute(A, B).to_numpy(), 3 * a @ b)
            total += x @ y
            assert np.array_equal(other.execute(X, Y, out).to_numpy(), total)
        assert compiled > 10


@parallel(ranks=(3, 4), env=("node",))
@pytest.mark.parametrize("layout", ["P('i', 'j')", "P('i:cyclic(3)', 'j:cyclic(2)')", "P(None, 'j+i')"])
def test_copies_of_all_kinds_of_boxes(comm: MPI.Intracomm, layout: str) -> None:
    """Blocks, cyclic ones and strips, stored by rows and by columns."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = (matrix(mesh, shape, "float64", n) for n, shape in enumerate(((26, 22), (22, 18))))
        A, B = A.redistribute(layout), B.redistribute(layout)
        flipped = [X.T.redistribute(X.layout.T).T for X in (A, B)]
        assert flipped[0].flipped
        for algorithm in ("stationary_c", "t10_rotate"):
            for X, Y in ((A, B), (flipped[0], flipped[1]), (flipped[0], B)):
                plan = rma_mm.plan(X, Y, mesh, algorithm=algorithm)
                compiled = 0
                for n in range(8):
                    A.tile[...] += n
                    flipped[0].tile[...] += n
                    a += n
                    compiled += is_compiled(plan)
                    assert np.array_equal(plan.execute(X, Y).to_numpy(), a @ b)
                assert compiled or not plan._known.sets[0].executable.is_plain


@parallel(ranks=(2, 4), env=("node",))
def test_what_is_added_and_where_it_goes(comm: MPI.Intracomm) -> None:
    """Result matrices in turn, each of which the product is added to."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (24, 16), "float64", 1), matrix(mesh, (16, 32), "float64", 2)
        plan = rma_mm.plan(A, B, mesh, beta=2)
        outs = [DistMatrix.from_numpy(np.zeros((24, 32)), mesh, plan.layouts["C"]) for _ in range(3)]
        expected = [np.zeros((24, 32)) for _ in outs]
        for n in range(30):
            plan.execute(A, B, outs[n % 3])
            expected[n % 3] = a @ b + 2 * expected[n % 3]
        assert sum(bound.call is not None for bound in plan._known.sets) == 3
        for out, values in zip(outs, expected, strict=True):
            assert np.array_equal(out.to_numpy(), values)


@parallel(ranks=(2, 3), env=("node",))
def test_operands_in_other_memory(comm: MPI.Intracomm) -> None:
    """Of two sets of operands one lies in the callers' own arrays, which other ranks cannot copy from."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        own = np.array(A.tile) + 1
        X = DistMatrix.from_local(own, A.shape, mesh, A.layout)
        plan = rma_mm.plan(X, B, mesh, algorithm="stationary_c", layout=A.layout)
        assert "get" in plan.movement["A"]
        compiled = 0
        for n in range(20):
            own += 1
            assert np.array_equal(plan.execute(X, B).to_numpy(), (a + n + 2) @ b)
            compiled += is_compiled(plan)
            assert np.array_equal(plan.execute(A, B).to_numpy(), a @ b)
        assert compiled


@parallel(ranks=(2,), env=("node",))
def test_what_does_not_compile_is_executed_as_before(comm: MPI.Intracomm) -> None:
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        plan = rma_mm.plan(A, B, mesh)
        with mock.patch.object(compiled_calls, "CompiledCalls", side_effect=RuntimeError("no compiler")) as made:
            for _ in range(30):
                assert np.array_equal(plan.execute(A, B).to_numpy(), a @ b)
        assert made.call_count == 1


@parallel(ranks=(2, 4), env=("node",))
def test_another_matrix_that_is_added(comm: MPI.Intracomm) -> None:
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (24, 16), "float64", 1), matrix(mesh, (16, 32), "float64", 2)
        (X, x), out = matrix(mesh, (24, 32), "float64", 3), DistMatrix.empty((24, 32), mesh)
        plan = rma_mm.plan(A, B, mesh, beta=2, layout=X.layout)
        for _ in range(8):
            assert np.array_equal(plan.execute(A, B, out, c=X).to_numpy(), a @ b + 2 * x)
            assert np.array_equal(rma_mm.matmul(A, B, beta=-1, c=X).to_numpy(), a @ b - x)


@parallel(ranks=(2, 3, 4), env=("node",))
def test_counts_go_on(comm: MPI.Intracomm) -> None:
    """Words, products and time of compiled calls are those of all others."""
    with SOON, Mesh(None, comm) as mesh:
        (A, _), (B, _) = matrix(mesh, (64, 64), "float32", 1), matrix(mesh, (64, 64), "float32", 2)
        plan, tally = rma_mm.plan(A, B, mesh), mesh.metrics.tally
        plan.execute(A, B)
        words, work = plan.words, tally.work
        moved = tally.traffic.words_intra
        for n in range(2, 50):
            before = tally.nanoseconds, tally.multiplying
            plan.execute(A, B)
            assert plan.words == words
            assert (tally.products, tally.work) == (n, n * work)
            assert tally.traffic.words_intra == n * moved
            assert 0 < tally.multiplying - before[1] <= tally.nanoseconds - before[0]
        assert is_compiled(plan)
        assert mesh.metrics.last is not None
        assert mesh.metrics.last.traffic == words


@parallel(ranks=(2, 3, 4), env=("node",))
@pytest.mark.parametrize("who", [0, 1])
def test_another_matrix_on_one_rank_is_an_error_on_all(comm: MPI.Intracomm, who: int) -> None:
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b), (other, _) = (matrix(mesh, (20, 20), "float64", n) for n in range(3))
        plan = rma_mm.plan(A, B, mesh)
        for _ in range(8):
            plan.execute(A, B)
        assert is_compiled(plan)
        with pytest.raises(DisagreementError, match=r"execute: ranks passed different arguments: A"):
            plan.execute(other if comm.rank == who else A, B)
        for _ in range(8):
            C = plan.execute(A, B)
        assert is_compiled(plan)
        assert np.array_equal(C.to_numpy(), a @ b)


@parallel(ranks=(2, 3), env=("node",))
def test_another_call_on_one_rank_is_an_error_on_all(comm: MPI.Intracomm) -> None:
    with SOON, Mesh(None, comm) as mesh, Mesh(None, comm) as second:
        (A, _), (B, _) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        (X, _), (Y, _) = matrix(second, (20, 20), "float64", 1), matrix(second, (20, 20), "float64", 2)
        plan, twin = rma_mm.plan(A, B, mesh), rma_mm.plan(X, Y, second)
        for _ in range(8):
            plan.execute(A, B)
            twin.execute(X, Y)
        assert is_compiled(plan)
        assert is_compiled(twin)
        with pytest.raises(DisagreementError, match="different calls"):
            plan.execute(A, B) if comm.rank else A.to_numpy()
        for _ in range(8):
            plan.execute(A, B)
        with pytest.raises(DisagreementError, match=r"of mesh \d.* of mesh \d"):
            plan.execute(A, B) if comm.rank else twin.execute(X, Y)


@parallel(ranks=(2, 3, 4), env=("node",))
def test_a_rank_that_is_asked_otherwise_is_followed(comm: MPI.Intracomm) -> None:
    """One rank forgets what was compiled: all go the long way, and none waits for another."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        plan = rma_mm.plan(A, B, mesh)
        for n in range(40):
            if n % 10 == 7 and comm.rank == n // 10 % comm.size:
                plan.retrace(None)
            C = plan.execute(A, B)
            assert np.array_equal(C.to_numpy(), a @ b)
        assert mesh.metrics.tally.products == 40


@parallel(ranks=(3, 4), env=("node",))
def test_ranks_beyond_the_grid_take_part(comm: MPI.Intracomm) -> None:
    with SOON, Mesh((2,), comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        plan = rma_mm.plan(A, B, mesh)
        for _ in range(8):
            C = plan.execute(A, B)
        assert is_compiled(plan)
        assert np.array_equal(C.to_numpy(), a @ b)


@parallel(ranks=(2, 4), env=("node",))
@pytest.mark.parametrize("late", [0.0, 0.003, 0.05, 1.2])
def test_late_ranks_are_waited_for(comm: MPI.Intracomm, late: float) -> None:
    """At the begin by all; at the end too, where one multiplies for longer."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        plan = rma_mm.plan(A, B, mesh)
        for _ in range(8):
            plan.execute(A, B)
        assert is_compiled(plan)
        if comm.rank == 1:
            time.sleep(late)
        begun, used = time.perf_counter(), time.process_time()
        C = plan.execute(A, B)
        if comm.rank == 0 and late > 1:  # of shorter ones this rank may miss a part itself
            assert time.perf_counter() - begun > late / 2
            assert time.process_time() - used < late / 2  # who waits leaves the core to others
        assert np.array_equal(C.to_numpy(), a @ b)


@parallel(ranks=(1, 2), env=("node",))
def test_longer_products_are_compiled_too(comm: MPI.Intracomm) -> None:
    """Of those that last longer than ranks wait with telling each other again, most."""
    with SOON, mock.patch.object(prepared, "TOLD_EVERY", 0.0), Mesh(None, comm) as mesh:
        (A, _), (B, _) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        plan = rma_mm.plan(A, B, mesh)
        compiled = 0
        for _ in range(50):
            compiled += is_compiled(plan)
            plan.execute(A, B)
        assert 30 < compiled < 50


@parallel(ranks=(2, 3), env=("node",))
def test_a_rank_that_ends_is_told_to_the_others(comm: MPI.Intracomm) -> None:
    mesh = Mesh(None, comm)
    (A, _), (B, _) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
    with SOON:
        plan = rma_mm.plan(A, B, mesh)
        for _ in range(8):
            plan.execute(A, B)
        assert is_compiled(plan)
        with pytest.raises(DisagreementError, match=r"different calls: .*Mesh\.close"):
            mesh.close() if comm.rank == 0 else plan.execute(A, B)
        mesh.close()


@parallel(ranks=(2,), env=("cliques", "allocated", "created", "ucx_tcp"))
def test_what_cannot_be_compiled_is_not(comm: MPI.Intracomm) -> None:
    """Between nodes, and where transfers wait for their owner."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        plan = rma_mm.plan(A, B, mesh)
        for _ in range(8):
            C = plan.execute(A, B)
        assert not is_compiled(plan)
        assert np.array_equal(C.to_numpy(), a @ b)


@parallel(ranks=(2, 3), env=("node",))
def test_without_a_line_all_goes_on_as_before(comm: MPI.Intracomm) -> None:
    """One rank has none left: there are some 60 groups of ranks at a time."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        plan = rma_mm.plan(A, B, mesh)
        line, mesh.group.line, free = mesh.group.line, None, liveness._FREE_LINES[:]
        if comm.rank == 1:
            liveness._FREE_LINES.clear()
        try:
            for _ in range(12):
                C = plan.execute(A, B)
        finally:
            liveness._FREE_LINES[:], mesh.group.line = free, line
        assert not is_compiled(plan)
        assert np.array_equal(C.to_numpy(), a @ b)


@parallel(ranks=(2,), env=("node",))
def test_lines_are_given_back(comm: MPI.Intracomm) -> None:
    before, other = len(liveness._FREE_LINES), comm.Split(0, -comm.rank)  # not the ranks of any mesh that is open
    for _ in range(3):
        with SOON, Mesh(None, other) as mesh:
            (A, _), (B, _) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
            plan = rma_mm.plan(A, B, mesh)
            for _ in range(8):
                plan.execute(A, B)
            assert len(liveness._FREE_LINES) == before - 1
    assert len(liveness._FREE_LINES) == before
    other.Free()


@parallel(ranks=(1, 2), env=("node",))
def test_the_threads_of_blas_are_as_before(comm: MPI.Intracomm) -> None:
    from rma_mm.kernels.threads import get_threads, using_threads

    with SOON, Mesh(None, comm, threads=1) as mesh, using_threads(2):
        (A, _), (B, _) = matrix(mesh, (20, 20), "float64", 1), matrix(mesh, (20, 20), "float64", 2)
        plan = rma_mm.plan(A, B, mesh)
        for _ in range(8):
            plan.execute(A, B)
            assert get_threads() == 2


def is_quick(mesh: Mesh, product: Callable[[], DistMatrix]) -> tuple[bool, DistMatrix]:
    """Whether a product was a compiled call on all ranks, and its result."""
    before = mesh.group.calls
    C = product()
    return all(mesh.comm.allgather(mesh.group.calls == before + 1)), C


@parallel(ranks=(1, 2, 3, 4), env=("node",))
def test_matmul_into_new_matrices(comm: MPI.Intracomm) -> None:
    """Each result stays as long as a matrix or an array shows it; memory that none shows is used again."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (24, 16), "float64", 1), matrix(mesh, (16, 32), "float64", 2)
        quick, held, shown = 0, [], []
        for n in range(60):
            A.tile[...] += 1
            a += 1
            is_one, C = is_quick(mesh, lambda: A @ B)
            quick += is_one
            assert np.array_equal(C.to_numpy(), a @ b)
            if n % 10 == 5:
                held.append((C, a @ b))
            elif n % 10 == 8:
                shown.append((C.tile, (a @ b)[C.region.selector()].copy()))
        assert quick > 20
        assert all(np.array_equal(C.to_numpy(), expected) for C, expected in held)
        assert all(np.array_equal(tile, expected) for tile, expected in shown)
        assert len(mesh.arena.live) < 25


@parallel(ranks=(2,), env=("node",))
def test_results_that_all_stay(comm: MPI.Intracomm) -> None:
    """None is overwritten, and no call is compiled for each of them."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (24, 16), "float64", 1), matrix(mesh, (16, 32), "float64", 2)
        made = mock.Mock(wraps=compiled_calls.CompiledCalls)
        with mock.patch.object(compiled_calls, "CompiledCalls", made), mock.patch.object(prepared, "REPEATED", 20):
            results = [A @ B for _ in range(90)]
        assert made.call_count < 40
        assert all(np.array_equal(C.to_numpy(), a @ b) for C in results)


@parallel(ranks=(2, 4), env=("node",))
def test_products_of_products(comm: MPI.Intracomm) -> None:
    """Operands that are themselves new each time, in memory that is used again."""
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b), (E, e) = (matrix(mesh, shape, "float32", n) for n, shape in enumerate([(16, 16)] * 3))
        quick = 0
        for _ in range(40):
            A.tile[...] += 1
            a += 1
            before = mesh.group.calls
            C = A @ B
            D = rma_mm.matmul(C, E, alpha=2)
            quick += mesh.group.calls == before + 2
            assert np.array_equal(D.to_numpy(), 2 * (a @ b @ e))
            assert np.array_equal(C.to_numpy(), a @ b)
        assert quick > 20


@parallel(ranks=(2, 3), env=("node",))
def test_a_result_that_one_rank_keeps_for_longer(comm: MPI.Intracomm) -> None:
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (24, 16), "float64", 1), matrix(mesh, (16, 32), "float64", 2)
        kept: list[tuple[np.ndarray, np.ndarray]] = []
        for n in range(60):
            A.tile[...] += 1
            a += 1
            C = A @ B
            if n % 4 == comm.rank:
                kept.append((C.tile, C.tile.copy()))
            kept = kept[-3:]
            assert np.array_equal(C.to_numpy(), a @ b)
            assert all(np.array_equal(tile, copy) for tile, copy in kept)


@parallel(ranks=(1, 2, 4), env=("node",))
@pytest.mark.parametrize("turned", [False, True])
def test_a_matrix_times_itself_or_its_transpose(comm: MPI.Intracomm, turned: bool) -> None:
    with SOON, Mesh(None, comm) as mesh:
        A, a = matrix(mesh, (24, 24), "float64", 1)
        quick = 0
        for _ in range(40):
            A.tile[...] += 1
            a += 1
            is_one, C = is_quick(mesh, lambda: A @ (A.T if turned else A))
            quick += is_one
            assert np.array_equal(C.to_numpy(), a @ (a.T if turned else a))
        assert quick > 20


@parallel(ranks=(2, 4), env=("node",))
def test_matmul_tells_products_apart(comm: MPI.Intracomm) -> None:
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (16, 16), "float64", 1), matrix(mesh, (16, 16), "float64", 2)
        out = rma_mm.matmul(A, B, mesh)
        for _ in range(12):
            assert np.array_equal((A @ B).to_numpy(), a @ b)
            assert np.array_equal((B @ A).to_numpy(), b @ a)
            assert np.array_equal((A @ A.T).to_numpy(), a @ a.T)
            assert np.array_equal((A @ A).to_numpy(), a @ a)
            assert np.array_equal((A.T @ B).to_numpy(), a.T @ b)
            assert np.array_equal(rma_mm.matmul(A, B, transpose_b=True).to_numpy(), a @ b.T)
            assert np.array_equal(rma_mm.matmul(A, B, out=out, alpha=2).to_numpy(), 2 * a @ b)
            assert np.array_equal(rma_mm.matmul(A, B, out=out, beta=1).to_numpy(), 3 * a @ b)
            assert rma_mm.matmul(A, B, compute_dtype="complex128").dtype == np.complex128


@parallel(ranks=(2, 3), env=("node",))
def test_matmul_with_other_options_on_one_rank(comm: MPI.Intracomm) -> None:
    with SOON, Mesh(None, comm) as mesh:
        (A, a), (B, b) = matrix(mesh, (16, 16), "float64", 1), matrix(mesh, (16, 16), "float64", 2)
        for _ in range(8):
            rma_mm.matmul(A, B, alpha=1)
            rma_mm.matmul(A, B, alpha=2)
        with pytest.raises(DisagreementError, match="matmul: ranks passed different arguments: alpha"):
            rma_mm.matmul(A, B, alpha=1 + (comm.rank == 1))
        assert np.array_equal(rma_mm.matmul(A, B, alpha=2).to_numpy(), 2 * a @ b)


@parallel(ranks=(2,), env=("node",))
def test_memory_for_results_is_given_back(comm: MPI.Intracomm) -> None:
    """When its plan is dropped, as other products come."""
    with SOON, Mesh(None, comm) as mesh:
        for size in range(8, 44):
            (A, _), (B, _) = matrix(mesh, (size, size), "float64", 1), matrix(mesh, (size, size), "float64", 2)
            for _ in range(6):
                A @ B
        assert len(mesh.arena.live) < 4 * 16 + 10
        assert len(mesh.arena.kept) <= 3 * 16


def test_cells_fit_into_a_line() -> None:
    assert 8 * (cells.COMPLETED + 1) <= liveness.LINE
    assert meeting.BUDGET < 1e9 * liveness.LEAST

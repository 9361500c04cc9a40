"""The library as its users call it: constructors, options, errors that are the same on every rank, memory."""

import gc
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import rma_mm
from rma_mm import DistArray, DistMatrix, Mesh
from rma_mm.errors import (
    AlgorithmError,
    ClosedError,
    DisagreementError,
    DtypeError,
    LayoutError,
    MemoryLimitError,
    MeshError,
    OptionError,
    ShapeError,
    WindowError,
)
from rma_mm.policy.model.cost_model import TYPICALLY
from rma_mm.policy.planner import candidates
from rma_mm.runtime.execution.footprint import peak_bytes
from rma_mm.runtime.execution.operands import Operand
from rma_mm.runtime.products import choosing, memory
from rma_mm.runtime.ranks.agreement import agree
from rma_mm.schedule.lowering.lower import Tuning, lower
from tests.launch import parallel
from tests.thorough import thorough
from tests.worker import descriptors

ONE_NODE = ("node",)


def grid(comm):
    """The squarest grid of all ranks."""
    return {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 6: (2, 3)}[comm.size]


def matrix(shape, dtype="float64", seed=0):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def same_error(comm, kind, call, *words):
    """`call` raises the same error of `kind` on every rank, and its message holds `words`."""
    with pytest.raises(kind) as caught:
        call()
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    for word in words:
        assert word in texts[0], texts[0]
    assert isinstance(caught.value, ValueError)


# -- constructors ---------------------------------------------------------------------------------


@parallel(env=("node", "nolocal", "created"))
def test_every_constructor_holds_the_same_matrix(comm):
    x = matrix((7, 10))
    with Mesh(grid(comm), comm) as mesh:
        layouts = [None, "i,j", "j,i", "*,*", "i:cyclic(2),j", "i,j:skew(i)", "i=0"]
        for layout in layouts:
            made = [
                DistMatrix.from_numpy(x, mesh, layout),
                DistMatrix.from_numpy(x if mesh.rank == 0 else None, mesh, layout, root=0),
                DistMatrix.from_function((7, 10), lambda rows, cols: x[rows, cols], mesh, layout),
            ]
            place = made[0].layout
            own = x[place.region((7, 10), mesh.grid, mesh.rank).selector()]
            made.append(DistMatrix.from_local(np.ascontiguousarray(own), (7, 10), mesh, place))
            made.append(DistMatrix.from_local(np.asfortranarray(own), (7, 10), mesh, place))
            for each in made:
                assert np.array_equal(each.to_numpy(), x)
                assert np.array_equal(each.T.to_numpy(), x.T)
                assert each.dtype == x.dtype
                for region, tile in each.local.items():
                    assert np.array_equal(tile, x[region.selector()])
        for layout in ("*,*,i=sum", "None,j,i=sum", "i,*,j=sum"):  # x is their sum, not each summand
            made = [
                DistMatrix.from_numpy(x, mesh, layout),
                DistMatrix.from_function((7, 10), lambda rows, cols: x[rows, cols], mesh, layout),
                DistArray.from_numpy(x[None], mesh, f"*,{layout}"),
            ]
            for each in made:
                assert np.array_equal(each.to_numpy().reshape(7, 10), x)


@parallel(ranks=(2, 4), env=ONE_NODE)
def test_local_is_writable_and_seen_by_the_next_product(comm):
    with Mesh(grid(comm), comm) as mesh:
        A = DistMatrix.empty((6, 6), mesh, "i:cyclic(1),j", "float32")
        for region, tile in A.local.items():
            tile[...] = region[0].indices[:, None] * 10 + region[1].indices
        expected = np.add.outer(np.arange(6) * 10, np.arange(6)).astype("float32")
        assert np.array_equal(A.to_numpy(), expected)
        assert np.array_equal((A @ A.T).to_numpy(), expected @ expected.T)


# -- products -------------------------------------------------------------------------------------


@parallel(ranks=(2,), env=("node",))
def test_descriptors_of_another_shape_are_refused(comm):
    x = matrix((10, 6))
    with Mesh((2, 1), comm) as mesh:
        A = DistMatrix.from_numpy(x, mesh, "desc(10, 6, 2, 2)")
        assert np.array_equal((A @ DistMatrix.from_numpy(x.T, mesh, "desc(6, 10, 3, 3)")).to_numpy(), x @ x.T)
        words = "desc(9, 6, 2, 2): is of a matrix of shape (9, 6); this one has (10, 6)"
        for call in (
            lambda: DistMatrix.from_numpy(x, mesh, "desc(9, 6, 2, 2)"), lambda: A.redistribute("desc(9, 6, 2, 2)"),
            lambda: rma_mm.matmul(x, matrix((6, 6)), mesh, layout="desc(9, 6, 2, 2)"),
        ):
            same_error(comm, LayoutError, call, words)


@parallel(ranks=(2,), env=("node", "created"))
def test_empty_and_long_shapes_cost_nothing_and_what_is_too_large_is_refused(comm):
    """Also where the system grants no such memory: on every rank, and the mesh serves on."""
    long = 2**40
    with Mesh((2, 1), comm) as mesh:
        A = DistMatrix.from_function((0, long), np.add, mesh, "P(None, 'i')")
        B = DistMatrix.from_numpy(np.empty((long, 0)), mesh)
        for product, shape in ((A @ B, (0, 0)), (A.T @ DistMatrix.empty((0, 0), mesh, dtype=float), (long, 0))):
            assert product.to_numpy().shape == product.redistribute("P(None, 'i+j')").shape == shape
        same_error(comm, ShapeError, lambda: DistMatrix.empty((0, 2**60), mesh, dtype=float), "rows or columns")
        same_error(comm, ShapeError, lambda: B @ A, f"C would be ({long}, {long})", "elements")
        same_error(comm, LayoutError, lambda: A.redistribute("P(None, 'i:cyclic(64)')"), "blocks of 64", "or more")
        needed = long * 96 * 8
        same_error(comm, MemoryLimitError, lambda: A.T @ np.empty((0, 96)), f"need {needed} bytes", "too few; use more")
        call = lambda: DistMatrix.empty((long, 96), mesh, dtype=float)  # noqa: E731
        same_error(comm, MemoryLimitError, call, f"cannot allocate {needed // 2} bytes for a rank")
        x = matrix((4, 4))
        assert np.array_equal(rma_mm.matmul(x, x, mesh).to_numpy(), x @ x)


@parallel(ranks=(2, 4), env=ONE_NODE)
def test_callers_own_arrays_are_used_in_place(comm):
    x, y = matrix((8, 8)), matrix((8, 8), seed=1)
    with Mesh(grid(comm), comm) as mesh:
        place = DistMatrix.empty((8, 8), mesh, "i,j", float)
        big = np.zeros((20, 20))
        own = big[3 : 3 + place.tile.shape[0], 5 : 5 + place.tile.shape[1]]
        own[...] = x[place.region.selector()]
        A = DistMatrix.from_local(own, (8, 8), mesh, "i,j")
        assert np.shares_memory(A.tile, own)
        target = np.full(own.shape, np.nan)
        C = DistMatrix.from_local(target, (8, 8), mesh, "i,j")
        for algorithm in ("stationary_c", "stationary_a", "stationary_b", "queue", "srumma"):
            rma_mm.matmul(A, y, mesh, out=C, algorithm=algorithm)
            assert np.array_equal(target, (x @ y)[place.region.selector()])
        plan = rma_mm.plan(DistMatrix.from_numpy(x, mesh, "i,j"), place, mesh, algorithm="stationary_c")
        if comm.size == 4:
            same_error(comm, LayoutError, lambda: plan.execute(A, place), "cannot read its memory in place")


@parallel(ranks=(2,), env=ONE_NODE)
def test_plan_reports_and_reuses(comm):
    x = matrix((64, 64), "float32")
    with Mesh((2, 1), comm) as mesh:
        A = DistMatrix.from_numpy(x, mesh)
        plan = rma_mm.plan(A, A, mesh)
        C = plan.execute(A, A)
        assert plan.execute(A, A) is C
        assert np.array_equal(C.to_numpy(), x @ x)
        assert plan.reproducible
        assert plan.algorithm in str(plan)
        text = plan.explain(every=True)
        assert str(plan.decision) in plan.explain()
        for name in rma_mm.list_algorithms():
            assert name in text
        assert plan.peak_bytes >= 3 * 64 * 64 * 4 // 2
        from_arrays = rma_mm.plan(x, x, mesh)
        assert np.array_equal(from_arrays.execute(x, x).to_numpy(), x @ x)
        big = np.zeros((A.tile.shape[0], 128), "float32")
        left, right = (DistMatrix.from_local(half, (64, 64), mesh, A.layout) for half in (big[:, :64], big[:, 64:]))
        left.copy_from(A)
        if plan.layouts["C"] == A.layout:
            mine = rma_mm.plan(left, A, mesh, layout=A.layout)
            assert np.array_equal(mine.execute(left, A, out=right).to_numpy(), x @ x)
            again = DistMatrix.from_local(big[:, 32:96], (64, 64), mesh, A.layout)
            same_error(comm, LayoutError, lambda: mine.execute(left, A, out=again), "shares memory")
        own = plan.execute(A, A)
        call = (lambda: plan.execute(A, A)) if comm.rank else (lambda: plan.execute(A, A, out=own))
        same_error(comm, DisagreementError, call, "own")
        plan.close()
        same_error(comm, ClosedError, lambda: plan.execute(A, A), "closed")


@parallel(ranks=(4,), env=("node", "nolocal", "created"))
def test_memory_limit_shrinks_panels_and_refuses_what_cannot_fit(comm):
    x, y = matrix((64, 3000)), matrix((3000, 48), seed=1)
    with Mesh((2, 2), comm) as mesh:
        A, B = DistMatrix.from_numpy(x, mesh, "j,i"), DistMatrix.from_numpy(y, mesh, "i:cyclic(7),j")
        rich = rma_mm.plan(A, B, mesh, layout="i,j", algorithm="stationary_c")
        poor = rma_mm.plan(A, B, mesh, layout="i,j", algorithm="stationary_c", memory_limit=rich.peak_bytes * 2 // 3)
        assert poor.peak_bytes <= rich.peak_bytes * 2 // 3
        assert np.array_equal(poor.execute(A, B).to_numpy(), x @ y)
        call = lambda: rma_mm.plan(A, B, mesh, layout="i,j", memory_limit=1000)  # noqa: E731
        same_error(comm, MemoryLimitError, call, "1000 bytes", "more")


@thorough
@parallel(ranks=(4,), env=("node", "nolocal"), usual="node")
def test_a_memory_limit_is_met_or_refused_after_few_looks_and_as_a_look_at_every_plan_says(comm):
    """The plan that is taken is the first of all that fits, and what is said to be missing is what is missing."""
    with Mesh((2, 2), comm) as mesh:
        a, b = Operand((160, 300), np.dtype("f4")), Operand((300, 96), np.dtype("f4"))
        for name in ("cannon", "queue", "summa_c:pull"):
            every = needs_of_every_plan(comm, mesh, a, b, name)
            edges = {need + off for need in [*[*every.values()][::3], min(every.values())] for off in (-1, 0)} | {0}
            for limit in (*sorted(edges), 10**400):
                if limit < min(every.values()):
                    call = lambda: rma_mm.plan(a, b, mesh, algorithm=name, memory_limit=limit)  # noqa: B023, E731
                    same_error(comm, MemoryLimitError, call, f"needs {min(every.values())},", "more")
                else:
                    fits = next(tuning for tuning, need in every.items() if need <= limit)
                    choice = rma_mm.plan(a, b, mesh, algorithm=name, memory_limit=limit).choice
                    assert choice.tuning == fits, (name, limit)
        big = Operand((4096, 4096), np.dtype("f4"))
        with mock.patch.object(memory, "lower", wraps=memory.lower) as lowered:
            same_error(comm, MemoryLimitError, lambda: rma_mm.plan(big, big, mesh, memory_limit=1024), "more")
        looks = [call.args[2].width for call in lowered.call_args_list]
        assert len(looks) <= 100 and sum(4096 // width for width in looks) <= 1000, looks


def needs_of_every_plan(comm, mesh, a, b, name):
    """Tuning → bytes of a rank, of all plans of an algorithm, each lowered."""
    plan = rma_mm.plan(a, b, mesh, algorithm=name)
    widths = [plan.choice.tuning.width, *(width for width in memory.WIDTHS if width < plan.choice.tuning.width)]
    request, found = choosing.request_of(mesh, plan.spec, TYPICALLY), plan.choice.candidates
    trial = memory.MemoryTrial(mesh, plan.spec, request, found, plan.choice.chosen)
    found = {}
    for tuning in [Tuning(width, depth) for width in widths for depth in memory.DEPTHS]:
        schedule = lower(plan.choice.chosen.algorithm, trial.problem, tuning)
        found[tuning] = comm.allreduce(peak_bytes(mesh, schedule, plan.spec), MPI.MAX)
    return found


@thorough
@parallel(ranks=(3,), env=ONE_NODE, timeout=120)
def test_thousands_of_products_without_close_neither_fail_nor_grow(comm):
    x = matrix((12, 12))
    with Mesh((3,), comm) as mesh:
        A = DistMatrix.from_numpy(x, mesh)
        handles = []
        for n in range(1500):
            C = rma_mm.matmul(A, A, mesh)
            if n in (100, 1499):
                gc.collect()
                handles.append((len(mesh.arena.slabs), len(mesh.arena.live), descriptors()))
        assert np.array_equal(C.to_numpy(), x @ x)
        assert handles[0][:-1] == handles[1][:-1], handles
        assert not (opened := handles[1][-1] - handles[0][-1]), opened


# -- misuse ---------------------------------------------------------------------------------------


@parallel(ranks=(1, 2, 3), env=ONE_NODE)
def test_misuse_raises_the_same_clear_error_everywhere(comm):
    with Mesh(grid(comm), comm) as mesh:
        A, B = DistMatrix.empty((4, 5), mesh, dtype=float), DistMatrix.empty((6, 7), mesh, dtype=float)
        same_error(comm, ShapeError, lambda: rma_mm.matmul(A, B, mesh), "(4, 5)", "(6, 7)", "(4, 7)")
        same_error(comm, AlgorithmError, lambda: rma_mm.matmul(A, A.T, mesh, algorithm="canon"), "canon", "srumma")
        same_error(comm, AlgorithmError, lambda: rma_mm.plan(A, A.T, mesh, algorithm=3), "algorithm: got 3", "srumma")
        same_error(comm, LayoutError, lambda: rma_mm.matmul(A, A.T, mesh, layout="i,q"), "'q'", "i, j")
        for flag in ("transpose_a", "conjugate_b", "deterministic"):
            asked = {flag: np.array([True, False])}
            same_error(comm, OptionError, lambda asked=asked: rma_mm.plan(A, A.T, mesh, **asked), flag, "True or False")
        same_error(comm, DtypeError, lambda: rma_mm.matmul(A, A.T, mesh, alpha=1j), "alpha")
        for beta in (1, np.array([0.0, 1.0])):
            same_error(comm, OptionError, lambda beta=beta: rma_mm.matmul(A, A.T, mesh, beta=beta), "beta", "out")
        same_error(comm, OptionError, lambda: rma_mm.matmul(A, A.T, mesh, memory_limit=-1), "-1")
        same_error(comm, AlgorithmError, lambda: rma_mm.matmul(A, A.T, mesh, kernel="mkl"), "mkl", "blas")
        square = DistMatrix.empty((4, 4), mesh, dtype=float)
        same_error(comm, LayoutError, lambda: rma_mm.matmul(square, square, mesh, out=square), "out")
        wrong = DistMatrix.empty((5, 5), mesh, dtype=float)
        same_error(comm, ShapeError, lambda: rma_mm.matmul(square, square, mesh, out=wrong), "(5, 5)", "(4, 4)")
        same_error(comm, ShapeError, lambda: DistMatrix.from_numpy(np.zeros(3), mesh), "(3,)")
        same_error(comm, DtypeError, lambda: DistMatrix.from_numpy(np.array([["a"]]), mesh), "float32")
        for call in (rma_mm.plan, rma_mm.matmul):
            same_error(comm, ShapeError, lambda call=call: call([[1, 2], [3]], A, mesh), "A: NumPy makes no array")
        assert rma_mm.plan(((4, 5), "float64"), ((5, 7), float), mesh).c_shape == (4, 7)
        same_error(comm, ShapeError, lambda: DistMatrix.empty((-1, 2), mesh, dtype=float), "-1")
        same_error(comm, MeshError, lambda: A.to_numpy(root=9), "9")
        same_error(comm, MeshError, lambda: Mesh((comm.size + 1,), comm), str(comm.size))
        same_error(comm, MeshError, lambda: Mesh((0, 2), comm), "(0, 2)")
        same_error(comm, MeshError, lambda: Mesh("ab", comm), "ab")
        same_error(comm, WindowError, lambda: Mesh((1,), comm, window="magic"), "magic", "shared")
        square.close()
        same_error(comm, ClosedError, lambda: rma_mm.matmul(square, wrong, mesh), "closed")
    same_error(comm, ClosedError, A.to_numpy, "closed")


@parallel(ranks=(2, 3, 4), env=ONE_NODE)
def test_ranks_that_disagree_all_hear_who_differs(comm):
    odd = comm.rank == 1
    with Mesh(grid(comm), comm) as mesh:
        A = DistMatrix.from_numpy(matrix((6, 6)), mesh)
        B = DistMatrix.from_numpy(matrix((6, 6)), mesh)
        out = DistMatrix.empty((6, 6), mesh, dtype=float)

        def differ(call, *words):
            same_error(comm, DisagreementError, call, *words)

        differ(lambda: rma_mm.matmul(A, A, mesh, alpha=2 if odd else 1), "alpha", "2 on rank 1")
        differ(lambda: rma_mm.matmul(A, B if odd else A, mesh), "B", "rank 1")
        differ(lambda: rma_mm.matmul(A, A, mesh, algorithm="queue" if odd else "auto"), "queue")
        differ(lambda: DistMatrix.empty((6, 6 + odd), mesh, dtype=float), "(6, 7) on rank 1")
        differ(lambda: DistMatrix.from_numpy(np.full((3, 3), float(odd)), mesh), "checksum")
        plan = rma_mm.plan(A, A, mesh, layout="i,j")
        differ(lambda: plan.execute(A, B if odd else A, out), "B", "rank 1")
        call = (lambda: A.redistribute("*,*")) if odd else (lambda: rma_mm.matmul(A, A, mesh))
        differ(call, "redistribute", "matmul")
        error = ShapeError("one rank's own trouble") if odd else None
        same_error(comm, ShapeError, lambda: agree(comm, "", {}, error), "trouble", "rank 1")
        assert np.array_equal(rma_mm.matmul(A, A, mesh).to_numpy(), matrix((6, 6)) @ matrix((6, 6)))


@parallel(ranks=(1, 3), env=ONE_NODE)
def test_ranks_price_rows_together(comm):
    """Each row by one rank, and all ranks choose by those figures; what fails on one of them fails everywhere."""
    pricer = candidates._best
    shape = (117 + comm.size, 93, 71)  # that no other test has asked for
    with Mesh((comm.size,), comm) as mesh:
        operands = [Operand((shape[0], shape[2]), np.dtype("f8")), Operand((shape[2], shape[1]), np.dtype("f8"))]
        with mock.patch.object(candidates, "_best", wraps=pricer) as priced:
            plan = rma_mm.plan(*operands, mesh)
        names = {call.args[0].name for call in priced.call_args_list}  # T10's row prices its points under its name
        assert sum(comm.allgather(len(names))) == len(candidates.every_form())
        assert comm.size == 1 or len(names) <= len(candidates.every_form()) / 2
        found = [(each.algorithm.name, each.layouts, each.cost, each.rejected) for each in plan.choice.candidates]
        assert comm.bcast(str(found)) == str(found)
        candidates._known.clear()
        again = candidates.candidates(plan.choice.request)
        assert [(each.algorithm.name, each.layouts, each.cost, each.rejected) for each in again] == found
        if comm.rank == 0:
            candidates._known.clear()
        rma_mm.plan(*operands, mesh)  # which one rank has forgotten
        candidates._known.clear()
        failing = mock.Mock(side_effect=MemoryError("full"))
        with mock.patch.object(candidates, "_best", failing if comm.rank == 2 else pricer):
            if comm.size > 1:
                with pytest.raises(MemoryLimitError, match=r"memory: full \(rank 2\)"):
                    rma_mm.plan(*operands, mesh)


@parallel(ranks=(2,), env=ONE_NODE)
def test_a_function_that_fails_on_one_rank_fails_on_all(comm):
    def f(rows, cols):
        if comm.rank == 1 and rows.size > 1:
            raise KeyError("no such thing")
        return rows + cols

    with Mesh((2,), comm) as mesh, pytest.raises(RuntimeError, match=r"no such thing.*rank 1"):
        DistMatrix.from_function((10, 4), f, mesh, dtype=float)


@parallel(ranks=(2,), env=("node",))
def test_earlier_names_of_a_mesh_still_work(comm: MPI.Intracomm) -> None:
    with rma_mm.Mesh((1, 2), comm) as mesh:
        for owner, old, new in (
            (mesh, "shape", "grid"), (mesh, "nodes", "num_nodes"), (mesh.grid, "shape", "dims"),
            (mesh.grid, "nodes", "node_of_rank"),
        ):
            with pytest.warns(DeprecationWarning, match=rf"{old} is now called {new}"):
                assert getattr(owner, old) is getattr(owner, new)

"""Faults that a reading of the runtime found, each pinned by the smallest example that showed it."""

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import AlgorithmError, ClosedError, DisagreementError, OptionError
from rma_mm.schedule.lowering import decisions
from tests.launch import parallel
from tests.thorough import usually

NODE = ("node",)


@parallel(ranks=(2, 3), env=NODE)
def test_shared_memory_that_is_too_small_is_replaced_and_reported(comm):
    from rma_mm.windows import shared

    free, shared.free_segment_bytes = shared.free_segment_bytes, lambda: 2**20
    try:
        x = np.ones((700, 700), np.float32)
        with Mesh((comm.size,), comm) as mesh:
            for algorithm in ("auto", "stationary_a", "queue"):
                assert (rma_mm.matmul(x, x, mesh, algorithm=algorithm).to_numpy() == 700).all()
            assert len(mesh.fallbacks) == 1
            assert "created in place of shared" in mesh.fallbacks[0]
    finally:
        shared.free_segment_bytes = free


@parallel(ranks=(2,), env=NODE)
def test_a_summed_operand_may_lie_elsewhere_than_its_summands(comm):
    from rma_mm.windows import shared

    x = np.ones((600, 600), np.float32)
    with Mesh((2,), comm) as mesh:
        A = DistMatrix.from_local(x.copy(), x.shape, mesh, "None, None, i=sum")
        B = DistMatrix.from_numpy(x, mesh)
        free, shared.free_segment_bytes = shared.free_segment_bytes, lambda: 2**20
        try:
            assert (rma_mm.matmul(A, B, mesh).to_numpy() == 1200).all()
        finally:
            shared.free_segment_bytes = free


@parallel(ranks=(2, 4), env=NODE, timeout=20)
def test_different_calls_do_not_hang(comm):
    with Mesh((comm.size,), comm) as mesh:
        A = DistMatrix.from_numpy(np.ones((8, 8)), mesh)
        plan = rma_mm.plan(A, A, mesh)
        C = plan.execute(A, A)
        call = (lambda: rma_mm.matmul(A, A)) if comm.rank else (lambda: plan.execute(A, A, C))
        with pytest.raises(DisagreementError, match=r"different calls: execute on rank 0 and matmul on rank"):
            call()
        B = DistMatrix.from_numpy(np.ones((8, 8)), mesh)
        if comm.rank == 1:
            B.close()
        for call in (lambda: rma_mm.matmul(A, B), lambda: B.redistribute("*,*"), lambda: B.to_numpy()):  # noqa: PLW0108
            with pytest.raises(ClosedError, match=r"closed.*rank 1"):
                call()


@parallel(ranks=(1, 2), env=NODE)
def test_use_after_the_mesh_was_closed(comm):
    mesh = Mesh((comm.size,), comm)
    A = DistMatrix.from_numpy(np.ones((8, 8)), mesh)
    plan = rma_mm.plan(A, A, mesh)
    plan.execute(A, A)
    mesh.close()
    mesh.close()
    for call in (
        lambda: plan.execute(A, A),
        lambda: DistMatrix.empty((3, 3), mesh, dtype=float),
        lambda: rma_mm.matmul(np.ones((3, 3)), np.ones((3, 3)), mesh),
        lambda: A @ A,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


@parallel(ranks=(4,), env=("node", "nolocal", "allocated", "created"))
def test_pinned_matrices_take_room_on_their_rank_only(comm):
    with Mesh((2, 2), comm) as mesh:
        n = 1024
        made = [DistMatrix.from_numpy(np.ones((n, n)), mesh, f"i={i}, j={j}") for i, j in ((0, 0), (0, 1), (1, 1))]
        held = sum({block.window: block.window.nbytes for block in (m.block for m in made)}.values())
        assert held <= n * n * 8 + 2**22
        plan = rma_mm.plan(made[0], made[1], mesh, layout=made[2].layout, algorithm="stationary_c")
        plan.execute(made[0], made[1], out=made[2])
        assert (made[2].tile == n).all()


@parallel(ranks=(3,), env=NODE)
def test_sums_of_summands_are_not_called_reproducible(comm):
    with Mesh((3,), comm) as mesh:
        A = DistMatrix.from_numpy(np.ones((4, 4)), mesh, "*, *, i=sum")
        B = DistMatrix.from_numpy(np.ones((4, 4)), mesh)
        assert not rma_mm.plan(A, B, mesh, algorithm="stationary_c").reproducible
        with pytest.raises(AlgorithmError, match="partial sums of A or B"):
            rma_mm.plan(A, B, mesh, deterministic=True)
        assert rma_mm.plan(B, B, mesh, deterministic=True).reproducible


@parallel(ranks=(1, 2), env=NODE)
def test_the_interface_is_the_documented_one(comm):
    x = np.arange(12.0).reshape(3, 4)
    with Mesh((comm.size,), comm) as mesh:
        A = DistMatrix.from_numpy(x, mesh)
        assert np.array_equal((x.T @ A).to_numpy(), x.T @ x)
        assert np.array_equal((A @ x.T).to_numpy(), x @ x.T)
        assert np.array_equal(rma_mm.matmul(x.tolist(), A.T).to_numpy(), x @ x.T)
        with rma_mm.plan(A, A.T, beta=2) as plan, pytest.raises(OptionError, match="beta"):
            plan.execute(A, A.T)
        with pytest.raises(TypeError):
            A @ 3
        for layout in ("", ["i"], 3):
            with pytest.raises(ValueError, match="layout"):
                rma_mm.matmul(A, A.T, layout=layout)
        for wrong, words in ((np.ones(4), "inner dimensions 4"), (np.ones((2, 2, 2)), "inner dimensions 2 and 3")):
            with pytest.raises(ValueError, match=words):
                rma_mm.matmul(wrong, A, mesh)
        with pytest.raises(ValueError, match="out"):
            rma_mm.matmul(A, A.T, out=x)
        with pytest.raises(ValueError, match="foo"):
            DistMatrix.empty((3, 3), mesh, dtype="foo")
        with pytest.raises(ValueError, match=r"3\.7"):
            DistMatrix.empty((3.7, 3), mesh, dtype=float)
        assert rma_mm.matmul(A, A.T, compute_dtype="f8", memory_limit=np.int64(2**30)).shape == (3, 3)
        assert DistMatrix.empty((2, 2), mesh, dtype="bfloat16").dtype.name == "bfloat16"


@parallel(ranks=(2,), env=NODE)
def test_an_error_in_a_function_keeps_its_cause(comm):
    def f(rows, cols):
        raise KeyError("lost")

    with Mesh((2,), comm) as mesh:
        with pytest.raises(RuntimeError, match="lost") as caught:
            DistMatrix.from_function((4, 4), f, mesh, dtype=float)
        assert isinstance(caught.value.__cause__, KeyError)


@parallel(ranks=(2,), env=NODE)
def test_a_callers_array_is_let_go_after_close(comm):
    import weakref

    from rma_mm.runtime.ranks.agreement import agree

    with Mesh((2,), comm) as mesh:
        own = np.ones((4, 8))
        gone = weakref.ref(own)
        A = DistMatrix.from_local(own, (8, 8), mesh, "i")
        B = DistMatrix.from_numpy(np.ones((8, 8)), mesh)
        assert (rma_mm.matmul(A, B).to_numpy() == 8).all()
        A.close()
        del own
        DistMatrix.empty((2, 2), mesh, dtype=float)  # any allocation is the agreement that lets go
        agree(comm, "", {})
        assert gone() is None


@parallel(ranks=(2, 3), env=("node", "nolocal"))
def test_half_precision_summands_are_cast_in_counted_memory(comm):
    n = 64
    with Mesh((comm.size,), comm) as mesh:
        x = np.ones((n, n), np.float16)
        A = DistMatrix.from_local(x.copy(), x.shape, mesh, "*, *, i=sum")
        plan = rma_mm.plan(A, x, mesh, algorithm="stationary_c", layout="i")
        C = plan.execute(A, x)
        assert (C.to_numpy() == comm.size * n).all()
        assert plan.peak_bytes >= n * n * (2 + 4)
        assert "cast A" in plan.prepared.frames


@parallel(ranks=(2, 3), env=("node", "nolocal"))
@pytest.mark.parametrize("algorithm", ["row_parallel", "gather_gemm", "data_parallel", "column_parallel"])
def test_a_rank_sends_out_of_the_array_that_it_gathers_into(comm, algorithm):
    """Open MPI takes that for MPI_IN_PLACE in MPI_Ialltoallw: wrong parts, or an error in a status."""
    x, y = np.arange(72.0).reshape(8, 9), np.arange(63.0).reshape(9, 7)
    with Mesh((comm.size,), comm) as mesh:
        C = rma_mm.matmul(x, y, mesh, layout="*,*", algorithm=algorithm)
        assert (C.tile == x @ y).all()


@parallel(ranks=(4,), env=("nolocal", "created"), usual="created")
@pytest.mark.parametrize("half", usually(1, [0, 1]))
def test_a_c_that_is_wanted_everywhere_is_whole_however_a_is_cut(comm, half):
    """The work was cut as A is, and C gathered from where it would have been computed otherwise."""
    rng = np.random.default_rng(0)
    for shape, placed in (
        ((2, 2), ("P('i:bounds(0,2,7)', 'j')", "P('i', 'j')")),
        ((2, 2), ("P('i:cyclic(2)', 'j')", "P('i', 'j:weights(1, 3)')")),
        ((4, 1), ("P('i:bounds(0,1,1,5,7)', 'j')", "P('i', 'j')")),
        ((1, 4), ("P('i', 'j')", "P('i', 'j:bounds(0,0,3,4,5)')")),
        ((4,), ("P('i:bounds(0,1,1,5,7)', None)", "P(None, None)")),
        ((4,), ("P(None, None)", "P(None, 'i:weights(0, 2, 1, 1)')")),
        ((4,), ("P('i:bounds(0,1,1,5,7)', None)", "P('i', None)")),
    ):
        with Mesh(shape, comm) as mesh:
            a, b, c = (rng.integers(-4, 5, extent).astype(float) for extent in ((7, 12), (12, 5), (7, 5)))
            A, B = (DistMatrix.from_numpy(x, mesh, layout) for x, layout in zip((a, b), placed, strict=True))
            for algorithm in EVERYWHERE[half::2]:
                everywhere_c(mesh, (A, B), (a, b, c), algorithm)


EVERYWHERE = (
    "auto", "summa_c", "summa_c:pull", "summa_a", "pumma", "mixed_2d", "cannon", "stationary_c", "queue",
    "data_parallel", "column_parallel", "row_parallel", "gather_gemm", "gemm_scatter:pull",
)


def everywhere_c(mesh, matrices, arrays, algorithm):
    """A product into a C on every rank, and one that adds to it, if the algorithm takes these placements."""
    a, b, c = arrays
    out = DistMatrix.from_numpy(np.full_like(c, np.nan), mesh, "P(None, None)")
    try:
        rma_mm.matmul(*matrices, mesh, out=out, algorithm=algorithm)
    except AlgorithmError:
        return
    assert (out.tile == a @ b).all(), algorithm
    out = DistMatrix.from_numpy(c, mesh, "P(None, None)")
    assert (rma_mm.matmul(*matrices, mesh, out=out, beta=3, algorithm=algorithm).tile == a @ b + 3 * c).all(), algorithm


@parallel(ranks=(4,), env=NODE)
def test_a_rank_begins_what_others_of_its_group_do_behind_a_barrier(comm):
    """It waits for them only there, where it has no products before."""
    rng = np.random.default_rng(269)
    a, b, c = (rng.integers(-4, 5, shape).astype(float) for shape in ((6, 13), (6, 6), (13, 6)))
    places = "P('i:weights(0, 3)', 'j:bounds(0, 6, 13)')", "P('i:cyclic(3, 7)', 'j:bounds(0, 0, 6)')", "P(None, None)"
    with pytest.MonkeyPatch.context() as patch, Mesh((2, 2), comm) as mesh:
        patch.setattr(decisions, "NARROW", 3)
        A, B, C = (DistMatrix.from_numpy(x, mesh, place) for x, place in zip((a, b, c), places, strict=True))
        rma_mm.matmul(A, B, mesh, out=C, transpose_a=True, beta=1, algorithm="pumma")
        assert np.array_equal(C.to_numpy(), a.T @ b + c)

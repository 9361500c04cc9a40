"""C = alpha · A @ B + beta · c into another matrix, which leaves c as it was."""

from __future__ import annotations

import numpy as np
import pytest

import rma_mm
from rma_mm import DistArray, DistMatrix, Epilogue, Mesh
from rma_mm.algorithms import ALGORITHMS
from rma_mm.errors import AlgorithmError, DisagreementError, DtypeError, LayoutError, MeshError, OptionError, ShapeError
from rma_mm.runtime.verification.checked_product import as_before
from rma_mm.windows.checks.checked import SWITCH
from tests.launch import parallel
from tests.mpi.test_misuse import same_error

M, N, K = 9, 11, 7
CASES = [
    ("stationary_c", "i, j", "float64", {}),
    ("summa_c", "i, j", "float32", {"check": True}),
    ("summa_a", "i, j", "complex128", {"transpose_a": True, "conjugate_a": True}),
    ("gemm_scatter:pull", "None, (i, j)", "float64", {"check": "every=2"}),
    ("row_parallel", "*, *", "float16", {}),
    ("queue", "i, j", "int32", {"check": True}),
    ("stationary_a", "i, j", "float64", {"epilogue": Epilogue(activation="relu")}),
    ("auto", "i:cyclic(2), j", "float32", {"semiring": "min_plus"}),
]
"""(algorithm, placement of C, type, other options)."""


def numbers(rng, shape, dtype):
    """Small whole numbers, of a complex type also imaginary ones."""
    x = rng.integers(-4, 5, shape).astype(dtype)
    return x + (1j * rng.integers(-4, 5, shape)).astype(dtype) if x.dtype.kind == "c" else x


def wanted(a, b, c, beta, options):
    """What NumPy makes of it."""
    a = a.T.conj() if "transpose_a" in options else a
    if "semiring" in options:
        return np.minimum(c, (a[:, :, None] + b[None]).min(axis=1))
    result = a @ b + np.asarray(beta, c.dtype) * c
    return np.maximum(result, 0) if "epilogue" in options else result


@parallel(ranks=(2, 4), env=("nolocal",))
def test_what_is_added_stays_as_it_was(comm):
    rng = np.random.default_rng(3)
    with Mesh((comm.size // 2, 2), comm) as mesh:
        for algorithm, place, dtype, options in CASES:
            beta = 1 if "semiring" in options else -2
            a = numbers(rng, (K, M) if "transpose_a" in options else (M, K), dtype)
            b, c, d = (numbers(rng, shape, dtype) for shape in ((K, N), (M, N), (M, N)))
            C, D, other = (DistMatrix.from_numpy(x, mesh, place) for x in (c, np.zeros_like(c), d))
            right = wanted(a, b, c, beta, options)
            made = rma_mm.matmul(a, b, mesh, beta=beta, algorithm=algorithm, c=C, out=D, **options)
            assert made is D and np.array_equal(D.to_numpy(), right), algorithm
            made = rma_mm.matmul(a, b, mesh, beta=beta, algorithm=algorithm, c=C, **options)
            assert made.layout == C.layout and np.array_equal(made.to_numpy(), right), algorithm
            with rma_mm.plan(a, b, mesh, layout=place, beta=beta, algorithm=algorithm, **options) as plan:
                for added, before in ((C, c), (C, c), (other, d), (C, c)):
                    assert plan.execute(a, b, out=D, c=added) is D
                    assert np.array_equal(D.to_numpy(), wanted(a, b, before, beta, options)), algorithm
                    assert np.array_equal(added.to_numpy(), before), algorithm
                plan.execute(a, b, out=D)
                assert np.array_equal(D.to_numpy(), wanted(a, b, right, beta, options)), algorithm
                assert np.array_equal(plan.execute(a, b, c=C).to_numpy(), right), algorithm


@parallel(ranks=(2,), env=("node",))
def test_what_is_added_to_other_views_and_under_checks(comm):
    """Transposed views of both, beta = 0, and RMA_MM_CHECK; what is verified is held against c itself, not a copy."""
    a, b, c = (np.arange(16.0).reshape(4, 4) - n for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "1")
        with Mesh((2, 1), comm) as mesh:
            C, D = (DistMatrix.from_numpy(x, mesh, "j, i").T for x in (c.T, 0 * c))
            made = rma_mm.matmul(a, b, mesh, beta=3, c=C, out=D, algorithm="stationary_c", check=True)
            assert np.array_equal(made.to_numpy(), a @ b + 3 * c)
            with rma_mm.plan(a, b, mesh, layout=C.layout, beta=3) as plan:
                assert np.shares_memory(as_before(plan.spec, D, C).tile, C.tile)
                assert not np.shares_memory(as_before(plan.spec, D, None).tile, D.tile)
            C.tile[...] = np.nan
            assert np.array_equal(rma_mm.matmul(a, b, mesh, c=C, out=D).to_numpy(), a @ b)


@parallel(ranks=(4,), env=("node",))
def test_an_operand_is_added(comm):
    """In every row, whatever it stages or moves."""
    x = np.arange(144.0).reshape(12, 12) % 7
    with Mesh((2, 2), comm) as mesh:
        done = 0
        for name in ("auto", *ALGORITHMS):
            A, D = (DistMatrix.from_numpy(x, mesh, "i, j") for _ in range(2))
            try:
                made = rma_mm.matmul(A, A.T, beta=2, c=A, out=D, algorithm=name)
            except AlgorithmError:
                continue
            assert np.array_equal(made.to_numpy(), x @ x.T + 2 * x) and np.array_equal(A.to_numpy(), x), name
            done += 1
        assert done > 10


@parallel(ranks=(2,), env=("node",))
def test_what_cannot_be_added(comm):
    x = np.arange(16.0).reshape(4, 4)
    with Mesh((2,), comm) as mesh, Mesh((1, 2), comm) as elsewhere:
        A, B, C, D = (DistMatrix.from_numpy(x, mesh, "i") for _ in range(4))
        with rma_mm.plan(A, B, mesh, layout="i", beta=2) as plan:
            for kind, c, out, words in (
                (LayoutError, D, D, "c: it shares memory with out"),
                (LayoutError, D, D.T.T, "c: it shares memory with out"),
                (LayoutError, x, D, "c: got ndarray"),
                (LayoutError, DistMatrix.from_numpy(x, mesh, "*, i"), D, "c: got float64 of shape (4, 4) placed as"),
                (ShapeError, DistMatrix.from_numpy(x[:2], mesh, "i"), D, "c: got float64 of shape (2, 4)"),
                (DtypeError, DistMatrix.from_numpy(np.float32(x), mesh, "i"), D, "c: got float32"),
                (MeshError, DistMatrix.from_numpy(x, elsewhere, "i"), D, "c: it lives on"),
                (LayoutError, plan.execute(A, B, c=C), None, "c: it shares memory with out"),
            ):
                same_error(comm, kind, lambda c=c, out=out: plan.execute(A, B, out=out, c=c), words)
            same_error(comm, DisagreementError, lambda: plan.execute(A, B, out=D, c=None if comm.rank else C), " c: ")
            same_error(comm, OptionError, lambda: plan.execute(A, B), "pass out, or c")
        same_error(comm, OptionError, lambda: rma_mm.matmul(A, B, beta=2), "pass out, or c")
        same_error(comm, LayoutError, lambda: rma_mm.matmul(A, B, c=C, layout="*, i"), "c is placed as")
        same_error(comm, LayoutError, lambda: rma_mm.matmul(A, B, c=x), "c: got ndarray")
        assert np.array_equal(D.to_numpy(), x)


@parallel(ranks=(4,), env=("node",))
def test_of_batches(comm):
    rng = np.random.default_rng(1)
    x, y, z = (rng.integers(-4, 5, shape).astype(float) for shape in ((6, 5, 4), (6, 4, 3), (6, 5, 3)))
    with Mesh((2, 2), comm) as mesh:
        for layout in (None, "P('i', 'j', None)", "P(None, 'i', 'j')"):
            A, B, C = (DistArray.from_numpy(*given) for given in ((x, mesh, layout), (y, mesh), (z, mesh)))
            made = rma_mm.matmul(A, B, mesh, beta=2, c=C)
            assert np.array_equal(made.to_numpy(), x @ y + 2 * z)
            assert np.array_equal(C.to_numpy(), z)
            assert rma_mm.matmul(A, B, mesh, beta=-1, c=C, out=made) is made
            assert np.array_equal(made.to_numpy(), x @ y - z)
            with pytest.raises(LayoutError, match=r"^c: it shares memory with out"):
                rma_mm.matmul(A, B, mesh, beta=2, c=C, out=C)

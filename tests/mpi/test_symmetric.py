"""A · Aᵀ and what else is known to be symmetric, on real ranks: what is recognised, moved and refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from ml_dtypes import bfloat16
from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Epilogue, Mesh
from rma_mm.errors import AlgorithmError, OptionError, VerificationError
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused

SYRK, TRIANGLES = "stationary_c:syrk", "stationary_c:triangles"
def elements(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Small whole numbers; of a complex type with imaginary parts."""
    x = rng.integers(-3, 4, shape)
    if dtype.startswith("complex"):
        return (x + 1j * rng.integers(-3, 4, shape)).astype(dtype)
    return x.astype(bfloat16 if dtype == "bfloat16" else dtype)


@parallel(ranks=(3,), env=("node",))
def test_what_is_recognised(comm: MPI.Intracomm) -> None:
    """One matrix and its transpose; not another, nor where something else enters, nor where that is not wanted."""
    rng = np.random.default_rng(5)
    with Mesh((comm.size,), comm) as mesh:
        A, Z = (DistMatrix.from_numpy(elements(rng, (30, 6), dtype), mesh) for dtype in ("float64", "complex128"))
        other = DistMatrix.from_numpy(np.ones((6, 30)), mesh)
        bias = Epilogue(np.arange(30.0), "row")

        def known(A: DistMatrix, B: DistMatrix, **options: object) -> str:
            with rma_mm.plan(A, B, mesh, **options) as plan:  # type: ignore[arg-type]
                found = plan.options.symmetric
                return "" if found is None else found.word

        assert known(A, A.T) == known(A.T, A) == known(A, A, transpose_a=True) == "symmetric"
        assert known(A.T, A.T, transpose_b=True) == known(A, A.T, alpha=-2) == "symmetric"
        assert known(Z, Z.T) == known(Z, Z.T, conjugate_a=True, conjugate_b=True, alpha=1j) == "symmetric"
        assert known(Z, Z.T, conjugate_b=True) == known(Z.T, Z, conjugate_a=True) == "Hermitian"
        assert known(A, A.T, conjugate_b=True) == known(A, A.T, symmetric="hermitian") == "symmetric"
        real = np.eye(30, 6, dtype=bool)  # whose conjugates are no bools to NumPy
        X = DistMatrix.from_numpy(real, mesh)
        for Y in (X.T, X.T.redistribute("i")):
            C = rma_mm.matmul(X, Y, mesh, symmetric="hermitian", algorithm=SYRK, check=True)
            assert np.array_equal(C.to_numpy(), real @ real.T)
        assert not any([
            known(A, other), known(A, A.T, symmetric=False), known(A, A.T, beta=1), known(A, A.T, epilogue=bias),
            known(Z, Z.T, conjugate_b=True, alpha=1j),
        ])
        another = DistMatrix.from_numpy(np.ones((6, 30)), mesh, "P(None, 'i')")
        for name in (SYRK, TRIANGLES):
            with rma_mm.plan(A, A.T, mesh, algorithm=name) as plan, pytest.raises(OptionError, match="not A transpo"):
                plan.execute(A, another)
        for said in ({"symmetric": True}, {"fill": "lower"}):  # of other matrices too
            with pytest.raises(AlgorithmError, match="one matrix and its transpose"):
                rma_mm.plan(A, A.T, mesh, algorithm=TRIANGLES, **said)
            with rma_mm.plan(A, A.T, mesh, **said) as plan:
                assert plan.execute(A, another).shape == (30, 30)
        held = DistMatrix.from_numpy(np.full((30, 30), 1j), mesh)  # whose diagonal counts as real
        rma_mm.matmul(Z, Z.T, mesh, held, conjugate_b=True, symmetric="hermitian", beta=1, alpha=0, check=True)
        assert np.array_equal(held.to_numpy(), 1j * (np.tri(30, k=-1) - np.tri(30, k=-1).T))
        square = DistMatrix.from_numpy(np.ones((30, 30)), mesh)
        C = rma_mm.matmul(square, square.redistribute("P(None, 'i')"), mesh, symmetric=True, algorithm=SYRK)
        assert (C.to_numpy() == 30).all()


REFUSED = [
    # options, what the message says
    ({"symmetric": True, "transpose_b": False}, "symmetric: got True; C would be (8, 3), and only a square matrix"),
    ({"symmetric": "yes"}, "symmetric: got 'yes'; must be True, False, None, or"),
    ({"symmetric": np.ones(2)}, "symmetric: got array"),
    ({"fill": np.ones(2)}, "fill: got array"),
    ({"transpose_a": np.ones(2)}, "transpose_a: got array"),
    ({"fill": "upper"}, "fill: got 'upper'; must be"),
    ({"fill": "lower", "symmetric": False}, "C is not known to be symmetric"),
    ({"fill": "lower", "epilogue": Epilogue(np.ones(8), "row")}, "C is not known to be symmetric"),
    ({"symmetric": True, "epilogue": Epilogue(np.ones(8), "row")}, "a bias per row makes another matrix of C"),
    ({"symmetric": True, "conjugate_b": True}, "this product is Hermitian, so say"),
    ({"symmetric": "hermitian"}, "this product is symmetric, so say True"),
    ({"symmetric": "hermitian", "conjugate_b": True, "alpha": 1j}, "and alpha=1j; a Hermitian matrix takes real"),
]


@parallel(ranks=(2,), env=("node",))
def test_bad_input(comm: MPI.Intracomm) -> None:
    with Mesh((comm.size,), comm) as mesh:
        Z = DistMatrix.from_numpy(np.ones((8, 3), complex), mesh)
        B = DistMatrix.from_numpy(np.ones((3, 3), complex), mesh)
        for options, words in REFUSED:
            for call in (rma_mm.matmul, rma_mm.plan):
                given = {"transpose_b": True} | options
                with pytest.raises(OptionError) as caught:
                    call(Z, Z if given["transpose_b"] else B, mesh, **given)
                assert words in str(caught.value)
        with pytest.raises(AlgorithmError, match="say symmetric=True"):
            rma_mm.matmul(Z, B, mesh, algorithm=SYRK)
        with pytest.raises(AlgorithmError, match="cannot make a C of partial sums"):
            rma_mm.matmul(Z, Z.T, mesh, algorithm=SYRK, layout="*,*,i=sum")
        whole = rma_mm.matmul(Z, Z.T, mesh, layout="*,*,i=sum")  # what multiplies all of it takes over
        assert (whole.redistribute("i").to_numpy() == 3).all()


@parallel(ranks=(2,), env=("node",))
def test_a_wrong_promise_is_found(comm: MPI.Intracomm) -> None:
    """Also where half of C is wanted, and where it is checked later."""
    with Mesh((comm.size,), comm) as mesh:
        x = np.arange(40.0).reshape(8, 5)
        A, B = DistMatrix.from_numpy(x, mesh), DistMatrix.from_numpy(x.T + np.arange(8), mesh)
        for fill in ("both", "lower"):
            with pytest.raises(VerificationError, match="C is wrong"):
                rma_mm.matmul(A, B, mesh, algorithm=SYRK, symmetric=True, fill=fill, check=True)
        C = rma_mm.matmul(A, A.T, mesh, fill="lower")
        assert rma_mm.verify(A, A.T, C, fill="lower").ok
        C.tile[0, -1] += 1
        with pytest.raises(VerificationError, match="C is wrong"):
            rma_mm.verify(A, A.T, C, fill="lower")


@parallel(ranks=(2,), env=("node",))
def test_on_the_command_line(comm: MPI.Intracomm, tmp_path: Path) -> None:
    x = np.random.default_rng(2).integers(-3, 4, (40, 7)).astype("int32")
    if comm.rank == 0:
        np.save(tmp_path / "A.npy", x)
        np.save(tmp_path / "B.npy", x.T)
    comm.barrier()
    twice = "A.npy A.npy --transpose-b"
    for line in (twice, "A.npy B.npy --symmetric", "A.npy A.npy --transpose-a"):
        done = command(comm, f"{line} -o C.npy --verify --quiet --algorithm {SYRK} --json r.json", tmp_path)
        assert done == (0, "", "")
        left, right = (x.T, x) if "transpose-a" in line else (x, x.T)
        assert np.array_equal(np.load(tmp_path / "C.npy"), left @ right)
        assert json.loads((tmp_path / "r.json").read_text())["algorithm"] == SYRK
    refused(command(comm, f"A.npy B.npy --algorithm {SYRK}", tmp_path), "symmetric=True")
    refused(command(comm, "A.npy A.npy --transpose-a --transpose-b --symmetric", tmp_path), "inner dimensions")
    refused(command(comm, "--symmetric", tmp_path), "--symmetric", "generated matrices")

"""A · Aᵀ and what else is known to be symmetric, on real ranks: equal to NumPy's, and refused where it cannot be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from ml_dtypes import bfloat16
from mpi4py import MPI

import rma_mm
from rma_mm import DistMatrix, Epilogue, Mesh
from rma_mm.errors import AlgorithmError, OptionError, VerificationError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape, grids
from rma_mm.schedule.lowering import fitted
from rma_mm.schedule.verify.checker import verify
from rma_mm.windows.checks.checked import SWITCH
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused
from tests.strategies import ROLES, layouts
from tests.strategies_mpi import shared_examples

SYRK, TRIANGLES = "stationary_c:syrk", "stationary_c:triangles"
WHOLE = [role for role in ROLES if role != "sum"]
DTYPES = ("float64", "float32", "int8", "int32", "bool", "bfloat16", "complex64", "complex128")


@dataclass(frozen=True)
class Gram:
    """One drawn product of a matrix and its transpose."""

    grid: tuple[int, ...]
    shape: tuple[int, int]
    layouts: tuple[Layout, Layout]
    dtype: str
    how: str
    """Which side is transposed, and by what."""
    conjugates: bool
    beta: int
    fill: str
    algorithm: str
    epilogue: Epilogue | None
    semiring: str
    narrow: int
    seed: int


@st.composite
def grams(draw: st.DrawFn, size: int) -> Gram:
    grid = draw(st.sampled_from([grid for axes in (1, 2) for grid in grids(size, axes)]))
    m, k = draw(st.integers(0, 24)), draw(st.integers(0, 9))
    how = draw(st.sampled_from(("A.T", "transpose_a", "transpose_b")))
    shape = (k, m) if how == "transpose_a" else (m, k)
    dtype = draw(st.sampled_from(DTYPES))
    is_float = dtype in ("float64", "float32")
    semiring = draw(st.sampled_from(("plus_times", "plus_times", "min_plus"))) if is_float else "plus_times"
    is_usual = semiring == "plus_times"
    a = draw(layouts(MeshShape(grid), shape, ROLES if dtype == "float64" and is_usual else WHOLE))
    c = draw(layouts(MeshShape(grid), (m, m), WHOLE))
    beta = draw(st.sampled_from((0, 0, 2))) if dtype != "bool" and is_usual else 0
    closes = (None, Epilogue(activation="relu", dtype="float32")) if is_float and is_usual and not beta else (None,)
    fill = draw(st.sampled_from(("both", "lower")))
    is_dealt = any(level.kind == "cyclic" for split in c.splits for level in split)
    named = ("auto", SYRK, *[TRIANGLES] * (not is_dealt))
    return Gram(
        grid, shape, (a, c), dtype, how, dtype.startswith("complex") and draw(st.booleans()), beta, fill,
        draw(st.sampled_from(named)), draw(st.sampled_from(closes)), semiring, draw(st.sampled_from((3, 128))),
        draw(st.integers(0, 999)),
    )  # fmt: skip


def elements(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Small whole numbers; of a complex type with imaginary parts."""
    x = rng.integers(-3, 4, shape)
    if dtype.startswith("complex"):
        return (x + 1j * rng.integers(-3, 4, shape)).astype(dtype)
    return x.astype(bfloat16 if dtype == "bfloat16" else dtype)


def wanted(gram: Gram, x: np.ndarray, c: np.ndarray) -> np.ndarray:
    """What NumPy makes of it: C's old value counts on and below the diagonal."""
    left = x.T if gram.how == "transpose_a" else x
    right = np.conj(left.T) if gram.conjugates else left.T
    if gram.semiring == "min_plus":
        product = (left[:, :, None] + right[None]).min(axis=1, initial=np.inf)
    else:
        wide = {"int8": "int32", "bfloat16": "float32"}.get(gram.dtype, gram.dtype)
        product = left.astype(wide) @ right.astype(wide) + gram.beta * c.astype(wide)
    product = np.maximum(product, 0).astype("float32") if gram.epilogue else product
    below = np.tril(product, -1)
    whole = np.tril(product) + (0 if gram.fill == "lower" else np.conj(below.T) if gram.conjugates else below.T)
    if gram.semiring == "min_plus" and gram.fill == "both":
        whole = np.where(np.tri(*product.shape, dtype=bool), product, product.T)
    elif gram.semiring == "min_plus":
        whole = np.where(np.tri(*product.shape, dtype=bool), product, 0)
    return whole


def check(comm: MPI.Intracomm, gram: Gram, meshes: dict[tuple[int, ...], Mesh]) -> None:
    """One product, which also verifies itself."""
    if gram.grid not in meshes:
        meshes[gram.grid] = Mesh(gram.grid, comm)
    mesh = meshes[gram.grid]
    fitted.NARROW = gram.narrow
    rng = np.random.default_rng(gram.seed)
    x = elements(rng, gram.shape, gram.dtype)
    m = gram.shape[gram.how == "transpose_a"]
    c_dtype = {"int8": "int32"}.get(gram.dtype, gram.dtype) if gram.epilogue is None else "float32"
    c = elements(rng, (m, m), c_dtype)
    if gram.conjugates:
        np.fill_diagonal(c, c.diagonal().real)
    a_layout, c_layout = gram.layouts
    A = DistMatrix.from_numpy(x, mesh).redistribute(a_layout)
    out = DistMatrix.from_numpy(c, mesh, c_layout)
    flags = {gram.how: True} if gram.how != "A.T" else {}
    said = ("hermitian" if gram.conjugates else True) if gram.beta else None
    rma_mm.matmul(
        A, A.T if gram.how == "A.T" else A, mesh, out=out, beta=gram.beta, conjugate_b=gram.conjugates,
        algorithm=gram.algorithm, semiring=gram.semiring, epilogue=gram.epilogue, check=True, fill=gram.fill,
        symmetric=said, compute_dtype="int32" if gram.dtype == "int8" else None, **flags,
    )  # fmt: skip
    found, right = out.to_numpy(), wanted(gram, x, c)
    assert found is not None
    assert np.array_equal(found, right.astype(found.dtype)), f"{found}, and not {right}"


@parallel(env=("node", "nolocal", "created"), timeout=120)
def test_equals_numpy(comm: MPI.Intracomm) -> None:
    """Every type, placement, way to say it, and what becomes of C above the diagonal."""
    meshes: dict[tuple[int, ...], Mesh] = {}
    try:
        shared_examples(comm, grams(comm.size), lambda comm, gram: check(comm, gram, meshes), 8)
    finally:
        fitted.NARROW = 128
    for mesh in meshes.values():
        mesh.close()


@parallel(ranks=(4,), env=("cliques",), timeout=120)
def test_equals_numpy_under_checks(comm: MPI.Intracomm) -> None:
    """Every transfer is checked, and that nothing of C is left as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "1")
        meshes: dict[tuple[int, ...], Mesh] = {}
        shared_examples(comm, grams(comm.size), lambda comm, gram: check(comm, gram, meshes), 4)
    fitted.NARROW = 128
    for mesh in meshes.values():
        mesh.close()


@parallel(ranks=(3, 4, 6), env=("nolocal",))
def test_words_in_triangle_blocks(comm: MPI.Intracomm) -> None:
    """Those that ranks count are those of the schedule, on rows and on a grid: A comes once, for both factors."""
    rng, shape = np.random.default_rng(6), (24 * comm.size, 10)
    x, grid = rng.integers(-3, 4, shape).astype("float32"), {4: (2, 2), 6: (2, 3)}.get(comm.size, (comm.size,))
    with Mesh(grid, comm) as mesh:
        for layout in dict.fromkeys((f"P({mesh.shape.names}, None)", "i" if len(grid) == 1 else "i,j")):
            A = DistMatrix.from_numpy(x, mesh, layout)
            with rma_mm.plan(A, A.T, mesh, layout=layout, algorithm=TRIANGLES) as plan:
                assert np.array_equal(plan.execute(A, A.T).to_numpy(), x @ x.T)
                counted = plan.words.words_intra + plan.words.words_inter
                assert counted == verify(plan.schedule).words[comm.rank]


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
        ])  # fmt: skip
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
    ({"symmetric": "yes"}, "symmetric: got 'yes'; it is True, False, None, or"),
    ({"symmetric": np.ones(2)}, "symmetric: got array"),
    ({"fill": np.ones(2)}, "fill: got array"),
    ({"transpose_a": np.ones(2)}, "transpose_a: got array"),
    ({"fill": "upper"}, "fill: got 'upper'; it is"),
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
        with pytest.raises(AlgorithmError, match="no C in summands"):
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

"""Epilogues on real ranks: once for every element of C, one error for all ranks, and a check that finds faults."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st

import rma_mm
from rma_mm import DistMatrix, Epilogue, Mesh
from rma_mm.algorithms import ALGORITHMS
from rma_mm.errors import DisagreementError, DtypeError, LayoutError, OptionError, ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.mesh import MeshShape, grids
from rma_mm.kernels.epilogue import epilogue as kernel
from rma_mm.runtime.products.plan_cache import PlanCache
from rma_mm.runtime.verification.check import verify
from rma_mm.schedule.lowering import fitted
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused
from tests.reference import collect, distribute, expected, whole_numbers
from tests.strategies import EXTENTS, axes_of, layouts, placements
from tests.strategies_mpi import shared_examples

TYPES = (
    ("float64", None, None),
    ("float32", None, "float64"),
    ("float64", None, "float32"),
    ("float16", None, "float32"),
    ("bfloat16", None, "bfloat16"),
    ("int8", "int32", "float32"),
    ("int32", None, "int16"),
)
"""Element types of A and B, of their product, and of C."""


@dataclass(frozen=True)
class Product:
    """One drawn product."""

    algorithm: str
    mesh: tuple[int, ...]
    shape: tuple[int, int, int]
    layouts: tuple[Layout, Layout, Layout]
    types: tuple[str, str | None, str | None]
    per: str | None
    activation: str | None
    beta: int
    narrow: int
    compiles: bool
    seed: int


@st.composite
def products(draw, size, algorithms):
    """Products for `size` ranks on any grid of theirs, C not in summands."""
    name = draw(st.sampled_from(algorithms))
    row = ALGORITHMS[name]
    mesh = MeshShape(draw(st.sampled_from(list(grids(size, draw(st.sampled_from(axes_of(row))))))))
    shape = m, n, k = tuple(draw(st.sampled_from(EXTENTS)) for _ in range(3))
    if row.placements or row.fit:
        _, placed = draw(placements(row, shape, mesh).filter(lambda drawn: not drawn[1][2].partial))
    else:
        whole = ("rows", "cols", "rows", "cols", "replicated", "pinned")
        placed = (*(draw(layouts(mesh, e)) for e in ((m, k), (k, n))), draw(layouts(mesh, (m, n), roles=whole)))
    types = draw(st.sampled_from(TYPES))
    beta = draw(st.sampled_from((0, 0, 2))) if types[0] != "int8" else 0  # C is no integer there
    return Product(
        name, mesh.shape, shape, placed, types, draw(st.sampled_from(("row", "column", None))),
        draw(st.sampled_from(("relu", None))), beta, draw(st.sampled_from((3, 128))), draw(st.booleans()),
        draw(st.integers(0, 999)),
    )  # fmt: skip


def check(comm, product, meshes):
    """The result is NumPy's, of whole numbers to the last bit; verification finds it right, and a wrong one wrong."""
    if product.mesh not in meshes:
        meshes[product.mesh] = Mesh(product.mesh, comm)
    mesh = meshes[product.mesh]
    fitted.NARROW, kernel.COMPILE_FROM = product.narrow, 0 if product.compiles else 2**14
    rng = np.random.default_rng(product.seed)
    m, n, k = product.shape
    operand, compute, stored = product.types
    a, b, c = (whole_numbers(rng, extent) for extent in ((m, k), (k, n), (m, n)))
    bias = rng.integers(-9, 9, m if product.per == "row" else n).astype("int8") if product.per else None
    closing = Epilogue(bias, product.per, product.activation, stored)
    A, B, C, before = (
        placed(x, layout, mesh, dtype, product.seed)
        for x, layout, dtype in (
            (a, product.layouts[0], operand),
            (b, product.layouts[1], operand),
            *[(c, product.layouts[2], stored or operand)] * 2,
        )
    )
    plan = rma_mm.plan(
        A, B, mesh, layout=C.layout, algorithm=product.algorithm, beta=product.beta, compute_dtype=compute,
        epilogue=closing,
    )  # fmt: skip
    for _ in range(1 if product.beta else 2):
        plan.execute(A, B, out=C)
    tiles = comm.gather(C.tile.astype(float))
    if comm.rank == 0:
        wanted = expected(a, b, c, 1, product.beta)
        wanted += 0 if bias is None else bias[:, None] if product.per == "row" else bias
        wanted = np.maximum(wanted, 0) if product.activation else wanted
        found = collect(tiles, C.layout, mesh.shape, wanted.shape)
        assert np.array_equal(found, wanted.astype(C.dtype).astype(float))
    options = {"beta": product.beta, "before": before, "epilogue": closing, "product": plan.given.product_dtype}
    verdict = verify(A, B, C, **options)
    assert verdict.ok, verdict
    assert verdict.rows == (min(m, 64) if m and n else None)
    C.tile[...] += 64  # of up to 17 rows all are looked at
    if m and n:
        assert not verify(A, B, C, **options).ok
    plan.close()


def placed(x, layout, mesh, dtype, seed):
    """A DistMatrix with the tiles that the reference makes, summands of a partial one included."""
    tiles = distribute(x, layout, mesh.shape, np.random.default_rng(seed))
    D = DistMatrix.empty(x.shape, dtype, mesh, layout)
    if mesh.is_member:
        D.tile[...] = tiles[mesh.rank]
    return D


def check_any(comm, max_examples):
    """Products by any algorithm on any grid."""
    meshes = {}
    drawn = products(comm.size, list(ALGORITHMS))
    try:
        shared_examples(comm, drawn, lambda comm, product: check(comm, product, meshes), max_examples)
    finally:
        fitted.NARROW, kernel.COMPILE_FROM = 128, 2**14
    for mesh in meshes.values():
        mesh.close()


@parallel(ranks=(1, 3, 4, 6), env=("node",), timeout=60)
def test_any_product_is_closed_once(comm):
    check_any(comm, 8)


@parallel(ranks=(2, 6), env=("nolocal",), timeout=60)
def test_any_product_is_closed_once_where_every_rank_is_a_node(comm):
    check_any(comm, 6)


@parallel(ranks=(1, 4), env=("node",))
@pytest.mark.parametrize("algorithm", ["stationary_c", "stationary_a", "cannon", "solomonik_25d:pull", "queue"])
def test_gelu_of_a_larger_product(comm, algorithm):
    """Compiled where that can be, on tiles of uneven size; the plan names it, and counts the bytes of the shadow."""
    rng = np.random.default_rng(1)
    m, n, k = 301, 257, 263
    a, b, bias = (rng.standard_normal(shape).astype("float32") for shape in ((m, k), (k, n), n))
    shape = {"cannon": (2, 2), "solomonik_25d:pull": (2, 2, 1)}.get(algorithm, (comm.size,))
    if comm.size == 1:
        shape = (1,) * len(shape)
    x = a.astype(float) @ b.astype(float) + bias
    exact = np.vectorize(lambda v: v / 2 * math.erfc(-v / math.sqrt(2)))(x)
    with Mesh(shape, comm) as mesh:
        peaks = []
        for stored in ("float32", "float64", "float16"):
            plan = rma_mm.plan(a, b, mesh, algorithm=algorithm, epilogue=Epilogue(bias, "column", "gelu", stored))
            C = plan.execute(a, b)
            assert C.dtype == stored
            error = np.abs(C.to_numpy() - exact)
            assert (error <= 1e-4 + 2 * (np.finfo(stored).eps / 2) * np.abs(exact)).all()
            assert "bias per column, gelu" in str(plan)
            assert "bias per column, gelu" in plan.explain()
            peaks.append(plan.peak_bytes)
            plan.close()
        if comm.size == 1:
            assert peaks[1] - peaks[0] == 8 * m * n  # C in float64, beside the float32 in which it is summed


@parallel(ranks=(1, 4), env=("node",))
def test_matmul_and_the_errors_that_all_ranks_raise(comm):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype("float64") for shape in ((9, 9), (9, 9)))
    bias = np.arange(9.0)
    with Mesh((comm.size,), comm) as mesh:
        kept = len(PlanCache.of(mesh).plans)
        for _ in range(2):
            C = rma_mm.matmul(a, b, mesh, epilogue=Epilogue(bias, "row", "relu"))
            assert np.array_equal(C.to_numpy(), np.maximum(a @ b + bias[:, None], 0))
        assert len(PlanCache.of(mesh).plans) == kept + 1
        C = rma_mm.matmul(a, b, mesh, epilogue=Epilogue(bias + 1, "row", "relu"))  # another bias is another plan
        assert np.array_equal(C.to_numpy(), np.maximum(a @ b + bias[:, None] + 1, 0))
        for dtype in ("float64", "float32"):  # into a C whose rows lie apart, with and without a type of its own
            turned = DistMatrix.empty((9, 9), dtype, mesh).T
            rma_mm.matmul(a, b, mesh, out=turned, epilogue=Epilogue(bias, "column", "relu", dtype))
            assert np.array_equal(turned.to_numpy(), np.maximum(a @ b + bias, 0))
        refused = [
            (OptionError, "dict", {"epilogue": {"bias": bias}}),
            (OptionError, "per=None", {"epilogue": Epilogue(bias)}),
            (ShapeError, "8 values", {"epilogue": Epilogue(bias[:8], "row")}),
            (DtypeError, "gelu", {"epilogue": Epilogue(activation="gelu"), "compute_dtype": "complex128"}),
            (DtypeError, "int32", {"epilogue": Epilogue(dtype="int32")}),
            (LayoutError, "summands", {"epilogue": Epilogue(activation="relu"), "layout": "P(None, None, i=sum)"}),
        ]
        if comm.size > 1:
            mine = bias + (comm.rank == 2)
            refused.append((DisagreementError, "rank 2", {"epilogue": Epilogue(mine, "row")}))
        for kind, word, options in refused:
            with pytest.raises(kind, match=word) as caught:
                rma_mm.matmul(a, b, mesh, **options)
            assert len(set(comm.allgather(str(caught.value)))) == 1
        out = DistMatrix.empty((9, 9), "float32", mesh)
        whole = (a.astype("int8"), b.astype("int8"))
        with pytest.raises(DtypeError, match="beta"):
            rma_mm.matmul(*whole, mesh, out=out, beta=1, compute_dtype="int32", epilogue=Epilogue(dtype="float32"))


@pytest.fixture
def here(tmp_path):
    """A directory with A.npy (101 × 67), B.npy (67 × 53), bias.npy (101) and square.npy."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((101, 67)).astype("float32"), rng.standard_normal((67, 53)).astype("float32")
    bias = rng.standard_normal(101).astype("float32")
    for name, x in (("A", a), ("B", b), ("bias", bias), ("square", a)):
        np.save(tmp_path / f"{name}.npy", x)
    return tmp_path


@parallel(ranks=(4,), env=("node",))
def test_the_command_line(comm, here):
    """The bias from a file, the result in another type, and its report."""
    line = "A.npy B.npy --bias bias.npy --bias-per row --activation relu --result-dtype float64 -o C.npy --verify"
    done = command(comm, f"{line} --json r.json", here)
    assert (done.returncode, done.stderr) == (0, "")
    a, b, bias, c = (np.load(here / f"{name}.npy") for name in ("A", "B", "bias", "C"))
    report = json.loads((here / "r.json").read_text())
    assert c.dtype == np.float64
    np.testing.assert_allclose(c, np.maximum(a @ b + bias[:, None], 0), atol=2e-5)
    assert report["epilogue"] == "bias per row, relu, summed in float32 and stored as float64"
    assert (report["verified"], report["verified_rows"], report["dtype"]) == (True, 101, "float64")
    assert 0 < report["residual"] <= 1
    assert "every element computed again" in done.stdout


@parallel(ranks=(3,), env=("node",))
def test_the_command_line_refuses(comm, here):
    """What does not fit; made matrices are fine."""
    line = "--shape 70,80,90 --activation gelu --result-dtype bfloat16 --quiet"
    assert command(comm, line, here).returncode == 0
    for wrong, words in (
        ("A.npy B.npy --bias bias.npy", "--bias-per"),
        ("A.npy B.npy --bias bias.npy --bias-per column", "101 values"),
        ("A.npy B.npy --bias square.npy --bias-per row", "a vector is needed"),
        ("A.npy B.npy --bias none.npy --bias-per row", "none.npy"),
        ("A.npy B.npy --activation tanh", "gelu"),
        ("A.npy B.npy --result-dtype int8", "never down"),
    ):
        refused(command(comm, wrong, here), words)


@parallel(ranks=(4,), env=("node",))
def test_another_bias(comm):
    """What is bound adds the new values, of which each rank needs its own only; what does not fit is refused."""
    with Mesh((2, 2), comm) as mesh:
        x = np.random.default_rng(1).integers(-3, 4, (6, 6)).astype(np.float32)
        A, first, second = DistMatrix.from_numpy(x, mesh), np.arange(6.0), np.arange(6.0)[::-1] * 2
        for per in ("column", "row"):
            epilogue = Epilogue(first, per, "relu")
            plan = rma_mm.plan(A, A, mesh, layout="i,j", epilogue=epilogue, compute_dtype="f8")
            for bias in (first, second):
                C = plan.execute(A, A)
                assert np.array_equal(C.to_numpy(), np.maximum(x @ x + (bias if per == "column" else bias[:, None]), 0))
                if mesh.checks is None:
                    own = C.region[per == "column"].indices
                    plan.set_bias(second[own], own)
                else:
                    plan.set_bias(second)
            with rma_mm.plan(A, A, mesh, epilogue=epilogue) as other:
                right = np.maximum(x @ x + (first if per == "column" else first[:, None]), 0)
                assert np.array_equal(other.execute(A, A).to_numpy(), right)  # an epilogue is its caller's
            with pytest.raises(ShapeError, match=r"\(5,\); here it is \(6,\)"):
                plan.set_bias(second[1:])
            with pytest.raises(ShapeError, match=r"at: got array\(\[6\]\) for a bias of 6 values"):
                plan.set_bias(second[:1], np.array([6]))
            for wrong in (second * 1j, second.astype(str)):
                with pytest.raises(DtypeError):
                    plan.set_bias(wrong)
        with pytest.raises(OptionError, match="adds no bias"):
            rma_mm.plan(A, A, mesh).set_bias(first)

"""Epilogues on real ranks: once for every element of C, one error for all ranks, and a check that finds faults."""

import json
import math

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Epilogue, Mesh
from rma_mm.errors import DisagreementError, DtypeError, LayoutError, OptionError, ShapeError
from rma_mm.runtime.products.matmul import PlanCache
from tests.doors import command
from tests.launch import parallel
from tests.mpi.test_command_line import refused
from tests.thorough import usually


@parallel(ranks=(1, 4), env=("node",))
@pytest.mark.parametrize(
    "algorithm", usually(2, ["cannon", "stationary_a", "stationary_c", "solomonik_25d:pull", "queue"])
)
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
            turned = DistMatrix.empty((9, 9), mesh, dtype=dtype).T
            rma_mm.matmul(a, b, mesh, out=turned, epilogue=Epilogue(bias, "column", "relu", dtype))
            assert np.array_equal(turned.to_numpy(), np.maximum(a @ b + bias, 0))
        refused = [
            (OptionError, "dict", {"epilogue": {"bias": bias}}),
            (OptionError, "per='all'", {"epilogue": Epilogue(bias, "all")}),
            (ShapeError, "8 values", {"epilogue": Epilogue(bias[:8], "row")}),
            (DtypeError, "gelu", {"epilogue": Epilogue(activation="gelu"), "compute_dtype": "complex128"}),
            (DtypeError, "int32", {"epilogue": Epilogue(dtype="int32")}),
            (LayoutError, "partial sums", {"epilogue": Epilogue(activation="relu"), "layout": "P(None, None, i=sum)"}),
        ]
        if comm.size > 1:
            mine = bias + (comm.rank == 2)
            refused.append((DisagreementError, "rank 2", {"epilogue": Epilogue(mine, "row")}))
        for kind, word, options in refused:
            with pytest.raises(kind, match=word) as caught:
                rma_mm.matmul(a, b, mesh, **options)
            assert len(set(comm.allgather(str(caught.value)))) == 1
        out = DistMatrix.empty((9, 9), mesh, dtype="float32")
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

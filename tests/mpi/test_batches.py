"""Arrays of other than two dimensions, and products of batches: files, words, plans and errors."""

import inspect
import json
import re
import shutil
import tempfile

import numpy as np
import pytest

import rma_mm
from rma_mm import DistArray, DistMatrix, Mesh
from rma_mm.command.jobs import batch_job
from rma_mm.command.jobs.batch_job import BatchJob
from rma_mm.command.options.run import parse
from rma_mm.errors import (
    AlgorithmError,
    ClosedError,
    DisagreementError,
    FileFormatError,
    LayoutError,
    MemoryLimitError,
    MeshError,
    OptionError,
    ShapeError,
)
from rma_mm.runtime.products.batched.plan import BatchPlan
from tests import raw_format
from tests.launch import parallel
from tests.mpi.test_checks import check_found, switched
from tests.mpi.test_library import same_error
from tests.processes import mpirun
from tests.thorough import thorough


def check_files(comm, mesh, x):
    """Arrays come out of `.npy` files as they went in, by rows and by columns; other formats keep matrices alone."""
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    try:
        for name, array in (("batch.npy", x), ("vector.npy", x[0, 0]), ("turned.npy", np.asfortranarray(x))):
            path = f"{folder}/{name}"
            if name == "turned.npy":
                if comm.rank == 0:
                    np.save(path, array)
                comm.Barrier()
            else:
                DistArray.from_numpy(array, mesh).save(path)
                assert np.array_equal(np.load(path), array)
            for layout in (None, "P('i:cyclic(2)')", "P(('j', 'i'))", f"P({'None, ' * (array.ndim - 1)}'j')"):
                assert np.array_equal(rma_mm.load(path, mesh, layout).to_numpy(), array)
        whole, raw = DistArray.from_numpy(x, mesh), f"{folder}/x{raw_format.RAW.suffixes[0]}"
        same_error(comm, FileFormatError, lambda: whole.save(raw), "(5, 6, 7)")
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)


def test_the_command_multiplies_files_of_batches(tmp_path):
    """Verified and written; options that batches do not take are refused, and so is a shape of two numbers."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-3, 4, (5, 6, 7)).astype("float32"), rng.integers(-3, 4, (5, 8, 7)).astype("float32")
    for name, x in (("a", a), ("b", b)):
        np.save(tmp_path / f"{name}.npy", x)
    files = [str(tmp_path / f"{name}.npy") for name in "abc"]
    flags = ["--transpose-b", "--alpha", "2", "--layout-c", "None,i", "--verify", "--quiet", "--json", "-"]
    done = mpirun(2, ["-m", "rma_mm.run", *files[:2], "-o", files[2], *flags])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verified"] is True
    assert report["layouts"]["C"] == "P(None, 'i', None)"
    assert np.array_equal(np.load(files[2]), 2 * a @ b.swapaxes(1, 2))


def test_the_command_conjugates_batches(tmp_path):
    """Each option of a product is taken by batches, or refused: none is passed over."""
    rng = np.random.default_rng(2)
    a, b = ((rng.integers(-3, 4, (2, 3, 3)) + 1j * rng.integers(-3, 4, (2, 3, 3))).astype("complex64") for _ in "ab")
    files = [str(tmp_path / f"{name}.npy") for name in "abc"]
    for file, x in zip(files, (a, b), strict=False):
        np.save(file, x)
    done = mpirun(2, ["-m", "rma_mm.run", *files[:2], "-o", files[2], "--conjugate-a", "--verify", "--quiet"])
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(files[2]), a.conj() @ b)
    known = set(re.findall(r"\b(?:o|options)\.(\w+)", inspect.getsource(batch_job)))
    elsewhere = {"help", "verbose", "list", "list_windows", "verify", "allow_external", "algorithms"}
    elsewhere.add("beta")  # it needs c, which is refused
    known |= {"warmup"} if "untimed" in known else set()  # which takes it
    assert {*vars(parse([]))} <= {*known, *batch_job.UNUSED, *elsewhere}


@thorough
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--shape", "12,16,8,24", "--explain"], 0, "words       0 of the busiest rank"),
        (["--shape", "2,3,16,8,24", "--dtype", "bfloat16"], 0, "verified    right"),
        (["--shape", "3,16,8,24", "--semiring", "min_plus", "--dtype", "int32"], 0, "verified    right"),
        (["--shape", "3,16,8,24", "--activation", "relu"], 2, "--activation: is not supported for batches"),
        (["--shape", "16,8"], 2, "BATCH,M,N,K"),
    ],
)
def test_the_command_multiplies_generated_batches(flags, code, said):
    done = mpirun(2, ["-m", "rma_mm.run", *flags])
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


@thorough
def test_the_benchmark_of_batches(tmp_path):
    file = tmp_path / "report.json"
    small = ["--shape", "6,16,8,16", "--small", "4,8,8,8", "--repeat", "2", "--json", str(file)]
    done = mpirun(2, ["-m", "bench.batches", *small])
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert (report["right"], report["words"]) == (True, 0)
    assert {"ratio", "bar", "met"} <= set(report["rate"])
    assert {"overhead_us", "bar_us", "met"} <= set(report["overhead"])


def check_repeated(comm, plan, a, b):
    """What an execution finds checked and bound is what it is given: new elements, another C, closed operands."""
    mesh = plan.mesh
    first, other = (DistArray.allocated(mesh, plan.c_shape, plan.c_dtype, plan.layouts["C"]) for _ in range(2))
    left = DistArray.from_numpy(a.to_numpy(), mesh)
    for factor, out in ((1, first), (2, first), (3, other), (4, None), (5, None), (6, first)):
        left.tile[...] = factor
        made = plan.execute(left, b, out)
        assert made is out or out is None
        assert (made.tile == 6 * factor).all()
    assert (other.tile == 18).all()
    same_error(comm, DisagreementError, lambda: plan.execute(left, b, first if comm.rank else other), "C: ")
    plan.execute(left, b, first)
    left.close()
    same_error(comm, ClosedError, lambda: plan.execute(left, b, first), "closed")


@parallel(ranks=(2,), env=("nolocal",))
def test_what_is_moved_is_rounded_once_and_counted(comm):
    """What is brought to where C lies is added there in the type of sums; a plan's memory is all that it takes."""
    rng = np.random.default_rng(3)
    a, b, c = (rng.random(shape).astype("float16") for shape in ((6, 9, 80), (6, 80, 7), (6, 9, 7)))
    wide = [x.astype("float32") for x in (a, b, c)]
    expected = (wide[0] @ wide[1] + np.float32(0.1) * wide[2]).astype("float16")
    with Mesh((2,), comm) as mesh:
        A, B = (DistArray.from_numpy(x, mesh) for x in (a, b))
        for place in ("P('i')", "P(None, 'i')"):
            out, added = (DistArray.from_numpy(c, mesh, place) for _ in range(2))
            assert np.array_equal(rma_mm.matmul(A, B, mesh, out, beta=0.1).to_numpy(), expected)
            assert np.array_equal(rma_mm.matmul(A, B, mesh, c=added, beta=0.1).to_numpy(), expected)
        summands = A.redistribute("P(None, None, None, i=sum)")
        with rma_mm.plan(summands, B, mesh) as plan:
            assert np.array_equal(plan.execute(summands, B).to_numpy(), (wide[0] @ wide[1]).astype("float16"))
            needed = plan.peak_bytes
        held = 2 * (summands.tile.size + B.tile.size + c.size // 2)
        brought, summed, cast = 2 * a.size // 2, 4 * a.size // 2, 4 * summands.tile.size
        assert needed >= held + brought + summed + cast
        with rma_mm.plan(summands, B, mesh, memory_limit=needed) as plan:
            assert plan.peak_bytes <= needed
        same_error(comm, MemoryLimitError, lambda: rma_mm.plan(summands, B, mesh, memory_limit=held + brought), "needs")


@parallel(ranks=(4,), env=("node",))
def test_arrays_and_plans(comm):
    """Placements, ways to make one, words, plans that are kept, and what is refused: the same on every rank."""
    x = np.arange(5 * 6 * 7.0).reshape(5, 6, 7)
    with Mesh((2, 2), comm) as mesh:
        whole = DistArray.from_numpy(x, mesh, "P('i', 'j')")
        assert [list(box.shape) for box in whole.local] == [list(whole.tile.shape)]
        assert np.array_equal(whole.tile, x[whole.region.selector()])
        assert np.array_equal(whole.redistribute("P(None, ('j', 'i'), None)").to_numpy(), x)
        assert np.array_equal(DistArray.from_numpy(x if comm.rank == 1 else None, mesh, root=1).to_numpy(), x)
        made = DistArray.from_function(x.shape, lambda a, b, c: 42.0 * a + 7 * b + c, mesh, "P(None, 'i', 'j')")
        assert np.array_equal(made.to_numpy(), x)
        mine = np.ascontiguousarray(whole.tile)
        lent = DistArray.from_local(mine, x.shape, mesh, whole.layout)
        mine += 1
        assert np.array_equal(lent.to_numpy(), x + 1)
        assert np.array_equal(DistArray.from_numpy(x[0, 0], mesh).to_numpy(), x[0, 0])
        check_files(comm, mesh, x)
        a = DistArray.from_numpy(np.ones((8, 4, 6)), mesh)
        b = DistArray.from_numpy(np.ones((8, 6, 4)), mesh)
        with rma_mm.plan(a, b) as plan:  # a batch that is cut over all ranks moves nothing
            assert str(plan.layouts["C"]) == "P(('i', 'j'), None, None)"
            assert (plan.execute(a, b).to_numpy() == 6).all()
            assert plan.words.words_intra == plan.choice.load.words == 0
            assert "batch axis 0 over i, j" in plan.explain()
            check_repeated(comm, plan, a, b)
        with rma_mm.plan(a, b.redistribute("P('i')")) as plan:  # what the plan counts is what is moved
            assert (plan.execute(a, b.redistribute("P('i')")).to_numpy() == 6).all()
            assert plan.words.words_intra <= plan.choice.load.words
        job = BatchJob(parse(["--shape", "8,4,6,4"]), None)
        c = a @ b
        assert job._is_right(a, b, c)
        c.tile[:, -1, -1] += 1e-9 * (comm.rank == 3)  # the check of the command line finds one element
        assert not job._is_right(a, b, c)
        few = np.ones((1, 64, 512)), np.ones((1, 512, 64))
        assert (rma_mm.matmul(*few, mesh, memory_limit=500_000).to_numpy() == 512).all()
        assert ((a @ b) @ np.ones((4, 2))).shape == (8, 4, 2)
        c = DistArray.empty((8, 4, 4), mesh, dtype="float64")
        moved, summands = b.redistribute("P(None, 'i', 'j')"), a.redistribute("P(None, None, None, i=sum, j=sum)")
        assert (rma_mm.matmul(a, b, prefer="two-sided").to_numpy() == 6).all()
        refused = (
            (ShapeError, lambda: rma_mm.matmul(a, np.ones((3, 6, 4))), ("batch axis -3 has 8 in A and 3 in B",)),
            (ShapeError, lambda: rma_mm.matmul(a, np.ones((8, 5, 4))), ("inner dimensions 6 and 5",)),
            (ShapeError, lambda: rma_mm.matmul(a, np.ones(6)), ("B", "(6,)")),
            (ShapeError, lambda: DistMatrix.from_numpy(x, mesh), ("(5, 6, 7)", "DistArray")),
            (ShapeError, lambda: DistArray.empty((), mesh, dtype="float64"), ("()",)),
            (LayoutError, lambda: DistArray.from_numpy(x, mesh, "P('i', 'j', 'l')"), ("'l'",)),
            (LayoutError, lambda: rma_mm.matmul(a, b, out=a.folded), ("out",)),
            (LayoutError, lambda: rma_mm.matmul(c, c, out=c), ("shares memory",)),
            (AlgorithmError, lambda: rma_mm.matmul(a, b, algorithm="cannon"), ("algorithm", "cannon")),
            (OptionError, lambda: rma_mm.matmul(a, b, check=True), ("check",)),
            (ShapeError, lambda: rma_mm.matmul(a, 3.0), ("B: got a number",)),
            (MeshError, lambda: DistArray.from_numpy(x, mesh, root="0"), ("root: got '0'; the mesh 2x2 has",)),
            (MeshError, lambda: a.to_numpy(root=0.5), ("root: got 0.5", "0 to 3")),
            (MeshError, lambda: DistArray.empty((2, 3), "x", dtype="float64"), ("mesh: got 'x'",)),
            (AlgorithmError, lambda: rma_mm.matmul(summands, b, deterministic=True), ("no fixed order",)),
            (OptionError, lambda: rma_mm.matmul(a, moved, prefer="two-sided"), ("prefer", "two-sided")),
            (OptionError, lambda: rma_mm.matmul(a, b, prefer="sometimes"), ("prefer", "sometimes")),
            (OptionError, lambda: np.asarray(a), ("(8, 4, 6) over 4 ranks", "to_numpy()")),
            (ShapeError, lambda: DistArray.empty((2**70, 0, 4), mesh, dtype="float64"), (str(2**70),)),
            (ShapeError, lambda: DistArray.empty((2, -1, 4), mesh, dtype="float64"), ("(2, -1, 4)",)),
            (OptionError, lambda: rma_mm.matmul(a, b, beta=1), ("beta", "out")),
            (MemoryLimitError, lambda: rma_mm.matmul(a, b, memory_limit=10), ("memory_limit", "10")),
        )
        for kind, call, words in refused:
            same_error(comm, kind, call, *words)
        a.close()
        with pytest.raises(ClosedError):
            a.tile  # noqa: B018


@parallel(ranks=(2,), env=("node",))
def test_switches_of_the_environment_are_those_of_batches(comm):
    """RMA_MM_CHECK finds one wrong element of one product; RMA_MM_PREFER refuses what would have to move."""
    x = np.random.default_rng(1).integers(-3, 4, (6, 5, 4)).astype("float32")

    def spoiled(mesh, patch):
        run = BatchPlan._run

        def run_and_spoil(plan, *given):
            run(plan, *given)
            given[-1].tile[-1, 2, 1] += comm.rank == 1

        patch.setattr(BatchPlan, "_run", run_and_spoil)
        rma_mm.matmul(DistArray.from_numpy(x, mesh), x, mesh, transpose_b=True)

    check_found(comm, spoiled, r"products \(6, 5, 4\) @ \(6, 5, 4\) .* C\[5\] is wrong, computed again", (2,))
    with switched("1") as patch:
        with Mesh((2,), comm) as mesh:
            a, c = DistArray.from_numpy(x, mesh, "P(None, 'i')"), DistArray.from_numpy(x @ x.swapaxes(1, 2), mesh)
            for beta in (0, 2):  # right ones pass, moved and added to; what is not written would show
                c = rma_mm.matmul(a, x[:1].swapaxes(1, 2), mesh, c, beta=beta)
            assert np.array_equal(c.to_numpy(), 3 * (x @ x[0].T))
            summed = rma_mm.matmul(x, DistArray.from_numpy(x, mesh), mesh, transpose_b=True, semiring="min_plus")
            assert np.array_equal(summed.to_numpy(), (x[:, :, None] + x[:, None]).min(-1))
        with Mesh((1,), comm) as mesh:  # beyond which a rank holds nothing
            assert np.array_equal(rma_mm.matmul(x, x[:1].swapaxes(1, 2), mesh).to_numpy(), x @ x[0].T)
        patch.setenv("RMA_MM_PREFER", "two-sided")
        with Mesh((2,), comm) as mesh:
            a = DistArray.from_numpy(x, mesh)
            with rma_mm.plan(a, a, mesh, transpose_b=True) as plan:
                assert np.array_equal(plan.execute(a, a).to_numpy(), x @ x.swapaxes(1, 2))
                assert plan.words.words_intra == plan.choice.load.words == 0
            by_rows = DistArray.from_numpy(x, mesh, "P(None, 'i')")
            call = lambda prefer: rma_mm.matmul(a, by_rows, transpose_b=True, prefer=prefer)  # noqa: E731
            same_error(comm, OptionError, lambda: call(None), "RMA_MM_PREFER", "every partitioning")
            assert np.array_equal(call("auto").to_numpy(), x @ x.swapaxes(1, 2))

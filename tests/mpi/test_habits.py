"""Habits from the first tutorials of NumPy, PyTorch, mpi4py and ScaLAPACK: what people write without a look-up."""

import copy
import pickle

import numpy as np
import pytest

import rma_mm
from rma_mm import DistArray, DistMatrix, Epilogue, Mesh
from rma_mm.errors import (
    DisagreementError,
    DtypeError,
    IndexRangeError,
    LayoutError,
    MeshError,
    OptionError,
    ShapeError,
)
from rma_mm.geometry.mesh import MeshShape
from tests.launch import parallel
from tests.mpi.test_library import same_error

LAYOUTS = ("P('i', 'j')", "P('i:cyclic(2)', 'j')", "P(None, 'j')", "P('i', None, j=sum)", "P(i=1)")

EXPRESSIONS = (
    "A + B", "A - B", "A * B", "A / 3", "2 * A", "A * np.float64(2)", "-A", "+A", "A + 1", "1 - A", "A**2", "A // 2",
    "A % 2", "abs(A)", "np.exp(A)", "np.sqrt(abs(A))", "np.tanh(A)", "np.maximum(A, 0)", "A + A[0]", "A - A.mean(0)",
    "A / A.sum(axis=1)[:, None]", "A * np.ones((1, 9))", "A.T", "A.T.T", "A.H", "(A * 1j).H", "A.conj()", "A.copy()",
    "A.astype('float32')", "A.astype(complex)", "A == B", "A != B", "A < B", "(A > 0) & (B > 0)", "~(A > 0)", "A @ B.T",
    "A.T @ B", "A @ v", "u @ A", "A.T @ u", "A[0:10, :]", "A[3]", "A[3, 5]", "A[-1, -1]", "A[:, 2]", "A[::2, ::-1]",
    "A[..., 0]", "A[5:5]", "A[12:, 8:]", "A.sum()", "A.sum(axis=0)", "A.sum(1)", "A.sum((0, 1))", "np.sum(A)",
    "np.mean(A, axis=0)", "A.mean()", "A.max()", "A.min(axis=-1)", "np.max(A)", "(A > 100).any()", "(A == A).all()",
    "np.all(A == A, axis=0)", "A.shape", "A.ndim", "A.size", "A.nbytes", "A.dtype", "A.itemsize", "len(A)",
    "np.shape(A)", "np.ndim(A)", "[row[0] for row in A]",
    "(A + B).astype('int32').sum(0)", "A.astype(bool).sum()",
)


def compared(ours, numpys):
    """Compare a result with NumPy's, in value and in type."""
    if isinstance(ours, DistMatrix | DistArray):
        assert ours.dtype == numpys.dtype
        ours = ours.to_numpy()
    assert np.shape(ours) == np.shape(numpys)
    np.testing.assert_allclose(ours, numpys, rtol=1e-12, atol=1e-12)


@parallel(ranks=(1, 4), env=("node", "cliques"))
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_of_numpy(comm, text):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 13, 9))
    u, v = rng.standard_normal(13), rng.standard_normal(9)
    wanted = eval(text.replace(".H", ".conj().T"), {"np": np, "A": a, "B": b, "u": u, "v": v})
    with Mesh(comm.size, comm) as mesh:
        for layout in LAYOUTS[: 5 if mesh.grid[0] > 1 else 4]:
            A, B = (DistMatrix.from_numpy(x, mesh, layout) for x in (a, b))
            made = eval(text, {"np": np, "A": A, "B": B, "u": u, "v": v})
            if isinstance(wanted, np.ndarray | np.generic):
                compared(made, wanted)
            else:
                assert np.all(np.equal(made, wanted))


@parallel(ranks=(1, 4), env=("node",))
def test_in_place(comm):
    with Mesh(comm.size, comm) as mesh:
        a = np.arange(35.0).reshape(7, 5)
        A = DistMatrix.from_numpy(a, mesh, "P('i', None)")
        kept, same = A.tile, A
        A += 1
        A *= A
        A -= a
        A /= 2
        assert A is same and np.shares_memory(A.tile, kept)
        compared(A, ((a + 1) ** 2 - a) / 2)
        n = DistMatrix.from_numpy(a.astype(int), mesh)
        same_error(comm, DtypeError, lambda: n.__iadd__(0.5), "add")
        partial = DistMatrix.from_numpy(a, mesh, "P('i', None, j=sum)")
        same_error(comm, LayoutError, lambda: partial.__iadd__(1), "redistribute")


@parallel(ranks=(1, 4), env=("node", "cliques", "created"))
def test_types_and_batches(comm):
    with Mesh(comm.size, comm) as mesh:
        d = np.arange(4 * 5 * 6).reshape(4, 5, 6)
        for dtype in ("float16", "bfloat16", "float32", "complex64", "int8", "uint16", "int64", "bool"):
            D = DistArray.from_numpy(d.astype("float32"), mesh).astype(dtype)
            n = D.to_numpy()
            compared(D[1:3, ::2, -1], n[1:3, ::2, -1])
            assert D.sum().dtype == n.sum().dtype and D.max() == n.max() and D.min() == n.min()
            compared(D.sum((0, 2)).astype(complex), n.astype("complex128" if n.dtype.kind == "c" else "float64")
                     .sum((0, 2)).astype(n.sum().dtype).astype(complex))
            compared(D.copy(), n)
        vector = DistArray.from_numpy(d[0, 0], mesh)
        assert vector.T is vector and vector[2] == d[0, 0, 2] and len(vector) == 6
        compared(vector[::-2], d[0, 0, ::-2])
        holed = DistMatrix.from_numpy(np.array([[1, np.nan], [3, 4.0]]), mesh)
        assert np.isnan(holed.max()) and np.isnan(holed.sum(0)[1]) and holed.sum(0)[0] == 4
        empty = DistMatrix.empty((0, 3), mesh)
        assert empty.sum() == 0 and empty.all() and empty[0:0].shape == (0, 3)
        same_error(comm, ShapeError, empty.max, "(0, 3)")


@parallel(ranks=(1, 4), env=("node",))
def test_vectors(comm):
    rng = np.random.default_rng(5)
    a, u, v = rng.standard_normal((13, 9)), rng.standard_normal(13), rng.standard_normal(9)
    with Mesh(comm.size, comm) as mesh:
        A = DistMatrix.from_numpy(a, mesh, "P('j', 'i')")
        U, V = DistArray.from_numpy(u, mesh), DistArray.from_numpy(v, mesh, "P('j')")
        for left, right in ((A, V), (A, v), (U, A), (u, A), (A.T, U), (V, A.T)):
            n = [{id(A): a, id(U): u, id(V): v}.get(id(x), x) for x in (left, right)]
            n = [x if isinstance(x, np.ndarray) else a.T for x in n]
            made = left @ right
            assert isinstance(made, DistArray)
            compared(made, n[0] @ n[1])
        assert np.isclose(V @ V, v @ v) and np.isclose(rma_mm.matmul(u, U), u @ u)
        out = rma_mm.ones(13, mesh, "P('i')")
        assert rma_mm.matmul(A, v, out=out, alpha=2, beta=3) is out
        compared(out, 2 * a @ v + 3)
        z = a + 2j * a[::-1]
        Z = DistMatrix.from_numpy(z, mesh)
        compared(rma_mm.matmul(Z, u, transpose_a=True, conjugate_a=True), z.conj().T @ u)
        compared(rma_mm.matmul(A, v, layout="P(('j', 'i'))", epilogue=Epilogue(bias=u)), a @ v + u)
        same_error(comm, ShapeError, lambda: A @ u, "(13, 9)", "(13,)", "9 and 13")
        same_error(comm, ShapeError, lambda: rma_mm.matmul(rma_mm.ones((2, 3, 4), mesh), v[:4]), "einsum")
        same_error(comm, LayoutError, lambda: rma_mm.matmul(A, v, out=A), "one dimension")


@parallel(ranks=(1, 4), env=("node",))
def test_constructors(comm):
    with Mesh(comm.size, comm) as mesh:
        compared(rma_mm.zeros((3, 4), mesh, dtype="int32"), np.zeros((3, 4), "int32"))
        compared(rma_mm.ones((2, 3, 4), mesh), np.ones((2, 3, 4)))
        compared(rma_mm.ones(5, mesh, "P('i', j=sum)", "float32"), np.ones(5, "float32"))
        compared(rma_mm.eye(5, mesh), np.eye(5))
        compared(rma_mm.eye(5, 3, mesh, "P('j', 'i')", int), np.eye(5, 3, dtype=int))
        one = rma_mm.random((6, 7), mesh, "P('i', 'j')", "float32", seed=4).to_numpy()
        assert one.dtype == "float32" and (one >= 0).all() and (one < 1).all() and one.std() > 0.1
        compared(rma_mm.random((6, 7), mesh, "P('j', None)", "float32", seed=4), one)
        assert (rma_mm.random((6, 7), mesh, seed=5).to_numpy() != one).all()
        assert rma_mm.random((2, 3, 4), mesh, dtype="complex64").shape == (2, 3, 4)
        with pytest.warns(DeprecationWarning, match="order"):
            old = DistMatrix.empty((3, 3), "float32", mesh, "P('j', 'i')")
        assert old.dtype == "float32" and str(old.layout) == "P('j', 'i')"
        same_error(comm, MeshError, lambda: rma_mm.zeros((3, 4), np.float32), "by name", "dtype=")
        same_error(comm, ShapeError, lambda: rma_mm.zeros((3, -4), mesh), "-4")
        same_error(comm, LayoutError, lambda: rma_mm.ones((3, 4), mesh, "P('x')"), "'x'")


@parallel(ranks=(1, 4), env=("node",))
def test_meshes(comm):
    mesh = Mesh(comm=comm)
    rows, cols = mesh.grid
    assert mesh.grid.dims == Mesh(comm.size, comm).grid.dims == ((2, 2) if comm.size == 4 else (1, 1))
    assert (len(mesh.grid), mesh.grid[0], tuple(mesh.grid)) == (2, rows, (rows, cols))
    assert mesh.coords == divmod(comm.rank, cols) and mesh.names == ("i", "j")
    assert Mesh(1, comm).coords == ((0, 0) if comm.rank == 0 else None)
    A = rma_mm.ones((4, 4), mesh)
    plan = rma_mm.plan(A, A)
    chain = rma_mm.plan_chain(["Y = A @ A"], A=A)
    for each, word in ((mesh, "axes i, j"), (A, "4 x 4"), (A.layout, "P('i', 'j')"), (plan, "C[4, 4]"), (chain, "Y")):
        assert word in repr(each) and "\n" not in repr(each) and len(repr(each)) < 120
    assert copy.copy(A.layout) == A.layout == pickle.loads(pickle.dumps(A.layout))
    for wrong in (0, -3, 2.5, "2x2"):
        same_error(comm, MeshError, lambda wrong=wrong: Mesh(wrong, comm), str(wrong))


@parallel(ranks=(1, 4), env=("node",))
def test_descriptors_of_scalapack(comm):
    a = np.arange(13 * 9.0).reshape(13, 9)
    with Mesh(comm.size, comm) as mesh:
        nine = [1, 77, 13, 9, 4, 2, 0, 0, 5 + comm.rank]  # the context and the leading dimension are each rank's own
        for descriptor in (nine, tuple(nine), np.array(nine, "int32")):
            A = DistMatrix.from_numpy(a, mesh, descriptor)
            assert str(A.layout) == "P('i:cyclic(4)', 'j:cyclic(2)')"
            compared(A, a)
            compared(rma_mm.ones((13, 9), mesh).redistribute(descriptor), np.ones((13, 9)))
        local = np.asfortranarray(A.tile)
        compared(DistMatrix.from_local(local, (13, 9), mesh, nine), a)
        compared(rma_mm.matmul(a, np.eye(9), mesh, layout=nine), a)
        same_error(comm, LayoutError, lambda: DistMatrix.from_numpy(a.T, mesh, nine), "(13, 9)", "(9, 13)")
        same_error(comm, LayoutError, lambda: rma_mm.matmul(a, a.T, mesh, layout=nine), "(13, 9)", "(13, 13)")
        same_error(comm, LayoutError, lambda: DistMatrix.from_numpy(a, mesh, [501, *nine[1:]]), "501", "must be 1")
        same_error(comm, LayoutError, lambda: DistMatrix.from_numpy(a, mesh, nine[:8]), "[1, 77, 13, 9")


@parallel(ranks=(1, 4), env=("node", "ucx"))
def test_arrays_that_are_read_only(comm):
    a = np.arange(12.0).reshape(4, 3)
    with Mesh(comm.size, comm) as mesh:
        mine = a[rma_mm.zeros((4, 3), mesh).region.selector()].copy()
        mine.flags.writeable = False
        A = DistMatrix.from_local(mine, (4, 3), mesh)
        compared(A @ a.T, a @ a.T)
        compared(A + 1, a + 1)
        same_error(comm, LayoutError, lambda: rma_mm.matmul(np.eye(4), a, mesh, out=A), "read-only")
        same_error(comm, OptionError, lambda: A.__iadd__(1), "read-only")


@parallel(ranks=(1, 4), env=("node",))
def test_biases_and_limits(comm):
    a, b = np.arange(12.0).reshape(4, 3), np.array([1.0, 2, 3, 4])
    with Mesh(comm.size, comm) as mesh:
        A = DistMatrix.from_numpy(a, mesh)
        for limit in ("2GiB", "2GB", "1000000", np.int64(10**6)):
            compared(rma_mm.matmul(A, a.T, epilogue=Epilogue(bias=b), memory_limit=limit), a @ a.T + b)
        compared(rma_mm.matmul(A, a.T, epilogue=Epilogue(bias=b[:, None])), a @ a.T + b[:, None])
        compared(rma_mm.matmul(A, a.T, epilogue=Epilogue(bias=b[None])), a @ a.T + b)
        compared(rma_mm.einsum("ij,kj->ik", A, a, memory_limit="1GiB"), a @ a.T)
        for bias in (b, DistArray.from_numpy(b, mesh)):
            chain = rma_mm.plan_chain("Y = relu(A @ B + b)", A=A, B=((3, 4), float), b=bias, memory_limit="1GiB")
            B = DistMatrix.from_numpy(a.T, mesh, chain.layouts["B"])
            compared(chain.execute(A=A, B=B, b=bias)["Y"], a @ a.T + b)
        same_error(comm, OptionError, lambda: rma_mm.matmul(A, a.T, memory_limit="2 apples"), "2 apples", "GiB")
        same_error(comm, OptionError, lambda: rma_mm.matmul(A, a.T, memory_limit=-1), "-1")


@parallel(ranks=(1, 4), env=("node",))
def test_mistakes(comm):
    a = np.ones((6, 6))
    with Mesh(comm.size, comm) as mesh:
        A, B = DistMatrix.from_numpy(a, mesh, "P('i', None)"), DistMatrix.from_numpy(a, mesh, "P(None, 'i')")
        for call in (lambda: A + B, lambda: B == A, lambda: np.maximum(A, B), lambda: A.__iadd__(B)):
            same_error(comm, LayoutError, call, "P('i', None)", "P(None, 'i')", "redistribute")
        for index in (6, -7, (0, 6), (0, 0, 0)):
            same_range_error(comm, lambda index=index: A[index])
        for index in (a > 0, [1, 2], None, "x", True):
            same_error(comm, OptionError, lambda index=index: A[index], "to_numpy()")
        same_error(comm, ShapeError, lambda: A + np.ones(5), "(5,)", "(6, 6)")
        same_error(comm, ShapeError, lambda: A + rma_mm.ones((6, 5), mesh), "(6, 5)")
        same_error(comm, OptionError, lambda: bool(A), ".all()")
        same_error(comm, OptionError, lambda: A.sum(2), "2")
        same_error(comm, OptionError, lambda: np.add.reduce(A), "add")
        same_error(comm, DtypeError, lambda: A.astype("U3"), "U3")
        same_error(comm, DtypeError, lambda: A & A, "bitwise_and")
        if comm.size > 1:
            same_error(comm, OptionError, lambda: np.asarray(A), "to_numpy()")
            same_error(comm, OptionError, lambda: np.allclose(A, a), "to_numpy()")
        with pytest.raises(TypeError):
            A + "x"
        assert (A == "x") is False and A != None and len({A, B, A}) == 2  # noqa: E711
        if comm.size > 1:
            same_error(comm, DisagreementError, lambda: A + comm.rank, "add", "rank 1")


def same_range_error(comm, call):
    with pytest.raises(IndexError) as caught:
        call()
    assert isinstance(caught.value, IndexRangeError)
    assert len(set(comm.allgather(str(caught.value)))) == 1


def test_names_after_import_alone():
    """`import rma_mm` is enough for what users name through it."""
    assert rma_mm.errors.ShapeError is ShapeError
    assert str(rma_mm.layouts.parse_layout("i,j", MeshShape((2, 2)))) == "P('i', 'j')"
    with pytest.raises(rma_mm.errors.AlgorithmError, match="'cannon' is taken; pass replace=True"):
        rma_mm.register(rma_mm.algorithms.ALGORITHMS["cannon"])
    assert "random" in dir(rma_mm)


@parallel(ranks=(1, 4), env=("node",))
def test_what_arrays_have_and_matrices_have_not(comm):
    with Mesh(comm.size, comm) as mesh:
        A = rma_mm.ones((4, 3), mesh)
        with pytest.raises(AttributeError, match=r"'reshape'; gather the matrix first: to_numpy\(\).reshape"):
            A.reshape(3, 4)
        assert not hasattr(A, "_nothing") and not hasattr(A, "nothing")

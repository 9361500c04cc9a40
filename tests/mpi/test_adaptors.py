"""A matrix as NumPy and SciPy take one."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from bench.peers.jobs import free_port
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import OptionError
from tests.launch import parallel
from tests.mpi.test_library import grid, same_error
from tests.processes import mpirun
from tests.thorough import thorough


@parallel(ranks=(1, 3), env=("node",))
def test_as_an_array(comm):
    """One rank's memory, without a copy unless one is asked for; of several ranks' an error with the remedy."""
    with Mesh(grid(comm), comm) as mesh:
        x = np.arange(12.0).reshape(3, 4)
        D = DistMatrix.from_numpy(x, mesh)
        if comm.size > 1:
            same_error(comm, OptionError, lambda: np.asarray(D), "(3, 4) over 3 ranks", "to_numpy()")
            return
        assert np.shares_memory(np.asarray(D), D.tile) and not np.shares_memory(np.array(D), D.tile)
        assert np.array_equal(np.asarray(D.T, np.float32), x.T.astype(np.float32))
        with pytest.raises(ValueError, match="copy"):
            np.array(D, np.float32, copy=False)


@parallel(ranks=(1, 4), env=("node",))
def test_as_a_linear_operator(comm):
    """Products and adjoint ones equal SciPy's of the whole matrix, and its solvers run on it."""
    linalg = pytest.importorskip("scipy.sparse.linalg")
    random = np.random.default_rng(1)
    with Mesh(grid(comm), comm) as mesh:
        for dtype in (np.float64, np.complex128):
            x = random.standard_normal((7, 5)) + (1j * random.standard_normal((7, 5)) if dtype == np.complex128 else 0)
            ours, true = DistMatrix.from_numpy(x, mesh).aslinearoperator(), linalg.aslinearoperator(x)
            assert (ours.shape, ours.dtype) == (true.shape, true.dtype)
            u, v = random.standard_normal((5, 3)) + 0 * x[0, 0], random.standard_normal((7, 3)) + 0 * x[0, 0]
            for mine, other in ((ours, true), (ours.T, true.T), (ours.H * 2, true.H * 2)):
                w = u if mine.shape[1] == 5 else v
                np.testing.assert_allclose(mine @ w, other @ w, rtol=1e-13, atol=1e-13)
                np.testing.assert_allclose(mine @ w[:, 0], other @ w[:, 0], rtol=1e-13, atol=1e-13)
            np.testing.assert_allclose(ours.rmatvec(v[:, 0]), true.rmatvec(v[:, 0]), rtol=1e-13, atol=1e-13)
        square = random.standard_normal((6, 6))
        square = square @ square.T + 6 * np.eye(6)
        operator = DistMatrix.from_numpy(square, mesh).aslinearoperator()
        solution, failed = linalg.cg(operator, square @ np.ones(6), rtol=1e-12)
        assert not failed
        np.testing.assert_allclose(solution, 1, rtol=1e-9)


@thorough
def test_arrays_of_jax():
    """Both ways, beside JAX itself, in a job of its own: a process takes part in JAX once."""
    pytest.importorskip("jax")
    done = mpirun(4, ["-m", "tests.jax_ranks", str(free_port())])
    assert done.returncode == 0, done.stderr

"""Ranks that differ in speed: shares of products on real ranks, and speeds that are none."""

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import DisagreementError, OptionError
from tests.doors import command
from tests.launch import parallel

SHAPE = (1100, 900, 130)


@parallel(ranks=(3, 4), env=("node", "cliques"))
@pytest.mark.parametrize("beta", [0, 2])
def test_shares_follow_speeds(comm, beta):
    """The fast rank has the most of what is multiplied; what was placed before stays; C is NumPy's."""
    m, n, k = SHAPE
    speeds = (4,) + (1,) * (comm.size - 1)
    rng = np.random.default_rng(0)
    a, b, c0 = (rng.integers(-4, 5, shape).astype(np.float64) for shape in ((m, k), (k, n), (m, n)))
    with Mesh((comm.size,), comm, speeds=speeds) as mesh:
        assert mesh.speeds == speeds
        with rma_mm.plan(a, b, mesh) as plan:
            out = DistMatrix.from_numpy(c0, mesh, plan.layouts["C"])
            work = [
                plan.choice.chosen.algorithm.work(plan.choice.problem.reduced).region(SHAPE, mesh.grid, rank).size
                for rank in range(mesh.size)
            ]
        if plan.choice.chosen.algorithm.order != "ticket":
            assert max(work[1:]) * 2 < work[0] < 5 * min(work[1:])
        rma_mm.matmul(a, b, mesh, out=out, beta=beta)
        assert np.array_equal(out.to_numpy(), a @ b + beta * c0)
        placed = DistMatrix.from_numpy(a, mesh, "P('i', None)")
        assert np.array_equal(rma_mm.matmul(placed, b, mesh).to_numpy(), a @ b)
        assert str(placed.layout) == "P('i', None)"


@parallel(ranks=(4,), env=("node", "cliques"), usual="cliques")
def test_blocks_follow_speeds(comm):
    """Each column of ranks cuts its rows by its own speeds; C, and what is moved to where it lies, is NumPy's."""
    m, n, k = SHAPE
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float64) for shape in ((m, k), (k, n)))
    cases = ((4,), "weighted:2d", "shared"), ((2, 2), "weighted:2d", "created"), ((2, 2), "auto", "shared")
    for grid, named, window in cases:
        with Mesh(grid, comm, speeds=(4, 1, 1, 2), window=window) as mesh:
            c = rma_mm.matmul(a, b, mesh, algorithm=named)
            assert np.array_equal(c.to_numpy(), a @ b)
            if named != "auto":
                (cut,), (columns,) = c.layout.splits
                assert (len(cut.args), cut.skew) == (6, columns.axes)
                assert comm.allgather(c.tile.size / (m * n)) == pytest.approx([4 / 8, 1 / 8, 1 / 8, 2 / 8], abs=0.01)
                even = c.redistribute("i, *")
                assert np.array_equal(even.to_numpy(), a @ b)
                assert np.array_equal(even.redistribute(c.layout).to_numpy(), a @ b)
                assert np.array_equal(rma_mm.matmul(c, c, mesh, transpose_a=True).to_numpy(), (a @ b).T @ (a @ b))


@parallel(ranks=(3,), env=("cliques",))
def test_chains_follow_speeds(comm):
    """What is between two products of an FFN lies as its ranks are fast; what comes out is NumPy's."""
    rng = np.random.default_rng(0)
    shapes = {"X": (600, 200), "W1": (200, 900), "W2": (900, 300)}
    arrays = {name: rng.integers(-4, 5, shape).astype(np.float64) for name, shape in shapes.items()}
    free = {name: (shape, "float64") for name, shape in shapes.items()}
    steps = ["H = X @ W1", "Y = H @ W2"]
    mesh = Mesh((3,), comm, speeds=(4, 2, 1))
    with mesh, rma_mm.plan_chain(steps, mesh, outputs=["H"], **free) as chain:
        given = {name: DistMatrix.from_numpy(x, mesh, chain.layouts[name]) for name, x in arrays.items()}
        found = chain.execute(**given)
        sizes = comm.allgather(found["H"].tile.size / (600 * 900))
        assert sizes == pytest.approx([4 / 7, 2 / 7, 1 / 7], rel=0.05)
        hidden = arrays["X"] @ arrays["W1"]
        assert np.array_equal(found["H"].to_numpy(), hidden)
        assert np.array_equal(found["Y"].to_numpy(), hidden @ arrays["W2"])


@parallel(ranks=(2,), env=("node",))
def test_speeds_that_are_none(comm):
    for speeds in ((1,), (1, 0), (1, float("nan")), (1, -2), "12", (1, 2, 3)):
        with pytest.raises(OptionError, match=r"speeds: got .*one for each rank"):
            Mesh((2,), comm, speeds=speeds)
    with pytest.raises(DisagreementError, match="speeds"):
        Mesh((2,), comm, speeds=(1, 2 + comm.rank))


@parallel(ranks=(3,), env=("node",))
def test_the_command_takes_speeds(comm, tmp_path):
    ended = command(comm, "--shape 1024,1024,256 --speeds 2,1,1", tmp_path)
    assert ended.returncode == 0
    assert "speeds     1.50, 0.75, 0.75 of their mean" in ended.stdout
    for words, rule in (("2,1", "one for each rank of the grid, 3"), ("2,x,1", "a number for each rank, above 0")):
        ended = command(comm, f"--shape 64,64,64 --speeds {words}", tmp_path)
        assert ended.returncode == 2
        assert "speeds" in ended.stderr
        assert rule in ended.stderr

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
            work = [plan.settled.chosen.row.work(plan.settled.problem.summed).region(SHAPE, mesh.shape, rank).size
                    for rank in range(mesh.size)]  # fmt: skip
        if plan.settled.chosen.row.order != "ticket":
            assert max(work[1:]) * 2 < work[0] < 5 * min(work[1:])
        rma_mm.matmul(a, b, mesh, out=out, beta=beta)
        assert np.array_equal(out.to_numpy(), a @ b + beta * c0)
        placed = DistMatrix.from_numpy(a, mesh, "P('i', None)")
        assert np.array_equal(rma_mm.matmul(placed, b, mesh).to_numpy(), a @ b)
        assert str(placed.layout) == "P('i', None)"


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

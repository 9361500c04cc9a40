"""What outlives a mesh, and how many there may be."""

import gc

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import ClosedError
from rma_mm.runtime.ranks.rank_state import rank_state
from tests.launch import parallel
from tests.processes import mpirun
from tests.thorough import nightly, usually


@parallel(ranks=(4,), env=("cliques",), timeout=60)
@pytest.mark.parametrize("shape", [(3,), (3, 1, 1)])
def test_ranks_beyond_the_grid_join_what_a_node_shares(comm, shape):
    """They have no part of the counts of what was posted."""
    a, b = (np.random.default_rng(n).integers(-4, 5, (24, 24)).astype("float64") for n in (1, 2))
    with Mesh(shape, comm) as mesh:
        left, right = (DistMatrix.from_numpy(x, mesh, f"P('{mesh.grid.names[0]}', None)") for x in (a, b))
        plan = rma_mm.plan(left, right, algorithm="stationary_c")
        assert plan.node_scratch is not None and plan.node_scratch.counts
        for _ in range(3):
            np.testing.assert_array_equal(plan.execute(left, right).to_numpy(), a @ b)


@parallel(ranks=(3,), env=("node", "cliques", "allocated", "created"))
def test_tiles_outlive_their_mesh(comm):
    """Kept on one rank only, or written to; freed once they are gone everywhere."""
    x = np.arange(60.0).reshape(6, 10)
    mesh = Mesh((comm.size,), comm)
    matrix = DistMatrix.from_numpy(x, mesh)
    region, tiles = matrix.region, list(matrix.local.values()) if comm.rank == comm.size - 1 else []
    mesh.close()
    with pytest.raises(ClosedError):
        _ = matrix.tile
    with Mesh((comm.size,), comm) as other:  # does not get the memory that the tiles show
        made = DistMatrix.from_numpy(-x, other)
        for tile in tiles:
            np.testing.assert_array_equal(tile, x[region.selector()])
            tile += 1
        np.testing.assert_array_equal(made.to_numpy(), -x)
    assert mesh in rank_state().held
    tiles = tile = None
    gc.collect()
    Mesh((comm.size,), comm).close()
    assert mesh not in rank_state().held


LATE = """
import atexit, os, sys
atexit.register(lambda: os.write(1, b"late %d;" % tile[0, 0]))
import numpy as np
from rma_mm import DistMatrix, Mesh
mesh, left = Mesh((2,), window=sys.argv[1]), Mesh((2, 1))
tile = DistMatrix.from_numpy(np.full((4, 4), 7.0), mesh).tile
mesh.close()
"""


@pytest.mark.parametrize("network", ["", "tcp"])
@pytest.mark.parametrize("window", ["shared", "allocated"])
def test_tiles_last_as_long_as_the_process(window, network):
    """What runs at exit after meshes were closed may still look at them. Over TCP, MPICH aborts of unfreed windows."""
    over = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": network} if network else {}
    done = mpirun(2, ["-c", LATE, window], variables=over)
    assert (done.returncode, done.stdout.count("late 7;")) == (0, 2), done


LEFT = """
import atexit, os, sys
atexit.register(lambda: os.write(1, b"held %d;" % len(rank_state().held)))
import numpy as np
from rma_mm import DistMatrix, Mesh
from rma_mm.runtime.ranks.rank_state import rank_state
mesh = Mesh((2,), window=sys.argv[1])
matrix = DistMatrix.from_numpy(np.ones((4, 4)), mesh)
product = matrix @ matrix
"""


@pytest.mark.parametrize("window", usually(1, ["shared", "allocated", "created"]))
def test_windows_that_nothing_shows_are_freed_as_the_process_ends(window):
    """Also those of meshes and matrices that are never closed; UCX warns of what is not freed."""
    done = mpirun(2, ["-c", LEFT, window])
    assert (done.returncode, done.stdout) == (0, "held 0;" * 2), done


LIMIT = """
import sys, time
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import MeshError
import numpy as np
meshes, begun = [], time.monotonic()
try:
    while len(meshes) < 3000:
        meshes.append(Mesh((2,)))
except MeshError as error:
    assert f"close some of the {len(meshes)} meshes that are open" in str(error), error
for mesh in meshes[-10:]:
    mesh.close()
x = np.arange(16.0).reshape(4, 4)
assert np.array_equal((DistMatrix.from_numpy(x, Mesh((2,))) @ x).to_numpy(), x @ x)
sys.stdout.write(f"{len(meshes) > 1500}\\n")  # in one piece: both ranks write at once
"""


@nightly
def test_meshes_that_are_opened_and_never_closed():
    """As many as MPI has communicators for, or 3000; then an error, and some that are closed make room."""
    done = mpirun(2, ["-c", LIMIT], timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n" * 2, ""), done


@nightly
@parallel(ranks=(4,), env=("node", "cliques"), timeout=120)
def test_many_meshes_one_after_the_other(comm):
    """MPI has about 2000 communicators: what a mesh takes is given back."""
    for n in range(150):
        with Mesh([(4,), (2, 2), (3,), (1,)][n % 4], comm) as mesh:
            if n % 30 == 0:
                a = np.full((8, 8), float(n))
                np.testing.assert_array_equal((DistMatrix.from_numpy(a, mesh) @ a).to_numpy(), a @ a)

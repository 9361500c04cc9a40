"""Between nodes: what ranks of a node fetch and sum together, progress while a target multiplies, lost hosts."""

import re
import time

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.geometry.span import Region
from rma_mm.runtime.matrices import move
from rma_mm.windows.ranks import node_map
from tests.launch import parallel
from tests.processes import mpirun
from tests.thorough import thorough, usually

SHAPE = (60, 52, 48)


def matrices(mesh, layouts, seed=3):
    """A and B as NumPy arrays and as matrices."""
    rng = np.random.default_rng(seed)
    m, n, k = SHAPE
    arrays = [rng.integers(-9, 10, shape).astype(np.float64) for shape in ((m, k), (k, n))]
    return arrays, [DistMatrix.from_numpy(x, mesh, layout) for x, layout in zip(arrays, layouts, strict=True)]


def inter_node(comm, mesh, layouts, algorithm, times=1):
    """Words between nodes of one product of all ranks together, the last of several right ones."""
    (x, y), (A, B) = matrices(mesh, layouts)
    with rma_mm.plan(A, B, mesh, layout="P('i', 'j')", algorithm=algorithm) as plan:
        for turn in range(times):
            A.tile[...] += turn  # what was fetched before is out of date
            assert np.array_equal(plan.execute(A, B).to_numpy(), (x + sum(range(turn + 1))) @ y)
        return comm.allreduce(plan.words.words_inter)


@pytest.mark.parametrize("grid", usually(1, [(2, 2), (4, 1), (1, 4)], several=False))
@parallel(ranks=(4,), env=("cliques",))
def test_a_slice_crosses_once_for_each_node(comm, grid):
    """All of the operand that is fetched crosses to the node that has not got it, once: half of what it was."""
    nodes = node_map(comm)
    assert len(set(nodes)) == 2
    m, n, k = SHAPE
    with Mesh(grid, comm) as mesh:
        words = inter_node(comm, mesh, ("P('i', 'j')", "P('i', 'j')"), "stationary_c", times=3)
    wanted = {(4, 1): k * n, (1, 4): m * k}
    if grid in wanted:
        assert words == wanted[grid]
    else:  # one of the axes lies within nodes, and what the ranks of a node fetch along the other differs
        assert words == (m * k if nodes[0] == nodes[2] else k * n)


@parallel(ranks=(4, 6), env=("cliques",))
def test_a_replicated_matrix_crosses_once_for_each_node(comm, monkeypatch):
    """Also one that every rank collects, whatever the grid, and where memory is too large to be staged."""
    x = np.arange(256.0 * 256).reshape(256, 256)
    for grid in ((2, comm.size // 2), (comm.size, 1)):
        with Mesh(grid, comm) as mesh:
            A = DistMatrix.from_numpy(x, mesh, "P('i', 'j')")
            counters = A.block.window.counters
            for staged in (None, 2**22, 0):
                monkeypatch.setattr(move, "STAGED", staged)
                before = counters.words_inter
                found = A.redistribute("*, *").tile if staged is None else A.to_numpy()
                assert np.array_equal(found, x)
                assert comm.allreduce(counters.words_inter - before) == x.size  # of two nodes each lacks the other's


ROWS, COLUMNS, WHOLE, BLOCKS = "P('i', None)", "P(None, 'i')", "P(None, None)", "P('i', 'j')"


@pytest.mark.parametrize(
    ("algorithm", "layouts"),
    [
        ("data_parallel", (ROWS, ROWS, ROWS)), ("data_parallel", (ROWS, WHOLE, WHOLE)),
        ("column_parallel", (ROWS, COLUMNS, COLUMNS)), ("row_parallel", (COLUMNS, ROWS, ROWS)),
        ("stationary_c", (ROWS, WHOLE, WHOLE)), ("summa_c", (BLOCKS,) * 3), ("pumma", (BLOCKS,) * 3),
        ("summa_b", (BLOCKS,) * 3),
    ],
)
@parallel(ranks=(4, 5, 6), env=("cliques",))
def test_what_a_group_moves_crosses_once_for_each_node(comm, algorithm, layouts):
    """All ranks get, or sum, a matrix; each of two nodes lacks a part of it, or has made what the other's lacks."""
    crosses_once(comm, algorithm, layouts, "shared")


@pytest.mark.parametrize("c", [ROWS, WHOLE])
@parallel(ranks=(5,), env=("cliques",))
def test_a_rank_passes_on_all_that_it_brought(comm, c):
    """One of the two that share a node brings what two of the other three have, which mates do not read by themselves.

    That is so on each of three nodes, too.
    """
    crosses_once(comm, "data_parallel", (ROWS, ROWS if c == ROWS else WHOLE, c), "allocated")


def crosses_once(comm, algorithm, layouts, window):
    """A product is right three times, and crosses once."""
    rng = np.random.default_rng(comm.size)
    x, y = (rng.integers(-9, 10, (192, 192)).astype(np.float64) for _ in range(2))
    prefer = None if algorithm == "stationary_c" else "two-sided"
    with Mesh((1, comm.size) if BLOCKS in layouts else (comm.size,), comm, window=window) as mesh:
        A, B = (DistMatrix.from_numpy(part, mesh, layout) for part, layout in zip((x, y), layouts, strict=False))
        with rma_mm.plan(A, B, mesh, layout=layouts[2], algorithm=algorithm, prefer=prefer) as plan:
            for turn in range(3):
                A.tile[...] += turn
                assert np.array_equal(plan.execute(A, B).to_numpy(), (x + sum(range(turn + 1))) @ y)
            assert comm.allreduce(plan.words.words_inter) == x.size


@parallel(ranks=(4, 6), env=("cliques", "nolocal", "node"))
def test_pushes_are_summed_on_each_node(comm):
    nodes = node_map(comm)
    m, n, _ = SHAPE
    with Mesh((comm.size, 1), comm) as mesh:
        words = inter_node(comm, mesh, ("P(None, 'i')", "P('i', None)"), "stationary_a", times=3)
        # every node sends each owner on other nodes one sum
        own = [m * (rank + 1) // comm.size - m * rank // comm.size for rank in range(comm.size)]
        assert words == sum(own[rank] * n for rank in range(comm.size) for node in set(nodes) if node != nodes[rank])


@parallel(ranks=(4,), env=("tcp", "cliques"))
@pytest.mark.parametrize("grid", usually(1, [(2, 2), (4, 1), (1, 4)], several=False))
def test_large_tiles_cross_nodes(comm, grid):
    """Tiles that are one stretch of memory, into the middle of a matrix, as they are gathered and multiplied."""
    x, y = (np.arange(210.0 * 280).reshape(210, 280) % q for q in (97, 89))
    with Mesh(grid, comm) as mesh:
        A, B = DistMatrix.from_numpy(x, mesh, "P('i', 'j')"), DistMatrix.from_numpy(y.T, mesh, "P('j', 'i')")
        for turn in range(5):
            assert np.array_equal(A.to_numpy(), x), turn
            assert np.array_equal(A.redistribute("P('j', None)").to_numpy(), x), turn
            C = rma_mm.matmul(A, B, mesh, algorithm="stationary_c")
            assert np.array_equal(C.to_numpy(), x @ y.T), turn


@thorough
@parallel(ranks=(2, 4), env=("node", "cliques", "nolocal"))
def test_a_busy_target_serves_while_it_multiplies(comm):
    """A get from a rank that is inside a multiply, which takes far longer than the transfer.

    Of the caller's own arrays, whose windows MPI serves within a node too.
    """
    with Mesh((comm.size, 1), comm) as mesh:
        rows = 8 // comm.size
        own = np.arange(64.0).reshape(8, 8)[comm.rank * rows :][:rows].copy()
        D = DistMatrix.from_local(own, (8, 8), mesh, "P('i', 'j')")
        other = (comm.rank + comm.size // 2) % comm.size
        got = np.zeros((1, 8))
        waited = 0.0
        comm.Barrier()
        with mesh.progress:
            if comm.rank < comm.size // 2:
                mesh.progress.during(lambda: time.sleep(1.5))
            else:
                begin = time.perf_counter()
                row = Region.whole((1, 8))
                transfer = D.block.window.get(other, D.block.patch(other, row), got, *row)
                transfer.start()
                transfer.wait()
                waited = time.perf_counter() - begin
                transfer.close()
            comm.Barrier()
        if comm.rank >= comm.size // 2:
            assert np.array_equal(got[0], np.arange(8.0) + 8 * (other * 8 // comm.size))
        assert waited < 1.0


@thorough
@parallel(ranks=(4,), env=("cliques",))
def test_a_long_multiply_does_not_look_like_a_lost_host(comm):
    """Three times as long as a rank may be silent; only the helper thread tells the others."""
    with Mesh((comm.size,), comm, timeout=1.5) as mesh, mesh.progress:
        if comm.rank == 0:
            mesh.progress.during(lambda: time.sleep(4.5))
        mesh.progress.wait(comm.Ibarrier().Test)
    for turn in range(20):  # no beat is left over that a later communicator could take for a message of its own
        later = comm.Dup()
        assert later.allreduce(turn) == turn * comm.size
        assert not later.Iprobe()
        later.Free()


LOST = """
import time
from mpi4py import MPI
from rma_mm import Mesh
comm = MPI.COMM_WORLD
mesh = Mesh((comm.size,), comm, timeout=1)
mesh.when_lost = lambda: "the answer is lost" if comm.rank == 0 else ""
comm.Barrier()
with mesh.progress:
    if comm.rank == {silent}:
        mesh.progress._awake.clear()  # as if its host were gone: it says nothing any more
    time.sleep(20)
print("went on")
"""


@pytest.mark.parametrize("silent", usually(1, [1, 2]))
def test_a_silent_rank_ends_the_job_with_one_message(tmp_path, silent):
    program = tmp_path / "lost.py"
    program.write_text(LOST.format(silent=silent))
    begin = time.perf_counter()
    done = mpirun(3, [str(program)], variables={"MPIR_CVAR_NOLOCAL": "1"})
    assert done.returncode == 1
    assert time.perf_counter() - begin < 15
    assert "went on" not in done.stdout
    said = [line for line in done.stderr.splitlines() if line]
    assert len(said) == 1, done.stderr
    assert re.search(rf"nothing was heard of rank {silent} on host \S+ \(process \d+\) for 1 s by rank 0 on", said[0])
    assert said[0].startswith("rma_mm: ")
    assert said[0].endswith("the job ends; the answer is lost")

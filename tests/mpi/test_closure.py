"""Closures of graphs on real ranks: as Floyd and Warshall in NumPy, and SciPy on a road-like grid; paths; errors."""

from fractions import Fraction

import numpy as np
import pytest

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.elements.dtypes import parse_dtype
from rma_mm.errors import DtypeError, LayoutError, MeshError, NegativeCycleError, OptionError, ShapeError
from tests.launch import parallel
from tests.mpi.test_library import grid, same_error

RINGS = {
    "min_plus": (np.minimum, np.add, np.inf, 0.0),
    "max_min": (np.maximum, np.minimum, -np.inf, np.inf),
    "or_and": (np.logical_or, np.logical_and, False, True),
}


def floyd_warshall(x, semiring):
    add, times, _, itself = RINGS[semiring]
    best = x.copy()
    np.fill_diagonal(best, itself)
    for k in range(len(x)):
        best = add(best, times(best[:, k, None], best[None, k, :]))
    return best


def graph(rng, n, semiring, density):
    """Whole weights, many alike and some 0, so that there are ties."""
    is_edge = rng.random((n, n)) < density
    if semiring == "or_and":
        return is_edge
    return np.where(is_edge, rng.integers(0, 6, (n, n)).astype(float), RINGS[semiring][2])


def check_paths(weights, best, before, semiring):
    """Follow every path to its source: n steps at most, along edges, with the value that was found."""
    _, times, nothing, itself = RINGS[semiring]
    n = len(weights)
    none = (best == nothing) | np.eye(n, dtype=bool)
    assert np.array_equal(before == -9999, none)
    at, value = np.tile(np.arange(n), (n, 1)), np.full((n, n), itself)
    rows = np.arange(n)[:, None]
    for _ in range(n):
        previous = np.where(at == rows, -9999, before[rows, at])
        moves = (previous != -9999) & ~none
        value = np.where(moves, times(value, weights[np.maximum(previous, 0), at]), value)
        at = np.where(moves, previous, at)
    assert np.array_equal(np.where(none, rows, at), np.broadcast_to(rows, (n, n)))
    assert np.allclose(value[~none], best[~none], rtol=1e-12, atol=0)


@parallel(ranks=(4,), env=("node", "cliques"), usual="node")
def test_closures_are_those_of_floyd_and_warshall(comm):
    rng = np.random.default_rng(comm.size)
    with Mesh(grid(comm), comm) as mesh:
        for case, semiring in enumerate([*RINGS, *RINGS]):
            for n, density in ((0, 0), (1, 1), (7, 0.3), (40, 0.05), (40, 0.3)):
                x = graph(rng, n, semiring, density)
                wanted = floyd_warshall(x, semiring)
                given = x if case < 3 else DistMatrix.from_numpy(x, mesh, "j, i")
                if semiring == "or_and":
                    found = rma_mm.closure(given, semiring, mesh=mesh)
                else:
                    found, before = rma_mm.closure(given, semiring, predecessors=True, mesh=mesh)
                    assert before.layout == found.layout and before.dtype == np.int32
                    check_paths(x, wanted, before.to_numpy(), semiring)
                assert np.array_equal(found.to_numpy(), wanted)
                assert case < 3 or found is given


@parallel(ranks=(2,), env=("node",))
def test_weights_of_other_types_and_below_zero(comm):
    with Mesh((comm.size, 1), comm) as mesh:
        rng = np.random.default_rng(5)
        potential, costs = rng.random(30), rng.random((30, 30))
        x = np.where(costs < 0.3, costs + potential[:, None] - potential, np.inf)  # no cycle is below zero
        found, before = rma_mm.closure(x, predecessors=True, mesh=mesh)
        wanted = floyd_warshall(x, "min_plus")
        assert np.allclose(found.to_numpy(), wanted, rtol=1e-12, atol=1e-12)
        at = before.to_numpy()
        i, j = np.nonzero(at >= 0)
        assert np.allclose(wanted[i, at[i, j]] + x[at[i, j], j], wanted[i, j], rtol=1e-12, atol=1e-12)
        wide = rng.integers(-(2**62), 2**62, (20, 20))
        wide[rng.random((20, 20)) < 0.8] = np.iinfo(np.int64).min
        found, before = rma_mm.closure(wide, "max_min", True, mesh)
        best, at = found.to_numpy(), before.to_numpy()
        assert best.dtype == np.int64
        i, j = np.nonzero(at >= 0)
        assert len(i) and np.array_equal(np.minimum(best[i, at[i, j]], wide[at[i, j], j]), best[i, j])
        single = rma_mm.closure(x.astype(np.float32), mesh=mesh)
        assert single.dtype == np.float32 and np.allclose(single.to_numpy(), wanted, rtol=1e-4, atol=1e-5)


def whole_graph(rng, n, dtype, large, cycle):
    """Whole weights, many below zero, whose cycles are all of weight 0 or more, but for one of weight `cycle`."""
    potential = rng.integers(-3, 4, n)
    x = rng.integers(0, 5, (n, n)) + potential[:, None] - potential
    x = np.where(rng.random((n, n)) < 0.2, x, np.inf)
    at = rng.permutation(n)[: rng.integers(2, 6)]
    ring = np.roll(at, -1)
    x[at, ring] = potential[at] - potential[ring]
    x[at[0], ring[0]] += cycle
    if large:
        i, j = rng.choice(np.setdiff1d(np.arange(n), at), 2, replace=False)
        x[i, j] = large
    return x.astype(dtype)


@parallel(ranks=(4,), env=("node",))
def test_negative_cycles_of_whole_weights(comm):
    """However large an edge elsewhere is, and in every type: -1 is found, 0 is none."""
    rng = np.random.default_rng(3)
    bfloat16 = parse_dtype("bfloat16")
    cases = [
        ("float64", 0), ("float64", 1e15), ("float64", 1e300), ("float32", 0), ("float32", 1e6), ("float32", 1e30),
        ("float16", 0), ("float16", 1000), ("float16", 60000), (bfloat16, 0), (bfloat16, 2.0**100),
    ]
    with Mesh(grid(comm), comm) as mesh:
        for dtype, large in cases:
            for n in (8, 23):
                x = whole_graph(rng, n, dtype, large, -1)
                same_error(comm, NegativeCycleError, lambda x=x: rma_mm.closure(x, mesh=mesh), "a cycle of negative")
                x = whole_graph(rng, n, dtype, large, 0)
                found, before = rma_mm.closure(x, predecessors=True, mesh=mesh)
                wanted = floyd_warshall(x.astype(float), "min_plus")
                got, before = found.to_numpy().astype(float), before.to_numpy()
                near = abs(wanted) < 100  # lengths over the large edge are rounded
                assert np.array_equal(got[near], wanted[near])
                i, j = np.nonzero(near & (before >= 0))
                assert np.array_equal(wanted[i, before[i, j]] + x.astype(float)[before[i, j], j], wanted[i, j])


@parallel(ranks=(4,), env=("node",))
def test_negative_cycles_of_broken_weights(comm):
    """Cycles of weight 0 that rounding makes negative are none; one of -1e-9 is, beside weights of 1e7."""
    rng = np.random.default_rng(4)
    with Mesh(grid(comm), comm) as mesh:
        for n in (5, 30):
            potential = rng.random(n) * 1e3
            x = potential[:, None] - potential  # every cycle is 0, but for rounding
            x[0, 1] += 1e7
            exact = [[Fraction(float(x[i, j])) for j in range(n)] for i in range(n)]
            is_negative = any(exact[i][j] + exact[j][i] < 0 for i in range(n) for j in range(n) if i != j)
            up = np.nextafter(x, np.inf) * (1 + 1e-15) + 1e-12
            assert rma_mm.closure(np.where(np.eye(n), 0, up), mesh=mesh).shape == (n, n)
            if is_negative:
                same_error(comm, NegativeCycleError, lambda x=x: rma_mm.closure(x, mesh=mesh), "a cycle of negative")
            y = up.copy()
            y[2, 3] = -y[3, 2] - 1e-9
            same_error(comm, NegativeCycleError, lambda y=y: rma_mm.closure(y, mesh=mesh), "a cycle of negative")


@parallel(ranks=(2,), env=("node",))
def test_predecessors_in_float16(comm):
    """Those of paths as long as the lengths say: no longer ones that bfloat16 could not tell from them."""
    with Mesh((comm.size,), comm) as mesh:
        rng = np.random.default_rng(6)
        for _ in range(4):
            x = np.where(rng.random((40, 40)) < 0.15, rng.integers(1, 9, (40, 40)), np.inf)
            for dtype in ("float16", "float32", parse_dtype("bfloat16")):
                best, before = rma_mm.closure(x.astype(dtype), predecessors=True, mesh=mesh)
                check_paths(x, floyd_warshall(x, "min_plus"), before.to_numpy(), "min_plus")
                assert np.array_equal(best.to_numpy().astype(float), floyd_warshall(x, "min_plus"))


@parallel(ranks=(4,), env=("node",))
def test_squaring_stops_when_nothing_changes(comm):
    """A ring of n vertices takes log2(n) products, all edges at once one."""
    with Mesh((2, 2), comm) as mesh:
        ring = np.full((64, 64), np.inf)
        ring[np.arange(64), (np.arange(64) + 1) % 64] = 1
        for x, products in ((ring, 6), (np.ones((64, 64)), 1), (np.full((64, 64), np.inf), 1)):
            before = mesh.metrics.tally.products
            rma_mm.closure(x, mesh=mesh)
            assert mesh.metrics.tally.products - before == products


@parallel(ranks=(4,), env=("node",))
def test_as_scipy_on_a_road_like_grid(comm):
    sparse, csgraph = pytest.importorskip("scipy.sparse"), pytest.importorskip("scipy.sparse.csgraph")
    rng, side = np.random.default_rng(8), 16
    at = np.arange(side * side).reshape(side, side)
    begins = np.concatenate([at[:, :-1].ravel(), at[:-1].ravel()])
    ends = np.concatenate([at[:, 1:].ravel(), at[1:].ravel()])
    kept = rng.random(len(begins)) < 0.9
    begins, ends = np.concatenate([begins[kept], ends[kept]]), np.concatenate([ends[kept], begins[kept]])
    roads = sparse.coo_array((rng.random(len(begins)) + 0.1, (begins, ends)), shape=(side * side,) * 2)
    with Mesh((2, 2), comm) as mesh:
        found, before = rma_mm.closure(roads, predecessors=True, mesh=mesh)
        best, before = found.to_numpy(), before.to_numpy()
        wanted, known = csgraph.shortest_path(roads.tocsr(), return_predecessors=True)
        assert np.allclose(best, wanted, rtol=1e-13, atol=0)
        assert np.array_equal(before, known)  # no two paths are equally long
        assert best.dtype == np.float64 and before.dtype == known.dtype
        dense = np.where((weights := roads.toarray()) > 0, weights, np.inf)
        check_paths(dense, wanted, before, "min_plus")
        whole = sparse.csr_matrix((np.array([3, 0, 4]), ([0, 1, 1], [1, 2, 2])), shape=(3, 3))
        assert rma_mm.closure(whole, mesh=mesh).to_numpy().tolist() == [[0, 3, 7], [np.inf, 0, 4], [np.inf, np.inf, 0]]
        for edges in (whole, whole.astype(bool)):  # one weighs nothing, and is there
            assert rma_mm.closure(edges, "or_and", mesh=mesh).to_numpy().sum() == 6


@parallel(ranks=(2,), env=("node",))
def test_what_has_no_closure(comm):
    with Mesh((1, 2), comm) as mesh:
        x = np.array([[0, 1, np.inf], [np.inf, 0, -3], [1, np.inf, 0]])
        summands = DistMatrix.from_numpy(np.zeros((4, 4)), mesh, "P(None, None)")
        for wrong, error, words in (
            (lambda: rma_mm.closure(x, mesh=mesh), NegativeCycleError, "a cycle of negative weight leads"),
            (lambda: rma_mm.closure(np.diag([0, -1.0]), mesh=mesh), NegativeCycleError, "vertex 1"),
            (lambda: rma_mm.closure(x[:2], mesh=mesh), ShapeError, "the shape (2, 3); the matrix of a graph is square"),
            (lambda: rma_mm.closure(x, "plus_times", mesh=mesh), OptionError, "closures are of min_plus"),
            (lambda: rma_mm.closure(x > 0, "or_and", True, mesh), OptionError, "use min_plus or max_min"),
            (lambda: rma_mm.closure(x.astype(int), mesh=mesh), DtypeError, "floats, with inf where there is no edge"),
            (lambda: rma_mm.closure(x * np.nan, mesh=mesh), OptionError, "got NaN"),
            (lambda: rma_mm.closure(-abs(x), mesh=mesh), OptionError, "got -inf"),
            (lambda: rma_mm.closure(x), MeshError, "pass a DistMatrix, or a mesh"),
            (lambda: rma_mm.closure(summands, layout="i, j"), LayoutError, "is overwritten where it lies"),
        ):
            same_error(comm, error, wrong, words)

"""The best of all paths between any two vertices, by squaring a graph's matrix in a semiring."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.elements.dtypes import BFLOAT16
from rma_mm.elements.semiring import MAX_MIN, MIN_PLUS, OR_AND, Semiring, check_semiring, find_semiring
from rma_mm.errors import DtypeError, LayoutError, MeshError, NegativeCycleError, OptionError, ShapeError
from rma_mm.geometry.layout import Layout
from rma_mm.runtime.graphs.edges import Edges, by_rows, fill, is_sparse
from rma_mm.runtime.matrices.arguments import checked_array, checksum, placed
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.products.matmul import matmul
from rma_mm.runtime.ranks.agreement import agreed
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.runtime.ranks.process_group import serialized

PATHS = {MIN_PLUS.name: "shortest paths", MAX_MIN.name: "widest paths", OR_AND.name: "what is reached"}
"""Semiring → what its closure is."""
TRACED = (MIN_PLUS.name, MAX_MIN.name)  # those whose paths have predecessors
BLOCK = 2**22  # lengths of paths that are traced at a time


@serialized
def closure(
    D: DistMatrix | NDArray[Any] | Any,
    semiring: str = MIN_PLUS.name,
    predecessors: bool = False,
    mesh: Mesh | None = None,
    layout: str | Layout | None = None,
) -> DistMatrix | tuple[DistMatrix, DistMatrix]:
    """Find the best path between every two vertices of a graph: the closure of its (n, n) matrix.

    Collective.

    Parameters
    ----------
    D : DistMatrix, ndarray or sparse matrix
        D[i, j] is the weight of the edge from i to j. A missing edge is `inf` for min_plus, the type's least value for
        max_min, False for or_and. A DistMatrix is overwritten. A NumPy array, or a sparse matrix of SciPy whose stored
        elements are the edges, must be equal on every rank.
    semiring : {"min_plus", "max_min", "or_and"}
        Shortest paths (default), widest paths (the greatest least weight), or reachability.
    predecessors : bool
        Also return the vertex before j on a best path from i (default False). Every rank then keeps all edges
        meanwhile.
    mesh : Mesh, optional
        The mesh of D, or else the default mesh, if not given.
    layout : str or Layout, optional
        Placement of a D that is not distributed.

    Returns
    -------
    DistMatrix or tuple of DistMatrix
        The closure, in which each vertex reaches itself by a path without edges; with `predecessors`, also P (int32).
        P[i, j] is -9999 if there is no path, and for j = i, as in SciPy.

    Raises
    ------
    NegativeCycleError
        If shortest paths have no end; D then holds no result.
    RmaError
        ShapeError, DtypeError, LayoutError or OptionError for arguments that do not fit.

    Notes
    -----
    D is squared until no rank sees a change, at most log2(n) times, with one more matrix of its size. Of equally good
    paths, P describes one with the fewest edges if all weights are whole numbers that sums of them do not overflow.
    """
    mesh = D.mesh if isinstance(D, DistMatrix) else mesh
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh: got {mesh!r}; pass a DistMatrix, or a mesh beside the array")
    matrix, ring, edges = _start(D, mesh, layout, semiring, predecessors)
    n, nothing = matrix.shape[0], ring.identity(matrix.dtype)
    itself = True if matrix.dtype.kind == "b" else 0 if ring.name == MIN_PLUS.name else _greatest(matrix.dtype)
    if predecessors and edges is None:
        edges = Edges.gathered(matrix, nothing)
    exact_below = _square(matrix, ring, itself)
    if edges is None:
        return matrix
    return matrix, _predecessors(matrix, edges, n, ring.name, exact_below)


def _start(
    D: Any, mesh: Mesh, layout: str | Layout | None, semiring: str, predecessors: bool
) -> tuple[DistMatrix, Semiring, Edges | None]:
    """D on the mesh, and its edges where every rank has them already. Collective."""
    with agreed(mesh.comm, "closure", semiring=semiring, predecessors=predecessors, layout=layout) as facts:
        ring = find_semiring(semiring)
        if semiring not in PATHS:
            told = ", ".join(f"{name} ({what})" for name, what in PATHS.items())
            raise OptionError(f"semiring: got {semiring!r}; closures are of {told}")
        if predecessors and semiring not in TRACED:
            raise OptionError(f"predecessors: {semiring} says only whether there is a path; use {' or '.join(TRACED)}")
        if isinstance(D, DistMatrix):
            array, place, shape = D.tile, D.layout, D.shape
            facts |= {"D": D.facts, "layout": str(layout)}
            if layout is not None and placed(layout, D.shape, mesh) != place:
                raise LayoutError(f"layout: got {layout}; D is placed as {place}, and is overwritten where it lies")
        else:
            csr = D.tocsr(copy=True) if is_sparse(D) else None
            if csr is not None:
                csr.sum_duplicates()
                csr = csr.astype(_type_of(csr.dtype, semiring))
                if semiring == OR_AND.name:
                    csr.data[...] = True  # an edge leads on whatever it weighs
            array = checked_array(D) if csr is None else csr.data
            shape = array.shape if csr is None else csr.shape
            _check_square(shape)
            place = placed(layout, shape, mesh)
            parts = [array] if csr is None else [array, csr.indices, csr.indptr]
            facts |= {"shape": shape, "elements (by checksum)": [checksum(part.reshape(1, -1)) for part in parts]}
        _check_square(shape)
        _check(array, place, ring)
    if isinstance(D, DistMatrix):
        return D, ring, None
    nothing = ring.identity(array.dtype)
    matrix = DistMatrix.allocated(mesh, shape, array.dtype, place)
    if csr is None:
        matrix.tile[...] = array[matrix.region.selector()]
    else:
        fill(matrix, csr, nothing)
    if not predecessors:
        return matrix, ring, None
    if csr is None:
        begins, ends = np.nonzero(array != nothing)
        return matrix, ring, Edges.of(shape[0], begins, ends, array[begins, ends])
    kept = array != nothing
    begins = np.repeat(np.arange(shape[0]), np.diff(csr.indptr))
    return matrix, ring, Edges.of(shape[0], begins[kept], csr.indices[kept], array[kept])


def _type_of(dtype: np.dtype[Any], semiring: str) -> np.dtype[Any]:
    """Return the element type of the matrix that is made of a sparse one, which need not say that there is no edge."""
    if semiring == OR_AND.name:
        return np.dtype(bool)
    return np.dtype(np.float64) if semiring == MIN_PLUS.name and dtype.kind in "iub" else dtype


def _check_square(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ShapeError(f"D: got the shape {tuple(shape)}; the matrix of a graph is square")


def _check(array: NDArray[Any], place: Layout, ring: Semiring) -> None:
    """Raise where a graph's matrix is none of this semiring's."""
    if place.partial:
        raise LayoutError(f"D: it is placed as {place}, as partial sums; redistribute it first")
    if ring.name == MIN_PLUS.name and array.dtype.kind in "iu":
        raise DtypeError(f"D: got {array.dtype.name}; min_plus wants floats, with inf where there is no edge")
    check_semiring(ring, array.dtype, 1, 0, False)
    if array.dtype.kind in "biu":
        return
    wide = array.astype(np.promote_types(array.dtype, np.float32), copy=False)
    if np.isnan(wide).any() or (ring.name == MIN_PLUS.name and np.isneginf(wide).any()):
        got = "NaN" if np.isnan(wide).any() else "-inf"
        raise OptionError(f"D: got {got}; a weight must be a number, and where there is no edge inf (-inf for max_min)")


def _greatest(dtype: np.dtype[Any]) -> Any:
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def _square(matrix: DistMatrix, ring: Semiring, itself: Any) -> float:
    """Square a matrix in place until nothing changes, or all paths are counted. Collective.

    Return the length up to which lengths are exact. Raises NegativeCycleError.
    """
    n, mesh = matrix.shape[0], matrix.mesh
    rows, cols = (span.indices for span in matrix.region)
    vertices, *at = np.intersect1d(rows, cols, assume_unique=True, return_indices=True)
    is_whole = bool((matrix.tile[np.isfinite(matrix.tile)].astype(np.float64) % 1 == 0).all())
    is_whole = ring.name == MIN_PLUS.name and mesh.comm.allreduce(is_whole, min)
    exact_below = -np.inf

    def close(x: DistMatrix, before: DistMatrix | None = None) -> bool:
        """Put the path of no edges on the diagonal; True if any rank differs from `before`. NegativeCycleError."""
        nonlocal exact_below
        stood, cycle = x.tile[tuple(at)].astype(np.float64), 0
        x.tile[tuple(at)] = itself
        if ring.name == MIN_PLUS.name:
            below, exact_below = _rounding(x, is_whole)
            negative = vertices[stood < -below[vertices]]
            cycle = int(negative[0]) + 1 if len(negative) else 0
        is_changed = before is None or not np.array_equal(before.tile, x.tile)
        cycle, is_changed = mesh.comm.allreduce((cycle, is_changed), _larger)
        if cycle:
            raise NegativeCycleError(
                f"D: a cycle of negative weight leads through vertex {cycle - 1}, so that there are no shortest paths"
            )
        return bool(is_changed)

    close(matrix)
    now, other = matrix, DistMatrix.allocated(mesh, matrix.shape, matrix.dtype, matrix.layout)
    for _ in range(ceil(log2(n)) if n > 1 else 0):
        matmul(now, now, mesh, out=other, semiring=ring.name)
        is_changed = close(other, now)
        now, other = other, now
        if not is_changed:
            break
    if now is not matrix:
        matrix.copy_from(now)
    (other if now is matrix else now).close()
    return exact_below


def _rounding(matrix: DistMatrix, is_whole: bool) -> tuple[NDArray[np.float64], float]:
    """Return how far below 0 rounding may bring a cycle, by vertex, and up to where lengths are exact. Collective.

    On a cycle of no positive weight through v, no part is longer than what its rest can take back: the least that
    leads from v, and the least that leads to it. Larger weights elsewhere play no role. is_whole: True if all weights
    are whole numbers, which are added exactly as long as the type holds the sum.
    """
    n, eps = matrix.shape[0], _eps(matrix.dtype)
    back = np.zeros((2, n))
    if matrix.tile.size:
        for axis, span in enumerate(matrix.region):
            back[axis, span.indices] = -matrix.tile.min(axis=1 - axis).astype(np.float64).clip(None, 0)
    back = matrix.mesh.comm.allreduce(back, np.maximum)
    most = back.sum(axis=0)
    exact_below = 1 / eps - back.max(axis=1).sum() if n and is_whole else -np.inf
    return np.where(is_whole & (most <= 1 / eps), 0.0, 8 * n * eps * most), float(exact_below)


def _larger(one: tuple[int, bool], other: tuple[int, bool]) -> tuple[int, bool]:
    return max(one[0], other[0]), one[1] or other[1]


def _eps(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype == BFLOAT16 else float(np.finfo(dtype).eps)


def _predecessors(matrix: DistMatrix, edges: Edges, n: int, semiring: str, exact_below: float) -> DistMatrix:
    """Return the vertex before the last on a best path between any two, placed as the matrix is. Collective.

    exact_below: the length up to which lengths were not rounded.
    """
    from rma_mm.kernels.paths import trace

    mesh, widest = matrix.mesh, semiring == MAX_MIN.name
    rows = matrix.redistribute(by_rows(mesh))
    found = DistMatrix.allocated(mesh, matrix.shape, np.dtype(np.int32), rows.layout)
    weights = edges.weights.astype(np.float64)
    order = np.unique(edges.weights)
    if widest:  # by their rank: any integers are exact so
        weights = np.searchsorted(order, edges.weights).astype(np.float64)
    sources, step = rows.region[0].indices, max(1, BLOCK // max(1, n))
    eps = 0.0 if widest else 4 * (log2(max(2, n)) + 1) * _eps(matrix.dtype)
    edge_list = edges.starts, edges.ends, weights
    for begin in range(0, len(sources), step):
        part = rows.tile[begin : begin + step]
        lengths = _ranked(part, order) if widest else part.astype(np.float64)
        mine = sources[begin : begin + step].astype(np.int64)
        found.tile[begin : begin + step] = trace(lengths, mine, *edge_list, widest, eps, exact_below)
    rows.close()
    return found.redistribute(matrix.layout)


def _ranked(widths: NDArray[Any], order: NDArray[Any]) -> NDArray[np.float64]:
    """Widths of paths by their rank among the weights; -inf where there is no path, inf on the diagonal."""
    at = np.searchsorted(order, widths)
    ranks = at.astype(np.float64)
    ranks[at == len(order)] = np.inf
    known = np.append(order, order[-1:] if len(order) else widths.dtype.type(0))
    ranks[(at < len(order)) & (known[at] != widths)] = -np.inf
    return ranks

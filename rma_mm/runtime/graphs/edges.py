"""A graph as it is given: a dense matrix, or a sparse one of SciPy's; its matrix on a mesh, and its edges."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.geometry.layout import Layout
from rma_mm.geometry.level import Level
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.ranks.mesh import Mesh


@dataclass(frozen=True)
class Edges:
    """Edges by the vertex where they begin, as in CSR; all of them on every rank."""

    starts: NDArray[np.int64]  # (n + 1): where the edges of each vertex begin
    ends: NDArray[np.int64]
    weights: NDArray[Any]

    @classmethod
    def of(cls, n: int, begins: NDArray[Any], ends: NDArray[Any], weights: NDArray[Any]) -> Edges:
        """Edges in any order; loops are left out."""
        kept = np.flatnonzero(begins != ends)
        order = kept[np.argsort(begins[kept], kind="stable")]
        starts = np.concatenate([[0], np.cumsum(np.bincount(begins[kept], minlength=n))])
        return cls(starts.astype(np.int64), ends[order].astype(np.int64), weights[order])

    @classmethod
    def gathered(cls, matrix: DistMatrix, nothing: Any) -> Edges:
        """Return the edges of a matrix in which `nothing` marks a missing edge. Collective."""
        mine = matrix.redistribute(by_rows(matrix.mesh))
        rows, cols = np.nonzero(mine.tile != nothing)
        told = mine.region[0].indices[rows], mine.region[1].indices[cols], mine.tile[rows, cols]
        mine.close()
        parts = matrix.mesh.comm.allgather(told)
        begins, ends, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
        return cls.of(matrix.shape[0], begins, ends, weights)


def by_rows(mesh: Mesh) -> Layout:
    return Layout((tuple(Level((axis,)) for axis in mesh.grid.names), ()))


def is_sparse(graph: object) -> bool:
    return hasattr(graph, "tocsr") and hasattr(graph, "nnz")


def fill(matrix: DistMatrix, csr: Any, nothing: Any) -> None:
    """Write a rank's part of a sparse matrix into a matrix; `nothing` where no element is stored. Local."""
    matrix.tile[...] = nothing
    if not matrix.region:
        return
    part = csr[matrix.region[0].indices][:, matrix.region[1].indices].tocoo()
    matrix.tile[part.row, part.col] = part.data

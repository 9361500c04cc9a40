"""Try every way to expose memory on real ranks, for `rma-mm doctor`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from rma_mm.errors import RmaError
from rma_mm.flavours import FLAVOURS
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.products.matmul import matmul
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows import absent

SIZE = 64  # rows and columns of the product that is tried


def tried(comm: Any) -> dict[str, tuple[str, str]]:
    """Return ("ok", "note" or "fault", what was found) for each flavour of windows. Collective over `comm`."""
    return {name: _tried(comm, name) for name in FLAVOURS}


def _tried(comm: Any, name: str) -> tuple[str, str]:
    reasons = [each for each in comm.allgather(absent(name)) if each]
    if reasons:
        return "note", f"absent: {reasons[0]}"
    x = np.arange(SIZE * SIZE, dtype=np.float64).reshape(SIZE, SIZE) % 7
    try:
        with Mesh((comm.size,), comm, window=name) as mesh:
            A, B = DistMatrix.from_numpy(x, mesh, "P('i', None)"), DistMatrix.from_numpy(x.T, mesh, "P('i', None)")
            pulled = matmul(A, B, mesh, algorithm="stationary_c", layout="P('i', None)").to_numpy()
            pushed = matmul(A.T, A, mesh, algorithm="stationary_a", layout="P('i', None)").to_numpy()
            is_right = np.array_equal(pulled, x @ x.T) and np.array_equal(pushed, x.T @ x)
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            loads = mesh.num_nodes == 1 and all(A.block.window.reaches(rank) for rank in others)
            instead, fallbacks = mesh.window_flavour, list(mesh.fallbacks)
    except RmaError as error:
        return "fault", f"{type(error).__name__}: {error}"
    if not all(comm.allgather(is_right)):
        return "fault", f"products on {comm.size} ranks are wrong"
    if instead != name:
        return "note", f"replaced by {instead}: {'; '.join(fallbacks)}"
    how = ", memory is shared" if loads else ""
    return "ok", f"gets and accumulates on {comm.size} ranks are right{how}"


def main() -> None:
    """Print what was found, as JSON, on rank 0. Collective over COMM_WORLD."""
    from mpi4py import MPI

    results = tried(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(results), flush=True)  # noqa: T201

"""ScaLAPACK's p?gemm through ctypes, on the MPI that mpi4py is on.

Debian's library is linked against Debian's MPICH (libmpich.so.12) or Open MPI (libmpi.so.40). MPICH's releases have one
binary interface, so a link by that name to the library that mpi4py has loaded makes ScaLAPACK use it too: the same MPI
and the same mpiexec for all peers. The dynamic linker reads LD_LIBRARY_PATH only when a program starts: hence
`restart`, in this module run as a program.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
from numpy.typing import NDArray

from bench.peers.cases import Case, grid_of
from bench.peers.operands import Piece, part
from bench.peers.registry import SCALAPACK
from bench.peers.systems import OverMPI, Task, mpi_library

BLOCK = 256
"""Rows and columns of a block."""
LINKED = "BENCH_PEERS_LINKED"
"""Environment variable: set once LD_LIBRARY_PATH has the directory with the link."""


def restart() -> None:
    """Before MPI is initialised: start this program anew, such that the linker finds mpi4py's MPI by Debian's name."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI  # noqa: F401 - loads the library

    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libmpi" in line}
    library = next(path for path in sorted(loaded) if Path(path).name.startswith(("libmpi.so", "libmpich.so")))
    links = Path(tempfile.mkdtemp())  # in the job's own directory, which goes with the job
    (links / "libmpich.so.12").symlink_to(library)
    paths = os.pathsep.join([str(links), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    os.environ |= {LINKED: "1", "LD_LIBRARY_PATH": paths}
    os.execv(sys.executable, sys.orig_argv)


class Scalapack(OverMPI):
    """C = A · B of block-cyclic matrices, column-major, on the grid that moves least."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.lib = library()
        case = self.case
        p, q, _ = grid_of(case, self.ranks, k_parts=(1,))
        self.grid, self.context = (p, q), self.process_grid(p, q)
        self.at = divmod(self.rank, q)
        self.blocks = blocks_of(case, p, q)
        m, n, k = self.blocks
        self.a = self.filled("A", Spread((case.m, case.k), (m, k), self.grid, self.at))
        self.b = self.filled("B", Spread((case.k, case.n), (k, n), self.grid, self.at))
        self.spread = Spread((case.m, case.n), (m, n), self.grid, self.at)
        self.c = np.zeros(self.spread.shape, case.dtype, "F")
        self.call = self.prepared()
        self.facts = {
            "mpi": mpi_library(), "blas": blas_name(), "grid": [p, q], "blocks": list(self.blocks),
            "result": "into an existing array",
        }

    def process_grid(self, p: int, q: int) -> int:
        """A BLACS context, ranks in row-major order."""
        context = ctypes.c_int()
        self.lib.Cblacs_get(-1, 0, ctypes.byref(context))
        self.lib.Cblacs_gridinit(ctypes.byref(context), b"Row", p, q)
        return context.value

    def filled(self, which: str, spread: Spread) -> NDArray[Any]:
        """This rank's part of "A" or "B", column-major."""
        made = np.empty(spread.shape, self.case.dtype, "F")
        for at, rows, cols in spread.boxes():
            made[at] = part(which, rows, cols, self.case.dtype)
        return made

    def descriptor(self, extents: tuple[int, int], blocks: tuple[int, int], local: NDArray[Any]) -> Any:
        """ScaLAPACK's description of a dense matrix."""
        return (ctypes.c_int * 9)(1, self.context, *extents, *blocks, 0, 0, max(1, local.shape[0]))

    def prepared(self) -> Any:
        """The call with all its arguments, which Fortran takes by reference."""
        case = self.case
        m, n, k = case.m, case.n, case.k
        scalar, name = (ctypes.c_float, "psgemm_") if case.dtype == "float32" else (ctypes.c_double, "pdgemm_")
        one = ctypes.byref(ctypes.c_int(1))
        operands = [
            (local.ctypes.data_as(ctypes.c_void_p), one, one, self.descriptor(extents, blocks, local))
            for extents, blocks, local in (
                ((m, k), self.blocks[::2], self.a),
                ((k, n), self.blocks[:0:-1], self.b),
                ((m, n), self.blocks[:2], self.c),
            )
        ]
        alpha, beta = ctypes.byref(scalar(1)), ctypes.byref(scalar(0))
        extents = [ctypes.byref(ctypes.c_int(x)) for x in (m, n, k)]
        arguments = [b"N", b"N", *extents, alpha, *operands[0], *operands[1], beta, *operands[2]]
        gemm = getattr(self.lib, name)
        return lambda: gemm(*arguments)

    def multiply(self) -> None:
        """C = A · B."""
        self.call()

    def pieces(self) -> Iterable[Piece]:
        """This rank's blocks, those that lie side by side together."""
        for at, rows, cols in self.spread.boxes():
            yield Piece(rows, cols, self.c[at])


class Spread:
    """The block-cyclic part of a matrix that one process of a grid holds."""

    def __init__(
        self, extents: tuple[int, int], blocks: tuple[int, int], grid: tuple[int, int], at: tuple[int, int]
    ) -> None:
        self.owned = [
            np.flatnonzero(np.arange(extent) // block % parts == index)
            for extent, block, parts, index in zip(extents, blocks, grid, at, strict=True)
        ]
        self.shape = (len(self.owned[0]), len(self.owned[1]))

    def boxes(self) -> Iterable[tuple[tuple[slice, slice], slice, slice]]:
        """Boxes of consecutive indices: where each is here, and its rows and columns in the whole."""
        for (rows, whole_rows), (cols, whole_cols) in product(*map(runs, self.owned)):
            yield (rows, cols), whole_rows, whole_cols


def runs(indices: NDArray[np.int64]) -> list[tuple[slice, slice]]:
    """Runs of consecutive indices: where each is among them, and in the whole.

    >>> runs(np.array([0, 1, 4, 5]))
    [(slice(0, 2, None), slice(0, 2, None)), (slice(2, 4, None), slice(4, 6, None))]
    """
    found = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1) if len(indices) else []
    places = np.cumsum([0, *map(len, found)]).tolist()
    return [
        (slice(at, at + len(run)), slice(int(run[0]), int(run[-1]) + 1)) for at, run in zip(places, found, strict=False)
    ]


def library() -> Any:
    """ScaLAPACK for the MPI that mpi4py is on. Raises OSError where none can be loaded."""
    kind = "openmpi" if "Open MPI" in mpi_library() else "mpich"
    errors = []
    for name in filter(lambda name: kind in name, SCALAPACK):
        try:
            return ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
        except OSError as error:
            errors.append(str(error))
    raise OSError(f"no ScaLAPACK for {kind}: {'; '.join(errors)}")


def blocks_of(case: Case, p: int, q: int) -> tuple[int, int, int]:
    """Block sizes along m, n and k, small enough that every rank has a part.

    At 4096³ float32 on 2 and 4 ranks blocks of 256 were faster by a third than one block a rank along m and n.
    """
    extents = ((case.m, p), (case.n, q), (case.k, max(p, q)))
    m, n, k = (max(1, min(BLOCK, -(-extent // parts))) for extent, parts in extents)
    return m, n, k


def blas_name() -> str:
    """The BLAS in this process that is not NumPy's. Raises RuntimeError for the reference BLAS, which is far slower."""
    found = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas" and "numpy" not in x["filepath"]]
    if not found:
        raise RuntimeError("ScaLAPACK runs on the reference BLAS: apt-get install libopenblas0-pthread")
    return "; ".join(f"{x['internal_api']} {x['version']} ({x.get('architecture')}), {x['filepath']}" for x in found)


if __name__ == "__main__":
    if LINKED not in os.environ:
        restart()
    from bench.peers import worker

    sys.exit(worker.main())

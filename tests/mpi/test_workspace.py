"""Plans that work in memory of the caller."""

from __future__ import annotations

import tracemalloc

import numpy as np

import rma_mm
from rma_mm import DistMatrix, Mesh
from rma_mm.errors import DisagreementError, LayoutError, OptionError
from rma_mm.geometry.notation import parse_layout
from tests.launch import parallel
from tests.mpi.test_misuse import same_error
from tests.mpi.test_rows import placed

NUMPYS = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
CASES = [
    ("cannon", "float32", "i, j"), ("summa_a", "float16", "i, j"), ("stationary_a", "complex128", "*, (i, j)"),
    ("queue", "int32", "(i, j), *"), ("stationary_c", "float16", "i, *, j=sum"), ("auto", "float64", "j, i"),
]
"""(algorithm, type, placement of A and B)."""


def bytes_of_numpy():
    """Bytes that NumPy holds in arrays that were made since tracing began."""
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([NUMPYS]).traces)


@parallel(ranks=(4,), env=("nolocal",))
def test_a_plan_makes_no_memory_beside_its_workspace(comm):
    shape = (96, 96)
    x, y = (np.arange(96.0 * 96).reshape(shape) % n for n in (3, 5))
    with Mesh((2, 2), comm) as mesh:
        A, B, C = (DistMatrix.from_numpy(z, mesh, "i, j") for z in (x, y, 0 * x))
        with rma_mm.plan(A, B, mesh, layout="i, j", algorithm="summa_c") as plan:
            plan.execute(A, B, out=C)
            needed = plan.scratch_bytes
        assert needed >= 2 * 48 * 48 * 8
        workspace = np.empty(needed + 3, np.uint8)[3:]
        for given in (None, workspace):
            tracemalloc.start()
            with rma_mm.plan(A, B, mesh, layout="i, j", algorithm="summa_c", workspace=given) as plan:
                assert plan.scratch_bytes == needed
                C.tile[...] = np.nan
                plan.execute(A, B, out=C)
                grown = bytes_of_numpy()
            tracemalloc.stop()
            assert np.array_equal(C.to_numpy(), x @ y)
            assert grown < 4096 if given is not None else grown >= needed - 1024, (grown, needed)


@parallel(ranks=(4,), env=("cliques",))
def test_any_plan_works_in_a_workspace(comm):
    """Whatever moves operands, in whatever type; what others must reach lies in windows, and is said beside."""
    rng = np.random.default_rng(5)
    with Mesh((2, 2), comm) as mesh:
        for algorithm, dtype, place in CASES:
            x, y = (rng.integers(0, 3, (22, 22)).astype(dtype) for _ in range(2))
            A, B = (placed(z, parse_layout(place, mesh.grid), mesh, dtype, 0) for z in (x, y))
            with rma_mm.plan(A, B, mesh, algorithm=algorithm) as plan:
                needed, in_windows = plan.scratch_bytes, plan.window_bytes
            workspace = np.full(needed + 64, 0xA5, np.uint8)
            with rma_mm.plan(A, B, mesh, algorithm=algorithm, workspace=workspace[:needed]) as plan:
                assert (plan.scratch_bytes, plan.window_bytes) == (needed, in_windows)
                for _ in range(2):
                    assert np.array_equal(plan.execute(A, B).to_numpy(), x @ y), algorithm
                plan.adapt = True
                assert not plan.adapt
            assert (workspace[needed:] == 0xA5).all()
            if "sum" in place or dtype == "float16":
                assert in_windows >= 11 * 11 * 4


@parallel(ranks=(2,), env=("node",))
def test_what_no_plan_can_work_in(comm):
    with Mesh((1, 2), comm) as mesh:
        A = DistMatrix.from_numpy(np.ones((64, 64)), mesh, "i, j")
        with rma_mm.plan(A, A, mesh, algorithm="summa_c") as plan:
            needed = plan.scratch_bytes
        good = np.empty(needed, np.uint8)
        fixed = good.copy()
        fixed.flags.writeable = False
        for given, words in (
            (good[: needed - 1] if comm.rank else good, f"got {needed - 1} bytes on rank 1; this plan needs {needed}"),
            (good[:0], "got 0 bytes on rank 0"),
            (np.empty(needed), f"got float64 of shape ({needed},); it is a one-dimensional"),
            (np.empty((2, needed), np.uint8), "got uint8 of shape (2, "),
            (np.empty(2 * needed, np.uint8)[::2], "not contiguous"),
            (fixed if comm.rank else good, "read-only"),
            (bytearray(needed), "got bytearray"),
        ):
            call = lambda given=given: rma_mm.plan(A, A, mesh, algorithm="summa_c", workspace=given)  # noqa: E731
            same_error(comm, OptionError, call, "workspace: ", words)
        mixed = good if comm.rank else None
        call = lambda: rma_mm.plan(A, A, mesh, algorithm="summa_c", workspace=mixed)  # noqa: E731
        same_error(comm, DisagreementError, call, "workspace")
        with rma_mm.plan(A, A, mesh, layout="i, j", algorithm="summa_c", workspace=good) as plan:
            size = 64 * 32 * 8
            local = good[-good.ctypes.data % 8 :][:size].view(np.float64).reshape(64, 32)
            C = DistMatrix.from_local(local, (64, 64), mesh, "i, j")
            same_error(comm, LayoutError, lambda: plan.execute(A, A, out=C), "out: it shares memory with the plan's")

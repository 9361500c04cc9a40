"""A plan's scratch that no other rank reaches: what it takes, and where it lies, in its own memory or the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.errors import LayoutError, OptionError
from rma_mm.runtime.execution.addressing import COPIED
from rma_mm.runtime.execution.footprint import frames_of
from rma_mm.runtime.execution.operands import frame_dtype
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.schedule import STAGE

ALIGNMENT = 64  # bytes: frames begin at multiples of it
Frames = dict[str, tuple[int, np.dtype[Any]]]  # frame → its elements and their type


def frames(mesh: Mesh, choice: PlanChoice) -> Frames:
    """Return the frames of this rank: of its slots, and of summands that are cast before they are added up."""
    given, schedule = choice.spec, choice.schedule
    found = {frame: (n, frame_dtype(given, schedule, frame)) for frame, n in frames_of(schedule, mesh).items()}
    for x in "AB":
        if mesh.is_member and x + STAGE in schedule.homes and given.dtype(x + STAGE) != given.dtype(x):
            found[COPIED + x] = schedule.home(x, mesh.rank).size, given.dtype(x + STAGE)
    return found


def nbytes(sizes: Frames) -> int:
    return ALIGNMENT * bool(sizes) + sum(_rounded(n * dtype.itemsize) for n, dtype in sizes.values())


def split_frames(sizes: Frames, workspace: NDArray[np.uint8] | None) -> dict[str, NDArray[Any]]:
    """Return the frames, flat, in the workspace, or each in memory of its own."""
    if workspace is None:
        return {frame: np.empty(n, dtype) for frame, (n, dtype) in sizes.items()}
    return dict(_parts(sizes, workspace))


def _parts(sizes: Frames, workspace: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[Any]]]:
    begin = -workspace.ctypes.data % ALIGNMENT
    for frame, (n, dtype) in sizes.items():
        yield frame, workspace[begin : begin + n * dtype.itemsize].view(dtype)
        begin += _rounded(n * dtype.itemsize)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_workspace(workspace: object) -> None:
    """Raise OptionError for an invalid workspace."""
    rule = "it is a one-dimensional, contiguous, writable array of uint8, of plan.scratch_bytes bytes or more"
    if workspace is None:
        return
    if not isinstance(workspace, np.ndarray):
        raise OptionError(f"workspace: got {type(workspace).__name__}; {rule}")
    flags = workspace.flags
    faults = ["not contiguous"] * (not flags.c_contiguous) + ["read-only"] * (not flags.writeable)
    if workspace.dtype != np.uint8 or workspace.ndim != 1 or faults:
        found = ", ".join([f"{workspace.dtype} of shape {workspace.shape}", *faults])
        raise OptionError(f"workspace: got {found}; {rule}")


def check_room(needed: int, workspace: NDArray[np.uint8], rank: int) -> None:
    """Raise OptionError if a workspace has fewer bytes."""
    if workspace.size < needed:
        raise OptionError(
            f"workspace: got {workspace.size} bytes on rank {rank}; this plan needs {needed} there, as "
            "plan.scratch_bytes of one that is made without a workspace says"
        )


def check_apart(workspace: NDArray[np.uint8] | None, **matrices: DistMatrix | None) -> None:
    """Raise LayoutError if a matrix lies in the workspace."""
    for name, matrix in matrices.items():
        if workspace is not None and matrix is not None and np.may_share_memory(workspace, matrix.block.local):
            raise LayoutError(f"{name}: it shares memory with the plan's workspace, which the product overwrites")

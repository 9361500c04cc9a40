"""Windows: memory that ranks expose, and one-sided transfers. The hardware side; it knows no schedules.

Importing this package imports no MPI; opening a window does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rma_mm.errors import WindowError
from rma_mm.windows.base import Counters, Patch, Transfer, Window, can_accumulate
from rma_mm.windows.checked import Checks, checked

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray

WINDOWS: dict[str, tuple[str, str]] = {
    "shared": ("rma_mm.windows.shared", "SharedWindow"),
    "allocated": ("rma_mm.windows.allocated", "AllocatedWindow"),
    "created": ("rma_mm.windows.created", "CreatedWindow"),
}
"""Flavour -> (module, class), imported when first opened."""


def open_window(
    flavour: str,
    comm: MPI.Intracomm,
    memory: int | NDArray[Any],
    *,
    node_of: tuple[int, ...] | None = None,
    chunk_bytes: int | None = None,
    checks: Checks | None = None,
) -> Window:
    """Open a window. Collective over `comm`; every rank passes the same flavour.

    `memory` is the number of bytes that this rank exposes (ranks may differ, 0 is fine), or, for "created", the
    array that it exposes as it stands. `node_of` is `mpi.node_map(comm)`, computed here when absent; one MPI call
    moves at most `chunk_bytes`. With `checks` its transfers are checked, which is noted there. Contents are undefined.
    Raises WindowError on every rank for an unknown flavour or memory that cannot be exposed, and MemoryLimitError where
    shared memory is too small.
    """
    if flavour not in WINDOWS:
        raise WindowError(f"window {flavour!r} is unknown; valid names: {', '.join(WINDOWS)}")
    module, name = WINDOWS[flavour]
    options: dict[str, Any] = {} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}
    kind = getattr(import_module(module), name)
    window: Window = (kind if checks is None else checked(kind, checks))(comm, memory, node_of=node_of, **options)
    return window


__all__ = ["WINDOWS", "Checks", "Counters", "Patch", "Transfer", "Window", "can_accumulate", "open_window"]

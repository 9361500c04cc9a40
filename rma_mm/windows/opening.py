"""The one place that opens windows: whatever its flavour, by the registry."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rma_mm.errors import WindowError
from rma_mm.flavours import find_flavour
from rma_mm.windows.base import Window
from rma_mm.windows.checks.checked import CheckedWindow, Checks

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray


def open_window(
    flavour: str, comm: MPI.Intracomm, memory: int | NDArray[Any], *, node_of: tuple[int, ...] | None = None,
    chunk_bytes: int | None = None, checks: Checks | None = None,
) -> Window:
    """Open a window. Collective over `comm`; every rank passes the same flavour.

    `memory` is the number of bytes that this rank exposes (ranks may differ, 0 is fine), or, for a flavour that takes
    arrays, the array that it exposes as it stands. `node_of` is `ranks.node_map(comm)`, computed here when absent; one
    MPI call moves at most `chunk_bytes`. With `checks` its transfers are checked, which is noted there. Contents are
    undefined. Raises, on every rank, WindowError for an unknown flavour or memory that cannot be exposed, AbsentError
    where the flavour cannot be had on some rank, and MemoryLimitError if there is too little of its memory.
    """
    options: dict[str, Any] = {} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}
    place, kind = find_flavour(flavour).window, class_of(flavour)
    if kind.flavour != flavour:  # what is true of the memory is looked up by what it says of itself
        raise WindowError(f"window {flavour!r}: {place} says flavour = {kind.flavour!r}; let it say {flavour!r}")
    window: Window = kind(comm, memory, node_of=node_of, **options)
    return window if checks is None else CheckedWindow(window, checks)


def class_of(flavour: str) -> Any:
    """Return the class of a flavour's windows. Raises WindowError."""
    module, _, name = find_flavour(flavour).window.partition(":")
    return getattr(import_module(module), name)


def absent(flavour: str) -> str:
    """Return why this rank cannot open windows of a flavour, and the remedy; empty if it can. Local.

    A class of windows that may be absent says so by a class method `absent`, without arguments.
    """
    ask = getattr(class_of(flavour), "absent", str)
    return str(ask())

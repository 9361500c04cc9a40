"""Facts about each flavour of windows, for those who plan and those who open windows. Needs no MPI.

Nobody else names a flavour: what depends on it asks for one of these facts. `register` adds one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from rma_mm.classes import dataclass
from rma_mm.elements.reduction import ADDABLE, REDUCTIONS, Reduction
from rma_mm.errors import WindowError, nearest


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """A way to expose memory. Only its name and class must be given; the rest is what holds of most."""

    name: str
    """Its name in arguments, reports and files of machines."""
    window: str
    """Its class, as "module:Class", imported when first opened. It takes what `MpiWindow` takes, an array too
    where `takes_arrays`, and says the name as its `flavour`; by a class method `absent` why it cannot be had, if so."""
    loads_on_node: bool = False
    """True if ranks load and store in place what ranks of their node expose."""
    needs_progress: bool = True
    """True if ranks of a node wait for each other to call MPI, so that one that multiplies has to be helped."""
    takes_arrays: bool = False
    """True if it can expose the caller's own array as it stands."""
    packed_by_mpi: bool = True
    """True if MPI packs what lies in pieces on its way within a node; else the processor copies piece by piece."""
    types: tuple[str, ...] = tuple(sorted(each.name for each in ADDABLE))
    """Types of elements that ranks can accumulate, by name."""
    operations: tuple[str, ...] = tuple(REDUCTIONS)
    """The `REDUCTIONS` that it can accumulate by."""
    library: str = "MPI"
    """The library that transfers its data."""
    at_most: int = 1900
    """Most windows of its library that a mesh may have open: MPICH dies at about 2045."""
    when_too_small: Flavour | None = None
    """The flavour that takes over where it is absent, or the system grants too little memory; None if that is an
    error."""
    like: Flavour | None = None
    """The flavour whose figures price it where it was not measured; those of `DEFAULT` where neither was."""

    @cached_property
    def kin(self) -> tuple[Flavour, ...]:
        """Return this flavour and those whose figures can replace its own, the nearest first."""
        if self.like is not None:
            return (self, *self.like.kin)
        return (self,) if self == DEFAULT else (self, DEFAULT)

    @property
    def all_for_arrays(self) -> list[Flavour]:
        """Return the flavours that can expose callers' arrays beside this one: itself if it can, else all that do.

        Those whose transfers wait for no busy owner are first.
        """
        able = [self] if self.takes_arrays else [each for each in FLAVOURS.values() if each.takes_arrays]
        return sorted(able, key=lambda each: each.needs_progress)

    @property
    def for_arrays(self) -> Flavour:
        """The first of them."""
        return self.all_for_arrays[0]

    @property
    def summary(self) -> str:
        """Return a line for people: the library and the abilities of the flavour."""
        memory = "the caller's own arrays, in place" if self.takes_arrays else "memory of its own"
        if self.loads_on_node:
            memory = "memory that ranks of a node load in place"
        waits = "a transfer waits until its owner calls the library"
        adds = f"accumulates {', '.join(self.types) or 'nothing'}"
        if (self.types, self.operations) == (Flavour.types, Flavour.operations):
            adds = "accumulates every type but 16-bit floats"
        quick = "no transfer within a node waits for its owner"
        return "; ".join([self.library, memory, waits if self.needs_progress else quick, adds])

    def accumulates(self, dtype: DTypeLike, op: str = "SUM") -> bool:
        """Return whether `Window.accumulate` takes this type of elements and operation.

        Where it does not, 16-bit floats are accumulated in a float32 shadow, and least or greatest floats as integers
        in the same order.

        >>> SHARED.accumulates("complex64"), SHARED.accumulates("float16"), SHARED.accumulates("float32", "MIN")
        (True, False, False)
        """
        found = np.dtype(dtype)
        return op in self.operations and found.name in self.types and found in REDUCTIONS[op].types

    def sums(self, reduction: Reduction, dtype: np.dtype[Any]) -> bool:
        """Return whether ranks can accumulate elements of a type by the operation that a semiring adds with."""
        return self.accumulates(reduction.added_as(dtype), reduction.mpi)


CREATED = Flavour(name="created", window="rma_mm.windows.created:CreatedWindow", takes_arrays=True)
ALLOCATED = Flavour(name="allocated", window="rma_mm.windows.allocated:AllocatedWindow", when_too_small=CREATED)
SHARED = Flavour(
    name="shared",
    window="rma_mm.windows.shared:SharedWindow",
    loads_on_node=True,
    needs_progress=False,
    packed_by_mpi=False,
    when_too_small=CREATED,
)
UCX_ARRAYS = Flavour(
    name="ucx_arrays", window="rma_mm.windows.ucx:UcxArrayWindow", needs_progress=False, takes_arrays=True,
    packed_by_mpi=False, library="UCX", at_most=10**6, when_too_small=CREATED, like=SHARED,
)
UCX = Flavour(
    name="ucx", window="rma_mm.windows.ucx:UcxWindow", loads_on_node=True, needs_progress=False, packed_by_mpi=False,
    library="UCX", at_most=10**6, when_too_small=UCX_ARRAYS,
)

DEFAULT = SHARED  # what a mesh has where nothing is said
FLAVOURS: dict[str, Flavour] = {flavour.name: flavour for flavour in (SHARED, ALLOCATED, CREATED, UCX, UCX_ARRAYS)}
"""Every flavour, by name."""


def find_flavour(name: object) -> Flavour:
    """Return the flavour called `name`. Raises WindowError listing the names."""
    found = FLAVOURS.get(name) if isinstance(name, str) else None
    if found is None:
        raise WindowError(f"window: got {name!r}; {nearest(name, FLAVOURS)}there are {', '.join(FLAVOURS)}")
    return found


def register(flavour: Flavour) -> None:
    """Add a flavour of windows, for `Mesh(window=)`, RMA_MM_WINDOW, `--window`, prices and calibration.

    Local; every rank must register it before a mesh uses it.

    Parameters
    ----------
    flavour : Flavour
        The flavour, with a name of its own.

    Raises
    ------
    WindowError
        If the name is taken, or is not a plain word.
    """
    if flavour.name in FLAVOURS or not flavour.name.isidentifier():
        raise WindowError(f"register: got the name {flavour.name!r}; it must be new, of letters, digits and _")
    module, _, kind = flavour.window.partition(":")
    if not (module and kind):
        raise WindowError(f"register: got the window {flavour.window!r}; must be 'module:Class', where its class is")
    FLAVOURS[flavour.name] = flavour

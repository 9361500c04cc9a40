"""Copies and products between two meetings of the ranks of a node, compiled as one call.

Ranks meet in shared memory. Each has a line of cells that it alone writes, and reads the lines of the others. A line
says which call the rank has entered, with which digest of its arguments, and which call it has completed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rma_mm.kernels.blas import LETTER, library
from rma_mm.kernels.calls import cells as cell
from rma_mm.kernels.compiling import Source, compiled
from rma_mm.kernels.gemm.product import as_words, scratch_address
from rma_mm.kernels.product import Product
from rma_mm.kernels.threads import GET, SET, own_function


@cache
def _code(scalar: str) -> Callable[..., None]:
    def source() -> Source:
        from rma_mm.kernels.calls.steps import source_of

        return source_of(scalar)

    return compiled("call", scalar, (ctypes.c_void_p,) * 4, source)


Pair = tuple[NDArray[Any], NDArray[Any]]
"""A target and its source: views of one shape and type."""


class CompiledCalls:
    """Copies and products, compiled with the meetings before and behind them. Collective to call."""

    def __init__(
        self, steps: Sequence[Product | Pair], value: int, threads: int, own: int, others: list[int],
        activity: tuple[int, int, int, int], spins: int, budget: int,
    ) -> None:
        """Compile, or load what was compiled. Local. Raises TypeError for steps that are others than such.

        value: the digest of the arguments. own, others: addresses of the lines of this rank and of all others.
        activity: see `cells`. spins: looks before the core is offered to others. budget: nanoseconds to wait.
        """
        lib, threading = library(), (own_function(GET), own_function(SET))
        if lib is None or None in threading:
            raise TypeError("BLAS does not tell how many threads it uses")
        state = np.zeros(cell.SIZE, np.int64)
        self._cells = state.data
        self._clock, self._lines = np.zeros(2, np.int64), np.array([*others, 0], np.int64)
        self._keep = steps  # their arrays, and complex scalars
        made = [_made(step) for step in steps]
        dtypes = {each.dtype for each in made if each.dtype is not None} or {np.dtype(np.float64)}
        if len(dtypes) > 1:
            raise TypeError("products by BLAS are not all of one type")
        (dtype,) = dtypes
        self._scratch_bytes = max((each.scratch_bytes for each in made), default=0)
        self._numbers = np.zeros((len(made) + 1, cell.WIDTH), np.int64)
        for row, each in zip(self._numbers, made, strict=False):
            row[: len(each.numbers)] = each.numbers
        scalar = {"f": "float32", "d": "float64"}.get(dtype.char, "int64")
        self._scalars = np.array([*(each.scalars for each in made), (0, 0)], scalar)
        libc = ctypes.CDLL(None)
        functions = [libc.clock_gettime, libc.sched_yield, libc.memcpy, *threading, lib.gemm(dtype)]
        facts = {
            cell.SECONDS: self._clock.ctypes.data, cell.RANKS: len(others), cell.STEPS: len(steps),
            cell.SPINS: spins, cell.BUDGET: budget, cell.THREADS: threads, cell.LINE: own, cell.VALUE: value,
        } | dict(zip((cell.ACTIVITY, cell.BEGINNING, cell.MULTIPLYING, cell.ENDING), activity, strict=True))
        facts |= dict(zip(range(cell.CLOCK, cell.SIZE), map(_address, functions), strict=True))
        for at, fact in facts.items():
            self._cells[at] = fact
        arrays = (state, self._lines, self._numbers, self._scalars)
        self._call = Product(_code(scalar), *(ctypes.c_void_p(each.ctypes.data) for each in arrays))

    def __call__(self, number: int) -> bool:
        """Make the call of this number; False if it is not done: see `stage`."""
        self._cells[cell.NUMBER] = number
        self._go()
        return self.is_done

    def go_on(self) -> bool:
        """Look once whether the ranks that it waits for have come, and go on if so; True if it waits no longer so."""
        before = self.stage
        self._go()
        return self.stage != before

    def _go(self) -> None:
        """Run the code, with scratch that nothing has replaced while the call waited."""
        if self._scratch_bytes:
            self._cells[cell.SCRATCH] = scratch_address(self._scratch_bytes)
        self._call()

    @property
    def stage(self) -> int:
        """Stage of the call, which tells for what it waits."""
        return self._cells[cell.STAGE]

    @property
    def is_done(self) -> bool:
        """True if the last call is complete; False if it waits, or if another rank entered another call."""
        return bool(self._cells[cell.IS_DONE])

    @property
    def took(self) -> tuple[int, int, int, int]:
        """Nanoseconds of the last call: in total, in copies, in products, and in waiting for the end."""
        total, copied, multiplied, waited = self._cells[cell.ELAPSED:cell.BEGAN].tolist()
        return total, copied, multiplied, waited


class _Made(NamedTuple):
    """A step of a call, as the compiled code takes it."""

    numbers: list[int]  # see `cells.WIDTH`
    scalars: tuple[Any, Any] = (0, 0)  # alpha and beta of a product by BLAS, or their addresses if they are complex
    dtype: np.dtype[Any] | None = None  # type of a product by BLAS
    scratch_bytes: int = 0


def _made(step: Product | Pair) -> _Made:
    if not isinstance(step, Product):
        return _made_copy(*step)
    words = as_words(step)
    if words is None:
        return _made_blas(step)
    loops, given, scratch_bytes = words
    return _Made([cell.LOOPS, _address(loops), *given], scratch_bytes=scratch_bytes)


def _made_blas(product: Product) -> _Made:
    lib, dtype = library(), product.keep[0].c.dtype
    if lib is None or dtype.char not in LETTER or _address(product.func) != _address(lib.gemm(dtype)):
        raise TypeError("a product is not one call of BLAS, or of compiled loops")
    whole, given = [*product.args[:6], *product.args[7:11], *product.args[12:]], (product.args[6], product.args[11])
    one, two = (getattr(x, "value", None) if hasattr(x, "value") else ctypes.addressof(x) for x in given)
    return _Made([cell.BLAS, *(int(getattr(x, "value", None) or 0) for x in whole)], (one, two), dtype)


def _made_copy(target: NDArray[Any], source: NDArray[Any]) -> _Made:
    if target.dtype != source.dtype:
        raise TypeError("a copy casts")
    if target.strides[-1] > target.strides[-2]:
        target, source = target.swapaxes(-1, -2), source.swapaxes(-1, -2)
    if target.ndim == 2:
        target, source = target[None, :, None], source[None, :, None]
    if target.ndim != 4 or {target.strides[3], source.strides[3]} != {target.itemsize}:
        raise TypeError("a copy is not of runs")
    run = target.shape[3] * target.itemsize
    addresses = target.ctypes.data, source.ctypes.data
    return _Made([cell.COPY, *addresses, *target.shape[:3], run, *target.strides[:3], *source.strides[:3]])


def _address(function: Any) -> int:
    """Return the address of a C function; 0 for a function of Python."""
    is_foreign = isinstance(function, ctypes._CFuncPtr)  # type: ignore[attr-defined]  # what ctypes loads
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if is_foreign else 0

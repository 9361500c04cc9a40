"""Copies and BLAS calls between two meetings of the ranks of a node, compiled as one call. Importing this needs Numba.

Ranks meet in shared memory. Each has a line of cells that it alone writes, and reads the lines of the others. A line
says which call the rank has entered, with which digest of its arguments, and which call it has completed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable
from numpy.typing import NDArray

from rma_mm.kernels.blas import LETTER, library
from rma_mm.kernels.compiling import compiled
from rma_mm.kernels.product import Product
from rma_mm.kernels.threads import GET, SET, own_function

ENTERED, DIGEST, COMPLETED = range(3)
"""Cells of a line: twice the number of the call, plus one if the rank waits here and not in MPI; the digest of its
arguments; the number of the last call whose work it has done."""
OVER, BEFORE, BEHIND = range(3)
"""Stages of a call: none is under way; it waits for ranks to enter it; it waits for ranks to complete it."""
(
    IS_DONE, STAGE, NUMBER, VALUE, ELAPSED, COPIED, MULTIPLIED, WAITED, BEGAN, ARRIVED, SECONDS,
    RANKS, STEPS, SPINS, BUDGET, THREADS, LINE, ACTIVITY, BEGINNING, MULTIPLYING, ENDING,
    CLOCK, YIELD, MEMCPY, GET_THREADS, SET_THREADS, GEMM, SIZE,
) = range(28)
"""Cells of a call's state. 1 if the call is done, 0 if it waits or another rank entered another call; stage; number and
digest of the call; nanoseconds in total, in copies, in products and in waiting for the end; two points in time, and the
address that the clock is read to; counts; nanoseconds to wait before that is left to the caller; threads of BLAS;
addresses of this rank's line and of the cell that shows its activity, with three values for it; and addresses of
functions."""
COPY, MULTIPLY = range(2)  # kinds of steps
ARGUMENTS = 12
"""Whole numbers of a step, behind its kind. Of a product those that BLAS takes besides its two scalars; of a copy two
addresses, of target and source, three counts of runs, the bytes of a run, three strides of the target and three of the
source."""
WIDTH = 1 + ARGUMENTS
SHARED_CORE, OWN_CORE = 0, 2000  # looks at a line before the core is offered to others
MONOTONIC = 1  # clock that perf_counter_ns reads, on Linux

NUMBERS = types.CPointer(types.int64)


def _load(context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        return builder.load_atomic(builder.inttoptr(arguments[0], word.as_pointer()), "acquire", 8, typ=word)

    return types.int64(types.int64), emit


def _store(context: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], target, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _ask(context: Any, function: Any, numbers: Any) -> Any:
    """Call a C function of whole numbers, given as a tuple, whose result is taken for an int."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, given = arguments[0], [builder.extract_value(arguments[1], n) for n in range(len(numbers))]
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * len(given))
        return builder.sext(builder.call(builder.inttoptr(address, kind.as_pointer()), given), ir.IntType(64))

    return types.int64(types.int64, numbers), emit


def _gemm(context: Any, function: Any, numbers: Any, first: Any, alpha: Any, beta: Any) -> Any:
    """Call cblas_?gemm. Whole numbers are passed as 64 bits: a library with 32 reads the lower half of each."""
    scalar = alpha if isinstance(alpha, types.Float) else types.int64

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, table, at, one, two = arguments
        word = ir.IntType(64)
        given = [builder.load(builder.gep(table, [builder.add(at, word(n))])) for n in range(ARGUMENTS)]
        ordered = [*given[:6], one, *given[6:10], two, *given[10:]]
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in ordered])
        builder.call(builder.inttoptr(address, kind.as_pointer()), ordered)
        return context.get_dummy_value()

    return types.void(types.int64, NUMBERS, types.int64, scalar, scalar), emit


load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
ask: Any = intrinsic(_ask)
gemm: Any = intrinsic(_gemm)


@register_jitable
def now(state: Any) -> int:
    ask(state[CLOCK], (MONOTONIC, state[SECONDS]))
    time: int = load(state[SECONDS]) * 1_000_000_000 + load(state[SECONDS] + 8)
    return time


@register_jitable
def all_reached(state: Any, lines: Any, cell: int, wanted: int, waits: bool) -> bool:
    """True once a cell of every other rank's line has reached a number; False if the budget is used up before.

    waits: False to look once.
    """
    looks, limit = 0, 0
    for n in range(state[RANKS]):
        while load(lines[n] + 8 * cell) < wanted:
            if not waits:
                return False
            looks += 1
            if looks > state[SPINS]:
                ask(state[YIELD], ())
                if looks & 15 == 0:
                    time = now(state)
                    if limit == 0:
                        limit = time + state[BUDGET]
                    elif time > limit:
                        return False
    return True


@register_jitable
def copy(memcpy: int, numbers: Any, at: int) -> None:
    target, source, run = numbers[at], numbers[at + 1], numbers[at + 5]
    for i in range(numbers[at + 2]):
        for j in range(numbers[at + 3]):
            to = target + i * numbers[at + 6] + j * numbers[at + 7]
            begin = source + i * numbers[at + 9] + j * numbers[at + 10]
            for n in range(numbers[at + 4]):
                ask(memcpy, (to + n * numbers[at + 8], begin + n * numbers[at + 11], run))


@register_jitable
def take_steps(state: Any, numbers: Any, scalars: Any) -> None:
    """Copy and multiply, with the wanted number of threads."""
    before = ask(state[GET_THREADS], ())
    if before != state[THREADS]:
        ask(state[SET_THREADS], (state[THREADS],))
    state[COPIED], time = 0, state[BEGAN]
    for n in range(state[STEPS]):
        at = n * WIDTH
        if numbers[at] == COPY:
            copy(state[MEMCPY], numbers, at + 1)
        else:
            gemm(state[GEMM], numbers, at + 1, scalars[2 * n], scalars[2 * n + 1])
        end = now(state)
        if numbers[at] == COPY:
            state[COPIED] += end - time
        time = end
    if before != state[THREADS]:
        ask(state[SET_THREADS], (before,))


def run(state: Any, lines: Any, numbers: Any, scalars: Any) -> None:
    """Meet, multiply and meet again, as far as that goes without waiting for long.

    Called again while it waits it does not wait itself, for its caller does.
    """
    number, line, waits = state[NUMBER], state[LINE], state[STAGE] == OVER
    state[IS_DONE] = 0
    if state[STAGE] == OVER:
        store(state[ACTIVITY], state[BEGINNING])
        store(line + 8 * DIGEST, state[VALUE])
        store(line + 8 * ENTERED, 2 * number + 1)
        state[STAGE] = BEFORE
    if state[STAGE] == BEFORE:
        if not all_reached(state, lines, ENTERED, 2 * number, waits):
            return
        for n in range(state[RANKS]):
            if load(lines[n] + 8 * ENTERED) == 2 * number or load(lines[n] + 8 * DIGEST) != state[VALUE]:
                state[STAGE] = OVER
                return
        state[BEGAN] = now(state)
        store(state[ACTIVITY], state[MULTIPLYING])
        take_steps(state, numbers, scalars)
        state[ARRIVED] = now(state)
        store(state[ACTIVITY], state[ENDING])
        store(line + 8 * COMPLETED, number)
        state[STAGE], waits = BEHIND, True
    if not all_reached(state, lines, COMPLETED, number, waits):
        return
    time = now(state)
    state[ELAPSED], state[WAITED] = time - state[BEGAN], time - state[ARRIVED]
    state[MULTIPLIED] = state[ARRIVED] - state[BEGAN] - state[COPIED]
    state[STAGE], state[IS_DONE] = OVER, 1


@cache
def _code(scalar: str) -> Callable[..., None]:
    kinds = (NUMBERS, NUMBERS, NUMBERS, types.CPointer(getattr(types, scalar)))
    return compiled(run, kinds, (ctypes.c_void_p,) * 4)


Pair = tuple[NDArray[Any], NDArray[Any]]
"""A target and its source: views of one shape and type."""


class CompiledCalls:
    """Copies and products by BLAS, compiled with the meetings before and behind them. Collective to call."""

    def __init__(
        self, steps: Sequence[Product | Pair], value: int, threads: int, own: int, others: list[int],
        activity: tuple[int, int, int, int], spins: int, budget: int,
    ) -> None:
        """Compile, or load what was compiled. Local. Raises TypeError for steps that are others than such.

        value: the digest of the arguments. own, others: addresses of the lines of this rank and of all others.
        activity: see `ACTIVITY`. spins: looks before the core is offered to others. budget: nanoseconds to wait.
        """
        lib, threading = library(), (own_function(GET), own_function(SET))
        if lib is None or None in threading:
            raise TypeError("BLAS does not tell how many threads it uses")
        state = np.zeros(SIZE, np.int64)
        self._cells = state.data
        self._clock, self._lines = np.zeros(2, np.int64), np.array([*others, 0], np.int64)
        self._keep = steps  # their arrays, and complex scalars
        dtype = _dtype_of(steps)
        gemm = lib.gemm(dtype)
        rows = [_numbers(step, _address(gemm)) for step in steps]
        self._numbers = np.array([*rows, [0] * WIDTH], np.int64)
        scalar = {"f": "float32", "d": "float64"}.get(dtype.char, "int64")
        self._scalars = np.array([*map(_scalars, steps), (0, 0)], scalar)
        libc = ctypes.CDLL(None)
        functions = [libc.clock_gettime, libc.sched_yield, libc.memcpy, *threading, gemm]
        facts = {
            SECONDS: self._clock.ctypes.data, RANKS: len(others), STEPS: len(steps), SPINS: spins, BUDGET: budget,
            THREADS: threads, LINE: own, VALUE: value,
        } | dict(zip((ACTIVITY, BEGINNING, MULTIPLYING, ENDING), activity, strict=True))
        facts |= dict(zip(range(CLOCK, SIZE), map(_address, functions), strict=True))
        for cell, fact in facts.items():
            self._cells[cell] = fact
        arrays = (state, self._lines, self._numbers, self._scalars)
        self._call = Product(_code(scalar), *(ctypes.c_void_p(each.ctypes.data) for each in arrays))

    def __call__(self, number: int) -> bool:
        """Make the call of this number; False if it is not done: see `stage`."""
        self._cells[NUMBER] = number
        self._call()
        return self.is_done

    def go_on(self) -> bool:
        """Look once whether the ranks that it waits for have come, and go on if so; True if it waits no longer so."""
        before = self.stage
        self._call()
        return self.stage != before

    @property
    def stage(self) -> int:
        """Stage of the call, which tells for what it waits."""
        return self._cells[STAGE]

    @property
    def is_done(self) -> bool:
        """True if the last call is complete; False if it waits, or if another rank entered another call."""
        return bool(self._cells[IS_DONE])

    @property
    def took(self) -> tuple[int, int, int, int]:
        """Nanoseconds of the last call: in total, in copies, in products, and in waiting for the end."""
        total, copied, multiplied, waited = self._cells[ELAPSED:BEGAN].tolist()
        return total, copied, multiplied, waited


def _dtype_of(steps: Sequence[Product | Pair]) -> np.dtype[Any]:
    """Return the type of all products. Raises TypeError if there are several, or one that BLAS does not multiply."""
    dtypes = {step.keep[0].c.dtype for step in steps if isinstance(step, Product)} or {np.dtype(np.float64)}
    dtype: np.dtype[Any] = dtypes.pop()
    if dtypes or dtype.char not in LETTER:
        raise TypeError("the products are not all of one type that BLAS multiplies")
    return dtype


def _numbers(step: Product | Pair, gemm: int) -> list[int]:
    """Return the kind and the arguments of a step; gemm: the address of the function that products must call."""
    if isinstance(step, Product):
        if _address(step.func) != gemm:
            raise TypeError("a product is not one call of BLAS")
        whole = [*step.args[:6], *step.args[7:11], *step.args[12:]]
        return [MULTIPLY, *(int(getattr(x, "value", None) or 0) for x in whole)]
    target, source = step
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
    return [COPY, *addresses, *target.shape[:3], run, *target.strides[:3], *source.strides[:3]]


def _scalars(step: Product | Pair) -> tuple[Any, Any]:
    """Return alpha and beta of a product, or their addresses if they are complex."""
    if not isinstance(step, Product):
        return 0, 0
    given = step.args[6], step.args[11]
    one, two = (getattr(x, "value", None) if hasattr(x, "value") else ctypes.addressof(x) for x in given)
    return one, two


def _address(function: Any) -> int:
    """Return the address of a C function; 0 for a function of Python."""
    is_foreign = isinstance(function, ctypes._CFuncPtr)  # type: ignore[attr-defined]  # what ctypes loads
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if is_foreign else 0

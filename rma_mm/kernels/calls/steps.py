"""The code of `CompiledCalls`: meet, take the steps, and meet again. Importing this needs Numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from rma_mm.kernels.calls import cells as cell
from rma_mm.kernels.compiling import Source
from rma_mm.kernels.gemm.blocks import PANELS

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
        given = [builder.load(builder.gep(table, [builder.add(at, word(n))])) for n in range(cell.OF_BLAS)]
        ordered = [*given[:6], one, *given[6:10], two, *given[10:]]
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in ordered])
        builder.call(builder.inttoptr(address, kind.as_pointer()), ordered)
        return context.get_dummy_value()

    return types.void(types.int64, NUMBERS, types.int64, scalar, scalar), emit


def _loops(context: Any, table: Any, at: Any, scratch: Any) -> Any:
    """Call compiled loops, whose address lies in front of their arguments."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table, at, scratch = arguments
        word = ir.IntType(64)
        address, *given = (builder.load(builder.gep(table, [builder.add(at, word(n))])) for n in range(cell.WIDTH - 1))
        given[-PANELS :] = [builder.add(scratch, offset) for offset in given[-PANELS :]]
        kind = ir.FunctionType(ir.VoidType(), [word] * len(given))
        builder.call(builder.inttoptr(address, kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(NUMBERS, types.int64, types.int64), emit


load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
ask: Any = intrinsic(_ask)
gemm: Any = intrinsic(_gemm)
loops: Any = intrinsic(_loops)


@register_jitable
def now(state: Any) -> int:
    ask(state[cell.CLOCK], (MONOTONIC, state[cell.SECONDS]))
    time: int = load(state[cell.SECONDS]) * 1_000_000_000 + load(state[cell.SECONDS] + 8)
    return time


@register_jitable
def all_reached(state: Any, lines: Any, which: int, wanted: int, waits: bool) -> bool:
    """True once cell `which` of every other rank's line has reached a number; False if the budget is used up before.

    waits: False to look once.
    """
    looks, limit = 0, 0
    for n in range(state[cell.RANKS]):
        while load(lines[n] + 8 * which) < wanted:
            if not waits:
                return False
            looks += 1
            if looks > state[cell.SPINS]:
                ask(state[cell.YIELD], ())
                if looks & 15 == 0:
                    time = now(state)
                    if limit == 0:
                        limit = time + state[cell.BUDGET]
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
    before = ask(state[cell.GET_THREADS], ())
    if before != state[cell.THREADS]:
        ask(state[cell.SET_THREADS], (state[cell.THREADS],))
    state[cell.COPIED], time = 0, state[cell.BEGAN]
    for n in range(state[cell.STEPS]):
        at = n * cell.WIDTH
        if numbers[at] == cell.COPY:
            copy(state[cell.MEMCPY], numbers, at + 1)
        elif numbers[at] == cell.LOOPS:
            loops(numbers, at + 1, state[cell.SCRATCH])
        else:
            gemm(state[cell.GEMM], numbers, at + 1, scalars[2 * n], scalars[2 * n + 1])
        end = now(state)
        if numbers[at] == cell.COPY:
            state[cell.COPIED] += end - time
        time = end
    if before != state[cell.THREADS]:
        ask(state[cell.SET_THREADS], (before,))


def run(state: Any, lines: Any, numbers: Any, scalars: Any) -> None:
    """Meet, multiply and meet again, as far as that goes without waiting for long.

    Called again while it waits it does not wait itself, for its caller does.
    """
    number, line, waits = state[cell.NUMBER], state[cell.LINE], state[cell.STAGE] == cell.OVER
    state[cell.IS_DONE] = 0
    if state[cell.STAGE] == cell.OVER:
        store(state[cell.ACTIVITY], state[cell.BEGINNING])
        store(line + 8 * cell.DIGEST, state[cell.VALUE])
        store(line + 8 * cell.ENTERED, 2 * number + 1)
        state[cell.STAGE] = cell.BEFORE
    if state[cell.STAGE] == cell.BEFORE:
        if not all_reached(state, lines, cell.ENTERED, 2 * number, waits):
            return
        for n in range(state[cell.RANKS]):
            if load(lines[n] + 8 * cell.ENTERED) == 2 * number or load(lines[n] + 8 * cell.DIGEST) != state[cell.VALUE]:
                state[cell.STAGE] = cell.OVER
                return
        state[cell.BEGAN] = now(state)
        store(state[cell.ACTIVITY], state[cell.MULTIPLYING])
        take_steps(state, numbers, scalars)
        state[cell.ARRIVED] = now(state)
        store(state[cell.ACTIVITY], state[cell.ENDING])
        store(line + 8 * cell.COMPLETED, number)
        state[cell.STAGE], waits = cell.BEHIND, True
    if not all_reached(state, lines, cell.COMPLETED, number, waits):
        return
    time = now(state)
    state[cell.ELAPSED], state[cell.WAITED] = time - state[cell.BEGAN], time - state[cell.ARRIVED]
    state[cell.MULTIPLIED] = state[cell.ARRIVED] - state[cell.BEGAN] - state[cell.COPIED]
    state[cell.STAGE], state[cell.IS_DONE] = cell.OVER, 1


def source_of(scalar: str) -> Source:
    """Return `run` for products whose scalars are passed as this type."""
    return run, (NUMBERS, NUMBERS, NUMBERS, types.CPointer(getattr(types, scalar)))

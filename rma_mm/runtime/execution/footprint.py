"""Memory of a plan and the movement of its operands, from its operations alone."""

from __future__ import annotations

from collections.abc import Sequence

from rma_mm.kernels import scratch_bytes
from rma_mm.runtime.execution.operands import Operands, frame_dtype
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.ops import Accumulate, Broadcast, Copy, Multiply, Op, Reduce
from rma_mm.schedule.passes import frame_sizes
from rma_mm.schedule.schedule import STAGE, Schedule, expand


def peak_bytes(mesh: Mesh, schedule: Schedule, operands: Operands) -> int:
    """Return bytes that this rank holds at most while the plan runs: tiles, what the plan adds, scratch."""
    ops = all_ops(schedule, mesh)
    return standing_bytes(mesh, schedule, operands) + scratch_used(mesh, schedule, operands, ops)


def standing_bytes(mesh: Mesh, schedule: Schedule, operands: Operands) -> int:
    """Return the bytes that operations do not change: tiles, and the matrices that the plan adds."""
    if not mesh.is_member:
        return 0
    c_dtype = operands.c.dtype
    total = 0
    for name in schedule.homes:
        itemsize = c_dtype.itemsize if name == "C" else operands.dtype(name).itemsize
        total += schedule.in_memory(name, mesh.rank) * itemsize
    c = schedule.home("C", mesh.rank)
    if operands.accum_dtype != c_dtype:
        total += c.size * operands.accum_dtype.itemsize
    if operands.options.epilogue is not None:
        total += operands.options.epilogue.scratch_bytes((len(c[0]), len(c[1])), operands.accum_dtype)
    for name in [name for name in schedule.homes if name.endswith(STAGE)]:
        if operands.dtype(name) != operands.dtype(name[0]):  # summands are cast before they are added up
            total += schedule.home(name[0], mesh.rank).size * operands.dtype(name).itemsize
    return total


def scratch_used(mesh: Mesh, schedule: Schedule, operands: Operands, ops: list[Op]) -> int:
    """Return the bytes of scratch that this rank's operations `ops` need."""
    frames = frame_sizes(ops, mesh.rank)
    total = sum(size * frame_dtype(operands, schedule, frame).itemsize for frame, size in frames.items())
    return total + max((_kernel_bytes(op, operands) for op in ops), default=0)


def _kernel_bytes(op: Op, operands: Operands) -> int:
    """Temporary memory of one local product."""
    if not isinstance(op, Multiply):
        return 0
    (m, n), k = op.c.region.shape, op.a.region.shape[1]
    dtypes = (operands.a.dtype, operands.b.dtype, operands.accum_dtype)
    options = operands.options
    conjugates = options.conjugate_a or options.conjugate_b
    return scratch_bytes(m, n, k, *dtypes, operands.kernel, conjugates, operands.semiring)


def all_ops(schedule: Schedule, mesh: Mesh) -> list[Op]:
    """This rank's operations, with every task of a pool: any of them may fall to it."""
    tasks = range(schedule.pool.tasks) if schedule.pool else None
    return expand(schedule, mesh.rank, tasks) if mesh.is_member else []


def frames_of(schedule: Schedule, mesh: Mesh) -> dict[str, int]:
    return frame_sizes(all_ops(schedule, mesh), mesh.rank)


def groups_of(schedule: Schedule, mesh: Mesh) -> set[tuple[int, ...]]:
    return {op.group for op in all_ops(schedule, mesh) if isinstance(op, Broadcast | Reduce)}


def movement(schedule: Schedule, mesh: Mesh) -> dict[str, str]:
    """Return how A, B and C move in this rank's operations: here, read, view, get, accumulate, broadcast, shift, …"""
    moved: dict[str, set[str]] = {name: set() for name in "ABC"}
    for op in all_ops(schedule, mesh):
        if isinstance(op, Copy) and schedule.is_in_file(op.src):
            moved[op.src.operand].add("read")
        for move in op.moves(mesh.rank):
            if move.source != move.to and (move.dst or isinstance(move.ref.buffer, str) or move.kind != "view"):
                moved[move.ref.operand].add(move.kind)
    return {name: _in_words(ways) for name, ways in moved.items()}


def merged(movements: Sequence[dict[str, str]]) -> dict[str, str]:
    return {name: _in_words({way for each in movements for way in each[name].split("+")}) for name in "ABC"}


def _in_words(ways: set[str]) -> str:
    return "+".join(sorted(ways - {"here"})) or "here"


def adds_elsewhere(ops: list[Op], rank: int) -> bool:
    return any(isinstance(op, Accumulate) and op.dst.rank != rank for op in ops)

"""What a plan weighs and how it moves, from its operations alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rma_mm.elements.dtypes import accumulator, parse_dtype, result_dtype
from rma_mm.elements.semiring import PLUS_TIMES, Semiring, find_semiring
from rma_mm.geometry.layout import Layout
from rma_mm.kernels import choose_kernel, scratch_bytes
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.schedule.ops import Accumulate, Broadcast, Multiply, Op, Reduce
from rma_mm.schedule.passes import frame_sizes
from rma_mm.schedule.schedule import STAGE, Schedule, expand


@dataclass(frozen=True)
class Operand:
    """A matrix that is not there yet; its layout may be left to the plan."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: Layout | None = None
    in_place: bool | None = None
    """Whether node-mates can read its memory; None where it will be the mesh's."""


@dataclass(frozen=True)
class ProductOptions:
    """The options of a product, as `matmul` takes them."""

    alpha: Any = 1
    beta: Any = 0
    transpose_a: bool = False
    transpose_b: bool = False
    conjugate_a: bool = False
    conjugate_b: bool = False
    algorithm: str = "auto"
    memory_limit: int | None = None
    compute_dtype: str | None = None
    deterministic: bool = False
    kernel: str = "auto"
    semiring: str = PLUS_TIMES.name
    epilogue: Epilogue | None = None
    arrays: str = ""
    """Operands that come as NumPy arrays, for which the plan keeps matrices of its own."""


@dataclass(frozen=True)
class Operands:
    """A, B and C of a product, in their own orientation, with its options."""

    a: Operand
    b: Operand
    c: Operand
    options: ProductOptions
    kernel: str = ""
    """The local kernel, the same on every rank; chosen for the whole product, so that pieces do not choose another."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k)."""
        rows, cols = self.a.shape
        return (*self.c.shape, rows if self.options.transpose_a else cols)

    @property
    def product_dtype(self) -> np.dtype[Any]:
        """The element type of the product; an epilogue may store C in another. Raises DtypeError."""
        compute = self.options.compute_dtype
        return result_dtype(self.a.dtype, self.b.dtype, parse_dtype(compute) if compute else None)

    @property
    def summed(self) -> np.dtype[Any]:
        """The element type in which C is summed."""
        return accumulator(self.product_dtype)

    @property
    def semiring(self) -> Semiring:
        """What is done in place of + and ×."""
        return find_semiring(self.options.semiring)

    @property
    def needs_order(self) -> bool:
        """Whether sums must be formed in a fixed order: that is asked for, and another would give other bits."""
        return self.options.deterministic and not self.semiring.in_any_order

    @property
    def may_push(self) -> bool:
        """Whether ranks may add to each other's C."""
        return self.semiring.reduction.is_mpis(self.summed)

    def choose_kernel(self) -> str:
        """The local kernel that this rank would choose now."""
        m, n, k = self.shape
        return choose_kernel(self.options.kernel, self.summed, m, n, k, self.semiring, self.operand_dtype)

    @property
    def operand_dtype(self) -> np.dtype[Any] | None:
        """The element type of both operands, where they have one."""
        return self.a.dtype if self.a.dtype == self.b.dtype else None

    def dtype(self, buffer: str) -> np.dtype[Any]:
        """Element type of a home, or of a scratch frame, by its name: sums are formed in the accumulator's type."""
        if buffer[0] == "C":
            return self.summed
        operand = self.a if buffer[0] == "A" else self.b
        is_summed = buffer.endswith(STAGE) and operand.layout is not None and bool(operand.layout.partial)
        return accumulator(operand.dtype) if is_summed else operand.dtype


def frame_dtype(operands: Operands, schedule: Schedule, frame: str) -> np.dtype[Any]:
    """Element type of a frame of scratch memory."""
    return operands.dtype(frame[0] + STAGE if frame[0] + STAGE in schedule.homes else frame[0])


def peak_bytes(mesh: Mesh, schedule: Schedule, operands: Operands) -> int:
    """Bytes that this rank holds at most while the plan runs: tiles, what the plan adds, scratch."""
    ops = all_ops(schedule, mesh)
    return standing_bytes(mesh, schedule, operands) + scratch_used(mesh, schedule, operands, ops)


def standing_bytes(mesh: Mesh, schedule: Schedule, operands: Operands) -> int:
    """Bytes of it that no operation changes, so that none need be made: tiles, and what the plan adds to them."""
    if not mesh.is_member:
        return 0
    c_dtype = operands.c.dtype
    total = 0
    for name in schedule.homes:
        itemsize = c_dtype.itemsize if name == "C" else operands.dtype(name).itemsize
        total += schedule.home(name, mesh.rank).size * itemsize
    c = schedule.home("C", mesh.rank)
    if operands.summed != c_dtype:
        total += c.size * operands.summed.itemsize
    if operands.options.epilogue is not None:
        total += operands.options.epilogue.scratch_bytes((len(c[0]), len(c[1])), operands.summed)
    for name in [name for name in schedule.homes if name.endswith(STAGE)]:
        if operands.dtype(name) != operands.dtype(name[0]):  # summands are cast before they are added up
            total += schedule.home(name[0], mesh.rank).size * operands.dtype(name).itemsize
    return total


def scratch_used(mesh: Mesh, schedule: Schedule, operands: Operands, ops: list[Op]) -> int:
    """Bytes that this rank's operations, `ops`, need beside that."""
    frames = frame_sizes(ops, mesh.rank)
    total = sum(size * frame_dtype(operands, schedule, frame).itemsize for frame, size in frames.items())
    return total + max((_kernel_bytes(op, operands) for op in ops), default=0)


def _kernel_bytes(op: Op, operands: Operands) -> int:
    """Temporary memory of one local product."""
    if not isinstance(op, Multiply):
        return 0
    (m, k), (_, n) = op.a.region.shape, op.b.region.shape
    dtypes = (operands.a.dtype, operands.b.dtype, operands.summed)
    options = operands.options
    conjugates = options.conjugate_a or options.conjugate_b
    return scratch_bytes(m, n, k, *dtypes, operands.kernel, conjugates, operands.semiring)


def all_ops(schedule: Schedule, mesh: Mesh) -> list[Op]:
    """This rank's operations, with every task of a pool: any of them may fall to it."""
    tasks = range(schedule.pool.tasks) if schedule.pool else None
    return expand(schedule, mesh.rank, tasks) if mesh.is_member else []


def frames_of(schedule: Schedule, mesh: Mesh) -> dict[str, int]:
    """Elements of each frame of this rank's scratch memory."""
    return frame_sizes(all_ops(schedule, mesh), mesh.rank)


def groups_of(schedule: Schedule, mesh: Mesh) -> set[tuple[int, ...]]:
    """The groups that this rank moves operands with; shifts go through that of all ranks."""
    return {op.group for op in all_ops(schedule, mesh) if isinstance(op, Broadcast | Reduce)}


def movement(schedule: Schedule, mesh: Mesh) -> dict[str, str]:
    """How A, B and C move in this rank's operations: here, view, get, accumulate, broadcast, shift, …"""
    moved: dict[str, set[str]] = {name: set() for name in "ABC"}
    for op in all_ops(schedule, mesh):
        for move in op.moves(mesh.rank):
            if move.source != move.to and (move.dst or isinstance(move.ref.buffer, str) or move.kind != "view"):
                moved[move.ref.operand].add(move.kind)
    return {name: _in_words(ways) for name, ways in moved.items()}


def merged(movements: Sequence[dict[str, str]]) -> dict[str, str]:
    """What any of several ranks did; "here" only where none did anything else."""
    return {name: _in_words({way for each in movements for way in each[name].split("+")}) for name in "ABC"}


def _in_words(ways: set[str]) -> str:
    return "+".join(sorted(ways - {"here"})) or "here"


def adds_elsewhere(ops: list[Op], rank: int) -> bool:
    """Whether a rank's operations add to another's memory, where sums come in any order."""
    return any(isinstance(op, Accumulate) and op.dst.rank != rank for op in ops)

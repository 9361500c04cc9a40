"""Rules for one operation alone: its references are in bounds, dense if needed, and readable."""

from __future__ import annotations

from typing import NoReturn

from rma_mm.errors import Fault, ScheduleError
from rma_mm.geometry.span import Region
from rma_mm.schedule.mirror_ops import Mirror
from rma_mm.schedule.ops import Copy, Multiply, Op, Ref, Slot
from rma_mm.schedule.schedule import Schedule


def fail(rank: int, op: Op, code: Fault, why: str) -> NoReturn:
    raise ScheduleError(code, f"rank {rank}, {type(op).__name__} «{op}»: {why}")


def check_alone(schedule: Schedule, rank: int, op: Op) -> None:
    """Every reference names a rank of the mesh and stays within its buffer; scratch is the rank's own.

    What is computed on is one dense part of its buffer; transfers may gather and scatter.
    """
    for ref in op.refs:
        if not 0 <= ref.rank < schedule.mesh.size:
            fail(rank, op, "no-rank", f"no rank {ref.rank}")
        if not ref.region.issubset(schedule.holds(ref)):
            fail(rank, op, "out-of-bounds", f"{ref} is out of bounds: the buffer holds {schedule.holds(ref)}")
        if isinstance(ref.buffer, Slot) and ref.rank != rank and not _is_shared(schedule, rank, ref.rank, ref.buffer):
            fail(rank, op, "not-own", f"{ref} is another rank's scratch")
        if schedule.is_in_file(ref) and not isinstance(op, Copy):
            fail(rank, op, "misfit", f"{ref} lies in a file; Copies bring it, and nothing else reads it")
        if op.is_dense and not schedule.holds(ref).locate(ref.region).is_contiguous:
            fail(rank, op, "not-dense", f"{ref} is scattered in its buffer, which holds {schedule.holds(ref)}")


def _is_shared(schedule: Schedule, rank: int, holder: int, slot: Slot) -> bool:
    """True if a slot is one that `rank` shares with its holder, on one node."""
    nodes = schedule.mesh.node_of_rank
    return {rank, holder} <= set(slot.group) and len({nodes[q] for q in slot.group}) == 1


def check_mirror(schedule: Schedule, rank: int, op: Mirror) -> None:
    """The product is symmetric in this way, and the box goes from the rank's own memory to where it is transposed."""
    known = schedule.symmetry
    if known is None or schedule.shape is None or known.conjugates != op.conjugates:
        fail(rank, op, "misfit", f"C is not known to be {'Hermitian' if op.conjugates else 'symmetric'}")
    if op.src.region != op.c.region.T or (op.src.rank, op.c.rank, op.c.buffer) != (rank, rank, "C"):
        fail(rank, op, "misfit", "a mirror moves a box of the rank's own memory to its C, transposed")
    if isinstance(op.src.buffer, str) and op.src.buffer != "C":
        fail(rank, op, "misfit", "what is mirrored is a part of C")


def check_product(schedule: Schedule, rank: int, op: Multiply) -> Region:
    """Return all its points (m, n, k). Its regions fit together, and what it takes to be symmetric is.

    Where half is multiplied, it is of a square on the diagonal.
    """
    known, (m, k) = schedule.symmetry, op.a.region
    k2, n = op.b.region.T if op.b_is_transposed_a else op.b.region
    if k != k2 or op.c.region != Region((m, n)) or op.c.rank != rank:
        fail(rank, op, "misfit", "the regions of a, b and c do not fit together")
    if op.half and known is None:
        fail(rank, op, "misfit", "C is not known to be symmetric")
    if op.half and m != n:
        fail(rank, op, "misfit", "of squares on the diagonal half can be multiplied, and of no other box")
    if op.b_is_transposed_a and (known is None or not known.is_own or op.b.operand != "A"):
        fail(rank, op, "misfit", "what is read transposed is A, and B is not known to be A transposed")
    return Region((m, n, k))


def check_whole(schedule: Schedule, rank: int, op: Op, ref: Ref) -> None:
    """One summand of a partial matrix is not the matrix; only C's may be read, by ranks of the same summand."""
    if isinstance(ref.buffer, Slot):
        return
    layout, mesh = schedule.homes[ref.buffer].layout, schedule.mesh
    if not layout.partial:
        return
    mine, theirs = layout.coords(mesh, rank) or {}, layout.coords(mesh, ref.rank) or {}
    for axis in layout.partial:
        if ref.buffer != "C" or mine.get(axis) != theirs.get(axis):
            fail(rank, op, "summand", f"{ref} is one summand of a partial matrix")

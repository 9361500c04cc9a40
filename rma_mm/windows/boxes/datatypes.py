"""MPI datatypes for boxes of positions in strided memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from rma_mm.elements.reduction import LOR, REDUCTIONS, SUM
from rma_mm.geometry.span import Span
from rma_mm.windows.boxes.copying import stretches

ADDED_AS: dict[np.dtype[Any], MPI.Datatype] = {
    np.dtype(np.bool_): MPI.C_BOOL,
    np.dtype(np.int8): MPI.INT8_T,
    np.dtype(np.int16): MPI.INT16_T,
    np.dtype(np.int32): MPI.INT32_T,
    np.dtype(np.int64): MPI.INT64_T,
    np.dtype(np.uint8): MPI.UINT8_T,
    np.dtype(np.uint16): MPI.UINT16_T,
    np.dtype(np.uint32): MPI.UINT32_T,
    np.dtype(np.uint64): MPI.UINT64_T,
    np.dtype(np.float32): MPI.FLOAT,
    np.dtype(np.float64): MPI.DOUBLE,
    np.dtype(np.complex64): MPI.C_FLOAT_COMPLEX,
    np.dtype(np.complex128): MPI.C_DOUBLE_COMPLEX,
}
"""Element type of an accumulate; its keys are `ADDABLE`."""

OPERATIONS: dict[str, MPI.Op] = {name: getattr(MPI, name) for name in REDUCTIONS}
"""Operation of an accumulate, by the name of its reduction."""

MOVED_AS: dict[int, MPI.Datatype] = {
    1: MPI.BYTE,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}
"""Element type of a get by item size: a get moves bits, so that element types unknown to MPI can be moved too."""


def operation(dtype: np.dtype[Any], op: str) -> MPI.Op:
    return OPERATIONS[LOR.mpi if op == SUM.mpi and dtype.kind == "b" else op]


LARGEST_COUNT = 2**31 - 1
"""Most elements that one call takes by number: Open MPI 5.0 has no large counts. More are one item of a larger type."""


IOV_DENSITY = 2**14
"""Bytes from which on MPICH's ofi netmod reads stretches of remote memory one by one, unless its variable
MPIR_CVAR_CH4_IOV_DENSITY_MIN says otherwise."""

Axis = tuple[Span, int]  # positions, and their stride in elements


class Placed:
    """A box of strided memory as MPI sees it: `count` x `datatype` at byte `start`."""

    def __init__(self, element: MPI.Datatype, itemsize: int, outer: Axis, inner: Axis) -> None:
        """`outer` and `inner` are (positions, stride in elements), not empty; elements are visited inner first.

        The datatype is committed; `free` gives it back.
        """
        (slow, slow_stride), (fast, fast_stride) = outer, inner
        self.start = (slow.start * slow_stride + fast.start * fast_stride) * itemsize
        self._owned: list[MPI.Datatype] = []
        if stretch_count(outer, inner) == 1 and len(slow) * len(fast) <= LARGEST_COUNT:
            self.datatype, self.count = element, len(slow) * len(fast)
            return
        line = self._own(_repeated(element, itemsize, fast, fast_stride * itemsize))
        line_bytes = len(fast) * itemsize if fast_stride == 1 and fast.is_contiguous else None
        box = line if len(slow) == 1 else self._own(_repeated(line, line_bytes, slow, slow_stride * itemsize))
        self.datatype, self.count = box.Commit(), 1

    def _own(self, datatype: MPI.Datatype) -> MPI.Datatype:
        self._owned.append(datatype)
        return datatype

    def free(self) -> None:
        """Free the datatypes; local, also while a transfer that uses them is under way."""
        if not MPI.Is_finalized():
            for datatype in self._owned:
                datatype.Free()
        self._owned = []


def trusted(far: tuple[Axis, Axis], near: tuple[Axis, Axis], itemsize: int) -> list[tuple[Span, Span]]:
    """Return how to cut a get of `far` into `near`: outer and inner positions of each piece.

    MPICH 5.0.2 over ofi says that a get is over before the data are there, where it reads long stretches (or a single
    one) that go into short ones: it then packs on the way. Such boxes are read in pieces that have gaps, in stretches
    that are not long; at last in pieces that are one stretch on both sides.
    """
    (slow, _), (fast, _) = far
    size, stretches = len(slow) * len(fast) * itemsize, stretch_count(*far)
    is_packed = (stretches == 1 or size >= IOV_DENSITY * stretches) and size < IOV_DENSITY * stretch_count(*near)
    if not is_packed or stretch_count(*near) == 1:
        return [(Span.range(0, len(slow)), Span.range(0, len(fast)))]
    line = len(fast) * itemsize
    axis = 0 if len(fast) == 1 or (len(slow) > 1 and line < IOV_DENSITY) else 1
    pieces = []
    for part in _alternate(len(far[axis][0]), (IOV_DENSITY - 1) // (itemsize if axis else line)):
        for outer, inner in trusted(_cut(far, axis, part), _cut(near, axis, part), itemsize):
            pieces.append((outer, part.take(inner)) if axis else (part.take(outer), inner))
    return pieces


def _cut(box: tuple[Axis, Axis], axis: int, part: Span) -> tuple[Axis, Axis]:
    (slow, slow_stride), (fast, fast_stride) = box
    return (slow if axis else slow.take(part), slow_stride), (fast.take(part) if axis else fast, fast_stride)


def _alternate(count: int, longest: int) -> list[Span]:
    """Positions 0…count − 1, two or more, in two parts of alternating blocks of at most `longest`."""
    block = max(1, min(count // 4, longest))
    first = Span((start, min(start + block, count)) for start in range(0, count, 2 * block))
    return [first, Span.range(0, count) - first]


def stretch_count(outer: Axis, inner: Axis) -> int:
    """Return the number of contiguous stretches of memory in a box."""
    (slow, slow_stride), (fast, fast_stride) = outer, inner
    in_line = len(fast.runs) if fast_stride == 1 else len(fast)
    return len(slow.runs) if in_line == 1 and slow_stride == len(fast) else len(slow) * in_line


def _repeated(datatype: MPI.Datatype, extent: int | None, positions: Span, stride: int) -> MPI.Datatype:
    """`datatype` once per position, `stride` bytes apart, the first at byte 0.

    `extent` is the extent of `datatype` where it is known to be without holes.
    """
    if positions.is_contiguous:
        count = len(positions)
        return datatype.Create_contiguous(count) if extent == stride else datatype.Create_hvector(count, 1, stride)
    unit = datatype if extent == stride else datatype.Create_resized(0, stride)
    groups = stretches(positions, Span.range(0, len(positions)))
    if len(groups) == 1:
        (only,) = groups
        repeated = unit.Create_hvector(only.blocks, only.block, only.source_period * stride)
    else:
        repeated = unit.Create_hindexed(*_run_list(positions, stride))
    if unit is not datatype:
        unit.Free()
    return repeated


def _run_list(positions: Span, stride: int) -> tuple[Sequence[int], Sequence[int]]:
    """Lengths of the runs in positions, and their byte displacements from the first."""
    first = positions.start
    return [b - a for a, b in positions.runs], [(a - first) * stride for a, _ in positions.runs]

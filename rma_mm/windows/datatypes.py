"""MPI datatypes for boxes of positions in strided memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from rma_mm.geometry.span import Span
from rma_mm.windows.copying import stretches

ADDED_AS: dict[np.dtype[Any], tuple[MPI.Datatype, MPI.Op]] = {
    np.dtype(np.bool_): (MPI.C_BOOL, MPI.LOR),
    np.dtype(np.int8): (MPI.INT8_T, MPI.SUM),
    np.dtype(np.int16): (MPI.INT16_T, MPI.SUM),
    np.dtype(np.int32): (MPI.INT32_T, MPI.SUM),
    np.dtype(np.int64): (MPI.INT64_T, MPI.SUM),
    np.dtype(np.uint8): (MPI.UINT8_T, MPI.SUM),
    np.dtype(np.uint16): (MPI.UINT16_T, MPI.SUM),
    np.dtype(np.uint32): (MPI.UINT32_T, MPI.SUM),
    np.dtype(np.uint64): (MPI.UINT64_T, MPI.SUM),
    np.dtype(np.float32): (MPI.FLOAT, MPI.SUM),
    np.dtype(np.float64): (MPI.DOUBLE, MPI.SUM),
    np.dtype(np.complex64): (MPI.C_FLOAT_COMPLEX, MPI.SUM),
    np.dtype(np.complex128): (MPI.C_DOUBLE_COMPLEX, MPI.SUM),
}
"""Element type and operation of an accumulate; its keys are `base.ADDABLE`."""

MOVED_AS: dict[int, MPI.Datatype] = {
    1: MPI.BYTE,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}
"""Element type of a get by item size: a get moves bits, so that element types unknown to MPI can be moved too."""


class Placed:
    """A box of strided memory as MPI sees it: `count` x `datatype` at byte `start`."""

    def __init__(self, element: MPI.Datatype, itemsize: int, outer: tuple[Span, int], inner: tuple[Span, int]) -> None:
        """`outer` and `inner` are (positions, stride in elements), not empty; elements are visited inner first.

        The datatype is committed; `free` gives it back.
        """
        (slow, slow_stride), (fast, fast_stride) = outer, inner
        self.start = (slow.start * slow_stride + fast.start * fast_stride) * itemsize
        self._owned: list[MPI.Datatype] = []
        if _is_dense(slow, slow_stride, fast, fast_stride):
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


def _is_dense(slow: Span, slow_stride: int, fast: Span, fast_stride: int) -> bool:
    """Whether the box is one contiguous stretch of memory."""
    one_run = fast.is_contiguous and (fast_stride == 1 or len(fast) == 1)
    return one_run and slow.is_contiguous and (len(slow) == 1 or slow_stride == len(fast))


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

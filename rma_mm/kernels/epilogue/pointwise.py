"""Element-wise work on tiles, in pieces that stay in the cache: by itself, or on C as soon as it is summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.elements.pointwise import Constant, Pointwise, working
from rma_mm.errors import OptionError
from rma_mm.kernels.elementwise import STEP_BYTES, cast, pieces
from rma_mm.kernels.epilogue.activations import activate, bind_compiled
from rma_mm.kernels.epilogue.epilogue import Epilogue

Array = NDArray[Any]
PIECE_BYTES = 4 * STEP_BYTES
"""Bytes of a result that all operations cover before the next piece begins: takes half as long as `STEP_BYTES`."""
TEMPORARIES = 8  # pieces that the work on one takes beside it, roughly: what its operations give, and theirs


def _relu_slope(x: Array) -> Array:
    return (x > 0).astype(x.dtype)


def _sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(x))
    made: Array = np.where(x >= 0, 1, small) / (1 + small)
    return made.astype(x.dtype, copy=False)


def _activated(x: Array, name: str, compiles: bool) -> Array:
    """Return an activation of `x`, or its derivative; `x` is copied."""
    made = np.array(x, order="C", ndmin=2)
    call = bind_compiled(made, None, None, name) if compiles else None
    if call is None:
        activate(made, None, name)
    else:
        call()
    return made


DONE: dict[str, Callable[..., Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.true_divide, "neg": np.negative, "conj": np.conjugate,
    "relu'": _relu_slope, "**": np.power, ">": np.greater, ">=": np.greater_equal, "<": np.less, "<=": np.less_equal,
    "where": np.where, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh, "sigmoid": _sigmoid,
}
"""Operations by name, except for those that `activate` does."""


def evaluated(work: Pointwise, operands: Sequence[Array], compiles: bool = False, room: Array | None = None) -> Any:
    """Evaluate element-wise work on these operands. compiles: whether to use compiled code where there is some.

    room: where the result may be put, which broadcasts to its shape; it may be one of the operands.
    """
    found: list[Any] = [x.astype(working(x.dtype), copy=False) for x in operands]
    is_alike = room is not None and all(x.dtype == room.dtype for x in operands) and room.dtype.char in "fdFD"
    last = {x: n for n, (_, args) in enumerate(work.ops) for x in args if not isinstance(x, Constant)}
    with np.errstate(all="ignore"):  # overflow, NaN and wrap-around are results here
        for n, (name, args) in enumerate(work.ops):
            values = [x.value if isinstance(x, Constant) else found[x] for x in args]
            if is_alike and isinstance(done := DONE.get(name), np.ufunc) and work.result == len(found):
                found.append(done(*values, out=room))  # no operand of another type: it gives the type of `room`
            else:
                found.append(DONE[name](*values) if name in DONE else _activated(values[0], name, compiles))
            for x in args:
                if not isinstance(x, Constant) and last[x] == n and x != work.result:
                    found[x] = None
    return work.result.value if isinstance(work.result, Constant) else found[work.result]


def apply(work: Pointwise, operands: Sequence[Array], out: Array, compiles: bool = False) -> None:
    """Do element-wise work into `out`, whose shape the operands' broadcast to; it may be one of them."""
    if abs(out.strides[0]) < abs(out.strides[1]):
        out, operands = out.T, [x.T for x in operands]
    for rows, cols in pieces(out, PIECE_BYTES):
        room = out[rows, cols]
        found = evaluated(work, [_part(x, rows, cols) for x in operands], compiles, room)
        if found is not room:
            cast(np.broadcast_to(found, room.shape), room)


def work_bytes(nbytes: int) -> int:
    return TEMPORARIES * min(PIECE_BYTES, nbytes)


def _part(x: Array, rows: slice, cols: slice) -> Array:
    return x[rows if x.shape[0] != 1 else slice(None), cols if x.shape[1] != 1 else slice(None)]


def reduce_axes(name: str, x: Array, axes: tuple[int, ...], out: Array) -> None:
    """Sum over `axes` into `out`, whose extent there is 1, or take the largest elements.

    Sums are formed in the type that products are summed in. name: "sum", or another for the largest.
    """
    with np.errstate(all="ignore"):
        if name != "sum":
            out[...] = np.max(x, axis=axes, keepdims=True)
        else:
            out[...] = np.sum(x, axis=axes, keepdims=True, dtype=working(out.dtype))


# -- on C as it is made ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fused(Epilogue):
    """Element-wise work on each element of C once it is summed; C is its first operand."""

    work: Pointwise = field(default_factory=lambda: Pointwise(1, (), 0))
    operands: list[Array] = field(default_factory=list)
    """This rank's parts of the others, which lie as C does: to be put here before each execution."""

    @property
    def text(self) -> str:
        return f"{super().text} {self.work}"

    def words(self, stored: np.dtype[Any], summed: np.dtype[Any]) -> str:
        return self.work.text(["C", *(f"x{n}" for n in range(1, self.work.reads))])

    def scratch_bytes(self, shape: tuple[int, int], summed: np.dtype[Any]) -> int:
        return work_bytes(shape[0] * shape[1] * summed.itemsize)

    def tile_work(self, rows: slice, cols: slice, compiles: bool) -> FusedPart:
        """Return the element-wise work on a part of this rank's C."""
        if self.bias is not None or self.activation is not None:
            raise OptionError("epilogue: element-wise work describes all the work; leave bias and activation out")
        shape = np.iinfo(np.int64).max
        return FusedPart(self, range(shape)[rows], range(shape)[cols], compiles)


@dataclass(frozen=True, slots=True, eq=False)
class FusedPart:
    """Element-wise work on a part of C."""

    fused: Fused
    rows: range
    cols: range  # columns of the piece within this rank's part of C and of the other operands
    compiles: bool
    is_turned: bool = False  # true if it is handed the transposed part

    def part(self, rows: slice, cols: slice) -> FusedPart:
        if self.is_turned:
            rows, cols = cols, rows
        return replace(self, rows=self.rows[rows], cols=self.cols[cols])

    @property
    def T(self) -> FusedPart:
        return replace(self, is_turned=not self.is_turned)

    def __call__(self, c: Array) -> None:
        rows, cols = (slice(each.start, each.stop, each.step) for each in (self.rows, self.cols))
        others = [_part(x, rows, cols) for x in self.fused.operands]
        others = [x.T for x in others] if self.is_turned else others
        apply(self.fused.work, [c, *others], c, self.compiles)

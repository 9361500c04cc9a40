"""Graph of the steps of a chain, in which equal expressions are one node. Pure: no MPI. Pure: no MPI."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import field
from math import prod
from typing import Any

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.elements.dtypes import rank, result_dtype
from rma_mm.elements.pointwise import OPERATIONS, Constant, result_of
from rma_mm.errors import DtypeError, ShapeError
from rma_mm.geometry.extents import too_large

Shape = tuple[int, int]
Value = int | Constant  # A node by its number, or a number by itself

TURNS = {"T": (True, False), "H": (True, True), "conj": (False, True)}
"""Ways to read a matrix: (transposed, conjugated)."""
INPUT, PRODUCT, TURN, SUM, SPREAD = "input", "@", "turn", "sum", "broadcast_to"
MAX, BOUND = "max", "bound"
"""Largest elements along axes; the gradient of the second is taken to be 0."""
REDUCTIONS = (SUM, MAX, BOUND)
BATCHED = {"bmm": "nn", "bmm_nt": "nt", "bmm_tn": "tn"}
"""Products of each group of rows by itself, and which of the operands' groups are transposed (t)."""
GROUPED = (*BATCHED, "split_heads", "merge_heads")
LAYER_EPS = 1e-5  # added to variances in `layer_norm`, as PyTorch does by default


@dataclass(frozen=True)
class Node:
    """A matrix, and the operation that makes it."""

    op: str  # INPUT, PRODUCT, TURN, SPREAD, one of `REDUCTIONS` or `GROUPED`, or an element-wise operation
    args: tuple[Value, ...]
    shape: Shape
    dtype: np.dtype[Any]
    note: Any = None  # name of an input, how a matrix is turned, the axes that are reduced, (groups, heads)

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(x for x in self.args if not isinstance(x, Constant))


@dataclass
class Graph:
    """The nodes of a chain, each after its operands."""

    product_dtype: Callable[[np.dtype[Any], np.dtype[Any]], np.dtype[Any]] = result_dtype
    """Element types of A and B → that of A @ B."""
    nodes: list[Node] = field(default_factory=list)
    known: dict[tuple[object, ...], int] = field(default_factory=dict)
    results: dict[str, int] = field(default_factory=dict)  # the node of each step, by name
    inputs: dict[str, int] = field(default_factory=dict)

    def shape(self, x: Value) -> Shape:
        return (1, 1) if isinstance(x, Constant) else self.nodes[x].shape

    def add(self, op: str, args: tuple[Value, ...], shape: Shape, dtype: np.dtype[Any], note: Any = None) -> int:
        """Return the node that says this. Raises ShapeError if it would be too large."""
        key = op, args, note, shape, dtype
        if key not in self.known:
            if reason := too_large(shape):
                raise ShapeError(f"it would be {shape}; {reason}")
            self.known[key] = len(self.nodes)
            self.nodes.append(Node(op, args, shape, dtype, note))
        return self.known[key]

    def input(self, name: str, shape: Shape, dtype: np.dtype[Any]) -> int:
        self.inputs[name] = self.add(INPUT, (), shape, dtype, name)
        return self.inputs[name]

    def product(self, a: int, b: int) -> int:
        """A @ B. Raises ShapeError, DtypeError."""
        one, other = self.nodes[a], self.nodes[b]
        if one.shape[1] != other.shape[0]:
            raise ShapeError(f"the inner dimensions {one.shape[1]} and {other.shape[0]} must be equal")
        dtype = self.product_dtype(one.dtype, other.dtype)
        return self.add(PRODUCT, (a, b), (one.shape[0], other.shape[1]), dtype)

    def transposed(self, x: int, how: str) -> int:
        """Return a matrix transposed, conjugated, or both: read so where it is a matrix in memory."""
        node = self.nodes[x]
        transposed, conjugated = TURNS[how]
        if node.op == TURN:
            before = TURNS[node.note]
            transposed, conjugated, x = transposed ^ before[0], conjugated ^ before[1], node.reads[0]
            node = self.nodes[x]
        conjugated = conjugated and rank(node.dtype) == 3
        found = next((name for name, way in TURNS.items() if way == (transposed, conjugated)), "")
        shape = node.shape[::-1] if transposed else node.shape
        return self.add(TURN, (x,), shape, node.dtype, found) if found else x

    def applied(self, name: str, *args: Value) -> int:
        """Return an element-wise operation, which broadcasts as NumPy does. Raises ShapeError, DtypeError."""
        shapes = [self.shape(x) for x in args]
        try:
            rows, cols = np.broadcast_shapes(*shapes)
        except ValueError:
            raise ShapeError("both shapes must be equal, or rows, or columns, 1 in one of them") from None
        dtype = result_of(name, [x if isinstance(x, Constant) else self.nodes[x].dtype for x in args])
        if name == "conj" and rank(dtype) < 3 and isinstance(args[0], int):
            return args[0]
        return self.add(name, args, (rows, cols), dtype)

    def reduced(self, op: str, x: int, axes: tuple[int, ...]) -> int:
        """Return one of `REDUCTIONS` over `axes`, which have extent 1 in the result. Raises ShapeError, DtypeError."""
        node = self.nodes[x]
        if op != SUM and not all(node.shape[axis] for axis in axes):
            raise ShapeError(f"{node.shape} has no largest element")
        if op != SUM and rank(node.dtype) == 3:
            raise DtypeError(f"{op} of {node.dtype.name}; complex numbers have no order")
        shape = tuple(1 if axis in axes else extent for axis, extent in enumerate(node.shape))
        return self.add(op, (x,), (shape[0], shape[1]), node.dtype, axes)

    def batched(self, op: str, a: int, b: int, groups: int) -> int:
        """Return one of `BATCHED` of matrices that hold `groups` matrices one below the other. Raises ShapeError."""
        one, other = self.nodes[a], self.nodes[b]
        rows = [self._rows(x, groups) for x in (a, b)]
        (m, k), (k2, n) = (
            (columns, height) if turn == "t" else (height, columns)
            for turn, height, columns in zip(BATCHED[op], rows, (one.shape[1], other.shape[1]), strict=True)
        )
        if k != k2:
            raise ShapeError(f"the inner dimensions of each of {groups} products, {k} and {k2}, must be equal")
        return self.add(op, (a, b), (groups * m, n), self.product_dtype(one.dtype, other.dtype), (groups, 1))

    def regrouped(self, op: str, x: int, groups: int, heads: int) -> int:
        """Return heads side by side as heads one below the other within each group, or the reverse. Raises ShapeError.

        op: "split_heads" or "merge_heads".
        """
        node, rows = self.nodes[x], self._rows(x, groups)
        is_split = op == "split_heads"
        if heads < 1 or (node.shape[1] if is_split else rows) % heads:
            raise ShapeError(f"{node.shape} of {groups} groups does not hold {heads} heads of equal size")
        shape = (groups * rows * heads, node.shape[1] // heads) if is_split else (
            groups * (rows // heads), node.shape[1] * heads
        )
        return self.add(op, (x,), shape, node.dtype, (groups, heads))

    def _rows(self, x: int, groups: int) -> int:
        """Return the rows of each of some groups. Raises ShapeError."""
        if self.nodes[x].op == TURN:
            raise ShapeError("transposed matrices have no groups of rows; bmm_nt and bmm_tn transpose each")
        rows = self.nodes[x].shape[0]
        if groups < 1 or rows % groups:
            raise ShapeError(f"{self.nodes[x].shape} does not hold {groups} groups of equal numbers of rows")
        return rows // groups

    def softmax(self, x: int, axes: tuple[int, ...]) -> int:
        """Return exp(x) divided by its sums over `axes`: shifted by the largest, so that nothing overflows."""
        raised = self.applied("exp", self.applied("-", x, self.reduced(BOUND, x, axes)))
        return self.applied("/", raised, self.reduced(SUM, raised, axes))

    def layer_norm(self, x: int, axes: tuple[int, ...]) -> int:
        """Return x less its mean over `axes`, divided by its standard deviation there (Ba et al. 2016)."""
        count = Constant.of(max(1, prod(self.nodes[x].shape[axis] for axis in axes)))
        centred = self.applied("-", x, self.applied("/", self.reduced(SUM, x, axes), count))
        spread = self.applied("/", self.reduced(SUM, self.applied("*", centred, centred), axes), count)
        return self.applied("/", centred, self.applied("sqrt", self.applied("+", spread, Constant.of(LAYER_EPS))))

    def spread(self, x: Value, shape: Shape) -> Value:
        """Return a matrix, or a number, broadcast to a shape. Raises ShapeError."""
        if any(mine not in (1, wanted) for mine, wanted in zip(self.shape(x), shape, strict=True)):
            raise ShapeError(f"{self.shape(x)} does not broadcast to {shape}")
        if not isinstance(x, Constant) and self.shape(x) == shape:
            return x
        dtype = np.asarray(x.value).dtype if isinstance(x, Constant) else self.nodes[x].dtype
        return self.add(SPREAD, (x,), shape, dtype)

    @property
    def is_elementwise(self) -> list[bool]:
        return [node.op in OPERATIONS or node.op == SPREAD for node in self.nodes]

    def needed_for(self, names: Iterable[str], among: Container[str]) -> list[str]:
        """Return the results named in `among` that the results `names` are made from."""
        live = {self.results[name] for name in names}
        for n in range(len(self.nodes) - 1, -1, -1):
            live |= set(self.nodes[n].reads) if n in live else set()
        return [name for name, n in self.results.items() if name in among and n in live]

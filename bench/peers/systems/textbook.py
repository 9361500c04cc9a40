"""The algorithms of the textbooks with mpi4py and numpy.matmul, as one would write them who writes only one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import isqrt
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from bench import measure
from bench.peers.cases import bounds, grid_of, share_of
from bench.peers.operands import Piece, part
from bench.peers.registry import layers_of
from bench.peers.systems import OverMPI, Task, mpi_library


class Textbook(OverMPI):
    """Ranks on a Cartesian grid."""

    def __init__(self, task: Task, grid: tuple[int, ...]) -> None:
        super().__init__(task)
        self.grid = grid
        self.cart = self.comm.Create_cart(grid, periods=[True] * len(grid))
        self.at = self.cart.coords
        self.c: NDArray[Any]
        self.facts = {"mpi": mpi_library(), "blas": measure.blas_name(), "grid": list(grid)}

    def along(self, axis: int) -> MPI.Cartcomm:
        """The ranks that differ from this one in one coordinate."""
        return self.cart.Sub([other == axis for other in range(len(self.grid))])

    def empty(self, rows: int, cols: int) -> NDArray[Any]:
        """A buffer."""
        return np.empty((rows, cols), self.case.dtype)


class Summa(Textbook):
    """Van de Geijn and Watts 1997: panels of A go along rows of the grid, panels of B along columns; C stays.

    Panels are as wide as the blocks let them be. On a grid that is not square they end where a block of A or B ends.
    """

    def __init__(self, task: Task) -> None:
        p, q, _ = grid_of(task.case, task.ranks, k_parts=(1,))
        super().__init__(task, (p, q))
        case, (i, j) = self.case, self.at
        self.rows, self.cols = share_of(case.m, p, i), share_of(case.n, q, j)
        self.a = part("A", self.rows, share_of(case.k, q, j), case.dtype)
        self.b = part("B", share_of(case.k, p, i), self.cols, case.dtype)
        self.row, self.column = self.along(1), self.along(0)
        a_cuts, b_cuts = bounds(case.k, q), bounds(case.k, p)
        cuts = sorted({*a_cuts, *b_cuts})
        self.panels = [(lo, hi, owner(a_cuts, lo), owner(b_cuts, lo)) for lo, hi in pairwise(cuts)]
        self.a_from, self.b_from = a_cuts[j], b_cuts[i]
        m, n = self.rows.stop - self.rows.start, self.cols.stop - self.cols.start
        width = max(hi - lo for lo, hi, _, _ in self.panels)
        self.a_panel, self.b_panel = np.empty(m * width, case.dtype), np.empty(width * n, case.dtype)
        self.c, self.product = self.empty(m, n), self.empty(m, n)

    def multiply(self) -> None:
        """C = Σ of panels of A times panels of B."""
        for lo, hi, a_owner, b_owner in self.panels:
            a = self.sent(self.a[:, lo - self.a_from : hi - self.a_from], self.row, a_owner, self.a_panel, hi - lo)
            b = self.sent(self.b[lo - self.b_from : hi - self.b_from], self.column, b_owner, self.b_panel, hi - lo)
            np.matmul(a, b, out=self.product if lo else self.c)
            if lo:
                self.c += self.product

    def sent(self, mine: NDArray[Any], group: MPI.Comm, root: int, buffer: NDArray[Any], width: int) -> NDArray[Any]:
        """A panel on every rank of a group; on its owner the block itself where it need not be packed."""
        if group.size == 1:
            return mine
        rows, cols = (self.c.shape[0], width) if group is self.row else (width, self.c.shape[1])
        panel = buffer[: rows * cols].reshape(rows, cols)
        if group.rank == root:
            if mine.flags.c_contiguous:
                panel = mine
            else:
                panel[...] = mine
        group.Bcast(panel, root)
        return panel

    def pieces(self) -> Iterable[Piece]:
        """This rank's block."""
        yield Piece(self.rows, self.cols, self.c)


def owner(cuts: list[int], index: int) -> int:
    """Which of the parts that begin at `cuts` holds an index; empty parts hold none."""
    return int(np.searchsorted(cuts, index, side="right")) - 1


class Cannon(Textbook):
    """Cannon 1969: blocks of A and B, first skewed, go round rows and columns of a square grid; C stays.

    Blocks are of equal size, filled up with zeros at the edges. `Cannon25D` adds layers.
    """

    def __init__(self, task: Task, layers: int = 1) -> None:
        side = isqrt(task.ranks // layers)
        super().__init__(task, (side, side, layers))
        case, (i, j, layer) = self.case, self.at
        self.m, self.n, self.k = (-(-extent // side) for extent in (case.m, case.n, case.k))
        self.plane = self.cart.Sub([True, True, False])
        self.depth = self.along(2)
        self.steps = side // layers
        self.first = (i + j + layer * self.steps) % side
        self.home = [self.empty(self.m, self.k), self.empty(self.k, self.n)]
        if layer == 0:
            self.fill()
        self.now, self.next = ([np.empty_like(block) for block in self.home] for _ in range(2))
        self.c, self.product = self.empty(self.m, self.n), self.empty(self.m, self.n)
        self.facts["blocks"] = [self.m, self.n, self.k]

    def fill(self) -> None:
        """Put A's and B's elements into the home blocks, and zeros beyond the edges."""
        case, (i, j, _) = self.case, self.at
        for block, which, extent in zip(self.home, "AB", ((case.m, case.k), (case.k, case.n)), strict=True):
            block[...] = 0
            rows, cols = (cut(at, size, end) for at, size, end in zip((i, j), block.shape, extent, strict=True))
            values = part(which, rows, cols, case.dtype)
            block[: values.shape[0], : values.shape[1]] = values

    def multiply(self) -> None:
        """C = Σ over the blocks that come past."""
        for block in self.home if self.depth.size > 1 else ():
            self.depth.Bcast(block)
        now, after = self.now, self.next
        self.skew(now)
        for step in range(self.steps):
            moving = self.shift(now, after) if step < self.steps - 1 else []
            np.matmul(*now, out=self.product if step else self.c)
            if step:
                self.c += self.product
            MPI.Request.Waitall(moving)
            now, after = after, now
        if self.depth.size > 1:
            is_root = self.depth.rank == 0
            self.depth.Reduce(MPI.IN_PLACE if is_root else self.c, self.c if is_root else None)

    def skew(self, into: list[NDArray[Any]]) -> None:
        """Receive A(i, first) and B(first, j)."""
        (i, j, layer), side = self.at, self.grid[0]
        turn = layer * self.steps
        self.exchange(self.home[0], (i, (j - i - turn) % side), into[0], (i, self.first))
        self.exchange(self.home[1], ((i - j - turn) % side, j), into[1], (self.first, j))

    def exchange(self, mine: NDArray[Any], to: tuple[int, int], into: NDArray[Any], source: tuple[int, int]) -> None:
        """Send a block within the layer, receive another."""
        rank = self.plane.Get_cart_rank
        self.plane.Sendrecv(mine, rank(to), recvbuf=into, source=rank(source))

    def shift(self, blocks: list[NDArray[Any]], into: list[NDArray[Any]]) -> list[MPI.Request]:
        """Pass A to the left and B upwards."""
        started = []
        for axis, block, room in zip((1, 0), blocks, into, strict=True):
            source, to = self.plane.Shift(axis, -1)
            started += [self.plane.Irecv(room, source, axis), self.plane.Isend(block, to, axis)]
        return started

    def pieces(self) -> Iterable[Piece]:
        """This rank's block, without what was filled up."""
        i, j, layer = self.at
        if layer == 0:
            rows, cols = cut(i, self.m, self.case.m), cut(j, self.n, self.case.n)
            yield Piece(rows, cols, self.c[: rows.stop - rows.start, : cols.stop - cols.start])


def cut(index: int, size: int, extent: int) -> slice:
    """The `index`th block of a size, as far as the extent goes."""
    return slice(min(index * size, extent), min((index + 1) * size, extent))


class Cannon25D(Cannon):
    """Solomonik and Demmel 2011: A and B lie on one layer and are copied to the others; each does a part of k."""

    def __init__(self, task: Task) -> None:
        c, _ = layers_of(task.ranks) or (1, 1)
        super().__init__(task, c)


class Agarwal3D(Textbook):
    """Agarwal and others 1995: A(i, l) is gathered along n, B(l, j) along m, and C(i, j) summed up along k.

    On the grid of all ranks that moves least, a cube for cubes. What is gathered lies in slices of rows.
    """

    def __init__(self, task: Task) -> None:
        p, q, r = grid_of(task.case, task.ranks)
        super().__init__(task, (p, q, r))
        case, (i, j, l) = self.case, self.at  # noqa: E741 - l is what the axis is called
        self.rows, self.cols, inner = share_of(case.m, p, i), share_of(case.n, q, j), share_of(case.k, r, l)
        m, n, k = (span.stop - span.start for span in (self.rows, self.cols, inner))
        self.along_m, self.along_n, self.along_k = (self.along(axis) for axis in range(3))
        self.a = part("A", within(self.rows, share_of(m, q, j)), inner, case.dtype)
        self.b = part("B", within(inner, share_of(k, p, i)), self.cols, case.dtype)
        self.a_all = self.a if q == 1 else self.empty(m, k)
        self.b_all = self.b if p == 1 else self.empty(k, n)
        self.mine = share_of(m, r, l)
        self.product = self.empty(m, n)
        self.c = self.product if r == 1 else self.empty(self.mine.stop - self.mine.start, n)
        self.counts = [(hi - lo) * n for lo, hi in pairwise(bounds(m, r))]

    def multiply(self) -> None:
        """Gather, multiply, sum up."""
        gather(self.along_n, self.a, self.a_all)
        gather(self.along_m, self.b, self.b_all)
        np.matmul(self.a_all, self.b_all, out=self.product)
        if self.along_k.size > 1:
            self.along_k.Reduce_scatter(self.product, self.c, self.counts)

    def pieces(self) -> Iterable[Piece]:
        """This rank's rows of its block."""
        yield Piece(within(self.rows, self.mine), self.cols, self.c)


def within(span: slice, inner: slice) -> slice:
    """A part of a span, counted from the span's begin, in the whole."""
    return slice(span.start + inner.start, span.start + inner.stop)


def gather(group: MPI.Comm, mine: NDArray[Any], into: NDArray[Any]) -> None:
    """All ranks' slices of rows, one below the other."""
    if group.size > 1:
        rows, cols = into.shape
        counts = [(hi - lo) * cols for lo, hi in pairwise(bounds(rows, group.size))]
        group.Allgatherv(mine, (into, counts))

"""Products cut into blocks, for operands that a kernel cannot take as they are.

A block of a or b is copied into a panel (cast, made contiguous, conjugated), a block of c is summed in an
accumulator and rounded once. Panels and accumulator come from one buffer per thread, which all products of
the thread share, so that preparing many products costs no memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import isqrt, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rma_mm.classes import dataclass
from rma_mm.kernels.product import LocalOperands, Product

PANEL_BYTES = 4 << 20  # upper bound of each panel and of the accumulator, bytes

_DEPTH = 512  # panels narrower than this along k leave BLAS waiting for memory
_MARGIN = 64 << 10  # bytes; alignment, views, and the buffers in which NumPy casts
_ALIGN = 64  # bytes; a cache line, and the widest vector

Blocks = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # blocks of a, b and c of one type

Step = Callable[[Blocks, tuple[Any, Any], tuple[bool, bool], NDArray[Any]], None]
"""step((a, b, c), (alpha, beta), (conj_a, conj_b), spare): products of blocks; `spare` has room for c, or none."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """Blocks that a product is cut into, and which of them go through scratch memory."""

    working: np.dtype[Any]  # the type of panels and accumulator
    pack_a: bool  # true if blocks of a are copied
    pack_b: bool  # true if blocks of b are copied
    accumulate: bool  # true if a block of c is summed apart from c
    spare: bool  # true if the kernel or the closing addition needs a second block of c

    def types(self, a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
        """Return the types of the blocks of operands and result of these types."""
        is_moved = (self.pack_a, self.pack_b, self.accumulate)
        return tuple(self.working if moved else x for x, moved in zip((a, b, c), is_moved, strict=True))

    def block(self, m: int, n: int, k: int) -> tuple[int, int, int]:
        """Rows, columns and depth of one block; no panel exceeds `PANEL_BYTES`."""
        most = PANEL_BYTES // self.working.itemsize
        rows, columns, depth = m, n, k
        if self.pack_a or self.pack_b:
            depth = min(k, max(_DEPTH, most // max(m, n)))
            rows, columns = min(m, most // depth), min(n, most // depth)
        if self.accumulate and rows * columns > most:
            side = isqrt(most)
            rows = min(rows, max(side, most // columns))
            columns = min(columns, most // rows)
        return rows, columns, depth

    def products_at_once(self, count: int, m: int, n: int, k: int) -> int:
        """Return how many products of a batch go through scratch at once: those that fit in whole panels."""
        most = PANEL_BYTES // self.working.itemsize
        largest = max(m * k * self.pack_a, k * n * self.pack_b, m * n * self.accumulate)
        return min(count, max(1, most // largest)) if largest else count

    def pieces(self, m: int, n: int, k: int, count: int = 1) -> tuple[int, int, int, int]:
        """Return bytes of a's panel, b's panel, the accumulator and the spare block, each a multiple of 64.

        count: of products that go through them at once.
        """
        rows, columns, depth = self.block(m, n, k)
        counts = (
            rows * depth * self.pack_a, depth * columns * self.pack_b, rows * columns * self.accumulate,
            rows * columns * self.spare,
        )
        sizes = (count * each * self.working.itemsize for each in counts)
        first, second, third, fourth = (-(-size // _ALIGN) * _ALIGN for size in sizes)
        return first, second, third, fourth

    def scratch_bytes(self, m: int, n: int, k: int, count: int = 1) -> int:
        """Bytes of scratch of a product, or a batch, with a margin for alignment and small objects; 0 without it."""
        total = sum(self.pieces(m, n, k, self.products_at_once(count, m, n, k)))
        return total + _MARGIN if total else 0


def bind_blocked(name: str, problem: LocalOperands, blocking: Blocking, step: Step) -> Product:
    """Return the product `problem` by blocks; `step` multiplies blocks of type `blocking.working`."""
    alpha, beta = (_as(blocking.working, x) for x in (problem.alpha, problem.beta))
    return Product.by(name, problem, _run, problem, blocking, step, alpha, beta)


def _as(working: np.dtype[Any], value: np.generic[Any]) -> Any:
    return value.astype(working)


def _run(problem: LocalOperands, blocking: Blocking, step: Step, alpha: Any, beta: Any) -> None:
    m, n, k = problem.sizes
    rows, columns, depth = blocking.block(m, n, k)
    count = blocking.products_at_once(problem.count, m, n, k)
    panels = _carve(blocking.pieces(m, n, k, count), blocking.working)
    parts = [problem] if problem.count == count else map(problem.some, _slices(problem.count, count))
    with np.errstate(all="ignore"):  # wrap-around, infinities and NaN are results here, not surprises
        for part in parts:
            for i in _slices(m, rows):
                for j in _slices(n, columns):
                    _block_of_c(part, blocking, step, (alpha, beta), (..., i, j), depth, panels)


def _block_of_c(
    problem: LocalOperands, blocking: Blocking, step: Step, scalars: tuple[Any, Any], at: tuple[Any, slice, slice],
    depth: int, panels: list[NDArray[Any]],
) -> None:
    """One block of c, or of each of a batch, over the whole of k."""
    c = problem.c[at]
    alpha, beta = scalars
    target, factor, keep = (shaped(panels[2], c.shape), 1, 0) if blocking.accumulate else (c, alpha, beta)
    for p in _slices(problem.a.shape[-1], depth):
        a, b = problem.a[..., at[1], p], problem.b[..., p, at[2]]
        conj_a, conj_b = problem.conj_a, problem.conj_b
        if blocking.pack_a:
            a, conj_a = _packed(a, panels[0], conj_a), False
        if blocking.pack_b:
            b, conj_b = _packed(b, panels[1], conj_b), False
        step((a, b, target), (factor, keep), (conj_a, conj_b), panels[3])
        keep = 1
    if blocking.accumulate:
        _close(problem.semiring.add, target, c, alpha, beta, panels[3])


def _close(
    add: np.ufunc, total: NDArray[Any], c: NDArray[Any], alpha: Any, beta: Any, spare: NDArray[Any]
) -> None:
    """Set c = alpha · total + beta · c (or another sum), computed in the type of `total` and rounded once."""
    if alpha != 1:
        np.multiply(total, alpha, out=total)
    if beta != 0:
        old = shaped(spare, c.shape)
        np.copyto(old, c, casting="unsafe")
        if beta != 1:
            np.multiply(old, beta, out=old)
        add(total, old, out=total)
    np.copyto(c, total, casting="unsafe")


def _packed(x: NDArray[Any], panel: NDArray[Any], conj: bool) -> NDArray[Any]:
    """Return a contiguous copy of `x` in the panel's type, conjugated if asked."""
    copy = shaped(panel, x.shape)
    np.copyto(copy, x, casting="unsafe")
    if conj:
        np.conjugate(copy, out=copy)
    return copy


def shaped(panel: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return panel[: prod(shape)].reshape(shape)


def _slices(extent: int, width: int) -> Iterator[slice]:
    return (slice(start, min(start + width, extent)) for start in range(0, extent, width))


class Scratch(threading.local):
    """A buffer of this thread's; it grows to the largest product seen and stays."""

    buffer: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes that begin at a cache line; the same ones each time."""
        needed = size + _ALIGN
        if self.buffer.size < needed:
            self.buffer = Scratch.buffer  # let the old one go first
            self.buffer = np.empty(needed, np.uint8)
        start = -self.buffer.ctypes.data % _ALIGN
        return self.buffer[start : start + size]


_scratch = Scratch()


def _carve(pieces: tuple[int, ...], working: np.dtype[Any]) -> list[NDArray[Any]]:
    """Arrays of the working type, `pieces` bytes each, side by side in this thread's buffer."""
    whole = _scratch.take(sum(pieces))
    ends = list(accumulate(pieces))
    return [whole[end - size : end].view(working) for size, end in zip(pieces, ends, strict=True)]

"""Choose how many rows, columns and steps of k are packed at a time, from the sizes of the caches."""

from __future__ import annotations

import numpy as np

from rma_mm.classes import dataclass
from rma_mm.kernels.gemm.cpu import Cpu
from rma_mm.kernels.gemm.form import ACROSS, ALONG, SUMMED, Form

ONE = 1 << 32  # by which fractions are multiplied
MOST_KEPT = 8 << 20  # bytes of a c that may stay in the third cache, which other cores share
ROWS = 128  # of a panel of a that would fill the second level, at least: each tile of them reads a sliver of b
SHIFT = 192  # bytes between rows of sums: rows that lie a multiple of a page apart would share lines of a cache
PANELS = 3  # what lies in scratch: a panel of a, one of b, and a tile
_SLACK = 64  # bytes; panels begin at a cache line, and clearing rounds up


@dataclass(frozen=True)
class Blocks:
    """Sizes of the blocks that are packed at a time."""

    m: int  # rows of a panel of a
    n: int  # columns of a panel of b
    k: int  # steps of both
    bytes_a: int  # of a panel of a
    bytes_b: int  # of a panel of b
    bytes_tile: int  # of a tile

    @property
    def offsets(self) -> list[int]:
        """Return where the two panels and the tile begin, one behind the other."""
        return [0, self.bytes_a, self.bytes_a + self.bytes_b]

    @property
    def total_bytes(self) -> int:
        return self.bytes_a + self.bytes_b + self.bytes_tile


def may_be_whole(form: Form, k: int, cpu: Cpu) -> bool:
    """True if a sliver of b leaves most of the second level to a, though k is not cut."""
    return form.columns * k * form.panel_bytes("b") <= cpu.caches[1] // 4


def blocks_of(form: Form, m: int, n: int, k: int, cpu: Cpu, whole: bool = False) -> Blocks:
    """Blocks for a product of this size: equal ones, as large as the caches allow. whole: k is not cut."""
    cell_a, cell_b, size = form.panel_bytes("a"), form.panel_bytes("b"), np.dtype(form.total).itemsize
    _, second, third = cpu.caches
    # slivers of b of a quarter of the second level, from which they stream: the longer they are, the less c is touched
    usual = max(64, min(second // 4 // (form.columns * cell_b), second // (ROWS * cell_a)))
    most_a, most_b = second // 4, min(third // 2, 16 << 20)
    if cpu.is_zen:  # measured there; an Intel Xeon takes up to a tenth longer with panels of a that fill this level
        most_a = second
    if form.is_amx:
        usual = max(64, second // 16 // (form.columns * cell_b))
    elif form.terms == 1 and m * min(k, usual // 2) * cell_a <= second:  # all rows of a are one panel, packed once
        usual, most_a, most_b = usual // 2, 2 * second, 2 * second
    depth = _equal(k, k if whole else usual, 4 * form.group)
    rows = _equal(m, max(form.rows, most_a // (depth * cell_a)), form.rows)
    columns = _equal(n, max(form.columns, most_b // (depth * cell_b)), form.columns)
    cells = -(-depth // form.group) * form.group
    bytes_a = -(-rows // form.rows) * form.rows * cells * cell_a
    bytes_b = -(-columns // form.columns) * (form.columns * cells * cell_b + form.head)
    bytes_tile = form.rows * form.columns * form.planes * size
    return Blocks(rows, columns, depth, *map(padded, (bytes_a, bytes_b, bytes_tile)))


def few_blocks(form: Form, m: int, n: int, k: int, cpu: Cpu) -> Blocks:
    """Blocks for which sums, and packed rows of a, stay in a cache while b passes."""
    _, second, _ = cpu.caches
    size = np.dtype(form.total).itemsize
    rows, step = -(-m // form.rows) * form.rows, form.steps if form.in_place == ACROSS else form.grain
    most = min(second // 4 // (rows * size), SUMMED * (form.lanes if form.in_place == ALONG else 1))
    depth = min(-(-k // step), max(1, most // step)) * step
    most = 3 * second // 4 // ((rows + form.steps) * size)  # sums, and what is asked for, stay there
    parts = -(-n // max(form.columns, most))
    columns = -(-n // (parts * form.columns)) * form.columns
    sizes = rows * depth * size, rows * (columns * size + SHIFT), form.columns * (form.steps + form.rows) * size
    return Blocks(rows, columns, depth, *map(padded, sizes))


def padded(size: int) -> int:
    """Return the bytes for a panel of this size."""
    return (1 + -(-size // _SLACK)) * _SLACK


def _equal(extent: int, usual: int, unit: int) -> int:
    """Return the length of equal parts of an extent, up to half as long again as `usual`, in multiples of `unit`."""
    parts = max(1, (2 * extent + usual) // (2 * usual))
    length = -(-extent // parts)
    return -(-length // unit) * unit

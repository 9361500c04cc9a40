"""Products whose C is larger than memory: computed in blocks, each a product of parts of A and B that stay in files.

The larger the blocks, the less is read: a block of C reads its rows of A and its columns of B once. J.-W. Hong and
H. T. Kung (1981): no order reads much less than square blocks do that fill the memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil, lcm
from typing import Any

import numpy as np

from rma_mm.errors import MemoryLimitError
from rma_mm.geometry.span import Region, Span
from rma_mm.kernels.elementwise import cast
from rma_mm.kernels.epilogue.epilogue import Epilogue
from rma_mm.runtime.execution.executor import Progress
from rma_mm.runtime.files.formats import Shape
from rma_mm.runtime.files.opened import Opened
from rma_mm.runtime.matrices.arguments import by_chunks
from rma_mm.runtime.matrices.matrix import DistMatrix
from rma_mm.runtime.matrices.streamed import FileMatrix, FileWindow
from rma_mm.runtime.products.make_plan import make_plan, plan_of
from rma_mm.runtime.products.plan import Plan
from rma_mm.runtime.products.plan_choice import PlanChoice
from rma_mm.runtime.ranks.mesh import Mesh
from rma_mm.windows import Counters

MOST = 64  # rows, or columns, of blocks
WIDTH = 256  # panels of A and B are at least so wide, where blocks are chosen
FRAMES = 2  # panels of an operand that are held: the one that is multiplied, and the next, which is read meanwhile
TRIED = 12  # ways to cut C whose memory is looked at: those that read least, of those that seem to fit
LONGEST = 2**16  # rows, or columns, that blocks are made multiples of at most, where a file keeps so many together
BESIDE = 2**25
"""Bytes of the limit that are left to BLAS, for what it packs, and to the plan itself, where blocks fit in the rest."""
Cut = tuple[tuple[int, ...], tuple[int, ...]]  # where rows, and where columns, of blocks begin


class BlockedProduct:
    """C = alpha · op(A) @ op(B) + beta · C0 in blocks. Collective to make, and to multiply a block.

    A, B: matrices in files. before: C0, in a file, where beta is not 0. unit: rows and columns that the output keeps
    together, of which no block has a part. cut: as it was chosen before, or None. options: those of `make_plan`; of a
    limit each block is compared with it. Raises MemoryLimitError if no block fits, and as `make_plan`.
    """

    def __init__(
        self, mesh: Mesh, A: Opened, B: Opened, shape: tuple[int, int, int], before: Opened | None, unit: Shape | None,
        cut: Cut | None, **options: Any,
    ) -> None:
        self.mesh, self.files, self.shape, self.before, self.options = mesh, {"A": A, "B": B}, shape, before, options
        self.unit = unit
        self.words = Counters()  # what this rank has moved so far
        self.seconds = 0.0  # in which this rank has read A and B so far
        self.executing = 0.0  # in which blocks were computed
        self._nbytes, self._under_way = 0, list[FileWindow]()
        self._kept: Plan | None = None
        self._result: DistMatrix | None = None  # in memory for blocks of one shape at a time
        self._choices: dict[tuple[int, ...], PlanChoice] = {}
        self._reading: dict[str, float] = {}
        self._heeds_chunks = True
        self.block_shape = cut or self._chosen()
        self.first = self._plan(self.blocks[0])  # the plan of the first block, which is the largest

    @property
    def blocks(self) -> list[Region]:
        """Regions of C in the order in which they are computed: there and back, for B's columns are cached still."""
        rows, cols = (_spans(starts, extent) for starts, extent in zip(self.block_shape, self.shape, strict=False))
        return [Region((row, col)) for n, row in enumerate(rows) for col in (cols[::-1] if n % 2 else cols)]

    @property
    def bytes_read(self) -> int:
        """Bytes that all ranks read of A and B together."""
        (m, n, k), (rows, cols) = self.shape, map(len, self.block_shape)
        a, b = (self.files[x].dtype.itemsize for x in "AB")
        return k * (m * cols * a + n * rows * b)

    def multiply(self, region: Region, progress: Progress | None = None) -> DistMatrix:
        """Return a block of C, in memory that the next of its shape takes again. Collective."""
        plan = self._plan(region)
        a, b = self._operand("A", region), self._operand("B", region)
        if self._result is None:
            self._result = DistMatrix.allocated(self.mesh, plan.c_shape, plan.c_dtype, plan.layouts["C"])
        c = self._result
        if self.before is not None:
            file = self.before.part(*region)
            made = np.empty(c.tile.shape, file.dtype)
            file.read(c.region, made)
            cast(made, c.tile)
        epilogue = self.options.get("epilogue")
        if epilogue is not None and epilogue.bias is not None:
            plan.set_bias(epilogue.bias[region[epilogue.per == "column"].as_slice()])
        self._under_way = [a.file, b.file]
        begun = time.perf_counter()
        plan.execute(a, b, c, progress)
        self.executing += time.perf_counter() - begun
        self.words = Counters(*map(sum, zip(_figures(self.words), _figures(plan.words), strict=True)))
        self._nbytes, self._under_way = self.nbytes, []
        self.seconds += a.file.seconds + b.file.seconds
        return c

    @property
    def nbytes(self) -> int:
        return self._nbytes + sum(file.nbytes for file in self._under_way)

    def close(self) -> None:
        for held in (self._kept, self._result):
            if held is not None:
                held.close()
        self._kept = self._result = None

    def _operand(self, x: str, region: Region) -> FileMatrix:
        """Return the part of an operand that a block needs."""
        file, is_turned = self.files[x], bool(self.options.get(f"transpose_{x.lower()}"))
        depth = Span.range(0, self.shape[2])
        rows, cols = (region[0], depth) if x == "A" else (depth, region[1])
        return FileMatrix.of(x, file.part(*((cols, rows) if is_turned else (rows, cols))), self.mesh, self._reading)

    def _plan(self, region: Region) -> Plan:
        """Return the plan of blocks of such a shape, reusing the memory of those of other shapes. Collective."""
        if self._kept is None or self._kept.c_shape != region.shape:
            self.close()
            choice = self._choices.get(region.shape)
            self._kept = self._new_plan(region) if choice is None else plan_of(self.mesh, choice)
            self._choices[region.shape] = self._kept.choice
        return self._kept

    def _new_plan(self, region: Region) -> Plan:
        """Return a plan of blocks of such a shape, with which a resumed job computes the same bits. Collective."""
        options, shape = dict(self.options) | {"deterministic": True}, region.shape
        options["symmetric"] = False  # a block on the diagonal may be, and no other
        epilogue: Epilogue | None = options.get("epilogue")
        if epilogue is not None and epilogue.bias is not None:
            bias = epilogue.bias[region[epilogue.per == "column"].as_slice()]
            options["epilogue"] = replace(epilogue, bias=bias)
        layout = by_chunks((shape[0], shape[1]), self.mesh, self.unit) if self.unit else None
        a, b = self._operand("A", region), self._operand("B", region)
        return make_plan(a, b, self.mesh, layout=layout, **options)

    def _chosen(self) -> Cut:
        """Return the cut that reads least, of those whose blocks fit the limit. Collective."""
        failure, limit = MemoryLimitError("memory_limit: no block of C fits"), self.options["memory_limit"]
        for spared, self._heeds_chunks in product((min(BESIDE, limit // 12), 0), (True, False)):
            self.options = {**self.options, "memory_limit": limit - spared}
            for counts in self._by_bytes():
                self.block_shape = self._evenly(counts)
                try:
                    self._plan(self.blocks[0])
                except MemoryLimitError as error:  # the same on every rank
                    failure = error
                    continue
                return self.block_shape
        raise failure

    def _evenly(self, counts: tuple[int, int]) -> Cut:
        """Return the starts of the rows and columns of blocks, at multiples of chunks; the first is largest."""
        starts = []
        for extent, count, grain in zip(self.shape, counts, self._grains, strict=False):
            step = max(1, ceil(ceil(extent / count) / grain) * grain)
            starts.append(tuple(range(0, max(1, extent), step)))
        return starts[0], starts[1]

    @property
    def _grains(self) -> tuple[int, int]:
        """Rows of C that A's file, if that is heeded, and columns that B's file, and the output keep together."""
        found = []
        for dim, x in enumerate("AB"):
            chunks = (self._heeds_chunks and self.files[x].chunks) or (1, 1)
            own = chunks[dim != bool(self.options.get(f"transpose_{x.lower()}"))]
            unit = self.unit[dim] if self.unit else 1
            found.append(lcm(own, unit) if lcm(own, unit) <= LONGEST else unit)
        return found[0], found[1]

    def _by_bytes(self) -> Iterator[tuple[int, int]]:
        """Yield numbers of rows and columns of blocks that seem to fit, those that read least first."""
        limit, ranks, (m, n, k) = self.options["memory_limit"], self.mesh.grid.size, self.shape
        itemsize = max(file.dtype.itemsize for file in self.files.values())

        def needed(counts: tuple[int, int]) -> float:
            starts = zip(self._evenly(counts), (m, n), strict=True)
            rows, cols = (len(_spans(*each)[0]) for each in starts)
            return itemsize * (rows * cols + FRAMES * min(k, WIDTH) * (rows + cols)) / ranks

        every = [(rows, cols) for rows in range(1, MOST + 1) for cols in range(1, MOST + 1)]
        every.sort(key=lambda counts: m * counts[1] + n * counts[0])
        fitting = [counts for counts in every if needed(counts) <= limit][:TRIED]
        yield from fitting
        yield from [(2**n, 2**n) for n in range(MOST.bit_length()) if (2**n, 2**n) not in fitting]


def _spans(starts: tuple[int, ...], extent: int) -> list[Span]:
    return [Span.range(*each) for each in zip(starts, (*starts[1:], extent), strict=True)]


def _figures(counters: Counters) -> tuple[int, int, int, int]:
    return counters.words_intra, counters.words_inter, counters.messages, counters.messages_inter

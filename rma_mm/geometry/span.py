"""Sets of indices along one dimension, and the boxes they make.

A `Span` is a set of indices kept as sorted, disjoint, non-touching half-open runs, so one span can be a plain
slice, every rank's share of a block-cyclic dimension, or a window that wraps round the end. Spans are closed
under intersection, union and difference.

A rank stores the part of a matrix that it owns as one dense local array, in ascending global order along each
dimension (ScaLAPACK's order). *Positions* are indices into such a packed array: `span.locate(part)` says where
`part` lies inside the packed form of `span`, and `span.take(positions)` is the inverse.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product

import numpy as np
from numpy.typing import NDArray


class Span:
    """An immutable set of indices, as sorted disjoint runs.

    >>> Span.cyclic(10, block=2, parts=2, index=1)
    Span(2:4, 6:8)
    >>> Span.range(0, 7) & Span.cyclic(10, block=2, parts=2, index=1)
    Span(2:4, 6:7)
    """

    __slots__ = ("__dict__", "runs")

    runs: tuple[tuple[int, int], ...]  # half-open runs (start, stop), ascending; two neighbours never touch

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self.runs = _joined(sorted(run for run in runs if run[0] < run[1]))

    @staticmethod
    def range(start: int, stop: int) -> Span:
        return _trusted(((start, stop),) if start < stop else ())

    @staticmethod
    def cyclic(extent: int, block: int, parts: int, index: int, offset: int = 0, source: int = 0) -> Span:
        """Return the share of part `index` when blocks of `block` indices are dealt out round robin.

        Part `source` has the first block. With an offset the indices are those from `offset` on of a longer
        dimension, dealt out so: x belongs to part ((x + offset) // block + source) mod parts.

        >>> Span.cyclic(10, block=4, parts=2, index=1, offset=3, source=1)
        Span(0:1, 5:9)
        """
        if parts == 1 or not extent:
            return Span.range(0, extent)
        first = offset // block  # the block that index 0 lies in
        mine = first + (index - source - first) % parts
        starts = range(mine * block - offset, extent, parts * block)
        return _trusted(tuple((max(s, 0), min(s + block, extent)) for s in starts))

    @staticmethod
    def window(extent: int, start: int, length: int) -> Span:
        """`length` consecutive indices from `start`, going round the end of 0…extent − 1."""
        if extent == 0 or length == 0:
            return EMPTY
        start %= extent
        stop = start + length
        return Span([(start, min(stop, extent)), (0, max(0, stop - extent))])

    @staticmethod
    def folded(spans: Sequence[Span], extents: Sequence[int]) -> Span:
        """Return the indices of a folded dimension (the last part varies fastest) whose parts lie in `spans`.

        >>> Span.folded([Span.range(1, 3), Span.range(0, 2)], (3, 4))
        Span(4:6, 8:10)
        """
        found, stride = Span.range(0, 1), 1
        for span, extent in zip(reversed(spans), reversed(extents), strict=True):
            if len(found) == stride:  # all of what is faster: runs stay together
                runs = [(stride * a, stride * b) for a, b in span.runs]
            else:
                runs = [(stride * x + a, stride * x + b) for x in span.indices.tolist() for a, b in found.runs]
            found, stride = Span(runs), stride * extent
        return found

    # -- what it is -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._ends[-1] if self.runs else 0

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and self.runs == other.runs

    def __hash__(self) -> int:
        return hash(self.runs)

    def __repr__(self) -> str:
        return f"Span({', '.join(f'{a}:{b}' for a, b in self.runs)})"

    def __str__(self) -> str:
        """Short text: runs, or start:block:period*count where many runs repeat.

        >>> str(Span.cyclic(1024, block=32, parts=4, index=1))
        '32+32/128*8'
        """
        if len(self.runs) > 2:
            starts = np.array([a for a, _ in self.runs])
            period = np.diff(starts)
            block = self.runs[0][1] - self.runs[0][0]
            if (period == period[0]).all() and all(b - a == block for a, b in self.runs):
                return f"{starts[0]}+{block}/{period[0]}*{len(self.runs)}"
        return ",".join(f"{a}:{b}" for a, b in self.runs) or "empty"

    @property
    def start(self) -> int:
        return self.runs[0][0]

    @property
    def stop(self) -> int:
        return self.runs[-1][1] if self.runs else 0

    @property
    def is_contiguous(self) -> bool:
        return len(self.runs) <= 1

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(b - a for a, b in self.runs))

    @cached_property
    def indices(self) -> NDArray[np.int64]:
        if not self.runs:
            return np.empty(0, np.int64)
        return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in self.runs])

    def as_slice(self) -> slice:
        assert self.is_contiguous, self
        return slice(*self.runs[0]) if self.runs else slice(0, 0)

    # -- set algebra ------------------------------------------------------------------------------

    def __and__(self, other: Span) -> Span:
        if self.runs == other.runs:
            return self
        if len(self.runs) == len(other.runs) == 1:
            return Span.range(max(self.runs[0][0], other.runs[0][0]), min(self.runs[0][1], other.runs[0][1]))
        return _trusted(tuple(_common(self.runs, other.runs)))

    def __or__(self, other: Span) -> Span:
        return Span(self.runs + other.runs)

    def __sub__(self, other: Span) -> Span:
        if not self.runs or not other.runs:
            return self
        edges = [min(self.start, other.start), *(x for run in other.runs for x in run), max(self.stop, other.stop)]
        return self & Span(zip(edges[::2], edges[1::2], strict=True))

    def issubset(self, other: Span) -> bool:
        return len(self & other) == len(self)

    # -- packed positions -------------------------------------------------------------------------

    def locate(self, part: Span) -> Span:
        """Positions of `part` in the packed form of this span; `part` must be a subset.

        >>> Span.cyclic(10, block=2, parts=2, index=1).locate(Span.range(6, 8))
        Span(2:4)
        """
        if part.runs == self.runs:
            return Span.range(0, len(self))
        starts = [a for a, _ in self.runs]
        runs = []
        for a, b in part.runs:
            i = bisect_right(starts, a) - 1
            assert i >= 0 and b <= self.runs[i][1], f"{part} is not within {self}"
            shift = self._ends[i] - self.runs[i][1]
            runs.append((a + shift, b + shift))
        return Span(runs)

    def take(self, positions: Span) -> Span:
        """Return the indices at these positions of the packed form: the inverse of `locate`."""
        if self.is_contiguous:
            return positions if not self or not self.start else _trusted(
                tuple((a + self.start, b + self.start) for a, b in positions.runs)
            )
        runs: list[tuple[int, int]] = []
        begin = 0
        at = 0
        for (a, _), end in zip(self.runs, self._ends, strict=True):
            while at < len(positions.runs) and positions.runs[at][0] < end:
                p, q = positions.runs[at]
                runs.append((a + max(p, begin) - begin, a + min(q, end) - begin))
                if q > end:
                    break
                at += 1
            begin = end
        return Span(runs)

    def pieces(self, width: int) -> list[Span]:
        """This span cut, in order, into as few pieces of at most `width` indices as possible, of even length."""
        count = max(1, -(-len(self) // max(1, width)))
        return [self.take(even_part(len(self), i, count)) for i in range(count)] if self else []


def even_part(extent: int, index: int, count: int) -> Span:
    return Span.range(index * extent // count, (index + 1) * extent // count)


def _trusted(runs: tuple[tuple[int, int], ...]) -> Span:
    """Return a span of runs already known to be sorted, disjoint and not touching."""
    span = Span.__new__(Span)
    span.runs = runs
    return span


def _joined(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merge touching and overlapping runs of a sorted list."""
    joined: list[tuple[int, int]] = []
    for a, b in runs:
        if joined and a <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return tuple(joined)


def _common(left: tuple[tuple[int, int], ...], right: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """Runs of the intersection of two run lists, by one merge from where they begin to overlap."""
    if not left or not right:
        return
    i = max(0, bisect_right(left, (right[0][0], right[0][0])) - 1)
    j = max(0, bisect_right(right, (left[0][0], left[0][0])) - 1)
    while i < len(left) and j < len(right):
        a, b = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if a < b:
            yield a, b
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1


EMPTY = Span()


class Region(tuple[Span, ...]):
    """A box: the product of one span per dimension. Matrices have two, the iteration space has three.

    >>> Region.box((0, 4), (2, 6)) & Region.box((2, 8), (0, 3))
    Region(2:4 x 2:3)
    """

    __slots__ = ()

    @staticmethod
    def box(*ranges: tuple[int, int]) -> Region:
        return Region(Span.range(a, b) for a, b in ranges)

    @staticmethod
    def whole(shape: Iterable[int]) -> Region:
        return Region(Span.range(0, extent) for extent in shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(span) for span in self)

    @property
    def size(self) -> int:
        size = 1
        for span in self:
            size *= len(span)
        return size

    @property
    def T(self) -> Region:
        return Region(self[::-1])

    def __bool__(self) -> bool:
        return all(self)

    def __repr__(self) -> str:
        return f"Region({' x '.join(map(str, self))})"

    def __and__(self, other: Region) -> Region:
        return Region(a & b for a, b in zip(self, other, strict=True))

    def issubset(self, other: Region) -> bool:
        return not self or all(a.issubset(b) for a, b in zip(self, other, strict=True))

    def locate(self, part: Region) -> Region:
        return Region(a.locate(b) for a, b in zip(self, part, strict=True))

    @property
    def is_contiguous(self) -> bool:
        return all(span.is_contiguous for span in self)

    def selector(self) -> tuple[slice, ...] | tuple[NDArray[np.int64], ...]:
        """Return a NumPy index for these positions: slices where possible (a view), else an open grid (a copy)."""
        if self.is_contiguous:
            return tuple(span.as_slice() for span in self)
        return np.ix_(*(span.indices for span in self))

    def run_boxes(self) -> Iterator[Region]:
        """Yield the plain boxes, one per combination of runs, in row-major order."""
        for runs in product(*(span.runs for span in self)):
            yield Region.box(*runs)

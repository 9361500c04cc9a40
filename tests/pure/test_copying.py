"""Opening windows, and copying between scattered positions."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import WindowError
from rma_mm.geometry.span import Span
from rma_mm.windows import open_window
from rma_mm.windows.base import Patch
from rma_mm.windows.boxes.copying import paired_views, stretches
from rma_mm.windows.boxes.runs import runs_of


def test_unknown_flavour_names_the_valid_ones() -> None:
    with pytest.raises(WindowError, match=r"'nonesuch'.*shared, allocated, created"):
        open_window("nonesuch", None, 0)  # type: ignore[arg-type]


def test_no_mpi_until_a_window_is_opened() -> None:
    code = (
        "import sys, rma_mm.windows, rma_mm.windows.base, rma_mm.windows.waiting;"
        "sys.exit('mpi4py' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


subsets = st.sets(st.integers(0, 40), max_size=30).map(lambda chosen: Span((i, i + 1) for i in chosen))


@given(subsets, st.integers(1, 5), st.integers(1, 4))
def test_stretches_pair_every_position_in_order(span: Span, block: int, parts: int) -> None:
    other = Span.cyclic(41 * 20, block, parts, 0).take(Span.range(0, len(span)))
    for source, target in ((span, other), (other, span)):
        pairs = [
            (s.source + i * s.source_period + j, s.target + i * s.target_period + j)
            for s in stretches(source, target)
            for i in range(s.blocks)
            for j in range(s.block)
        ]
        assert pairs == list(zip(source.indices, target.indices, strict=True))


@given(subsets, subsets)
def test_paired_views_copy_like_fancy_indexing(rows: Span, cols: Span) -> None:
    source = np.arange(41 * 41).reshape(41, 41)
    target = np.zeros((len(rows), len(cols)), source.dtype)
    packed = Span.range(0, len(rows)), Span.range(0, len(cols))
    for write, read in paired_views(source, (rows, cols), target, packed):
        write[...] = read
    np.testing.assert_array_equal(target, source[np.ix_(rows.indices, cols.indices)])


small = st.sets(st.integers(0, 11)).map(lambda chosen: Span((i, i + 1) for i in chosen))


@given(rows=small, cols=small, turned=st.tuples(st.booleans(), st.booleans()))
def test_stretches_of_boxes_are_all_of_them(rows: Span, cols: Span, turned: tuple[bool, bool]) -> None:
    """Each stretch lies together on both sides, and no two that follow each other could be one."""
    strides = (1, 12) if turned[0] else (12, 1), (1, 13) if turned[1] else (12, 1)
    packed = Span.range(1, 1 + len(rows)), Span.range(0, len(cols))
    found = runs_of(Patch(64, strides[0], rows, cols), packed, strides[1], 8)
    source, target = np.arange(144.0), np.zeros(156)
    for at, to, size in zip(*(each // 8 for each in found), strict=True):
        target[to : to + size] = source[at : at + size]
    values = source.reshape(12, 12, order="F" if turned[0] else "C")[np.ix_(rows.indices, cols.indices)]
    placed = target.reshape(13, 12, order="F" if turned[1] else "C")[np.ix_(*(each.indices for each in packed))]
    np.testing.assert_array_equal(placed, values)
    assert found.sizes.sum() == 8 * values.size
    together = (found.far[1:] == (found.far + found.sizes)[:-1]) & (found.near[1:] == (found.near + found.sizes)[:-1])
    assert not together.any()

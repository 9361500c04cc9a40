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
from rma_mm.windows.copying import paired_views, stretches


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

"""Generated matrices: the same elements whoever makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.elements.dtypes import SUPPORTED
from rma_mm.runtime.files.generated import generated


@given(
    dtype=st.sampled_from(SUPPORTED),
    rows=st.lists(st.integers(0, 2**40), max_size=40),
    cols=st.lists(st.integers(0, 2**40), max_size=40),
    seed=st.integers(0, 2**70),
    data=st.data(),
)
def test_an_element_depends_on_its_place_only(dtype: Any, rows: Any, cols: Any, seed: int, data: st.DataObject) -> None:
    """Any part is the part of the whole."""
    f = generated(seed, "A", dtype)
    whole = f(np.array(rows, np.int64)[:, None], np.array(cols, np.int64)[None])
    assert whole.dtype == dtype
    assert whole.shape == (len(rows), len(cols))
    some = data.draw(st.lists(st.sampled_from(range(len(rows))), max_size=5)) if rows else []
    part = f(np.array([rows[i] for i in some], np.int64)[:, None], np.array(cols, np.int64)[None])
    assert part.tobytes() == np.ascontiguousarray(whole[some]).tobytes()


def test_blocks_do_not_show() -> None:
    """Wider and higher than the blocks in which elements are made."""
    rows, cols = np.ogrid[0:3, 0:40000]
    f = generated(0, "B", "float64")
    assert (f(rows, cols)[:, 20000:20010] == f(rows, cols[:, 20000:20010])).all()


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
def test_values_are_spread(dtype: Any) -> None:
    """Seeds, operands, rows and columns give other values; floats fill [-1, 1)."""
    rows, cols = np.ogrid[0:200, 0:100]
    x = generated(0, "A", dtype)(rows, cols)
    wide = x.astype(complex) if dtype.kind == "c" else x.astype(float)
    for other in (generated(1, "A", dtype), generated(0, "B", dtype)):
        assert (other(rows, cols) != x).mean() > 0.4
    assert (x[1:] != x[:-1]).mean() > 0.4
    assert (x[:, 1:] != x[:, :-1]).mean() > 0.4
    if dtype.kind not in "biu":
        parts = [wide.real, wide.imag] if dtype.kind == "c" else [wide]
        for part in parts:
            assert -1 <= part.min() < -0.98
            assert 0.97 < part.max() < 1
            assert abs(part.mean()) < 0.02
    elif dtype.kind != "b":
        low = 0 if dtype.kind == "u" else -8
        assert set(np.unique(x).tolist()) == set(range(low, low + 17))


def test_pinned_values() -> None:
    """Results reported for a seed stay reproducible from version to version."""
    rows, cols = np.ogrid[0:2, 0:2]
    assert generated(0, "A", "int8")(rows, cols).tolist() == [[3, 7], [8, 2]]

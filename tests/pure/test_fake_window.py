"""The fake window conforms, and is as unhelpful as it should be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rma_mm.errors import WindowError
from rma_mm.geometry.span import Span
from rma_mm.windows import open_window
from rma_mm.windows.base import Patch
from rma_mm.windows.copying import paired_views, stretches
from tests.conformance import conform
from tests.fake_window import FakeFabric, FakeWindow
from tests.thorough import usually


class FakeWorld:
    """One virtual rank's view of a fabric."""

    def __init__(self, fabric: FakeFabric, rank: int) -> None:
        self.fabric, self.rank, self.size, self.node_of = fabric, rank, fabric.size, fabric.nodes

    def barrier(self) -> None:
        self.fabric.barrier.wait()

    def open(self, nbytes: int, chunk_bytes: int | None = None) -> FakeWindow:
        return self.fabric.open(self.rank, nbytes)


def on_ranks(fabric: FakeFabric, body: Callable[[FakeWorld], None]) -> None:
    """Run `body` on every virtual rank; the error of the rank that failed first is raised."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            body(FakeWorld(fabric, rank))
        except BaseException as error:
            errors.append(error)
            fabric.abort()

    with ThreadPoolExecutor(fabric.size) as pool:
        list(pool.map(run, range(fabric.size)))
    if errors:
        raise errors[0]


NODES = ((0,), (0, 0, 1), (0, 1, 2, 3), (0, 0), (0, 1), (0, 1, 0, 1, 0, 1))


@pytest.mark.parametrize("nodes", usually(3, NODES, several=False), ids=str)
def test_conforms(nodes: tuple[int, ...]) -> None:
    on_ranks(FakeFabric(len(nodes), nodes, seed=1), conform)


def test_reading_early_fails() -> None:
    fabric = FakeFabric(1)
    window = fabric.open(0, 8)
    window.local[:] = 1
    origin = np.zeros((1, 8), np.uint8)
    row = Span.range(0, 1), Span.range(0, 8)
    transfer = window.get(0, Patch(0, (8, 1), *row), origin, *row)
    transfer.start()
    assert (origin == 255).all()
    transfer.wait()
    assert (origin == 1).all()


def test_forgetting_to_flush_fails() -> None:
    fabric = FakeFabric(1)
    window = fabric.open(0, 8)
    window.local[:] = 1
    row = Span.range(0, 1), Span.range(0, 8)
    transfer = window.accumulate(0, Patch(0, (8, 1), *row), np.ones((1, 8), np.uint8), *row)
    transfer.start()
    transfer.wait()
    assert (window.local == 1).all()
    window.flush()
    assert (window.local == 2).all()


def test_one_start_at_a_time() -> None:
    window = FakeFabric(1).open(0, 8)
    row = Span.range(0, 1), Span.range(0, 8)
    transfer = window.get(0, Patch(0, (8, 1), *row), np.ones((1, 8), np.uint8), *row)
    transfer.start()
    with pytest.raises(WindowError, match="started again"):
        transfer.start()


def test_unknown_flavour_names_the_valid_ones() -> None:
    with pytest.raises(WindowError, match=r"'nonesuch'.*shared, allocated, created"):
        open_window("nonesuch", None, 0)  # type: ignore[arg-type]


def test_no_mpi_until_a_window_is_opened() -> None:
    code = (
        "import sys, rma_mm.windows, rma_mm.windows.base, tests.fake_window, rma_mm.windows.waiting;"
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

"""What every window must do, written from the view of one rank.

`tests/mpi/test_windows.py` runs `WindowConformance` on the package's windows, `tests/mpi/test_flavours.py` on others.
All ranks of a world run the same method; the worlds end a run in which one of them fails.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from rma_mm.elements.reduction import ADDABLE, REDUCTIONS
from rma_mm.errors import ClosedError, DtypeError, WindowError
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.span import EMPTY, Span
from rma_mm.windows.base import Counters, Patch, Window
from tests.tiles import SPANS, Array, Tile, World, buffer, filled, reset, settle


class WindowConformance:
    """One method a property."""

    def case_get_patches(self, world: World) -> None:
        """Every kind of patch, into packed and into scattered positions, in every pair of orders."""
        for order in "CF":
            tile = Tile((24, 30), order=order)
            window = filled(world, tile)
            for near_order in "CFS":
                for name, (rows, cols) in SPANS.items():
                    for rank in range(world.size):
                        expected = tile.values(rank)[np.ix_(rows.indices, cols.indices)]
                        self._get_packed(window, rank, tile.patch(rows, cols), expected, near_order, name)
                        self._get_scattered(window, rank, tile.patch(rows, cols), expected, near_order, name)
            window.close()

    def _get_packed(self, window: Window, rank: int, patch: Patch, expected: Array, order: str, name: str) -> None:
        origin = buffer(patch.shape, expected.dtype, order)
        transfer = window.get(rank, patch, origin, Span.range(0, patch.shape[0]), Span.range(0, patch.shape[1]))
        for _ in range(2):
            transfer.start()
            transfer.wait()
            assert transfer.done()
            np.testing.assert_array_equal(origin, expected, err_msg=f"{name} of rank {rank} into {order}")
            origin[...] = -1
        transfer.close()

    def _get_scattered(self, window: Window, rank: int, patch: Patch, expected: Array, order: str, name: str) -> None:
        rows, cols = Span.cyclic(60, 2, 2, 1).take(Span.range(0, patch.shape[0])), Span.cyclic(90, 5, 2, 0)
        cols = cols.take(Span.range(0, patch.shape[1]))
        origin = buffer((60, 90), expected.dtype, order)
        wanted = origin.copy()
        wanted[np.ix_(rows.indices, cols.indices)] = expected
        transfer = window.get(rank, patch, origin, rows, cols)
        transfer.start()
        transfer.wait()
        np.testing.assert_array_equal(origin, wanted, err_msg=f"{name} of rank {rank} into scattered {order}")
        transfer.close()

    def case_get_long_stretches(self, world: World) -> None:
        """Tiles and bands of rows that are one stretch of memory, into arrays where they are not, and back."""
        for order in "CF":
            tile = Tile((90, 250), np.float64, order)
            window = filled(world, tile)
            shapes = (
                (Span.range(0, 90), Span.range(0, 250)),
                (Span.range(13, 77), Span.range(0, 249)),
                (Span([(0, 40), (50, 90)]), Span.range(0, 250)),
            )
            for (rows, cols), rank in product(shapes, {world.rank, (world.rank + 1) % world.size}):
                expected = tile.values(rank)[np.ix_(rows.indices, cols.indices)]
                for near_order in "CFS":
                    self._get_packed(window, rank, tile.patch(rows, cols), expected, near_order, "long")
                    origin = buffer((120, 300), expected.dtype, near_order)
                    to = Span.range(7, 7 + len(rows)), Span.range(9, 9 + len(cols))
                    transfer = window.get(rank, tile.patch(rows, cols), origin, *to)
                    transfer.start()
                    transfer.wait()
                    np.testing.assert_array_equal(origin[np.ix_(to[0].indices, to[1].indices)], expected)
                    transfer.close()
            window.close()

    def case_accumulate_concurrently(self, world: World) -> None:
        """All ranks add patches to rank 0 at once, its own part included; nothing is lost or spilt."""
        for order in "CF":
            tile = Tile((24, 30), np.float64, order)
            window = filled(world, tile)
            wanted = tile.values(0)
            for name, (rows, cols) in SPANS.items():
                origin = buffer((30, 40), np.float64, "CFS"[world.rank % 3])
                origin[...] = world.rank + 1
                here = Span.cyclic(60, 3, 2, 0).take(Span.range(0, len(rows)))
                origin = np.vstack([origin, origin]) if world.rank % 2 else np.asfortranarray(np.vstack([origin] * 2))
                transfer = window.accumulate(0, tile.patch(rows, cols), origin, here, Span.range(1, 1 + len(cols)))
                for _ in range(3):
                    transfer.start()
                    transfer.wait()
                window.flush()
                transfer.close()
                settle(world, window)
                wanted[np.ix_(rows.indices, cols.indices)] += 3 * world.size * (world.size + 1) / 2
                if world.rank == 0:
                    np.testing.assert_array_equal(tile.local(world, window), wanted, err_msg=f"{name} {order}")
                world.barrier()
            window.close()

    def case_accumulate_dtypes(self, world: World) -> None:
        """Every operation does on every element type that it has what NumPy's function for it does."""
        for op, dtype in [(op, dtype) for op, each in REDUCTIONS.items() for dtype in sorted(each.types, key=str)]:
            add, tile = REDUCTIONS[op].add, Tile((4, 6), dtype)
            window = filled(world, tile)
            origin = tile.values(world.rank + 3)
            rows, cols = Span.range(0, 4), Span.cyclic(6, 2, 2, 0)
            transfer = window.accumulate(0, tile.patch(rows, cols), origin, rows, cols, op=op)
            transfer.start()
            transfer.wait()
            window.flush()
            settle(world, window)
            if world.rank == 0:
                wanted = tile.values(0)
                for rank in range(world.size):
                    wanted[:, cols.indices] = add(wanted, tile.values(rank + 3))[:, cols.indices]
                np.testing.assert_array_equal(tile.local(world, window), wanted, err_msg=f"{op} {dtype}")
            transfer.close()
            window.close()

    def case_get_dtypes(self, world: World) -> None:
        """Every element type can be moved, those unknown to MPI too."""
        for dtype in sorted(ADDABLE | {np.dtype(np.float16)}, key=str):
            tile = Tile((5, 6), dtype)
            window = filled(world, tile)
            origin = np.zeros((5, 6), dtype)
            transfer = window.get((world.rank + 1) % world.size, tile.patch(*tile.whole()), origin, *tile.whole())
            transfer.start()
            transfer.wait()
            np.testing.assert_array_equal(origin, tile.values((world.rank + 1) % world.size), err_msg=str(dtype))
            transfer.close()
            window.close()

    def case_peek(self, world: World) -> None:
        """Stretches are read as they lie, own ones too, and nothing is counted."""
        tile = Tile((5, 6), np.int32)
        window = filled(world, tile)
        for rank in range(world.size):
            lines = np.zeros((3, 8), np.uint8)
            window.peek(rank, [tile.offset + 24 * row + 8 for row in (4, 0, 1)], lines)
            np.testing.assert_array_equal(lines.view(np.int32), tile.values(rank)[[4, 0, 1], 2:4])
        assert window.counters == Counters()
        world.barrier()
        window.close()

    def case_refused(self, world: World) -> None:
        """What cannot be served raises before anything is started, and harms nothing."""
        tile = Tile((4, 6), np.float16)
        window = filled(world, tile)
        origin = np.ones((4, 6), np.float16)
        rows, cols = tile.whole()
        assert not FLAVOURS[window.flavour].accumulates(np.float16)
        with pytest.raises(DtypeError, match="float16"):
            window.accumulate(0, tile.patch(rows, cols), origin, rows, cols)
        part = Span.range(0, 2), Span.range(0, 2)
        with pytest.raises(DtypeError, match="MIN"):  # NaN would be lost
            window.accumulate(0, tile.patch(*part), np.ones((2, 2), np.float32), *part, op="MIN")
        with pytest.raises(WindowError, match="SUM, MIN, MAX, LOR"):
            window.accumulate(0, tile.patch(rows, cols), origin, rows, cols, op="XOR")
        with pytest.raises(WindowError, match="do not match"):
            window.get(0, tile.patch(rows, cols), origin, rows, Span.range(0, 5))
        with pytest.raises(WindowError, match="leave the origin"):
            window.get(0, tile.patch(rows, cols), origin[:2], rows, cols)
        with pytest.raises(WindowError, match="leave the"):
            window.get(0, tile.patch(Span.range(1, 5), cols), origin, rows, cols)
        with pytest.raises(WindowError, match="is not one of"):
            window.get(world.size, tile.patch(rows, cols), origin, rows, cols)
        with pytest.raises(WindowError, match="2-D"):
            window.get(0, tile.patch(rows, cols), origin[0], rows, cols)
        with pytest.raises(WindowError, match="leave"):
            window.fetch_add(0, tile.nbytes - 4, 1)
        with pytest.raises(WindowError, match="leaves"):
            window.view(world.rank, tile.nbytes - 4, (2, 2), (2, 1), np.float32)
        origin.flags.writeable = False
        with pytest.raises(WindowError, match="writeable"):
            window.get(0, tile.patch(rows, cols), origin, rows, cols)
        settle(world, window)
        np.testing.assert_array_equal(tile.local(world, window), tile.values(world.rank))
        window.close()

    def case_fetch_add(self, world: World) -> None:
        """Tickets drawn by all ranks at once are unique and complete."""
        window = world.open(16)
        window.local[:] = 0
        settle(world, window)
        each = 50
        tile = Tile((world.size, each), np.int64, offset=0)
        drawn = world.open(tile.nbytes)
        mine = [window.fetch_add(world.size - 1, 8, 1) for _ in range(each)]
        assert mine == sorted(mine)
        tile.local(world, drawn)[...] = np.reshape(mine, (1, each))
        settle(world, drawn)
        everyone = np.zeros((world.size, each), np.int64)
        for rank in range(world.size):
            here = Span.range(rank, rank + 1), Span.range(0, each)
            transfer = drawn.get(rank, tile.patch(*here), everyone, *here)
            transfer.start()
            transfer.wait()
            transfer.close()
        np.testing.assert_array_equal(np.sort(everyone.ravel()), np.arange(world.size * each))
        world.barrier()
        assert window.fetch_add(world.size - 1, 8, 0) == world.size * each
        drawn.close()
        window.close()

    def case_flush(self, world: World) -> None:
        """After the origin's flush and a barrier the target sees what was added, by load and by get."""
        tile = Tile((3, 5))
        window = filled(world, tile)
        right = (world.rank + 1) % world.size
        origin = np.ones((3, 5), np.float32)
        add = window.accumulate(right, tile.patch(*tile.whole()), origin, *tile.whole())
        back = np.empty((3, 5), np.float32)
        get = window.get(right, tile.patch(*tile.whole()), back, *tile.whole())
        for step in range(1, 6):
            add.start()
            add.wait()
            origin[...] = 1
            window.flush()
            settle(world, window)
            np.testing.assert_array_equal(tile.local(world, window), tile.values(world.rank) + step)
            get.start()
            get.wait()
            np.testing.assert_array_equal(back, tile.values(right) + step)
            world.barrier()
        window.close()

    def case_many_under_way(self, world: World) -> None:
        """More operations than may be outstanding; each of many transfers is its own."""
        tile = Tile((1, 300), np.int32)
        window = filled(world, tile)
        target = (world.rank + 1) % world.size
        row = Span.range(0, 1)
        inbox = np.zeros((1, 300), np.int32)
        gets = [
            window.get(target, tile.patch(row, Span.range(i, i + 1)), inbox, row, Span.range(i, i + 1))
            for i in range(300)
        ]
        for transfer in gets:
            transfer.start()
        for transfer in reversed(gets):
            transfer.wait()
            transfer.close()
        np.testing.assert_array_equal(inbox, tile.values(target))
        settle(world, window)
        ones = np.ones((1, 300), np.int32)
        adds = [window.accumulate(target, tile.patch(row, s), ones, row, s) for s in Span.range(0, 300).pieces(1)]
        for transfer in adds:
            transfer.start()
        window.flush()
        settle(world, window)
        np.testing.assert_array_equal(tile.local(world, window), tile.values(world.rank) + 1)
        window.close()

    def case_small_chunks(self, world: World) -> None:
        """Transfers above the chunk size are cut by rows, and by columns where one row is too long."""
        for chunk in (4, 20, 400):
            for order in "CF":
                tile = Tile((12, 30), order=order)
                window = filled(world, tile, chunk)
                target = (world.rank + 1) % world.size
                rows, cols = Span.cyclic(12, 2, 2, 1), Span.range(1, 30)
                origin = np.zeros((len(rows), len(cols)), np.float32)
                packed = Span.range(0, len(rows)), Span.range(0, len(cols))
                get = window.get(target, tile.patch(rows, cols), origin, *packed)
                get.start()
                get.wait()
                np.testing.assert_array_equal(origin, tile.values(target)[np.ix_(rows.indices, cols.indices)])
                world.barrier()
                add = window.accumulate(target, tile.patch(rows, cols), origin, *packed)
                add.start()
                add.wait()
                window.flush()
                settle(world, window)
                wanted = tile.values(world.rank)
                wanted[np.ix_(rows.indices, cols.indices)] *= 2
                np.testing.assert_array_equal(tile.local(world, window), wanted)
                window.close()

    def case_counters(self, world: World) -> None:
        """Words are the elements moved; own traffic counts nothing; the node decides the kind of word."""
        tile = Tile((8, 10))
        window = filled(world, tile)
        assert window.counters == Counters()
        rows, cols = Span.cyclic(8, 2, 2, 0), Span.range(1, 8)
        origin = np.zeros((8, 10), np.float32)
        for rank in range(world.size):
            for transfer in (
                window.get(rank, tile.patch(rows, cols), origin, rows, cols),
                window.accumulate(rank, tile.patch(rows, cols), origin, rows, cols),
            ):
                reset(window.counters)
                assert window.counters == Counters()
                transfer.start()
                transfer.wait()
                counted = replace(window.counters)
                words = 0 if rank == world.rank else len(rows) * len(cols)
                near = world.node_of[rank] == world.node_of[world.rank]
                assert (counted.words_intra, counted.words_inter) == ((words, 0) if near else (0, words))
                assert counted.messages <= 2 * (rank != world.rank)
                transfer.start()
                transfer.wait()
                assert window.counters.words_intra + window.counters.words_inter == 2 * words
                window.flush()
        reset(window.counters)
        window.fetch_add(world.rank, 0, 1)
        assert window.counters == Counters()
        following = (world.rank + 1) % world.size
        window.fetch_add(following, 0, 1)
        is_far = world.node_of[following] != world.node_of[world.rank]
        assert window.counters == Counters(0, 0, int(world.size > 1), int(is_far))
        window.close()

    def case_zero_sizes(self, world: World) -> None:
        """Ranks may expose nothing, and boxes may be empty."""
        window = world.open(0 if world.rank % 2 == 0 else 80)
        assert window.local.shape == (window.nbytes,) == ((0,) if world.rank % 2 == 0 else (80,))
        window.local[:] = world.rank
        settle(world, window)
        for rank in range(world.size):
            empty = Patch(0, (4, 1), EMPTY, Span.range(0, 4))
            for transfer in (
                window.get(rank, empty, np.zeros((0, 4)), EMPTY, Span.range(0, 4)),
                window.accumulate(rank, empty, np.zeros((3, 4)), EMPTY, Span.range(0, 4)),
            ):
                transfer.start()
                transfer.wait()
                transfer.close()
        assert window.counters == Counters()
        if world.size > 1:
            row = Span.range(0, 1), Span.range(0, 80)
            origin = np.zeros((1, 80), np.uint8)
            transfer = window.get(1, Patch(0, (80, 1), *row), origin, *row)
            transfer.start()
            transfer.wait()
            assert (origin == 1).all()
        empty_view = window.view(world.rank, 0, (0, 3), (3, 1), np.float64)
        assert empty_view is not None
        assert empty_view.shape == (0, 3)
        window.close()
        nothing = world.open(0)
        nothing.flush()
        settle(world, nothing)
        nothing.close()

    def case_views(self, world: World) -> None:
        """A view is the memory itself: own always, a mate's where the window reaches it."""
        tile = Tile((6, 7), order="F")
        window = filled(world, tile)
        assert window.reaches(world.rank)
        for rank in range(world.size):
            seen = window.view(rank, tile.offset, tile.shape, tile.strides, tile.dtype)
            assert (seen is not None) == window.reaches(rank)
            if seen is not None:
                np.testing.assert_array_equal(seen, tile.values(rank))
                assert seen.strides == (4, 24)
        world.barrier()
        tile.local(world, window)[...] += 1
        settle(world, window)
        for rank in range(world.size):
            if window.reaches(rank):
                seen = window.view(rank, tile.offset, tile.shape, tile.strides, tile.dtype)
                np.testing.assert_array_equal(seen, tile.values(rank) + 1)
        origin = np.zeros(tile.shape, np.float32)
        transfer = window.get(world.rank, tile.patch(*tile.whole()), origin, *tile.whole())
        transfer.start()
        transfer.wait()
        np.testing.assert_array_equal(origin, tile.values(world.rank) + 1)
        window.close()

    def case_close(self, world: World) -> None:
        """Windows and transfers close in any order, more than once; use afterwards is ClosedError."""
        tile = Tile((3, 4))
        first, second, third = (filled(world, tile) for _ in range(3))
        whole = tile.whole()
        origin = np.zeros((3, 4), np.float32)
        prepared = [
            make((world.rank + 1) % world.size, tile.patch(*whole), origin, *whole)
            for make in (second.get, second.accumulate)
        ]
        prepared[0].close()
        with pytest.raises(ClosedError, match="transfer"):
            prepared[0].start()
        second.close()
        third.close()
        second.close()
        with pytest.raises(ClosedError, match="window"):
            prepared[1].start()
        for transfer in prepared:
            transfer.close()
        flavour = second.flavour
        for use in (
            second.flush,
            second.sync,
            lambda: second.reaches(0),
            lambda: second.fetch_add(0, 0, 1),
            lambda: second.peek(0, [0], np.zeros((1, 1), np.uint8)),
            lambda: second.view(world.rank, 0, (1,), (1,), np.uint8),
            lambda: second.get(0, tile.patch(*whole), origin, *whole),
            lambda: second.accumulate(0, tile.patch(*whole), origin, *whole),
        ):
            with pytest.raises(ClosedError, match=flavour):
                use()
        np.testing.assert_array_equal(tile.local(world, first), tile.values(world.rank))
        first.close()

    def case_close_completes(self, world: World) -> None:
        """What is still under way is complete when the window is gone."""
        tile = Tile((40, 50))
        window = filled(world, tile)
        origin = np.zeros(tile.shape, np.float32)
        rank = (world.rank + 1) % world.size
        transfer = window.get(rank, tile.patch(*tile.whole()), origin, *tile.whole())
        transfer.start()
        window.close()
        assert transfer.done()
        np.testing.assert_array_equal(origin, tile.values(rank))
        transfer.close()


def conform(world: World) -> None:
    """All cases on one world, one after the other."""
    for name in sorted(vars(WindowConformance)):
        if name.startswith("case_"):
            try:
                getattr(WindowConformance(), name)(world)
            except BaseException as error:
                error.add_note(f"in {name}")
                raise

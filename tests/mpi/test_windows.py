"""The MPI windows conform on real ranks, and what is theirs alone."""

from __future__ import annotations

import mmap
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from rma_mm.elements.reduction import ADDABLE
from rma_mm.errors import MemoryLimitError, WindowError
from rma_mm.flavours import FLAVOURS
from rma_mm.geometry.span import Span
from rma_mm.windows import absent, open_window
from rma_mm.windows import mpi as transfers
from rma_mm.windows import shared as shared_module
from rma_mm.windows.base import Patch, Window
from rma_mm.windows.boxes.datatypes import ADDED_AS
from rma_mm.windows.hosts import huge_pages
from rma_mm.windows.hosts.huge_pages import HUGE, Remapped, collapse
from rma_mm.windows.ranks import node_map
from rma_mm.windows.waiting import barrier
from tests.conformance import WindowConformance, conform
from tests.launch import parallel
from tests.tiles import Array, reset, settle

NODES = ("node", "cliques", "nolocal")


def require_present(flavour: str) -> None:
    """Skip the test where there are no such windows."""
    if reason := absent(flavour):
        pytest.skip(f"{flavour}: {reason}")


class MpiWorld:
    """One rank's view of a communicator."""

    def __init__(self, comm: MPI.Intracomm, flavour: str) -> None:
        require_present(flavour)
        self.comm, self.flavour, self.rank, self.size = comm, flavour, comm.rank, comm.size
        self.node_of = node_map(comm)
        self.barrier = partial(barrier, comm)  # which gives progress to every library

    def open(self, nbytes: int, chunk_bytes: int | None = None) -> Window:
        return open_window(self.flavour, self.comm, nbytes, node_of=self.node_of, chunk_bytes=chunk_bytes)


@parallel(ranks=(1, 3, 6), env=NODES)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_conforms(comm: MPI.Intracomm, flavour: str) -> None:
    conform(MpiWorld(comm, flavour))


@parallel(ranks=(3,), env=("tcp",))
def test_conforms_over_tcp(comm: MPI.Intracomm) -> None:
    conform(MpiWorld(comm, "shared"))


@parallel(ranks=(2, 3, 6), env=("ucx_tcp",))
@pytest.mark.parametrize("flavour", ["ucx", "ucx_arrays"])
def test_ucx_conforms_over_tcp(comm: MPI.Intracomm, flavour: str) -> None:
    conform(MpiWorld(comm, flavour))


@parallel(ranks=(1, 3), env=NODES)
def test_node_map(comm: MPI.Intracomm) -> None:
    nodes = node_map(comm)
    assert comm.allgather(nodes) == [nodes] * comm.size
    assert nodes[0] == 0
    assert set(nodes) == set(range(max(nodes) + 1))
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert nodes.count(nodes[comm.rank]) == node.size
    node.Free()


@parallel(ranks=(3, 6), env=("node",))
@pytest.mark.parametrize("case", ["case_accumulate_concurrently", "case_views", "case_counters", "case_get_patches"])
def test_nodes_may_be_finer_than_the_true_ones(comm: MPI.Intracomm, case: str) -> None:
    world = MpiWorld(comm, "shared")
    world.node_of = tuple(rank % 2 for rank in range(comm.size))
    getattr(WindowConformance(), case)(world)


@parallel(ranks=(2, 4), env=("node", "cliques"))
def test_shared_reaches_the_node(comm: MPI.Intracomm) -> None:
    nodes = node_map(comm)
    window = open_window("shared", comm, 8)
    assert [window.reaches(rank) for rank in range(comm.size)] == [node == nodes[comm.rank] for node in nodes]
    window.close()


def huge_bytes(memory: Array) -> int:
    """Bytes of huge pages under shared memory, as the system tells of the addresses where it is mapped."""
    at, found = memory.ctypes.data, 0
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(span[1], 16) <= at < int(span[2], 16)
        elif is_here and line.startswith("ShmemPmdMapped:"):
            found = 1024 * int(line.split()[1])
    return found


@parallel(ranks=(1, 2, 3), env=("node",))
@pytest.mark.parametrize("is_slow", [False, True])
def test_large_shared_memory_lies_in_huge_pages(comm: MPI.Intracomm, is_slow: bool) -> None:
    nbytes = 7 * HUGE + 4096  # no part but the first starts at a multiple
    before = Path("/proc/self/maps").read_text().count("/dev/shm")
    usual = huge_pages.PATIENCE
    huge_pages.PATIENCE = -1.0 if is_slow else 10.0
    try:
        window = open_window("shared", comm, nbytes)
    finally:
        huge_pages.PATIENCE = usual
    here = window.view(comm.rank, 0, (1, nbytes), (nbytes, 1), np.dtype(np.uint8))
    assert here is not None
    if comm.size > 1:
        trial = np.frombuffer(mmap.mmap(-1, 3 * HUGE), np.uint8)  # does this system put any under shared memory?
        trial = Remapped().shown(trial)
        collapse(trial)
        has_any = all(comm.allgather(huge_bytes(trial) > 0))
        assert not has_any or huge_bytes(here) >= (4 if is_slow else 6) * HUGE
        assert not is_slow or huge_bytes(here) <= 4 * HUGE
    here[...] = comm.rank + 1
    huge_pages.note_product(2 * huge_pages.WORTH)
    assert not is_slow or huge_bytes(here) <= 4 * HUGE
    huge_pages.note_product(2 * huge_pages.WORTH)
    if comm.size > 1:
        assert not has_any or huge_bytes(here) >= 6 * HUGE
    comm.Barrier()
    following = (comm.rank + 1) % comm.size
    there = window.view(following, 0, (1, nbytes), (nbytes, 1), np.dtype(np.uint8))
    assert there is not None and (there == following + 1).all()
    assert window.fetch_add(following, 5 * HUGE, 0) == int.from_bytes(bytes([following + 1]) * 8)  # MPI's own mapping
    comm.Barrier()
    del here, there
    window.close()
    assert Path("/proc/self/maps").read_text().count("/dev/shm") <= before


@parallel(ranks=(2,), env=("node",))
def test_too_little_shared_memory_is_one_error_on_all_ranks(comm: MPI.Intracomm) -> None:
    true_free = shared_module.free_segment_bytes
    shared_module.free_segment_bytes = lambda: 10_000
    try:
        with pytest.raises(MemoryLimitError) as caught:
            open_window("shared", comm, 8_000 * comm.rank + 5_000)
    finally:
        shared_module.free_segment_bytes = true_free
    assert "needs 24576 bytes" in str(caught.value)
    assert "10000 are free, 14576 are missing" in str(caught.value)
    assert len(set(comm.allgather(str(caught.value)))) == 1


@parallel(ranks=(2,), env=("node",))
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_one_bad_rank_is_one_error_on_all(comm: MPI.Intracomm, flavour: str) -> None:
    require_present(flavour)
    with pytest.raises(WindowError, match="rank 1: nbytes is -8") as caught:
        open_window(flavour, comm, -8 * comm.rank)
    assert len(set(comm.allgather(str(caught.value)))) == 1


def exposures(rank: int) -> dict[str, Array]:
    """Arrays of float64 that can be exposed, 4 x 6 each."""
    outer = np.zeros((10, 12))
    return {
        "C": np.zeros((4, 6)),
        "F": np.zeros((4, 6), order="F"),
        "part": outer[2 + rank % 2 : 6 + rank % 2, 1:7],
        "F part": np.asfortranarray(outer)[3:7, 5:11],
    }


@parallel(ranks=(1, 3), env=NODES)
@pytest.mark.parametrize("kind", ["C", "F", "part", "F part"])
@pytest.mark.parametrize("flavour", [flavour.name for flavour in FLAVOURS.values() if flavour.takes_arrays])
def test_an_array_is_exposed_in_place(comm: MPI.Intracomm, flavour: str, kind: str) -> None:
    require_present(flavour)
    array = exposures(comm.rank)[kind]
    array[...] = np.arange(24).reshape(4, 6) + 100 * comm.rank
    strides = (array.strides[0] // 8, array.strides[1] // 8)
    window = open_window(flavour, comm, array)
    assert np.shares_memory(window.local, array)
    rows, cols = Span([(0, 1), (2, 4)]), Span.range(1, 5)
    right = (comm.rank + 1) % comm.size
    taken = np.zeros((3, 4))
    packed = Span.range(0, 3), Span.range(0, 4)
    settle(MpiWorld(comm, flavour), window)
    transfer = window.get(right, Patch(0, strides, rows, cols), taken, *packed)
    transfer.start()
    transfer.wait()
    expected = (np.arange(24.0).reshape(4, 6) + 100 * right)[np.ix_(rows.indices, cols.indices)]
    np.testing.assert_array_equal(taken, expected)
    comm.Barrier()
    add = window.accumulate(right, Patch(0, strides, rows, cols), taken, *packed)
    add.start()
    window.flush()
    settle(MpiWorld(comm, flavour), window)
    wanted = np.arange(24.0).reshape(4, 6) + 100 * comm.rank
    wanted[np.ix_(rows.indices, cols.indices)] *= 2
    np.testing.assert_array_equal(array, wanted)
    add.close()
    window.close()


@parallel(ranks=(2,), env=("node",))
@pytest.mark.parametrize("flavour", [flavour.name for flavour in FLAVOURS.values() if flavour.takes_arrays])
def test_what_cannot_be_exposed_is_refused(comm: MPI.Intracomm, flavour: str) -> None:
    require_present(flavour)
    good = np.zeros((4, 6))
    for bad, rule in (
        (good[:, ::-2], "not negative"),
        (good[::-1], "not negative"),
        (good.astype(object), "references"),
    ):
        with pytest.raises(WindowError, match=f"rank 1: .*{rule}"):
            open_window(flavour, comm, bad if comm.rank == 1 else good)
    window = open_window(flavour, comm, np.zeros((0, 6)) if comm.rank else good[:, :1])
    assert window.nbytes == (0 if comm.rank else 3 * 48 + 8)
    window.close()


@parallel(ranks=(2,), env=("node", "nolocal"))
def test_plain_boxes_are_one_call(comm: MPI.Intracomm) -> None:
    window = open_window("allocated", comm, 4000)
    origin = np.zeros((20, 25))
    for rows, cols in (
        (Span.range(0, 20), Span.range(0, 25)),
        (Span.cyclic(20, 3, 2, 1), Span.cyclic(25, 2, 3, 0)),
        (Span([(0, 1), (5, 9)]), Span.range(3, 4)),
    ):
        transfer = window.get(1 - comm.rank, Patch(0, (25, 1), rows, cols), origin, rows, cols)
        reset(window.counters)
        transfer.start()
        transfer.wait()
        assert window.counters.messages == 1
        transfer.close()
    comm.Barrier()
    window.close()


@parallel(ranks=(2,), env=("node",))
def test_each_look_at_a_transfer_moves_several_packets(comm: MPI.Intracomm) -> None:
    """Where MPI emulates a get of 4 MiB, and ranks sleep between two looks, as they do if cores are short."""
    rows, cols = 512, 1024
    tile, found = np.full((rows, cols), comm.rank + 1.0), np.zeros((rows, cols))
    window = open_window("created", comm, tile)
    whole = Span.range(0, rows), Span.range(0, cols)
    transfer = window.get(1 - comm.rank, Patch(0, (cols, 1), *whole), found, *whole)
    barrier(comm)
    transfer.start()
    looks = 0
    while not transfer.done():
        looks += 1
        time.sleep(50e-6)
    assert (found == 2 - comm.rank).all()
    barrier(comm)
    transfer.close()
    window.close()
    # it takes 33; with a packet a look 500, and more on a rank that waits for the other
    assert comm.allreduce(looks, MPI.MIN) < 250


@parallel(ranks=(2,), env=("nolocal",))
@pytest.mark.parametrize("kind", ["get", "accumulate"])
def test_transfers_to_a_rank_of_another_node_follow_one_another(comm: MPI.Intracomm, kind: str) -> None:
    count, rows, cols = 6, 512, 1024
    tile, mine = (np.full((count * rows, cols), value, np.float32) for value in (comm.rank + 1, 5))
    window = open_window("created", comm, tile)
    theirs = 1 - comm.rank
    boxes = [(Span.range(n * rows, (n + 1) * rows), Span.range(0, cols)) for n in range(count)]
    move = getattr(window, kind)
    transfers = [move(theirs, Patch(0, (cols, 1), *box), mine, *box) for box in boxes]
    barrier(comm)
    if comm.rank:
        time.sleep(0.5)  # it serves nothing, so that nothing is over
    for transfer in transfers:
        transfer.start()
    counted = window.counters.messages, window.counters.words_inter
    assert counted == (count, count * rows * cols)  # when they are asked for, and not when it is their turn
    if kind == "accumulate" and not comm.rank:
        assert sum(not transfer.held for transfer in transfers) == 1
    if kind == "accumulate":
        window.flush()
        assert not any(transfer.held for transfer in transfers)
    for transfer in transfers:
        transfer.wait()
        transfer.close()
    assert window.counters.messages == count
    barrier(comm)
    assert (tile == comm.rank + 1 + 5 * (kind == "accumulate")).all()
    assert (mine == (theirs + 1 if kind == "get" else 5)).all()
    window.close()


def test_a_fast_link_has_more_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One push of a million words a second, and as many as take 5 ms; of gets two at least."""
    now = [0.0]
    monkeypatch.setattr(transfers, "perf_counter", lambda: now[0])
    for op, least in ((None, 2), (MPI.SUM, 1)):
        line = transfers.CallLine()

        def begun(words: int, line: transfers.CallLine = line, op: MPI.Op | None = op) -> int:
            """Begin calls of so many words until there is no room."""
            call = SimpleNamespace(words=words)
            line.waiting.clear()
            line.waiting.append(SimpleNamespace(op=op, held=[call]))  # type: ignore[arg-type]
            made = 0
            while line.has_room() and made < 100:
                line.note_begun(MPI.REQUEST_NULL, words)
                made += 1
            return made

        def over(count: int, seconds: float, line: transfers.CallLine = line) -> None:
            for _ in range(count):
                now[0] += seconds
                line.note_over()

        assert begun(100_000) == least
        over(least, 0.1)  # a million words a second
        assert begun(100_000) == least and over(least, 0.1) is None
        assert begun(1000) == 5 and over(5, 1e-4) is None  # ten million
        assert begun(1000) == 50


def test_every_addable_type_has_an_mpi_type() -> None:
    assert set(ADDED_AS) == ADDABLE
